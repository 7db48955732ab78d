"""What was appended to a part is read back, and a part that is damaged anywhere is still good up to there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkv.errors import RowError, UserError
from batchkv.parts import PartFile, read_part
from batchkv.records import Record, as_batch

ROWS = st.integers(0, 2**40)
RECORDS = st.builds(
    Record,
    ROWS,
    st.integers(0, 2**16),
    st.sampled_from(["stop", "length"]),
    st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    st.none() | st.lists(st.integers(0, 2**31 - 1)).map(lambda ids: np.array(ids, np.int32)),
    st.none() | st.lists(st.floats(width=32)).map(lambda values: np.array(values, np.float32)),
    st.integers(0, 2**31 - 1),
) | st.builds(lambda row, message: Record.of_error(row, RowError("too_long", message)), ROWS, st.just("by 1"))
APPENDED = st.lists(st.lists(RECORDS, max_size=3), max_size=4)


@contextmanager
def part_of(appended: list[list[Record]]) -> Iterator[tuple[Path, list[pa.RecordBatch]]]:
    """A file to which all of these were appended, and the batches that should be in it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part"
        part = PartFile(path)
        for records in appended:
            part.append(records)
        part.close()
        yield path, [as_batch(records) for records in appended if records]


def same(found: list[pa.RecordBatch], expected: list[pa.RecordBatch]) -> bool:
    """As their bytes are: NaN is itself."""
    return [repr(batch.to_pylist()) for batch in found] == [repr(batch.to_pylist()) for batch in expected]


@given(APPENDED)
def test_what_was_appended_is_read_back_in_order(appended: list[list[Record]]) -> None:
    with part_of(appended) as (path, expected):
        assert same(list(read_part(path)), expected)


@settings(max_examples=40)
@given(APPENDED, st.data())
def test_a_file_that_is_cut_anywhere_gives_all_frames_before(appended: list[list[Record]], data: st.DataObject) -> None:
    with part_of(appended) as (path, expected):
        whole = path.read_bytes()
        size = data.draw(st.integers(0, len(whole) - 1))
        path.write_bytes(whole[:size])
        found = list(read_part(path))
        assert same(found, expected[: len(found)])
        assert len(found) < len(expected) or not expected


@settings(max_examples=40)
@given(APPENDED, st.data())
def test_a_file_with_any_byte_changed_gives_all_frames_before(
    appended: list[list[Record]], data: st.DataObject
) -> None:
    with part_of(appended) as (path, expected):
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        found = list(read_part(path))
        assert same(found, expected[: len(found)])
        assert len(found) < len(expected) or not expected


def test_every_cut_and_every_changed_byte_of_a_small_file(tmp_path: Path) -> None:
    path = tmp_path / "part"
    part = PartFile(path)
    batches = [[Record(0, 0, "stop", "a", np.array([5], np.int32))], [Record.of_error(1, RowError("too_long", ""))]]
    ends = [path.stat().st_size]
    for records in batches:
        part.append(records)
        ends.append(path.stat().st_size)
    part.close()
    whole = path.read_bytes()
    for at in range(len(whole)):
        complete = sum(end <= at for end in ends) - 1
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            found = list(read_part(path))
            assert same(found, [as_batch(records) for records in batches[: max(complete, 0)]]), at


def test_garbage_after_the_frames_is_not_read(tmp_path: Path) -> None:
    with part_of([[Record(0, 0, "stop")]]) as (path, expected):
        for garbage in (b"\0", b"\0" * 8, b"\0" * 100, b"\xff" * 100):
            damaged = tmp_path / "damaged"
            damaged.write_bytes(path.read_bytes() + garbage)
            assert same(list(read_part(damaged)), expected)


def test_records_can_be_read_before_the_file_is_closed(tmp_path: Path) -> None:
    part = PartFile(tmp_path / "part")
    part.append([Record(3, 0, "stop")])
    part.append([])
    assert [batch["row"].to_pylist() for batch in read_part(tmp_path / "part")] == [[3]]
    part.close()
    part.close()


def test_a_part_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    PartFile(tmp_path / "part").close()
    with pytest.raises(FileExistsError):
        PartFile(tmp_path / "part")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_a_user_error_that_says_how_to_go_on(tmp_path: Path) -> None:
    part = PartFile(tmp_path / "part")
    with open("/dev/full", "wb", buffering=0) as full:
        part._file.close()
        part._file = full
        with pytest.raises(UserError, match=r"part cannot be written: No space left.*give the same command again"):
            part.append([Record(0, 0, "stop")])
