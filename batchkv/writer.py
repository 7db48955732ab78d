"""From finished samples to the rows of the result, in the order of the job."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchkv.errors import RowError
from batchkv.io.columns import RESULT_COLUMNS
from batchkv.job import Job, output_offsets
from batchkv.stopping import cut

SUMMARY_KEY = b"batchkv.summary"
# Slots per chunk of the result: an Arrow string or list array cannot hold more than 2 GiB or 2^31 items.
CHUNK_SLOTS = 1 << 16

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One generated sample, or a continuation that was scored. Rows that are exact duplicates may share the object.

    Attributes:
        token_ids: int32 [generated], the end token included; those given, where they were scored.
        logprobs: float32 [generated], of these tokens.
        finish_reason: `stop` at an end token or stop string, `length` at `max_tokens`, at the context's end or at the
            end of what was given.
        stop_string: the stop string that ended it, if one did.
        is_greedy: bool [generated], whether greedy decoding would have taken the given token after those before it;
            None where nothing was given.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish_reason: Literal["stop", "length"]
    stop_string: str | None = None
    is_greedy: npt.NDArray[np.bool_] | None = None


def result_table(
    job: Job,
    errors: Mapping[int, RowError],
    completions: Mapping[int, Completion] | Sequence[Completion | None],
    num_prompt_tokens: npt.NDArray[np.integer[Any]],
    num_cached_tokens: npt.NDArray[np.integer[Any]],
    detokenize: Callable[[list[npt.NDArray[np.int32]]], list[str] | list[None]],
) -> pa.Table:
    """The result, one row per slot of `output_offsets`.

    Args:
        job: gives ids, parameters and carried columns.
        errors: by row number; those of `job` are added to them.
        completions: by slot; a slot of a row with an error has none.
        num_prompt_tokens: int [rows].
        num_cached_tokens: int [slots], prompt tokens that were not computed for this slot.
        detokenize: decodes without special tokens, or gives None; called once, with each distinct completion once.

    Raises:
        KeyError: a slot of a row without an error has no completion.
    """
    errors = {**errors, **job.errors}
    offsets = output_offsets(job, errors)
    rows = np.repeat(np.arange(job.num_rows), np.diff(offsets))
    samples = _samples(rows, errors, completions)
    finished = np.array([sample is not None for sample in samples], dtype=np.bool_)
    slots = _Slots(
        rows=rows,
        sample_index=np.arange(len(rows)) - offsets[rows],
        samples=samples,
        texts=_texts(job, rows, samples, detokenize),
        num_prompt_tokens=np.where(finished, num_prompt_tokens[rows], 0),
        num_cached_tokens=np.where(finished, num_cached_tokens, 0),
    )
    starts = range(0, max(1, len(rows)), CHUNK_SLOTS)  # one chunk at least: an empty result has columns too
    return pa.concat_tables([_chunk(job, errors, slots.part(start, start + CHUNK_SLOTS)) for start in starts])


def with_summary(table: pa.Table, summary: Mapping[str, Any]) -> pa.Table:
    """The same result with the summary of its run in the schema's metadata."""
    return table.replace_schema_metadata({SUMMARY_KEY: json.dumps(summary).encode()})


def summary_of(table: pa.Table) -> dict[str, Any]:
    """The summary that `with_summary` put there."""
    summary: dict[str, Any] = json.loads(table.schema.metadata[SUMMARY_KEY])
    return summary


@dataclass(frozen=True, slots=True)
class _Slots:
    """What the result says of each slot, all [slots]."""

    rows: Int64s
    sample_index: Int64s
    samples: Sequence[Completion | None]
    texts: Sequence[str | None]
    num_prompt_tokens: Int64s
    num_cached_tokens: Int64s

    def part(self, start: int, stop: int) -> _Slots:
        return _Slots(
            self.rows[start:stop],
            self.sample_index[start:stop],
            self.samples[start:stop],
            self.texts[start:stop],
            self.num_prompt_tokens[start:stop],
            self.num_cached_tokens[start:stop],
        )


