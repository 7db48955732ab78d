"""Queries and keys are turned natively while the engine runs a model, where they are turned as Llama does."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama import modeling_llama

from batchkv.fast_layers import with_fast_layers
from batchkv.kernels import native_rotary
from batchkv.rotary_embeddings import fast_rotary
from tests.native_kernels import needs_native
from tests.tiny_models import FAMILIES

pytestmark = needs_native
IDS = torch.arange(8).unsqueeze(0)


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the queries that are turned."""
    shapes: list[torch.Size] = []
    rotate = native_rotary.rotate
    monkeypatch.setattr(
        native_rotary, "rotate", lambda query, *rest: shapes.append(query.shape) or rotate(query, *rest)
    )
    return shapes


@pytest.mark.parametrize(
    ("family", "is_llamas"), [("llama", True), ("qwen3", True), ("gemma3", True), ("olmo2", False), ("gpt_oss", False)]
)
@torch.inference_mode()
def test_copies_of_llamas_are_native_and_others_are_not(turned: list[torch.Size], family: str, is_llamas: bool) -> None:
    model = FAMILIES[family]()
    expected = model(IDS).logits
    with with_fast_layers(model):
        found = model(IDS).logits
    assert len(turned) == (model.config.num_hidden_layers if is_llamas else 0)
    assert torch.allclose(found, expected, atol=1e-4)
    assert not any("forward" in vars(module) for module in model.modules())


@torch.inference_mode()
def test_several_rows_are_turned_as_before(turned: list[torch.Size]) -> None:
    model = FAMILIES["llama"]()
    expected = model(IDS.expand(2, -1)).logits
    with with_fast_layers(model):
        found = model(IDS.expand(2, -1)).logits
    assert not turned
    assert torch.allclose(found, expected, atol=1e-5)


def test_neither_a_class_nor_its_module_is_touched() -> None:
    model = FAMILIES["llama"]()
    functions, turn = vars(modeling_llama).copy(), modeling_llama.LlamaAttention.forward
    with with_fast_layers(model):
        assert vars(modeling_llama) == functions
        assert modeling_llama.LlamaAttention.forward is turn


def test_a_function_that_was_put_in_its_place_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FAMILIES["llama"]().model.layers[0].self_attn
    assert fast_rotary(layer) is not None
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x)
    assert fast_rotary(layer) is None
    monkeypatch.undo()
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda query, key, cos, sin: (query, key))
    assert fast_rotary(layer) is None
