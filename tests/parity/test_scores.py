"""Given tokens get the log-probabilities that the model's own forward pass gives each row alone, however they run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from batchkv.engine import Engine
from batchkv.kernels.native_attention import is_covered
from batchkv.kv_layout import KVLayout, layer_specs
from batchkv.sampling_params import SamplingParams
from batchkv.writer import Completion
from tests.scored_jobs import Outcome, Row, run_rows
from tests.tiny_models import FAMILIES, VOCAB_SIZE

GENERATED = SamplingParams(max_tokens=6, logprobs=True)
SCORED_FAMILIES = ["llama", "gemma2", "qwen3_moe"]
BATCH_INVARIANT = ["llama", "gemma2"] if is_covered(torch.float32) else []


@cache
def model_of(family: str) -> PreTrainedModel:
    return FAMILIES[family]()


def job() -> list[Row]:
    """Two contexts with continuations of all kinds, among rows that are generated."""
    random = np.random.default_rng(7)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.integers(0, VOCAB_SIZE, count).tolist())

    header = tokens(25)
    contexts = [header + tokens(11), header + tokens(4)]
    rows = [Row(context, tokens(int(random.integers(1, 14)))) for context in contexts for _ in range(4)]
    long = rows[0].continuation + tokens(9)
    rows += [
        Row(contexts[0], long),  # another row's continuation is its prefix
        Row(contexts[0], long[:-1]),
        Row(contexts[0], long[:-3] + tokens(3)),
        Row(contexts[0], long),  # a twin
        Row(contexts[0] + long[:2], long[2:5]),  # the context has tokens of a continuation
        Row(header, contexts[0][len(header) :]),  # the continuation is the rest of a context
        Row(header[:1], header[1:]),  # all but the first token
        Row(contexts[1], tokens(1)),
        Row(contexts[1], tokens(1)),
        Row(tokens(1), tokens(1)),
    ]
    generated = [Row(contexts[0]), Row(contexts[1]), Row(contexts[0] + long[:-1]), Row(contexts[0] + long), Row(header)]
    return [row for pair in zip(rows, generated * 4, strict=False) for row in pair]


@cache
def alone(family: str) -> list[tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]]:
    """Log-probabilities and whether each token is the likeliest, from the model's own forward pass."""
    found = []
    for row in job():
        first = len(row.context)
        with torch.no_grad():
            logits = model_of(family)(torch.tensor([row.tokens])).logits[0, first - 1 : -1].double()
        target = torch.tensor(row.continuation, dtype=torch.int64)
        logprobs = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
        found.append((logprobs.numpy(), (logits.argmax(-1) == target).numpy()))
    return found


def check(family: str, outcome: Outcome, order: list[int] | None = None) -> None:
    """Every row's result, and that every token of the trie went through once."""
    rows, expected = job(), alone(family)
    for i, completion in zip(order or range(len(rows)), outcome.completions, strict=True):
        assert completion is not None
        if not rows[i].continuation:
            assert completion.is_greedy is None
            assert len(completion.token_ids) == GENERATED.max_tokens
            continue
        assert completion.finish_reason == "length"
        assert completion.token_ids.tolist() == list(rows[i].continuation)
        assert completion.logprobs.dtype == np.float32
        assert completion.token_ids.dtype == np.int32
        np.testing.assert_allclose(completion.logprobs, expected[i][0], rtol=0, atol=1e-4)
        assert completion.is_greedy is not None
        assert completion.is_greedy.tolist() == expected[i][1].tolist()
    metrics = outcome.metrics
    assert metrics.prefill_tokens == outcome.plan.prefill_tokens == outcome.plan.trie.num_tokens
    assert metrics.recomputed_tokens == 0


def bits(outcome: Outcome, order: list[int] | None = None) -> list[Any]:
    """Everything in the results, in the order of the job."""

    def of(completion: Completion | None) -> Any:
        assert completion is not None
        greedy = None if completion.is_greedy is None else completion.is_greedy.tolist()
        return completion.token_ids.tolist(), completion.logprobs.tobytes(), greedy

    order = order or list(range(len(outcome.completions)))
    return [of(outcome.completions[order.index(i)]) for i in range(len(order))]


def one_path_budget(family: str) -> int:
    """Bytes that hold the longest row and little else."""
    layout = KVLayout(layer_specs(model_of(family).config), 4)
    tokens = max(len(row.tokens) + (0 if row.continuation else GENERATED.max_tokens) for row in job())
    spare = sum(size for window, size in zip(layout.windows, layout.group_bytes_per_token, strict=True) if window)
    return tokens * layout.bytes_per_token + 2 * spare


