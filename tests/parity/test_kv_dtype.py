"""Quantized KV moves logits a little, wherever a row is computed."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import PreTrainedModel

from batchkv.engine import Engine
from batchkv.errors import UserError
from batchkv.kernels.native_attention import is_covered
from batchkv.kernels.quantization import storage_dtype
from batchkv.sampling_params import SamplingParams
from batchkv.writer import summary_of
from tests.tiny_models import FAMILIES, VOCAB_SIZE

NEW_TOKENS = 8
FAMILIES_TRIED = ["llama", "gemma3", "gpt_oss"]  # plain; windows, norms of keys; sinks, experts
# Mean difference of a log-probability, and share of the tokens that come before a row's first other one. Random weights
# exaggerate: their likeliest tokens are near ties.
BOUNDS = {"int8": (0.05, 0.75), "fp8": (0.2, 0.3)}


@cache
def model_of(family: str) -> PreTrainedModel:
    return FAMILIES[family]()


def jobs() -> pa.Table:
    random = np.random.default_rng(11)
    headers = [random.integers(0, VOCAB_SIZE, n).tolist() for n in (37, 50)]
    rows = [headers[i % 2] + random.integers(0, VOCAB_SIZE, int(random.integers(1, 30))).tolist() for i in range(20)]
    return pa.table({"id": list(range(len(rows))), "prompt_token_ids": pa.array(rows, pa.list_(pa.int32()))})


def run(family: str, table: pa.Table, **config: Any) -> tuple[dict[int, tuple[list[int], list[float]]], dict[str, Any]]:
    """Tokens and log-probabilities by id, and the summary."""
    results = Engine(model_of(family), **config).run(table, SamplingParams(max_tokens=NEW_TOKENS, logprobs=True))
    return {row["id"]: (row["token_ids"], row["logprobs"]) for row in results.to_pylist()}, summary_of(results.schema)


def compared(theirs: dict[int, tuple[list[int], list[float]]], ours: dict[int, tuple[list[int], list[float]]]) -> Any:
    """Differences of the log-probabilities of tokens up to the first other one in each row."""
    differences = []
    for row, (tokens, logprobs) in theirs.items():
        is_same = np.cumprod(np.array(tokens) == np.array(ours[row][0])).astype(bool)
        differences.append(np.abs(np.array(logprobs) - np.array(ours[row][1]))[is_same])
    return np.concatenate(differences)


@pytest.mark.parametrize("kv_dtype", BOUNDS)
@pytest.mark.parametrize("family", FAMILIES_TRIED)
def test_log_probabilities_are_nearly_those_without_quantization(family: str, kv_dtype: Any) -> None:
    plain, _ = run(family, jobs())
    quantized, summary = run(family, jobs(), kv_dtype=kv_dtype)
    differences = compared(plain, quantized)
    most_off, least_same = BOUNDS[kv_dtype]
    assert 0 < differences.mean() < most_off
    assert len(differences) > least_same * len(plain) * NEW_TOKENS
    assert summary["kv_dtype"] == str(storage_dtype(kv_dtype, torch.float32)).removeprefix("torch.")


@pytest.mark.parametrize("kv_dtype", BOUNDS)
@pytest.mark.parametrize("family", FAMILIES_TRIED)
def test_batches_order_and_sharing_change_no_more_than_rounding_does(family: str, kv_dtype: Any) -> None:
    """A difference of rounding can move an element to the next stored value: few in two layers, more in many."""
    table = jobs()
    expected, _ = run(family, table, kv_dtype=kv_dtype)
    shuffled = table.take(np.random.default_rng(1).permutation(len(table)))
    variants = [
        (shuffled, {"max_batch_rows": 3}),
        (table, {"max_batch_tokens": 19, "page_size": 4}),
        (table, {"no_prefix_sharing": True, "kv_memory": "64KiB"}),
    ]
    for rows, variant in variants:
        differences = compared(expected, run(family, rows, kv_dtype=kv_dtype, **variant)[0])
        assert differences.mean() < 1e-3
        assert len(differences) > 0.95 * len(table) * NEW_TOKENS


def test_the_budget_counts_bytes_of_quantized_tokens_and_scales() -> None:
    _, plain = run("llama", jobs())
    _, quantized = run("llama", jobs(), kv_dtype="int8")
    heads, dim = 2 * 2, 16  # layers times KV heads
    assert plain["kv_bytes_per_token"] == heads * 2 * dim * 4
    assert quantized["kv_bytes_per_token"] == heads * 2 * (dim + 4)
    assert quantized["kv_budget_tokens"] == (2 << 30) // quantized["kv_bytes_per_token"]


def test_deterministic_is_refused_for_kv_that_no_batch_invariant_kernel_takes() -> None:
    missing = "has no KV in torch.float8_e4m3fn: take --kv-dtype auto" if is_covered(torch.float32) else "not built"
    with pytest.raises(UserError, match=missing):
        Engine(model_of("llama"), kv_dtype="fp8", deterministic=True)
