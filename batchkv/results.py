"""From records, in the order in which samples ended, to the result, in the order of the job, without holding either."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from batchkv import records
from batchkv.errors import UserError
from batchkv.io.carried import conformed
from batchkv.io.columns import RESULT_COLUMNS
from batchkv.io.job_blocks import job_blocks
from batchkv.io.read import JobSource
from batchkv.job import carried_columns, read_ids
from batchkv.rows import Rows

# Records in memory at once: a bucket holds those of so many rows, and there are no more buckets than files may be open.
BUCKET_ROWS = 1 << 13
_MAX_BUCKETS = 512
_SORTED_AT_ONCE = 1 << 14  # records between two looks at the buckets


def result_schema(rows: Rows) -> pa.Schema:
    """Columns of the result, the carried ones included."""
    own = {**dict(zip(records.SCHEMA.names, records.SCHEMA.types, strict=True)), "sample_index": pa.int32()}
    own["id"] = pa.string() if rows.id_kind in (None, "string") else pa.int64()
    fields = [pa.field(name, own[name]) for name in (*RESULT_COLUMNS, *_extra_columns(rows))]
    return pa.schema([*fields, *(field.remove_metadata() for field in rows.carried)])


def _extra_columns(rows: Rows) -> list[str]:
    """Columns that only results of scoring have.

    Raises:
        UserError: the job has columns of these names, too.
    """
    extra: list[str] = []
    if rows.has_continuations:
        extra.append("is_greedy")
    if any(params.scores_choices for params in rows.params.distinct):
        extra.append("choice_logprobs")
    taken = set(extra) & set(rows.carried.names)
    if taken:
        raise UserError(f"the result has columns of its own named {', '.join(sorted(taken))}: rename those of the job")
    return extra


def result_blocks(source: JobSource, rows: Rows, ordered: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The result, a block of rows of the job at a time.

    Args:
        source: the job, for ids and carried columns.
        rows: the rows of it.
        ordered: from `in_order`.

    Raises:
        UserError: the job is not what it was when it was read.
        RuntimeError: a sample has no record.
    """
    _check_unchanged(source, rows)
    cursor = _Cursor(ordered)
    first = 0
    schema, extra = result_schema(rows), _extra_columns(rows)
    for one in job_blocks(source):
        block = one.table
        found = cursor.take(first + block.num_rows)
        row = found.column("row").to_numpy() - first
        wanted = rows.params.take(np.arange(first, first + block.num_rows)).column(
            lambda one: one.num_outputs, np.int64
        )
        _check_complete(found, row, wanted, first)
        ids, _, _ = read_ids(block, first, rows.id_kind)
        carried = conformed(carried_columns(block), rows.carried, block.num_rows, block.where)
        columns: dict[str, Any] = {
            "id": ids.cast(schema.field("id").type).take(pa.array(row)),
            "sample_index": found.column("sample"),
            **{name: found.column(name) for name in (*RESULT_COLUMNS[2:], *extra)},
            **{name: carried.column(name).take(pa.array(row)) for name in carried.column_names},
        }
        yield pa.table(columns, schema=schema)
        first += block.num_rows
    _check_unchanged(source, rows)


def _check_unchanged(source: JobSource, rows: Rows) -> None:
    """Ids and carried columns are read again for the results, long after the rows themselves."""
    if source.stamp() != rows.stamp:
        raise UserError(
            f"{source.name} was changed while it ran: what is finished is kept; put back what it was and give the "
            "same command again, or --overwrite to run it as it is now"
        )


def response_lines(
    source: JobSource,
    rows: Rows,
    ordered: Iterable[pa.Table],
    tokenizer: Any,
    *,
    created: int,
    run_id: str,
    served_model: str,
) -> Iterator[str]:
    """The responses to a job of OpenAI Batch requests, as JSON without line ends; arguments as of `result_blocks`.

    Args:
        tokenizer: shows the tokens of log-probabilities.
        created: seconds since 1970.
        run_id: what ids of responses are made of.
        served_model: named in responses to requests that name no model.
    """
    from batchkv.io.openai_batch import response_lines as lines_of

    requests = (one.requests for one in job_blocks(source))
    for asked, block in zip(requests, result_blocks(source, rows, ordered), strict=True):
        if asked is not None:
            yield from lines_of(
                asked, block, created=created, run_id=run_id, tokenizer=tokenizer, served_model=served_model
            )


