"""What tokens were drawn from: against a plain computation, the real warpers, and the draws themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from batchkv import executor, sampler, token_weights
from batchkv.engine import Engine
from batchkv.errors import RowError
from batchkv.executor import RunOptions
from batchkv.metrics import RunMetrics
from batchkv.preparation import prepare_wave
from batchkv.random_numbers import stream_keys
from batchkv.sampling_batch import AllowedTokens, SamplingBatch
from batchkv.sampling_params import SamplingParams
from batchkv.sampling_record import SamplingRecord, SamplingRecords
from batchkv.token_arena import TokenArena
from batchkv.transfers import HostCopies
from batchkv.wave import Wave
from batchkv.writer import Completion
from tests.tiny_models import FAMILIES, VOCAB_SIZE

MIXED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_k=4),
    SamplingParams(temperature=1.0, top_p=0.8017),
    SamplingParams(temperature=1.3, min_p=0.0717),
    SamplingParams(temperature=1.4, top_k=30, top_p=0.9017, min_p=0.0217),
    SamplingParams(),
    SamplingParams(temperature=1.0, top_k=5000),
    SamplingParams(top_k=3),
]


@dataclass(frozen=True)
class Drawn:
    """What `sampler.sample` gives, on the host; the kept tokens by row, None for all."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    is_valid: np.ndarray
    sampling_logprobs: np.ndarray
    entropies: np.ndarray
    kept: list[list[int] | None]


def draw(
    logits_LV: torch.Tensor,
    params: list[SamplingParams],
    *,
    positions: np.ndarray | None = None,
    logits_rows: np.ndarray | None = None,
    allowed: AllowedTokens | None = None,
) -> Drawn:
    """A row for each of `params`, each with a key of its own."""
    keys = stream_keys(np.arange(len(params), dtype=np.uint64), np.zeros(len(params), np.int64))
    batch = SamplingBatch.from_params(params, keys)
    positions = np.arange(len(params)) if positions is None else positions
    sampled = sampler.sample(logits_LV, batch, positions, logits_rows, allowed, with_source=True)
    plain = sampler.sample(logits_LV, batch, positions, logits_rows, allowed)
    assert plain.source is None
    source = sampled.source
    assert source is not None
    assert torch.equal(sampled.token_ids, plain.token_ids)
    assert torch.equal(sampled.logprobs.nan_to_num(), plain.logprobs.nan_to_num())
    assert (source.logprobs.dtype, source.entropies.dtype, source.kept_ids.dtype) == (
        torch.float32,
        torch.float32,
        torch.int32,
    )
    arrays = HostCopies(
        sampled.token_ids,
        sampled.logprobs,
        sampled.is_valid,
        source.logprobs,
        source.entropies,
        source.kept_ids,
        source.kept_counts,
    ).wait()
    *first, kept_ids, kept_counts = arrays
    ragged = np.split(kept_ids, np.cumsum(kept_counts))
    assert len(ragged.pop()) == 0
    kept = [ids.tolist() if count else None for ids, count in zip(ragged, kept_counts, strict=True)]
    return Drawn(*first, kept)


