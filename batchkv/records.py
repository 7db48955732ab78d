"""What is known of each sample when it has ended: the records that results are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchkv.errors import RowError

SCHEMA = pa.schema(
    {
        "row": pa.int64(),
        "sample": pa.int32(),
        "text": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "finish_reason": pa.string(),
        "logprobs": pa.list_(pa.float32()),
        "num_prompt_tokens": pa.int32(),
        "num_cached_tokens": pa.int32(),
        "num_generated_tokens": pa.int32(),
        "error_code": pa.string(),
        "error": pa.string(),
        "is_greedy": pa.bool_(),
        "choice_logprobs": pa.list_(pa.float32()),
    }
)
_JOINED_BATCHES = 256


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One sample of one row, or the row's error.

    Attributes:
        row, sample: whose it is.
        finish_reason: `error` if the row has an error, and then there is nothing else.
        text: decoded without special tokens and cut before a stop string; None without a tokenizer.
        token_ids: int32 [generated], the end token included.
        logprobs: float32 [generated], of the sampled tokens; None unless asked for.
        num_prompt_tokens, num_cached_tokens, num_generated_tokens: as in the result.
        error: what is wrong with the row.
        is_greedy: of a continuation that was scored, whether greedy decoding gives it.
        choice_logprobs: float32 [choices], where these were scored.
    """

    row: int
    sample: int
    finish_reason: Literal["stop", "length", "error"]
    text: str | None = None
    token_ids: npt.NDArray[np.int32] | None = None
    logprobs: npt.NDArray[np.float32] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    error: RowError | None = None
    is_greedy: bool | None = None
    choice_logprobs: npt.NDArray[np.float32] | None = None

    @classmethod
    def of_error(cls, row: int, error: RowError) -> Record:
        return cls(row, 0, "error", error=error)


class RecordSink(Protocol):
    """Where records go as samples end."""

    def append(self, records: Sequence[Record]) -> None: ...


class RecordsInMemory:
    """Records of a run whose result is a table."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._tables: list[pa.Table] = []

    def append(self, records: Sequence[Record]) -> None:
        self._batches.append(as_batch(records))
        if len(self._batches) == _JOINED_BATCHES:  # thousands of tiny ones would take more than what is in them
            self._tables.append(pa.Table.from_batches(self._batches).combine_chunks())
            self._batches = []

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All of them, in the order in which they came."""
        for table in self._tables:
            yield from table.to_batches()
        yield from self._batches


def as_batch(records: Sequence[Record]) -> pa.RecordBatch:
    """The records as Arrow, with `SCHEMA`."""
    return pa.RecordBatch.from_arrays(
        [
            pa.array([record.row for record in records], pa.int64()),
            pa.array([record.sample for record in records], pa.int32()),
            pa.array([record.text for record in records], pa.string()),
            _list_array([record.token_ids for record in records], np.int32),
            pa.array([record.finish_reason for record in records], pa.string()),
            _list_array([record.logprobs for record in records], np.float32),
            pa.array([record.num_prompt_tokens for record in records], pa.int32()),
            pa.array([record.num_cached_tokens for record in records], pa.int32()),
            pa.array([record.num_generated_tokens for record in records], pa.int32()),
            pa.array([record.error and record.error.code for record in records], pa.string()),
            pa.array([record.error and record.error.message for record in records], pa.string()),
            pa.array([record.is_greedy for record in records], pa.bool_()),
            _list_array([record.choice_logprobs for record in records], np.float32),
        ],
        schema=SCHEMA,
    )


def as_records(batch: pa.RecordBatch) -> list[Record]:
    """From Arrow, without what only results need."""
    return [
        Record(
            row=cells["row"],
            sample=cells["sample"],
            finish_reason=cells["finish_reason"],
            text=cells["text"],
            token_ids=np.array(cells["token_ids"] or [], np.int32),
        )
        for cells in batch.select(["row", "sample", "finish_reason", "text", "token_ids"]).to_pylist()
    ]


def _list_array(lists: Sequence[npt.NDArray[Any] | None], dtype: type[np.int32] | type[np.float32]) -> pa.ListArray:
    """A list array of `lists`, null where there is None."""
    offsets = np.zeros(len(lists) + 1, dtype=np.int32)
    np.cumsum([0 if values is None else len(values) for values in lists], out=offsets[1:])
    flat = np.concatenate([np.empty(0, dtype), *(values for values in lists if values is not None)])
    mask = np.array([values is None for values in lists], dtype=np.bool_)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(dtype)), mask=pa.array(mask))
