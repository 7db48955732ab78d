"""The tree of intervals of sequences that share prefixes: of prompts by token, of rows in a step by KV page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]


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

    The standard stack pass over a longest-common-prefix array: one step per sequence, none per item.
    """
    found: list[tuple[int, int, int]] = []  # (lo, end, hi): sorts into preorder
    open_nodes = [(0, 0)]  # (end, lo), the path to the last sequence
    for i, (length, shared) in enumerate(zip(lengths.tolist(), common.tolist(), strict=True)):
        lo = i
        while open_nodes[-1][0] > shared:
            end, lo = open_nodes.pop()
            found.append((lo, end, i))
        if open_nodes[-1][0] < shared:
            open_nodes.append((shared, lo))
        if length > shared:
            open_nodes.append((length, i))
    found.extend((lo, end, len(lengths)) for end, lo in open_nodes)
    found.sort()
    lo_, end_, hi_ = (np.array(column, np.int32) for column in zip(*found, strict=True))
    parent, depth = _parents(lo_, hi_)
    start = np.where(parent < 0, 0, end_[parent]).astype(np.int32)
    return Intervals(parent, start, end_, depth, lo_, hi_)


def _parents(
    lo: npt.NDArray[np.int32], hi: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Parent and depth of intervals in preorder: the innermost earlier interval that is still open."""
    parent = np.full(len(lo), -1, np.int32)
    depth = np.zeros(len(lo), np.int32)
    path = [0]
    his = hi.tolist()
    for i, first in enumerate(lo.tolist()[1:], start=1):
        while his[path[-1]] <= first:
            path.pop()
        parent[i] = path[-1]
        depth[i] = len(path)
        path.append(i)
    return parent, depth
