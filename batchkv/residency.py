"""Which trie nodes and sequences are in the KV cache, and which pages they may come to need.

Everything resident has its pages committed beforehand, so that no allocation ever fails: a node what the plan says, a
sequence what it is expected to grow to. A sequence that outgrows the expectation commits more; `overcommitted` then
tells that someone has to go.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from batchkv.job_plan import Plan
from batchkv.kv_cache import KVCache
from batchkv.memory_plan import sequence_pages

Int64Array = npt.NDArray[np.int64]

_ENOUGH_ENDED = 32  # ended sequences that say something about how long the others get
_NONE = -1  # no handle


class Residency:
    """Bookkeeping over a plan's nodes and sequences.

    Args:
        plan: of the wave.
        windows: of the groups of layers.
        cache: what the plan goes on from; by default a new one, for this wave alone.
    """

    def __init__(self, plan: Plan, windows: tuple[int | None, ...], cache: KVCache | None = None) -> None:
        memory, num_nodes, num_sequences = plan.memory, plan.trie.num_nodes, len(plan.sequences)
        self.cache = cache or KVCache(memory.pool_pages, windows, memory.page_size)
        self.kept: dict[int, int] = {}  # handles of sequences that have ended and stay, by sequence
        self._plan = plan
        self._windows = windows
        self._limit = np.array(memory.pool_pages) - np.array(memory.slack_pages)
        self._committed = np.zeros(len(windows), np.int64)
        self._is_resident = np.zeros(num_nodes, bool)  # or queued to be: its pages are committed
        self._is_resident[0] = True
        self._is_complete = plan.cached.is_complete(plan.trie)  # before anything is run
        self._is_resident |= self._is_complete
        self._node_handle = np.full(num_nodes, _NONE, np.int64)
        self._node_handle[0] = self.cache.create()
        self._in_flight_below = np.zeros(num_nodes, np.int64)
        self._unfinished_below = plan.costs.last_sequence - plan.costs.first_sequence + 1
        self._in_flight = np.zeros(num_sequences, bool)
        self.num_in_flight = 0
        self._sequence_handle = np.full(num_sequences, _NONE, np.int64)
        self._expected = np.zeros_like(plan.costs.sequences)
        self._length = plan.trie.end[plan.trie.prompt_node[plan.sequences.prompt]].astype(np.int64)
        self._ended_shares = _MeanAndDeviation()

    # -- questions

    @property
    def is_overcommitted(self) -> bool:
        return bool((self._committed > self._limit).any())

    def node_of(self, sequence: int) -> int:
        return int(self._plan.trie.prompt_node[self._plan.sequences.prompt[sequence]])

    def handles(self, sequences: Int64Array) -> Int64Array:
        """int64 [sequences]: running sequences in the cache."""
        return self._sequence_handle[sequences]

    def missing_nodes(self, sequence: int) -> list[int]:
        """Nodes between the sequence and the nearest resident one, from the top down."""
        missing: list[int] = []
        for node in reversed(self._plan.trie.path(self.node_of(sequence))):
            if self._is_resident[node]:
                break
            missing.append(node)
        return missing[::-1]

    def room(self, sequences: Int64Array) -> Int64Array:
        """int64 [sequences]: how many tokens running sequences can be given before they outgrow what is committed."""
        costs, nodes = self._plan.costs, self._plan.trie.prompt_node[self._plan.sequences.prompt[sequences]]
        takes_over, handles = costs.takes_over[sequences], self._sequence_handle[sequences]
        own_from = np.where(takes_over, self._plan.cached.cached_to[nodes], self._length[sequences])
        committed = self._expected[:, sequences] + np.where(takes_over, costs.nodes[:, nodes], 0)
        held_from = np.stack([self.cache.first_pages(group, handles) for group in range(len(self._windows))])
        ends = np.maximum(held_from, own_from // self.cache.page_size) + committed
        room: Int64Array = ends.min(axis=0) * self.cache.page_size - self.cache.lengths(handles)
        return room

    # -- changes

    def take_back(self, sequences: Int64Array, num_generated: Int64Array) -> None:
        """Leaves running sequences so much KV as they have with `num_generated` tokens."""
        handles = self._sequence_handle[sequences]
        self.cache.truncate(handles, self._length[sequences] + num_generated - 1)  # the newest has none
        self.cache.trim(handles)

    def admit(self, sequence: int, num_generated: int) -> list[int] | None:
        """Commits the pages of a sequence and of the nodes it misses, which are to be prefilled in this order; None if
        they do not fit.
        """
        missing = self.missing_nodes(sequence)
        expected = self._expected_pages(sequence, num_generated)
        committed = self._committed + self._plan.costs.nodes[:, missing].sum(axis=1) + expected
        if (committed > self._limit).any():
            return None
        self._committed = committed
        self._expected[:, sequence] = expected
        self._is_resident[missing] = True
        self._in_flight[sequence] = True
        self.num_in_flight += 1
        self._in_flight_below[self._plan.trie.path(self.node_of(sequence))] += 1
        return missing

    def begin_node(self, node: int) -> int:
        """The handle that the node's tokens are appended to: at first a fork of its parent, which is complete, or of
        what is in the cache of its own tokens.
        """
        if self._node_handle[node] == _NONE:
            cached = self._plan.cached
            if cached.handle[node] != _NONE:
                self._node_handle[node] = self.cache.fork(int(cached.handle[node]), int(cached.cached_to[node]))
            else:
                self._node_handle[node] = self.cache.fork(self.begin_node(int(self._plan.trie.parent[node])))
                self.cache.trim(self._node_handle[node : node + 1])  # the parent may have grown in this very step
        return int(self._node_handle[node])

    def begin_sequence(self, sequence: int) -> int:
        """Forks the sequence's node, or takes its place where nothing else is below the node."""
        node = self.node_of(sequence)
        if self._plan.costs.takes_over[sequence]:
            self._sequence_handle[sequence], self._node_handle[node] = self._node_handle[node], _NONE
        else:
            self._sequence_handle[sequence] = self.cache.fork(int(self._node_handle[node]))
        return int(self._sequence_handle[sequence])

    def grow(self, sequences: Int64Array) -> None:
        """Commits what one more token of each running sequence takes beyond what was expected."""
        stored = self.cache.lengths(self._sequence_handle[sequences]) + 1
        more = np.maximum(self._pages(sequences, stored) - self._expected[:, sequences], 0)
        self._expected[:, sequences] += more
        self._committed += more.sum(axis=1)

    def finish(self, sequence: int, num_generated: int) -> None:
        """The sequence has ended: it goes, and with it the nodes that it was the last to need."""
        if self._plan.sequences.score_from[sequence] < 0:
            self._ended_shares.add(num_generated / float(self._plan.sequences.max_new_tokens[sequence]))
        if self._plan.costs.keeps[sequence] and self._in_flight[sequence]:
            if self._sequence_handle[sequence] == _NONE:  # it ended with its first token
                self.begin_sequence(sequence)
            self._keep(sequence)
            return
        if self._in_flight[sequence]:
            self.withdraw(sequence)
        for node in self._plan.trie.path(self.node_of(sequence)):
            self._unfinished_below[node] -= 1
            if self._unfinished_below[node] == 0 and self._is_resident[node]:
                self._drop_node(node)

    def _keep(self, sequence: int) -> None:
        """Takes a sequence out of flight that stays in the cache, and with it the nodes above it."""
        self.kept[sequence] = int(self._sequence_handle[sequence])
        stored = self.cache.lengths(self._sequence_handle[sequence : sequence + 1])
        held = self._pages(np.array([sequence]), stored)[:, 0]
        self._committed -= self._expected[:, sequence] - held
        self._expected[:, sequence] = held
        self._in_flight[sequence] = False
        self.num_in_flight -= 1

    def release_nodes(self) -> None:
        """Frees the nodes when all sequences have ended: what is left in the cache is what is kept."""
        for node in np.flatnonzero(self._node_handle != _NONE).tolist():
            self.cache.free(int(self._node_handle[node]))
            self._node_handle[node] = _NONE

    def withdraw(self, sequence: int) -> None:
        """Takes a sequence out of flight and frees its pages; its nodes stay, unless it had taken one over."""
        node, handle = self.node_of(sequence), int(self._sequence_handle[sequence])
        if handle != _NONE:
            self.cache.free(handle)
            self._sequence_handle[sequence] = _NONE
            if self._plan.costs.takes_over[sequence]:
                self._drop_node(node)
        self._committed -= self._expected[:, sequence]
        self._expected[:, sequence] = 0
        self._in_flight[sequence] = False
        self.num_in_flight -= 1
        self._in_flight_below[self._plan.trie.path(node)] -= 1

    def drop_idle_nodes(self, *, keep_above: int | None = None) -> list[int]:
        """Frees the nodes that nothing in flight is below; they are prefilled again when they are needed.

        Args:
            keep_above: a sequence that is about to be admitted, whose nodes stay.
        """
        is_idle = self._is_resident & (self._in_flight_below == 0) & ~self._is_complete
        is_idle[0] = False
        if keep_above is not None:
            is_idle[self._plan.trie.path(self.node_of(keep_above))] = False
        idle: list[int] = np.flatnonzero(is_idle).tolist()
        for node in idle:
            self._drop_node(node)
        return idle

    def youngest(self) -> int:
        """The sequence in flight that comes last in execution order."""
        return int(np.flatnonzero(self._in_flight)[-1])

    def is_resident(self, node: int) -> bool:
        """Whether the node is prefilled or to be."""
        return bool(self._is_resident[node])

    def is_prefilled(self, node: int) -> bool:
        handle = self._node_handle[node : node + 1]
        return bool(handle != _NONE and self.cache.lengths(handle) == self._plan.trie.end[node])

    def _drop_node(self, node: int) -> None:
        if self._node_handle[node] != _NONE:
            self.cache.free(int(self._node_handle[node]))
            self._node_handle[node] = _NONE
        self._is_resident[node] = False
        self._committed -= self._plan.costs.nodes[:, node]

    def _expected_pages(self, sequence: int, num_generated: int) -> Int64Array:
        may_expect_less = self._plan.memory.is_tight and self._ended_shares.count >= _ENOUGH_ENDED
        # a sequence that was preempted is not let in again before it fits to its end
        if not may_expect_less or num_generated > 1:
            return self._plan.costs.sequences[:, sequence]
        most = int(self._plan.sequences.max_new_tokens[sequence])
        new_tokens = min(most, max(math.ceil(self._ended_shares.upper() * most), num_generated + 1))
        stored = self._length[sequence] + new_tokens - 1
        return self._pages(np.array([sequence]), np.array([stored]))[:, 0]

    def _pages(self, sequences: Int64Array, stored: Int64Array) -> Int64Array:
        """int64 [G, sequences]: pages beside those of their nodes when `stored` tokens of each have KV."""
        nodes = self._plan.trie.prompt_node[self._plan.sequences.prompt[sequences]]
        takes_over = self._plan.costs.takes_over[sequences]
        page_size = self.cache.page_size
        return np.stack(
            [
                sequence_pages(self._length[sequences], stored, takes_over, node_pages[nodes], page_size, window)
                for node_pages, window in zip(self._plan.costs.nodes, self._windows, strict=True)
            ]
        )


class _MeanAndDeviation:
    """Of a stream of numbers."""

    def __init__(self) -> None:
        self.count, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        self.count, self._sum, self._squares = (
            self.count + 1,
            self._sum + value,
            self._squares + value * value,
        )

    def upper(self) -> float:
        """Mean plus one standard deviation."""
        mean = self._sum / self.count
        return mean + math.sqrt(max(self._squares / self.count - mean * mean, 0.0))
