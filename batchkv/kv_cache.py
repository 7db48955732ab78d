"""Page tables of everything that has KV: trie nodes and the samples below them. Numbers only, no tensors.

Pages lie at absolute positions: position `p` of a sequence is slot `p % page_size` of its page `p // page_size`. A fork
holds its parent's pages and copies only the partly filled last one, when it first writes to it:

    parent  ┌────┐┌────┐┌──··┐                  length 10, page size 4
            └────┘└────┘└────┘
              ▲     ▲   copy of 2 slots
    child   ──┴─────┴───┌──xx┐┌x···┐            appends 3 tokens (x)
                        └────┘└────┘

Layers that attend alike (full, or with one window) form a group with its own pages. Behind a window pages are given
back as the sequence grows; the table keeps their stale ids, so that rows which came from one prefix stay recognizable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchkv.page_allocator import PageAllocator, Pages

Handles = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Copy-on-write: the first `num_slots` slots of page `src` go to page `dst`. int32 [copies] each."""

    src: Pages
    dst: Pages
    num_slots: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.src)


def in_few_rounds(copies: Sequence[PageCopies]) -> tuple[PageCopies, ...]:
    """Copies of one round are made at once: none of them reads what another one of it writes."""
    rounds: list[list[PageCopies]] = []
    written: set[int] = set()
    for some in copies:
        if len(some) == 0:
            continue
        if not rounds or not written.isdisjoint(some.src.tolist()):
            rounds.append([])
            written = set()
        rounds[-1].append(some)
        written.update(some.dst.tolist())
    return tuple(
        PageCopies(*(np.concatenate([getattr(c, name) for c in some]) for name in ("src", "dst", "num_slots")))
        for some in rounds
    )


@dataclass(frozen=True, slots=True)
class Appended:
    """Where new tokens go, per group.

    Attributes:
        slots: int64 [tokens] per group, `page * page_size + offset` of each new token, sequence by sequence.
        copies: page copies per group, to be made after the new keys of their sources are stored.
    """

    slots: tuple[npt.NDArray[np.int64], ...]
    copies: tuple[PageCopies, ...]


class _Group:
    """Page tables of one group of layers. `first_page` is the first page still held by each sequence."""

    def __init__(self, num_pages: int, window: int | None, capacity: int, width: int) -> None:
        self.window = window
        self.allocator = PageAllocator(num_pages)
        self.page_table = np.full((capacity, width), -1, np.int32)
        self.first_page = np.zeros(capacity, np.int64)

    def held(self, handle: int, num_pages: int) -> Pages:
        pages: Pages = self.page_table[handle, self.first_page[handle] : num_pages]
        return pages


