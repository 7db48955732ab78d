"""Splits jobs that are too large to be planned at once, so that rows which share prefixes stay together.

A sample of the rows is sorted, some of it is taken as splitters, and every row goes where it stands among them. So the
parts follow each other in the order in which all rows would be sorted, and what is lost at a cut is the prefix that the
rows to its left and right share: it is computed once in each part. Memory is that of one part, whatever the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from batchkv.token_arena import TokenArena, take_scattered
from batchkv.trie import lexicographic_order

Int64Array = npt.NDArray[np.int64]

_SAMPLE_PER_PART = 64  # the largest part is then hardly ever more than half as large again as the mean
_BLOCK_TOKENS = 1 << 19  # of rows that are compared with the splitters at once


def partition(
    arena: TokenArena,
    group: npt.NDArray[np.int32],
    outputs: Int64Array,
    *,
    max_outputs: int,
    max_tokens: int,
    after_block: Callable[[], None] = lambda: None,
) -> list[Int64Array]:
    """Which rows are planned together: row numbers, ascending in each part.

    Args:
        arena: the prompts; rows without tokens are in no part.
        group: int32 [rows], rows of different groups share nothing.
        outputs: int64 [rows], how many outputs each row has.
        max_outputs, max_tokens: about as many a part has at most.
        after_block: called when some of the arena has been read that is not needed for a while.
    """
    rows = np.flatnonzero(arena.lengths > 0)
    is_all = len(rows) == arena.num_rows
    total_outputs = int((outputs if is_all else outputs[rows]).sum())
    num_parts = max(-(-total_outputs // max_outputs), -(-int(arena.lengths.sum()) // max_tokens))
    if num_parts <= 1:
        return [rows] if len(rows) else []
    splitters = _splitters(arena, group, rows, 2 * num_parts, after_block)
    part = np.empty(len(rows), np.int32)
    done = 0
    for block in _blocks(arena, rows):
        part[done : done + len(block)] = _places(arena, group, block, splitters)
        done += len(block)
        after_block()
    parts: list[Int64Array] = []
    for number in range(len(splitters) + 1):
        _append(parts, rows[part == number], arena, outputs, max_outputs, max_tokens)
    return parts


def _append(
    parts: list[Int64Array],
    rows: Int64Array,
    arena: TokenArena,
    outputs: Int64Array,
    max_outputs: int,
    max_tokens: int,
) -> None:
    """Joins rows to the last part while it is small; rows that are too many even so (the same prompt over and over, so
    that no splitter lies between them) are cut.
    """
    if not len(rows):
        return
    if parts:
        both = np.concatenate([parts[-1], rows])
        if outputs[both].sum() <= max_outputs and arena.lengths[both].sum() <= max_tokens:
            parts[-1] = np.sort(both)
            return
    pieces = max(outputs[rows].sum() // (2 * max_outputs), arena.lengths[rows].sum() // (2 * max_tokens)) + 1
    parts.extend(piece for piece in np.array_split(rows, pieces) if len(piece))


def _splitters(
    arena: TokenArena,
    group: npt.NDArray[np.int32],
    rows: Int64Array,
    count: int,
    after_piece: Callable[[], None],
) -> Int64Array:
    """Rows whose prompts cut the sorted job into `count` parts of about the same size."""
    drawn = np.random.default_rng(0).choice(rows, min(count * _SAMPLE_PER_PART, len(rows)), replace=False)
    sample = take_scattered(arena, drawn, after_piece)
    order = lexicographic_order(sample, group[drawn].astype(np.int64))
    at = np.linspace(0, len(drawn), count, endpoint=False).astype(np.int64)[1:]
    splitters: Int64Array = drawn[order[at]]
    return splitters


def _blocks(arena: TokenArena, rows: Int64Array) -> Iterator[Int64Array]:
    """Consecutive rows with about `_BLOCK_TOKENS` tokens together."""
    mean = max(int(arena.lengths.sum()) // max(len(rows), 1), 1)
    size = max(_BLOCK_TOKENS // mean, 1)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _places(
    arena: TokenArena, group: npt.NDArray[np.int32], rows: Int64Array, splitters: Int64Array
) -> npt.NDArray[np.int32]:
    """int32 [rows]: how many of the splitters are no greater than each row."""
    both = np.concatenate([splitters, rows])  # splitters first: equal rows come after them
    order = lexicographic_order(arena.take(both), group[both].astype(np.int64))
    places = np.empty(len(both), np.int32)
    places[order] = np.cumsum(order < len(splitters))
    return places[len(splitters) :]
