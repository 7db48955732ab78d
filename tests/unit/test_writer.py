"""The result has the job's order, every sample its row, and every column its promise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchkv.errors import RowError
from batchkv.io.columns import RESULT_COLUMNS
from batchkv.io.read import read_jobs
from batchkv.io.write import write_table
from batchkv.job import Job, output_offsets, read_job
from batchkv.sampling_params import SamplingParams
from batchkv.writer import Completion, result_table, summary_of, with_summary


def detokenize(rows: list[np.ndarray]) -> list[str]:
    return ["".join(chr(token) for token in row) for row in rows]


def completion(text: str, *, finish: Any = "length", stop_string: str | None = None) -> Completion:
    token_ids = np.array([ord(c) for c in text], dtype=np.int32)
    return Completion(token_ids, -np.arange(len(text), dtype=np.float32), finish, stop_string)


def job_of(**columns: Any) -> Job:
    rows = len(next(iter(columns.values())))
    return read_job(pa.table({"prompt": ["p"] * rows, **columns}), SamplingParams())


def table_of(
    job: Job,
    completions: Mapping[int, Completion],
    errors: Mapping[int, RowError] | None = None,
) -> pa.Table:
    errors = errors or {}
    slots = int(output_offsets(job, errors)[-1])
    num_prompt = np.arange(10, 10 + job.num_rows)
    return result_table(job, errors, completions, num_prompt, np.arange(slots), detokenize)


def test_a_row_has_a_slot_per_sample_and_an_error_row_has_one() -> None:
    job = job_of(n=[3, 2, 0, 4])
    errors = {3: RowError("too_long", "too long")}
    assert output_offsets(job, {}).tolist() == [0, 3, 5, 6, 10]
    assert output_offsets(job, errors).tolist() == [0, 3, 5, 6, 7]


def test_every_column_of_every_slot() -> None:
    job = job_of(id=["a", "b", "c"], n=[2, 1, 1], logprobs=[True, None, True], tag=pa.array([1, 2, 3], pa.int8()))
    errors = {2: RowError("too_long", "too long by 1")}
    found = {0: completion("xy"), 1: completion("z", finish="stop"), 2: completion("")}
    table = table_of(job, found, errors)
    assert table.to_pydict() == {
        "id": ["a", "a", "b", "c"],
        "sample_index": [0, 1, 0, 0],
        "text": ["xy", "z", "", None],
        "token_ids": [[120, 121], [122], [], None],
        "finish_reason": ["length", "stop", "length", "error"],
        "logprobs": [[0.0, -1.0], [0.0], None, None],
        "num_prompt_tokens": [10, 10, 11, 0],
        "num_cached_tokens": [0, 1, 2, 0],
        "num_generated_tokens": [2, 1, 0, 0],
        "error_code": [None, None, None, "too_long"],
        "error": [None, None, None, "too long by 1"],
        "tag": [1, 1, 2, 3],
    }


def test_the_columns_and_their_types_do_not_depend_on_the_rows() -> None:
    full = table_of(job_of(id=["a"], x=[1]), {0: completion("x")})
    failed = table_of(job_of(id=["a"], n=[0], x=[1]), {})
    empty = table_of(read_job(pa.table({"prompt": [], "id": pa.array([], pa.string())}), SamplingParams()), {})
    assert full.column_names == [*RESULT_COLUMNS, "x"]
    assert failed.schema == full.schema
    assert empty.schema == full.schema.remove(len(RESULT_COLUMNS))
    assert empty.num_rows == 0
    assert full.schema.field("token_ids").type == pa.list_(pa.int32())
    assert full.schema.field("logprobs").type == pa.list_(pa.float32())


def test_errors_of_the_job_are_reported_without_being_passed_again() -> None:
    job = job_of(n=[0, 1])
    table = table_of(job, {1: completion("x")})
    assert table.column("error_code").to_pylist() == ["bad_parameter", None]
    assert table.column("error").to_pylist()[0].startswith("n is 0")


def test_text_is_cut_before_the_first_stop_string_if_one_ended_the_sample() -> None:
    job = job_of(n=[4], stop=[["END", "D", "<eos>"]])
    found = {
        0: completion("a END", finish="stop", stop_string="END"),
        1: completion("a END", finish="length"),
        2: completion("a", finish="stop", stop_string="<eos>"),
        3: completion("xD END", finish="stop", stop_string="END"),
    }
    table = table_of(job, found)
    assert table.column("text").to_pylist() == ["a ", "a END", "a", "x"]
    assert table.column("num_generated_tokens").to_pylist() == [5, 5, 1, 6]


def test_a_shared_completion_is_decoded_once_and_all_in_one_call() -> None:
    calls: list[int] = []

    def counting(rows: list[np.ndarray]) -> list[str]:
        calls.append(len(rows))
        return detokenize(rows)

    shared = completion("x")
    completions = [shared, completion("x"), shared]
    job = job_of(id=[1, 2, 3])
    table = result_table(job, {}, completions, np.zeros(3, int), np.zeros(3, int), counting)
    assert calls == [2]
    assert table.column("text").to_pylist() == ["x", "x", "x"]


@pytest.mark.parametrize("completions", [{0: completion("x")}, {0: completion("x"), 1: None}])
def test_a_missing_sample_is_a_bug_not_an_error_row(completions: Any) -> None:
    with pytest.raises(KeyError):
        table_of(job_of(n=[2]), completions)


@pytest.mark.parametrize("chunk_slots", [1, 2, 5, 100])
def test_chunks_of_any_size_give_the_same_table(monkeypatch: pytest.MonkeyPatch, chunk_slots: int) -> None:
    job = job_of(id=[3, 1, 2, 0], n=[3, 0, 4, 1], tag=pa.chunked_array([["a", "b"], ["c", "d"]]))
    found = {slot: completion("x" * slot) for slot in range(9) if slot != 3}
    whole = table_of(job, found)
    monkeypatch.setattr("batchkv.writer.CHUNK_SLOTS", chunk_slots)
    table = table_of(job, found)
    assert table == whole
    assert table.column("tag").to_pylist() == ["a"] * 3 + ["b"] + ["c"] * 4 + ["d"]
    assert table.column("id").num_chunks == -(-9 // chunk_slots)


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".jsonl"])
def test_the_result_can_be_written_and_read_in_every_format(tmp_path: Path, ending: str) -> None:
    job = job_of(id=["a", "b"], n=[2, 0], empty=[{}, {}], nested=[{"x": [{}]}, None])
    table = with_summary(table_of(job, {0: completion("é"), 1: completion("")}), {"rows": 2})
    write_table(table, tmp_path / f"out{ending}")
    assert read_jobs(tmp_path / f"out{ending}").num_rows == 3


def test_the_summary_is_in_the_metadata() -> None:
    summary = {"rows": 1, "prefill_s": 0.5}
    table = with_summary(table_of(job_of(id=[1]), {0: completion("x")}), summary)
    assert json.loads(table.schema.metadata[b"batchkv.summary"]) == summary
    assert summary_of(table) == summary
