"""Token for token what transformers generates for each row alone, for every family, however the job is executed."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from batchkv.engine import Engine
from batchkv.kv_layout import KVLayout, layer_specs
from batchkv.sampling_params import SamplingParams
from batchkv.writer import summary_of
from tests.oracle import generate_alone
from tests.tiny_models import FAMILIES, VOCAB_SIZE

NEW_TOKENS = 6


@cache
def model_of(family: str) -> PreTrainedModel:
    return FAMILIES[family]()


def prompts() -> list[list[int]]:
    """A header over two middles over leaves; a prompt that is a prefix of others, a twin, one that shares nothing."""
    random = np.random.default_rng(7)

    def tokens(count: int) -> list[int]:
        return random.integers(0, VOCAB_SIZE, count).tolist()

    header = tokens(21)
    middles = [header + tokens(9), header + tokens(14)]
    leaves = [middle + tokens(int(random.integers(1, 12))) for middle in middles for _ in range(3)]
    return [*leaves, middles[0], leaves[0], tokens(30), tokens(1)]


@cache
def expected(family: str) -> list[list[int]]:
    return [generate_alone(model_of(family), prompt, NEW_TOKENS) for prompt in prompts()]


def table(rows: list[list[int]], ids: list[int] | None = None) -> pa.Table:
    return pa.table({"id": ids or list(range(len(rows))), "prompt_token_ids": pa.array(rows, pa.list_(pa.int32()))})


def run(
    family: str, jobs: pa.Table, sampling: SamplingParams | None = None, **config: Any
) -> dict[tuple[int, int], Any]:
    """Token ids by (id, sample)."""
    results = Engine(model_of(family), **config).run(jobs, sampling or SamplingParams(max_tokens=NEW_TOKENS))
    assert results["error"].null_count == len(results)
    return {(row["id"], row["sample_index"]): row["token_ids"] for row in results.to_pylist()}


def one_path_budget(family: str) -> int:
    """Bytes that hold the longest row and its output, and nothing else (behind a window two tokens to spare)."""
    layout = KVLayout(layer_specs(model_of(family).config), 4)
    tokens = max(map(len, prompts())) + NEW_TOKENS - 1
    spare = sum(size for window, size in zip(layout.windows, layout.group_bytes_per_token, strict=True) if window)
    return tokens * layout.bytes_per_token + 2 * spare


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_gets_the_tokens_it_gets_alone(family: str) -> None:
    got = run(family, table(prompts()))
    assert [got[i, 0] for i in range(len(prompts()))] == expected(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_small_chunks_pages_and_budgets_change_no_token(family: str) -> None:
    tight = run(family, table(prompts()), kv_memory=one_path_budget(family))
    small = run(family, table(prompts()), max_batch_tokens=7, max_batch_rows=7, page_size=4)
    assert [tight[i, 0] for i in range(len(prompts()))] == expected(family)
    assert small == tight


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_attention_takes_over_where_there_is_no_native_kernel(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchkv.kernels.selection.is_covered", lambda dtype: False)
    engine = Engine(model_of(family))
    results = engine.run(table(prompts()), SamplingParams(max_tokens=NEW_TOKENS))
    assert results["token_ids"].to_pylist() == expected(family)
    assert summary_of(results.schema)["attention"] == "torch"


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sharing_order_and_batch_size_change_no_sample(family: str, temperature: float) -> None:
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, n=2, top_p=0.95)
    rows = prompts()
    baseline = run(family, table(rows), sampling)
    shuffled = np.random.default_rng(3).permutation(len(rows)).tolist()
    assert run(family, table([rows[i] for i in shuffled], shuffled), sampling) == baseline
    assert run(family, table(rows), sampling, no_prefix_sharing=True) == baseline
    for max_batch_rows in (1, 7, 256):
        assert run(family, table(rows), sampling, max_batch_rows=max_batch_rows) == baseline
    half_as_much_again = one_path_budget(family) * 3 // 2
    assert run(family, table(rows), sampling, kv_memory=half_as_much_again, max_batch_tokens=16) == baseline


def test_samples_of_a_row_are_distinct() -> None:
    got = run("llama", table(prompts()[:1]), SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, n=16))
    assert len({tuple(tokens) for tokens in got.values()}) == 16


@st.composite
def random_tries(draw: st.DrawFn) -> list[list[int]]:
    """Rows that branch off each other anywhere, so that they share prefixes of any length."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 8))):
        base = draw(st.sampled_from(rows)) if rows else []
        kept = draw(st.integers(0, len(base)))
        fresh = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=0 if kept else 1, max_size=25))
        rows.append(base[:kept] + fresh)
    return rows


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
@settings(max_examples=12)
@given(rows=random_tries(), max_batch_tokens=st.integers(1, 40), page_size=st.sampled_from([1, 4, 16]))
def test_random_tries_give_the_tokens_of_each_row_alone(
    family: str, rows: list[list[int]], max_batch_tokens: int, page_size: int
) -> None:
    sampling = SamplingParams(max_tokens=3)
    got = run(family, table(rows), sampling, max_batch_tokens=max_batch_tokens, page_size=page_size)
    assert [got[i, 0] for i in range(len(rows))] == [generate_alone(model_of(family), row, 3) for row in rows]
