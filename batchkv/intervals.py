"""The tree of intervals of sequences that share prefixes: of prompts by token, of rows in a step by KV page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Int64Array = npt.NDArray[np.int64]

NO_MINIMUM = np.int64(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True)
class Intervals:
    """A tree of intervals `[lo, hi)` of sorted sequences that agree on positions `[start, end)`.

    int32 [nodes] each, in depth-first preorder; node 0 is the root, with `start == end == 0`.
    """

    parent: npt.NDArray[np.int32]
    start: npt.NDArray[np.int32]
    end: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    lo: npt.NDArray[np.int32]
    hi: npt.NDArray[np.int32]


def intervals_from_lcp(lengths: IntArray, common: IntArray) -> Intervals:
    """The interval tree of sequences in an order that puts sharers side by side.

    Args:
        lengths: [sequences], items in each sequence.
        common: [sequences], leading items that each sequence has in common with the one before; `common[0] == 0`.

    A node is either a sequence's own end, `[i, i + 1)`, or what the sequences on both sides of a boundary have in
    common: the interval around the boundary within which neighbours share at least as much. Array operations only.
    """
    count = len(lengths)
    # boundary i is between the sequences i - 1 and i; the outer ones are those of the root, where nothing is shared
    shared = np.zeros(count + 1, np.int64)
    shared[1:count] = common[1:]
    boundary = np.flatnonzero(shared)
    leaf = np.flatnonzero(lengths > np.maximum(shared[:-1], shared[1:]))
    lo = np.concatenate([[0], _last_smaller(shared)[boundary], leaf])
    hi = np.concatenate([[count], count - _last_smaller(shared[::-1])[count - boundary], leaf + 1])
    end = np.concatenate([[0], shared[boundary], lengths[leaf]]).astype(np.int64)
    # preorder; the boundaries within one node found it several times
    _, first, node = np.unique(lo << 32 | end, return_index=True, return_inverse=True)
    lo, hi, end = lo[first], hi[first], end[first]
    node_at = np.zeros(count + 1, np.int64)  # the node of each boundary
    node_at[boundary] = node[1 : 1 + len(boundary)]
    parent = node_at[np.where(shared[lo] > shared[hi], lo, hi)]  # around a node, neighbours share its parent
    parent[0] = -1
    start = np.where(parent < 0, 0, end[parent])
    depth = sums_from_root(np.ones(len(lo), np.int64), lo, hi) - 1
    return Intervals(*(column.astype(np.int32) for column in (parent, start, end, depth, lo, hi)))


def subtree_ends(lo: IntArray, hi: IntArray) -> Int64Array:
    """int64 [nodes]: the node after the last one inside each of the intervals `[lo, hi)`, given in preorder."""
    ends: Int64Array = np.searchsorted(lo, np.maximum(hi, lo + 1))  # the root is a node even around nothing
    return ends


def sums_from_root(values: IntArray, lo: IntArray, hi: IntArray) -> Int64Array:
    """int64 [nodes]: `values` [nodes] summed over each of the intervals `[lo, hi)` and all around it.

    A running sum over the preorder, from which each node's value is taken again where its subtree ends.
    """
    change = np.zeros(len(values) + 1, np.int64)
    change[:-1] = values
    np.subtract.at(change, subtree_ends(lo, hi), values)
    total: Int64Array = np.cumsum(change[:-1])
    return total


def minima(values: IntArray, lo: IntArray, hi: IntArray) -> Int64Array:
    """int64 [intervals]: the least of `values` in each of the intervals `[lo, hi)`; `NO_MINIMUM` for an empty one.

    Of runs of 1, 2, 4, ... values, two of the longest that an interval has room for cover it.
    """
    least: Int64Array = np.full(len(lo), NO_MINIMUM)
    of_runs: Int64Array = values.astype(np.int64)
    first = lo.astype(np.int64)
    width = hi.astype(np.int64) - first
    run = 1
    while run <= width.max(initial=0):
        at = np.flatnonzero((width >= run) & (width < 2 * run))
        least[at] = np.minimum(of_runs[first[at]], of_runs[first[at] + width[at] - run])
        of_runs = np.minimum(of_runs[:-run], of_runs[run:])
        run *= 2
    return least


def count_up(counts: Int64Array) -> Int64Array:
    """0, 1, ... up to each of `counts` in turn."""
    counted: Int64Array = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    return counted


def _last_smaller(values: Int64Array) -> Int64Array:
    """int64 [values]: where the last smaller value before each value is; 0 for the smallest ones. None is negative.

    A candidate that is too large leads to the candidate found for it so far, in all places at once: the way over
    equal values is halved in every round. Over falling values it is one by one, but then the values are large, and
    so long prefixes cannot be many.
    """
    candidate = np.arange(-1, len(values) - 1).clip(0)
    active = np.flatnonzero(values)
    while len(active):
        active = active[values[candidate[active]] >= values[active]]
        candidate[active] = candidate[candidate[active]]
    return candidate
