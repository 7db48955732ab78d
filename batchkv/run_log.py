"""What a run does, for those who watch it: events as JSON lines, and the latest numbers in a file.

Nothing of any row's text is ever in an event.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import IO, Any

from batchkv.errors import UserError
from batchkv.ledger import Ledger
from batchkv.metrics import RunMetrics
from batchkv.progress import OnEvent

_SNAPSHOT_SECONDS = 5.0


class RunLog:
    """A file that events are appended to, one JSON object a line: `time` (ISO 8601, UTC), `event`, and what more there
    is to say.

    Args:
        path: of the file; None keeps no log.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[str] | None = None
        if path is not None:
            try:
                self._file = path.open("a", buffering=1)
            except OSError as error:
                raise UserError(f"--log {path}: {error.strerror}: name a file in a folder that is there") from None

    def event(self, event: str, fields: Mapping[str, Any]) -> None:
        """One line, on its way to the disk when this returns."""
        if self._file is not None:
            line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
            try:
                self._file.write(json.dumps(line) + "\n")
            except OSError as error:
                self._close()
                raise UserError(
                    f"--log {self._path} cannot be written: {error.strerror}: what is finished is kept; "
                    "free some space and give the same command again"
                ) from error

    def _close(self) -> None:
        """What a full disk has not taken is let go."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, UserError):
            self.event("failed", {"error": str(error)})
        elif isinstance(error, SystemExit | KeyboardInterrupt):
            self.event("interrupted", {})
        elif kind is not None:
            self.event("crashed", {"error": kind.__name__})  # its message could quote a row
        self._close()


class Snapshots:
    """The latest numbers of a run, every few seconds: as an event, and in a file that is always whole.

    Args:
        on_event: gets `progress` events.
        path: of the file, which is replaced each time; None keeps none.
    """

    def __init__(self, on_event: OnEvent, path: Path | None) -> None:
        self._on_event, self._path = on_event, path
        self._written = monotonic()

    def after_step(self, metrics: RunMetrics, ledger: Ledger) -> None:
        """To be called after every step; does nothing most of the time."""
        if monotonic() - self._written >= _SNAPSHOT_SECONDS:
            self.write(metrics, ledger)

    def write(self, metrics: RunMetrics, ledger: Ledger) -> None:
        """Samples that are finished and rows with errors, of the job; what `metrics` counts, of this run."""
        numbers = {"samples": ledger.num_samples, "errors": ledger.num_errors, **metrics.counts()}
        self._on_event("progress", numbers)
        if self._path is not None:
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(numbers) + "\n")
            os.replace(temporary, self._path)
        self._written = monotonic()
