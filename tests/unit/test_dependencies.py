"""Which rows wait for which, against a brute-force definition; what is wrong with those that cannot run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import networkx as nx
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv.dependencies import Dependencies, find_dependencies
from batchkv.io.dependencies import References, read_references

CHAIN = 20_000


def find(ids: list[Any], *, n: list[int] | None = None, failed: tuple[int, ...] = (), **columns: Any) -> Dependencies:
    references, errors = read_references(columns, len(ids))
    assert errors == {}
    return find_dependencies(pa.array(ids), references, np.array(n or [1] * len(ids)), failed)


def codes(found: Dependencies) -> dict[int, str]:
    return {row: error.code for row, error in found.errors.items()}


def arrow(values: list[Any], dtype: pa.DataType | None = None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, dtype)])


def test_a_conversation_and_rows_that_use_its_outputs() -> None:
    found = find(
        ["a", "b", "c", "d", "alone"],
        n=[1, 3, 1, 1, 1],
        parent=[None, "a", "b", None, None],
        parent_sample=[None, None, 2, None, None],
        depends_on=[None, None, ["a", "b", "a"], "c", []],
    )
    assert found.errors == {}
    assert (found.parents, found.parent_samples) == ({1: 0, 2: 1}, {1: 0, 2: 2})
    assert found.depends_on == {2: (0, 1), 3: (2,)}
    assert found.required == {1: (0,), 2: (1, 0), 3: (2,)}
    assert found.waiting == {0: (1, 2), 1: (2,), 2: (3,)}
    assert found.generation.tolist() == [0, 1, 2, 3, 0]
    assert found.component.tolist() == [0, 0, 0, 0, 4]
    assert found.failed_by(1) == (2, 3)
    assert found.failed_by(4) == ()


def test_a_job_without_dependencies_has_no_objects_and_no_graph() -> None:
    code = (
        "import sys, numpy as np, pyarrow as pa;"
        "from batchkv.dependencies import find_dependencies;"
        "from batchkv.io.dependencies import References;"
        "found = find_dependencies(pa.array(range(9)), References({}, {}, {}), np.ones(9, int));"
        "assert not found.required and found.component.tolist() == list(range(9));"
        "assert not {'networkx', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("columns", "code", "says"),
    [
        ({"parent": [None, "zz"]}, "missing_dependency", "parent names the id 'zz', which no row of the job has"),
        ({"depends_on": [None, ["a", "zz"]]}, "missing_dependency", "depends_on names the id 'zz', which no row"),
        ({"depends_on": [None, "b"]}, "missing_dependency", "depends_on names the id 'b', which is this row itself"),
        (
            {"parent": [None, "a"], "parent_sample": [None, 2]},
            "missing_dependency",
            "parent_sample is 2, but the parent has n = 2",
        ),
    ],
)
def test_what_is_not_there(columns: dict[str, Any], code: str, says: str) -> None:
    found = find(["a", "b"], n=[2, 1], **columns)
    assert codes(found) == {1: code}
    assert says in found.errors[1].message
    assert not found.required
    assert not found.waiting


def test_the_samples_of_a_parent_with_an_error_are_unknown() -> None:
    found = find(["a", "b"], parent=[None, "a"], parent_sample=[None, 5], failed=(0,))
    assert codes(found) == {1: "dependency_failed"}


def test_a_circle_and_what_hangs_on_it() -> None:
    found = find(["a", "b", "c", "d", "e"], depends_on=["c", "a", "b", "c", None], parent=[None] * 4 + ["d"])
    assert codes(found) == dict.fromkeys((0, 1, 2), "dependency_cycle") | {
        3: "dependency_failed",
        4: "dependency_failed",
    }
    assert "'a' → 'c' → 'b' → 'a'" in found.errors[1].message
    assert "the row 'c'" in found.errors[4].message
    assert found.generation.tolist() == [0] * 5
    assert found.component.tolist() == [0, 1, 2, 3, 4]


def test_a_long_circle_is_shortened() -> None:
    found = find(list(range(100)), depends_on=[(row + 1) % 100 for row in range(100)])
    assert found.errors[50].message.endswith("0 → 1 → 2 → 3 → … → 0")
    long_ids = ["x" * 500, "y" * 500]
    assert len(find(long_ids, depends_on=long_ids[::-1]).errors[0].message) < 250


def test_the_error_names_the_row_that_failed_first_not_those_in_between() -> None:
    found = find(list(range(5)), depends_on=[None, 0, 1, 2, None], failed=(0,))
    assert [found.errors[row].message for row in (1, 2, 3)] == [
        "the row 0, which this one depends on, has an error"
    ] * 3
    assert 4 not in found.errors
    # Row 2 has an error of its own, so what is below it does not fail by row 0.
    assert "row 2," in find(list(range(5)), depends_on=[None, 0, 1, 2, None], failed=(0, 2)).errors[3].message


def test_of_rows_with_the_same_id_the_first_is_meant() -> None:
    assert find(["a", "a", "b"], depends_on=[None, None, "a"], failed=(1,)).required == {2: (0,)}


def test_a_null_id_is_no_row() -> None:
    assert codes(find(["a", None], depends_on=["None", None], failed=(1,))) == {0: "missing_dependency"}


@pytest.mark.parametrize("named", [7, "7", 7.0])
def test_numbers_may_be_written_as_text(named: object) -> None:
    assert find([5, 7, 9], depends_on=[None, None, [named]]).required == {2: (1,)}
    assert find(["5", "7", "9"], depends_on=[None, None, [named]]).required == {2: (1,)}


@pytest.mark.parametrize("named", ["07", " 7", "7.0", "1_0", "+7", "9" * 5000, 2**70, "½"])
def test_what_only_looks_like_an_id_is_none(named: object) -> None:
    assert codes(find([7, 10], depends_on=[named, None])) == {0: "missing_dependency"}


def test_both_spellings_of_an_id_are_one_row() -> None:
    assert find([5, 7], depends_on=[None, [5, "5"]]).depends_on == {1: (0,)}


def test_a_long_chain_needs_no_recursion() -> None:
    links: list[Any] = [None, *range(CHAIN - 1)]
    found = find(list(range(CHAIN)), parent=links)
    assert found.generation.tolist() == list(range(CHAIN))
    assert not found.component.any()
    assert found.failed_by(0) == tuple(range(1, CHAIN))
    assert len(find(list(range(CHAIN)), parent=links, failed=(0,)).errors) == CHAIN - 1
    links[0] = CHAIN - 1
    assert set(codes(find(list(range(CHAIN)), parent=links)).values()) == {"dependency_cycle"}


def test_many_paths_to_a_row_are_walked_once() -> None:
    """Two rows in each of 60 generations, each waiting for both before them: 2^60 paths."""
    links: list[Any] = [[], [], *([row - row % 2 - 2, row - row % 2 - 1] for row in range(2, 120))]
    assert find(list(range(120)), depends_on=links).failed_by(1) == tuple(range(2, 120))
    assert len(find(list(range(120)), depends_on=links, failed=(0,)).errors) == 118


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[list[int]], dict[int, int], list[int], set[int]]:
    """What each row names (a number past the last is no row), its parent's sample, each row's n, rows that failed."""
    size = draw(st.integers(1, 8))
    named = draw(st.lists(st.lists(st.integers(0, size), max_size=3), min_size=size, max_size=size))
    parents = draw(st.dictionaries(st.integers(0, size - 1), st.integers(0, size - 1), max_size=3))
    n = draw(st.lists(st.integers(1, 2), min_size=size, max_size=size))
    return named, parents, n, draw(st.sets(st.integers(0, size - 1), max_size=2))


@given(graphs())
def test_against_the_definition(graph: tuple[list[list[int]], dict[int, int], list[int], set[int]]) -> None:
    named, parents, n, failed = graph
    size = len(named)
    samples = dict.fromkeys(parents, 1)
    references = References(parents, samples, {row: tuple(ids) for row, ids in enumerate(named) if ids})
    found = find_dependencies(pa.array(range(size)), references, np.array(n), failed)

    edges = {row: {*named[row], *([parents[row]] if row in parents else [])} for row in range(size)}

    def is_missing(row: int) -> bool:
        parent = parents.get(row)
        too_few = parent is not None and parent not in failed and n[parent] < 2
        return size in edges[row] or row in edges[row] or too_few

    missing = {row for row in range(size) if row not in failed and is_missing(row)}

    def above(row: int, stop: set[int]) -> set[int]:
        """Rows that `row` waits for, through others that are not in `stop`."""
        reached: set[int] = set()
        new = [] if row in stop else [row]
        while new:
            later = edges[new.pop()] - reached
            reached |= later
            new += later - stop
        return reached

    own = failed | missing
    circle = {row for row in range(size) if row not in own and row in above(row, own)}
    broken = own | circle
    causes = {row: above(row, broken) & broken for row in range(size) if row not in broken}
    expected = dict.fromkeys(missing, "missing_dependency") | dict.fromkeys(circle, "dependency_cycle")
    expected |= {row: "dependency_failed" for row, why in causes.items() if why}
    assert codes(found) == expected
    for row, why in causes.items():
        assert not why or f"the row {min(why)}," in found.errors[row].message

    runs = {row: edges[row] for row in range(size) if edges[row] and row not in expected and row not in failed}
    assert {row: set(rows) for row, rows in found.required.items()} == runs
    assert {(t, row) for row, rows in runs.items() for t in rows} == {
        (target, row) for target, rows in found.waiting.items() for row in rows
    }

    def generation(row: int) -> int:
        return 1 + max(map(generation, runs[row])) if row in runs else 0

    assert found.generation.tolist() == [generation(row) for row in range(size)]
    undirected = nx.Graph([(row, target) for row, rows in runs.items() for target in rows])
    undirected.add_nodes_from(range(size))
    assert found.component.tolist() == [min(nx.node_connected_component(undirected, row)) for row in range(size)]
    below = {row: {other for other in runs if row in above(other, broken)} for row in range(size)}
    assert all(set(found.failed_by(row)) == below[row] for row in range(size))


def test_columns_of_arrow_and_of_json_lines_say_the_same() -> None:
    cells: dict[str, list[Any]] = {
        "parent": [None, "a", None],
        "parent_sample": [0, 1, None],
        "depends_on": [[], ["a", "b"], None],
    }
    as_arrow = {name: arrow(values) for name, values in cells.items()}
    expected = References({1: "a"}, {1: 1}, {1: ("a", "b")})
    for columns in (cells, as_arrow):
        references, errors = read_references(columns, 3)
        assert errors == {}
        assert (references.parents, references.depends_on) == (expected.parents, expected.depends_on)
        assert references.parent_samples.get(1) == 1
        assert not references.parent_samples.get(0)


def test_other_types_of_arrow() -> None:
    columns = {
        "parent": arrow(["a", None, "a"]).dictionary_encode(),
        "depends_on": arrow([[1], None, [2, 3]], pa.large_list(pa.int32())),
        "parent_sample": arrow([1.0, None, None]),
    }
    references, errors = read_references(columns, 3, first_row=10)
    assert errors == {}
    assert references == References({10: "a", 12: "a"}, {10: 1}, {10: (1,), 12: (2, 3)})
    assert read_references({"parent": arrow([None, None])}, 2) == (References({}, {}, {}), {})
    assert read_references({"depends_on": pa.chunked_array([], pa.list_(pa.string()))}, 0)[1] == {}


@pytest.mark.parametrize(
    ("column", "cell", "says"),
    [
        ("parent", ["a"], "parent holds a list, must be the id of a row"),
        ("parent", True, "parent holds true or false"),
        ("parent", 1.5, "parent holds a number"),
        ("parent", float("nan"), "parent holds a number"),
        ("depends_on", [None], "depends_on holds null"),
        ("depends_on", [["a"]], "depends_on holds a list, must be a list of ids"),
        ("depends_on", {"a": 1}, "depends_on holds an object"),
        ("parent_sample", -1, "parent_sample is -1, must be an integer from 0 to 65535"),
        ("parent_sample", "1", "parent_sample is '1'"),
        ("parent_sample", True, "parent_sample is True"),
        ("parent_sample", 1, "parent_sample is set, but parent is not"),
    ],
)
def test_wrong_cells_are_errors_of_their_rows(column: str, cell: object, says: str) -> None:
    for values in ([None, cell], arrow([None, cell])):
        references, errors = read_references({column: values}, 2, first_row=3)
        assert not references.parents
        assert not references.depends_on
        assert {row: error.code for row, error in errors.items()} == {4: "bad_parameter"}
        assert says in errors[4].message


def test_blocks_are_joined() -> None:
    blocks = [References({0: "a"}, {0: 1}, {}), References({}, {}, {5: ("b",)}), References({7: "c"}, {}, {})]
    assert References.joined(blocks) == References({0: "a", 7: "c"}, {0: 1}, {5: ("b",)})
