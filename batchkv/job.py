"""A job: rows that are checked, each with its prompt, its parameters and perhaps its error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchkv.errors import RowError, UserError
from batchkv.io.columns import (
    CONSUMED_COLUMNS,
    ID_COLUMN,
    PROMPT_COLUMNS,
    RESULT_COLUMNS,
    UNSUPPORTED_COLUMNS,
    Column,
    decoded,
    is_given,
    is_string,
    kind_of,
    storable,
)
from batchkv.io.parameters import read_parameters
from batchkv.io.prompts import Message, Prompt, Prompts, read_prompts
from batchkv.io.read import Jobs, JobTable, read_jobs
from batchkv.sampling_params import RowParams, SamplingParams

__all__ = ["Job", "Jobs", "Message", "Prompt", "Prompts", "output_offsets", "read_job"]


@dataclass(frozen=True, slots=True)
class Job:
    """The rows of a job, all of the same length and in the order of the job file.

    Attributes:
        ids: string or int64 [rows]; null where the file has none or one of another type.
        prompts: text, a conversation or int32 token ids; none where the row has an error.
        params: a row with an error has the defaults.
        errors: by row number.
        carried: the columns that are copied to the result, in order; no columns if there are none.
    """

    ids: pa.Array
    prompts: Prompts
    params: RowParams
    errors: Mapping[int, RowError]
    carried: pa.Table

    @property
    def num_rows(self) -> int:
        return len(self.ids)


def read_job(jobs: Jobs, defaults: SamplingParams, *, limit: int | None = None) -> Job:
    """Reads and checks a job; what is wrong with one row becomes that row's error.

    Args:
        jobs: a path, a glob, several paths, a pyarrow table or a polars frame.
        defaults: the parameters of a row that does not set its own.
        limit: only the first rows of the job.

    Raises:
        UserError: no row of the job can be run: it cannot be read, or its columns are not those of a job.
    """
    if limit is not None and limit < 0:
        raise UserError(f"limit is {limit}, must be 0 or more")
    table = read_jobs(jobs)
    if limit is not None:
        table = table.head(limit)
    _check_columns(table)
    ids, id_errors = _read_ids(table)
    prompts, prompt_errors = read_prompts(table.columns, table.num_rows)
    params, param_errors = read_parameters(table.columns, defaults, table.num_rows)
    # The first thing that is wrong with a row is what it reports.
    errors = {**_unsupported(table), **param_errors, **prompt_errors, **id_errors, **table.errors}
    params.index[list(errors)] = 0  # the defaults
    return Job(ids, prompts.without(errors), params, dict(sorted(errors.items())), _carried(table))


def output_offsets(job: Job, errors: Mapping[int, RowError]) -> npt.NDArray[np.int64]:
    """Where each row's samples lie in the result: row i has slots [offsets[i], offsets[i + 1]).

    int64 [rows + 1]. A row has `n` slots, a row with an error (in `job` or in `errors`) has one.
    """
    counts = job.params.column(lambda params: params.n, np.int64)
    counts[[*errors, *job.errors]] = 1
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


def _check_columns(table: JobTable) -> None:
    names = table.columns.keys()
    if {"custom_id", "body"} <= names and not names & set(PROMPT_COLUMNS):
        raise UserError(
            "the rows are OpenAI Batch requests (custom_id, body), which are not supported yet: "
            "write a job file with the columns id and messages"
        )
    if table.num_rows and not names & set(PROMPT_COLUMNS):
        raise UserError(
            f"the job has none of the columns {', '.join(PROMPT_COLUMNS)}, "
            f"only {', '.join(names) or 'none at all'}: rename the one that holds the prompts"
        )
    taken = [name for name in names - CONSUMED_COLUMNS if name in RESULT_COLUMNS]
    if taken:
        raise UserError(
            f"the result has columns of its own named {', '.join(sorted(taken))}: rename those of the job file"
        )


def _read_ids(table: JobTable) -> tuple[pa.Array, dict[int, RowError]]:
    """The id of each row, string or int64 [rows], and the rows whose id is null, odd or taken."""
    if ID_COLUMN not in table.columns:
        return pa.array(np.arange(table.num_rows)), {}
    column = decoded(table.columns[ID_COLUMN])
    ids, errors = _ids_of_cells(column) if isinstance(column, list) else (_ids_of_arrow(column), {})
    for row in np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False)).tolist():
        errors.setdefault(row, RowError("bad_id", f"the id of row {row} is null"))
    # Codes count up in the order of first appearance, so the first row of each code is the one to keep.
    codes = ids.dictionary_encode("encode").indices.to_numpy()
    _, first_rows = np.unique(codes, return_index=True)
    for row in np.flatnonzero(first_rows[codes] != np.arange(len(codes))).tolist():
        message = f"row {row} has the id of row {first_rows[codes[row]]}: make ids unique"
        errors.setdefault(row, RowError("duplicate_id", message))
    return ids, errors


def _ids_of_arrow(column: pa.ChunkedArray) -> pa.Array:
    if is_string(column.type) or pa.types.is_null(column.type):
        return column.cast(pa.string()).combine_chunks()
    if not pa.types.is_integer(column.type):
        raise UserError(f"column id is {column.type}, must be string or integer: cast it")
    try:
        return column.cast(pa.int64()).combine_chunks()
    except pa.ArrowInvalid as error:
        raise UserError(f"column id is no signed 64-bit integer ({error}): make it a string") from None


def _ids_of_cells(cells: list[object]) -> tuple[pa.Array, dict[int, RowError]]:
    """Ids of JSON lines: the first that is a string or an integer tells the type of all."""
    kind = next((type(cell) for cell in cells if type(cell) in (str, int)), str)
    wanted = "a string" if kind is str else "a 64-bit integer"
    errors: dict[int, RowError] = {}
    kept: list[object] = list(cells)
    for row, cell in enumerate(cells):
        too_big = isinstance(cell, int) and not -(2**63) <= cell < 2**63
        if cell is not None and (type(cell) is not kind or too_big):
            kept[row] = None
            message = f"the id of row {row} is {kind_of(cell)}, must be {wanted} as in the rows before"
            errors[row] = RowError("bad_id", message)
    return pa.array(kept, pa.string() if kind is str else pa.int64()), errors


def _unsupported(table: JobTable) -> dict[int, RowError]:
    errors: dict[int, RowError] = {}
    for name in UNSUPPORTED_COLUMNS:
        if name in table.columns:
            error = RowError("unsupported", f"column {name} is set, which this version does not execute")
            errors.update((row, error) for row in np.flatnonzero(is_given(table.columns[name])).tolist())
    return errors


def _carried(table: JobTable) -> pa.Table:
    carried = {name: _carried_column(column) for name, column in table.columns.items() if name not in CONSUMED_COLUMNS}
    return pa.table(carried)


def _carried_column(column: Column) -> pa.ChunkedArray:
    if not isinstance(column, list):
        dtype = storable(pa.array([], column.type)).type
        return pa.chunked_array([storable(chunk) for chunk in column.chunks], dtype)
    try:
        return _carried_column(pa.chunked_array([pa.array(column)]))
    except (pa.ArrowException, OverflowError):
        # Only unsupported job columns of JSON lines come here, with another type in each line.
        texts = [None if cell is None else str(cell) for cell in column]
        return pa.chunked_array([pa.array(texts, pa.string())])
