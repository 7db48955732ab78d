"""Samples follow the distribution that transformers' warpers leave, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from batchkv import sampler, token_filters, token_weights
from batchkv.kernels import native_sampling
from batchkv.random_numbers import stream_keys
from batchkv.sampling_batch import AllowedTokens, ChunkParams, SamplingBatch
from batchkv.sampling_params import SamplingParams
from batchkv.token_filters import remove_filtered
from batchkv.token_weights import ChunkMemory, weigh
from batchkv.transfers import HostCopies


@pytest.fixture(params=["native", "torch"], scope="module", autouse=True)
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native_sampling, "is_covered", lambda _: False)
        yield


@dataclass(frozen=True)
class Sampled:
    """What `sampler.sample` gives, on the host."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    is_valid: np.ndarray


def draw_any(
    logits_LV: torch.Tensor,
    batch: SamplingBatch,
    positions: np.ndarray,
    logits_rows: np.ndarray | None = None,
    allowed: AllowedTokens | None = None,
) -> Sampled:
    sampled = sampler.sample(logits_LV, batch, positions, logits_rows, allowed)
    return Sampled(*HostCopies(sampled.token_ids, sampled.logprobs, sampled.is_valid).wait())


def sample(
    logits_LV: torch.Tensor, batch: SamplingBatch, positions: np.ndarray, logits_rows: np.ndarray | None = None
) -> Sampled:
    """All rows have a distribution to sample from."""
    sampled = draw_any(logits_LV, batch, positions, logits_rows)
    assert sampled.is_valid.all()
    return sampled


def batch_of(*params: SamplingParams, samples: int = 1) -> SamplingBatch:
    """Each of the params `samples` times in a row, every sample with a key of its own."""
    repeated = [p for p in params for _ in range(samples)]
    return SamplingBatch.from_params(
        repeated, stream_keys(np.arange(len(repeated), dtype=np.uint64), np.zeros(len(repeated), np.int64))
    )


