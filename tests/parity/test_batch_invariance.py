"""A row's tokens and logprobs are the same bits whatever is computed with it, where an engine says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from batchkv.batch_invariance import row_multiple
from batchkv.config import Dtype, KVDtype
from batchkv.engine import Engine
from batchkv.errors import UserError
from batchkv.kernels import native_linear
from batchkv.kernels.native_attention import is_covered
from batchkv.sampling_params import SamplingParams
from batchkv.writer import summary_of
from tests.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny

needs_native = pytest.mark.skipif(not is_covered(torch.float32), reason="the native kernel was not built")


def jobs() -> pa.Table:
    """Rows under two headers, some of which end where others go on."""
    random = np.random.default_rng(5)
    headers = [random.integers(0, VOCAB_SIZE, n).tolist() for n in (150, 90)]
    rows = [headers[i % 2] + random.integers(0, VOCAB_SIZE, int(random.integers(0, 40))).tolist() for i in range(24)]
    return pa.table({"id": list(range(len(rows))), "prompt_token_ids": pa.array(rows, pa.list_(pa.int32()))})


def results(engine: Engine, table: pa.Table) -> list[tuple[Any, ...]]:
    sampling = SamplingParams(max_tokens=12, temperature=0.8, n=2, logprobs=True)
    out = engine.run(table, sampling).select(["id", "sample_index", "token_ids", "logprobs"]).to_pylist()
    return sorted((row["id"], row["sample_index"], row["token_ids"], row["logprobs"]) for row in out)


@needs_native
@pytest.mark.parametrize(
    ("family", "dtype", "is_loaded", "kv_dtype"),
    [
        ("llama", "float32", False, "auto"),
        ("gemma2", "float32", False, "int8"),
        ("phi3", "bfloat16", False, "auto"),
        ("llama", "float32", True, "int8"),
        ("qwen2", "bfloat16", True, "auto"),
    ],
)
def test_tokens_and_logprobs_do_not_depend_on_what_runs_together(
    family: str, dtype: Dtype, is_loaded: bool, kv_dtype: KVDtype, tmp_path: Path
) -> None:
    if dtype == "bfloat16" and not native_linear.is_fastest(torch.bfloat16):
        pytest.skip("in bfloat16 that holds for native linear layers")
    live = FAMILIES[family]().to(getattr(torch, dtype))
    model = save_tiny(live, tmp_path) if is_loaded else live  # which may have packed layers
    options: dict[str, Any] = {"kv_dtype": kv_dtype} | ({"dtype": dtype} if is_loaded else {})
    table = jobs()
    engine = Engine(model, **options, deterministic=True)
    expected = results(engine, table)
    assert summary_of(engine.run(table, SamplingParams(max_tokens=1)).schema)["batch_invariant"]
    shuffled = table.take(np.random.default_rng(1).permutation(len(table)))
    assert results(engine, shuffled) == expected
    variants: list[dict[str, Any]] = [
        {"max_batch_rows": 1},
        {"max_batch_rows": 5},
        {"max_batch_rows": 400},
        {"max_batch_tokens": 37},
        {"no_prefix_sharing": True},
        {"page_size": 4},
        {"kv_memory": 300 * engine.layout.bytes_per_token},
    ]
    for variant in variants:
        assert results(Engine(model, **options | variant), table) == expected, variant


class RoundsBelow(nn.Linear):
    """A library whose products are rounded otherwise below some number of rows."""

    threshold: int

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = super().forward(rows)
        return out * (1 + 1e-6) if len(rows) < self.threshold else out


@pytest.mark.parametrize(("threshold", "expected"), [(5, 16), (17, 32), (60, None)])
def test_steps_are_filled_up_to_where_products_stop_depending_on_the_rows(threshold: int, expected: int | None) -> None:
    kind = type("Rounds", (RoundsBelow,), {"threshold": threshold})  # layers of one kind are tried once
    linear: nn.Linear = kind(64, 64)
    assert row_multiple(nn.Sequential(linear)) == expected


@pytest.mark.parametrize("width", [1024, 4864])
def test_activations_that_depend_on_how_threads_share_them_are_noticed(width: int) -> None:
    """With four threads these widths end shares in the middle of a vector, if this build of torch minds that."""
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        rows = torch.randn(512, width)
        expected = nn.functional.silu(rows)
        is_same = {n: torch.equal(nn.functional.silu(rows[:n].clone()), expected[:n]) for n in range(16, 512, 16)}
        found = row_multiple(nn.Sequential(nn.Linear(64, width)))
    finally:
        torch.set_num_threads(threads)
    assert all(is_same.values()) or found != 16
    assert found is None or all(same for n, same in is_same.items() if n % found == 0)


def test_a_layer_with_a_way_of_its_own_is_tried_beside_others_of_its_size() -> None:
    plain, other = nn.Linear(48, 48), nn.Linear(48, 48)
    assert row_multiple(nn.Sequential(plain, nn.Linear(48, 48))) is not None

    def forward(rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, other.weight, other.bias) * (1 + 1e-6 * len(rows))

    other.forward = forward  # type: ignore[method-assign]
    assert row_multiple(nn.Sequential(plain, other)) is None


def test_products_that_are_not_linear_layers_are_not_taken_for_invariant() -> None:
    assert row_multiple(nn.Sequential(nn.Linear(32, 32), Conv1D(32, 32))) is None


def test_mixtures_of_experts_are_not_batch_invariant() -> None:
    assert row_multiple(FAMILIES["qwen3_moe"]()) is None


def test_deterministic_is_refused_where_it_cannot_be_had() -> None:
    with pytest.raises(UserError, match="--deterministic"):
        Engine(FAMILIES["qwen3_moe"](), deterministic=True)
    with pytest.raises(UserError, match="--deterministic needs the native attention kernel"):
        Engine(FAMILIES["llama"]().half(), deterministic=True)
