"""The KV peak that is predicted is what a window of sequences takes, and never more than the budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkv.kv_cache import KVCache
from batchkv.kv_layout import KVLayout, LayerSpec
from batchkv.memory_plan import (
    LEAST_SLACK_PAGES,
    MemoryPlan,
    PageCosts,
    page_costs,
    plan_memory,
    prefix_pages,
    sequence_pages,
)
from batchkv.sequence import SequenceTable
from batchkv.token_arena import TokenArena
from batchkv.trie import PrefixTrie, build_trie

FULL, SLIDING = LayerSpec(1, 1, 1, 1, None), LayerSpec(1, 1, 1, 1, 5)
LAYOUTS = [KVLayout((FULL,), 1), KVLayout((SLIDING,), 2), KVLayout((SLIDING, FULL, FULL), 1)]


@dataclass(frozen=True)
class Work:
    trie: PrefixTrie
    sequences: SequenceTable


def table_of(prompts: list[int], new_tokens: list[int]) -> SequenceTable:
    """Sequences of `prompts`; what they are for does not matter here."""
    number = np.arange(len(prompts), dtype=np.int32)
    new, none = np.array(new_tokens, np.int32), np.full_like(number, -1)
    return SequenceTable(np.array(prompts, np.int32), number, number, new, none, none, number)


@st.composite
def works(draw: st.DrawFn) -> Work:
    """Tries of prompts that go on from one another, one to three sequences each."""
    prompts: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 6))):
        earlier = draw(st.sampled_from([(), *prompts]))
        tail = draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
        prompts.append((*earlier[: draw(st.integers(0, len(earlier)))], *tail))
    trie = build_trie(TokenArena.from_rows([np.array(prompt, np.int32) for prompt in prompts]))
    samples = [draw(st.integers(1, 3)) for _ in range(trie.num_prompts)]
    of_prompt = np.repeat(np.arange(trie.num_prompts), samples).tolist()
    return Work(trie, table_of(of_prompt, [draw(st.integers(1, 9)) for _ in of_prompt]))


def alive_in_window(work: Work, costs: PageCosts, group: int, first: int, last: int) -> int:
    """Pages of the sequences `[first, last]` in flight, of all nodes that they hang under, and of those in between."""
    below: dict[int, list[int]] = {node: [] for node in range(work.trie.num_nodes)}
    for sequence, prompt in enumerate(work.sequences.prompt.tolist()):
        for node in work.trie.path(int(work.trie.prompt_node[prompt])):
            below[node].append(sequence)
    needed = [node for node, under in below.items() if any(first <= sequence <= last for sequence in under)]
    return int(costs.nodes[group, needed].sum() + costs.sequences[group, first : last + 1].sum())


@given(works(), st.sampled_from(LAYOUTS), st.integers(1, 5), st.integers(1, 20))
@settings(max_examples=80)
def test_the_peak_is_that_of_the_most_expensive_window(work: Work, layout: KVLayout, page_size: int, rows: int) -> None:
    costs = page_costs(work.trie, work.sequences, layout, page_size)
    count = len(work.sequences)
    for group in range(len(layout.windows)):
        windows = [(max(0, last - rows + 1), last) for last in range(count)]
        expected = max(alive_in_window(work, costs, group, first, last) for first, last in windows)
        assert costs.peak(rows)[group] == expected


@given(works(), st.sampled_from(LAYOUTS), st.integers(1, 5))
@settings(max_examples=40)
def test_a_wider_window_never_takes_less(work: Work, layout: KVLayout, page_size: int) -> None:
    costs = page_costs(work.trie, work.sequences, layout, page_size)
    peaks = np.stack([costs.peak(rows) for rows in range(1, 12)])
    assert (np.diff(peaks, axis=0) >= 0).all()
    all_at_once = costs.nodes.sum(axis=1) + costs.sequences.sum(axis=1)
    assert (costs.peak(len(work.sequences)) == all_at_once).all()


@given(works(), st.integers(1, 5))
@settings(max_examples=40)
def test_running_all_at_once_in_a_cache_takes_the_pages_that_are_predicted(work: Work, page_size: int) -> None:
    """The prediction against the cache itself: prefill every node, fork every sequence, generate to the end."""
    trie, sequences = work.trie, work.sequences
    costs = page_costs(trie, sequences, LAYOUTS[0], page_size)
    (pages,) = costs.peak(len(sequences)).tolist()
    cache = KVCache((pages,), (None,), page_size)
    handles = [cache.create()]
    for node in range(1, trie.num_nodes):
        handles.append(cache.fork(handles[trie.parent[node]]))
        cache.append(np.array(handles[-1:]), trie.lengths[node : node + 1].astype(np.int64))
    assert cache.num_held[0] <= costs.nodes[0].sum()
    generating = []
    for sequence, prompt in enumerate(sequences.prompt.tolist()):
        node = int(trie.prompt_node[prompt])
        generating.append(handles[node] if costs.takes_over[sequence] else cache.fork(handles[node]))
    cache.append(np.array(generating), sequences.max_new_tokens.astype(np.int64) - 1)
    assert cache.num_held.tolist() == [pages]  # not one page too many


def plan(costs: PageCosts, layout: KVLayout, budget: int, max_rows: int, batch_tokens: int) -> MemoryPlan | None:
    return plan_memory(costs, layout, budget_bytes=budget, max_rows=max_rows, max_batch_tokens=batch_tokens)


@given(works(), st.sampled_from(LAYOUTS), st.integers(1, 5), st.integers(1, 9), st.sampled_from([1, 8, 64]))
@settings(max_examples=40)
def test_more_budget_never_lets_fewer_run_and_is_never_exceeded(
    work: Work, layout: KVLayout, page_size: int, max_rows: int, batch_tokens: int
) -> None:
    costs = page_costs(work.trie, work.sequences, layout, page_size)
    page_bytes = np.array(layout.group_bytes_per_token) * page_size
    slack = np.array([LEAST_SLACK_PAGES if window else 0 for window in layout.windows])
    before: dict[tuple[int, ...], int] = {}  # with the larger slack behind a window there may be room for fewer
    for budget in range(1, 800, 61):
        memory = plan(costs, layout, budget, max_rows, batch_tokens)
        one_row_fits = (costs.peak(1) + slack) @ page_bytes <= budget
        assert (memory is not None) == one_row_fits
        if memory is None:
            assert not before
            continue
        pool, kept = np.array(memory.pool_pages), np.array(memory.slack_pages)
        assert before.get(memory.slack_pages, 1) <= memory.window_rows <= max_rows
        before[memory.slack_pages] = memory.window_rows
        assert (costs.peak(memory.window_rows) + kept <= pool).all()
        assert pool @ page_bytes <= budget
        assert memory.budget_tokens == budget // layout.bytes_per_token
        assert memory.peak_tokens == int(pool @ page_bytes) // layout.bytes_per_token
        assert memory.is_tight == (memory.window_rows < max_rows)
        if memory.window_rows < max_rows:
            assert (costs.peak(memory.window_rows + 1) + kept) @ page_bytes > budget


def test_a_chunk_has_its_slack_behind_a_window_if_that_fits() -> None:
    work = Work(build_trie(TokenArena.from_rows([np.arange(8, dtype=np.int32)])), table_of([0], [1]))
    layout = LAYOUTS[1]
    costs = page_costs(work.trie, work.sequences, layout, page_size=4)
    wide, tight = plan(costs, layout, 10_000, 1, 16), plan(costs, layout, 100, 1, 16)
    assert wide is not None
    assert tight is not None
    assert wide.slack_pages == (16 // 4 + LEAST_SLACK_PAGES,)
    assert tight.slack_pages == (LEAST_SLACK_PAGES,)


def test_no_more_memory_is_taken_than_all_rows_at_once_need() -> None:
    work = Work(build_trie(TokenArena.from_rows([np.arange(8, dtype=np.int32)])), table_of([0, 0], [5, 5]))
    costs = page_costs(work.trie, work.sequences, LAYOUTS[0], page_size=4)
    memory = plan(costs, LAYOUTS[0], 1 << 40, 256, 512)
    assert memory is not None
    assert memory.pool_pages == (2 + 1 + 1,)
    assert memory.window_rows == 256


def test_memory_that_is_left_beside_the_window_is_used() -> None:
    """Sequences that end early let more run than are sure to fit, if there are pages for them."""
    trie = build_trie(TokenArena.from_rows([np.full(8, i, np.int32) for i in range(9)]))
    costs = page_costs(trie, table_of(list(range(9)), [9] * 9), LAYOUTS[0], page_size=4)
    memory = plan(costs, LAYOUTS[0], (4 * 2 + 3) * 4 * 2, 9, 512)  # four pages each, and three are left
    assert memory is not None
    assert (memory.window_rows, memory.pool_pages) == (2, (11,))


def test_a_job_without_sequences_needs_no_memory() -> None:
    trie = build_trie(TokenArena.from_rows([]))
    costs = page_costs(trie, table_of([], []), LAYOUTS[2], page_size=4)
    assert costs.peak(3).tolist() == [0, 0]
    memory = plan(costs, LAYOUTS[2], 1_000, 4, 4)
    assert memory is not None
    assert memory.pool_pages == memory.slack_pages


@pytest.mark.parametrize(
    ("start", "end", "window", "pages"),
    [
        (0, 0, None, 0),
        (0, 1, None, 1),
        (0, 8, None, 2),
        (0, 9, None, 3),
        (6, 9, None, 2),  # the partly filled first page is a copy
        (8, 9, None, 1),
        (0, 40, 5, 1),  # a later token sees 36 to 39
        (0, 41, 5, 2),  # 37 to 40
        (40, 42, 5, 1),  # what it sees of the parent is the parent's
        (3, 40, 1, 0),  # it sees only itself
    ],
)
def test_prefix_pages(start: int, end: int, window: int | None, pages: int) -> None:
    assert prefix_pages(np.array([start]), np.array([end]), 4, window).tolist() == [pages]


@pytest.mark.parametrize(
    ("length", "stored", "takes_over", "window", "pages"),
    [
        (6, 6, False, None, 0),  # one token is generated: no KV of it is needed
        (6, 7, False, None, 1),  # the partly filled page is copied
        (6, 7, True, None, 0),  # it goes on in the page
        (6, 9, True, None, 1),
        (6, 9, False, None, 2),
        (8, 9, False, None, 1),
        (8, 100, False, 5, 2),  # five tokens lie on two pages at most
        (8, 100, True, 5, 1),  # it gives back one page of its prompt for each new one
    ],
)
def test_sequence_pages(length: int, stored: int, takes_over: bool, window: int | None, pages: int) -> None:
    arrays = np.array([length]), np.array([stored]), np.array([takes_over])
    node_pages = prefix_pages(np.array([0]), arrays[0], 4, window)
    assert sequence_pages(*arrays, node_pages, 4, window).tolist() == [pages]
