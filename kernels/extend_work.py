"""The work of a decode step made from that of the step before, where the same rows go on by one token each.

Nothing about the sharing has changed then: every row's last item has one more key, and some rows one more page. This
takes a fraction of the time of `plan_work`, which sees the step as if there had been none before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchkv.kernels.tiles import Tile
from batchkv.kernels.work_items import K_HI, K_LO, K_UNMASKED, PAGE_START, Q_LEN, Q_START, WorkItems
from batchkv.step import AttentionBatch

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step and its work."""

    batch: AttentionBatch
    work: WorkItems


def extend_work(before: PlannedStep, batch: AttentionBatch, tile: Tile) -> WorkItems | None:
    """The work of `batch`, if it is the step after `before` in the decoding of the same rows.

    The last items may grow to twice the tile's `keys_per_item`; then they are to be cut again.

    Args:
        tile: the smallest, which has the items of single rows.

    Returns:
        None if anything but the rows' ends has changed, if an item has grown too long, or behind a window, where all
        ranges move.
    """
    if not _is_next_token_of_same_rows(before.batch, batch):
        return None
    grown = _rows_with_a_new_page(before.batch, batch)
    if grown is None:
        return None
    narrow = before.work.items[0]
    last = _last_items(narrow, before.batch.kv_lens)
    if last is None or (narrow[last, K_HI] - narrow[last, K_LO] >= 2 * tile.keys_per_item).any():
        return None
    narrow = narrow.copy()
    narrow[last, K_HI] += 1
    # a single query sees all keys up to its own
    narrow[last, K_UNMASKED] = narrow[last, K_HI] - (narrow[last, K_HI] - narrow[last, K_LO]) % tile.block_n
    items, pages = (narrow, *before.work.items[1:]), before.work.pages
    if len(grown):
        items, pages = _insert_pages(items, pages, last[grown], batch, grown)
    return replace(
        before.work,
        items=items,
        pages=pages,
        positions=before.work.positions + 1,
        slots=batch.slots.astype(np.int32),
        copies=np.zeros((0, 3), np.int32),
        copy_rounds=np.zeros(1, np.int32),
    )


def _is_next_token_of_same_rows(before: AttentionBatch, batch: AttentionBatch) -> bool:
    return (
        batch.window is None
        and before.window is None
        and not any(len(copies) for copies in batch.copies)
        and batch.num_tokens == before.num_tokens == len(batch.kv_lens) == len(before.kv_lens)
        and np.array_equal(batch.kv_lens, before.kv_lens + 1)
    )


def _rows_with_a_new_page(before: AttentionBatch, batch: AttentionBatch) -> Int64Array | None:
    """The rows whose new token begins a page; None if pages that were there have changed."""
    width = before.page_table.shape[1]
    if batch.page_table.shape[1] < width:
        return None
    row, page = np.nonzero(batch.page_table[:, :width] != before.page_table)
    if (page < -(-before.kv_lens[row] // batch.page_size)).any():
        return None
    return np.flatnonzero(before.kv_lens % batch.page_size == 0)


def _last_items(narrow: npt.NDArray[np.int32], kv_lens: Int64Array) -> Int64Array | None:
    """int64 [R]: the item with each row's last key, which no other row has; None if there is a row without."""
    own = np.flatnonzero(narrow[:, Q_LEN] == 1)
    last = np.full(len(kv_lens), -1)
    last[narrow[own, Q_START]] = own  # items of a row are in the order of their keys, and the last one stays
    if (last < 0).any() or not np.array_equal(narrow[last, K_HI], kv_lens):
        return None
    return last


def _insert_pages(
    items: tuple[npt.NDArray[np.int32], ...],
    pages: npt.NDArray[np.int32],
    last: Int64Array,
    batch: AttentionBatch,
    rows: Int64Array,
) -> tuple[tuple[npt.NDArray[np.int32], ...], npt.NDArray[np.int32]]:
    """With the newest page of each of `rows` behind the pages of its last item; all after them move on."""
    newest = (batch.kv_lens[rows] - 1) // batch.page_size
    item = items[0][last]
    at = item[:, PAGE_START] + newest - item[:, K_LO] // batch.page_size
    order = np.argsort(at)
    moved = []
    for part in items:
        part = part.copy()
        part[:, PAGE_START] += np.searchsorted(at[order], part[:, PAGE_START], side="right").astype(np.int32)
        moved.append(part)
    return tuple(moved), np.insert(pages, at, batch.page_table[rows, newest])
