"""What a token costs follows from the config, and is what the attention modules of each family really make."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.masking_utils import eager_mask

from batchkv.errors import UserError
from batchkv.kernels.quantization import scale_bytes
from batchkv.kernels.reference import ReferenceAttention
from batchkv.kernels.torch_cpu import TorchAttention
from batchkv.kv_layout import KVLayout, LayerSpec, layer_specs
from tests.tiny_models import FAMILIES, FULL, WINDOW

SMOLLM2 = LlamaConfig(
    num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576, head_dim=64, vocab_size=49152
)


def full(heads: int = 2, dim: int = 16) -> LayerSpec:
    return LayerSpec(heads, heads, dim, dim, window=None)


def sliding(window: int, heads: int = 2, dim: int = 16) -> LayerSpec:
    return LayerSpec(heads, heads, dim, dim, window)


def test_smollm2_takes_23040_bytes_per_token() -> None:
    layout = KVLayout(layer_specs(SMOLLM2), element_bytes=2)
    assert layout.layers == (LayerSpec(9, 3, 64, 64, None),) * 30
    assert layout.bytes_per_token == 23_040


def test_layers_are_grouped_by_window_with_full_attention_first() -> None:
    layout = KVLayout((sliding(8), full(), sliding(4), sliding(8)), element_bytes=4)
    assert layout.windows == (None, 8, 4)
    assert layout.layer_group == (1, 0, 2, 1)


def test_each_group_has_its_own_cost_and_they_add_up() -> None:
    layout = KVLayout((sliding(8), full(heads=3), LayerSpec(1, 1, 10, 6, window=8)), element_bytes=2)
    assert layout.group_bytes_per_token == (3 * 32 * 2, 2 * 32 * 2 + 16 * 2)
    assert layout.bytes_per_token == sum(layout.group_bytes_per_token)


def test_scales_cost_four_bytes_for_each_key_and_value() -> None:
    layout = KVLayout(layer_specs(SMOLLM2), element_bytes=1, scale_bytes=4)
    assert layout.bytes_per_token == 30 * 3 * (2 * 64 + 2 * 4)
    mixed = KVLayout((sliding(8), full(heads=3), LayerSpec(1, 1, 10, 6, window=8)), element_bytes=1, scale_bytes=4)
    assert mixed.group_bytes_per_token == (3 * 32 + 3 * 8, 2 * 32 + 2 * 8 + 16 + 8)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("backend", [ReferenceAttention, TorchAttention])
def test_pages_take_what_the_layout_says(backend: Any, kv_dtype: torch.dtype) -> None:
    spec = LayerSpec(3, 3, 10, 6, window=None)
    pages = backend().allocate(5, 4, spec, kv_dtype, torch.device("cpu"))
    tensors = [pool for pool in (getattr(pages, name) for name in pages.__slots__) if pool is not None]
    layout = KVLayout((spec,), kv_dtype.itemsize, scale_bytes(kv_dtype))
    assert sum(tensor.nbytes for tensor in tensors) == 5 * 4 * layout.bytes_per_token


def test_a_model_without_full_attention_has_no_full_group() -> None:
    assert KVLayout((sliding(8), sliding(8)), element_bytes=2).windows == (8,)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        pytest.param(MistralConfig(num_hidden_layers=2, sliding_window=7), (7, 7), id="one window for all layers"),
        pytest.param(MistralConfig(num_hidden_layers=2, sliding_window=None), (None, None), id="no window"),
        pytest.param(
            Qwen2Config(num_hidden_layers=2, sliding_window=7, use_sliding_window=False),
            (None, None),
            id="switched off",
        ),
        pytest.param(
            Qwen2Config(num_hidden_layers=3, sliding_window=7, use_sliding_window=True, max_window_layers=2),
            (None, None, 7),
            id="layer by layer",
        ),
        pytest.param(
            Qwen2MoeConfig(num_hidden_layers=2, use_sliding_window=False), (None, None), id="as a window of 0"
        ),
        pytest.param(Qwen3MoeConfig(num_hidden_layers=2, use_sliding_window=False), (None, None), id="of all layers"),
    ],
)
def test_windows_follow_the_config(config: Any, windows: tuple[int | None, ...]) -> None:
    assert tuple(spec.window for spec in layer_specs(config)) == windows


@pytest.mark.parametrize("absent", [{}, {"num_key_value_heads": None, "head_dim": None}])
def test_heads_and_head_dim_have_the_defaults_of_transformers(absent: dict[str, None]) -> None:
    class Config:
        model_type = "old"
        num_hidden_layers = 1
        num_attention_heads = 4
        hidden_size = 32

    config: Any = Config()
    vars(config).update(absent)
    assert layer_specs(config) == (LayerSpec(num_heads=4, num_kv_heads=4, key_dim=8, value_dim=8, window=None),)


def test_a_layer_type_that_is_not_known_is_named() -> None:
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = [FULL, "chunked_attention"]
    with pytest.raises(UserError, match="'llama' has 'chunked_attention' layers"):
        layer_specs(config)


def seen_by_attention(family: str, tokens: int) -> tuple[LayerSpec, ...]:
    """The specs of the keys and values that attention gets, and of the mask that transformers makes for it."""
    seen: list[LayerSpec] = []

    def record(
        module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any
    ) -> tuple[torch.Tensor, None]:
        visible = int((attention_mask[0, 0] == 0).sum(dim=1).max())
        window = None if visible == tokens else visible
        seen.append(LayerSpec(query.shape[1], key.shape[1], key.shape[3], value.shape[3], window))
        return torch.zeros_like(query).transpose(1, 2).contiguous(), None

    AttentionInterface.register("record", record)
    AttentionMaskInterface.register("record", eager_mask)
    model = FAMILIES[family]()
    model.set_attn_implementation("record")
    model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return tuple(seen)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_specs_are_what_the_attention_modules_make(family: str) -> None:
    assert layer_specs(FAMILIES[family]().config) == seen_by_attention(family, tokens=3 * WINDOW)


def test_the_families_have_every_mixture_of_windows() -> None:
    windows = {KVLayout(layer_specs(build().config), 4).windows for build in FAMILIES.values()}
    assert windows == {(None,), (WINDOW,), (None, WINDOW)}


def test_a_plan_needs_no_torch() -> None:
    code = "import sys, batchkv.kv_layout; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
