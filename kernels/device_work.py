"""The work of a step as the kernels read it: one block of int32 on the device, filled by one transfer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from batchkv.kernels.tiles import Tile
from batchkv.kernels.work_items import ITEM_FIELDS, WorkItems

Int32Array = npt.NDArray[np.int32]

_ALIGNMENT = 4  # int32: arrays begin at multiples of 16 bytes, which Triton specializes pointers for


@dataclass(frozen=True, slots=True)
class WorkSizes:
    """Room for the arrays of a `WorkItems`, in entries."""

    items: tuple[int, ...]
    pages: int
    tokens: int
    merged_tokens: int
    states: int
    copies: int
    copy_rounds: int

    @classmethod
    def of(cls, work: WorkItems) -> WorkSizes:
        """Just enough for this one."""
        return cls(
            items=tuple(len(items) for items in work.items),
            pages=len(work.pages),
            tokens=work.num_tokens,
            merged_tokens=len(work.merged_tokens),
            states=work.num_states,
            copies=len(work.copies),
            copy_rounds=len(work.copy_rounds) - 1,
        )

    def hold(self, other: WorkSizes) -> bool:
        """Whether work of the `other` sizes fits into these."""
        return all(mine >= theirs for mine, theirs in zip(self._flat(), other._flat(), strict=True))

    @property
    def lengths(self) -> tuple[int, ...]:
        """int32 entries of each array, in the order of `_arrays`."""
        return (
            len(self.items) + 1,
            *(n * ITEM_FIELDS for n in self.items),
            self.pages,
            self.tokens,
            self.merged_tokens,
            self.merged_tokens + 1,
            self.states,
            self.tokens,
            self.copies * 3,
            self.copy_rounds + 1,
        )

    def _flat(self) -> tuple[int, ...]:
        return (*self.items, *self.lengths[len(self.items) + 1 :])


def decode_sizes(
    rows: int, num_pages: int, page_size: int, tiles: tuple[Tile, ...], heads: int, items_wanted: int
) -> WorkSizes:
    """Room for the usual decode steps of up to `rows` rows over a pool of pages: those of a graph.

    A trie of so many rows has fewer than twice as many segments, and few that many rows share. Their keys, together at
    most the pool, are cut into runs; shorter ones only until there are `items_wanted`. The few steps that need more
    room, as with deep tries, run without a graph.

    Args:
        heads, items_wanted: as `plan_work` takes them.
    """
    queries = [tile.block_m // heads for tile in tiles]
    segments = [2 * rows, *(4 * rows // q for q in queries[:-1])]
    runs = [num_pages * page_size // tile.keys_per_item + 2 * items_wanted for tile in tiles]
    return WorkSizes(
        items=tuple(s + r for s, r in zip(segments, runs, strict=True)),
        pages=num_pages,
        tokens=rows,
        merged_tokens=rows,
        states=8 * rows + runs[0] + 2 * items_wanted * min(rows, queries[-1]),
        copies=rows,
        copy_rounds=1,
    )


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A `WorkItems` on a device; the kernels take views of one block. int32 each.

    Attributes:
        sizes: room there is. What is used of it says `counts`, except that tokens past the used ones have slot -1.
        block: all of them.
        counts: [tiles + 1], items for each tile, then merged tokens.
    """

    sizes: WorkSizes
    block: torch.Tensor
    counts: torch.Tensor
    items: tuple[torch.Tensor, ...]
    pages: torch.Tensor
    positions: torch.Tensor
    merged_tokens: torch.Tensor
    first_state: torch.Tensor
    states: torch.Tensor
    slots: torch.Tensor
    copies: torch.Tensor
    copy_rounds: torch.Tensor

    @classmethod
    def allocate(cls, sizes: WorkSizes, device: torch.device) -> DeviceWork:
        """Room that `load` fills."""
        bounds = _bounds(sizes)
        block = torch.empty(bounds[-1], dtype=torch.int32, device=device)
        views = [block[lo : lo + n] for lo, n in zip(bounds, sizes.lengths, strict=False)]
        tiles = len(sizes.items)
        return cls(sizes, block, views[0], tuple(views[1 : 1 + tiles]), *views[1 + tiles :])

    def load(self, work: WorkItems) -> None:
        """Takes the work of a step. On a GPU the transfer is queued behind what reads the one before.

        Raises:
            ValueError: there is no room for it.
        """
        if not self.sizes.hold(WorkSizes.of(work)):
            raise ValueError(f"work of sizes {WorkSizes.of(work)} does not fit {self.sizes}")
        packed = torch.from_numpy(_pack(work, self.sizes))
        if self.block.is_cuda:
            packed = packed.pin_memory()
        self.block.copy_(packed, non_blocking=True)


def _bounds(sizes: WorkSizes) -> list[int]:
    """Where each array begins, and the end."""
    aligned = [-(-n // _ALIGNMENT) * _ALIGNMENT for n in sizes.lengths]
    return [int(bound) for bound in np.cumsum([0, *aligned])]


def _pack(work: WorkItems, sizes: WorkSizes) -> Int32Array:
    counts = np.array([*(len(items) for items in work.items), len(work.merged_tokens)], np.int32)
    arrays = (
        counts,
        *(items.ravel() for items in work.items),
        work.pages,
        work.positions,
        work.merged_tokens,
        work.first_state,
        work.states,
        work.slots,
        work.copies.ravel(),
        work.copy_rounds,
    )
    bounds = _bounds(sizes)
    packed = np.zeros(bounds[-1], np.int32)
    for (lo, _), length, array in zip(pairwise(bounds), sizes.lengths, arrays, strict=True):
        packed[lo : lo + len(array)] = array
        if array is work.slots:
            packed[lo + len(array) : lo + length] = -1
        if array is work.copy_rounds:
            packed[lo + len(array) : lo + length] = array[-1]  # further rounds are empty
    return packed
