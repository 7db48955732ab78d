"""The prefix trie over all prompts of a job, as flat arrays in depth-first order.

Built by sorting and longest common prefixes: prompts are sorted, neighbours compared, and the nodes are the
intervals of prompts that share a prefix. No Python object per token or node exists.

                     root [0, 0)                    node      0     1     2     3
                      │                             parent   -1     0     1     1
                 1 [0, 500)  few-shot header        start     0     0   500   500
                  ├── 2 [500, 540)  prompt 0        end       0   500   540   530
                  └── 3 [500, 530)  prompt 1        prompts [0,2) [0,2) [0,1) [1,2)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.stride_tricks import sliding_window_view

from batchkv.intervals import IntArray, intervals_from_lcp, sums_from_root
from batchkv.token_arena import TokenArena

_COMPARE_TOKENS = 128  # tokens compared at once per pair of neighbours
# Pairs compared at once: so few that a row is still in cache when the one behind it is compared with it.
_COMPARE_PAIRS = 1 << 9

Int64Array = npt.NDArray[np.int64]
_Keys = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True)
class PrefixTrie:
    """Nodes in depth-first preorder (a parent before its children); node 0 is the empty root.

    Node `i` holds the tokens at positions `[start[i], end[i])` of every prompt in `[prompt_lo[i], prompt_hi[i])`.
    Prompts are distinct token sequences, numbered in depth-first order; several rows can have the same one.

    Attributes:
        parent: int32 [nodes]; -1 for the root.
        start, end: int32 [nodes], token positions.
        depth: int32 [nodes]; 0 for the root.
        prompt_lo, prompt_hi: int32 [nodes], the interval of prompts under the node.
        prompt_node: int32 [prompts], the node at whose end the prompt ends.
        prompt_row: int64 [prompts], the first row with this prompt: where its tokens stand in the arena.
        row_prompt: int32 [rows], the prompt of each row; -1 for a row without tokens.
    """

    parent: npt.NDArray[np.int32]
    start: npt.NDArray[np.int32]
    end: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    prompt_lo: npt.NDArray[np.int32]
    prompt_hi: npt.NDArray[np.int32]
    prompt_node: npt.NDArray[np.int32]
    prompt_row: Int64Array
    row_prompt: npt.NDArray[np.int32]

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_node)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """int32 [nodes]: tokens held by each node itself."""
        return self.end - self.start

    @property
    def num_tokens(self) -> int:
        """Tokens of all nodes: what an ideal cache prefills."""
        return int(self.lengths.sum(dtype=np.int64))

    def path(self, node: int) -> list[int]:
        """Nodes from below the root down to `node`, both ends as given (the root itself is left out)."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]

    def node_tokens(self, arena: TokenArena, node: int) -> npt.NDArray[np.int32]:
        """int32 [length]: the tokens of one node, a view into the arena."""
        first = int(arena.offsets[self.prompt_row[self.prompt_lo[node]]])
        return arena.tokens[first + int(self.start[node]) : first + int(self.end[node])]

    def sum_over_paths(self, values: IntArray) -> Int64Array:
        """int64 [nodes]: `values` [nodes] summed from the root down to each node."""
        return sums_from_root(values, self.prompt_lo, self.prompt_hi)

    def reordered(self, child_key: npt.NDArray[np.float64]) -> PrefixTrie:
        """The same trie with the children of every node sorted by `child_key` [nodes], ties as they were.

        A prompt that ends at a node stays before the prompts under the node's children.
        """
        children = np.lexsort((np.arange(self.num_nodes), child_key, self.parent))[1:]  # the root sorts first
        prompts = (self.prompt_hi - self.prompt_lo).astype(np.int64)
        before = np.cumsum(prompts[children]) - prompts[children]
        family = self.parent[children]
        first_of_family = np.searchsorted(family, family)
        ends_here = np.zeros(self.num_nodes, np.int64)
        ends_here[self.prompt_node] = 1
        new_lo = np.zeros(self.num_nodes, np.int64)
        new_lo[children] = before - before[first_of_family] + ends_here[family]
        new_lo = self.sum_over_paths(new_lo)
        return self._renumbered(new_lo)

    def _renumbered(self, new_lo: Int64Array) -> PrefixTrie:
        order = np.lexsort((self.end, new_lo))  # preorder: an interval's parent starts no later and ends earlier
        new_node = np.empty(self.num_nodes, np.int32)
        new_node[order] = np.arange(self.num_nodes, dtype=np.int32)
        new_prompt = new_lo[self.prompt_node].astype(np.int32)
        prompt_order = np.argsort(new_prompt)
        parent = np.where(self.parent < 0, np.int32(-1), new_node[self.parent])
        row_prompt = self.row_prompt.copy()
        row_prompt[row_prompt >= 0] = new_prompt[row_prompt[row_prompt >= 0]]
        return PrefixTrie(
            parent=parent[order],
            start=self.start[order],
            end=self.end[order],
            depth=self.depth[order],
            prompt_lo=new_lo[order].astype(np.int32),
            prompt_hi=(new_lo + self.prompt_hi - self.prompt_lo)[order].astype(np.int32),
            prompt_node=new_node[self.prompt_node[prompt_order]],
            prompt_row=self.prompt_row[prompt_order],
            row_prompt=row_prompt,
        )


