"""A limit on the time that code in this process takes, in any thread."""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType


class TookTooLongError(BaseException):
    """Not an `Exception`: the code that takes too long may catch those and go on."""


class TimeLimit:
    """A block that may take `seconds`; then `TookTooLongError` is raised in it, or where it ends, but never later.

    It is raised between two operations of Python, so a single one that never ends is not interrupted. It is raised
    once only: a second one could come when the first has already left the block.
    """

    def __init__(self, seconds: float) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._thread_id = 0
        self._timer = threading.Timer(seconds, self._fire)
        self._timer.daemon = True

    def __enter__(self) -> TimeLimit:
        self._thread_id = threading.get_ident()
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._ended = True
        self._timer.cancel()
        _raise_in(self._thread_id, None)  # what has been sent may not have arrived

    def _fire(self) -> None:
        with self._lock:
            if not self._ended:
                _raise_in(self._thread_id, TookTooLongError)


def _raise_in(thread_id: int, error: type[BaseException] | None) -> None:
    """Raises `error` in a thread as soon as it runs Python; None takes back what has not arrived there."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(error) if error else None)
