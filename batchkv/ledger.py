"""Who is finished: what came from an earlier run, what this one has recorded, and which rows have errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from batchkv.errors import RowError, first_of
from batchkv.records import Record, RecordSink

Int64Array = npt.NDArray[np.int64]


class Ledger:
    """Counts the records that go to a sink.

    Args:
        sink: where they go.
        done: int64, ascending, outputs that an earlier run has recorded (`waves.output_keys`).
        done_rows: int64, the row of each of them.
    """

    def __init__(self, sink: RecordSink, done: Int64Array | None = None, done_rows: Int64Array | None = None) -> None:
        self.done = np.zeros(0, np.int64) if done is None else done
        rows = np.zeros(0, np.int64) if done_rows is None else done_rows
        self._sink = sink
        self._recorded = np.bincount(rows).astype(np.int32)
        self._failed = np.zeros(len(self._recorded), np.bool_)
        self._first_error: dict[int, RowError] = {}  # that of the lowest row

    @property
    def num_errors(self) -> int:
        """Rows with an error."""
        return int(self._failed.sum())

    @property
    def first_error(self) -> str | None:
        """Why the first of them has one."""
        return first_of(self._first_error)

    @property
    def num_samples(self) -> int:
        """Samples of rows without one."""
        return int(self._recorded[~self._failed].sum())

    def has_failed(self, row: int) -> bool:
        return row < len(self._failed) and bool(self._failed[row])

    def expect(self, num_rows: int) -> None:
        """So many rows there are: no more room than that is needed."""
        self._widen(num_rows, exactly=True)

    def append(self, records: Sequence[Record]) -> None:
        """Samples that have ended."""
        if records:
            rows = np.array([record.row for record in records])
            self._widen(int(rows.max()) + 1)
            np.add.at(self._recorded, rows, 1)
            self._sink.append(records)

    def reject(self, errors: Mapping[int, RowError]) -> None:
        """Rows that cannot be run, or could not be finished."""
        new = {row: error for row, error in errors.items() if not self.has_failed(row)}
        if new:
            self._widen(max(new) + 1)
            self._failed[list(new)] = True
            known = new | self._first_error
            self._first_error = {min(known): known[min(known)]}
            self._sink.append([Record.of_error(row, error) for row, error in new.items()])

    def _widen(self, num_rows: int, *, exactly: bool = False) -> None:
        more = num_rows - len(self._failed)
        if more > 0:
            more = more if exactly else max(more, len(self._failed))
            self._recorded, self._failed = np.pad(self._recorded, (0, more)), np.pad(self._failed, (0, more))
