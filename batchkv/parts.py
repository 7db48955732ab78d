"""Files of records that grow while a run goes on and are good for use however it ends.

A file is eight bytes that say what it is, and then frames:

    length of the body: uint32    CRC-32 of the body: uint32    body: a record batch in Arrow's IPC format

A frame is written at once, so a process that is killed leaves whole frames and perhaps the beginning of one. What does
not fit its length or its checksum ends the file: after a loss of power that can be more than the last frame, but
nothing that was synced.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic

import pyarrow as pa

from batchkv.errors import cannot_go_on
from batchkv.records import SCHEMA, Record, as_batch

_MAGIC = b"BKVPART1"
_FRAME = struct.Struct("<II")
_SYNC_SECONDS = 5.0


class PartFile:
    """A new file of records. What `append` has written outlasts the process, and after `sync` a loss of power, too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb", buffering=0)
        self._synced = monotonic()
        self._write(_MAGIC)

    def append(self, records: Sequence[Record]) -> None:
        """Raises `UserError` if the disk is full."""
        if not records:
            return
        body = as_batch(records).serialize()
        self._write(_FRAME.pack(body.size, zlib.crc32(body)) + body.to_pybytes())
        if monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Has the disk keep all records so far."""
        os.fsync(self._file.fileno())
        self._synced = monotonic()

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise cannot_go_on(self._path, error) from error


def read_part(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of records in a file, up to the first that is not whole."""
    left = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return
        left -= len(_MAGIC)
        while len(head := file.read(_FRAME.size)) == _FRAME.size:
            length, checksum = _FRAME.unpack(head)
            left -= _FRAME.size + length
            if (
                not length or left < 0
            ):  # zeros, which a loss of power can leave at the end, have the checksum of nothing
                return
            body = file.read(length)
            if len(body) < length or zlib.crc32(body) != checksum:
                return
            yield pa.ipc.read_record_batch(pa.py_buffer(body), SCHEMA)
