"""The layers of a decoder are one native call while the engine runs a model, with the bits of their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
)

from batchkv import fast_layers
from batchkv.attention import StepAttention
from batchkv.decoders import fast_decoder
from batchkv.errors import UserError
from batchkv.fast_layers import with_fast_layers
from batchkv.kernels import native_linear
from batchkv.kernels.native_attention import NativeAttention
from batchkv.kernels.native_decoder import NativeDecoder
from batchkv.kernels.torch_cpu import TorchAttention
from batchkv.kv_layout import layer_specs
from batchkv.model_runner import paged_attention_of
from batchkv.step import AttentionBatch
from tests.native_kernels import needs_native
from tests.tiny_models import FAMILIES, WINDOW

pytestmark = needs_native
IDS = torch.arange(40).unsqueeze(0)
PAGE_SIZE = 8


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each step whose layers are computed natively, on any processor."""
    tokens: list[int] = []
    run = NativeDecoder.run

    def record(self: NativeDecoder, hidden: torch.Tensor, *rest: Any) -> Any:
        tokens.append(hidden.shape[1])
        return run(self, hidden, *rest)

    monkeypatch.setattr(native_linear, "is_fastest", lambda _: True)
    monkeypatch.setattr(NativeDecoder, "run", record)
    return tokens


