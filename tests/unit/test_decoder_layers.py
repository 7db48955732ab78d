"""Decoder layers are native but for their attention while the engine runs a model, with the bits of their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from batchkv import fast_layers
from batchkv.decoder_layers import fast_decoder_layer
from batchkv.fast_layers import with_fast_layers
from batchkv.kernels import native_linear
from batchkv.kernels.native_layer import NativeLayer
from tests.native_kernels import needs_native
from tests.tiny_models import FAMILIES

pytestmark = needs_native
IDS = torch.arange(40).unsqueeze(0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each layer that is computed natively, on any processor."""
    tokens: list[int] = []
    start = NativeLayer.start

    def record(self: NativeLayer, hidden: torch.Tensor, *angles: torch.Tensor) -> Any:
        tokens.append(hidden.shape[1])
        return start(self, hidden, *angles)

    monkeypatch.setattr(native_linear, "is_fastest", lambda _: True)
    monkeypatch.setattr(NativeLayer, "start", record)
    return tokens


def model_of(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = FAMILIES[family]().to(dtype)
    model.set_attn_implementation("sdpa")  # the eager one is a function of each family's module
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.normal_(parameter, 1, 0.1)
    return model


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_copy_of_llamas_layer_has_the_bits_of_its_parts(
    started: list[int], family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family, dtype)
    with with_fast_layers(model):
        found = logits_of(model)
    assert started == [IDS.shape[1]] * model.config.num_hidden_layers
    monkeypatch.setattr(fast_layers, "fast_decoder_layer", lambda _: None)
    with with_fast_layers(model):
        assert torch.equal(logits_of(model), found)
    assert torch.allclose(logits_of(model), found, atol=1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("family", ["olmo2", "phi3"])
def test_other_layers_are_not(started: list[int], family: str) -> None:
    model = model_of(family)
    with with_fast_layers(model):
        logits_of(model)
    assert not started


def _hook_of_the_layer(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda *_: None)


def _hook_of_a_part(layer: nn.Module) -> None:
    layer.self_attn.k_proj.register_forward_pre_hook(lambda *_: None)


def _adapter(layer: nn.Module) -> None:
    layer.self_attn.o_proj = nn.Sequential(layer.self_attn.o_proj)


def _another_norm(layer: nn.Module) -> None:
    layer.input_layernorm = nn.LayerNorm(48)


def _another_activation(layer: nn.Module) -> None:
    layer.mlp.act_fn = nn.ReLU()


def _two_dtypes(layer: nn.Module) -> None:
    layer.mlp.down_proj.bfloat16()


def _strided_norm(layer: nn.Module) -> None:
    layer.post_attention_layernorm.weight = nn.Parameter(torch.ones(96)[::2])


def _own_forward(layer: nn.Module) -> None:
    layer.self_attn.forward = layer.self_attn.forward


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    "change",
    [
        _hook_of_the_layer,
        _hook_of_a_part,
        _adapter,
        _another_norm,
        _another_activation,
        _two_dtypes,
        _strided_norm,
        _own_forward,
    ],
)
def test_a_layer_that_is_more_is_left_alone(change: Callable[[nn.Module], None]) -> None:
    layer = model_of("llama").model.layers[0]
    assert fast_decoder_layer(layer) is not None
    change(layer)
    assert fast_decoder_layer(layer) is None


def test_layers_whose_products_are_not_native_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_linear, "is_fastest", lambda _: False)
    assert fast_decoder_layer(model_of("llama").model.layers[0]) is None


def test_training_several_rows_caches_autocast_and_eager_attention_go_the_way_of_the_class(started: list[int]) -> None:
    model = model_of("llama")
    expected = logits_of(model)
    with with_fast_layers(model), torch.inference_mode():
        model.train()
        assert torch.allclose(logits_of(model), expected, atol=1e-4)
        model.eval()
        assert torch.allclose(logits_of(model, IDS.expand(2, -1))[1:], expected, atol=1e-4)
        assert torch.allclose(model(IDS, use_cache=True).logits, expected, atol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            logits_of(model)
        model.set_attn_implementation("eager")
        assert torch.allclose(logits_of(model), expected, atol=1e-4)
    assert not started


def test_weights_are_read_where_they_lie(started: list[int]) -> None:
    """A policy in training changes them in place."""
    model = model_of("llama")
    with with_fast_layers(model):
        before = logits_of(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        found = logits_of(model)
    assert started
    assert not torch.allclose(found, before, atol=1e-3)
    assert torch.allclose(found, logits_of(model), atol=1e-4)


def test_weights_that_are_put_in_place_of_others_are_the_ones_that_count(started: list[int]) -> None:
    model = model_of("llama")
    with with_fast_layers(model):
        before = logits_of(model)
        mlp = model.model.layers[0].mlp
        mlp.down_proj.weight.data = -mlp.down_proj.weight.data
        model.model.layers[1].self_attn.q_proj.weight = nn.Parameter(torch.zeros(64, 48))
        found = logits_of(model)
    assert len(started) == model.config.num_hidden_layers
    assert not torch.allclose(found, before, atol=1e-3)
    assert torch.allclose(found, logits_of(model), atol=1e-4)


def test_a_class_whose_forward_others_have_wrapped_is_left_alone(
    started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (LlamaMLP, LlamaRMSNorm, LlamaAttention, LlamaDecoderLayer):
        plain = kind.forward

        @functools.wraps(plain)
        def wrapped(self: nn.Module, *args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            return plain(self, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(kind, "forward", wrapped)
            model = model_of("llama")
            with with_fast_layers(model):
                assert not any("forward" in vars(module) for module in model.modules() if type(module) is kind)
                logits_of(model)
    assert not started


def test_a_hook_of_all_modules_is_called_for_each_part(started: list[int]) -> None:
    called: list[type[nn.Module]] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(type(module)))
    try:
        model = model_of("llama")
        with with_fast_layers(model):
            logits_of(model)
    finally:
        handle.remove()
    assert not started
    assert called.count(LlamaMLP) == model.config.num_hidden_layers
    assert nn.Linear in called
