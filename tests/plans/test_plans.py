"""What a plan says of small jobs, word for word, and what it counts in real ones. No model is needed."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from batchkv.errors import first_of
from batchkv.job_plan import JobPlan, Plan, PlanTotals
from batchkv.kv_layout import KVLayout, LayerSpec
from batchkv.planner import Limits, make_plan
from batchkv.preparation import prepare_wave
from batchkv.sampling_params import RowParams, SamplingParams
from batchkv.token_arena import TokenArena
from batchkv.tokenization import tokenize
from batchkv.wave import Wave
from batchkv.waves import NOTHING
from tests.conftest import WORKLOADS
from tests.jobs import read_job

# SmolLM2-135M in two bytes: 23,040 bytes per token
LAYOUT = KVLayout(tuple(LayerSpec(9, 3, 64, 64, None) for _ in range(30)), 2)

Row = tuple[list[int], int, int]  # prompt, n, max_tokens


def row(prompt: list[int], n: int = 1, max_tokens: int = 8) -> Row:
    """Several samples are random, one alone is greedy."""
    return prompt, n, max_tokens


def job_plan_of(*rows: Row, tokens: int = 1_000, layout: KVLayout = LAYOUT, **limits: Any) -> JobPlan:
    """The plan of a job with room for `tokens` tokens of KV."""
    params = RowParams.of(SamplingParams(n=n, max_tokens=most, temperature=float(n > 1)) for _, n, most in rows)
    arena = TokenArena.from_rows([np.array(prompt, np.int32) for prompt, _, _ in rows])
    kv_bytes = tokens * layout.bytes_per_token
    limits_ = Limits(**{"kv_bytes": kv_bytes, "max_batch_rows": 256, "max_batch_tokens": 512, **limits})
    prepared = prepare_wave(Wave.of(arena, params), NOTHING, layout, limits_)
    good = len(rows) - len(prepared.errors)
    errors = prepared.errors
    return JobPlan(len(rows), len(errors), first_of(errors), (good,), PlanTotals().plus(prepared.plan), prepared.plan)


def text(golden: str) -> str:
    return dedent(golden).strip("\n")


def plan_of(*rows: Row, **options: Any) -> Plan:
    """The plan of its only wave."""
    return job_plan_of(*rows, **options).first


HEADER = [7] * 40


def test_rows_that_share_nothing() -> None:
    plan = job_plan_of(row([1] * 10), row([2] * 5), row([3] * 20))
    assert plan.explain() == text(
        """
        rows      3; 3 sequences to generate
        prompt    35 tokens
        prefill   35 tokens, saves 0 (0.0%)
        trie      3 nodes, depth 1, longest first
        KV        peak 80 of 1,000 tokens (2 MiB), pages of 16
        in flight 3 sequences fit at any point

        root · 3 rows
        └─ 3 more of 5-20 tokens, 3 rows
        """
    )
    assert plan.to_json() == {
        "rows": 3,
        "errors": 0,
        "first_error": None,
        "generations": [3],
        "waves": 1,
        "sequences": 3,
        "prompt_tokens": 35,
        "prefill_tokens": 35,
        "saved_tokens": 0,
        "sharing_ratio": 0.0,
        "peak_kv_tokens": 80,
        "kv_budget_tokens": 1000,
        "kv_bytes_per_token": 23040,
        "page_size": 16,
        "window_rows": 256,
        "order": "longest first",
        "depth": 1,
        "nodes": 3,
        "shared_prefixes": [],
    }


def test_one_header() -> None:
    plan = job_plan_of(*(row([*HEADER, i] + [i] * 4) for i in range(4)))
    assert str(plan) == text(
        """
        rows      4; 4 sequences to generate
        prompt    180 tokens
        prefill   60 tokens, saves 120 (66.7%)
        trie      5 nodes, depth 2, longest first
        KV        peak 176 of 1,000 tokens (4 MiB), pages of 16
        in flight 4 sequences fit at any point

        root · 4 rows
        └─ 40 tokens × 4 rows, saves 120
           └─ 4 more of 5 tokens, 4 rows
        """
    )
    assert plan.to_json() == {
        "rows": 4,
        "errors": 0,
        "first_error": None,
        "generations": [4],
        "waves": 1,
        "sequences": 4,
        "prompt_tokens": 180,
        "prefill_tokens": 60,
        "saved_tokens": 120,
        "sharing_ratio": 0.666667,
        "peak_kv_tokens": 176,
        "kv_budget_tokens": 1000,
        "kv_bytes_per_token": 23040,
        "page_size": 16,
        "window_rows": 256,
        "order": "longest first",
        "depth": 2,
        "nodes": 5,
        "shared_prefixes": [{"tokens": 40, "rows": 4, "saved_tokens": 120, "text": None}],
    }


LEFT, RIGHT = [*HEADER, *[1] * 20], [*HEADER, *[2] * 10]
TWO_LEVELS = (
    row(HEADER),  # a prompt that is a prefix of others
    row([*LEFT, 3]),
    row([*LEFT, 4, 4]),
    row([*LEFT, 4, 4]),  # greedy twins are one sequence
    row([*RIGHT, *[5] * 9]),
    row([*RIGHT, 6]),
    row([8] * 3),
)


def test_a_header_in_two_levels_with_twins_and_a_prompt_that_is_a_prefix_of_another() -> None:
    plan = job_plan_of(*TWO_LEVELS)
    assert plan.explain() == text(
        """
        rows      7; 6 sequences to generate
        prompt    338 tokens
        prefill   86 tokens, saves 252 (74.6%)
        trie      8 nodes, depth 3, longest first
        KV        peak 256 of 1,000 tokens (6 MiB), pages of 16
        in flight 6 sequences fit at any point

        root · 7 rows
        ├─ 40 tokens × 6 rows, saves 200
        │  ├─ 20 tokens × 3 rows, saves 40
        │  │  ├─ 2 tokens × 2 rows, saves 2
        │  │  └─ 1 more of 1 tokens, 1 rows
        │  └─ 10 tokens × 2 rows, saves 10
        │     └─ 2 more of 1-9 tokens, 2 rows
        └─ 1 more of 3 tokens, 1 rows
        """
    )
    assert plan.to_json() == {
        "rows": 7,
        "errors": 0,
        "first_error": None,
        "generations": [7],
        "waves": 1,
        "sequences": 6,
        "prompt_tokens": 338,
        "prefill_tokens": 86,
        "saved_tokens": 252,
        "sharing_ratio": 0.745562,
        "peak_kv_tokens": 256,
        "kv_budget_tokens": 1000,
        "kv_bytes_per_token": 23040,
        "page_size": 16,
        "window_rows": 256,
        "order": "longest first",
        "depth": 3,
        "nodes": 8,
        "shared_prefixes": [
            {"tokens": 40, "rows": 6, "saved_tokens": 200, "text": None},
            {"tokens": 60, "rows": 3, "saved_tokens": 40, "text": None},
            {"tokens": 50, "rows": 2, "saved_tokens": 10, "text": None},
            {"tokens": 62, "rows": 2, "saved_tokens": 2, "text": None},
        ],
    }


def test_several_samples_of_a_prompt() -> None:
    plan = job_plan_of(row([*HEADER, 1], n=3), row([*HEADER, 2]))
    assert plan.explain() == text(
        """
        rows      2; 4 sequences to generate
        prompt    82 tokens
        prefill   42 tokens, saves 40 (48.8%)
        trie      3 nodes, depth 2, longest first
        KV        peak 128 of 1,000 tokens (3 MiB), pages of 16
        in flight 4 sequences fit at any point

        root · 2 rows
        └─ 40 tokens × 2 rows, saves 40
           └─ 2 more of 1 tokens, 2 rows
        """
    )
    assert plan.to_json() == {
        "rows": 2,
        "errors": 0,
        "first_error": None,
        "generations": [2],
        "waves": 1,
        "sequences": 4,
        "prompt_tokens": 82,
        "prefill_tokens": 42,
        "saved_tokens": 40,
        "sharing_ratio": 0.487805,
        "peak_kv_tokens": 128,
        "kv_budget_tokens": 1000,
        "kv_bytes_per_token": 23040,
        "page_size": 16,
        "window_rows": 256,
        "order": "longest first",
        "depth": 2,
        "nodes": 3,
        "shared_prefixes": [{"tokens": 40, "rows": 2, "saved_tokens": 40, "text": None}],
    }
    assert plan.first.sequences.sample.tolist() == [0, 1, 2, 0]


def test_without_sharing_every_row_is_on_its_own() -> None:
    plan = job_plan_of(row([1] * 10), row([1] * 10), share_prefixes=False)
    assert plan.explain() == text(
        """
        rows      2; 2 sequences to generate
        prompt    20 tokens
        prefill   20 tokens, saves 0 (0.0%)
        trie      2 nodes, depth 1, longest first
        KV        peak 64 of 1,000 tokens (1 MiB), pages of 16
        in flight 2 sequences fit at any point

        root · 2 rows
        └─ 2 more of 10 tokens, 2 rows
        """
    )
    assert plan.to_json() == {
        "rows": 2,
        "errors": 0,
        "first_error": None,
        "generations": [2],
        "waves": 1,
        "sequences": 2,
        "prompt_tokens": 20,
        "prefill_tokens": 20,
        "saved_tokens": 0,
        "sharing_ratio": 0.0,
        "peak_kv_tokens": 64,
        "kv_budget_tokens": 1000,
        "kv_bytes_per_token": 23040,
        "page_size": 16,
        "window_rows": 256,
        "order": "longest first",
        "depth": 1,
        "nodes": 2,
        "shared_prefixes": [],
    }


def test_a_tight_budget_takes_smaller_pages_and_refuses_what_can_never_fit() -> None:
    plan = job_plan_of(row([1] * 10, max_tokens=2), row([*[1] * 9, 2], max_tokens=2), row([4] * 30), tokens=18)
    assert plan.explain() == text(
        """
        rows      3, 1 with errors; 2 sequences to generate
        errors    the first: row 2: too_long: prompt of 30 tokens and 8 to generate need 852,480 bytes of KV cache, \
