"""Which pages are free and how often each is held. Knows page ids, not tensors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free. The scheduler never lets this happen."""


class PageAllocator:
    """Page ids `[0, num_pages)` with reference counts. A page is free exactly when nobody holds it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._holders = np.zeros(num_pages, np.int32)
        self._free = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # a stack: the lowest ids go first
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_held(self) -> int:
        return self.num_pages - self._num_free

    def allocate(self, count: int) -> Pages:
        """int32 [count]: pages that now have one holder.

        Raises:
            OutOfPagesError: nothing was taken.
        """
        if count > self._num_free:
            raise OutOfPagesError(f"{count} pages wanted, {self._num_free} of {self.num_pages} free")
        pages: Pages = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self._holders[pages] = 1
        return pages

    def share(self, pages: Pages) -> None:
        """One more holder for each of `pages` (repeats count)."""
        np.add.at(self._holders, pages, 1)

    def release(self, pages: Pages) -> None:
        """One holder less for each of `pages` (repeats count); those without any are free again."""
        np.subtract.at(self._holders, pages, 1)
        free = pages[self._holders[pages] == 0]
        if len(free) > 1:
            free = np.unique(free)
        self._free[self._num_free : self._num_free + len(free)] = free[::-1]
        self._num_free += len(free)

    def holders(self, pages: Pages) -> npt.NDArray[np.int32]:
        """int32 [pages]: how many hold each page."""
        holders: npt.NDArray[np.int32] = self._holders[pages]
        return holders

    def check_integrity(self, held: Pages) -> None:
        """Proves free + held == total.

        Args:
            held: every page once for each of its holders, as the holders list them.

        Raises:
            RuntimeError: names what does not add up.
        """
        free = self._free[: self._num_free]
        if len(np.unique(free)) != len(free):
            raise RuntimeError("a page is on the free list twice")
        expected = np.bincount(held, minlength=self.num_pages)
        if not np.array_equal(expected, self._holders):
            wrong = np.flatnonzero(expected != self._holders)
            raise RuntimeError(f"pages {wrong[:8].tolist()} have other holder counts than the page tables say")
        if not np.array_equal(np.sort(free), np.flatnonzero(self._holders == 0)):
            raise RuntimeError("the free list is not the set of pages without a holder")
