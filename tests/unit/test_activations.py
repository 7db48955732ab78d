"""Activations of a model are computed natively while the engine runs it, and are as they were afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from batchkv import batch_invariance
from batchkv.activations import are_native, kind_of
from batchkv.batch_invariance import row_multiple
from batchkv.fast_layers import with_fast_layers
from batchkv.kernels import native_activation, native_linear
from tests.native_kernels import needs_native
from tests.tiny_models import FAMILIES


@pytest.mark.parametrize(
    ("name", "kind"),
    [("silu", "silu"), ("swish", "silu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", None), ("relu", None)],
)
def test_activations_are_known_by_what_they_compute(name: str, kind: str | None) -> None:
    assert kind_of(ACT2FN[name]) == kind
    assert kind_of(nn.Linear(2, 2)) is None


@needs_native
def test_they_are_native_in_it_and_as_they_were_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    activate = native_activation.activate
    monkeypatch.setattr(native_activation, "activate", lambda rows, kind: computed.append(kind) or activate(rows, kind))
    monkeypatch.setattr(native_linear, "is_fastest", lambda _: False)  # or they would be computed within linear layers
    model = FAMILIES["llama"]()
    ids = torch.arange(8).unsqueeze(0)
    with torch.inference_mode():
        expected = model(ids).logits
        assert not computed
        with with_fast_layers(model):
            found = model(ids).logits
        assert computed == ["silu"] * model.config.num_hidden_layers
    assert torch.allclose(found, expected, atol=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())


def test_other_dtypes_are_computed_as_before() -> None:
    activation = ACT2FN["silu"]
    rows = torch.randn(40).to(torch.float16)
    with with_fast_layers(nn.Sequential(activation)):
        assert torch.equal(activation(rows), nn.functional.silu(rows))


@needs_native
def test_native_activations_need_not_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(batch_invariance, "_activations_are_invariant", lambda *width: tried.append(width) or True)
    monkeypatch.setattr(batch_invariance, "_found", {})
    with_native, without = FAMILIES["llama"](), FAMILIES["llama"]()
    without.model.layers[0].mlp.act_fn = ACT2FN["gelu"]
    assert are_native(with_native, {torch.float32})
    assert not are_native(FAMILIES["gemma2"](), {torch.float32})  # the tanh of its logits' soft-cap is not native
    assert not are_native(with_native, {torch.float16})
    assert row_multiple(with_native) is not None
    assert not tried
    assert row_multiple(without) is not None
    assert tried
