"""Results are in the order of the job, whatever the order of the records, and no sample is ever missing silently."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkv import results
from batchkv.constraints import ConstraintChecks
from batchkv.errors import RowError
from batchkv.io.columns import RESULT_COLUMNS
from batchkv.io.read import JobSource, open_jobs
from batchkv.io.write import write_table
from batchkv.metrics import RunMetrics
from batchkv.records import SCHEMA, Record, as_batch
from batchkv.results import in_order, result_blocks, result_schema
from batchkv.rows import PromptLimits, Rows, take_in
from batchkv.sampling_params import SamplingParams
from tests.jobs import read_block

TOO_LONG = RowError("too_long", "too long by 1")


def rows_of(source: JobSource) -> tuple[Rows, list[Record]]:
    """The rows of a job of token ids, and the records of those that cannot run."""
    errors: dict[int, RowError] = {}
    checks = ConstraintChecks(None, 1000, ())
    rows = take_in(source, SamplingParams(), None, PromptLimits(1000, None), None, checks, errors.update, RunMetrics())
    return rows, [Record.of_error(row, error) for row, error in errors.items()]


def job_of(**columns: Any) -> JobSource:
    num_rows = len(next(iter(columns.values())))
    return open_jobs(pa.table({"prompt_token_ids": [[1, 2]] * num_rows, **columns}))


def sample_of(row: int, sample: int = 0) -> Record:
    return Record(
        row=row,
        sample=sample,
        finish_reason="length",
        text=f"{row}.{sample}",
        token_ids=np.array([row, sample], np.int32),
        num_prompt_tokens=2,
        num_generated_tokens=2,
    )


def table_of(source: JobSource, records: Sequence[Record], folder: Path | None = None) -> pa.Table:
    """The result of samples with `records`; errors that the rows have are added."""
    rows, failed = rows_of(source)
    batches = [as_batch([record]) for record in [*records, *failed]]
    return pa.concat_tables(result_blocks(source, rows, in_order(batches, rows.num_rows, folder)))


def test_every_column_of_every_sample() -> None:
    source = job_of(id=["a", "b", "c"], n=[2, 1, 1], tag=pa.array([1, 2, 3], pa.int8()))
    logprobs = Record(0, 1, "stop", "x", np.array([7], np.int32), np.array([-0.5], np.float32), 2, 1, 1)
    records = [Record.of_error(2, TOO_LONG), logprobs, sample_of(1), sample_of(0)]
    assert table_of(source, records).to_pydict() == {
        "id": ["a", "a", "b", "c"],
        "sample_index": [0, 1, 0, 0],
        "text": ["0.0", "x", "1.0", None],
        "token_ids": [[0, 0], [7], [1, 0], None],
        "finish_reason": ["length", "stop", "length", "error"],
        "logprobs": [None, [-0.5], None, None],
        "num_prompt_tokens": [2, 2, 2, 0],
        "num_cached_tokens": [0, 1, 0, 0],
        "num_generated_tokens": [2, 1, 2, 0],
        "error_code": [None, None, None, "too_long"],
        "error": [None, None, None, "too long by 1"],
        "tag": [1, 1, 2, 3],
    }


def test_the_columns_and_their_types_do_not_depend_on_the_rows() -> None:
    full = table_of(job_of(id=["a"], x=[1]), [sample_of(0)])
    failed = table_of(job_of(id=["a"], n=[0], x=[1]), [])
    empty = table_of(job_of(id=pa.array([], pa.string()), x=pa.array([], pa.int64())), [])
    assert full.column_names == [*RESULT_COLUMNS, "x"]
    assert failed.schema == empty.schema == full.schema
    assert empty.num_rows == 0
    assert full.schema.field("token_ids").type == pa.list_(pa.int32())
    assert full.schema.field("logprobs").type == pa.list_(pa.float32())


@pytest.mark.parametrize(
    ("ids", "dtype"),
    [
        (None, pa.int64()),
        (pa.array([5], pa.uint8()), pa.int64()),
        (pa.array(["a"], pa.large_string()), pa.string()),
        (pa.nulls(1), pa.string()),
    ],
)
def test_ids_are_integers_or_strings(ids: pa.Array | None, dtype: pa.DataType) -> None:
    source = job_of(x=[1]) if ids is None else job_of(id=ids)
    table = table_of(source, [] if ids is not None and ids.null_count else [sample_of(0)])
    assert table["id"].type == dtype
    assert table["id"].to_pylist() == ([0] if ids is None else ids.to_pylist())


def counts_and_records() -> st.SearchStrategy[tuple[list[int], list[Record]]]:
    """Samples of each row (0: the row has an error), and all of its records in some order, now and then one twice."""

    def records_of(counts: list[int], seed: int) -> list[Record]:
        chosen = random.Random(seed)
        found = [sample_of(row, sample) for row, count in enumerate(counts) for sample in range(count)]
        found += [sample_of(row, 0) for row in chosen.sample(range(len(counts)), len(counts) // 3) if counts[row]]
        found += [Record.of_error(row, TOO_LONG) for row, count in enumerate(counts) if not count]
        found += [sample_of(row, 1) for row, count in enumerate(counts) if not count and chosen.random() < 0.5]
        return chosen.sample(found, len(found))

    counts = st.lists(st.integers(0, 3), max_size=30)
    return counts.flatmap(lambda ns: st.tuples(st.just(ns), st.builds(records_of, st.just(ns), st.integers(0, 99))))


@pytest.mark.parametrize("on_disk", [False, True])
@settings(max_examples=25)
@given(
    case=counts_and_records(),
    at_once=st.integers(1, 4),
    bucket_rows=st.sampled_from([1, 3, 7, 100]),
    buckets=st.sampled_from([2, 512]),
    portion=st.sampled_from([1, 5, 1 << 14]),
)
def test_any_order_of_records_gives_the_same_result(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[list[int], list[Record]],
    at_once: int,
    bucket_rows: int,
    buckets: int,
    portion: int,
    on_disk: bool,
) -> None:
    counts, records = case
    folder = tmp_path_factory.mktemp("buckets") if on_disk else None
    source = job_of(n=[max(count, 1) for count in counts], x=[f"x{row}" for row in range(len(counts))])
    rows, _ = rows_of(source)
    batches = [as_batch(records[at : at + at_once]) for at in range(0, len(records), at_once)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "BUCKET_ROWS", bucket_rows)
        patch.setattr(results, "_MAX_BUCKETS", buckets)
        patch.setattr(results, "_SORTED_AT_ONCE", portion)
        patch.setattr("batchkv.io.read.BLOCK_ROWS", 4)
        table = pa.concat_tables(result_blocks(source, rows, in_order(batches, rows.num_rows, folder)))
    expected = [
        (row, sample, f"{row}.{sample}" if count else None, f"x{row}", None if count else "too_long")
        for row, count in enumerate(counts)
        for sample in range(max(count, 1))
    ]
    names = ("id", "sample_index", "text", "x", "error_code")
    assert list(zip(*(table[name].to_pylist() for name in names), strict=True)) == expected
    assert folder is None or list(folder.iterdir()) == []


def test_blocks_and_files_with_other_columns_are_one_result(tmp_path: Path) -> None:
    parts = [
        {"prompt_token_ids": [[1]], "x": [1], "id": ["a"]},
        {"prompt_token_ids": [[2]], "y": ["why"], "x": [0.5], "id": ["b"]},
        {"prompt_token_ids": [[3]], "id": ["c"]},
    ]
    for number, columns in enumerate(parts):
        write_table(pa.table(columns), tmp_path / f"{number}.parquet")
    table = table_of(open_jobs(tmp_path / "?.parquet"), [sample_of(row) for row in (2, 0, 1)])
    assert table["id"].to_pylist() == ["a", "b", "c"]
    assert table["x"].to_pylist() == [1.0, 0.5, None]
    assert table["y"].to_pylist() == [None, "why", None]
    assert table["text"].to_pylist() == ["0.0", "1.0", "2.0"]


def test_a_limit_gives_the_results_of_the_first_rows() -> None:
    source = replace(job_of(x=[1, 2, 3]), limit=2)
    rows, _ = rows_of(source)
    ordered = in_order([as_batch([sample_of(1), sample_of(0)])], rows.num_rows, None)
    assert pa.concat_tables(result_blocks(source, rows, ordered))["x"].to_pylist() == [1, 2]


@pytest.mark.parametrize("block_rows", [1, 2, 100])
@pytest.mark.parametrize("lost", [(0, 0), (1, 0), (1, 1), (2, 0)])
def test_a_lost_record_is_a_bug_that_names_its_row(
    monkeypatch: pytest.MonkeyPatch, lost: tuple[int, int], block_rows: int
) -> None:
    monkeypatch.setattr("batchkv.io.read.BLOCK_ROWS", block_rows)
    wanted = [(0, 0), (1, 0), (1, 1), (2, 0)]
    records = [sample_of(*output) for output in wanted if output != lost]
    with pytest.raises(RuntimeError, match=f"row {lost[0]} has not the records"):
        table_of(job_of(n=[1, 2, 1]), records)


def test_a_sample_too_many_is_a_bug_too() -> None:
    with pytest.raises(RuntimeError, match="row 1 has not the records"):
        table_of(job_of(n=[1, 1]), [sample_of(0), sample_of(1), sample_of(1, 1)])


def test_results_come_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("batchkv.io.read.BLOCK_ROWS", 2)
    monkeypatch.setattr(results, "BUCKET_ROWS", 2)
    source = job_of(x=list(range(6)))
    rows, _ = rows_of(source)
    read: list[str] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for row in (4, 0, 3, 1, 5, 2):
            yield as_batch([sample_of(row)])
        read.append("all")

    blocks = result_blocks(source, rows, in_order(batches(), rows.num_rows, tmp_path))
    assert read == []
    assert next(blocks)["x"].to_pylist() == [0, 1]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["bucket-002.arrow"]
    assert [block["x"].to_pylist() for block in blocks] == [[2, 3], [4, 5]]


def test_no_records_are_one_empty_table() -> None:
    (table,) = in_order([], 0, None)
    assert table.schema == SCHEMA
    assert len(table) == 0


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".jsonl"])
def test_the_result_can_be_written_and_read_in_every_format(tmp_path: Path, ending: str) -> None:
    source = job_of(id=["a", "b"], n=[2, 0], empty=[{}, {}], nested=[{"x": [{}]}, None])
    table = table_of(source, [sample_of(0), sample_of(0, 1)])
    write_table(table, tmp_path / f"out{ending}")
    assert read_block(tmp_path / f"out{ending}").num_rows == 3
    assert table.schema == result_schema(rows_of(source)[0])
