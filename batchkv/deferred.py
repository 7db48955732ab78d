"""Prompts of rows that wait for others, in a file until they are needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np

from batchkv.io.prompts import Prompt


class DeferredPrompts:
    """Texts, conversations and token ids, written one after the other and read back by row.

    Args:
        scratch: folder for the file, which has no name and goes with this; by default that of the system.
    """

    def __init__(self, scratch: Path | None) -> None:
        self._scratch = scratch
        self._file: IO[bytes] | None = None
        self._place: dict[int, tuple[int, int]] = {}  # of each row: offset and length
        self._end = 0

    def __len__(self) -> int:
        return len(self._place)

    def put(self, prompts: Mapping[int, Prompt]) -> None:
        """More rows, by row number."""
        file = self._opened()
        file.seek(self._end)
        for row, prompt in prompts.items():
            value = {"ids": prompt.tolist()} if isinstance(prompt, np.ndarray) else prompt
            data = json.dumps(value, default=str).encode()
            file.write(data)
            self._place[row] = (self._end, len(data))
            self._end += len(data)

    def get(self, row: int) -> Prompt:
        """The prompt of a row that was put here."""
        offset, length = self._place[row]
        file = self._opened()
        file.seek(offset)
        value = json.loads(file.read(length))
        return np.array(value["ids"], np.int32) if isinstance(value, dict) else value

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = TemporaryFile(dir=self._scratch)  # noqa: SIM115  open as long as this lives
        return self._file
