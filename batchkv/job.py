"""A block of a job's rows that is checked: each row with its prompt, its parameters and perhaps its error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchkv.errors import RowError, UserError
from batchkv.io.columns import (
    CONTINUATION_COLUMN,
    ID_COLUMN,
    JOB_COLUMNS,
    PROMPT_COLUMNS,
    RESULT_COLUMNS,
    TENANT_COLUMN,
    Column,
    decoded,
    distinct,
    is_string,
    kind_of,
    one_line,
    shown_names,
    shown_type,
    storable,
    to_cells,
)
from batchkv.io.dependencies import References, read_references
from batchkv.io.parameters import read_parameters
from batchkv.io.prompts import MAX_TOKEN_ID, Message, Prompt, Prompts, read_prompts
from batchkv.io.read import JobTable
from batchkv.sampling_params import RowParams, SamplingParams

IdKind = Literal["numbered", "string", "integer"]  # numbered: there is no column of ids

__all__ = [
    "IdKind",
    "Job",
    "Message",
    "Prompt",
    "Prompts",
    "carried_columns",
    "check_columns",
    "check_rows",
    "read_ids",
]

_ID_TYPES = {"numbered": pa.int64(), "string": pa.string(), "integer": pa.int64()}
_BAD_CONTINUATION = RowError(
    "bad_parameter", "continuation must be a string or a list of token ids, neither of them empty"
)
_BAD_TENANT = RowError("bad_parameter", "tenant must be a string or an integer")


@dataclass(frozen=True, slots=True)
class Job:
    """Rows of a job, all of the same length and in the order of the job file.

    Attributes:
        ids: string or int64 [rows]; null where the file has none or one of another type.
        id_kind: what they are; None if all are null.
        prompts: text, a conversation or int32 token ids; none where the row has an error.
        params: a row with an error has the defaults.
        tenants: of each row, as text; None where nobody has one.
        continuations: what is to be scored after the prompt, as text or int32 token ids, of the rows that have one, by
            row number in the block.
        references: the rows that rows wait for, by row number in the job.
        errors: by row number.
        carried: the columns that are copied to the result, in order; no columns if there are none.
    """

    ids: pa.Array
    id_kind: IdKind | None
    prompts: Prompts
    params: RowParams
    tenants: list[str | None] | None
    continuations: Mapping[int, str | npt.NDArray[np.int32]]
    references: References
    errors: Mapping[int, RowError]
    carried: pa.Table

    @property
    def num_rows(self) -> int:
        return len(self.ids)


def check_rows(table: JobTable, defaults: SamplingParams, *, first_row: int = 0, id_kind: IdKind | None = None) -> Job:
    """Checks a block of rows; what is wrong with one row becomes that row's error.

    Args:
        table: the rows.
        defaults: the parameters of a row that does not set its own.
        first_row: the number in the job of the block's first row: its id, where there is no column of ids.
        id_kind: what the ids of the rows before are; None if there are none before.

    Raises:
        UserError: a column cannot be of any row.
    """
    try:
        return _checked(table, defaults, first_row, id_kind)
    except pa.ArrowNotImplementedError as error:
        raise UserError(
            f"{table.where}: a column has a type that cannot be read ({one_line(str(error))}): cast it to a plain one"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{table.where}: a column of the job holds text that is no UTF-8: write it as UTF-8") from None


def _checked(table: JobTable, defaults: SamplingParams, first_row: int, id_kind: IdKind | None) -> Job:
    ids, id_kind, id_errors = read_ids(table, first_row, id_kind)
    prompts, prompt_errors = read_prompts(table.columns, table.num_rows)
    params, param_errors = read_parameters(table.columns, defaults, table.num_rows)
    tenants, tenant_errors = _read_tenants(table)
    continuations, continuation_errors = _read_continuations(table)
    references, misnamed = read_references(table.columns, table.num_rows, first_row)
    reference_errors = {row - first_row: error for row, error in misnamed.items()}
    # The first thing that is wrong with a row is what it reports.
    errors = {
        **reference_errors,
        **continuation_errors,
        **tenant_errors,
        **param_errors,
        **prompt_errors,
        **id_errors,
        **table.errors,
    }
    params.index[list(errors)] = 0  # the defaults
    ordered = dict(sorted(errors.items()))
    return Job(
        ids,
        id_kind,
        prompts.without(errors),
        params,
        tenants,
        continuations,
        references,
        ordered,
        carried_columns(table),
    )


def check_columns(names: Collection[str]) -> None:
    """Whether a job with these columns can be run at all.

    Raises:
        UserError: it has no prompts, or columns that are the result's own.
    """
    if names and not set(names) & set(PROMPT_COLUMNS):
        raise UserError(
            f"the job has none of the columns {', '.join(PROMPT_COLUMNS)}, "
            f"only {shown_names(names)}: rename the one that holds the prompts"
        )
    taken = [name for name in names if name not in JOB_COLUMNS and name in RESULT_COLUMNS]
    if taken:
        raise UserError(
            f"the result has columns of its own named {', '.join(sorted(taken))}: rename those of the job file"
        )


def _read_tenants(table: JobTable) -> tuple[list[str | None] | None, dict[int, RowError]]:
    """The tenant of each row as text; None where nobody has one."""
    if TENANT_COLUMN not in table.columns:
        return None, {}
    codes, values = distinct(table.columns[TENANT_COLUMN])
    allowed = [value if value is None or type(value) in (str, int) else _BAD_TENANT for value in values]
    errors = {row: _BAD_TENANT for row in range(len(codes)) if allowed[codes[row]] is _BAD_TENANT}
    texts = [None if value is None or isinstance(value, RowError) else str(value) for value in allowed]
    return [texts[code] for code in codes.tolist()], errors


def _read_continuations(
    table: JobTable,
) -> tuple[dict[int, str | npt.NDArray[np.int32]], dict[int, RowError]]:
    """What each row wants scored: a text, or a list of token ids."""
    if CONTINUATION_COLUMN not in table.columns:
        return {}, {}
    found: dict[int, str | npt.NDArray[np.int32]] = {}
    errors: dict[int, RowError] = {}
    for row, cell in enumerate(to_cells(decoded(table.columns[CONTINUATION_COLUMN]))):
        if cell is None:
            continue
        if isinstance(cell, str) and cell:
            found[row] = cell
        elif isinstance(cell, list) and cell and all(type(i) is int and 0 <= i <= MAX_TOKEN_ID for i in cell):
            found[row] = np.array(cell, np.int32)
        else:
            errors[row] = _BAD_CONTINUATION
    return found, errors


def read_ids(
    table: JobTable, first_row: int, kind: IdKind | None = None
) -> tuple[pa.Array, IdKind | None, dict[int, RowError]]:
    """The id of each row, string or int64 [rows], what they are, and the rows whose id is null or odd.

    Args:
        table: a block of rows.
        first_row: the number in the job of its first row.
        kind: what the ids of the rows before are; None if there is none before.

    Raises:
        UserError: ids that are of no use, or of another kind than those before.
    """
    errors: dict[int, RowError] = {}
    if kind is None and table.num_rows and len(table.errors) == table.num_rows:  # nothing tells what ids are
        return pa.nulls(table.num_rows, pa.string()), None, {}
    if ID_COLUMN not in table.columns:
        if kind in (None, "numbered"):
            return pa.array(np.arange(first_row, first_row + table.num_rows)), "numbered", {}
        ids = pa.nulls(table.num_rows, _ID_TYPES[kind])
    elif kind == "numbered":
        raise UserError(f"{table.where}: column id begins here: give an id to every row of the job, or to none")
    else:
        column = decoded(table.columns[ID_COLUMN])
        if isinstance(column, list):
            ids, errors = _ids_of_cells(column, first_row, kind)
        else:
            ids = _ids_of_arrow(column, table.where, kind)
        if kind is None and ids.null_count < len(ids):
            kind = "string" if pa.types.is_string(ids.type) else "integer"
    for row in np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False)).tolist():
        errors.setdefault(row, RowError("bad_id", f"the id of row {first_row + row} is null"))
    return ids, kind, errors


def _ids_of_arrow(column: pa.ChunkedArray, where: str, kind: IdKind | None) -> pa.Array:
    if is_string(column.type) or pa.types.is_null(column.type):
        found, ids = "string", column.cast(pa.string()).combine_chunks()
    elif pa.types.is_integer(column.type):
        try:
            found, ids = "integer", column.cast(pa.int64()).combine_chunks()
        except pa.ArrowInvalid as error:
            raise UserError(
                f"column id is no signed 64-bit integer ({one_line(str(error))}): make it a string"
            ) from None
    else:
        raise UserError(f"column id is {shown_type(column.type)}, must be string or integer: cast it")
    if kind is None or found == kind:
        return ids
    if ids.null_count == len(ids):
        return pa.nulls(len(ids), _ID_TYPES[kind])
    raise UserError(
        f"{where}: column id is {shown_type(column.type)}, but {_ID_TYPES[kind]} before: write it with one type"
    )


def _ids_of_cells(cells: list[object], first_row: int, kind: IdKind | None) -> tuple[pa.Array, dict[int, RowError]]:
    """Ids of JSON lines: the first that is a string or an integer tells the type of all."""
    known = {None: None, "string": str, "integer": int}[kind]
    allowed = known or next((type(cell) for cell in cells if type(cell) in (str, int)), str)
    wanted = "a string" if allowed is str else "a 64-bit integer"
    errors: dict[int, RowError] = {}
    kept: list[object] = list(cells)
    for row, cell in enumerate(cells):
        too_big = isinstance(cell, int) and not -(2**63) <= cell < 2**63
        if cell is not None and (type(cell) is not allowed or too_big):
            kept[row] = None
            message = f"the id of row {first_row + row} is {kind_of(cell)}, must be {wanted} as in the rows before"
            errors[row] = RowError("bad_id", message)
    return pa.array(kept, pa.string() if allowed is str else pa.int64()), errors


def carried_columns(table: JobTable) -> pa.Table:
    """The columns that are copied to the result, with types that every result file can hold."""
    carried = {name: _carried_column(column) for name, column in table.columns.items() if name not in JOB_COLUMNS}
    return pa.table(carried)


def _carried_column(column: Column) -> pa.ChunkedArray:
    if isinstance(column, list):
        raise TypeError("a column of JSON lines that is no job column has an Arrow type")
    dtype = storable(pa.nulls(0, column.type)).type
    return pa.chunked_array([storable(chunk) for chunk in column.chunks], dtype)
