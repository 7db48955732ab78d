"""Bad input is a row error or one clear line, whatever it is: inputs that once were not, and others like them."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import pyarrow as pa
import pytest

from batchkv.errors import UserError
from batchkv.io.columns import one_line, shown_names
from batchkv.io.read import open_jobs
from batchkv.io.write import write_table
from tests.fuzz import seeds
from tests.fuzz.mutators import make_input
from tests.fuzz.seeds import MARK, JobFile
from tests.fuzz.target import Target

CORPUS = sorted((Path(__file__).parents[1] / "fuzz" / "corpus").iterdir())
FINE = {"id": "fine", "prompt": "the one"}
SURROGATE = r"\ud800"

Codes = Callable[[Any], dict[int, str]]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target()


@pytest.fixture
def codes(target: Target, tmp_path: Path) -> Codes:
    """What is wrong with each row of JSON lines, given as objects or as text. Nothing else may be."""

    def run(lines: list[Any]) -> dict[int, str]:
        path = tmp_path / "job.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        assert target.problems(path) == []
        errors: Any = {}
        target.run(path, errors)
        return {row: error.code for row, error in sorted(errors.items())}

    return run


def put(file: JobFile, folder: Path) -> Path:
    path = folder / f"input{file.suffix}"
    path.write_bytes(file.content)
    return path


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_inputs_that_were_a_crash_or_a_traceback(target: Target, path: Path, tmp_path: Path) -> None:
    assert target.problems(put(JobFile(path.suffix, path.read_bytes()), tmp_path)) == []


def test_the_corpus_without_mutations(target: Target, tmp_path: Path) -> None:
    for file in seeds.seed_files():
        assert target.problems(put(file, tmp_path)) == []


@pytest.mark.parametrize("part", range(6))
def test_mutations(target: Target, part: int, tmp_path: Path) -> None:
    for number in range(50 * part, 50 * part + 50):
        assert target.problems(put(make_input(7, number), tmp_path)) == [], number


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2**62], pa.timestamp("s")),
        pa.array([0], pa.timestamp("us", "Mars/Olympus")),
        pa.array([2**62], pa.duration("ns")),
        pa.array([2**31 - 1], pa.date32()),
        pa.array([[2**31 - 1]], pa.list_(pa.date32())),
        pa.array(["a"], pa.string_view()),
        pa.array([2**64 - 1], pa.uint64()),
        pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), pa.array([["a"]])),
        pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array([{"a": 1}])),
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"], pa.binary(16))),
        pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}"])),
    ],
    ids=lambda column: str(column.type),
)
@pytest.mark.parametrize("name", ["id", "n", "parent", "parent_sample", "tenant", "messages", "continuation", "kept"])
def test_columns_of_any_type(target: Target, name: str, column: pa.Array, tmp_path: Path) -> None:
    table = pa.table({"prompt": ["the one"], name: column})
    assert target.problems(put(JobFile(".arrow", seeds.arrow_file(table)), tmp_path)) == []


def test_texts_that_are_not_utf8(tmp_path: Path) -> None:
    texts = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe"))
    table = pa.table({"prompt": texts})
    for jobs in (table, put(JobFile(".parquet", seeds.parquet(table)), tmp_path)):
        with pytest.raises(UserError, match=r"UTF8|UTF-8"):
            list(open_jobs(jobs).blocks())


def test_small_batches_are_read_together(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"] * 500})
    path = put(JobFile(".arrow", seeds.arrow_file(table, rows=1)), tmp_path)
    assert [block.num_rows for block in open_jobs(path).blocks()] == [500]


def test_json_lines_refuse_what_they_cannot_hold(tmp_path: Path) -> None:
    for column in (
        pa.array([1], pa.decimal256(60)),
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"], pa.binary(16))),
        pa.array([{"a": [b""]}]),
    ):
        with pytest.raises(UserError, match=r"column 'x' is (binary|decimal256), which JSON cannot hold"):
            write_table(pa.table({"x": column}), tmp_path / "out.jsonl")


def test_messages_are_one_short_line() -> None:
    assert one_line("a\0b\x0e") == "a\\x00b\\x0e"
    assert one_line("first\nsecond") == "first"
    assert len(one_line("x" * 10_000)) == 200
    assert shown_names(["n\n" * 30] * 3) == ", ".join(["n"] * 3)
    assert len(shown_names(str(i) for i in range(10**5))) < 200


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1 << 10)


@pytest.mark.parametrize("text", ["x" * 10_000_000, "the and on " * 900_000])
def test_a_prompt_of_10_megabytes(codes: Codes, text: str) -> None:
    peak, started = peak_bytes(), process_time()
    rows = [{"prompt": text}, {"messages": [{"role": "user", "content": text}]}, {"prompt": "the one"}]
    assert codes(rows) == {0: "too_long", 1: "too_long"}
    assert peak_bytes() - peak < 1 << 30
    assert process_time() - started < 10  # for all of it twice


def test_a_line_without_end(codes: Codes) -> None:
    endless = '{"prompt": "' + "x" * 100_000_000
    peak = peak_bytes()
    assert codes([FINE, endless, {"id": "later", "prompt": "the"}]) == {1: "bad_json"}
    assert peak_bytes() - peak < 1 << 30


@pytest.mark.parametrize("deep", ["[" * 10_000 + "]" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000, "[" * 10_000])
@pytest.mark.parametrize("column", ["id", "prompt", "messages", "stop", "json_schema", "kept"])
def test_deep_json(codes: Codes, column: str, deep: str) -> None:
    assert codes([FINE, f'{{"id": "deep", "{column}": {deep}}}']) == {1: "bad_json"}


def test_deep_json_in_a_text(codes: Codes) -> None:
    deep = "[" * 10_000 + "]" * 10_000
    rows = [{"id": "a", "messages": deep}, {"id": "b", "prompt": "x", "json_schema": deep}, FINE]
    assert codes(rows) == {0: "bad_messages", 1: "bad_schema"}


@pytest.mark.parametrize(
    "cells",
    [
        f'"id": "{SURROGATE}", "prompt": "x"',
        f'"id": "a", "prompt": "{SURROGATE}"',
        f'"id": "a", "messages": [{{"role": "user", "content": "{SURROGATE}"}}]',
        *(
            f'"id": "a", "prompt": "x", {column}'
            for column in (
                f'"choices": ["{SURROGATE}", "b"]',
                f'"continuation": "{SURROGATE}"',
                f'"tenant": "{SURROGATE}"',
                f'"parent": "{SURROGATE}"',
                f'"depends_on": ["{SURROGATE}"]',
                f'"kept": "{SURROGATE}"',
                f'"{SURROGATE}": 1',
            )
        ),
    ],
)
def test_halves_of_surrogate_pairs(codes: Codes, cells: str) -> None:
    assert codes([FINE, f"{{{cells}}}"]) == {1: "bad_json"}


def test_halves_of_surrogate_pairs_in_a_text(codes: Codes) -> None:
    messages = f'[{{"role": "user", "content": "{SURROGATE}"}}]'
    assert codes([FINE, {"id": "a", "messages": messages}]) == {1: "bad_prompt"}


def test_nul_is_a_character(codes: Codes) -> None:
    nul = "a\0b"
    rows = [
        {"id": nul, "prompt": nul, "stop": [nul], "tenant": nul, "kept": nul, nul: nul},
        {"id": "b", "messages": [{"role": "user", "content": nul}]},
        {"id": "c", "prompt": nul, "continuation": nul},
        {"id": "d", "prompt": nul, "choices": [nul, "\0"]},
        {"id": "e", "prompt": nul, "parent": nul},
        {"id": "f", "prompt": nul, "depends_on": [nul]},
        {"id": "g", "messages": [{"role": nul, "content": nul}]},
    ]
    assert set(codes(rows).items()) <= {(3, "bad_schema"), (6, "bad_messages")}  # no token of the tokenizer is NUL


@pytest.mark.parametrize(
    "cell",
    [
        *(f'"n": {value}' for value in (str(10**18), "NaN", "1e308", "1e999", "true", "0", "-1", '"2"', "[]")),
        *(f'"temperature": {value}' for value in ("NaN", "Infinity", "-Infinity", "1e999", "-1", "true", '"hot"')),
        '"sampling_params": {"n": 1e308}',
        '"sampling_params": {"temperature": NaN}',
    ],
)
def test_numbers_that_are_none(codes: Codes, cell: str) -> None:
    assert codes([FINE, f'{{"id": "a", "prompt": "x", {cell}}}']) == {1: "bad_parameter"}


def test_many_stop_strings(codes: Codes) -> None:
    started = process_time()
    assert codes([FINE, {"id": "a", "prompt": "x", "stop": [f"stop{i}" for i in range(100_000)]}]) == {}
    assert process_time() - started < 5


def test_schemas_that_never_end(codes: Codes) -> None:
    big = json.dumps({"enum": ["x" * 10_000_000]})
    schemas = ['{"$ref": "#"}', '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', big]
    rows = [{"id": str(i), "prompt": "x", "json_schema": schema} for i, schema in enumerate(schemas)]
    assert codes([FINE, *rows]) == dict.fromkeys([1, 2, 3], "bad_schema")


def test_no_message_quotes_a_row(target: Target, tmp_path: Path) -> None:
    rows = [
        {"id": 1, "prompt": [MARK]},
        {"id": 2, "messages": [{"role": "user", "content": {"text": MARK}}]},
        {"id": 3, "messages": f"[{MARK}"},
        {"id": 4, "prompt": MARK, "tenant": [MARK]},
        {"id": 5, "prompt": MARK, "continuation": {"text": MARK}},
        {"id": [MARK], "prompt": MARK},
    ]
    path = put(JobFile(".jsonl", seeds.json_lines(rows) + f'{{"prompt": "{MARK}\n'.encode()), tmp_path)
    errors: Any = {}
    target.run(path, errors)
    assert sorted(errors) == list(range(7))
    assert not any(MARK in error.message for error in errors.values())
