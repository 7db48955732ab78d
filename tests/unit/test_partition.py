"""Rows that share prefixes stay together, no part is much too large, and no row is lost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkv import partition as module
from batchkv.partition import partition
from batchkv.token_arena import TokenArena
from batchkv.trie import lexicographic_order

Int64Array = npt.NDArray[np.int64]


def arena_of(prompts: list[list[int]]) -> TokenArena:
    return TokenArena.from_rows([np.array(prompt, np.int32) for prompt in prompts])


def places(arena: TokenArena, group: npt.NDArray[np.int32]) -> Int64Array:
    """Where each row stands if all are sorted; equal rows stand at the same place."""
    order = lexicographic_order(arena, group.astype(np.int64))
    keys = [(int(group[row]), arena.row(row).tolist()) for row in order.tolist()]
    starts = [at == 0 or keys[at] != keys[at - 1] for at in range(len(keys))]
    found = np.empty(len(keys), np.int64)
    found[order] = np.cumsum(starts)
    return found


def parts_of(*args: Any, **limits: int) -> list[Int64Array]:
    return list(partition(*args, **limits))


PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=60)


@settings(max_examples=100)
@given(PROMPTS, st.data())
def test_every_row_is_in_one_part_and_parts_follow_each_other(prompts: list[list[int]], data: st.DataObject) -> None:
    arena = arena_of(prompts)
    group = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(prompts), max_size=len(prompts))), np.int32)
    outputs = np.array(data.draw(st.lists(st.integers(1, 3), min_size=len(prompts), max_size=len(prompts))), np.int64)
    max_outputs, max_tokens = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 80))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_TOKENS", data.draw(st.integers(1, 50)))
        parts = parts_of(arena, group, outputs, max_outputs=max_outputs, max_tokens=max_tokens)
    assert all(len(part) and (np.diff(part) > 0).all() for part in parts)
    assert sorted(np.concatenate([np.zeros(0, np.int64), *parts]).tolist()) == [
        row for row, prompt in enumerate(prompts) if prompt
    ]
    at = places(arena, group)
    for left, right in pairwise(parts):
        assert at[left].max() <= at[right].min()
    # Rows between two splitters are cut by their number: those with most outputs and tokens can come together.
    assert all(outputs[part].sum() <= 3 * (2 * max_outputs + 1) for part in parts)
    assert all(arena.lengths[part].sum() <= 4 * (2 * max_tokens + 1) for part in parts)


def random_job(rows: int, seed: int) -> TokenArena:
    rng = np.random.default_rng(seed)
    return arena_of([rng.integers(0, 50, rng.integers(5, 15)).tolist() for _ in range(rows)])


@pytest.mark.parametrize(
    "limits", [{"max_outputs": 500, "max_tokens": 1 << 30}, {"max_outputs": 1 << 30, "max_tokens": 5000}]
)
def test_parts_of_random_rows_are_about_as_large_as_allowed(limits: dict[str, int]) -> None:
    arena = random_job(10_000, seed=1)
    ones = np.ones(10_000, np.int64)
    parts = parts_of(arena, np.zeros(10_000, np.int32), ones, **limits)
    used = [len(part) / limits["max_outputs"] for part in parts]
    if limits["max_tokens"] < 1 << 30:
        used = [arena.lengths[part].sum() / limits["max_tokens"] for part in parts]
    assert max(used) < 1.2
    assert len(parts) < 2.5 * sum(used)


def test_a_small_job_is_one_part_whatever_it_shares() -> None:
    arena = random_job(100, seed=2)
    (part,) = parts_of(arena, np.arange(100, dtype=np.int32), np.ones(100, np.int64), max_outputs=100, max_tokens=1500)
    assert part.tolist() == list(range(100))


def test_rows_without_tokens_alone_are_no_part() -> None:
    for prompts in ([], [[], []]):
        rows = len(prompts)
        parts = parts_of(
            arena_of(prompts), np.zeros(rows, np.int32), np.ones(rows, np.int64), max_outputs=1, max_tokens=1
        )
        assert parts == []


def test_samples_count_as_outputs() -> None:
    arena = random_job(64, seed=3)
    outputs = np.full(64, 100)
    parts = parts_of(arena, np.zeros(64, np.int32), outputs, max_outputs=800, max_tokens=1 << 30)
    assert len(parts) >= 8
    assert max(outputs[part].sum() for part in parts) <= 1600


def test_one_prompt_over_and_over_is_cut_all_the_same() -> None:
    arena = arena_of([[1, 2, 3]] * 1000)
    parts = parts_of(arena, np.zeros(1000, np.int32), np.ones(1000, np.int64), max_outputs=100, max_tokens=1 << 30)
    assert sum(map(len, parts)) == 1000
    assert max(map(len, parts)) <= 200


def test_one_prompt_over_and_over_among_others_does_not_spoil_their_parts() -> None:
    rng = np.random.default_rng(4)
    prompts = [[25, 25]] * 1000 + [rng.integers(0, 50, 8).tolist() for _ in range(1000)]
    arena = arena_of([prompts[i] for i in rng.permutation(2000)])
    parts = parts_of(arena, np.zeros(2000, np.int32), np.ones(2000, np.int64), max_outputs=100, max_tokens=1 << 30)
    assert sum(map(len, parts)) == 2000
    assert max(map(len, parts)) <= 200


def test_tenants_are_together() -> None:
    arena = arena_of([[1, 2, 3]] * 300)
    group = np.arange(300, dtype=np.int32) % 3
    parts = parts_of(arena, group, np.ones(300, np.int64), max_outputs=100, max_tokens=1 << 30)
    for one in range(3):
        assert sum(one in group[part] for part in parts) <= 2


def test_rows_that_share_a_prefix_are_in_few_parts() -> None:
    rng = np.random.default_rng(5)
    families = rng.integers(0, 20, 2000)
    prompts = [[100 + family] * 30 + rng.integers(0, 50, 4).tolist() for family in families.tolist()]
    parts = parts_of(
        arena_of(prompts), np.zeros(2000, np.int32), np.ones(2000, np.int64), max_outputs=200, max_tokens=1 << 30
    )
    prefills = sum(len(np.unique(families[part])) for part in parts)
    assert prefills <= 20 + len(parts) - 1  # only the one at each cut is computed twice


def test_the_same_job_is_split_the_same_way() -> None:
    arena = random_job(1000, seed=6)
    group, ones = np.zeros(1000, np.int32), np.ones(1000, np.int64)
    first, second = (parts_of(arena, group, ones, max_outputs=100, max_tokens=1 << 30) for _ in range(2))
    assert [part.tolist() for part in first] == [part.tolist() for part in second]
