"""MLPs with a gate are computed at once while the engine runs a model, and only where that is all they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from batchkv.fast_layers import with_fast_layers
from batchkv.gated_mlps import fast_mlp
from batchkv.kernels import native_linear
from tests.native_kernels import needs_native
from tests.tiny_models import FAMILIES

pytestmark = needs_native
IDS = torch.arange(8).unsqueeze(0)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activations of the gates that are computed, on any processor."""
    computed: list[str] = []
    compute = native_linear.gated_linear

    def record(rows: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
        computed.append(activation)
        return compute(rows, gate, weight, activation)

    monkeypatch.setattr(native_linear, "is_fastest", lambda _: True)
    monkeypatch.setattr(native_linear, "gated_linear", record)
    return computed


@pytest.mark.parametrize(
    ("family", "activations"),
    [("llama", ["silu"] * 2), ("qwen3", ["silu"] * 2), ("gemma2", ["gelu_tanh"] * 4), ("phi3", []), ("gpt_oss", [])],
)
@torch.inference_mode()
def test_copies_of_llamas_mlp_are_computed_at_once(gated: list[str], family: str, activations: list[str]) -> None:
    model = FAMILIES[family]()
    expected = model(IDS).logits
    with with_fast_layers(model):
        found = model(IDS).logits
    assert gated == activations
    assert torch.allclose(found, expected, atol=1e-4)
    assert not any("forward" in vars(module) for module in model.modules())


def _another_activation(mlp: nn.Module) -> None:
    mlp.act_fn = ACT2FN["gelu"]


def _hook_of_the_gate(mlp: nn.Module) -> None:
    mlp.gate_proj.register_forward_hook(lambda *_: None)


def _hook_of_the_activation(mlp: nn.Module) -> None:
    mlp.act_fn.register_forward_pre_hook(lambda *_: None)


def _bias(mlp: nn.Module) -> None:
    mlp.up_proj.bias = nn.Parameter(torch.zeros(len(mlp.up_proj.weight)))


def _adapter(mlp: nn.Module) -> None:
    mlp.up_proj = nn.Sequential(mlp.up_proj)


def _two_dtypes(mlp: nn.Module) -> None:
    mlp.gate_proj.bfloat16()


def _own_forward(mlp: nn.Module) -> None:
    mlp.forward = mlp.forward


@pytest.mark.usefixtures("gated")
@pytest.mark.parametrize(
    "change",
    [_another_activation, _hook_of_the_gate, _hook_of_the_activation, _bias, _adapter, _two_dtypes, _own_forward],
)
def test_an_mlp_that_is_more_is_left_alone(change: Callable[[nn.Module], None]) -> None:
    mlp = FAMILIES["llama"]().model.layers[0].mlp
    assert fast_mlp(mlp) is not None
    change(mlp)
    assert fast_mlp(mlp) is None


@torch.no_grad()
def test_autocast_and_rows_of_another_dtype_are_computed_as_before(gated: list[str]) -> None:
    model: PreTrainedModel = FAMILIES["llama"]()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(IDS).logits
        with with_fast_layers(model):
            assert torch.equal(model(IDS).logits, expected)
    assert not gated