def in_order(
    batches: Iterable[pa.RecordBatch], num_rows: int, folder: Path | None, num_outputs: int | None = None
) -> Iterator[pa.Table]:
    """Records sorted by row and sample, those of some thousand rows at a time; a row with an error has that alone.

    Args:
        batches: the records in any order.
        num_rows: rows of the job.
        folder: for files of records that are sorted roughly; None makes one if there are too many for memory.
        num_outputs: how many records there are, about; by default one for each row.
    """
    outputs = max(num_outputs or num_rows, num_rows)
    if outputs <= BUCKET_ROWS:
        yield _sorted(pa.Table.from_batches(batches, records.SCHEMA))
        return
    if folder is None:
        with TemporaryDirectory() as scratch:
            yield from in_order(batches, num_rows, Path(scratch), num_outputs)
        return
    bucket_rows = max(BUCKET_ROWS * num_rows // outputs, -(-num_rows // _MAX_BUCKETS), 1)
    paths = [folder / f"bucket-{i:03}.arrow" for i in range(-(-num_rows // bucket_rows))]
    _fill_buckets(batches, bucket_rows, paths)
    for path in paths:
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_stream(file).read_all()
        path.unlink()
        yield _sorted(table)


def _fill_buckets(batches: Iterable[pa.RecordBatch], bucket_rows: int, paths: list[Path]) -> None:
    writers = [pa.ipc.new_stream(pa.OSFile(str(path), "wb"), records.SCHEMA) for path in paths]
    for table in _in_portions(batches):
        bucket = table.column("row").to_numpy() // bucket_rows
        order = np.argsort(bucket, kind="stable")
        table = table.take(pa.array(order))
        ends = np.searchsorted(bucket[order], np.arange(len(paths) + 1))
        for i in np.flatnonzero(np.diff(ends)).tolist():
            writers[i].write_table(table.slice(int(ends[i]), int(ends[i + 1] - ends[i])))
    for writer in writers:
        writer.close()


def _in_portions(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The batches joined to tables of about `_SORTED_AT_ONCE` records."""
    held: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        held.append(batch)
        count += len(batch)
        if count >= _SORTED_AT_ONCE:
            yield pa.Table.from_batches(held, records.SCHEMA)
            held, count = [], 0
    if held:
        yield pa.Table.from_batches(held, records.SCHEMA)


def _sorted(table: pa.Table) -> pa.Table:
    """By row and sample; of a row with an error, the error alone."""
    has_error = pc.is_valid(table.column("error_code"))
    failed = pc.unique(table.column("row").filter(has_error))
    if len(failed):
        table = table.filter(pc.or_(has_error, pc.invert(pc.is_in(table.column("row"), failed))))
    frame = pl.DataFrame({"row": table.column("row"), "sample": table.column("sample")}).with_row_index("at")
    key = [pl.col("row"), pl.col("sample")]
    at = frame.unique(key, keep="first", maintain_order=True).sort(key)["at"]
    return table.take(at.to_arrow())


class _Cursor:
    """Takes records from tables that follow each other."""

    def __init__(self, ordered: Iterable[pa.Table]) -> None:
        self._tables = iter(ordered)
        self._held = records.SCHEMA.empty_table()
        self._is_at_end = False

    def take(self, stop: int) -> pa.Table:
        """Those of the rows before `stop` that were not taken before."""
        while not self._is_at_end and (not len(self._held) or self._held.column("row")[-1].as_py() < stop):
            table = next(self._tables, None)
            self._is_at_end = table is None
            if table is not None:
                self._held = pa.concat_tables([self._held, table])
        count = int(np.searchsorted(self._held.column("row").to_numpy(), stop))
        taken, self._held = self._held.slice(0, count), self._held.slice(count)
        return taken


def _check_complete(found: pa.Table, row: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64], first: int) -> None:
    """No row is lost: each has all samples that it wants, or its error."""
    has_error = np.zeros(len(wanted), np.bool_)
    has_error[row[found.column("error_code").is_valid().to_numpy()]] = True
    missing = np.flatnonzero(np.bincount(row, minlength=len(wanted)) != np.where(has_error, 1, wanted))
    if len(missing):
        raise RuntimeError(f"row {first + missing[0]} has not the records that it must have")
