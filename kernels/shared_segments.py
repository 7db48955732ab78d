"""Which keys of a step are shared by which of its queries: the trie of the rows' page tables.

Rows stand in depth-first order, so the queries under every segment are one interval. That holds for prefill chunks
and decode rows alike, and no one has to say where the sharing comes from: equal page ids are equal keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchkv.intervals import intervals_from_lcp
from batchkv.step import AttentionBatch

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedSegments:
    """Every key that some query sees belongs, for that query, to exactly one segment. int64 [segments] each.

    Attributes:
        row: a row whose page table holds the segment's pages.
        q_lo, q_hi: the queries (tokens of the step) under the segment, `[q_lo, q_hi)`.
        k_lo, k_hi: the segment's key positions, `[k_lo, k_hi)`. Queries can see less of it: causality and window
            are for the kernel.
    """

    row: Int64Array
    q_lo: Int64Array
    q_hi: Int64Array
    k_lo: Int64Array
    k_hi: Int64Array

    def __len__(self) -> int:
        return len(self.row)


def find_shared_segments(batch: AttentionBatch) -> SharedSegments:
    """The segments of a step, parents before children."""
    num_pages = -(-batch.kv_lens // batch.page_size)
    nodes = intervals_from_lcp(num_pages, _common_pages(batch.page_table, num_pages))
    lo, hi = nodes.lo[1:].astype(np.int64), nodes.hi[1:].astype(np.int64)
    k_lo = nodes.start[1:].astype(np.int64) * batch.page_size
    k_hi = np.minimum(nodes.end[1:].astype(np.int64) * batch.page_size, reduce_over(np.maximum, batch.kv_lens, lo, hi))
    first_query = batch.first_query_positions
    row = lo
    if batch.window is not None:
        first_seen = np.maximum(first_query - batch.window + 1, 0)
        k_lo = np.maximum(k_lo, reduce_over(np.minimum, first_seen, lo, hi))
        # the row that sees furthest back holds every page that any of them sees
        row = _arg_min(first_seen, lo, hi)
    keep = np.flatnonzero(k_lo < k_hi)
    cu = batch.cu_seqlens_q.astype(np.int64)
    return SharedSegments(row[keep], cu[lo[keep]], cu[hi[keep]], k_lo[keep], k_hi[keep])


def _common_pages(page_table: npt.NDArray[np.int32], num_pages: Int64Array) -> Int64Array:
    """int64 [R]: leading pages that each row has in common with the row before it."""
    common = np.zeros(len(num_pages), np.int64)
    if len(num_pages) > 1:
        differs = page_table[1:] != page_table[:-1]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), page_table.shape[1])
        common[1:] = np.minimum(first, np.minimum(num_pages[1:], num_pages[:-1]))
    return common


def reduce_over(ufunc: np.ufunc, values: Int64Array, lo: Int64Array, hi: Int64Array) -> Int64Array:
    """`ufunc` over `values[lo[i]:hi[i]]` for every i (none empty)."""
    if len(lo) == 0:
        return np.zeros(0, np.int64)
    padded = np.append(values, values[-1])  # lets hi == len(values) be an index
    reduced: Int64Array = ufunc.reduceat(padded, np.stack([lo, hi], axis=1).ravel())[::2]
    return reduced


def _arg_min(values: Int64Array, lo: Int64Array, hi: Int64Array) -> Int64Array:
    """The index in `[lo[i], hi[i])` of the smallest of `values`, for every i."""
    size = len(values) + 1
    return reduce_over(np.minimum, values * size + np.arange(len(values)), lo, hi) % size


def repeat(counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Index of each of `counts[i]` copies of i, and its number among them."""
    source = np.repeat(np.arange(len(counts)), counts)
    return source, np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
