"""What the tokens of samples were drawn from, as columns of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchkv.sampling_record import SamplingRecord

SAMPLING_SCHEMA = pa.schema(
    {
        "sampling_logprobs": pa.list_(pa.float32()),
        "entropies": pa.list_(pa.float32()),
        "kept_token_ids": pa.list_(pa.list_(pa.int32())),
    }
)

# What Arrow's offsets can count to.
_MOST_IDS = 2**31 - 1


def sampling_columns(records: Sequence[SamplingRecord]) -> dict[str, pa.ChunkedArray]:
    """The columns of `SAMPLING_SCHEMA`, a row for each sample."""
    chunks = list(_chunks(records))

    def lists(name: str) -> pa.ChunkedArray:
        arrays = [_lists([getattr(record, name) for record in chunk], pa.float32()) for chunk in chunks]
        return pa.chunked_array(arrays, pa.list_(pa.float32()))

    return {
        "sampling_logprobs": lists("logprobs"),
        "entropies": lists("entropies"),
        "kept_token_ids": pa.chunked_array(
            [_nested(chunk) for chunk in chunks], SAMPLING_SCHEMA.field("kept_token_ids").type
        ),
    }


def sampling_record(table: pa.Table, row: int) -> SamplingRecord | None:
    """Of a row; None if the table has not all of the columns."""
    if not set(SAMPLING_SCHEMA.names) <= set(table.column_names):
        return None
    logprobs, entropies, kept = (table[name][row].values for name in SAMPLING_SCHEMA.names)
    return SamplingRecord(
        logprobs=_array(logprobs, np.float32),
        entropies=_array(entropies, np.float32),
        kept_ids=_array(kept.flatten(), np.int32),
        kept_counts=_array(kept.value_lengths(), np.int32),
    )


def _chunks(records: Sequence[SamplingRecord]) -> Iterator[Sequence[SamplingRecord]]:
    """Some samples at a time, with no more kept ids than one array of Arrow holds: a few samples may have billions."""
    ends = np.cumsum([0, *(len(record.kept_ids) for record in records)])
    start = 0
    while start < len(records):
        stop = int(np.searchsorted(ends, ends[start] + _MOST_IDS, "right")) - 1
        stop = max(stop, start + 1)
        yield records[start:stop]
        start = stop


def _nested(records: Sequence[SamplingRecord]) -> pa.ListArray:
    counts = np.concatenate([record.kept_counts for record in records])
    ids = np.concatenate([record.kept_ids for record in records])
    by_token = pa.ListArray.from_arrays(_offsets(counts), pa.array(ids, pa.int32()))
    return pa.ListArray.from_arrays(_offsets([len(record) for record in records]), by_token)


def _lists(rows: Sequence[npt.NDArray[Any]], dtype: pa.DataType) -> pa.ListArray:
    return pa.ListArray.from_arrays(_offsets([len(row) for row in rows]), pa.array(np.concatenate(rows), dtype))


def _offsets(lengths: npt.ArrayLike) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _array(values: pa.Array, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype)
