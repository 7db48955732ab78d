"""A job in many small waves, in small blocks, or interrupted and gone on with, gives the results it gives at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchkv.engine import Engine
from batchkv.errors import UserError
from batchkv.io.write import write_table
from batchkv.progress import Watch
from batchkv.run_folder import open_run_folder, parts_path
from batchkv.sampling_params import SamplingParams
from batchkv.writer import summary_of
from tests.tiny_models import FAMILIES, VOCAB_SIZE, tiny_tokenizer

SAMPLING = SamplingParams(max_tokens=5, temperature=0.8, n=2)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(FAMILIES["llama"](), tiny_tokenizer(), max_batch_rows=8)


def job(rows: int = 24) -> pa.Table:
    """Rows that share prefixes, in random order; some are the same, greedy, bad, or of another number of samples."""
    rng = np.random.default_rng(7)
    stems = [rng.integers(6, VOCAB_SIZE, length).tolist() for length in (20, 30, 10)]
    prompts = [stems[row % 3] + rng.integers(6, VOCAB_SIZE, row % 5).tolist() for row in range(rows)]
    prompts[5] = [VOCAB_SIZE]
    prompts[11] = []
    return pa.table(
        {
            "id": [f"row {row}" for row in range(rows)],
            "prompt_token_ids": pa.array(prompts, pa.list_(pa.int32())),
            "temperature": [0.0 if row % 4 == 0 else None for row in range(rows)],
            "n": [row % 3 + 1 if row % 7 else None for row in range(rows)],
            "logprobs": [row % 2 == 0 for row in range(rows)],
            "tag": list(range(rows)),
        }
    )


def in_small_portions(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    for name, size in {"waves.MAX_OUTPUTS": 6, "results.BUCKET_ROWS": 5, "io.read.BLOCK_ROWS": 4, **sizes}.items():
        monkeypatch.setattr(f"batchkv.{name}", size)


def same_samples(one: pa.Table, other: pa.Table) -> bool:
    """All but what is known of the prompt: a prefix that is in two waves is computed twice."""
    left, right = ([*table.drop_columns(["num_cached_tokens", "logprobs"]).to_pylist()] for table in (one, other))
    logprobs = zip(one["logprobs"].to_pylist(), other["logprobs"].to_pylist(), strict=True)
    return left == right and all(
        (a is None) == (b is None) and (a is None or np.allclose(a, b, atol=1e-5)) for a, b in logprobs
    )


@pytest.mark.parametrize(
    "sizes", [{"waves.MAX_OUTPUTS": 1}, {"waves.MAX_OUTPUTS": 6}, {"waves.MAX_TOKENS": 100, "waves.MAX_OUTPUTS": 100}]
)
def test_many_small_waves_give_the_results_of_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    whole = engine.run(job(), SAMPLING)
    in_small_portions(monkeypatch, **sizes)
    parted = engine.run(job(), SAMPLING)
    assert same_samples(whole, parted)
    before, after = summary_of(whole.schema), summary_of(parted.schema)
    assert before["waves"] == 1
    assert after["waves"] > 3
    for name in ("rows", "samples", "ok", "errors", "generated_tokens", "prompt_tokens"):
        assert after[name] == before[name]
    assert after["prefill_tokens"] == after["planned_prefill_tokens"] >= before["prefill_tokens"]
    assert after["peak_kv_tokens"] <= after["planned_peak_kv_tokens"]
    for table, summary in ((whole, before), (parted, after)):
        computed = np.array(table["num_prompt_tokens"]) - np.array(table["num_cached_tokens"])
        assert computed.sum() == summary["prefill_tokens"]


def test_the_plan_of_many_waves_is_what_then_happens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    in_small_portions(monkeypatch)
    planned = engine.plan(job(), SAMPLING)
    done = summary_of(engine.run(job(), SAMPLING).schema)
    assert planned.totals.waves == done["waves"] > 3
    assert planned.totals.prefill_tokens == done["prefill_tokens"]


def test_tenants_share_nothing(engine: Engine) -> None:
    prompts = pa.array([[7] * 20] * 4, pa.list_(pa.int32()))
    table = pa.table({"prompt_token_ids": prompts, "tenant": ["a", "b", "a", None]})
    results = engine.run(table, SamplingParams(max_tokens=3))
    summary = summary_of(results.schema)
    assert summary["prefill_tokens"] == 3 * 20
    assert results["num_cached_tokens"].to_pylist() == [0, 0, 20, 0]
    assert len(set(map(tuple, results["token_ids"].to_pylist()))) == 1


class Stopped(BaseException):
    """The user's interrupt, or whatever ends a run."""


def stopping_after(samples: int) -> Callable[[int], Callable[[int, int], None]]:
    """A run that has finished so many samples is stopped."""

    def start(outputs: int) -> Callable[[int, int], None]:
        ended = 0

        def progress(now: int, generated: int) -> None:
            nonlocal ended
            ended += now
            if ended >= samples:
                raise Stopped

        return progress

    return start