the budget of 414,720 has no room for them: raise --kv-memory or lower max_tokens
        prompt    20 tokens
        prefill   11 tokens, saves 9 (45.0%)
        trie      3 nodes, depth 2, longest first
        KV        peak 16 of 18 tokens (0 MiB), pages of 4
        in flight 1 sequences fit at any point

        root · 2 rows
        └─ 9 tokens × 2 rows, saves 9
           └─ 2 more of 1 tokens, 2 rows
        """
    )
    assert plan.to_json() == {
        "rows": 3,
        "errors": 1,
        "first_error": "row 2: too_long: prompt of 30 tokens and 8 to generate need 852,480 bytes of KV cache, "
        "the budget of 414,720 has no room for them: raise --kv-memory or lower max_tokens",
        "generations": [2],
        "waves": 1,
        "sequences": 2,
        "prompt_tokens": 20,
        "prefill_tokens": 11,
        "saved_tokens": 9,
        "sharing_ratio": 0.45,
        "peak_kv_tokens": 16,
        "kv_budget_tokens": 18,
        "kv_bytes_per_token": 23040,
        "page_size": 4,
        "window_rows": 1,
        "order": "longest first",
        "depth": 2,
        "nodes": 3,
        "shared_prefixes": [{"tokens": 9, "rows": 2, "saved_tokens": 9, "text": None}],
    }


def test_an_empty_job() -> None:
    assert job_plan_of().explain() == text(
        """
        rows      0; 0 sequences to generate
        prompt    0 tokens
        prefill   0 tokens, saves 0 (0.0%)
        trie      0 nodes, depth 0, longest first
        KV        peak 0 of 1,000 tokens (0 MiB), pages of 16
        in flight 0 sequences fit at any point

        root · 0 rows
        """
    )


def long_and_short_job(tokens: int) -> JobPlan:
    """Three prompts of two pages and three of one, nothing generated beyond their pages."""
    rows = [row([i] * (20 if i < 3 else 4), max_tokens=1) for i in range(6)]
    return job_plan_of(*rows, tokens=tokens, max_batch_rows=2)


def long_and_short(tokens: int) -> Plan:
    """The plan of its only wave."""
    return long_and_short_job(tokens).first


def test_long_and_short_rows_take_turns_where_that_lowers_the_peak() -> None:
    plan = long_and_short_job(tokens=1_000)
    assert plan.explain() == text(
        """
        rows      6; 6 sequences to generate
        prompt    72 tokens
        prefill   72 tokens, saves 0 (0.0%)
        trie      6 nodes, depth 1, long and short in turn
        KV        peak 48 of 1,000 tokens (1 MiB), pages of 16
        in flight 2 sequences fit at any point

        root · 6 rows
        └─ 6 more of 4-20 tokens, 6 rows
        """
    )
    assert plan.first.trie.end[plan.first.trie.prompt_node].tolist() == [20, 4, 20, 4, 20, 4]


def test_long_and_short_rows_take_turns_where_that_lets_more_run_at_once() -> None:
    plan = long_and_short(tokens=48)
    assert (plan.order, plan.memory.window_rows) == ("long and short in turn", 2)


def test_the_longest_come_first_where_the_order_does_not_matter() -> None:
    plan = plan_of(row([1] * 5), row([2] * 90), row([3] * 30))
    assert plan.order == "longest first"
    assert plan.trie.end[plan.trie.prompt_node].tolist() == [90, 30, 5]


def test_what_is_to_be_generated_counts_as_length() -> None:
    plan = plan_of(row([1] * 20, max_tokens=1), row([2] * 5, max_tokens=99), row([3] * 5, n=9, max_tokens=5))
    assert plan.sequences.row.tolist() == [1, *[2] * 9, 0]


def test_cached_tokens_are_what_a_row_need_not_compute() -> None:
    plan = plan_of(*TWO_LEVELS)
    cached = plan.cached_tokens()
    # row 0 is the header and computes it, row 2 the left branch, row 4 the right one; row 3 is the twin of row 2
    assert cached.tolist() == [0, 60, 40, 62, 40, 50, 0]
    assert plan.prompt_tokens - cached.sum() == plan.prefill_tokens


def test_cached_tokens_of_several_samples() -> None:
    plan = plan_of(row([*HEADER, 1], n=3), row([*HEADER, 2]))
    assert plan.cached_tokens().tolist() == [0, 41, 41, 40]


def test_the_context_bounds_what_is_generated() -> None:
    plan = plan_of(row([1] * 10, max_tokens=50), row([2] * 12, max_tokens=3), context_length=16)
    assert sorted(plan.sequences.max_new_tokens.tolist()) == [3, 6]


def test_a_tokenizer_shows_how_shared_prefixes_begin() -> None:
    prompts = [[*HEADER, 1], [*HEADER, 2]]
    arena = TokenArena.from_rows([np.array(prompt, np.int32) for prompt in prompts])
    limits = Limits(1 << 30, 256, 512)
    plan = make_plan(Wave.of(arena, [SamplingParams()] * 2), LAYOUT, limits, lambda ids: " ".join(map(str, ids)))
    assert plan.shared[0].text == " ".join(["7"] * 24)


def test_of_rows_that_are_largest_in_different_groups_of_layers_the_larger_is_refused() -> None:
    hybrid = KVLayout((LayerSpec(1, 1, 1, 1, None), LayerSpec(1, 1, 1, 1, 2)), 1)
    rows = row([1], max_tokens=2), row([2] * 3, max_tokens=1)
    plan = job_plan_of(*rows, tokens=3, layout=hybrid, page_size=1)
    assert plan.errors == 1
    assert plan.totals.prompt_tokens + int(plan.first.sequences.max_new_tokens.sum()) <= 4


@pytest.mark.skipif(not WORKLOADS.is_dir(), reason="job files that are not part of the project")
@pytest.mark.parametrize(
    ("name", "rows", "prompt_tokens", "prefill_tokens"),
    [
        ("label", 400, 274_962, 19_421),
        ("docqa", 256, 268_288, 22_521),
        ("tree", 192, 116_736, 8_147),
        ("flat", 64, 16_384, 16_365),
        ("rollout", 16, 2_048, 2_048),
    ],
)
def test_the_counts_of_real_workloads(name: str, rows: int, prompt_tokens: int, prefill_tokens: int) -> None:
    job = read_job(WORKLOADS / f"{name}.parquet")
    arena, errors = tokenize(job.prompts, None)
    plan = make_plan(Wave.of(arena, job.params), LAYOUT, Limits(2 << 30, 256, 512))
    counts = JobPlan(
        job.num_rows, len(errors), first_of(errors), (job.num_rows,), PlanTotals().plus(plan), plan
    ).to_json()
    assert (counts["rows"], counts["errors"]) == (rows, 0)
    assert (counts["prompt_tokens"], counts["prefill_tokens"]) == (prompt_tokens, prefill_tokens)
    assert counts["saved_tokens"] == prompt_tokens - prefill_tokens
    assert counts["peak_kv_tokens"] <= counts["kv_budget_tokens"] == (2 << 30) // 23_040
    assert counts["sequences"] == sum(params.n for params in job.params)