def model_of(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = FAMILIES[family]().to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.normal_(parameter, 1, 0.1)
    return model


def attention_of(
    model: PreTrainedModel,
    backend: NativeAttention | TorchAttention | None = None,
    kv_dtype: torch.dtype | None = None,
    num_tokens: int = IDS.shape[1],
) -> StepAttention:
    """Of a step with one row, from its first token on."""
    backend, specs = backend or NativeAttention(), layer_specs(model.config)
    pages = -(-num_tokens // PAGE_SIZE)
    plans = [
        backend.plan(
            AttentionBatch(
                PAGE_SIZE,
                spec.window,
                np.arange(pages, dtype=np.int32)[None],
                np.array([num_tokens]),
                np.array([0, num_tokens]),
                np.arange(num_tokens),
            ),
            spec,
        )
        for spec in specs
    ]
    kv = [backend.allocate(pages, PAGE_SIZE, spec, kv_dtype or model.dtype, torch.device("cpu")) for spec in specs]
    return StepAttention(backend, specs, tuple(kv), tuple(plans), num_tokens)


@torch.inference_mode()
def logits_of(model: PreTrainedModel, attention: StepAttention | None = None, **arguments: Any) -> torch.Tensor:
    """Of a step, as the engine calls a model."""
    asked = {"input_ids": IDS, "position_ids": IDS, "use_cache": False} | arguments
    logits: torch.Tensor = model(**asked, step_attention=attention or attention_of(model)).logits
    return logits


@torch.inference_mode()
def expected_logits(model: PreTrainedModel) -> torch.Tensor:
    logits: torch.Tensor = model(IDS, use_cache=False).logits
    return logits


@contextmanager
def without_native_decoders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(fast_layers, "fast_decoder", lambda _: None)
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_copy_of_llamas_layers_has_the_bits_of_its_parts(
    started: list[int], family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family, dtype)
    expected = expected_logits(model)
    with paged_attention_of(model):
        found = logits_of(model)
    assert started == [IDS.shape[1]]
    with without_native_decoders(monkeypatch), paged_attention_of(model):
        assert torch.equal(logits_of(model), found)
    assert started == [IDS.shape[1]]
    difference = (expected - found).float().abs()
    assert (difference.max() < 1e-4) if dtype == torch.float32 else (difference.mean() < 0.02)


def test_tokens_that_fill_up_a_step_are_computed_as_well(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    with paged_attention_of(model):
        found = logits_of(model, attention_of(model, num_tokens=27))
    with without_native_decoders(monkeypatch), paged_attention_of(model):
        assert torch.equal(logits_of(model, attention_of(model, num_tokens=27)), found)
    assert started == [IDS.shape[1]]


@pytest.mark.parametrize("family", ["olmo2", "phi3"])
def test_other_layers_are_not(started: list[int], family: str) -> None:
    model = model_of(family)
    with paged_attention_of(model):
        logits_of(model)
    assert not started


def _hook_of_a_layer(decoder: Any) -> None:
    decoder.layers[1].register_forward_hook(lambda *_: None)


def _hook_of_a_part(decoder: Any) -> None:
    decoder.layers[1].self_attn.k_proj.register_forward_pre_hook(lambda *_: None)


def _adapter(decoder: Any) -> None:
    decoder.layers[1].self_attn.o_proj = nn.Sequential(decoder.layers[1].self_attn.o_proj)


def _another_layer(decoder: Any) -> None:
    decoder.layers[1] = nn.Identity()


def _another_norm(decoder: Any) -> None:
    decoder.layers[1].input_layernorm = nn.LayerNorm(48)


def _another_activation(decoder: Any) -> None:
    decoder.layers[1].mlp.act_fn = nn.ReLU()


def _two_dtypes(decoder: Any) -> None:
    decoder.layers[1].mlp.down_proj.bfloat16()


def _two_dtypes_of_layers(decoder: Any) -> None:
    decoder.layers[1].bfloat16()


def _strided_norm(decoder: Any) -> None:
    decoder.layers[1].post_attention_layernorm.weight = nn.Parameter(torch.ones(96)[::2])


def _own_forward(decoder: Any) -> None:
    decoder.layers[1].self_attn.forward = decoder.layers[1].self_attn.forward


class _CallsMore(LlamaMLP):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return -super().__call__(*args, **kwargs)


def _own_call(decoder: Any) -> None:
    decoder.layers[1].mlp.__class__ = _CallsMore


def _one_layer_twice(decoder: Any) -> None:
    decoder.layers[1] = decoder.layers[0]


def _no_layer(decoder: Any) -> None:
    decoder.config.num_hidden_layers = 0


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    "change",
    [
        _hook_of_a_layer,
        _hook_of_a_part,
        _adapter,
        _another_layer,
        _another_norm,
        _another_activation,
        _two_dtypes,
        _two_dtypes_of_layers,
        _strided_norm,
        _own_forward,
        _own_call,
        _one_layer_twice,
        _no_layer,
    ],
)
def test_a_decoder_that_is_more_or_less_is_left_alone(change: Callable[[Any], None]) -> None:
    decoder = model_of("llama").model
    assert fast_decoder(decoder) is not None
    change(decoder)
    assert fast_decoder(decoder) is None


def test_decoders_whose_products_are_not_native_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_linear, "is_fastest", lambda _: False)
    assert fast_decoder(model_of("llama").model) is None


def test_what_is_not_a_step_goes_the_way_of_the_class(started: list[int]) -> None:
    model = model_of("llama")
    expected = expected_logits(model)
    embedded = model.get_input_embeddings()(IDS)
    with paged_attention_of(model), torch.inference_mode():
        others: list[dict[str, Any]] = [
            {"input_ids": None, "inputs_embeds": embedded},
            {"position_ids": None},
            {"use_cache": True},
            {"output_hidden_states": True},
        ]
        for other in others:
            assert torch.allclose(logits_of(model, **other), expected, atol=1e-4)
        model.train()
        assert torch.allclose(logits_of(model), expected, atol=1e-4)
        model.eval()
        with torch.autocast("cpu", torch.bfloat16):
            logits_of(model)
        model.set_attn_implementation("eager")
        assert torch.allclose(logits_of(model), expected, atol=1e-4)
    with paged_attention_of(model.requires_grad_()):
        model(IDS, position_ids=IDS, use_cache=False, step_attention=attention_of(model))  # may want gradients
    assert not started


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_keys_and_values_in_another_dtype_are_kept_by_the_way_that_has_it(
    started: list[int], kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    with paged_attention_of(model):
        found = logits_of(model, attention_of(model, kv_dtype=kv_dtype))
    assert len(started) == (kv_dtype == torch.int8)  # of float32, as its layers are
    with without_native_decoders(monkeypatch), paged_attention_of(model):
        assert torch.equal(logits_of(model, attention_of(model, kv_dtype=kv_dtype)), found)


def test_other_attention_goes_the_way_of_the_class(started: list[int]) -> None:
    model = model_of("llama")
    expected = expected_logits(model)
    with paged_attention_of(model):
        assert torch.allclose(logits_of(model, attention_of(model, TorchAttention())), expected, atol=1e-4)
    assert not started


def test_a_window_that_the_pages_are_not_for_is_refused_as_ever(started: list[int]) -> None:
    model = model_of("mistral")
    attention = attention_of(model)
    other = replace(attention, specs=tuple(replace(spec, window=WINDOW + 1) for spec in attention.specs))
    with paged_attention_of(model), pytest.raises(UserError, match=f"window of {WINDOW} tokens"):
        logits_of(model, other)
    assert not started


def test_weights_are_read_where_they_lie(started: list[int]) -> None:
    """A policy in training changes them in place."""
    model = model_of("llama")
    with paged_attention_of(model):
        before = logits_of(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        found = logits_of(model)
    assert len(started) == 2
    assert not torch.allclose(found, before, atol=1e-3)
    assert torch.allclose(found, expected_logits(model), atol=1e-4)


def test_weights_that_are_put_in_place_of_others_are_the_ones_that_count(started: list[int]) -> None:
    model = model_of("llama")
    with paged_attention_of(model):
        before = logits_of(model)
        mlp = model.model.layers[0].mlp
        mlp.down_proj.weight.data = -mlp.down_proj.weight.data
        model.model.layers[1].self_attn.q_proj.weight = nn.Parameter(torch.zeros(64, 48))
        found = logits_of(model)
    assert len(started) == 1
    assert not torch.allclose(found, before, atol=1e-3)
    assert torch.allclose(found, expected_logits(model), atol=1e-4)


def test_a_class_whose_forward_others_have_wrapped_is_left_alone(
    started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (LlamaMLP, LlamaRMSNorm, LlamaAttention, LlamaDecoderLayer, LlamaModel):
        plain = kind.forward

        @functools.wraps(plain)
        def wrapped(self: nn.Module, *args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            return plain(self, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(kind, "forward", wrapped)
            model = model_of("llama")
            with paged_attention_of(model):
                assert not any("forward" in vars(module) for module in model.modules() if type(module) is kind)
                logits_of(model)
    assert not started


def test_a_hook_of_all_modules_is_called_for_each_part(started: list[int]) -> None:
    called: list[type[nn.Module]] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(type(module)))
    try:
        model = model_of("llama")
        with paged_attention_of(model):
            logits_of(model)
    finally:
        handle.remove()
    assert not started
    assert called.count(LlamaMLP) == model.config.num_hidden_layers
    assert nn.Linear in called


def test_the_model_is_as_it_was_afterwards() -> None:
    model = model_of("llama")
    with with_fast_layers(model):
        pass
    assert not any("forward" in vars(module) for module in model.modules())