def run_into(engine: Engine, jobs: Path, out: Path, **options: Any) -> dict[str, Any]:
    with open_run_folder(out, overwrite=options.pop("overwrite", False)) as folder:
        return engine.run_into(folder, jobs, options.pop("sampling", SAMPLING), **options)


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    write_table(job(), tmp_path / "jobs.parquet")
    return tmp_path / "jobs.parquet"


@pytest.mark.parametrize("small", [False, True])
def test_a_run_that_is_stopped_is_gone_on_with_and_gives_the_same_results(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, jobs: Path, small: bool
) -> None:
    if small:
        in_small_portions(monkeypatch)
    whole = run_into(engine, jobs, tmp_path / "whole.parquet")
    out = tmp_path / "out.parquet"
    for _ in range(3):
        with pytest.raises(Stopped):
            run_into(engine, jobs, out, watch=Watch(on_start=stopping_after(5)))
        assert not out.exists()
    asked: list[int] = []

    def start(outputs: int) -> Callable[[int, int], None]:
        asked.append(outputs)
        return lambda ended, generated: None

    summary = run_into(engine, jobs, out, watch=Watch(on_start=start))
    expected, found = pq.read_table(tmp_path / "whole.parquet"), pq.read_table(out)
    assert same_samples(expected, found)
    assert found["num_cached_tokens"] == expected["num_cached_tokens"]
    assert summary["resumed_samples"] >= 15
    assert asked == [summary["samples"] - summary["resumed_samples"]]
    assert summary["generated_tokens"] < whole["generated_tokens"]
    for name in ("rows", "samples", "ok", "errors"):
        assert summary[name] == whole[name]
    assert not parts_path(out).exists()


def test_a_run_that_was_stopped_after_its_last_sample_only_writes(engine: Engine, tmp_path: Path, jobs: Path) -> None:
    out = tmp_path / "out.parquet"
    whole = engine.run(job(), SAMPLING)
    samples = summary_of(whole.schema)["samples"]
    with open_run_folder(out, overwrite=False) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchkv.engine.in_order", lambda *arguments: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            engine.run_into(folder, jobs, SAMPLING)
    summary = run_into(engine, jobs, out)
    assert (summary["resumed_samples"], summary["generated_tokens"], summary["steps"]) == (samples, 0, 0)
    assert same_samples(pq.read_table(out), whole)


def test_another_job_model_or_parameter_is_refused_while_a_run_is_unfinished(tmp_path: Path, jobs: Path) -> None:
    model = FAMILIES["llama"]()
    engine, out = Engine(model, tiny_tokenizer()), tmp_path / "out.parquet"
    with pytest.raises(Stopped):
        run_into(engine, jobs, out, watch=Watch(on_start=stopping_after(5)))
    with pytest.raises(UserError, match=r"another job: max_tokens was 5 and is 6: give the same command"):
        run_into(engine, jobs, out, sampling=SamplingParams(max_tokens=6, temperature=0.8, n=2))
    with pytest.raises(UserError, match="another job: limit was None and is 3:"):
        run_into(engine, jobs, out, limit=3)
    write_table(job(rows=23), jobs)
    with pytest.raises(UserError, match=r"another job: job has changed \(jobs\.parquet\):"):
        run_into(engine, jobs, out)
    write_table(job(), jobs)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[0] += 1
    with pytest.raises(UserError, match="another job: model has changed:"):
        run_into(engine, jobs, out)
    summary = run_into(engine, jobs, out, overwrite=True)
    assert summary["resumed_samples"] == 0
    assert pq.read_table(out).num_rows > 0


def test_memory_and_batch_sizes_may_change_when_a_run_is_gone_on_with(
    engine: Engine, tmp_path: Path, jobs: Path
) -> None:
    out = tmp_path / "out.parquet"
    with pytest.raises(Stopped):
        run_into(engine, jobs, out, watch=Watch(on_start=stopping_after(10)))
    kv_memory = 200 * engine.layout.bytes_per_token
    small = Engine(engine.model, tiny_tokenizer(), max_batch_rows=4, max_batch_tokens=32, kv_memory=kv_memory)
    assert run_into(small, jobs, out)["resumed_samples"] >= 10
    assert same_samples(pq.read_table(out), engine.run(job(), SAMPLING))


def test_a_job_that_is_no_file_has_nothing_to_go_on_with(engine: Engine, tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match="cannot be resumed: write it to one")
    with refused, open_run_folder(tmp_path / "out.parquet", overwrite=False) as folder:
        engine.run_into(folder, job(), SAMPLING)
    assert list(tmp_path.iterdir()) == []


def test_a_column_that_the_result_cannot_hold_is_found_before_any_work(engine: Engine, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.parquet"
    write_table(job().append_column("raw", pa.array([b"\xff"] * 24)), jobs)
    with pytest.raises(UserError, match="column 'raw' is binary"):
        run_into(engine, jobs, tmp_path / "out.jsonl", watch=Watch(on_start=stopping_after(0)))