def build_trie(arena: TokenArena, group: Int64Array | None = None) -> PrefixTrie:
    """The prefix trie of all rows that have tokens.

    Args:
        arena: the prompts.
        group: int64 [rows], rows of different groups share nothing (one group each: no sharing at all).
    """
    rows = np.flatnonzero(arena.lengths > 0)
    group_of = np.zeros(len(rows), np.int64) if group is None else group[rows]
    keys = _sort_keys(arena)
    order = _sorted(arena, keys, rows, group_of)
    rows, group_of = rows[order], group_of[order]
    lengths = arena.lengths[rows]
    common = _common_with_previous(arena, keys, rows, group_of)
    is_twin = np.zeros(len(rows), bool)
    is_twin[1:] = (common[1:] == lengths[1:]) & (common[1:] == lengths[:-1])
    row_prompt = np.full(arena.num_rows, -1, np.int32)
    row_prompt[rows] = np.cumsum(~is_twin) - 1
    prompt_length = lengths[~is_twin]
    nodes = intervals_from_lcp(prompt_length, common[~is_twin])
    # a prompt that ends at an inner node sorts before all others below it
    ends_here = np.flatnonzero(nodes.end[1:] == prompt_length[nodes.lo[1:]]) + 1
    prompt_node = np.empty(len(prompt_length), np.int32)
    prompt_node[nodes.lo[ends_here]] = ends_here
    return PrefixTrie(
        parent=nodes.parent,
        start=nodes.start,
        end=nodes.end,
        depth=nodes.depth,
        prompt_lo=nodes.lo,
        prompt_hi=nodes.hi,
        prompt_node=prompt_node,
        prompt_row=rows[~is_twin],
        row_prompt=row_prompt,
    )


def lexicographic_order(arena: TokenArena, group: Int64Array) -> Int64Array:
    """int64 [rows]: the order that sorts all rows, none of them empty, by (group, tokens, row)."""
    return _sorted(arena, _sort_keys(arena), np.arange(arena.num_rows), group)


def _sort_keys(arena: TokenArena) -> _Keys:
    """The arena's tokens as big-endian numbers, whose bytes sort as the tokens do; zeros for a last block behind them.

    It is the only copy of all tokens that planning makes, so they have two bytes each where that is enough.
    """
    largest = int(arena.tokens.view(np.uint32).max(initial=0))
    keys = np.zeros(len(arena.tokens) + _COMPARE_TOKENS, ">u2" if largest < 1 << 16 else ">u4")
    keys[: len(arena.tokens)] = arena.tokens
    return keys


def _sorted(arena: TokenArena, keys: _Keys, rows: Int64Array, group_of: Int64Array) -> Int64Array:
    """Positions that sort `rows` by (group, tokens, row)."""
    # Rows that were dropped are sorted too, by the tokens that they had, and left out then.
    offsets = pa.py_buffer(arena.offsets * keys.itemsize)
    prompts = pa.Array.from_buffers(pa.large_binary(), arena.num_rows, [None, offsets, pa.py_buffer(keys)])
    position = np.full(arena.num_rows, -1, np.int64)
    position[rows] = np.arange(len(rows))
    by_tokens = position[pc.sort_indices(prompts).to_numpy()]  # stable: equal ones stay in the order of rows
    by_tokens = by_tokens[by_tokens >= 0]
    order: Int64Array = by_tokens[np.argsort(group_of[by_tokens], kind="stable")]
    return order


def _common_with_previous(arena: TokenArena, keys: _Keys, rows: Int64Array, group_of: Int64Array) -> Int64Array:
    """int64 [rows]: leading tokens that each of the sorted rows shares with the row before it."""
    blocks = sliding_window_view(keys.view(keys.dtype.newbyteorder("=")), _COMPARE_TOKENS)  # views, by first token
    common = np.zeros(len(rows), np.int64)
    pairs = np.flatnonzero(group_of[1:] == group_of[:-1]) + 1
    for chunk in np.split(pairs, range(_COMPARE_PAIRS, len(pairs), _COMPARE_PAIRS)):
        left, right = rows[chunk - 1], rows[chunk]
        limit = np.minimum(arena.lengths[left], arena.lengths[right])
        common[chunk] = _common_lengths(blocks, arena.offsets[left], arena.offsets[right], limit)
    return common


def _common_lengths(blocks: _Keys, left: Int64Array, right: Int64Array, limit: Int64Array) -> Int64Array:
    """How many of the `limit` tokens from `left` and `right` on agree, compared block by block."""
    common = np.zeros(len(left), np.int64)
    active = np.flatnonzero(limit > 0)
    while len(active):
        at = common[active]
        same = blocks[left[active] + at] == blocks[right[active] + at]
        common[active] += np.where(same.all(axis=1), _COMPARE_TOKENS, same.argmin(axis=1))
        active = active[(common[active] == at + _COMPARE_TOKENS) & (common[active] < limit[active])]
    return np.minimum(common, limit)