def _chunk(job: Job, errors: Mapping[int, RowError], slots: _Slots) -> pa.Table:
    own = {
        "id": job.ids.take(pa.array(slots.rows)),
        "sample_index": pa.array(slots.sample_index, pa.int32()),
        "text": pa.array(slots.texts, pa.string()),
        **_sample_columns(job, slots.rows, slots.samples),
        "num_prompt_tokens": pa.array(slots.num_prompt_tokens, pa.int32()),
        "num_cached_tokens": pa.array(slots.num_cached_tokens, pa.int32()),
        **_error_columns(errors, slots.rows),
    }
    in_order = {name: own[name] for name in RESULT_COLUMNS}
    return pa.table({**in_order, **_carried_columns(job.carried, slots.rows)})


def _samples(
    rows: Int64s,
    errors: Mapping[int, RowError],
    completions: Mapping[int, Completion] | Sequence[Completion | None],
) -> list[Completion | None]:
    """The completion of each slot, None where the row has an error."""
    samples: list[Completion | None] = []
    for slot, row in enumerate(rows.tolist()):
        sample = None if row in errors else completions[slot]
        if sample is None and row not in errors:
            raise KeyError(f"slot {slot} (row {row}) has no completion")
        samples.append(sample)
    return samples


def _texts(
    job: Job,
    rows: Int64s,
    samples: Sequence[Completion | None],
    detokenize: Callable[[list[npt.NDArray[np.int32]]], list[str] | list[None]],
) -> list[str | None]:
    """The text of each slot, cut before a stop string; a shared completion is decoded once."""
    distinct = {id(sample): sample.token_ids for sample in samples if sample is not None}
    decoded = dict(zip(distinct, detokenize(list(distinct.values())) if distinct else [], strict=True))
    texts: list[str | None] = []
    for row, sample in zip(rows.tolist(), samples, strict=True):
        text = None if sample is None else decoded[id(sample)]
        if text is not None and sample is not None and sample.stop_string is not None:
            text = cut(text, job.params[row].stop)
        texts.append(text)
    return texts


def _sample_columns(job: Job, rows: Int64s, samples: Sequence[Completion | None]) -> dict[str, pa.Array]:
    asked = [job.params[row].logprobs for row in rows.tolist()]
    tokens = [None if sample is None else sample.token_ids for sample in samples]
    reasons = ["error" if sample is None else sample.finish_reason for sample in samples]
    logprobs = [
        sample.logprobs if sample is not None and is_asked else None
        for sample, is_asked in zip(samples, asked, strict=True)
    ]
    return {
        "token_ids": _list_array(tokens, np.int32),
        "finish_reason": pa.array(reasons, pa.string()),
        "logprobs": _list_array(logprobs, np.float32),
        "num_generated_tokens": pa.array([0 if ids is None else len(ids) for ids in tokens], pa.int32()),
    }


def _list_array(lists: Sequence[npt.NDArray[Any] | None], dtype: type[np.int32] | type[np.float32]) -> pa.ListArray:
    """A list array of `lists`, null where there is None."""
    offsets = np.zeros(len(lists) + 1, dtype=np.int32)
    np.cumsum([0 if values is None else len(values) for values in lists], out=offsets[1:])
    flat = np.concatenate([np.empty(0, dtype), *(values for values in lists if values is not None)])
    mask = np.array([values is None for values in lists], dtype=np.bool_)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(dtype)), mask=pa.array(mask))


def _error_columns(errors: Mapping[int, RowError], rows: Int64s) -> dict[str, pa.Array]:
    found = [errors.get(row) for row in rows.tolist()]
    return {
        "error_code": pa.array([None if error is None else error.code for error in found], pa.string()),
        "error": pa.array([None if error is None else error.message for error in found], pa.string()),
    }


def _carried_columns(carried: pa.Table, rows: Int64s) -> dict[str, pa.ChunkedArray]:
    """The carried columns, a row repeated for each of its samples."""
    first, stop = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    # Sliced first: Arrow may join all chunks of what it takes from, and a string array ends at 2 GiB.
    part = carried.slice(first, stop - first)
    return {name: part.column(name).take(pa.array(rows - first)) for name in carried.column_names}
