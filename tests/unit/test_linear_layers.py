"""Linear layers compute what torch makes of them by whatever product, and are as they were afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from batchkv import parity_probe
from batchkv.engine import Engine
from batchkv.fast_layers import with_fast_layers
from batchkv.kernels import native_linear
from batchkv.linear_layers import PackedLinear, linear_backend, pack_linears, product_of
from tests.tiny_models import FAMILIES, save_tiny

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture(params=["native", "onednn"])
def fastest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By what layers are computed, on any processor."""
    name: str = request.param
    if name == "native" and not native_linear.is_covered(torch.zeros(1, 1), None):
        pytest.skip("the native kernels were not built")
    if name == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    monkeypatch.setattr(native_linear, "is_fastest", lambda _: name == "native")
    return name


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_linear, "is_fastest", lambda _: False)


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 40), (3, 40), (1, 300, 40), (0, 40)])
def test_a_packed_layer_computes_what_the_plain_one_does(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 56, bias=bias))
    rows = torch.randn(shape)
    expected = model(rows)
    pack_linears(model)
    assert isinstance(model[0], PackedLinear)
    assert torch.allclose(model(rows), expected, atol=1e-5)


def test_layers_that_are_more_than_linear_and_other_dtypes_stay_as_they_are() -> None:
    class Adapter(nn.Linear):
        pass

    model = nn.Sequential(Adapter(8, 8), nn.Linear(8, 8, dtype=torch.float64))
    before = list(model)
    pack_linears(model)
    assert list(model) == before


@pytest.mark.usefixtures("fastest")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 40), (3, 40), (1, 300, 40), (0, 40)])
def test_the_product_of_a_live_layer_is_that_of_the_layer(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(40, 56, bias=bias)
    rows = torch.randn(shape)
    expected, forward = layer(rows), layer.forward
    with torch.inference_mode(), with_fast_layers(nn.Sequential(layer)):
        assert layer.forward != forward
        found = layer(rows)
    assert torch.allclose(found, expected, atol=1e-5)
    assert layer.forward == forward


@pytest.mark.usefixtures("fastest")
def test_live_layers_are_as_they_were_also_after_an_error_and_in_one_another() -> None:
    model = FAMILIES["llama"]()
    weights = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="in it"), with_fast_layers(model), with_fast_layers(model):
        raise RuntimeError("in it")
    assert not any("forward" in vars(module) for module in model.modules())
    assert [parameter.data_ptr() for parameter in model.parameters()] == weights


@pytest.mark.usefixtures("fastest")
def test_a_bias_that_lies_otherwise_in_memory_is_read_as_it_is() -> None:
    layer = nn.Linear(8, 6)
    layer.bias = nn.Parameter(torch.arange(12.0)[::2])
    rows = torch.randn(3, 8)
    expected = layer(rows)
    with torch.inference_mode(), with_fast_layers(nn.Sequential(layer)):
        assert torch.allclose(layer(rows), expected, atol=1e-5)


@pytest.mark.usefixtures("fastest")
def test_a_weight_that_is_more_than_a_tensor_is_left_alone() -> None:
    class Quantized(torch.Tensor):
        pass

    layer = nn.Linear(8, 6)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantized))
    with with_fast_layers(nn.Sequential(layer)):
        assert "forward" not in vars(layer)


@pytest.mark.usefixtures("fastest")
def test_autocast_and_layers_with_a_forward_of_their_own_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    own = model[1].forward = lambda rows: rows  # as hooks of accelerate do
    with torch.no_grad(), with_fast_layers(model):
        assert model[1].forward is own
        with torch.autocast("cpu", torch.bfloat16):
            assert model(torch.zeros(2, 8)).dtype == torch.bfloat16
    assert model[1].forward is own


def test_native_products_are_of_plain_layers_in_float32_and_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native_linear.is_covered(torch.zeros(1, 1), None):
        pytest.skip("the native kernels were not built")
    monkeypatch.setattr(native_linear, "is_fastest", lambda _: True)
    for dtype in (torch.float32, torch.bfloat16):
        model = FAMILIES["llama"]().to(dtype)
        assert linear_backend(model) == "native"
        assert product_of(model.lm_head) is native_linear.linear
    assert product_of(nn.Linear(4, 4).half()) is None
    assert product_of(nn.Embedding(4, 4)) is None


def test_a_loaded_model_keeps_its_weights_where_packing_is_not_worth_it(fastest: str, tmp_path: Path) -> None:
    loaded = Engine(save_tiny(FAMILIES["llama"](), tmp_path)).model
    assert (linear_backend(loaded) == "native") == (fastest == "native")
    assert isinstance(loaded.lm_head, nn.Linear) == (fastest == "native")


@needs_onednn
@pytest.mark.usefixtures("without_native")
def test_a_live_module_is_not_packed_and_a_loaded_one_is(tmp_path: Path) -> None:
    live = FAMILIES["llama"]()
    modules = list(live.modules())
    Engine(live)
    assert list(live.modules()) == modules
    loaded = Engine(save_tiny(live, tmp_path)).model
    assert isinstance(loaded.lm_head, PackedLinear)
    assert not any(type(module) is nn.Linear for module in loaded.modules())


@pytest.mark.usefixtures("fastest")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="shows what is mapped on Linux only")
def test_the_checkpoint_does_not_stay_in_memory_beside_the_weights(tmp_path: Path) -> None:
    """Qwen2 has biases, which could keep the file mapped as well as the embedding could."""
    engine = Engine(save_tiny(FAMILIES["qwen2"](), tmp_path))
    assert engine.model.num_parameters() > 0
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@needs_onednn
@pytest.mark.usefixtures("without_native")
def test_a_model_whose_code_reads_weights_runs_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaForCausalLM.forward

    def forward(self: LlamaForCausalLM, *args: Any, **kwargs: Any) -> Any:
        assert self.lm_head.weight.dtype == torch.float32
        return plain(self, *args, **kwargs)

    folder = save_tiny(FAMILIES["llama"](), tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    monkeypatch.setattr(parity_probe, "_passed", set())  # the class has passed before, with its own code
    assert linear_backend(Engine(folder).model) == "onednn"
