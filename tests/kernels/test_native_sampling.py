"""Native sampling weighs tokens as torch does and finds the same ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkv import token_weights
from batchkv.kernels import native_sampling
from tests.native_kernels import INSTRUCTION_SETS, needs_native

BLOCK = 32

pytestmark = needs_native


def weigh(logits_BV: torch.Tensor, temperature: float, instruction_set: str) -> torch.Tensor:
    """The weights, of which all else is as it should be."""
    rows, vocabulary = logits_BV.shape
    weights_BNK = torch.full((rows, -(-vocabulary // BLOCK), BLOCK), torch.nan)
    temperature_B = torch.full((rows,), temperature)
    best_B, likeliest_B = native_sampling.weigh(logits_BV, temperature_B, weights_BNK, instruction_set)
    floats_BV = logits_BV.float()
    assert torch.allclose(best_B, floats_BV.amax(-1), rtol=0, atol=0, equal_nan=True)
    has_nan_B = floats_BV.isnan().any(-1)
    assert torch.equal(likeliest_B[~has_nan_B], torch.from_numpy(floats_BV.numpy().argmax(-1))[~has_nan_B])
    return weights_BNK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    vocabulary=st.sampled_from([1, 7, 31, 32, 33, 100, 128]),
    temperature=st.sampled_from([1e-38, 0.1, 1.0, 3.0]),
    masked=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1 << 16),
)
def test_weights_are_those_of_the_softmax(
    instruction_set: str, dtype: torch.dtype, rows: int, vocabulary: int, temperature: float, masked: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits_BV = (5 * torch.randn(rows, vocabulary, generator=random)).to(dtype)
    logits_BV[torch.rand(rows, vocabulary, generator=random) < masked] = -torch.inf
    logits_BV[:, vocabulary // 2] = 1.0
    weights_BV = weigh(logits_BV, temperature, instruction_set).flatten(1)
    exact = ((logits_BV.double() - logits_BV.double().amax(-1, keepdim=True)) / temperature).exp()
    assert torch.allclose(weights_BV[:, :vocabulary].double(), exact, rtol=1e-5, atol=1e-37)
    assert bool((weights_BV[:, :vocabulary][logits_BV == logits_BV.amax(-1, keepdim=True)] == 1).all())
    assert bool((weights_BV[:, :vocabulary][logits_BV == -torch.inf] == 0).all())
    assert bool((weights_BV[:, vocabulary:] == 0).all())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_row_has_the_same_bits_in_any_company(instruction_set: str, temperature: float) -> None:
    logits_BV = torch.randn(40, 1000, generator=torch.Generator().manual_seed(0))
    weights_BNK = weigh(logits_BV, temperature, instruction_set)
    for rows in ([3], [39, 0, 3], list(range(17))):
        assert torch.equal(weigh(logits_BV[rows], temperature, instruction_set), weights_BNK[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_rows_without_a_distribution_have_a_greatest_logit_that_says_so(
    instruction_set: str, dtype: torch.dtype
) -> None:
    logits_BV = torch.randn(4, 50).to(dtype)
    logits_BV[0, 48], logits_BV[1, 3], logits_BV[2, 20], logits_BV[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    logits_BV[1, 40] = 100
    best_B, _ = native_sampling.weigh(logits_BV, torch.ones(4), torch.empty(4, 2, BLOCK), instruction_set)
    assert best_B[:2].isnan().all()
    assert best_B[2:].tolist() == [torch.inf, -torch.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_the_likeliest_token_is_the_first_of_equals(instruction_set: str, dtype: torch.dtype) -> None:
    for vocabulary in (5, 64, 200):
        logits_BV = torch.zeros(vocabulary, vocabulary, dtype=dtype)
        logits_BV += torch.ones(vocabulary, vocabulary, dtype=dtype).triu()  # row r: from token r on
        weights_BNK = torch.empty(vocabulary, 8, BLOCK)
        _, likeliest_B = native_sampling.weigh(logits_BV, torch.ones(vocabulary), weights_BNK, instruction_set)
        assert likeliest_B.tolist() == list(range(vocabulary))


def test_rows_may_be_parts_of_longer_ones() -> None:
    logits = torch.randn(3, 80)
    part = logits[:, 10:60]
    assert torch.equal(weigh(part, 1.0, "portable"), weigh(part.contiguous(), 1.0, "portable"))


@settings(max_examples=100, deadline=None)
@given(
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.just(np.nextafter(1.0, 0.0))),
    sparse=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_the_search_finds_what_it_finds_with_torch(uniform: float, sparse: bool, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    weights_BNK = torch.rand(4, 9, BLOCK, generator=random)
    if sparse:
        weights_BNK *= torch.rand(4, 9, BLOCK, generator=random) < 0.02
    weights_BNK[:, seed % 9, seed % BLOCK] = 0.5
    sums_BN, uniform_B = weights_BNK.sum(-1), torch.full((4,), uniform, dtype=torch.float64)
    found_B = native_sampling.search(weights_BNK, sums_BN, uniform_B)
    block_B, within_B = token_weights._invert_cdf(sums_BN, uniform_B)
    token_B, _ = token_weights._invert_cdf(weights_BNK[torch.arange(4), block_B], within_B)
    assert torch.equal(found_B, block_B * BLOCK + token_B)
    assert bool((weights_BNK.flatten(1).gather(1, found_B[:, None]) > 0).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_distribution_still_gives_a_token(bad: float) -> None:
    logits_BV = torch.zeros(2, 50)
    logits_BV[0, 7] = bad
    weights_BNK = weigh(logits_BV, 1.0, "portable")
    tokens_B = native_sampling.search(weights_BNK, weights_BNK.sum(-1), torch.full((2,), 0.5, dtype=torch.float64))
    assert 0 <= int(tokens_B[0]) < 50
    assert int(tokens_B[1]) == 25


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        native_sampling.weigh(torch.zeros(2, 50), torch.ones(3), torch.zeros(2, 2, 32))
    with pytest.raises(ValueError, match="do not belong together"):
        native_sampling.weigh(torch.zeros(2, 70), torch.ones(2), torch.zeros(2, 2, 32))
    with pytest.raises(ValueError, match="do not fit"):
        native_sampling.search(torch.zeros(2, 2, 32), torch.zeros(2, 3), torch.zeros(2, dtype=torch.float64))