VARIANTS: dict[str, dict[str, Any]] = {
    "one row at a time": {"max_batch_rows": 1},
    "small steps": {"max_batch_tokens": 7, "max_batch_rows": 7, "page_size": 4},
    "tight": {"kv_memory": "one path"},
    "nothing shared": {"no_prefix_sharing": True},
}


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("variant", ["default", *VARIANTS])
@pytest.mark.parametrize("family", SCORED_FAMILIES)
def test_scores_are_those_of_each_row_alone(family: str, variant: str, overlap: bool) -> None:
    config = dict(VARIANTS.get(variant, {}))
    if "kv_memory" in config:
        config["kv_memory"] = one_path_budget(family)
    engine = Engine(model_of(family), **config)
    engine._overlap = overlap
    outcome = run_rows(engine, job(), GENERATED)
    check(family, outcome)
    if family in BATCH_INVARIANT:
        assert bits(outcome) == bits(default(family))


@cache
def default(family: str) -> Outcome:
    return run_rows(Engine(model_of(family)), job(), GENERATED)


@pytest.mark.parametrize("family", SCORED_FAMILIES)
def test_the_order_of_the_rows_changes_nothing(family: str) -> None:
    order = np.random.default_rng(3).permutation(len(job())).tolist()
    outcome = run_rows(Engine(model_of(family)), [job()[i] for i in order], GENERATED)
    check(family, outcome, order)
    if family in BATCH_INVARIANT:
        assert bits(outcome, order) == bits(default(family))


@pytest.mark.parametrize("family", BATCH_INVARIANT)
def test_rows_that_are_generated_are_as_without_the_others(family: str) -> None:
    generated = [i for i, row in enumerate(job()) if not row.continuation]
    outcome = run_rows(Engine(model_of(family)), [job()[i] for i in generated], GENERATED)
    assert bits(outcome) == [bits(default(family))[i] for i in generated]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_what_was_generated_greedily_is_greedy_and_as_likely_as_it_was(family: str) -> None:
    rows = [row for row in job() if not row.continuation]
    engine = Engine(model_of(family))
    generated = run_rows(engine, rows, replace(GENERATED, max_tokens=12)).completions
    given = [Row(row.context, tuple(c.token_ids.tolist())) for row, c in zip(rows, generated, strict=True) if c]
    for was, completion in zip(generated, run_rows(engine, given).completions, strict=True):
        assert was is not None
        assert completion is not None
        assert completion.is_greedy is not None
        assert completion.is_greedy.all()
        np.testing.assert_allclose(completion.logprobs, was.logprobs, rtol=0, atol=1e-5)
        if family in BATCH_INVARIANT:
            assert completion.logprobs.tobytes() == was.logprobs.tobytes()


def test_what_is_shared_is_scored_once() -> None:
    outcome = default("llama")
    rows = [row for row in job() if row.continuation]
    distinct = {row.tokens[: i + 1] for row in rows for i in range(len(row.context), len(row.tokens))}
    assert outcome.metrics.scored_tokens == len(distinct)
    assert outcome.metrics.generated_tokens == len({row for row in job() if not row.continuation}) * 6


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_sequences_set_aside_and_nodes_prefilled_again(overlap: bool) -> None:
    """The samples of a first row end at once, so that more are let in than fit to their ends; these run on."""
    model = model_of("llama")
    sampled = SamplingParams(n=2, max_tokens=20, temperature=1.0)
    rows = [Row((3,)), *job()]
    params = dict.fromkeys(rows, sampled)
    params[rows[0]] = replace(sampled, n=40, stop_token_ids=tuple(range(VOCAB_SIZE)))
    engine = Engine(model, kv_memory=130 * Engine(model).layout.bytes_per_token, page_size=4)
    engine._overlap = overlap
    outcome = run_rows(engine, rows, params)
    assert outcome.metrics.preempted_sequences > 0
    assert outcome.metrics.recomputed_tokens > 0
    assert outcome.metrics.prefill_tokens == outcome.plan.prefill_tokens + outcome.metrics.recomputed_tokens
    scored = dict(zip(job(), alone("llama"), strict=True))
    for row, completion in zip(rows, outcome.completions, strict=True):
        assert completion is not None
        if row.continuation:
            np.testing.assert_allclose(completion.logprobs, scored[row][0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_logits_that_are_no_distribution_fail_the_rows_they_score(overlap: bool) -> None:
    model, bad_token = FAMILIES["llama"](), job()[0].continuation[1]

    def spoil(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        output.logits[0, kwargs["input_ids"][0, kwargs["logits_to_keep"]] == bad_token] = torch.nan

    rows = [row for row in job() if row.continuation]
    engine = Engine(model)
    engine._overlap = overlap
    model.register_forward_hook(spoil, with_kwargs=True)
    fails = [bad_token in row.tokens[len(row.context) - 1 : -1] for row in rows]
    assert 0 < sum(fails) < len(rows)
    assert [completion is None for completion in run_rows(engine, rows).completions] == fails
