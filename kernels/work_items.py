"""What the Triton kernels do in one step: planned once on the host, the same for all layers of a group.

Numbers only. The keys that several rows share are segments of the step's page tables (`shared_segments`); a segment is
cut into items of at most BLOCK_M rows (queries x heads) and a bounded run of keys. Items over the same keys stand side
by side, so that what the first of them reads from memory the others find in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchkv.kernels.shared_segments import SharedSegments, find_shared_segments, reduce_over, repeat
from batchkv.kernels.tiles import Tile
from batchkv.step import AttentionBatch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

ITEM_FIELDS = 8
Q_START, Q_LEN, PAGE_START, K_LO, K_UNMASKED, K_HI = range(6)  # the first of them
_DIRECT = -1  # in place of a state: the item's result is the final one
_LEAST_KEYS = 256  # items are not cut shorter to keep a device busy


@dataclass(frozen=True, slots=True)
class WorkItems:
    """The work of one step. T tokens.

    Attributes:
        items: for each tile int32 [items, 8]: q_start, q_len (tokens of the step), page_start (where in `pages` the
            page of the first key stands), k_lo, k_unmasked, k_hi (key positions; from k_unmasked on, which is whole
            tiles after k_lo, not every query sees every key), state (of its first token; -1 where it is the only item
            of all its tokens), 0.
        pages: int32, the pages of every segment.
        positions: int32 [T], absolute position of each token.
        merged_tokens: int32, the tokens whose result is merged.
        first_state: int32 [merged_tokens + 1], where their states begin in `states`.
        states: int32, in the order of the key positions they cover.
        num_states: states that the items write.
        slots: int32 [T], where keys and values of the step are stored.
        copies: int32 [copies, 3] of (src page, dst page, number of slots).
        copy_rounds: int32 [rounds + 1], copies `[copy_rounds[i], copy_rounds[i + 1])` do not depend on each other.
    """

    items: tuple[Int32Array, ...]
    pages: Int32Array
    positions: Int32Array
    merged_tokens: Int32Array
    first_state: Int32Array
    states: Int32Array
    num_states: int
    slots: Int32Array
    copies: Int32Array
    copy_rounds: Int32Array

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the items of a step read, in keys (and as many values) per KV head.

    Attributes:
        from_memory: keys, each run of neighbouring items over the same keys counted once.
        loaded: keys, counted for every item: those of later neighbours come from the cache.
    """

    from_memory: int
    loaded: int


