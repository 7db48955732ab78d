"""A page is free exactly when nobody holds it, and pages that do not add up are noticed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkv.page_allocator import OutOfPagesError, PageAllocator, Pages


def pages(*ids: int) -> Pages:
    return np.array(ids, np.int32)


def test_the_lowest_ids_go_first() -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(3).tolist() == [0, 1, 2]
    assert (allocator.num_free, allocator.num_held) == (1, 3)


def test_nothing_can_be_asked_for_and_given_back() -> None:
    allocator = PageAllocator(0)
    assert allocator.allocate(0).tolist() == []
    allocator.share(pages())
    allocator.release(pages())
    allocator.check_integrity(pages())


def test_more_than_is_free_is_refused_and_nothing_is_taken() -> None:
    allocator = PageAllocator(3)
    held = allocator.allocate(2)
    with pytest.raises(OutOfPagesError, match="2 pages wanted, 1 of 3 free"):
        allocator.allocate(2)
    assert allocator.num_free == 1
    allocator.check_integrity(held)
    assert allocator.allocate(1).tolist() == [2]


def test_a_shared_page_is_free_only_when_the_last_holder_lets_go() -> None:
    allocator = PageAllocator(2)
    page = allocator.allocate(1)
    allocator.share(page)
    allocator.release(page)
    assert allocator.num_held == 1
    allocator.release(page)
    assert allocator.num_held == 0


def test_repeated_ids_count_as_often_as_they_stand_there() -> None:
    allocator = PageAllocator(3)
    allocator.allocate(2)
    allocator.share(pages(1, 1, 0))
    assert allocator.holders(pages(0, 1, 2)).tolist() == [2, 3, 0]
    allocator.release(pages(1, 0, 1, 1, 0))
    assert allocator.num_free == 3
    allocator.check_integrity(pages())


def test_pages_given_back_are_used_again() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(4)
    allocator.release(pages(3, 1))
    assert sorted(allocator.allocate(2).tolist()) == [1, 3]


def test_allocated_pages_are_a_copy_and_no_view_into_the_free_list() -> None:
    allocator = PageAllocator(4)
    first, second = allocator.allocate(1), allocator.allocate(1)
    allocator.release(first)
    assert second.tolist() == [1]


@pytest.mark.parametrize("claimed", [(), (0,), (0, 1, 1), (0, 1, 2)])
def test_check_integrity_notices_holders_that_the_tables_do_not_list(claimed: tuple[int, ...]) -> None:
    allocator = PageAllocator(3)
    allocator.allocate(2)
    with pytest.raises(RuntimeError, match="have other holder counts than the page tables say"):
        allocator.check_integrity(pages(*claimed))


def test_check_integrity_notices_a_page_that_was_released_too_often() -> None:
    allocator = PageAllocator(3)
    allocator.allocate(1)
    allocator.release(pages(0))
    allocator.release(pages(0))
    with pytest.raises(RuntimeError, match=r"pages \[0\]"):
        allocator.check_integrity(pages())


def test_check_integrity_notices_a_page_that_is_free_twice() -> None:
    allocator = PageAllocator(3)
    allocator.allocate(2)
    allocator.release(pages(1))
    allocator.share(pages(1))  # nobody may share a page that is free
    allocator.release(pages(1))
    with pytest.raises(RuntimeError, match="on the free list twice"):
        allocator.check_integrity(pages(0))


def test_check_integrity_notices_a_page_that_was_shared_while_free() -> None:
    allocator = PageAllocator(3)
    allocator.share(pages(2))
    with pytest.raises(RuntimeError, match="not the set of pages without a holder"):
        allocator.check_integrity(pages(2))


@given(st.integers(0, 6), st.lists(st.tuples(st.sampled_from("asr"), st.lists(st.integers(0, 9), max_size=4))))
@settings(max_examples=60)
def test_free_and_held_are_those_of_a_plain_count(num_pages: int, steps: list[tuple[str, list[int]]]) -> None:
    """`s`hare and `r`elease pick among what is held; `a`llocate takes as many as there are numbers."""
    allocator = PageAllocator(num_pages)
    held: Counter[int] = Counter()
    for what, numbers in steps:
        if what == "a":
            if len(numbers) > num_pages - len(held):
                with pytest.raises(OutOfPagesError):
                    allocator.allocate(len(numbers))
            else:
                taken = allocator.allocate(len(numbers)).tolist()
                assert len(set(taken)) == len(numbers)
                assert not set(taken) & set(held)
                held.update(taken)
        elif what == "s" and held:
            some = [sorted(held)[i % len(held)] for i in numbers]
            allocator.share(pages(*some))
            held.update(some)
        elif what == "r" and held:
            all_held = sorted(held.elements())
            some = [all_held[i] for i in {i % len(all_held) for i in numbers}]
            allocator.release(pages(*some))
            held = +(held - Counter(some))
        assert allocator.num_held == len(held)
        assert allocator.num_free == num_pages - len(held)
        assert allocator.holders(np.arange(num_pages)).tolist() == [held[page] for page in range(num_pages)]
        allocator.check_integrity(pages(*held.elements()))
