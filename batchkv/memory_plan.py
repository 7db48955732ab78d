"""How many KV pages a job takes, and when: costs, lifetimes, and the peak of a window of sequences in flight.

Sequences start in execution order and at most `rows` are in flight. A trie node lives from the start of the first
sequence below it to the end of the last one. In a window of consecutive sequences the live pages are therefore

    peak(rows) = max over i of  sum of pages of nodes and sequences alive while sequences (i - rows, i] are in flight

That is what the pool is made for (or the whole budget, if it is less). The scheduler keeps to the same sum: it starts a
sequence only if the pages of everything alive fit the pool. So the pool is a bound on what happens, whatever the order
in which sequences end; a straggler makes the window narrower, not the pool larger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchkv.carried import CachedNodes, Carried
from batchkv.kv_layout import KVLayout
from batchkv.sequence import SequenceTable
from batchkv.trie import PrefixTrie

Int64Array = npt.NDArray[np.int64]

LEAST_SLACK_PAGES = 2  # a prefill can go on page by page with so many to spare


@dataclass(frozen=True, slots=True)
class PageCosts:
    """Pages that everything of a job holds while it lives; G groups of layers.

    Attributes:
        page_size: tokens per page.
        nodes: int64 [G, nodes], pages at most held by each trie node itself.
        sequences: int64 [G, sequences], pages at most held by each sequence below its node.
        first_sequence, last_sequence: int64 [nodes], the lifetime of each node, both ends included.
        takes_over: bool [sequences], the only sequence of a leaf: it goes on in the leaf's own pages, others fork.
        keeps: bool [sequences], its pages and those of the nodes above it are held until all have ended.
    """

    page_size: int
    nodes: Int64Array
    sequences: Int64Array
    first_sequence: Int64Array
    last_sequence: Int64Array
    takes_over: npt.NDArray[np.bool_]
    keeps: npt.NDArray[np.bool_]

    def peak(self, rows: int) -> Int64Array:
        """int64 [G]: most pages alive with a window of `rows` sequences."""
        num_sequences = self.sequences.shape[1]
        started = np.arange(num_sequences)
        kept_before = np.concatenate([[0], np.cumsum(self.keeps)])
        node_keeps = kept_before[self.last_sequence + 1] > kept_before[self.first_sequence]
        last = np.where(self.keeps, num_sequences - 1, started)
        last_of_node = np.where(node_keeps, num_sequences - 1, self.last_sequence)
        change = np.zeros((len(self.nodes), num_sequences + rows), np.int64)
        for group, (nodes, sequences) in enumerate(zip(self.nodes, self.sequences, strict=True)):
            np.add.at(change[group], self.first_sequence, nodes)
            np.subtract.at(change[group], last_of_node + rows, nodes)
            np.add.at(change[group], started, sequences)
            np.subtract.at(change[group], last + rows, sequences)
        peak: Int64Array = np.cumsum(change, axis=1).max(axis=1, initial=0)
        return peak

    def kept_beside_any(self, trie: PrefixTrie, sequences: SequenceTable) -> Int64Array:
        """int64 [G]: pages of all that is held to the end, and of the largest sequence with the nodes above it.

        Whoever is still running when all others have ended finds room beside these.
        """
        kept_before = np.concatenate([[0], np.cumsum(self.keeps)])
        node_keeps = kept_before[self.last_sequence + 1] > kept_before[self.first_sequence]
        kept = self.nodes[:, node_keeps].sum(axis=1) + self.sequences[:, self.keeps].sum(axis=1)
        own_node = trie.prompt_node[sequences.prompt]
        alone = np.stack([trie.sum_over_paths(nodes)[own_node] for nodes in self.nodes]) + self.sequences
        total: Int64Array = kept + alone.max(axis=1, initial=0)
        return total


def page_costs(
    trie: PrefixTrie,
    sequences: SequenceTable,
    layout: KVLayout,
    page_size: int,
    *,
    cached: CachedNodes | None = None,
    keeps: npt.NDArray[np.bool_] | None = None,
) -> PageCosts:
    """Costs of `trie` and `sequences` in pages of `page_size` tokens.

    Args:
        cached: what has KV already, in pages that are not counted here; by default nothing.
        keeps: bool [sequences], whose pages are held to the end; by default none.
    """
    cached = cached or CachedNodes.none(trie)
    node = trie.prompt_node[sequences.prompt]
    length = trie.end[node].astype(np.int64)
    stored = length + sequences.max_new_tokens - 1  # the last token's KV is never needed
    takes_over = _is_alone(trie, sequences)
    nodes, below = [], []
    for window in layout.windows:
        nodes.append(np.where(cached.is_needed, prefix_pages(cached.cached_to, trie.end, page_size, window), 0))
        below.append(sequence_pages(length, stored, takes_over, nodes[-1][node], page_size, window))
    return PageCosts(
        page_size=page_size,
        nodes=np.stack(nodes),
        sequences=np.stack(below),
        first_sequence=np.searchsorted(sequences.prompt, trie.prompt_lo),
        last_sequence=np.searchsorted(sequences.prompt, trie.prompt_hi) - 1,
        takes_over=takes_over,
        keeps=np.zeros(len(sequences), np.bool_) if keeps is None else keeps,
    )


def prefix_pages(
    start: npt.NDArray[np.integer], end: npt.NDArray[np.integer], page_size: int, window: int | None
) -> Int64Array:
    """Pages of prefilled tokens `[start, end)`: all of them, or those that a later token can see."""
    start, end = start.astype(np.int64), end.astype(np.int64)
    if window is not None:
        start = np.minimum(np.maximum(start, end - window + 1), end)
    return np.where(end > start, -(-end // page_size) - start // page_size, 0)


def sequence_pages(
    length: Int64Array,
    stored: Int64Array,
    takes_over: npt.NDArray[np.bool_],
    node_pages: Int64Array,
    page_size: int,
    window: int | None,
) -> Int64Array:
    """Pages that generation takes beside those of the prompt's own node.

    Args:
        length: tokens of each prompt.
        stored: tokens of prompt and generation that have KV in the end.
        takes_over: whether the sequence goes on in its node's pages; others copy the partly filled one.
        node_pages: pages of the prompt's own node, which leave the window of a sequence that took them over.
    """
    first_page = np.where(takes_over, -(-length // page_size), length // page_size)
    pages: Int64Array = np.where(stored > length, -(-stored // page_size) - first_page, 0)
    if window is not None:
        widest = (window + page_size - 2) // page_size + 1
        pages = np.minimum(pages, np.maximum(widest - np.where(takes_over, node_pages, 0), 0))
    return pages


def _is_alone(trie: PrefixTrie, sequences: SequenceTable) -> npt.NDArray[np.bool_]:
    """bool [sequences]: whether nothing else is at or below the sequence's node."""
    is_leaf = (trie.prompt_hi - trie.prompt_lo)[trie.prompt_node] == 1
    sequences_of = np.bincount(sequences.prompt, minlength=trie.num_prompts)
    alone: npt.NDArray[np.bool_] = (is_leaf & (sequences_of == 1))[sequences.prompt]
    return alone


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The KV pool of a run.

    Attributes:
        page_size: tokens per page.
        pool_pages: pages of each group that are allocated: what the plan needs, never more than the budget.
        slack_pages: of these, pages of each group kept for the chunk being prefilled (behind a window only).
        window_rows: consecutive sequences that fit at any point of the order.
        is_tight: whether the budget, not `max_rows`, limits how many are in flight.
        peak_tokens: most tokens of KV that can be held at once, in whole pages: the pool.
        budget_tokens: tokens of KV that the budget has room for.
        bytes_per_token: KV bytes of one token in all layers.
    """

    page_size: int
    pool_pages: tuple[int, ...]
    slack_pages: tuple[int, ...]
    window_rows: int
    is_tight: bool
    peak_tokens: int
    budget_tokens: int
    bytes_per_token: int


def plan_memory(
    costs: PageCosts, layout: KVLayout, *, budget_bytes: int, max_rows: int, max_batch_tokens: int
) -> MemoryPlan | None:
    """The pool for a job, with as many sequences in flight as `max_rows` and the budget allow.

    Returns:
        None if not even one sequence at a time fits in pages of this size.
    """
    page_bytes = np.array(layout.group_bytes_per_token) * costs.page_size
    fitted = _fitted(costs, layout, max_rows, max_batch_tokens, lambda pages: bool(pages @ page_bytes <= budget_bytes))
    if fitted is None:
        return None
    rows, slack = fitted
    pages = costs.peak(rows) + slack
    is_tight = rows < max_rows
    if is_tight:
        rest = budget_bytes - int(pages @ page_bytes)
        pages += pages * rest // int(pages @ page_bytes)
    return MemoryPlan(
        page_size=costs.page_size,
        pool_pages=tuple(pages.tolist()),
        slack_pages=tuple(slack.tolist()),
        window_rows=rows,
        is_tight=is_tight,
        peak_tokens=int(pages @ page_bytes) // layout.bytes_per_token,
        budget_tokens=budget_bytes // layout.bytes_per_token,
        bytes_per_token=layout.bytes_per_token,
    )


def plan_memory_beside(
    carried: Carried, costs: PageCosts, layout: KVLayout, *, budget_bytes: int, max_rows: int, max_batch_tokens: int
) -> MemoryPlan | None:
    """What a wave may take of a pool that others hold part of; the rest is as in `plan_memory`."""
    page_bytes = np.array(layout.group_bytes_per_token) * costs.page_size
    free = carried.free_pages
    fitted = _fitted(costs, layout, max_rows, max_batch_tokens, lambda pages: bool((pages <= free).all()))
    if fitted is None:
        return None
    rows, slack = fitted
    pages = free if rows < max_rows else costs.peak(rows) + slack
    return MemoryPlan(
        page_size=costs.page_size,
        pool_pages=tuple(pages.tolist()),
        slack_pages=tuple(slack.tolist()),
        window_rows=rows,
        is_tight=rows < max_rows,
        peak_tokens=int((pages + carried.held_pages) @ page_bytes) // layout.bytes_per_token,
        budget_tokens=budget_bytes // layout.bytes_per_token,
        bytes_per_token=layout.bytes_per_token,
    )


def shared_pool(layout: KVLayout, page_size: int, budget_bytes: int) -> tuple[int, ...]:
    """Pages of each group for waves that are not known yet: as many in each, for no group can need more than the one
    without a window.
    """
    page_bytes = sum(layout.group_bytes_per_token) * page_size
    return (budget_bytes // page_bytes,) * len(layout.windows)


def _fitted(
    costs: PageCosts, layout: KVLayout, max_rows: int, max_batch_tokens: int, fits: Callable[[Int64Array], bool]
) -> tuple[int, Int64Array] | None:
    """The widest window whose pages fit, and the slack of each group; None if not even one sequence does."""
    # slack is for prefill: nothing to run, nothing to spare
    is_windowed = np.array([window is not None and costs.sequences.shape[1] > 0 for window in layout.windows])
    chunk_pages = -(-max_batch_tokens // costs.page_size)
    for slack in (is_windowed * (chunk_pages + LEAST_SLACK_PAGES), is_windowed * LEAST_SLACK_PAGES):
        rows = _most_rows(costs, slack, max_rows, fits)
        if rows:
            return rows, slack
    return None


def _most_rows(costs: PageCosts, slack: Int64Array, max_rows: int, fits: Callable[[Int64Array], bool]) -> int:
    """The widest window, up to `max_rows`, whose peak fits; 0 if none does. The peak grows with it."""
    most, too_many = 0, max_rows + 1
    while too_many - most > 1:
        rows = (most + too_many) // 2
        if fits(costs.peak(rows) + slack):
            most = rows
        else:
            too_many = rows
    return most
