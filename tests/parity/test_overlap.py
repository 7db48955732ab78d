"""The host working a step ahead of the device changes no token, no logprob and no count.

On a CPU nothing is gained by it, but it is the same code.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from batchkv import executor
from batchkv.engine import Engine
from batchkv.metrics import RunMetrics
from batchkv.model_runner import ModelRunner
from batchkv.sampling_params import SamplingParams
from batchkv.scheduler import Scheduler
from batchkv.transfers import HostCopies
from batchkv.writer import summary_of
from tests.tiny_models import FAMILIES, VOCAB_SIZE, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("checked_steps")
END_TOKENS = list(range(5, VOCAB_SIZE, 9))  # a sample meets one of them after some ten tokens
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, n=3, top_p=0.95)
GREEDY = SamplingParams(max_tokens=24)


@cache
def model_of(family: str) -> PreTrainedModel:
    model = FAMILIES[family]()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = END_TOKENS
    return model


def jobs(count: int = 40) -> pa.Table:
    """Rows under two headers, some of which end where others go on; of some there are two."""
    random = np.random.default_rng(5)
    headers = [random.integers(0, VOCAB_SIZE, n).tolist() for n in (30, 18)]
    rows = [headers[i % 2] + random.integers(0, VOCAB_SIZE, int(random.integers(0, 9))).tolist() for i in range(count)]
    return pa.table({"id": list(range(count)), "prompt_token_ids": pa.array(rows, pa.list_(pa.int32()))})


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> list[RunMetrics]:
    """Those of each run."""
    runs: list[RunMetrics] = []

    def metrics(**values: Any) -> RunMetrics:
        runs.append(RunMetrics(**values))
        return runs[-1]

    monkeypatch.setattr("batchkv.engine.RunMetrics", metrics)
    return runs


def run(
    model: PreTrainedModel, sampling: SamplingParams, table: pa.Table | None = None, *, overlap: bool, **config: Any
) -> pa.Table:
    engine = Engine(model, tiny_tokenizer(), **config)
    engine._overlap = overlap
    return engine.run(table or jobs(), sampling)


def both(
    model: PreTrainedModel,
    sampling: SamplingParams,
    counters: list[RunMetrics],
    table: pa.Table | None = None,
    **config: Any,
) -> pa.Table:
    """Runs in both modes, and compares results and counts."""
    sampling = replace(sampling, logprobs=True)
    plain, overlapped = (run(model, sampling, table, overlap=overlap, **config) for overlap in (False, True))
    assert plain.drop(["logprobs"]).to_pylist() == overlapped.drop(["logprobs"]).to_pylist()
    logprobs = (results["logprobs"].combine_chunks() for results in (plain, overlapped))
    ours, theirs = (np.array(lists.flatten().to_pylist()) for lists in logprobs)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    for metrics, results in zip(counters[-2:], (plain, overlapped), strict=True):
        summary = summary_of(results.schema)
        assert summary["prefill_tokens"] == summary["planned_prefill_tokens"] + summary["recomputed_tokens"]
        assert summary["peak_kv_tokens"] <= summary["planned_peak_kv_tokens"]
        assert metrics.generated_tokens == counters[-1].generated_tokens
    assert counters[-2].wasted_rows == 0
    return overlapped


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_sequences_that_end_by_a_token(family: str, sampling: SamplingParams, counters: list[RunMetrics]) -> None:
    results = both(model_of(family), sampling, counters)
    stopped = results.filter(np.array(results["finish_reason"].to_pylist()) == "stop")
    assert 0 < len(stopped) < len(results)
    may_go_on = {(r["id"], r["sample_index"]) for r in stopped.to_pylist() if len(r["token_ids"]) < sampling.max_tokens}
    assert 0 < counters[-1].wasted_rows <= len(may_go_on)  # one each, and none for the last token there may be


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("limits", [{"max_batch_tokens": 11, "max_batch_rows": 7}, {"page_size": 4}], ids=str)
def test_small_steps_and_pages(family: str, limits: dict[str, int], counters: list[RunMetrics]) -> None:
    both(model_of(family), replace(SAMPLED, n=2, max_tokens=10), counters, **limits)
    assert counters[-1].wasted_rows > 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_preemption_under_a_tight_budget(family: str, counters: list[RunMetrics]) -> None:
    """The samples of a first row end at once, so that more are let in than fit to their ends; these run on."""
    rest = jobs(10)
    table = pa.table(
        {
            "id": list(range(11)),
            "prompt_token_ids": pa.concat_arrays(
                [pa.array([[3]], pa.list_(pa.int32())), rest["prompt_token_ids"].combine_chunks()]
            ),
            "n": [40] + 10 * [2],
            "stop_token_ids": [list(range(VOCAB_SIZE))] + 10 * [[]],
            "ignore_eos": [False] + [i % 3 > 0 for i in range(10)],
        }
    )
    sampling = SamplingParams(max_tokens=30, temperature=1.0)
    kv_memory = 170 * Engine(model_of(family)).layout.bytes_per_token
    both(model_of(family), sampling, counters, table, kv_memory=kv_memory, page_size=4)
    assert counters[-2].preempted_sequences > 0
    assert counters[-1].preempted_sequences > 0
    assert counters[-1].recomputed_tokens > 0


def test_stop_strings(counters: list[RunMetrics]) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=1.0, n=3, stop=("e", "th", "1"), ignore_eos=True)
    results = both(model_of("llama"), sampling, counters)
    assert set(results["finish_reason"].to_pylist()) == {"stop", "length"}
    assert counters[-1].wasted_rows > 0


def test_one_token_each_wastes_nothing(counters: list[RunMetrics]) -> None:
    both(model_of("llama"), SamplingParams(max_tokens=1, temperature=1.0, n=3), counters)
    assert counters[-1].wasted_rows == 0
    assert counters[-1].steps == counters[-2].steps


def test_logits_that_are_no_distribution_end_their_rows_alone(counters: list[RunMetrics]) -> None:
    model = FAMILIES["llama"]()
    bad_tokens = torch.tensor(END_TOKENS)

    def spoil(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        last_tokens = kwargs["input_ids"][0, kwargs["logits_to_keep"]]
        output.logits[0, torch.isin(last_tokens, bad_tokens)] = torch.nan

    sampling = SamplingParams(max_tokens=12, temperature=1.0, n=2)
    whole = run(model, replace(sampling, logprobs=True), overlap=False)
    model.register_forward_hook(spoil, with_kwargs=True)
    results = both(model, sampling, counters)
    assert counters[-1].wasted_rows > 0
    failed = {row["id"] for row in results.to_pylist() if row["error_code"] == "bad_logits"}
    assert 0 < len(failed) < 40
    expected = [row for row in whole.to_pylist() if row["id"] not in failed]
    assert [row for row in results.to_pylist() if row["id"] not in failed] == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_what_the_host_does_while_the_device_is_at_a_step(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In overlap mode it takes the tokens of the step before and prepares the next step."""
    calls: list[str] = []

    def spy(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    engine = Engine(model_of("llama"))
    engine._overlap = overlap
    for owner, name in [(ModelRunner, "prepare"), (ModelRunner, "forward"), (HostCopies, "wait")]:
        spy(owner, name)
    spy(Scheduler, "schedule")
    spy(executor, "sample")
    engine.run(jobs(1), SamplingParams(max_tokens=4, ignore_eos=True))
    plain = ["schedule", "prepare", "forward", "sample", "wait"]
    first, others = ["schedule", "prepare", "forward"], ["schedule", "prepare", "sample", "forward", "wait"]
    assert calls == (first + 3 * others + ["sample", "wait"] if overlap else 4 * plain)
