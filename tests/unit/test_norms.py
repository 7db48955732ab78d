"""Norms of a model are computed natively while the engine runs it, if they are those that the kernel computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchkv.fast_layers import with_fast_layers
from batchkv.kernels import native_norm
from tests.native_kernels import needs_native
from tests.tiny_models import FAMILIES


@needs_native
@pytest.mark.parametrize(("family", "per_layer"), [("llama", 2), ("qwen3", 4), ("gemma3", 0)])
def test_copies_of_llamas_norm_are_native_and_others_are_not(
    family: str, per_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    rms_norm = native_norm.rms_norm
    monkeypatch.setattr(native_norm, "rms_norm", lambda *args: computed.append(args) or rms_norm(*args))
    model = FAMILIES[family]()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter)
    ids = torch.arange(8).unsqueeze(0)
    with torch.inference_mode():
        expected = model(ids).logits
        with with_fast_layers(model):
            found = model(ids).logits
    assert len(computed) == (per_layer * model.config.num_hidden_layers + 1 if per_layer else 0)
    assert torch.allclose(found, expected, atol=1e-4)


def test_rows_of_another_dtype_than_the_weight_are_computed_as_before() -> None:
    norm = FAMILIES["llama"]().model.norm
    rows = torch.randn(3, len(norm.weight)).to(torch.bfloat16)
    with torch.no_grad():
        expected = norm(rows)
        with with_fast_layers(norm):
            assert torch.equal(norm(rows), expected)
