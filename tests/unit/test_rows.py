"""Rows come in blocks, and it makes no difference how large they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkv.constraints import ConstraintChecks
from batchkv.errors import RowError, UserError
from batchkv.io.read import JobSource, open_jobs
from batchkv.metrics import RunMetrics
from batchkv.random_numbers import row_key
from batchkv.rows import PromptLimits, Rows, take_in
from batchkv.sampling_params import SamplingParams
from tests.tiny_models import tiny_tokenizer

DEFAULTS = SamplingParams(max_tokens=7)
Taken = tuple[Rows, dict[int, RowError]]


def take(jobs: Any, *, defaults: SamplingParams = DEFAULTS, block_rows: int = 1 << 13, **options: Any) -> Taken:
    """The rows of a job, and which of them cannot run."""
    errors: dict[int, RowError] = {}

    def reject(found: Any) -> None:
        for row, error in found.items():
            errors.setdefault(row, error)  # as the ledger does

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchkv.io.read.BLOCK_ROWS", block_rows)
        source = jobs if isinstance(jobs, JobSource) else open_jobs(jobs, options.pop("limit", None))
        limits = PromptLimits(options.pop("vocab_size", 1000), options.pop("context_length", None))
        tokenizer = options.pop("tokenizer", None)
        checks = ConstraintChecks(tokenizer, limits.vocab_size, ())
        rows = take_in(source, defaults, tokenizer, limits, None, checks, reject, RunMetrics(), **options)
    return rows, dict(sorted(errors.items()))


def prompts(rows: Rows) -> list[list[int]]:
    return [rows.arena.row(row).tolist() for row in range(rows.num_rows)]


def codes(errors: dict[int, RowError]) -> dict[int, str]:
    return {row: error.code for row, error in errors.items()}


def same(one: Taken, other: Taken) -> bool:
    left, right = one[0], other[0]
    return (
        prompts(left) == prompts(right)
        and list(left.params) == list(right.params)
        and left.keys.tolist() == right.keys.tolist()
        and left.tenants.tolist() == right.tenants.tolist()
        and (left.id_kind, left.carried) == (right.id_kind, right.carried)
        and one[1] == other[1]
    )


IDS = st.sampled_from(["a", "b", "c", "d", "e", None])
CELLS = {
    "prompt_token_ids": st.none() | st.lists(st.integers(-1, 30), max_size=3),
    "n": st.sampled_from([None, 0, 1, 2]),
    "seed": st.sampled_from([None, 1, 2]),
    "tenant": st.sampled_from([None, "x", "y"]),
    "x": st.sampled_from([None, 1, 2]),
}
JOBS = st.lists(st.fixed_dictionaries({"id": IDS, **CELLS}), min_size=1, max_size=12)


@settings(max_examples=40)
@given(JOBS, st.integers(1, 5))
def test_blocks_of_any_size_give_the_same_rows(rows: list[dict[str, Any]], block_rows: int) -> None:
    schema = {"id": pa.string(), "prompt_token_ids": pa.list_(pa.int32()), "tenant": pa.string()}
    whole = {name: schema.get(name, pa.int64()) for name in ("id", *CELLS)}
    table = pa.Table.from_pylist(rows, pa.schema(whole))
    assert same(take(table, vocab_size=25), take(table, vocab_size=25, block_rows=block_rows))


@settings(max_examples=40)
@given(JOBS, st.integers(1, 5))
def test_lines_in_blocks_of_any_size_give_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], block_rows: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "jobs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert same(take(path, vocab_size=25), take(path, vocab_size=25, block_rows=block_rows))


@pytest.mark.parametrize("block_rows", [1, 3, 100])
def test_texts_are_tokenized_in_every_block(block_rows: int) -> None:
    tokenizer = tiny_tokenizer()
    texts = ["the king", "and you", "the king", "", "hello", "x" * 30, None]
    table = pa.table({"prompt": texts})
    rows, errors = take(table, tokenizer=tokenizer, vocab_size=128, context_length=20, block_rows=block_rows)
    expected = [tokenizer(text)["input_ids"] if text is not None else [] for text in texts]
    expected[5] = []
    assert prompts(rows) == expected
    assert codes(errors) == {5: "too_long", 6: "bad_prompt"}


def test_ids_that_an_earlier_block_has_are_found(tmp_path: Path) -> None:
    ids = ["a", "b", None, "c", "a", "d", None, "b", "a"]
    for block_rows in (3, 100):
        rows, errors = take(pa.table({"prompt_token_ids": [[1]] * 9, "id": ids}), block_rows=block_rows)
        assert codes(errors) == {
            2: "bad_id",
            4: "duplicate_id",
            6: "bad_id",
            7: "duplicate_id",
            8: "duplicate_id",
        }
        assert errors[7].message == "row 7 has the id of row 1: make ids unique"
        assert errors[8].message == "row 8 has the id of row 0: make ids unique"
        assert [len(prompt) for prompt in prompts(rows)] == [1, 1, 0, 1, 0, 1, 0, 0, 0]


def test_an_id_is_taken_even_by_a_row_that_cannot_run() -> None:
    table = pa.table({"prompt_token_ids": [[], [1], []], "id": [5, 5, 5]})
    assert codes(take(table)[1]) == {0: "empty_prompt", 1: "duplicate_id", 2: "empty_prompt"}


def test_ids_whose_hashes_are_equal_by_chance_are_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl.Series, "hash", lambda series: pl.zeros(len(series), pl.UInt64, eager=True))
    table = pa.table({"prompt_token_ids": [[1]] * 5, "id": ["a", "b", "c", "b", "d"]})
    assert codes(take(table, block_rows=2)[1]) == {3: "duplicate_id"}


def test_an_id_after_the_limit_is_not_taken() -> None:
    table = pa.table({"prompt_token_ids": [[1]] * 3, "id": ["a", "b", "a"]})
    rows, errors = take(table, limit=2, block_rows=2)
    assert (rows.num_rows, errors) == (2, {})


def test_the_first_id_of_a_job_tells_the_type_of_all(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    ids = [None, 5, "5", True, 2**63, 6, 5]
    path.write_text("".join(json.dumps({"prompt_token_ids": [1], "id": i}) + "\n" for i in ids))
    for block_rows in (1, 3, 100):
        rows, errors = take(path, block_rows=block_rows)
        assert rows.id_kind == "integer"
        expected = {0: "bad_id", 2: "bad_id", 3: "bad_id", 4: "bad_id", 6: "duplicate_id"}
        assert codes(errors) == expected
        assert errors[2].message == "the id of row 2 is a string, must be a 64-bit integer as in the rows before"


def test_ids_that_begin_in_a_later_block_are_unusable(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"prompt_token_ids": [1]}\n' * 3 + '{"prompt_token_ids": [1], "id": "a"}\n')
    assert codes(take(path)[1]) == dict.fromkeys(range(3), "bad_id")
    with pytest.raises(UserError, match=r"jobs.jsonl line 4: column id begins here: give an id to every row"):
        take(path, block_rows=3)


@pytest.mark.parametrize("block_rows", [2, 100])
def test_errors_carry_row_numbers_of_the_job(tmp_path: Path, block_rows: int) -> None:
    path = tmp_path / "jobs.jsonl"
    cells = [
        {"prompt_token_ids": [1]},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [1], "n": 0},
        {"prompt_token_ids": [1]},
        {"prompt_token_ids": [2000]},
        {"prompt_token_ids": [1] * 9},
        {"prompt_token_ids": [1], "stop": ["x"]},
        {"prompt_token_ids": [1], "regex": "x"},
    ]
    path.write_text("".join(json.dumps(cell) + "\n" for cell in cells) + "no json\n")
    rows, errors = take(path, context_length=9, block_rows=block_rows)
    assert codes(errors) == {
        1: "empty_prompt",
        2: "bad_parameter",
        4: "bad_token_id",
        5: "too_long",
        6: "bad_parameter",
        7: "bad_schema",
        8: "bad_json",
    }
    assert "no tokenizer" in errors[6].message
    assert [row for row, prompt in enumerate(prompts(rows)) if prompt] == [0, 3]
    assert rows.num_outputs == 2


def test_equal_parameters_are_one_object_and_seeds_are_only_in_the_keys() -> None:
    columns = {"n": [2, 1, 2, 2], "seed": [1, 2, 3, 1], "id": ["a", "b", "c", "d"]}
    rows, _ = take(pa.table({"prompt_token_ids": [[1]] * 4, **columns}), block_rows=3)
    assert set(rows.params.distinct) >= {SamplingParams(n=2, max_tokens=7), SamplingParams(n=1, max_tokens=7)}
    assert rows.params[0] is rows.params[2] is rows.params[3]
    assert {params.seed for params in rows.params} == {0}
    assert rows.keys.tolist() == [
        row_key(seed, row_id) for seed, row_id in zip(columns["seed"], columns["id"], strict=True)
    ]


def test_a_row_without_an_id_has_the_key_of_its_number() -> None:
    rows, _ = take(pa.table({"prompt_token_ids": [[1]] * 5}), defaults=SamplingParams(seed=9), block_rows=2)
    assert rows.keys.tolist() == [row_key(9, row) for row in range(5)]
    assert rows.id_kind == "numbered"


def test_rows_of_a_tenant_are_of_one_group_in_all_blocks() -> None:
    tenants = ["x", None, "y", "x", None, "y"]
    rows, _ = take(pa.table({"prompt_token_ids": [[1]] * 6, "tenant": tenants}), block_rows=2)
    assert rows.tenants.tolist() == [1, 0, 2, 1, 0, 2]


def test_tenants_that_begin_in_a_later_block_are_others_than_nobody(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"prompt_token_ids": [1]}\n' * 3 + '{"prompt_token_ids": [1], "tenant": "x"}\n')
    assert take(path, block_rows=3)[0].tenants.tolist() == [0, 0, 0, 1]


def test_token_ids_are_in_a_mapped_file_and_stay_when_their_pages_are_released() -> None:
    rows, _ = take(pa.table({"prompt_token_ids": [[1, 2], [], [3]]}), block_rows=1)
    assert not rows.arena.tokens.flags.writeable
    rows.release_pages()
    assert prompts(rows) == [[1, 2], [], [3]]


@pytest.mark.parametrize("table", [pa.table({}), pa.table({"prompt_token_ids": pa.array([], pa.list_(pa.int32()))})])
def test_no_rows_are_an_empty_job(table: pa.Table) -> None:
    rows, errors = take(table)
    assert (rows.num_rows, rows.num_outputs, errors) == (0, 0, {})
    rows.release_pages()


def test_rows_that_all_have_errors_are_a_job_without_tokens() -> None:
    rows, errors = take(pa.table({"prompt_token_ids": [[], None]}))
    assert (rows.num_rows, rows.num_outputs) == (2, 0)
    assert codes(errors) == {0: "empty_prompt", 1: "bad_prompt"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": ["a"], "id": [1]}, r"none of the columns prompt.*only question, id"),
        ({"prompt_token_ids": [[1]], "finish_reason": ["b"]}, "columns of its own named finish_reason: rename"),
        ({"prompt": ["a"]}, "without a tokenizer only prompt_token_ids"),
        ({"prompt_token_ids": [[1]], "id": [1.5]}, "column id is double"),
    ],
)
def test_a_job_that_cannot_be_run_at_all_is_a_user_error(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        take(pa.table(columns))


def test_a_prompt_column_in_any_file_is_enough(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "2.jsonl").write_text('{"prompt_token_ids": [1]}\n')
    rows, errors = take(tmp_path / "*.jsonl")
    assert (prompts(rows), codes(errors)) == ([[], [1]], {0: "bad_prompt"})


def test_carried_columns_have_one_schema_over_all_blocks(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    cells: list[dict[str, Any]] = [{"x": 1}, {"y": "a"}, {"x": 1.5}]
    path.write_text("".join(json.dumps({"prompt_token_ids": [1], **cell}) + "\n" for cell in cells))
    for block_rows in (1, 100):
        assert take(path, block_rows=block_rows)[0].carried == pa.schema({"x": pa.float64(), "y": pa.string()})
    path.write_text('{"prompt_token_ids": [1], "x": 1}\n{"prompt_token_ids": [1], "x": "a"}\n')
    with pytest.raises(UserError, match=r"'x' has conflicting types, int64 in .*line 1 and string in .*line 2"):
        take(path, block_rows=1)


def test_an_integer_too_large_for_the_floats_of_another_file_is_found_before_any_work(tmp_path: Path) -> None:
    tables = [{"x": [2**60 + 1]}, {"x": [1.5]}]
    for number, columns in enumerate(tables):
        pq.write_table(pa.table({"prompt_token_ids": [[1]], **columns}), tmp_path / f"{number}.parquet")
    with pytest.raises(UserError, match=r"0\.parquet row 0: column 'x' is double elsewhere"):
        take(tmp_path / "*.parquet")


def test_progress_counts_rows_and_times_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, int, int]] = []
    take(pa.table({"prompt_token_ids": [[1]] * 5}), block_rows=2, on_progress=lambda *progress: said.append(progress))
    assert said == [("tokenize", 2, 0), ("tokenize", 4, 0), ("tokenize", 5, 0)]


def test_a_full_disk_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no device that is always full")
    monkeypatch.setattr("batchkv.mapped_array.TemporaryFile", lambda **where: open("/dev/full", "r+b", buffering=0))  # noqa: SIM115
    with pytest.raises(UserError, match="No space left on device: free some space"):
        take(pa.table({"prompt_token_ids": [[1]]}))
