"""Arrays in mapped files: what was written is read, and memory comes back."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from batchkv.mapped_array import ArrayWriter, release_pages, without_repeats


def test_blocks_of_any_length_are_read_one_after_the_other(tmp_path: Path) -> None:
    writer = ArrayWriter(np.int64, tmp_path)
    for block in ([1, 2], [], [3]):
        writer.append(np.array(block, np.int64))
    array = writer.finish()
    assert (array.tolist(), array.dtype) == ([1, 2, 3], np.int64)
    assert not array.flags.writeable
    assert not list(tmp_path.iterdir())  # the file has no name


def test_nothing_written_is_an_empty_array() -> None:
    assert ArrayWriter(np.uint64, None).finish().shape == (0,)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="tells how much of a mapping is resident")
def test_released_pages_take_no_memory_and_are_read_again(tmp_path: Path) -> None:
    writer = ArrayWriter(np.int32, tmp_path)
    writer.append(np.arange(1 << 20, dtype=np.int32))
    array = writer.finish()
    assert array.sum(dtype=np.int64) == (1 << 19) * ((1 << 20) - 1)
    address = f"{array.ctypes.data:x}-"
    assert _resident_kib(address) >= 1 << 12
    release_pages([array, np.zeros(3)])
    assert _resident_kib(address) == 0
    assert array[-1] == (1 << 20) - 1


def _resident_kib(address: str) -> int:
    maps = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^0*{address}.*?^Rss:\s+(\d+) kB", maps, re.MULTILINE | re.DOTALL)
    assert found is not None
    return int(found[1])


def test_equal_elements_are_one_in_memory() -> None:
    assert without_repeats(np.full(1000, 7)).strides == (0,)
    assert without_repeats(np.array([7, 8])).tolist() == [7, 8]
    assert without_repeats(np.zeros(0)).shape == (0,)
