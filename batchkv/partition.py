"""Splits jobs that are too large to be planned at once, so that rows which share prefixes stay together.

A sample of the rows is sorted, some of it is taken as splitters, and every row goes where it stands among them. So the
parts follow each other in the order in which all rows would be sorted, and what is lost at a cut is the prefix that the
rows to its left and right share: it is computed once in each part. Memory is that of one part, whatever the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchkv.token_arena import TokenArena, take_scattered
from batchkv.trie import lexicographic_order

Int64Array = npt.NDArray[np.int64]

_SAMPLE_PER_PART = 64  # the largest part is then hardly ever more than half as large again as the mean
_BLOCK_TOKENS = 1 << 19  # of rows that are compared with the splitters at once


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Which rows are planned together. Iterating gives the row numbers of each part, int64, ascending.

    Attributes:
        count: how many parts there are.
        of_row: int32 [rows], which part each row is in; -1 for rows in none.
    """

    count: int
    of_row: npt.NDArray[np.int32]

    def __iter__(self) -> Iterator[Int64Array]:
        return (np.flatnonzero(self.of_row == number) for number in range(self.count))


def partition(
    arena: TokenArena,
    group: npt.NDArray[np.int32],
    outputs: Int64Array,
    *,
    max_outputs: int,
    max_tokens: int,
    after_block: Callable[[], None] = lambda: None,
) -> Parts:
    """Splits a job.

    Args:
        arena: the prompts; rows without tokens are in no part.
        group: int32 [rows], rows of different groups share nothing.
        outputs: int64 [rows], how many outputs each row has.
        max_outputs, max_tokens: about as many a part has at most.
        after_block: called when some of the arena has been read that is not needed for a while.
    """
    has_tokens = arena.lengths > 0
    num_outputs, num_tokens = int(outputs.sum(where=has_tokens)), int(arena.lengths.sum())
    num_parts = max(-(-num_outputs // max_outputs), -(-num_tokens // max_tokens))
    place = np.where(has_tokens, np.int32(0), np.int32(-1))
    if num_parts <= 1:
        return Parts(num_parts, place)
    splitters = _splitters(arena, group, 2 * num_parts, after_block)
    num_rows = np.zeros(len(splitters) + 1, np.int64)  # at each place
    sizes = np.zeros((len(splitters) + 1, 2), np.int64)  # outputs and tokens there
    for block in _blocks(arena):
        place[block] = _places(arena, group, block, splitters)
        np.add.at(num_rows, place[block], 1)
        np.add.at(sizes, place[block], np.stack([outputs[block], arena.lengths[block]], axis=1))
        after_block()
    return _parts_of_places(place, num_rows, sizes, np.array([max_outputs, max_tokens]))


def _parts_of_places(
    place: npt.NDArray[np.int32], num_rows: Int64Array, sizes: Int64Array, limits: Int64Array
) -> Parts:
    """Joins places that follow each other as long as they are few together; rows that are too many at one place (the
    same prompt over and over, so that no splitter lies between them) are cut.

    Args:
        place: int32 [rows], -1 for rows in none.
        num_rows: int64 [places], rows at each.
        sizes: int64 [places, 2], outputs and tokens at each.
        limits: int64 [2], of both.
    """
    count, held = 0, limits  # in the last part
    first_part = np.full(len(sizes) + 1, -1, np.int32)  # of each place; the last one is that of rows in none
    pieces = np.minimum(num_rows, (sizes // (2 * limits)).max(axis=1) + 1)
    for number in np.flatnonzero(num_rows).tolist():
        held = held + sizes[number]
        if (held > limits).any():
            count, held = count + int(pieces[number]), sizes[number]
        first_part[number] = count - pieces[number]
    cut = {number: np.flatnonzero(place == number) for number in np.flatnonzero(pieces > 1).tolist()}
    part = first_part[place]
    for number, rows in cut.items():
        part[rows] += (np.arange(len(rows)) * pieces[number] // len(rows)).astype(np.int32)
    return Parts(count, part)


def _splitters(
    arena: TokenArena,
    group: npt.NDArray[np.int32],
    count: int,
    after_piece: Callable[[], None],
) -> Int64Array:
    """Rows whose prompts cut the sorted job into `count` parts of about the same size."""
    drawn = np.random.default_rng(0).choice(
        arena.num_rows, min(count * _SAMPLE_PER_PART, arena.num_rows), replace=False
    )
    drawn = drawn[arena.lengths[drawn] > 0]
    sample = take_scattered(arena, drawn, after_piece)
    order = lexicographic_order(sample, group[drawn].astype(np.int64))
    at = np.linspace(0, len(drawn), count, endpoint=False).astype(np.int64)[1:]
    splitters: Int64Array = drawn[order[at]]
    return splitters


def _blocks(arena: TokenArena) -> Iterator[Int64Array]:
    """Consecutive rows that have tokens, about `_BLOCK_TOKENS` together."""
    mean = max(int(arena.lengths.sum()) // max(arena.num_rows, 1), 1)
    size = max(_BLOCK_TOKENS // mean, 1)
    for start in range(0, arena.num_rows, size):
        yield start + np.flatnonzero(arena.lengths[start : start + size])


def _places(
    arena: TokenArena, group: npt.NDArray[np.int32], rows: Int64Array, splitters: Int64Array
) -> npt.NDArray[np.int32]:
    """int32 [rows]: how many of the splitters are no greater than each row."""
    both = np.concatenate([splitters, rows])  # splitters first: equal rows come after them
    order = lexicographic_order(arena.take(both), group[both].astype(np.int64))
    places = np.empty(len(both), np.int32)
    places[order] = np.cumsum(order < len(splitters))
    return places[len(splitters) :]
