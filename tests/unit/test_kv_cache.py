"""Every sequence reads back exactly its own tokens, whoever it shares pages with, and no page is lost.

The cache only says where keys go. Here that is carried out on a shadow of the pages, in which a slot holds the label of
the token whose key would lie there, and compared with a model in which pages are plain objects.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchkv.kv_cache import Appended, KVCache
from batchkv.page_allocator import OutOfPagesError

Windows = tuple[int | None, ...]


class Shadow:
    """What lies in the slots of each group: the label of a token, or -1."""

    def __init__(self, num_pages: tuple[int, ...], page_size: int) -> None:
        self.page_size = page_size
        self.slots = [np.full(n * page_size, -1, np.int64) for n in num_pages]

    def run_step(self, stored: list[tuple[Appended, np.ndarray]]) -> None:
        """Stores all new keys, then makes the copies in the order of the appends."""
        for appended, labels in stored:
            for slots, where in zip(self.slots, appended.slots, strict=True):
                slots[where] = labels
        for appended, _ in stored:
            for slots, copies in zip(self.slots, appended.copies, strict=True):
                pages = slots.reshape(-1, self.page_size)
                before = pages[copies.src].copy()
                for i, n in enumerate(copies.num_slots.tolist()):
                    pages[copies.dst[i], :n] = before[i, :n]

    def read(self, cache: KVCache, group: int, handle: int, first: int) -> list[int]:
        """Labels at the positions `[first, length)` of a sequence."""
        handles = np.array([handle])
        page, offset = np.divmod(np.arange(first, int(cache.lengths(handles)[0])), self.page_size)
        table = cache.page_table(group, handles)[0]
        return self.slots[group][table[page].astype(np.int64) * self.page_size + offset].tolist()


@dataclass(eq=False)
class Page:
    """A page of the model: it is whatever the sequences that hold it agree it is."""

    holders: int = 1


@dataclass
class Sequence:
    """A sequence of the model: its labels, and per group the pages it holds by number."""

    labels: list[int] = field(default_factory=list)
    pages: list[dict[int, Page]] = field(default_factory=list)


class Cache(RuleBasedStateMachine):
    """Any mix of create, fork, append, trim and free; several appends and forks can make up one step."""

    @initialize(
        windows=st.sampled_from([(None,), (3,), (1,), (8,), (None, 5), (None, 1, 7), (2, 11)]),
        page_size=st.integers(1, 5),
        num_pages=st.lists(st.integers(2, 40), min_size=3, max_size=3),
    )
    def start(self, windows: Windows, page_size: int, num_pages: list[int]) -> None:
        self.windows, self.page_size = windows, page_size
        self.num_pages = tuple(num_pages[: len(windows)])
        self.cache = KVCache(self.num_pages, windows, page_size)
        self.shadow = Shadow(self.num_pages, page_size)
        self.sequences: dict[int, Sequence] = {}
        self.step: list[tuple[Appended, np.ndarray]] = []  # appended, but not stored yet
        self.labels = 0

    # -- rules

    @rule()
    def create(self) -> None:
        handle = self.cache.create()
        assert handle not in self.sequences
        self.sequences[handle] = Sequence(pages=[{} for _ in self.windows])

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 30), times=st.integers(1, 4))
    def fork(self, pick: int, times: int) -> None:
        parent = self._pick(pick)
        for _ in range(times):
            child = self.cache.fork(parent)
            assert child not in self.sequences
            of = self.sequences[parent]
            self.sequences[child] = Sequence(list(of.labels), [dict(pages) for pages in of.pages])
            for pages in of.pages:
                for page in pages.values():
                    page.holders += 1

    @precondition(lambda self: self.sequences)
    @rule(picks=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=6))
    def append(self, picks: list[tuple[int, int]]) -> None:
        counts = {self._pick(pick): count for pick, count in picks}
        self._append(counts)

    @precondition(lambda self: self.sequences)
    @rule()
    def append_one_to_each(self) -> None:
        self._append(dict.fromkeys(self.sequences, 1))

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 30))
    def append_all_there_is_room_for(self, pick: int) -> None:
        handle = self._pick(pick)
        room = self.cache.room(handle)
        assert self._fits({handle: room})
        assert not self._fits({handle: room + 1})
        self._append({handle: room + 1})
        self._append({handle: room})

    @rule()
    def run_step(self) -> None:
        self.shadow.run_step(self.step)
        self.step = []

    @precondition(lambda self: self.sequences)
    @rule(picks=st.sets(st.integers(0, 30), min_size=1, max_size=5))
    def trim(self, picks: set[int]) -> None:
        self.run_step()
        handles = {self._pick(pick) for pick in picks}
        self.cache.trim(np.array(sorted(handles)))
        for handle in handles:
            sequence = self.sequences[handle]
            for pages, window in zip(sequence.pages, self.windows, strict=True):
                if window is not None:
                    first_seen = max(len(sequence.labels) - window + 1, 0)
                    self._release(pages, {n for n in pages if (n + 1) * self.page_size <= first_seen})

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 30))
    def free(self, pick: int) -> None:
        self.run_step()
        handle = self._pick(pick)
        self.cache.free(handle)
        for pages in self.sequences.pop(handle).pages:
            self._release(pages, set(pages))

    # -- what always holds

    @invariant()
    def nothing_is_lost(self) -> None:
        self.cache.check_integrity()
        held = [self._num_held(group) for group in range(len(self.windows))]
        assert self.cache.num_held.tolist() == held
        assert self.cache.num_free.tolist() == [n - h for n, h in zip(self.num_pages, held, strict=True)]
        assert self.cache.num_sequences == len(self.sequences)

    @invariant()
    def sequences_share_the_pages_they_should(self) -> None:
        for group in range(len(self.windows)):
            ids: dict[Page, int] = {}
            for handle, sequence in self.sequences.items():
                table = self.cache.page_table(group, np.array([handle]))[0]
                for number, page in sequence.pages[group].items():
                    assert ids.setdefault(page, int(table[number])) == table[number]
            assert len(set(ids.values())) == len(ids)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        shadow = copy.deepcopy(self.shadow)
        shadow.run_step(self.step)
        for handle, sequence in self.sequences.items():
            assert self.cache.lengths(np.array([handle])).tolist() == [len(sequence.labels)]
            for group, pages in enumerate(sequence.pages):
                first = min(pages, default=-(-len(sequence.labels) // self.page_size)) * self.page_size
                assert shadow.read(self.cache, group, handle, first) == sequence.labels[first:]
                window = self.windows[group]
                assert first <= (0 if window is None else max(len(sequence.labels) - window + 1, 0))

    # -- how

    def _pick(self, pick: int) -> int:
        live = sorted(self.sequences)
        return live[pick % len(live)]

    def _num_held(self, group: int) -> int:
        return len({page for sequence in self.sequences.values() for page in sequence.pages[group].values()})

    def _fits(self, counts: dict[int, int]) -> bool:
        return self._first_group_that_runs_out(counts) is None

    def _first_group_that_runs_out(self, counts: dict[int, int]) -> int | None:
        for group, num_pages in enumerate(self.num_pages):
            writers: dict[Page, int] = {}
            needed = 0
            for handle, count in counts.items():
                sequence = self.sequences[handle]
                old = len(sequence.labels)
                needed += -(-(old + count) // self.page_size) - -(-old // self.page_size)
                if old % self.page_size and count:
                    last = sequence.pages[group][old // self.page_size]
                    writers[last] = writers.get(last, 0) + 1
            # all who write to a shared page copy it, but one can stay if nobody else is left
            needed += sum(n - (n == page.holders) for page, n in writers.items())
            if needed > num_pages - self._num_held(group):
                return group
        return None

    def _append(self, counts: dict[int, int]) -> None:
        handles, numbers = np.array(list(counts)), np.array(list(counts.values()))
        out = self._first_group_that_runs_out(counts)
        if out is not None:
            broken = copy.deepcopy(self.cache)
            with pytest.raises(OutOfPagesError):
                broken.append(handles, numbers)
            assert broken.num_free[out] == self.cache.num_free[out]
            return
        appended = self.cache.append(handles, numbers)
        labels = np.arange(self.labels, self.labels + numbers.sum())
        self.labels += len(labels)
        self.step.append((appended, labels))
        first = 0
        for handle, count in counts.items():
            self._append_to(self.sequences[handle], labels[first : first + count].tolist())
            first += count

    def _append_to(self, sequence: Sequence, labels: list[int]) -> None:
        old = len(sequence.labels)
        sequence.labels += labels
        for pages in sequence.pages:
            number = old // self.page_size
            if labels and old % self.page_size and pages[number].holders > 1:
                self._release(pages, {number})
            for n in range(number, -(-len(sequence.labels) // self.page_size)):
                pages.setdefault(n, Page())

    def _release(self, pages: dict[int, Page], numbers: set[int]) -> None:
        for number in numbers:
            pages.pop(number).holders -= 1


TestAnyMixOfOperations = Cache.TestCase
TestAnyMixOfOperations.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)


# -- single promises, for a reader


def append(cache: KVCache, **counts: int) -> Appended:
    """Appends to handles given as `_3=5`."""
    return cache.append(np.array([int(name[1:]) for name in counts]), np.array(list(counts.values())))


def test_a_fork_takes_no_page_and_copies_the_partly_filled_one_when_it_writes() -> None:
    cache = KVCache((8,), (None,), page_size=4)
    parent = cache.create()
    append(cache, _0=10)
    child = cache.fork(parent)
    assert cache.num_held.tolist() == [3]
    appended = append(cache, _1=3)
    assert cache.num_held.tolist() == [5]
    (copies,) = appended.copies
    assert (copies.src.tolist(), copies.num_slots.tolist()) == ([2], [2])
    new_page = int(copies.dst[0])
    assert appended.slots[0].tolist()[:2] == [new_page * 4 + 2, new_page * 4 + 3]
    table = cache.page_table(0, np.array([parent, child]))
    assert (table[0, :2] == table[1, :2]).all()
    assert table[0, 2] != table[1, 2]


def test_a_fork_at_the_end_of_a_page_copies_nothing() -> None:
    cache = KVCache((8,), (None,), page_size=4)
    cache.create()
    append(cache, _0=8)
    cache.fork(0)
    assert len(append(cache, _1=1).copies[0]) == 0
    assert cache.num_held.tolist() == [3]


def test_the_last_of_all_holders_that_write_at_once_keeps_the_page() -> None:
    cache = KVCache((4,), (None,), page_size=4)
    cache.create()
    append(cache, _0=2)
    cache.fork(0)
    cache.fork(0)
    (copies,) = append(cache, _0=1, _1=1, _2=1).copies
    assert (len(copies), cache.num_held.tolist()) == (2, [3])
    cache.check_integrity()


def test_behind_a_window_pages_go_back_and_the_table_keeps_their_ids() -> None:
    cache = KVCache((8, 8), (None, 4), page_size=4)
    cache.create()
    append(cache, _0=12)
    before = cache.page_table(1, np.array([0])).tolist()
    cache.trim(np.array([0]))
    assert cache.num_held.tolist() == [3, 1]  # the next token sees positions 9 to 11
    assert cache.page_table(1, np.array([0])).tolist() == before


def test_a_fork_can_outlive_the_sequence_it_came_from() -> None:
    cache = KVCache((3,), (None,), page_size=4)
    cache.create()
    append(cache, _0=6)
    cache.fork(0)
    cache.free(0)
    assert cache.num_held.tolist() == [2]
    assert len(append(cache, _1=1).copies[0]) == 0  # nobody else holds the page any more
    cache.free(1)
    assert (cache.num_held.tolist(), cache.num_sequences) == ([0], 0)


def test_room_counts_the_rest_of_the_page_and_the_copy_of_a_shared_one() -> None:
    cache = KVCache((4,), (None,), page_size=4)
    cache.create()
    assert cache.room(0) == 16
    append(cache, _0=5)
    assert cache.room(0) == 3 + 8
    cache.fork(0)
    assert cache.room(0) == 3 + 4  # one page goes for the copy
    cache.fork(0)
    append(cache, _1=7)
    assert cache.room(0) == 0


def test_appending_more_than_fits_is_an_error_and_takes_nothing() -> None:
    cache = KVCache((2,), (None,), page_size=4)
    cache.create()
    append(cache, _0=5)
    with pytest.raises(OutOfPagesError, match="1 pages wanted, 0 of 2 free"):
        append(cache, _0=4)
    assert cache.lengths(np.array([0])).tolist() == [5]
    cache.check_integrity()
    append(cache, _0=3)
