"""Many samples against exact probabilities: of the filters as transformers has them; of a model through the engine.

All random numbers come from fixed seeds, so a test passes always or never.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from batchkv.engine import Engine
from batchkv.random_numbers import row_key, stream_keys
from batchkv.sampler import sample
from batchkv.sampling_batch import SamplingBatch
from batchkv.sampling_params import SamplingParams
from tests.tiny_models import FAMILIES, VOCAB_SIZE

Counts = npt.NDArray[np.int64]
Probabilities = npt.NDArray[np.float64]

# Nine tokens of which no two are equally likely, in no order: among equals transformers leaves open which one stays.
LOGITS = torch.tensor([0.5, -1.0, 1.7, 0.3, -0.2, 2.0, -3.0, 1.1, 0.9])
CASES = {
    "none": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.8),
    "top_k": SamplingParams(temperature=1.0, top_k=4),
    "top_p": SamplingParams(temperature=1.0, top_p=0.81),
    "min_p": SamplingParams(temperature=1.0, min_p=0.17),
    "all, min_p cuts": SamplingParams(temperature=1.6, top_k=6, top_p=0.8, min_p=0.44),
    "all, top_p cuts": SamplingParams(temperature=1.6, top_k=6, top_p=0.81, min_p=0.08),
}
WITH_ALL = [params for name, params in CASES.items() if name.startswith("all")]
COUNT = 20_000


def processors(params: SamplingParams) -> list[LogitsProcessor]:
    """Those that are not off, in the order of `generate`: temperature, top_k, top_p, min_p."""
    found: list[LogitsProcessor] = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        found.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        found.append(MinPLogitsWarper(params.min_p))
    return found


def probabilities_after(logits_V: torch.Tensor, steps: list[LogitsProcessor]) -> Probabilities:
    """float64 [V], 0 where a token is removed."""
    scores = LogitsProcessorList(steps)(torch.empty(1, 0, dtype=torch.long), logits_V.double()[None])
    return scores[0].softmax(-1).numpy()


def chi_square_p(observed: Counts, probabilities: Probabilities) -> float:
    """Pearson's test: the chance that samples of these probabilities lie as far from them, or further.

    The least likely entries are one entry that expects five samples, as the test wants it. An entry without
    probability may have no sample at all.
    """
    if observed[probabilities == 0].any():
        return 0.0
    order = np.argsort(probabilities)
    expected, found = probabilities[order] * observed.sum(), observed[order].astype(np.float64)
    rare = int(np.searchsorted(expected.cumsum(), 5)) + 1
    expected, found = (np.append(values[:rare].sum(), values[rare:]) for values in (expected, found))
    statistic = ((found - expected) ** 2 / expected).sum()
    half_freedom, half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, half))


def assert_follows(observed: Counts, probabilities: Probabilities) -> None:
    """Neither too far away, nor closer than chance would be."""
    assert 1e-3 < chi_square_p(observed, probabilities) < 1 - 1e-3


def keys_of(rows: npt.NDArray[np.integer], samples: npt.NDArray[np.integer], seed: int = 0) -> npt.NDArray[np.uint64]:
    """As a job has them: of its rows, numbered from 0, and their samples."""
    of_row = np.array([row_key(seed, row) for row in range(int(rows.max()) + 1)], np.uint64)
    return stream_keys(of_row[rows], samples)


def draw(
    params: SamplingParams,
    *,
    rows: npt.ArrayLike = 3,
    samples: npt.ArrayLike = 1,
    positions: npt.ArrayLike = 2,
    seed: int = 0,
) -> Counts:
    """A token of LOGITS for each (row, sample, position), which are broadcast and flattened."""
    rows, samples, positions = (np.array(a).reshape(-1) for a in np.broadcast_arrays(rows, samples, positions))
    batch = SamplingBatch.from_params([params], np.zeros(1, np.uint64)).take(np.zeros(len(rows), np.int64))
    keyed = SamplingBatch(batch.temperature, batch.top_k, batch.top_p, batch.min_p, keys_of(rows, samples, seed))
    sampled = sample(LOGITS[None], keyed, positions, np.zeros(len(rows), np.int64))
    assert sampled.is_valid.all()
    return sampled.token_ids.numpy()


def counts_of(tokens: Counts, size: int = len(LOGITS)) -> Counts:
    return np.bincount(tokens, minlength=size)


# ---------------------------------------------------------------- the tests' own tools


def test_the_chi_square_test_is_pearsons() -> None:
    """Against tabulated quantiles; and it rejects a distribution that is near."""
    quantiles = {1: 3.841, 4: 9.488, 8: 15.507}  # 5 % are above
    for freedom, quantile in quantiles.items():
        observed = np.full(freedom + 1, 1_000_000)
        shift = round(np.sqrt(quantile * 1_000_000 / 2))
        observed[:2] += shift, -shift
        assert chi_square_p(observed, np.full(freedom + 1, 1 / (freedom + 1))) == pytest.approx(0.05, abs=1e-4)
    assert chi_square_p(np.array([500, 1]), np.array([1.0, 0.0])) == 0
    near = probabilities_after(LOGITS * 1.1, [])
    assert chi_square_p(counts_of(draw(CASES["none"], rows=np.arange(COUNT))), near) < 1e-6


def test_the_cases_with_all_filters_tell_orders_and_filters_apart() -> None:
    """Where one of them does not see a difference another one does; temperature and top_k may change places."""
    seen: set[tuple[int, ...]] = set()
    for params in WITH_ALL:
        steps = processors(params)
        kept = probabilities_after(LOGITS, steps) > 0
        for number in (3, 4):
            for order in permutations(range(4), number):
                if (kept != (probabilities_after(LOGITS, [steps[i] for i in order]) > 0)).any():
                    seen.add(order)
    whole = {order for order in permutations(range(4)) if order not in seen}
    assert whole == {(0, 1, 2, 3), (1, 0, 2, 3)}
    assert {(0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)} <= seen


# ---------------------------------------------------------------- samples of `sample`


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("over", ["rows", "samples", "positions"])
def test_samples_follow_the_probabilities_of_transformers(name: str, over: str) -> None:
    """Over the rows of a job, over the samples of a row, and along a sample."""
    tokens = draw(CASES[name], **{over: np.arange(COUNT)})
    assert_follows(counts_of(tokens), probabilities_after(LOGITS, processors(CASES[name])))


@pytest.mark.parametrize("over", ["rows", "samples", "positions"])
def test_neighbours_are_independent(over: str) -> None:
    """The pairs of each token and the next one, of which each is of one pair, follow the product of probabilities."""
    params = CASES["top_k"]
    for fixed in range(2):
        others = {name: fixed for name in ("rows", "samples", "positions") if name != over}
        first, second = draw(params, **others, **{over: np.arange(2 * COUNT)}).reshape(-1, 2).T
        one = probabilities_after(LOGITS, processors(params))
        pairs = counts_of(first * len(LOGITS) + second, len(LOGITS) ** 2)
        assert_follows(pairs, np.outer(one, one).reshape(-1))


def test_seeds_are_independent() -> None:
    """A row's samples with one seed, beside those with the next."""
    params = CASES["top_k"]
    tokens = [draw(params, samples=np.arange(50), seed=seed) for seed in range(240)]
    first, second = np.concatenate(tokens[::2]), np.concatenate(tokens[1::2])
    one = probabilities_after(LOGITS, processors(params))
    assert_follows(counts_of(first * len(LOGITS) + second, len(LOGITS) ** 2), np.outer(one, one).reshape(-1))


