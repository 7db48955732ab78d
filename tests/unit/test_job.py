"""One bad row is one error row; only a job that cannot be run at all is a UserError."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkv.errors import UserError
from batchkv.io.columns import JOB_COLUMNS, PARAMETER_COLUMNS, RESULT_COLUMNS
from batchkv.io.read import open_jobs
from batchkv.io.write import write_table
from batchkv.job import Job, check_columns, check_rows
from batchkv.sampling_params import SamplingParams
from tests.jobs import read_block, read_job

DEFAULTS = SamplingParams(max_tokens=7, temperature=0.5)
USER = {"role": "user", "content": "hi"}


def job_of_lines(folder: Path, *rows: dict[str, Any], **options: Any) -> Job:
    path = folder / "jobs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_job(path, DEFAULTS, **options)


def codes(job: Job) -> dict[int, str]:
    return {row: error.code for row, error in job.errors.items()}


class TestPrompts:
    @pytest.mark.parametrize("as_lines", [True, False])
    def test_each_row_has_exactly_one_prompt(self, tmp_path: Path, as_lines: bool) -> None:
        rows: list[dict[str, Any]] = [
            {"prompt": "text", "messages": None, "prompt_token_ids": None},
            {"prompt": None, "messages": [USER], "prompt_token_ids": None},
            {"prompt": None, "messages": None, "prompt_token_ids": [3, 4]},
            {"prompt": "text", "messages": None, "prompt_token_ids": [3]},
            {"prompt": None, "messages": None, "prompt_token_ids": None},
        ]
        job = job_of_lines(tmp_path, *rows) if as_lines else read_job(pa.Table.from_pylist(rows), DEFAULTS)
        assert list(job.prompts)[:2] == ["text", [USER]]
        assert isinstance(job.prompts[2], np.ndarray)
        assert job.prompts[2].dtype == np.int32
        assert job.prompts[2].tolist() == [3, 4]
        assert list(job.prompts)[3:] == [None, None]
        assert codes(job) == {3: "bad_prompt", 4: "bad_prompt"}
        assert job.errors[3].message == "prompt and prompt_token_ids are given together, must be only one of them"
        assert job.errors[4].message.startswith("none of prompt, messages, prompt_token_ids is given")

    def test_a_prompt_of_another_type_is_an_error_of_its_row(self, tmp_path: Path) -> None:
        job = job_of_lines(tmp_path, {"prompt": "a"}, {"prompt": ["private"]}, {"prompt": 5})
        assert codes(job) == {1: "bad_prompt", 2: "bad_prompt"}
        assert job.errors[1].message == "prompt is a list, must be a string"
        assert codes(read_job(pa.table({"prompt": [1, None]}), DEFAULTS)) == {
            0: "bad_prompt",
            1: "bad_prompt",
        }

    def test_an_empty_text_is_left_to_the_tokenizer(self) -> None:
        assert list(read_job(pa.table({"prompt": [""]}), DEFAULTS).prompts) == [""]

    @pytest.mark.parametrize("dtype", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
    def test_all_kinds_of_strings_are_prompts(self, dtype: pa.DataType) -> None:
        column = pa.array(["a", None, "b"]).cast(dtype)
        job = read_job(pa.table({"prompt": column, "id": pa.array(["x", "y", "z"]).cast(dtype)}), DEFAULTS)
        assert list(job.prompts) == ["a", None, "b"]
        assert job.ids == pa.array(["x", "y", "z"])

    @pytest.mark.parametrize(
        ("messages", "code", "message"),
        [
            ("no json, private", "bad_messages", "messages is a string that is no JSON: Expecting value"),
            ("[" * 100_000, "bad_messages", "nested too deeply"),
            ('"private"', "bad_messages", "messages is a string, must be a list"),
            ({"role": "user"}, "bad_messages", "messages is an object, must be a list"),
            ([], "empty_prompt", "empty list"),
            ("[]", "empty_prompt", "empty list"),
            ([USER, "private"], "bad_messages", "message 1 is a string, must be an object"),
            (
                [{"content": "private"}],
                "bad_messages",
                "the role of message 0 is None, must be one of system",
            ),
            ([{"role": "human", "content": "private"}], "bad_messages", "role of message 0 is 'human'"),
            ([{"role": ["user"], "content": "private"}], "bad_messages", "role of message 0 is"),
            ([{"role": "user"}], "bad_messages", "message 0 has no content"),
            ([{"role": "user", "content": 5}], "bad_messages", "message 0 has a number as content"),
            ([{"role": "user", "content": ["private"]}], "bad_messages", "content part without a type"),
            ([{"role": "user", "content": [{"type": "text"}]}], "bad_messages", "text part without text"),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": "private"}]}],
                "unsupported",
                "type 'image_url', only text",
            ),
        ],
    )
    def test_bad_conversations_say_which_message_and_quote_none(
        self, tmp_path: Path, messages: object, code: str, message: str
    ) -> None:
        job = job_of_lines(tmp_path, {"messages": messages}, {"messages": [USER]})
        assert codes(job) == {0: code}
        assert message in job.errors[0].message
        assert "private" not in job.errors[0].message

    def test_messages_may_be_their_json_text(self) -> None:
        conversation = [{"role": "system", "content": "be brief"}, USER]
        job = read_job(pa.table({"messages": [json.dumps(conversation)]}), DEFAULTS)
        assert list(job.prompts) == [conversation]

    def test_fields_that_arrow_added_are_dropped_and_extra_fields_kept(self) -> None:
        calls = [{"type": "function", "function": {"name": name, "arguments": {name: 1}}} for name in ("f", "g")]
        conversations = [
            [USER, {"role": "assistant", "tool_calls": calls}],
            [{"role": "tool", "name": "f", "content": "2"}],
        ]
        job = read_job(pa.table({"messages": conversations}), DEFAULTS)
        assert list(job.prompts) == conversations

    def test_text_parts_are_kept_as_they_are(self, tmp_path: Path) -> None:
        parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        assert job_of_lines(tmp_path, {"messages": parts}).prompts[0] == parts


class TestTokenIds:
    @pytest.mark.parametrize(
        "dtype",
        [
            pa.list_(pa.int32()),
            pa.list_(pa.int64()),
            pa.list_(pa.uint8()),
            pa.large_list(pa.uint64()),
            pa.list_view(pa.int64()),
        ],
    )
    def test_all_lists_of_integers_become_int32(self, dtype: pa.DataType) -> None:
        chunks = pa.chunked_array([pa.array([[9], [1, 2]], dtype)[1:], pa.array([[3], [4, 5, 6]], dtype)])
        job = read_job(pa.table({"prompt_token_ids": chunks}), DEFAULTS)
        assert [list(np.asarray(prompt)) for prompt in job.prompts] == [[1, 2], [3], [4, 5, 6]]
        assert {np.asarray(prompt).dtype for prompt in job.prompts} == {np.dtype(np.int32)}

    def test_a_fixed_size_list_is_a_list(self) -> None:
        column = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
        job = read_job(pa.table({"prompt_token_ids": column}), DEFAULTS)
        assert [list(np.asarray(prompt)) for prompt in job.prompts] == [[1, 2], [3, 4]]

    @pytest.mark.parametrize("as_lines", [True, False])
    def test_bad_lists_are_errors_of_their_rows(self, tmp_path: Path, as_lines: bool) -> None:
        lists = [[1], [-1], [1, None], [2**31], [], [2**31 - 1], None]
        rows = [{"prompt_token_ids": ids} for ids in lists]
        job = job_of_lines(tmp_path, *rows) if as_lines else read_job(pa.Table.from_pylist(rows), DEFAULTS)
        assert codes(job) == {
            1: "bad_token_id",
            2: "bad_token_id",
            3: "bad_token_id",
            4: "empty_prompt",
            6: "bad_prompt",
        }
        assert [row for row, prompt in enumerate(job.prompts) if prompt is not None] == [0, 5]

    @pytest.mark.parametrize("dtype", [pa.int32(), pa.int64(), pa.null()])
    def test_row_groups_of_a_file_make_no_difference(self, tmp_path: Path, dtype: pa.DataType) -> None:
        lists = [[1, 2], [], None, [-1], [1, None], [7] * 9, None, [3]] * 3
        if pa.types.is_null(dtype):
            lists = [[], None] * 12
        texts = ["a" if ids is None else None for ids in lists]
        columns = {"x": range(24), "prompt_token_ids": pa.array(lists, pa.list_(dtype)), "prompt": texts, "y": texts}
        pq.write_table(pa.table(columns), tmp_path / "jobs.parquet", row_group_size=7)
        read, given = read_job(tmp_path / "jobs.parquet", DEFAULTS), read_job(pa.table(columns), DEFAULTS)
        assert [str(prompt) for prompt in read.prompts] == [str(prompt) for prompt in given.prompts]
        assert read.errors == given.errors
        assert read.carried.to_pydict() == given.carried.to_pydict()
        assert read.carried.column_names == ["x", "y"]
        pq.write_table(pa.table(columns)[:0], tmp_path / "empty.parquet")
        assert read_job(tmp_path / "empty.parquet", DEFAULTS).num_rows == 0

    def test_small_row_groups_are_read_together(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"prompt": ["a"] * 300}), tmp_path / "jobs.parquet", row_group_size=1)
        assert [block.num_rows for block in open_jobs(tmp_path / "jobs.parquet").blocks()] == [300]

    def test_an_id_beyond_64_bits_does_not_spoil_the_column(self) -> None:
        column = pa.array([[1], [2**64 - 1]], pa.list_(pa.uint64()))
        assert codes(read_job(pa.table({"prompt_token_ids": column}), DEFAULTS)) == {1: "bad_token_id"}

    def test_one_odd_list_in_json_lines_does_not_spoil_the_others(self, tmp_path: Path) -> None:
        lists = [[1, 2], [1.0], ["1"], [True], 5, "12"]
        job = job_of_lines(tmp_path, *({"prompt_token_ids": ids} for ids in lists))
        assert codes(job) == {
            1: "bad_token_id",
            2: "bad_token_id",
            3: "bad_token_id",
            4: "bad_prompt",
            5: "bad_prompt",
        }

    def test_empty_lists_alone_are_empty_prompts(self) -> None:
        job = read_job(pa.table({"prompt_token_ids": [[], []]}), DEFAULTS)
        assert codes(job) == {0: "empty_prompt", 1: "empty_prompt"}

    def test_lists_of_other_types_are_bad_prompts(self) -> None:
        job = read_job(pa.table({"prompt_token_ids": [["a"], None]}), DEFAULTS)
        assert codes(job) == {0: "bad_prompt", 1: "bad_prompt"}
        assert "list<" in job.errors[0].message


class TestParameters:
    ACCEPTED = (
        ("n", 3, 3),
        ("n", 3.0, 3),
        ("max_tokens", 5, 5),
        ("temperature", 1, 1.0),
        ("top_p", 0.5, 0.5),
        ("top_k", 4, 4),
        ("top_k", -1, 0),
        ("min_p", 0.1, 0.1),
        ("seed", -5, -5),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("stop", "x", ("x",)),
        ("stop", ["x", "y"], ("x", "y")),
        ("stop", [], ()),
        ("stop_token_ids", [1, 2], (1, 2)),
        ("ignore_eos", True, True),
        ("logprobs", True, True),
        ("logprobs", 1, True),
        ("logprobs", 0, False),
    )
    REFUSED = (
        ("n", 0, "n is 0, must be an integer from 1 to 65536"),
        ("n", 2.5, "n is 2.5, must be an integer"),
        ("n", True, "n is True, must be an integer"),
        ("n", "3", "n is '3', must be an integer"),
        ("n", 10**12, "must be an integer from 1 to 65536"),
        ("max_tokens", 0, "max_tokens is 0, must be an integer from 1"),
        ("max_tokens", 2**40, "max_tokens is"),
        ("temperature", "hot", "temperature is 'hot', must be a finite number"),
        ("temperature", -1, "temperature is -1.0, must be 0 or more"),
        ("temperature", math.nan, "temperature is nan, must be a finite number"),
        ("temperature", math.inf, "temperature is inf, must be a finite number"),
        ("temperature", 10**400, "must be a finite number"),
        ("temperature", True, "temperature is True"),
        ("top_p", 0, "top_p is 0.0, must be in (0, 1]"),
        ("top_p", 1.5, "top_p is 1.5, must be in (0, 1]"),
        ("top_k", -2, "top_k is -2, must be an integer from 0 (off)"),
        ("min_p", 2, "min_p is 2.0, must be in [0, 1]"),
        ("seed", 2**64, "must be a 64-bit integer"),
        ("stop", "", "none of them empty"),
        ("stop", ["x", None], "must be a string or a list of strings"),
        ("stop", 5, "stop is 5, must be a string or a list of strings"),
        ("stop_token_ids", [-1], "stop_token_ids is -1"),
        ("stop_token_ids", 5, "stop_token_ids is 5, must be a list of integers"),
        ("ignore_eos", "yes", "ignore_eos is 'yes', must be true or false"),
        ("logprobs", 5, "logprobs is 5, must be true or false: no alternatives"),
    )

    @pytest.mark.parametrize("in_struct", [True, False])
    @pytest.mark.parametrize(("name", "value", "expected"), ACCEPTED)
    def test_accepted_values(self, tmp_path: Path, name: str, value: object, expected: object, in_struct: bool) -> None:
        row = {"sampling_params": {name: value}} if in_struct else {name: value}
        job = job_of_lines(tmp_path, {"prompt": "a", **row}, {"prompt": "b"})
        assert job.errors == {}
        got = getattr(job.params[0], name)
        assert (got, type(got)) == (expected, type(expected))
        assert job.params[1] is DEFAULTS

    @pytest.mark.parametrize("in_struct", [True, False])
    @pytest.mark.parametrize(("name", "value", "message"), REFUSED)
    def test_refused_values(self, tmp_path: Path, name: str, value: object, message: str, in_struct: bool) -> None:
        row = {"sampling_params": {name: value}} if in_struct else {name: value}
        job = job_of_lines(tmp_path, {"prompt": "a", **row}, {"prompt": "b"})
        assert codes(job) == {0: "bad_parameter"}
        assert message in job.errors[0].message
        assert len(job.errors[0].message) < 200
        assert list(job.prompts) == [None, "b"]
        assert job.params[0] is DEFAULTS

    def test_a_column_beats_the_struct_and_null_falls_back(self) -> None:
        table = pa.table(
            {
                "prompt": ["a", "b", "c"],
                "n": pa.array([2.0, None, None]),
                "sampling_params": [{"n": 3, "seed": 1}, {"n": 3, "seed": None}, None],
            }
        )
        job = read_job(table, DEFAULTS)
        assert [(params.n, params.seed) for params in job.params] == [(2, 1), (3, 0), (1, 0)]
        assert {params.max_tokens for params in job.params} == {7}

    def test_unknown_fields_of_the_struct_are_named(self) -> None:
        structs = [{"best_of": 2, "n": 1}, {"best_of": None, "n": 2}]
        job = read_job(pa.table({"prompt": ["a", "b"], "sampling_params": structs}), DEFAULTS)
        assert codes(job) == {0: "bad_parameter"}
        assert "unknown fields ['best_of'], can have n, max_tokens" in job.errors[0].message
        assert job.params[1].n == 2

    def test_a_struct_column_of_another_type_is_an_error_of_its_rows(self) -> None:
        job = read_job(pa.table({"prompt": ["a", "b"], "sampling_params": ["n=2", None]}), DEFAULTS)
        assert codes(job) == {0: "bad_parameter"}

    def test_one_and_true_and_one_point_zero_are_not_confused(self, tmp_path: Path) -> None:
        job = job_of_lines(tmp_path, *({"prompt": "a", "n": n} for n in (1, True, 1.0, "1")))
        assert codes(job) == {1: "bad_parameter", 3: "bad_parameter"}

    def test_every_combination_of_cells_is_its_own(self) -> None:
        grid = [(n, top_k, seed) for n in (1, 2) for top_k in (3, 4) for seed in (5, 6)]
        columns = dict(zip(("n", "top_k", "seed"), map(list, zip(*grid, strict=True)), strict=True))
        job = read_job(pa.table({"prompt": ["a"] * 8, **columns}), DEFAULTS)
        assert [(params.n, params.top_k, params.seed) for params in job.params] == grid

    def test_equal_parameters_are_one_object(self) -> None:
        frame = pl.DataFrame({"prompt": ["a"] * 4, "n": [2, 3, 2, None], "stop": [["x"], [], ["x"], None]})
        params = read_job(frame, DEFAULTS).params
        assert params[0] is params[2]
        assert params[3] is DEFAULTS
        assert params[1] == SamplingParams(max_tokens=7, temperature=0.5, n=3)

    def test_identical_rows_are_checked_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = []
        check = SamplingParams.__post_init__
        monkeypatch.setattr(SamplingParams, "__post_init__", lambda params: (made.append(1), check(params)))
        table = pa.table({"prompt": ["a"] * 1000, "n": [1, 2] * 500, "temperature": [0.0] * 1000})
        assert len(read_job(table, DEFAULTS).params) == 1000
        assert len(made) == 2

    def test_long_values_are_cut_in_messages(self, tmp_path: Path) -> None:
        job = job_of_lines(tmp_path, {"prompt": "a", "temperature": "x" * 10_000})
        assert len(job.errors[0].message) < 150


class TestIds:
    def test_rows_without_an_id_column_are_numbered(self) -> None:
        assert read_job(pa.table({"prompt": ["a", "b"]}), DEFAULTS).ids == pa.array([0, 1], pa.int64())

    @pytest.mark.parametrize("dtype", [pa.int8(), pa.uint32(), pa.uint64(), pa.int64()])
    def test_integers_become_int64(self, dtype: pa.DataType) -> None:
        ids = read_job(pa.table({"prompt": ["a", "b"], "id": pa.array([7, 8], dtype)}), DEFAULTS).ids
        assert ids == pa.array([7, 8], pa.int64())

    def test_null_ids_are_errors_of_their_rows_and_the_same_id_twice_is_not_looked_for(self) -> None:
        table = pa.table({"prompt": ["p"] * 5, "id": pa.chunked_array([["a", None], ["b", "a", None]])})
        job = read_job(table, DEFAULTS)
        assert job.ids.to_pylist() == ["a", None, "b", "a", None]
        assert codes(job) == {1: "bad_id", 4: "bad_id"}
        assert job.errors[4].message == "the id of row 4 is null"

    def test_the_first_id_of_json_lines_tells_the_type_of_all(self, tmp_path: Path) -> None:
        ids = [None, 5, "5", True, 2**63, 6, 5]
        job = job_of_lines(tmp_path, *({"prompt": "a", "id": i} for i in ids))
        assert job.ids == pa.array([None, 5, None, None, None, 6, 5], pa.int64())
        assert codes(job) == {
            0: "bad_id",
            2: "bad_id",
            3: "bad_id",
            4: "bad_id",
        }
        assert job.errors[2].message == "the id of row 2 is a string, must be a 64-bit integer as in the rows before"

    @pytest.mark.parametrize("column", [pa.array([1.5]), pa.array([[1]]), pa.array([2**64 - 1], pa.uint64())])
    def test_other_types_are_unusable(self, column: pa.Array) -> None:
        with pytest.raises(UserError, match="column id is"):
            read_job(pa.table({"prompt": ["a"], "id": column}), DEFAULTS)

    def test_ids_that_are_all_null_are_all_bad(self) -> None:
        job = read_job(pa.table({"prompt": ["a"], "id": [None]}), DEFAULTS)
        assert (codes(job), job.id_kind) == ({0: "bad_id"}, None)

    def test_a_later_block_goes_on_with_the_numbers(self) -> None:
        table = read_block(pa.table({"prompt": ["a", "b"]}))
        job = check_rows(table, DEFAULTS, first_row=7, id_kind="numbered")
        assert (job.ids, job.id_kind) == (pa.array([7, 8]), "numbered")

    def test_messages_of_a_later_block_have_the_numbers_of_the_job(self, tmp_path: Path) -> None:
        path = tmp_path / "jobs.jsonl"
        path.write_text('{"prompt": "a", "id": 5}\n{"prompt": "a", "id": null}\n{"prompt": "a", "id": "x"}\n')
        job = check_rows(read_block(path), DEFAULTS, first_row=100, id_kind="string")
        assert job.ids == pa.array([None, None, "x"])
        assert [error.message for error in job.errors.values()] == [
            "the id of row 100 is a number, must be a string as in the rows before",
            "the id of row 101 is null",
        ]

    @pytest.mark.parametrize(("kind", "dtype"), [("string", pa.string()), ("integer", pa.int64())])
    def test_a_later_block_without_ids_has_only_bad_ones(self, kind: Any, dtype: pa.DataType) -> None:
        for table in (pa.table({"prompt": ["a"]}), pa.table({"prompt": ["a"], "id": [None]})):
            job = check_rows(read_block(table), DEFAULTS, first_row=3, id_kind=kind)
            assert (job.ids, job.id_kind, codes(job)) == (pa.nulls(1, dtype), kind, {0: "bad_id"})

    def test_ids_that_begin_in_a_later_block_are_unusable(self, tmp_path: Path) -> None:
        path = tmp_path / "jobs.jsonl"
        path.write_text('\n{"prompt": "a", "id": 5}\n')
        with pytest.raises(UserError, match=r"jobs.jsonl line 2: column id begins here: give an id to every row"):
            check_rows(read_block(path), DEFAULTS, first_row=1, id_kind="numbered")

    def test_a_column_of_ids_of_another_type_than_before_is_unusable(self) -> None:
        with pytest.raises(UserError, match="column id is int64, but string before"):
            check_rows(read_block(pa.table({"prompt": ["a"], "id": [5]})), DEFAULTS, first_row=1, id_kind="string")


class TestColumns:
    def test_other_columns_are_carried_in_order_with_their_types(self) -> None:
        table = pa.table(
            {
                "zeta": pa.array([1, 2], pa.int8()),
                "prompt": ["a", "b"],
                "n": [1, 1],
                "alpha": pa.array(["x", None]).dictionary_encode(),
                "empty": [{}, {}],
            }
        )
        carried = read_job(table, DEFAULTS).carried
        assert carried.column_names == ["zeta", "alpha", "empty"]
        assert carried.select(["zeta", "alpha"]) == table.select(["zeta", "alpha"])
        assert carried.schema.field("empty").type == pa.null()

    @pytest.mark.parametrize("name", sorted(set(RESULT_COLUMNS) - JOB_COLUMNS))
    def test_a_column_that_the_result_has_itself_is_unusable(self, name: str) -> None:
        with pytest.raises(UserError, match=f"named {name}: rename"):
            check_columns(["prompt", name])

    def test_rows_without_any_prompt_column_are_unusable(self) -> None:
        with pytest.raises(UserError, match=r"none of the columns prompt, messages.*only question, id: rename"):
            check_columns(["question", "id"])

    @pytest.mark.parametrize("table", [pa.table({}), pa.table({"prompt": pa.array([], pa.string())})])
    def test_no_rows_are_an_empty_job(self, table: pa.Table) -> None:
        job = read_job(table, DEFAULTS)
        assert (job.num_rows, list(job.prompts), list(job.params), job.errors) == (0, [], [], {})

    def test_limit_takes_the_first_rows(self, tmp_path: Path) -> None:
        job = job_of_lines(tmp_path, *({"prompt": str(i), "x": i} for i in range(5)), limit=2)
        assert (job.num_rows, list(job.prompts), job.carried.num_rows) == (2, ["0", "1"], 2)


class TestTenants:
    def test_tenants_are_texts_and_most_jobs_have_none(self, tmp_path: Path) -> None:
        assert read_job(pa.table({"prompt": ["a"]}), DEFAULTS).tenants is None
        job = job_of_lines(tmp_path, *({"prompt": "a", "tenant": tenant} for tenant in ("me", 5, "5", None)))
        assert (job.tenants, job.errors) == (["me", "5", "5", None], {})
        assert job.carried.column_names == []

    @pytest.mark.parametrize("tenant", [True, 1.5, ["me"], {}])
    def test_other_values_are_errors_of_their_rows(self, tmp_path: Path, tenant: object) -> None:
        job = job_of_lines(tmp_path, {"prompt": "a", "tenant": tenant}, {"prompt": "a", "tenant": "me"})
        assert codes(job) == {0: "bad_parameter"}
        assert job.errors[0].message == "tenant must be a string or an integer"
        assert job.tenants == [None, "me"]


def test_a_row_reports_the_first_thing_that_is_wrong_with_it(tmp_path: Path) -> None:
    wrong = {"id": None, "prompt": 5, "n": 0, "tenant": "a"}
    job = job_of_lines(tmp_path, wrong, {**wrong, "id": "a"}, {**wrong, "id": "b", "prompt": "x"})
    assert codes(job) == {0: "bad_id", 1: "bad_prompt", 2: "bad_parameter"}


def test_a_bad_line_is_a_row_with_only_that_error(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n{"id": \n{"id": "b", "prompt": "y"}\n')
    job = read_job(path, DEFAULTS)
    assert job.ids.to_pylist() == ["a", None, "b"]
    assert codes(job) == {1: "bad_json"}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=[]), max_size=8)
    | st.sampled_from(["user", "[]", '[{"role": "user", "content": "x"}]', "\0", "", 2**63, 2**64, 1e308]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "n", "seed", "q", ""]), inner)
    ),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(st.sampled_from(sorted(JOB_COLUMNS)), JSON, max_size=6), max_size=4)


@settings(deadline=None, max_examples=50)
@given(ROWS)
def test_no_values_of_the_job_columns_stop_the_other_rows(rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = job_of_lines(Path(folder), {"id": None, "prompt": "good"}, *rows, {"prompt": "good"})
        carried = dict(zip(job.carried.column_names, job.carried.columns, strict=True))
        write_table(pa.table({**carried, "ids": job.ids}), Path(folder) / "carried.parquet")
    assert job.num_rows == len(rows) + 2
    assert len(job.prompts) == len(job.params) == job.num_rows
    for row, prompt in enumerate(job.prompts):
        assert (prompt is None) == (row in job.errors)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(PARAMETER_COLUMNS), st.lists(JSON, min_size=1, max_size=4))
def test_odd_arrow_columns_are_errors_of_rows_too(name: str, values: list[Any]) -> None:
    try:
        column = pa.array(values)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return
    job = read_job(pa.table({"prompt": ["a"] * len(values), name: column}), DEFAULTS)
    assert set(codes(job).values()) <= {"bad_parameter"}