def only(tokens: dict[int, list[int]], vocabulary: int) -> AllowedTokens:
    """By row, what it may be given."""
    bits = np.zeros((len(tokens), 32 * -(-vocabulary // 32)), np.uint8)
    for place, row_tokens in enumerate(tokens.values()):
        bits[place, row_tokens] = 1
    return AllowedTokens(np.array(list(tokens), np.int64), np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def warped(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float64 [V], -inf where the real warpers, in the order of `generate`, remove a token."""
    scores = (logits_V[None].float() / params.temperature).double()
    ids = torch.empty(1, 0, dtype=torch.long)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0]


def plainly_kept(logits: list[float], params: SamplingParams) -> list[int]:
    """Token by token, in Python: the filters as the sampler defines them, among equals the highest ids."""
    best = max(logits)
    order = sorted(
        (token for token in range(len(logits)) if logits[token] > -np.inf), key=lambda token: (-logits[token], -token)
    )
    weight = {token: float(np.exp((logits[token] - best) / params.temperature)) for token in order}
    if params.top_k and params.top_k < len(logits):
        kth = logits[order[min(params.top_k, len(order)) - 1]]
        order = [token for token in order if logits[token] >= kth]
    if params.top_p < 1:
        mass, before, kept = sum(weight[token] for token in order), 0.0, []
        for token in order:
            if before < params.top_p * mass:
                kept.append(token)
            before += weight[token]
        order = kept
    return sorted(token for token in order if weight[token] >= params.min_p)


# ---------------------------------------------------------------- one step

# Thresholds are odd, so that no sum of probabilities falls on one exactly, where rounding would decide.
any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.9]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([1.0, 0.0312719, 0.213713, 0.517311, 0.781391, 0.983171]),
    min_p=st.sampled_from([0.0, 0.0113719, 0.0517311, 0.213713, 1.0]),
)


@settings(max_examples=150, deadline=None)
@given(
    params=st.lists(any_params, min_size=1, max_size=6),
    vocabulary=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    masked=st.sets(st.integers(1, 39), max_size=5),
    is_limited=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_kept_tokens_and_logprobs_are_those_of_a_plain_computation(
    params: list[SamplingParams],
    vocabulary: int,
    seed: int,
    dtype: torch.dtype,
    masked: set[int],
    is_limited: list[bool],
) -> None:
    """All filters, on a grid so that ties are common, constrained rows among others."""
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.integers(-12, 12, (len(params), vocabulary)) / 4).to(dtype)
    logits[:, [token for token in masked if token < vocabulary]] = -torch.inf
    limits: dict[int, list[int]] = {}
    for row in np.flatnonzero(is_limited[: len(params)]).tolist():
        finite = np.flatnonzero(logits[row].float() > -torch.inf)
        limits[row] = random.choice(finite, random.integers(1, len(finite) + 1), replace=False).tolist()
    drawn = draw(logits, params, allowed=only(limits, vocabulary) if limits else None)
    assert drawn.is_valid.all()
    for row, one in enumerate(params):
        token, whole = int(drawn.token_ids[row]), logits[row].tolist()
        if one.greedy:
            assert (drawn.kept[row], drawn.sampling_logprobs[row]) == ([token], 0)
            continue
        open_ = [x if row not in limits or i in limits[row] else -np.inf for i, x in enumerate(whole)]
        kept = plainly_kept(open_, one)
        assert drawn.kept[row] == (None if len(kept) == sum(x > -np.inf for x in whole) else kept)
        logprobs = (torch.tensor(whole, dtype=torch.float64)[kept] / one.temperature).log_softmax(-1)
        assert drawn.sampling_logprobs[row] == pytest.approx(float(logprobs[kept.index(token)]), abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kept_tokens_of_a_large_vocabulary_are_those_of_transformers(dtype: torch.dtype) -> None:
    """Rows of all kinds in one batch, through blocks. Which of equal logits stay, transformers leaves open."""
    params = MIXED * 4
    logits = (torch.randn(len(params), 3001, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    drawn = draw(logits, params)
    for row, one in enumerate(params):
        if one.greedy:
            continue
        scores = warped(logits[row], one)
        expected = scores.isfinite().nonzero()[:, 0]
        if len(expected) == 3001:
            assert drawn.kept[row] is None
            continue
        kept = torch.tensor(drawn.kept[row])
        assert torch.equal(logits[row][kept].sort().values, logits[row][expected].sort().values)
        assert int(drawn.token_ids[row]) in drawn.kept[row]  # type: ignore[operator]
        token_score = logits[row].double()[drawn.token_ids[row]] / one.temperature
        assert drawn.sampling_logprobs[row] == pytest.approx(float(token_score - scores.logsumexp(-1)), abs=3e-6)


def test_probabilities_over_the_kept_tokens_sum_to_one() -> None:
    """The logprob of every kept token, each drawn in turn: by its share of the row's random numbers."""
    logits = torch.randn(9, generator=torch.Generator().manual_seed(1)) * 1.5
    for one in MIXED:
        drawn = draw(logits[None], [one] * 3000, logits_rows=np.zeros(3000, np.int64))
        by_token = dict(zip(drawn.token_ids.tolist(), drawn.sampling_logprobs.tolist(), strict=True))
        kept = drawn.kept[0] or list(range(9))
        assert set(by_token) == set(kept)
        assert np.exp(list(by_token.values())).sum() == pytest.approx(1, abs=1e-6)


def test_without_filters_it_is_the_other_logprob_to_the_bit() -> None:
    logits = torch.randn(40, 700, generator=torch.Generator().manual_seed(2)) * 2
    params = [SamplingParams(temperature=0.5 + i / 20, top_k=700 * (i % 2)) for i in range(40)]
    drawn = draw(logits, params)
    assert drawn.sampling_logprobs.tolist() == drawn.logprobs.tolist()
    assert drawn.kept == [None] * 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_entropies_are_those_of_torch_whatever_is_removed(dtype: torch.dtype) -> None:
    """From all tokens with the same mass to one that has it all, with tokens at -inf, constrained rows among others."""
    params = MIXED * 6
    spread = torch.tensor([0, 0.01, 1, 4, 30, 300])[:, None].repeat(1, len(MIXED)).flatten()
    logits = torch.randn(len(params), 1500, generator=torch.Generator().manual_seed(5)) * spread[:, None]
    logits[::4, 100:900] = -torch.inf
    logits = logits.to(dtype)
    limits = only({row: list(range(row % 7, 1500, 7)) for row in range(0, len(params), 5)}, 1500)
    temperature = torch.tensor([one.temperature or 1 for one in params])
    expected = torch.distributions.Categorical(logits=logits.double() / temperature[:, None]).entropy()
    for allowed in (None, limits):
        drawn = draw(logits, params, allowed=allowed)
        np.testing.assert_allclose(drawn.entropies, expected, atol=2e-6)
    assert drawn.entropies[1] == pytest.approx(np.log(1500))
    assert (drawn.entropies >= 0).all()


def test_entropies_of_tiny_temperatures_are_none() -> None:
    drawn = draw(torch.tensor([[0.0, 1.0, -torch.inf]]), [SamplingParams(temperature=1e-30)])
    assert drawn.entropies.tolist() == [0]


def test_tokens_at_the_end_of_a_row_have_finite_logprobs() -> None:
    """Weights near the smallest that fp32 can hold have few digits; their logarithms must not show it."""
    logits = torch.tensor([[0.0, -92.25], [-92.25, 0.0]]).repeat(40, 1)
    drawn = draw(logits, [SamplingParams(temperature=1.0, top_k=1)] * 80)
    assert drawn.sampling_logprobs.tolist() == [0] * 80
    limited = draw(logits, [SamplingParams(temperature=1.0)] * 80, allowed=only({0: [1], 1: [0]}, 2))
    assert limited.sampling_logprobs[:2].tolist() == [0, 0]
    assert limited.kept[:3] == [[1], [0], None]
    np.testing.assert_allclose(limited.logprobs[:2], -92.25, rtol=1e-6)


def test_a_rows_source_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    params = MIXED * 5
    logits = torch.randn(len(params), 1500, generator=torch.Generator().manual_seed(3)) * 2
    limits = only({row: list(range(row % 7, 1500, 7)) for row in range(0, len(params), 3)}, 1500)
    together = draw(logits, params, allowed=limits)
    monkeypatch.setattr(token_weights, "_CHUNK_BYTES_CPU", 2 * 4 * 1500)
    chunked = draw(logits, params, allowed=limits)
    assert together.kept == chunked.kept
    np.testing.assert_array_equal(together.sampling_logprobs, chunked.sampling_logprobs)
    np.testing.assert_array_equal(together.entropies, chunked.entropies)


def test_rows_without_a_distribution_leave_others_alone() -> None:
    logits = torch.randn(len(MIXED), 300, generator=torch.Generator().manual_seed(4))
    expected = draw(logits, MIXED)
    logits[[1, 3, 6]] = torch.nan
    drawn = draw(logits, MIXED)
    good = np.flatnonzero(drawn.is_valid)
    assert good.tolist() == [0, 2, 4, 5, 7, 8]
    assert [drawn.kept[row] for row in good] == [expected.kept[row] for row in good]
    assert drawn.sampling_logprobs[good].tolist() == expected.sampling_logprobs[good].tolist()
    assert drawn.entropies[good].tolist() == expected.entropies[good].tolist()


def test_an_empty_batch_has_a_source_of_nothing() -> None:
    drawn = draw(torch.empty(0, 10), [])
    assert drawn.kept == []
    assert len(drawn.sampling_logprobs) == len(drawn.entropies) == 0


# ---------------------------------------------------------------- draws follow what is told of them

# Probabilities .4 .2 .15 .1 and three of .05: min_p 0.2, or top_k 4, leaves a mass of .85. Of it top_p 0.8 would keep
# .4 .2 .15, of the whole .1 too: the filters' order shows.
SKEWED = torch.tensor([0.05, 0.4, 0.05, 0.2, 0.1, 0.15, 0.05]).log()
ALONE_AND_TOGETHER = {
    "temperature": (SamplingParams(temperature=0.7), None),
    "top_k": (SamplingParams(temperature=1.0, top_k=3), [1, 3, 5]),
    "top_p": (SamplingParams(temperature=1.0, top_p=0.7), [1, 3, 5]),
    "min_p": (SamplingParams(temperature=1.0, min_p=0.2), [1, 3, 4, 5]),
    "top_k top_p": (SamplingParams(temperature=1.0, top_k=4, top_p=0.69), [1, 3]),
    "top_p min_p": (SamplingParams(temperature=1.0, top_p=0.8, min_p=0.2), [1, 3, 4, 5]),
    "all": (SamplingParams(temperature=1.3, top_k=5, top_p=0.9, min_p=0.3), [1, 3, 4, 5]),
}


@pytest.mark.parametrize("name", ALONE_AND_TOGETHER)
def test_draws_of_many_streams_follow_the_recorded_probabilities(name: str) -> None:
    """Chi-square over streams and positions, against exact probabilities over sets that are known by hand."""
    params, kept = ALONE_AND_TOGETHER[name]
    count = 8_000
    drawn = draw(
        SKEWED[None],
        [params] * count,
        positions=np.arange(count) % 100,
        logits_rows=np.zeros(count, np.int64),
    )
    assert drawn.kept == [kept] * count
    ids = kept or list(range(len(SKEWED)))
    probabilities = (SKEWED.double()[ids] / params.temperature).softmax(-1).numpy()
    observed = np.array([(drawn.token_ids == token).sum() for token in ids])
    assert observed.sum() == count
    chi_square = ((observed - probabilities * count) ** 2 / (probabilities * count)).sum()
    assert chi_square < len(ids) - 1 + 4 * np.sqrt(2 * (len(ids) - 1))  # mean + 4 standard deviations
    expected = np.log(probabilities)[[ids.index(token) for token in drawn.token_ids.tolist()]]
    np.testing.assert_allclose(drawn.sampling_logprobs, expected, atol=1e-6)


# ---------------------------------------------------------------- records of whole samples


def test_records_gather_tokens_by_sequence() -> None:
    """Rows that do not count, all of the vocabulary, several tokens of a sequence in one step, an end."""
    records = SamplingRecords()
    counts, ids = np.array([2, 0, 1, 1]), np.array([7, 8, 3, 4], np.int32)
    logprobs, entropies = np.array([-1, -2, 0, -0.5], np.float32), np.array([1, 2, 3, 4], np.float32)
    records.append(np.array([5, 6, 5, 9]), np.array([0, 1, 3]), logprobs, entropies, ids, counts)
    records.append(np.array([6, 5, 6, 5]), np.array([0, 1, 2, 3]), logprobs, entropies, ids, counts)
    first = records.record(5)
    assert first.logprobs.tolist() == [-1, -2, -0.5]
    assert first.entropies.tolist() == [1, 2, 4]
    assert first.kept_counts.tolist() == [2, 0, 1]
    assert first.kept_ids.tolist() == [7, 8, 4]
    assert first.kept_offsets.tolist() == [0, 2, 2, 3]
    assert [None if one is None else one.tolist() for one in map(first.kept, range(3))] == [[7, 8], None, [4]]
    records.drop(5)
    assert len(records.record(5)) == len(records.record(5).entropies) == 0
    second = records.record(6)
    assert second.kept_counts.tolist() == [0, 2, 1]
    assert second.kept_ids.tolist() == [7, 8, 3]
    assert (second.kept_ids.dtype, second.kept_counts.dtype) == (np.int32, np.int32)
    assert (second.logprobs.dtype, second.entropies.dtype) == (np.float32, np.float32)


def test_records_are_cut_and_joined() -> None:
    """Those of given tokens in between have no ids."""
    record = SamplingRecord(
        np.array([-1, -2, 0], np.float32),
        np.array([1, 2, 3], np.float32),
        np.array([7, 8, 4], np.int32),
        np.array([2, 0, 1], np.int32),
    )
    whole = record.first(2).then(SamplingRecord.of_given(2)).then(record)
    assert len(whole) == 7
    assert whole.logprobs.tolist() == [-1, -2, 0, 0, -1, -2, 0]
    assert whole.entropies.tolist() == [1, 2, 0, 0, 1, 2, 3]
    assert whole.kept_ids.tolist() == [7, 8, 7, 8, 4]
    assert whole.kept_counts.tolist() == [2, 0, 0, 0, 2, 0, 1]
    arrays = (whole.logprobs, whole.entropies, whole.kept_ids, whole.kept_counts)
    assert [array.dtype for array in arrays] == [np.float32, np.float32, np.int32, np.int32]
    assert len(record.first(0)) == len(record.first(0).kept_ids) == 0


def completions(
    model: PreTrainedModel,
    params: list[SamplingParams],
    *,
    overlap: bool = False,
    record_sampling: bool = True,
    **config: Any,
) -> tuple[list[Completion], RunMetrics]:
    """Of a prompt for each of `params`; prompts share a prefix."""
    random = np.random.default_rng(1)
    prefix = random.integers(0, VOCAB_SIZE, 9)
    arena = TokenArena.from_rows(
        [np.append(prefix, random.integers(0, VOCAB_SIZE, 3)).astype(np.int32) for _ in params]
    )
    engine = Engine(model, **config)
    engine._overlap = overlap
    prepared = prepare_wave(Wave.of(arena, params), np.empty(0, np.int64), engine.layout, engine.limits())
    memory, metrics = prepared.plan.memory, RunMetrics()
    ended: dict[int, Completion | RowError] = {}
    runner = engine.new_runner(memory.pool_pages, memory.page_size)
    try:
        options = RunOptions(record_sampling=record_sampling)
        engine.execute(prepared, runner, None, ended.update, metrics, options=options)
    finally:
        runner.release()
    outputs = [ended[sequence] for sequence in prepared.plan.sequences.output_sequence.tolist()]
    assert all(isinstance(output, Completion) for output in outputs)
    return [output for output in outputs if isinstance(output, Completion)], metrics


SAMPLED = [
    SamplingParams(n=3, max_tokens=12, temperature=1.0, top_p=0.9017),
    SamplingParams(n=2, max_tokens=7, temperature=0.8, top_k=5, min_p=0.0517),
    SamplingParams(n=2, max_tokens=9, temperature=1.2),
    SamplingParams(max_tokens=6),
    SamplingParams(max_tokens=30, temperature=1.0, top_p=0.5017, stop_token_ids=tuple(range(0, VOCAB_SIZE, 5))),
]


def assert_same_record(ours: SamplingRecord | None, theirs: SamplingRecord | None) -> None:
    assert ours is not None
    assert theirs is not None
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
    np.testing.assert_allclose(ours.entropies, theirs.entropies, atol=1e-5)
    assert ours.kept_counts.tolist() == theirs.kept_counts.tolist()
    assert ours.kept_ids.tolist() == theirs.kept_ids.tolist()


def test_completions_say_what_the_models_own_logits_say() -> None:
    """Each token of each sample, from one forward pass of the bare model over prompt and output."""
    model = FAMILIES["qwen3"]()
    outputs, _ = completions(model, SAMPLED)
    of_output = [one for one in SAMPLED for _ in range(one.n)]
    random = np.random.default_rng(1)
    prefix = random.integers(0, VOCAB_SIZE, 9)
    prompts = [np.append(prefix, random.integers(0, VOCAB_SIZE, 3)) for _ in SAMPLED]
    prompt_of_output = [prompt for prompt, one in zip(prompts, SAMPLED, strict=True) for _ in range(one.n)]
    for output, one, prompt in zip(outputs, of_output, prompt_of_output, strict=True):
        record, ids = output.sampling, output.token_ids
        assert record is not None
        assert len(record.logprobs) == len(record.kept_counts) == len(record.entropies) == len(ids)
        with torch.no_grad():
            logits = model(torch.from_numpy(np.append(prompt, ids))[None]).logits[0, len(prompt) - 1 : -1]
        entropies = torch.distributions.Categorical(logits=logits / (one.temperature or 1)).entropy()
        np.testing.assert_allclose(record.entropies, entropies, atol=1e-5)
        for i, token in enumerate(ids.tolist()):
            kept = record.kept(i)
            if one.greedy:
                assert kept is not None
                assert (kept.tolist(), record.logprobs[i]) == ([token], 0)
                continue
            scores = warped(logits[i], one)
            expected = scores.isfinite().nonzero()[:, 0].tolist()
            assert (kept is None) == (len(expected) == VOCAB_SIZE)
            assert kept is None or kept.tolist() == expected
            assert record.logprobs[i] == pytest.approx(float(scores.log_softmax(-1)[token]), abs=1e-5)


def test_records_are_the_same_a_step_ahead_and_under_preemption() -> None:
    """A row too many of those that ended, sequences set aside and let in again: each token is recorded once."""
    model = FAMILIES["llama"]()
    params = [SAMPLED[i % len(SAMPLED)] for i in range(15)]
    expected, _ = completions(model, params)
    ahead, ahead_metrics = completions(model, params, overlap=True)
    assert ahead_metrics.wasted_rows > 0
    one_row = [SamplingParams(n=4, max_tokens=60, temperature=1.0, top_p=0.9017)]
    stops = tuple(range(0, VOCAB_SIZE, 9))
    early = [SamplingParams(n=60, max_tokens=60, temperature=1.0, top_p=0.9017, stop_token_ids=stops), *one_row]
    plain, _ = completions(model, early)
    kv = model.config.num_hidden_layers * 2 * 2 * 16 * 4 * 16 * 36  # pages of 16 tokens: some sequences at a time
    tight, tight_metrics = completions(model, early, kv_memory=str(kv))
    assert tight_metrics.preempted_sequences > 0
    for outputs, others in ((expected, ahead), (plain, tight)):
        for ours, theirs in zip(outputs, others, strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            assert_same_record(ours.sampling, theirs.sampling)


def test_records_of_sequences_that_ended_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one begin anew with the row too many that a sequence has a step ahead."""
    made: list[SamplingRecords] = []
    monkeypatch.setattr(executor, "SamplingRecords", lambda: made.append(SamplingRecords()) or made[-1])
    _, metrics = completions(FAMILIES["llama"](), SAMPLED, overlap=True)
    assert metrics.wasted_rows > 0
    assert [(records._logprobs, records._entropies, records._kept) for records in made] == [({}, {}, {})]


def test_nothing_is_recorded_unless_asked_for() -> None:
    outputs, _ = completions(FAMILIES["llama"](), SAMPLED[:2], record_sampling=False)
    assert all(output.sampling is None for output in outputs)