# ---------------------------------------------------------------- samples of a model, through the engine

PROMPT = [5, 17, 99, 3, 64, 21, 8]
OF_ENGINE = {
    "none": SamplingParams(n=4_000, max_tokens=1, temperature=1.0),
    "all": SamplingParams(n=4_000, max_tokens=1, temperature=1.3, top_k=60, top_p=0.93, min_p=0.15),
    "two tokens": SamplingParams(n=4_000, max_tokens=2, temperature=0.9, top_k=4),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return FAMILIES["llama"]()


@pytest.fixture(scope="module")
def sampled(model: PreTrainedModel) -> dict[str, Counts]:
    """Tokens of each of OF_ENGINE, a job with a row each: int64 [n, max_tokens]."""
    params = OF_ENGINE.values()
    names = ("n", "max_tokens", "temperature", "top_k", "top_p", "min_p")
    columns = {name: [getattr(one, name) for one in params] for name in names}
    jobs = pa.table({"id": list(OF_ENGINE), "prompt_token_ids": [PROMPT] * len(OF_ENGINE), **columns})
    results = Engine(model, kv_memory="64MiB").run(jobs)
    assert results["error"].null_count == len(results)
    ids, tokens = np.array(results["id"].to_pylist()), results["token_ids"].to_pylist()
    return {name: np.array([tokens[row] for row in np.flatnonzero(ids == name)]) for name in OF_ENGINE}


def next_of_transformers(model: PreTrainedModel, prompt: list[int], params: SamplingParams) -> Probabilities:
    """float64 [V], what `generate` would draw the next token from, with the processors and the order that it has."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=1,
        do_sample=True,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return output.scores[0][0].double().softmax(-1).numpy()


def test_without_filters_samples_of_a_prompt_follow_the_models_softmax(
    model: PreTrainedModel, sampled: dict[str, Counts]
) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
    assert_follows(counts_of(sampled["none"][:, 0], VOCAB_SIZE), logits.double().softmax(-1).numpy())


def test_with_all_filters_samples_of_a_prompt_follow_what_generate_draws_from(
    model: PreTrainedModel, sampled: dict[str, Counts]
) -> None:
    expected = next_of_transformers(model, PROMPT, OF_ENGINE["all"])
    assert 10 < (expected > 0).sum() < 60
    assert_follows(counts_of(sampled["all"][:, 0], VOCAB_SIZE), expected)


def test_two_tokens_in_a_row_follow_the_product_of_their_probabilities(
    model: PreTrainedModel, sampled: dict[str, Counts]
) -> None:
    """The second one by what it is given the first: neither token's number is the other's, nor another sample's."""
    params = OF_ENGINE["two tokens"]
    first = next_of_transformers(model, PROMPT, params)
    pairs = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for token in np.flatnonzero(first).tolist():
        pairs[token] = first[token] * next_of_transformers(model, [*PROMPT, token], params)
    assert (pairs > 0).sum() == 16
    tokens = sampled["two tokens"]
    assert_follows(counts_of(tokens[:, 0] * VOCAB_SIZE + tokens[:, 1], VOCAB_SIZE**2), pairs.reshape(-1))
