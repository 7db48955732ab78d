"""Which other rows a row names: the columns `parent`, `parent_sample` and `depends_on`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchkv.errors import RowError
from batchkv.io.columns import Column, decoded, is_given, is_list, kind_of, shown
from batchkv.io.token_lists import list_lengths
from batchkv.sampling_params import MAX_SAMPLES

RowId: TypeAlias = "str | int"

PARENT_COLUMN = "parent"
PARENT_SAMPLE_COLUMN = "parent_sample"
DEPENDS_ON_COLUMN = "depends_on"

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class References:
    """The rows that other rows name, by row number and as they name them; in most jobs there are none.

    Attributes:
        parents: the id of the row whose conversation a row continues.
        parent_samples: which of that row's samples; rows that are not in it continue the first.
        depends_on: the ids of the rows whose outputs a row's text uses, each once, in the order given.
    """

    parents: Mapping[int, RowId]
    parent_samples: Mapping[int, int]
    depends_on: Mapping[int, tuple[RowId, ...]]

    @classmethod
    def joined(cls, blocks: Iterable[References]) -> References:
        """Those of several blocks of rows."""
        parts = list(blocks)
        return cls(
            parents=dict(chain.from_iterable(part.parents.items() for part in parts)),
            parent_samples=dict(chain.from_iterable(part.parent_samples.items() for part in parts)),
            depends_on=dict(chain.from_iterable(part.depends_on.items() for part in parts)),
        )


def read_references(
    columns: Mapping[str, Column], num_rows: int, first_row: int = 0
) -> tuple[References, dict[int, RowError]]:
    """What the rows of a block name, and the rows that do so wrongly; both by row number in the job.

    Null, and an empty list, name nothing. Only cells that name something become Python values.

    Args:
        columns: of a `JobTable`, each `num_rows` long.
        num_rows: rows of the block.
        first_row: the row number in the job of the block's first row.
    """
    parents, errors = _parsed(columns, PARENT_COLUMN, _parent, first_row)
    samples, bad_samples = _parsed(columns, PARENT_SAMPLE_COLUMN, _parent_sample, first_row)
    depends_on, bad_lists = _parsed(columns, DEPENDS_ON_COLUMN, _depends_on, first_row)
    orphans = {row for row, sample in samples.items() if sample and row not in parents}
    errors = dict.fromkeys(orphans, _NO_PARENT) | bad_lists | bad_samples | errors
    kept = {row: ids for row, ids in depends_on.items() if ids}
    return References(parents, samples, kept), dict(sorted(errors.items()))


def _parsed(
    columns: Mapping[str, Column], name: str, parse: Callable[[object], _Value], first_row: int
) -> tuple[dict[int, _Value], dict[int, RowError]]:
    values: dict[int, _Value] = {}
    errors: dict[int, RowError] = {}
    for row, cell in _cells(name, columns[name]) if name in columns else ():
        try:
            values[first_row + row] = parse(cell)
        except ValueError as error:
            errors[first_row + row] = RowError("bad_parameter", str(error))
    return values, errors


def _cells(name: str, column: Column) -> Iterable[tuple[int, object]]:
    """The cells that may say something, with their row numbers."""
    column = decoded(column)
    given = is_given(column)
    if isinstance(column, list):
        return ((row, column[row]) for row in np.flatnonzero(given).tolist())
    # Data frames say "nothing" with columns that are full of empty lists or of zeros.
    if is_list(column.type):
        given = given & (list_lengths(column) > 0)
    elif name == PARENT_SAMPLE_COLUMN and pa.types.is_integer(column.type):
        given = given & pc.not_equal(column, pa.scalar(0, column.type)).fill_null(False).to_numpy()
    rows = np.flatnonzero(given)
    return zip(rows.tolist(), column.take(pa.array(rows)).to_pylist(), strict=True)


def _parent(cell: object) -> RowId:
    return _row_id(PARENT_COLUMN, cell)


def _parent_sample(cell: object) -> int:
    sample = _integer(cell)
    if sample is None or not 0 <= sample < MAX_SAMPLES:
        raise ValueError(f"{PARENT_SAMPLE_COLUMN} is {shown(cell)}, must be an integer from 0 to {MAX_SAMPLES - 1}")
    return sample


def _depends_on(cell: object) -> tuple[RowId, ...]:
    ids = cell if isinstance(cell, list) else [cell]
    return tuple(dict.fromkeys(_row_id(DEPENDS_ON_COLUMN, each) for each in ids))


def _row_id(name: str, cell: object) -> RowId:
    row_id = cell if isinstance(cell, str) else _integer(cell)
    if row_id is None:
        found = "null" if cell is None else kind_of(cell)
        wanted = "the id of a row" if name == PARENT_COLUMN else "a list of ids of rows"
        raise ValueError(f"{name} holds {found}, must be {wanted}: strings or integers")
    return row_id


def _integer(cell: object) -> int | None:
    """The integer that a cell holds: pandas turns integers into floats where a column has nulls."""
    if isinstance(cell, float) and cell.is_integer():
        return int(cell)
    return cell if isinstance(cell, int) and not isinstance(cell, bool) else None


_NO_PARENT = RowError("bad_parameter", f"{PARENT_SAMPLE_COLUMN} is set, but {PARENT_COLUMN} is not")
