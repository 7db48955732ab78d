"""Which rows wait for which: rows that continue a conversation or use the outputs of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchkv.errors import RowError
from batchkv.io.columns import shown
from batchkv.io.dependencies import References, RowId

if TYPE_CHECKING:
    import networkx as nx

Rows: TypeAlias = tuple[int, ...]

_SHOWN_IDS = 5  # of a cycle
_ID_WIDTH = 40  # characters of an id in a message


@dataclass(frozen=True, slots=True, eq=False)
class Dependencies:
    """Which rows wait for which. Rows with an error take no part: they wait for nobody, and nobody for them.

    Attributes:
        parents: the row whose conversation a row continues, by row number.
        parent_samples: which of its samples, for the same rows.
        depends_on: the rows whose outputs a row's text uses, for the rows that use any, in the order given.
        required: all rows that a row waits for, the parent first, each once, for the rows that wait.
        waiting: the rows that wait for a row, in order, for the rows that others wait for.
        generation: int32 [rows], 0 for a row that waits for nobody, else one more than the highest that it waits for.
        component: int64 [rows], the first row of those that a row is connected with; its own number if it is alone.
        errors: the rows that can never run, by row number; without those known before.
    """

    parents: Mapping[int, int]
    parent_samples: Mapping[int, int]
    depends_on: Mapping[int, Rows]
    required: Mapping[int, Rows]
    waiting: Mapping[int, Rows]
    generation: npt.NDArray[np.int32]
    component: npt.NDArray[np.int64]
    errors: Mapping[int, RowError]

    def failed_by(self, row: int) -> Rows:
        """All rows that cannot run once `row` has failed, in order and without `row` itself."""
        found = set(self.waiting.get(row, ()))
        new = list(found)
        while new:
            later = [waits for waits in self.waiting.get(new.pop(), ()) if waits not in found]
            found.update(later)
            new += later
        return tuple(sorted(found))


def dependency_failed(row_id: RowId) -> RowError:
    """The error of a row downstream of the one with `row_id`, which has failed."""
    return RowError("dependency_failed", f"the row {_show(row_id)}, which this one depends on, has an error")


def find_dependencies(
    ids: pa.Array, references: References, num_samples: npt.NDArray[np.int64], failed: Iterable[int] = ()
) -> Dependencies:
    """Finds the rows that others name, and which rows can run.

    A row cannot run if it names a row or a sample that is not there, or itself (`missing_dependency`), if rows
    wait for each other in a circle (`dependency_cycle`), or if a row that it depends on, itself or through
    others, has an error (`dependency_failed`). Of several such rows the error names the first in the job, and
    none that is reached only through another one. Where rows have the same id, the first of them is meant.

    Args:
        ids: string or int64 [rows], of the whole job.
        references: what the rows name.
        num_samples: int64 [rows], the `n` of each row.
        failed: the rows that have an error already.
    """
    naming = references.parents.keys() | references.depends_on.keys()
    if not naming:
        return _without_any(len(ids))
    failed = set(failed)
    naming -= failed
    targets = _targets(ids, references)
    errors = _missing(naming, references, targets, num_samples, failed)
    required = {row: _required(row, references, targets) for row in sorted(naming - errors.keys())}
    graph = _graph(required)
    errors |= _cycles(graph, required, ids)
    errors |= _downstream(failed | errors.keys(), required, ids)
    graph.remove_nodes_from(failed | errors.keys())
    runs = {row: rows for row, rows in required.items() if row not in errors}
    return Dependencies(
        parents={row: targets[references.parents[row]] for row in runs if row in references.parents},
        parent_samples={row: references.parent_samples.get(row, 0) for row in runs if row in references.parents},
        depends_on={
            row: tuple(dict.fromkeys(targets[each] for each in references.depends_on[row]))
            for row in runs
            if row in references.depends_on
        },
        required=runs,
        waiting=_waiting(runs),
        generation=_generations(graph, len(ids)),
        component=_components(graph, len(ids)),
        errors=dict(sorted(errors.items())),
    )


def _without_any(num_rows: int) -> Dependencies:
    return Dependencies({}, {}, {}, {}, {}, np.zeros(num_rows, np.int32), np.arange(num_rows), {})


def _targets(ids: pa.Array, references: References) -> dict[RowId, int]:
    """The row of every id that is named and exists.

    A number may be written as text and the other way round: all ids of a job have one type.
    """
    named = dict.fromkeys(chain(references.parents.values(), *references.depends_on.values()))
    as_ids = {each: _as_id(each, ids.type) for each in named}
    wanted = pa.array([each for each in dict.fromkeys(as_ids.values()) if each is not None], ids.type)
    # The few ids that are named are hashed, not the millions that exist.
    found = pc.index_in(ids, value_set=wanted)
    rows = np.flatnonzero(found.is_valid().to_numpy(zero_copy_only=False))
    numbers, first = np.unique(found.drop_null().to_numpy(), return_index=True)
    row_of = dict(zip(wanted.take(pa.array(numbers)).to_pylist(), rows[first].tolist(), strict=True))
    return {each: row_of[row_id] for each, row_id in as_ids.items() if row_id in row_of}


def _as_id(named: RowId, dtype: pa.DataType) -> RowId | None:
    """The id that is meant, of the type that ids have; none if that type has no such value."""
    if not pa.types.is_integer(dtype):
        return str(named)
    try:
        number = int(named)
    except ValueError:  # also of text with too many digits
        return None
    is_exact = isinstance(named, int) or str(number) == named  # "07" and "1_0" are no numbers
    return number if is_exact and -(2**63) <= number < 2**63 else None


def _required(row: int, references: References, targets: Mapping[RowId, int]) -> Rows:
    parent = (references.parents[row],) if row in references.parents else ()
    named: Iterable[RowId] = chain(parent, references.depends_on.get(row, ()))
    return tuple(dict.fromkeys(targets[each] for each in named))


def _missing(
    rows: Set[int],
    references: References,
    targets: Mapping[RowId, int],
    num_samples: npt.NDArray[np.int64],
    failed: Set[int],
) -> dict[int, RowError]:
    """The rows that name what is not there."""
    errors: dict[int, RowError] = {}
    for row in rows:
        named: dict[str, Sequence[RowId]] = {"depends_on": references.depends_on.get(row, ())}
        if row in references.parents:
            named["parent"] = (references.parents[row],)
            parent = targets.get(references.parents[row])
            sample = references.parent_samples.get(row, 0)
            # The parameters of a row with an error are unknown.
            if parent is not None and parent not in failed and sample >= num_samples[parent]:
                message = f"parent_sample is {sample}, but the parent has n = {num_samples[parent]}: count from 0"
                errors[row] = RowError("missing_dependency", message)
        for column, ids in named.items():
            for each in ids:
                if targets.get(each, row) == row:
                    reason = "which is this row itself" if each in targets else "which no row of the job has"
                    errors[row] = RowError("missing_dependency", f"{column} names the id {_show(each)}, {reason}")
    return errors


def _graph(required: Mapping[int, Rows]) -> nx.DiGraph:
    """An edge from each row to those that wait for it."""
    import networkx as nx  # takes a third of a second, and most jobs need none of it

    return nx.DiGraph((target, row) for row, targets in required.items() for target in targets)


def _cycles(graph: nx.DiGraph, required: Mapping[int, Rows], ids: pa.Array) -> dict[int, RowError]:
    """The rows on a circle. Rows that name themselves are not in the graph."""
    import networkx as nx

    errors: dict[int, RowError] = {}
    for circle in nx.strongly_connected_components(graph):
        if len(circle) > 1:
            shown_ids = [_show(ids[row].as_py()) for row in _one_cycle(circle, required)]
            if len(shown_ids) > _SHOWN_IDS:
                shown_ids[_SHOWN_IDS - 1 : -1] = ["…"]
            message = f"rows wait for each other in a circle: {' → '.join(shown_ids)}"
            errors |= dict.fromkeys(circle, RowError("dependency_cycle", message))
    return errors


def _one_cycle(circle: Set[int], required: Mapping[int, Rows]) -> list[int]:
    """Rows of a strongly connected component, each waiting for the next; the first is again the last."""
    path = {min(circle): None}
    row = min(circle)
    while True:
        row = next(target for target in required[row] if target in circle)
        if row in path:
            walked = list(path)
            return [*walked[walked.index(row) :], row]
        path[row] = None


def _downstream(broken: Set[int], required: Mapping[int, Rows], ids: pa.Array) -> dict[int, RowError]:
    """The rows that depend on those in `broken` and are none of them."""
    if not broken:
        return {}
    waiting = _waiting({row: rows for row, rows in required.items() if row not in broken})
    errors: dict[int, RowError] = {}
    for cause in sorted(broken & waiting.keys()):
        error = dependency_failed(ids[cause].as_py())
        new = [cause]
        while new:
            later = [row for row in waiting.get(new.pop(), ()) if row not in errors]
            errors |= dict.fromkeys(later, error)
            new += later
    return errors


def _waiting(required: Mapping[int, Rows]) -> dict[int, Rows]:
    waiting: dict[int, list[int]] = {}
    for row, targets in required.items():
        for target in targets:
            waiting.setdefault(target, []).append(row)
    return {row: tuple(rows) for row, rows in waiting.items()}


def _generations(graph: nx.DiGraph, num_rows: int) -> npt.NDArray[np.int32]:
    import networkx as nx

    generation = np.zeros(num_rows, np.int32)
    for number, rows in enumerate(nx.topological_generations(graph)):
        generation[rows] = number
    return generation


def _components(graph: nx.DiGraph, num_rows: int) -> npt.NDArray[np.int64]:
    import networkx as nx

    component = np.arange(num_rows)
    for rows in nx.weakly_connected_components(graph):
        component[list(rows)] = min(rows)
    return component


def _show(row_id: object) -> str:
    return shown(row_id, _ID_WIDTH)