class KVCache:
    """Sequences by handle. `fork`, `append`, `truncate`, `trim` and `free` are all there is.

    Args:
        num_pages: pages of each group.
        windows: attention window of each group in tokens, None for full attention.
        page_size: tokens per page.
    """

    def __init__(self, num_pages: tuple[int, ...], windows: tuple[int | None, ...], page_size: int) -> None:
        self.page_size = page_size
        self._lengths = np.zeros(8, np.int64)
        self._live = np.zeros(8, bool)
        self._groups = [_Group(n, w, capacity=8, width=8) for n, w in zip(num_pages, windows, strict=True)]

    # -- what is there

    @property
    def num_sequences(self) -> int:
        return int(self._live.sum())

    @property
    def num_free(self) -> npt.NDArray[np.int64]:
        """int64 [groups]: free pages."""
        return np.array([group.allocator.num_free for group in self._groups])

    @property
    def num_held(self) -> npt.NDArray[np.int64]:
        """int64 [groups]: pages held by at least one sequence."""
        return np.array([group.allocator.num_held for group in self._groups])

    def length(self, handle: int) -> int:
        """Tokens of a sequence."""
        return int(self._lengths[handle])

    def lengths(self, handles: Handles) -> npt.NDArray[np.int64]:
        """int64 [handles]: tokens of each sequence."""
        return self._lengths[handles]

    def page_table(self, group: int, handles: Handles) -> npt.NDArray[np.int32]:
        """int32 [handles, pages of the longest]: page ids of each sequence; entries past its length are undefined."""
        width = self._num_pages(int(self._lengths[handles].max(initial=0)))
        table: npt.NDArray[np.int32] = self._groups[group].page_table[handles, :width]
        return table

    def first_pages(self, group: int, handles: Handles) -> npt.NDArray[np.int64]:
        """int64 [handles]: number of the first page that each sequence still holds."""
        return self._groups[group].first_page[handles]

    def room(self, handle: int) -> int:
        """Tokens that can be appended to this sequence before a group runs out of pages."""
        one = np.array([handle])
        rest_of_page = int(-self._lengths[handle] % self.page_size)
        rooms = []
        for group in self._groups:
            free = group.allocator.num_free - int(self._writes_shared(group, one, np.ones(1, np.int64))[0])
            rooms.append(rest_of_page + free * self.page_size if free >= 0 else 0)
        return min(rooms)

    # -- what can be done

    def create(self) -> int:
        """A new, empty sequence."""
        return self._new_handle()

    def fork(self, parent: int, length: int | None = None) -> int:
        """A new sequence with the first `length` tokens of `parent`, by default all; takes no page.

        Behind windows the pages of a shorter prefix may have been given back, so there it has to be all.
        """
        child = self._new_handle()
        self._lengths[child] = self._lengths[parent] if length is None else length
        num_pages = self._num_pages(int(self._lengths[child]))
        for group in self._groups:
            group.page_table[child] = group.page_table[parent]
            group.first_page[child] = group.first_page[parent]
            group.allocator.share(group.held(child, num_pages))
        return child

    def append(self, handles: Handles, counts: npt.NDArray[np.int64]) -> Appended:
        """Room for `counts[i]` more tokens in sequence `handles[i]` (distinct handles).

        Nothing that is freed from here until the step has run may be reused: callers free between steps.

        Raises:
            OutOfPagesError: nothing was changed in the group that ran out.
        """
        fresh = self._fresh_pages(handles, counts)
        old = self._lengths[handles]
        self._widen(self._num_pages(int((old + counts).max(initial=0))))
        copies = tuple(self._append_pages(group, handles, counts, fresh) for group in self._groups)
        self._lengths[handles] = old + counts
        sequence = np.repeat(np.arange(len(handles)), counts)
        within = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
        page, offset = np.divmod(old[sequence] + within, self.page_size)
        slots = tuple(
            g.page_table[handles[sequence], page].astype(np.int64) * self.page_size + offset for g in self._groups
        )
        return Appended(slots, copies)

    def truncate(self, handles: Handles, lengths: npt.NDArray[np.int64]) -> None:
        """Takes back tokens that were appended and not trimmed for: sequence `handles[i]` has `lengths[i]` left.

        Pages that only they were in are given back.
        """
        old = self._num_pages_of(self._lengths[handles])
        new = self._num_pages_of(lengths)
        for i in np.flatnonzero(new < old).tolist():
            for group in self._groups:
                group.allocator.release(group.page_table[handles[i], new[i] : old[i]])
        self._lengths[handles] = lengths

    def trim(self, handles: Handles) -> None:
        """Gives back the pages that no later token of these sequences can see through a window."""
        for group in self._groups:
            if group.window is None:
                continue
            first_seen = np.maximum(self._lengths[handles] - group.window + 1, 0)
            keep_from = first_seen // self.page_size
            for i in np.flatnonzero(keep_from > group.first_page[handles]):
                handle = int(handles[i])
                group.allocator.release(group.held(handle, int(keep_from[i])))
                group.first_page[handle] = keep_from[i]

    def free(self, handle: int) -> None:
        """Drops the sequence; pages that nobody else holds are free again."""
        num_pages = self._num_pages(int(self._lengths[handle]))
        for group in self._groups:
            group.allocator.release(group.held(handle, num_pages))
        self._live[handle] = False

    def check_integrity(self) -> None:
        """Proves that free + held == total in every group. Raises RuntimeError with what does not add up."""
        handles = np.flatnonzero(self._live)
        for group in self._groups:
            tables = [group.held(h, self._num_pages(int(self._lengths[h]))) for h in handles.tolist()]
            group.allocator.check_integrity(np.concatenate(tables) if tables else np.zeros(0, np.int32))

    # -- how

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _num_pages_of(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return -(-lengths // self.page_size)

    def _fresh_pages(self, handles: Handles, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64 [handles]: pages past the present last one."""
        old = self._lengths[handles]
        return self._num_pages_of(old + counts) - self._num_pages_of(old)

    def _writes_shared(self, group: _Group, handles: Handles, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """bool [handles]: whether the first new token falls into a page that others hold too.

        Where all holders of a page write at once, all but the last of them copy it.
        """
        old = self._lengths[handles]
        partly = np.flatnonzero((old % self.page_size > 0) & (counts > 0))
        shared = np.zeros(len(handles), bool)
        if len(partly) == 0:
            return shared
        last = group.page_table[handles[partly], old[partly] // self.page_size]
        by_page = np.argsort(last, kind="stable")
        first_of_page = np.searchsorted(last[by_page], last[by_page])
        writers_before = np.empty(len(last), np.int64)
        writers_before[by_page] = np.arange(len(last)) - first_of_page
        shared[partly] = group.allocator.holders(last) - writers_before > 1
        return shared

    def _append_pages(
        self, group: _Group, handles: Handles, counts: npt.NDArray[np.int64], fresh: npt.NDArray[np.int64]
    ) -> PageCopies:
        copied = self._writes_shared(group, handles, counts)
        taken = group.allocator.allocate(int(fresh.sum() + copied.sum()))
        old = self._lengths[handles]

        writers, last = handles[copied], old[copied] // self.page_size
        src = group.page_table[writers, last]
        dst, new = taken[: len(writers)], taken[len(writers) :]
        group.page_table[writers, last] = dst
        group.allocator.release(src)  # others hold it, so it is not freed here

        sequence = np.repeat(np.arange(len(handles)), fresh)
        within = np.arange(len(new)) - np.repeat(np.cumsum(fresh) - fresh, fresh)
        first_new = -(-old // self.page_size)
        group.page_table[handles[sequence], first_new[sequence] + within] = new
        return PageCopies(src, dst, (old[copied] % self.page_size).astype(np.int32))

    def _new_handle(self) -> int:
        free = np.flatnonzero(~self._live)
        if len(free) == 0:
            self._grow(2 * len(self._live))
            return self._new_handle()
        handle = int(free[0])
        self._live[handle] = True
        self._lengths[handle] = 0
        for group in self._groups:
            group.first_page[handle] = 0
        return handle

    def _grow(self, capacity: int) -> None:
        more = capacity - len(self._live)
        self._live = np.pad(self._live, (0, more))
        self._lengths = np.pad(self._lengths, (0, more))
        for group in self._groups:
            group.page_table = np.pad(group.page_table, ((0, more), (0, 0)), constant_values=-1)
            group.first_page = np.pad(group.first_page, (0, more))

    def _widen(self, width: int) -> None:
        for group in self._groups:
            more = width - group.page_table.shape[1]
            if more > 0:
                more = max(more, group.page_table.shape[1])
                group.page_table = np.pad(group.page_table, ((0, 0), (0, more)), constant_values=-1)