def transformers_probabilities(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float64 [V], from the real warpers in the order of `generate`, summing in double precision."""
    scores = (logits_V[None].float() / params.temperature).double()
    ids = torch.empty(1, 0, dtype=torch.long)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0].double().softmax(-1)


def draw(logits_V: torch.Tensor, params: SamplingParams, count: int) -> Sampled:
    """The tokens of one stream at positions 0, 1, ..., all from the same logits."""
    batch = batch_of(params).take(np.zeros(count, np.int64))
    return sample(logits_V.expand(count, -1), batch, np.arange(count))


def sampled_at(
    logits_V: torch.Tensor, params: SamplingParams, points: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> Sampled:
    """Samples with the random numbers given."""
    monkeypatch.setattr(sampler, "uniforms", lambda keys, positions: points)
    return draw(logits_V, params, len(points))


def kept(logits_BV: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """bool [B, V], what the filters leave. White box: the draws alone would show small weights too seldom."""
    logits_BV = logits_BV.float()
    rows = ChunkParams.on(logits_BV.device, batch_of(*params), np.zeros(len(params)))
    weighed = weigh(logits_BV, rows.temperature, ChunkMemory.of(logits_BV, len(logits_BV)))
    weights_BV = weighed.weights.flatten(1)[:, : logits_BV.shape[1]]
    remove_filtered(weights_BV, logits_BV, weighed.best, weighed.mass, rows)
    return weights_BV > 0


# ---------------------------------------------------------------- greedy


def test_greedy_takes_the_lowest_id_of_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3, 1, 3], [2, 2, 2, 2], [-torch.inf, -5, -torch.inf, -6]])
    result = sample(logits, batch_of(SamplingParams(), samples=3), np.arange(3))
    assert result.token_ids.tolist() == [1, 0, 1]
    assert result.token_ids.dtype == np.int64
    expected = logits.log_softmax(-1)[[0, 1, 2], [1, 0, 1]].numpy()
    np.testing.assert_allclose(result.logprobs, expected, rtol=1e-6)


def test_greedy_ignores_filters_and_random_numbers() -> None:
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(min_p=0.5), SamplingParams()]
    result = sample(logits, batch_of(*params, samples=5), np.arange(20))
    assert result.token_ids.tolist() == logits.argmax(-1).tolist()


# ---------------------------------------------------------------- distributions

LOGITS = torch.tensor([0.3, -1.0, 1.7, 0.3, -0.2, 2.0, -3.0, 1.1])
FILTERS = {
    "none": SamplingParams(temperature=1.0),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.0, top_k=4),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.17),
    "all": SamplingParams(temperature=1.4, top_k=6, top_p=0.9, min_p=0.2),
}


@pytest.mark.parametrize("name", FILTERS)
def test_samples_follow_the_exact_probabilities(name: str) -> None:
    count = 5_000
    expected = transformers_probabilities(LOGITS, FILTERS[name]).numpy() * count
    observed = np.bincount(draw(LOGITS, FILTERS[name], count).token_ids, minlength=len(LOGITS))
    assert not observed[expected == 0].any()
    kept = expected > 0
    chi_square = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # mean + 4 standard deviations


def test_samples_follow_the_probabilities_across_blocks() -> None:
    logits = torch.full((1000,), -torch.inf)
    tokens = torch.tensor([0, 255, 256, 257, 511, 512, 998, 999])
    logits[tokens] = LOGITS
    count = 5_000
    result = draw(logits, FILTERS["none"], count)
    observed = np.bincount(result.token_ids, minlength=1000)[tokens]
    expected = transformers_probabilities(LOGITS, FILTERS["none"]).numpy() * count
    assert observed.sum() == count
    assert ((observed - expected) ** 2 / expected).sum() < 7 + 4 * np.sqrt(14)


def test_cdf_is_inverted_in_vocabulary_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantiles against an inverse CDF in float64, over several blocks and with a filter."""
    logits = torch.randn(700, generator=torch.Generator().manual_seed(1)) * 3
    points = (np.arange(4000) + 0.5) / 4000
    for params in (SamplingParams(temperature=0.8), SamplingParams(temperature=0.8, top_k=40)):
        cdf = transformers_probabilities(logits, params).cumsum(-1).numpy()
        result = sampled_at(logits, params, points, monkeypatch)
        distance = np.minimum(abs(cdf[result.token_ids] - points), abs(cdf[result.token_ids - 1] - points))
        differs = np.searchsorted(cdf, points, side="right") != result.token_ids
        assert (distance[differs] < 1e-6).all()
        assert differs.mean() < 0.01


@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ends_of_the_cdf_are_kept_tokens(
    params: SamplingParams, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extremes of the uniforms never give a removed token or one past the vocabulary."""
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(2)).to(dtype)
    logits[:300] = logits[900:] = -torch.inf
    kept = transformers_probabilities(logits, params).nonzero()[:, 0]
    result = sampled_at(logits, params, np.array([2.0**-53, 1 - 2.0**-53]), monkeypatch)
    assert result.token_ids.tolist() == [kept[0], kept[-1]]


def test_ends_and_edges_of_the_cdf_fall_on_entries_with_weight() -> None:
    weights = torch.tensor([[0.0, 1, 0, 1, 0]]).expand(5, -1)
    points = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    entries, rests = token_weights._invert_cdf(weights, points)
    assert entries.tolist() == [1, 1, 3, 3, 3]
    assert rests.tolist() == pytest.approx([0, 0.5, 0, 0.5, 1])


def test_an_uneven_sum_does_not_give_a_removed_token_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parallel sum may add each entry's predecessors in another order, and so grow where nothing was added."""
    exact_cumsum = torch.Tensor.cumsum

    def uneven_cumsum(weights: torch.Tensor, *args: int, **kwargs: torch.dtype) -> torch.Tensor:
        return exact_cumsum(weights, *args, **kwargs) + torch.tensor([0, 1e-12, 0, 1e-12], dtype=torch.float64)

    monkeypatch.setattr(torch.Tensor, "cumsum", uneven_cumsum)
    entries, _ = token_weights._invert_cdf(
        torch.tensor([[1.0, 0, 1, 0]]).expand(2, -1), torch.tensor([0.5, 1.0], dtype=torch.float64)
    )
    assert entries.tolist() == [2, 2]


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_are_those_before_the_filters(dtype: torch.dtype) -> None:
    params = [*FILTERS.values(), SamplingParams()]
    logits = (torch.randn(10 * len(params), 900, generator=torch.Generator().manual_seed(3)) * 4).to(dtype)
    batch = batch_of(*params, samples=10)
    result = sample(logits, batch, np.arange(len(logits)))
    temperature = np.where(batch.temperature == 0, 1, batch.temperature)
    exact = (logits.double() / torch.from_numpy(temperature)[:, None]).log_softmax(-1)
    expected = exact[torch.arange(len(logits)), torch.from_numpy(result.token_ids)]
    assert result.logprobs.dtype == np.float32
    np.testing.assert_allclose(result.logprobs, expected.numpy(), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- kept sets equal those of transformers


def assert_same_logits(logits_V: torch.Tensor, mine_V: torch.Tensor, theirs_V: torch.Tensor) -> None:
    """Of equal logits at the cut transformers keeps whichever an unstable sort puts last: any will do."""
    assert mine_V.sum() == theirs_V.sum()
    assert torch.equal(logits_V[mine_V].sort().values, logits_V[theirs_V].sort().values)


# Logits on a grid, so that ties are common. The thresholds are odd, so that no sum of probabilities falls on
# one exactly: there the rounding would decide, on either side.
logit_rows = st.lists(st.integers(-12, 12).map(lambda i: i / 4), min_size=1, max_size=40)
top_ps = st.sampled_from([1.0, 0.0312719, 0.213713, 0.517311, 0.781391, 0.913717, 0.983171])
min_ps = st.sampled_from([0.0, 0.0113719, 0.0517311, 0.213713, 0.617311, 1.0])


@settings(max_examples=120, deadline=None)
@given(
    logits=logit_rows,
    masked=st.sets(st.integers(1, 39)),
    top_k=st.integers(0, 45),
    top_p=top_ps,
    min_p=min_ps,
    temperature=st.sampled_from([0.7, 1.0, 1.9]),
)
def test_kept_tokens_are_those_of_transformers(
    logits: list[float], masked: set[int], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    row = torch.tensor([-torch.inf if i in masked else logit for i, logit in enumerate(logits)])
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = transformers_probabilities(row, params) > 0
    assert_same_logits(row, kept(row[None], [params])[0], expected)


LARGE = [
    SamplingParams(temperature=1.0, top_k=1500),
    SamplingParams(temperature=1.0, top_k=64),
    SamplingParams(temperature=1.0, top_k=64, top_p=0.99917),
    SamplingParams(temperature=1.0, top_k=70, top_p=0.97173),
    SamplingParams(temperature=1.3, top_p=0.51733),
    SamplingParams(temperature=1.3, top_p=0.99917),
    SamplingParams(temperature=0.7, top_k=2500, top_p=0.95171),
    SamplingParams(temperature=1.0, top_k=100, top_p=0.91371, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=5000, top_p=0.31273),
    SamplingParams(temperature=1.0, min_p=0.02),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
def test_kept_tokens_of_a_large_vocabulary_are_those_of_transformers(scale: float, dtype: torch.dtype) -> None:
    """Through every width of the search for the cut; bf16 and scale 0 put many equal logits at the cut."""
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(len(LARGE), 3000, generator=generator) * scale).to(dtype)
    mine = kept(logits, LARGE)
    for row, params in enumerate(LARGE):
        assert_same_logits(logits[row], mine[row], transformers_probabilities(logits[row], params) > 0)


@pytest.mark.parametrize("params", [LARGE[3], LARGE[7], SamplingParams(temperature=1.0, top_p=0.9)], ids=str)
def test_a_row_is_sorted_whole_only_when_the_cut_lies_far_down(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    largest = token_filters._largest

    def spy(logits_BV: torch.Tensor, width: int) -> torch.Tensor:
        widths.append(width)
        return largest(logits_BV, width)

    monkeypatch.setattr(token_filters, "_largest", spy)
    masked = torch.full((1, 3000), -torch.inf)
    masked[0, [5, 50, 500]] = 1.0
    peaked = torch.linspace(-1, 1, 3000)[None].clone()
    peaked[0, :50] += 20
    for logits in (masked, peaked):
        kept(logits, [params])
    assert set(widths) <= {64, 1024}
    kept(torch.randn(1, 3000), [SamplingParams(temperature=1.0, top_p=0.99)])
    assert widths[-3:] == [64, 1024, 3000]


def test_top_p_keeps_the_highest_ids_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 1.0, 1.0, 1.0]])
    logits = torch.cat([logits, torch.zeros(1, 5)])
    params = [SamplingParams(temperature=1.0, top_p=0.96), SamplingParams(temperature=1.0, top_p=0.3)]
    # Probabilities: 0.932 and four of 0.017; then five of 0.2.
    assert kept(logits, params).tolist() == [
        [False, True, False, True, True],
        [False, False, False, True, True],
    ]


def test_top_p_at_exactly_the_mass_of_some_tokens_keeps_these() -> None:
    for kept_count, top_p in ((1, 0.1), (3, 0.3), (7, 0.7), (9, 0.9)):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        assert kept(torch.zeros(1, 10), [params]).sum() == kept_count


# ---------------------------------------------------------------- batches

MIXED = [
    *FILTERS.values(),
    SamplingParams(),
    SamplingParams(temperature=2.0, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=900, top_p=0.99),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(64, 3001, generator=generator) * 2).to(dtype)
    batch = batch_of(*[MIXED[i % len(MIXED)] for i in range(64)])
    positions = np.arange(64) * 7
    together = sample(logits, batch, positions)
    backwards = sample(logits.flip(0), batch.take(np.arange(64)[::-1]), positions[::-1])
    monkeypatch.setattr(token_weights, "_CHUNK_BYTES_CPU", 3 * 4 * 3001)
    chunked = sample(logits, batch, positions)
    alone = [sample(logits[i : i + 1], batch.take(np.array([i])), positions[i : i + 1]) for i in range(64)]
    tokens = together.token_ids.tolist()
    assert tokens == backwards.token_ids[::-1].tolist() == chunked.token_ids.tolist()
    assert tokens == [one.token_ids[0] for one in alone]
    np.testing.assert_allclose(together.logprobs, [one.logprobs[0] for one in alone], rtol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_samples_as_a_cpu_does(dtype: torch.dtype) -> None:
    logits = (torch.randn(240, 50_000, generator=torch.Generator().manual_seed(8)) * 2).to(dtype)
    batch = batch_of(*MIXED, samples=240 // len(MIXED) + 1).take(np.arange(240))
    cpu, gpu = (sample(on, batch, np.arange(240)) for on in (logits, logits.cuda()))
    agree = cpu.token_ids == gpu.token_ids
    assert agree.mean() > 0.99  # another order of summing moves a boundary now and then
    np.testing.assert_allclose(gpu.logprobs[agree], cpu.logprobs[agree], rtol=1e-5, atol=1e-5)


def test_samples_differ_by_key_and_by_position() -> None:
    logits = torch.zeros(1, 4096)
    params = SamplingParams(temperature=1.0)
    by_key = sample(logits.expand(50, -1), batch_of(params, samples=50), np.zeros(50, np.int64)).token_ids
    by_position = draw(logits[0], params, 50).token_ids
    assert len(set(by_key.tolist())) > 45
    assert len(set(by_position.tolist())) > 45


def test_temporaries_are_bounded() -> None:
    logits = torch.empty(1000, 1).expand(1000, 262_144)
    chunks = list(sampler._chunks(batch_of(*MIXED, samples=1000 // len(MIXED)), logits))
    assert max(len(rows) for _, rows, _ in chunks) * 262_144 * 4 <= token_weights._CHUNK_BYTES_CPU
    assert sorted(np.concatenate([rows for _, rows, _ in chunks])) == list(range(len(MIXED) * (1000 // len(MIXED))))


def test_the_logits_are_not_changed() -> None:
    logits = torch.randn(len(MIXED), 500, generator=torch.Generator().manual_seed(6))
    before = logits.clone()
    sample(logits, batch_of(*MIXED), np.arange(len(MIXED)))
    assert torch.equal(logits, before)


def test_logits_of_a_model_in_training_are_fine() -> None:
    logits = torch.randn(len(MIXED), 1500, generator=torch.Generator().manual_seed(7))
    expected = sample(logits, batch_of(*MIXED), np.arange(len(MIXED)))
    result = sample(logits.requires_grad_(), batch_of(*MIXED), np.arange(len(MIXED)))
    assert result.token_ids.tolist() == expected.token_ids.tolist()


def test_take_and_length() -> None:
    batch = batch_of(SamplingParams(top_k=3), SamplingParams(temperature=0.5, top_p=0.25, min_p=0.125))
    taken = batch.take(np.array([1, 0, 1]))
    assert len(taken) == 3
    assert taken.top_k.tolist() == [0, 3, 0]
    assert taken.temperature.tolist() == [0.5, 0, 0.5]
    assert taken.top_p.tolist() == [0.25, 1, 0.25]
    assert taken.min_p.tolist() == [0.125, 0, 0.125]
    assert taken.key.tolist() == batch.key[[1, 0, 1]].tolist()


# ---------------------------------------------------------------- extremes


def test_an_empty_batch_gives_nothing() -> None:
    result = sample(torch.empty(0, 100), SamplingBatch.from_params([], []), np.empty(0, np.int64))
    assert len(result.token_ids) == len(result.logprobs) == 0


def test_a_vocabulary_of_one_token() -> None:
    result = sample(torch.zeros(len(MIXED), 1), batch_of(*MIXED), np.arange(len(MIXED)))
    assert not result.token_ids.any()
    assert not result.logprobs.any()


@pytest.mark.parametrize("params", [*MIXED], ids=str)
def test_masked_tokens_are_never_sampled(params: SamplingParams) -> None:
    logits = torch.full((1000,), -torch.inf)
    logits[[3, 700]] = 0.0
    result = draw(logits, params, 100)
    assert set(result.token_ids.tolist()) <= {3, 700}
    np.testing.assert_allclose(result.logprobs, np.log(0.5), rtol=1e-6)


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 1e6, 1e300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_extreme_temperatures(temperature: float, filters: dict[str, float]) -> None:
    logits = torch.tensor([-torch.inf, 300.0, -3e38, 299.0, 301.0])
    params = SamplingParams(temperature=temperature, **filters)
    result = draw(logits, params, 200)
    tokens = set(result.token_ids.tolist())
    assert tokens == {4} if temperature < 1 else tokens <= {1, 2, 3, 4} and len(tokens) > 1
    assert (result.logprobs <= 0).all()
    assert np.isfinite(result.logprobs).all()


@pytest.mark.parametrize("params", MIXED, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_cannot_be_sampled_are_told_and_change_no_other(params: SamplingParams, bad: float) -> None:
    logits = torch.randn(6, 1500, generator=torch.Generator().manual_seed(9))
    batch, good = batch_of(params, samples=6), np.array([0, 2, 3, 5])
    expected = sample(logits, batch, np.arange(6))
    logits[1, 1499] = bad
    logits[4] = bad
    if bad == -torch.inf:
        logits[1] = bad
    result = draw_any(logits, batch, np.arange(6))
    assert result.is_valid.tolist() == [True, False, True, True, False, True]
    assert result.token_ids[good].tolist() == expected.token_ids[good].tolist()
    assert result.logprobs[good].tolist() == expected.logprobs[good].tolist()
    assert (result.token_ids < 1500).all()  # the next step may look up what follows before anyone knows


def test_validity_is_told_in_the_order_of_the_batch() -> None:
    logits = torch.zeros(4, 100)
    logits[[0, 3], 50] = torch.nan
    params = [MIXED[4], SamplingParams(temperature=1.0), SamplingParams(), SamplingParams()]
    assert draw_any(logits, batch_of(*params), np.arange(4)).is_valid.tolist() == [False, True, True, False]


def test_different_numbers_of_rows_are_an_error() -> None:
    batch = batch_of(SamplingParams(), samples=2)
    with pytest.raises(ValueError, match="3 rows of logits, 2 of parameters and 2 positions"):
        sample(torch.zeros(3, 10), batch, np.arange(2))


def test_rows_may_be_drawn_from_any_of_the_logits() -> None:
    torch.manual_seed(3)
    logits = torch.randn(5, 300)
    picked = np.array([0, 0, 2, 4, 4, 3])
    batch = batch_of(*MIXED[: len(picked)])
    result = sample(logits, batch, np.arange(len(picked)), picked)
    copied = sample(logits[torch.from_numpy(picked)], batch, np.arange(len(picked)))
    assert result.token_ids.tolist() == copied.token_ids.tolist()
    assert result.logprobs.tolist() == copied.logprobs.tolist()


# ---------------------------------------------------------------- allowed tokens


def only(tokens: dict[int, list[int]], vocabulary: int) -> AllowedTokens:
    """By row, what it may be given. The bits past the vocabulary are set, and mean nothing."""
    bits = np.zeros((len(tokens), 32 * -(-vocabulary // 32)), np.uint8)
    bits[:, vocabulary:] = 1
    for place, row_tokens in enumerate(tokens.values()):
        bits[place, row_tokens] = 1
    return AllowedTokens(np.array(list(tokens), np.int64), np.packbits(bits, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("name", FILTERS)
def test_samples_follow_the_probabilities_of_the_allowed_tokens(name: str) -> None:
    """The likeliest token, 5, is not allowed: filters are relative to what is."""
    count, allowed = 5_000, [0, 2, 3, 4, 6]
    limited = torch.full_like(LOGITS, -torch.inf)
    limited[allowed] = LOGITS[allowed]
    expected = transformers_probabilities(limited, FILTERS[name]).numpy() * count
    batch = batch_of(FILTERS[name]).take(np.zeros(count, np.int64))
    masks = only(dict.fromkeys(range(count), allowed), len(LOGITS))
    result = draw_any(LOGITS.expand(count, -1), batch, np.arange(count), allowed=masks)
    assert result.is_valid.all()
    observed = np.bincount(result.token_ids, minlength=len(LOGITS))
    assert not observed[expected == 0].any()
    kept = expected > 0
    chi_square = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi_square < kept.sum() - 1 + 4 * np.sqrt(2 * (kept.sum() - 1))


@given(st.integers(0, 10**6), st.integers(1, 700), st.integers(1, 40))
@settings(max_examples=40)
def test_limited_rows_get_allowed_tokens_and_others_what_they_got_before(seed: int, vocabulary: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    params = [MIXED[int(i)] for i in random.integers(0, len(MIXED), rows)]
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    is_allowed = random.random((rows, vocabulary)) < random.choice([0.02, 0.5])
    is_allowed[np.arange(rows), random.integers(0, vocabulary, rows)] = True
    limited = np.flatnonzero(random.random(rows) < 0.5)
    masks = only({row: np.flatnonzero(is_allowed[row]).tolist() for row in limited.tolist()}, vocabulary)
    free = sample(logits, batch_of(*params), np.arange(rows))
    result = draw_any(logits, batch_of(*params), np.arange(rows), allowed=masks)
    assert result.is_valid.all()
    others = np.setdiff1d(np.arange(rows), limited)
    assert result.token_ids[others].tolist() == free.token_ids[others].tolist()
    assert result.logprobs[others].tolist() == free.logprobs[others].tolist()
    assert is_allowed[limited, result.token_ids[limited]].all()
    temperature = np.array([p.temperature or 1 for p in params])
    whole = (logits.double() / torch.from_numpy(temperature)[:, None]).log_softmax(-1)
    expected = whole[torch.arange(rows), torch.from_numpy(result.token_ids)]
    np.testing.assert_allclose(result.logprobs, expected.numpy(), rtol=1e-5, atol=1e-5)
    best = logits.masked_fill(torch.from_numpy(~is_allowed), -torch.inf).argmax(-1).numpy()
    greedy = limited[[params[row].greedy for row in limited.tolist()]] if len(limited) else limited
    assert result.token_ids[greedy].tolist() == best[greedy].tolist()


def test_rows_whose_allowed_tokens_have_no_weight_have_no_token() -> None:
    logits = torch.zeros(5, 40)
    logits[1, 7] = -torch.inf
    logits[3, 30] = torch.nan
    logits[4, 30] = torch.inf
    masks = only({0: [], 1: [7], 2: [7], 3: [7], 4: [7]}, 40)
    for params in MIXED:
        result = draw_any(logits, batch_of(params, samples=5), np.arange(5), allowed=masks)
        assert result.is_valid.tolist() == [False, False, True, False, False]
        assert result.token_ids[2] == 7


def test_several_rows_of_one_distribution_are_limited_each_in_its_way() -> None:
    masks = only({0: [1], 2: [3]}, 5)
    logits, batch = torch.zeros(1, 5), batch_of(SamplingParams(), samples=3)
    result = draw_any(logits, batch, np.arange(3), np.zeros(3, np.int64), masks)
    assert result.token_ids.tolist() == [1, 0, 3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_allowed_tokens_on_a_gpu() -> None:
    logits = torch.randn(60, 5000, generator=torch.Generator().manual_seed(9)) * 3
    batch = batch_of(*MIXED, samples=60 // len(MIXED) + 1).take(np.arange(60))
    masks = only({row: list(range(row, 5000, 97)) for row in range(0, 60, 2)}, 5000)
    cpu, gpu = (draw_any(on, batch, np.arange(60), allowed=masks) for on in (logits, logits.cuda()))
    assert (cpu.token_ids == gpu.token_ids).mean() > 0.98
    assert all(token % 97 == row % 97 for row, token in enumerate(gpu.token_ids.tolist()) if row % 2 == 0)