def plan_work(batch: AttentionBatch, tiles: tuple[Tile, ...], heads: int, items_wanted: int = 1) -> WorkItems:
    """The items of a step.

    Args:
        batch: the step, as one group of layers sees it.
        tiles: by ascending `block_m`; each item goes to the smallest that holds its segment's queries.
        heads: query heads in one item, at most the smallest `block_m`.
        items_wanted: keys are cut into shorter runs, down to 256, until there are so many items.
    """
    segments = find_shared_segments(batch)
    positions = batch.query_positions
    tile = np.searchsorted([t.block_m // heads for t in tiles[:-1]], segments.q_hi - segments.q_lo)
    queries = np.array([t.block_m // heads for t in tiles])[tile]
    keys = _keys_per_item(segments, tile, tiles, queries, items_wanted)

    source, k_lo, k_hi = _cut_keys(segments, keys)
    blocks = -(-(segments.q_hi - segments.q_lo) // queries)
    piece, block = repeat(blocks[source])
    source, k_lo, k_hi = source[piece], k_lo[piece], k_hi[piece]
    q_lo = segments.q_lo[source] + block * queries[source]
    q_hi = np.minimum(segments.q_hi[source], q_lo + queries[source])
    lowest, highest = (reduce_over(ufunc, positions, q_lo, q_hi) for ufunc in (np.minimum, np.maximum))
    k_hi = np.minimum(k_hi, highest + 1)
    if batch.window is not None:
        k_lo = np.maximum(k_lo, lowest - batch.window + 1)
    seen = np.flatnonzero(k_lo < k_hi)
    source, q_lo, q_hi, k_lo, k_hi, lowest = (a[seen] for a in (source, q_lo, q_hi, k_lo, k_hi, lowest))

    block_n = np.array([t.block_n for t in tiles])[tile[source]]
    unmasked = np.where(batch.window is None, np.minimum(k_hi, lowest + 1) - k_lo, 0).clip(0) // block_n * block_n
    pages, first_page = _segment_pages(segments, batch)
    page_start = first_page[source] + k_lo // batch.page_size - segments.k_lo[source] // batch.page_size
    state, merged_tokens, first_state, states, num_states = _plan_states(q_lo, q_hi, batch.num_tokens)
    fields = [q_lo, q_hi - q_lo, page_start, k_lo, k_lo + unmasked, k_hi, state, np.zeros_like(state)]
    items = np.stack(fields, axis=1).astype(np.int32)
    copies = [np.stack([c.src, c.dst, c.num_slots], axis=1) for c in batch.copies if len(c)]
    return WorkItems(
        items=tuple(items[tile[source] == i] for i in range(len(tiles))),
        pages=pages,
        positions=positions.astype(np.int32),
        merged_tokens=merged_tokens,
        first_state=first_state,
        states=states,
        num_states=num_states,
        slots=batch.slots.astype(np.int32),
        copies=np.concatenate([np.zeros((0, 3), np.int32), *copies]).astype(np.int32),
        copy_rounds=np.cumsum([0] + [len(c) for c in copies]).astype(np.int32),
    )


def no_work(num_tiles: int) -> WorkItems:
    """A step in which nobody attends to anything."""
    nothing = np.zeros(0, np.int32)
    return WorkItems(
        items=(np.zeros((0, ITEM_FIELDS), np.int32),) * num_tiles,
        pages=nothing,
        positions=nothing,
        merged_tokens=nothing,
        first_state=np.zeros(1, np.int32),
        states=nothing,
        num_states=0,
        slots=nothing,
        copies=np.zeros((0, 3), np.int32),
        copy_rounds=np.zeros(1, np.int32),
    )


def traffic(work: WorkItems) -> Traffic:
    """What the items of `work` read."""
    from_memory = loaded = 0
    for items in work.items:
        keys = (items[:, K_HI] - items[:, K_LO]).astype(np.int64)
        same = (np.diff(items[:, [PAGE_START, K_LO]], axis=0) == 0).all(
            axis=1
        )  # from the same page and key on as the one before
        first = np.flatnonzero(np.concatenate([[True], ~same])[: len(items)])
        from_memory += int(np.maximum.reduceat(keys, first).sum()) if len(items) else 0
        loaded += int(keys.sum())
    return Traffic(from_memory, loaded)


def _keys_per_item(
    segments: SharedSegments, tile: Int64Array, tiles: tuple[Tile, ...], queries: Int64Array, items_wanted: int
) -> Int64Array:
    """int64 [segments]: how long the runs of keys are. Long runs leave few states to write and merge; short ones give
    more items, which a device needs to be busy."""
    keys = np.array([t.keys_per_item for t in tiles])[tile]
    length = segments.k_hi - segments.k_lo
    blocks = -(-(segments.q_hi - segments.q_lo) // queries)
    while int((-(-length // keys) * blocks).sum()) < items_wanted:
        shorter = np.maximum(keys // 2, _LEAST_KEYS)
        if (shorter >= keys).all():
            break
        keys = shorter
    return keys


def _cut_keys(segments: SharedSegments, keys: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Segment, first and last key of every run, cut at multiples of the run's length."""
    first, last = segments.k_lo // keys, (segments.k_hi - 1) // keys
    source, piece = repeat(last - first + 1)
    start = (first[source] + piece) * keys[source]
    return source, np.maximum(segments.k_lo[source], start), np.minimum(segments.k_hi[source], start + keys[source])


def _segment_pages(segments: SharedSegments, batch: AttentionBatch) -> tuple[Int32Array, Int64Array]:
    """The pages of all segments, one after the other, and where each segment's begin."""
    first, last = segments.k_lo // batch.page_size, (segments.k_hi - 1) // batch.page_size
    source, piece = repeat(last - first + 1)
    pages = batch.page_table[segments.row[source], first[source] + piece]
    counts = last - first + 1
    return pages.astype(np.int32), np.cumsum(counts) - counts


def _plan_states(
    q_lo: Int64Array, q_hi: Int64Array, num_tokens: int
) -> tuple[Int64Array, Int32Array, Int32Array, Int32Array, int]:
    """Where items leave states, and which states each token is merged from.

    Returns:
        int64 [items]: the first state of each item, or -1; then `merged_tokens`, `first_state`, `states`, `num_states`.
    """
    change = np.zeros(num_tokens + 1, np.int64)
    np.add.at(change, q_lo, 1)
    np.subtract.at(change, q_hi, 1)
    items_of_token = np.cumsum(change[:-1])
    is_single = items_of_token == 1
    singles_before = np.concatenate([[0], np.cumsum(is_single)])
    is_direct = singles_before[q_hi] - singles_before[q_lo] == q_hi - q_lo
    counts = np.where(is_direct, 0, q_hi - q_lo)
    num_states = int(counts.sum())
    state = np.where(is_direct, _DIRECT, np.cumsum(counts) - counts)
    item, number = repeat(counts)
    token = q_lo[item] + number
    # items are in ascending order of keys for each token: parents before children, runs of a segment in their order
    states = np.argsort(token, kind="stable")
    merged_tokens, first = np.unique(token[states], return_index=True)
    return (
        state,
        merged_tokens.astype(np.int32),
        np.append(first, num_states).astype(np.int32),
        states.astype(np.int32),
        num_states,
    )
