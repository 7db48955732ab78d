"""Native rotary embeddings are Llama's, and an element has the same bits wherever it stands."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from batchkv.kernels.native_rotary import is_covered, rotate
from tests.native_kernels import INSTRUCTION_SETS, needs_native

pytestmark = needs_native

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs_of(
    num_tokens: int, dim: int, dtype: torch.dtype = torch.float32, heads: int = 3, kv_heads: int = 2
) -> Inputs:
    """As layers make them: tokens outside heads, and both halves of the angles the same, but for here."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn(1, num_tokens, heads, dim, generator=random).transpose(1, 2)
    key = torch.randn(1, num_tokens, kv_heads, dim, generator=random).transpose(1, 2)
    angles = 6 * torch.rand(1, num_tokens, dim, generator=random)
    return query.to(dtype), key.to(dtype), angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dim", [2, 8, 14, 32, 64, 100, 256])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 200])
def test_it_is_what_llama_computes(instruction_set: str, dim: int, num_tokens: int) -> None:
    inputs = inputs_of(num_tokens, dim)
    for found, expected in zip(rotate(*inputs, instruction_set), apply_rotary_pos_emb(*inputs), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dim", [14, 64])
def test_in_bfloat16_it_has_llamas_bits(instruction_set: str, dim: int) -> None:
    inputs = inputs_of(50, dim, torch.bfloat16)
    for found, expected in zip(rotate(*inputs, instruction_set), apply_rotary_pos_emb(*inputs), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_company(instruction_set: str, dtype: torch.dtype) -> None:
    query, key, cos, sin = inputs_of(400, 44, dtype)  # enough for several threads
    expected = rotate(query, key, cos, sin, instruction_set)
    for some in (slice(3, 4), slice(17, 140)):
        found = rotate(query[:, :, some], key[:, :, some], cos[:, some], sin[:, some], instruction_set)
        for few, all_of_them in zip(found, expected, strict=True):
            assert torch.equal(few, all_of_them[:, :, some])


def test_results_lie_in_memory_as_what_was_turned() -> None:
    inputs = inputs_of(5, 8)
    query, key = rotate(*inputs)
    assert (query.stride(), key.stride()) == (inputs[0].stride(), inputs[1].stride())
    others = (inputs[0].contiguous(), inputs[1].contiguous(), *inputs[2:])
    assert torch.equal(rotate(*others)[0], query)


def test_what_the_kernel_does_not_turn_is_not_covered() -> None:
    query, key, cos, sin = inputs_of(5, 8)
    assert is_covered(query, key, cos, sin)
    assert not is_covered(query, key, cos.bfloat16(), sin)
    assert not is_covered(query, key, cos[:, :, :4], sin[:, :, :4])
    assert not is_covered(query, key[:, :, :4], cos, sin)
    assert not is_covered(*(tensor.expand(2, *tensor.shape[1:]) for tensor in (query, key, cos, sin)))
    assert not is_covered(*(tensor.half() for tensor in (query, key, cos, sin)))
    assert not is_covered(*(tensor.to("meta") for tensor in (query, key, cos, sin)))
    assert not is_covered(query[..., :7], key[..., :7], cos[..., :7].contiguous(), sin[..., :7].contiguous())
    with pytest.raises(ValueError, match="ask is_covered first"):
        rotate(query, key, cos[:, 1:], sin)
