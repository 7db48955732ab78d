"""One thread at a time runs a model: whoever does changes its attention, its mode and its products for the time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


@contextmanager
def alone_with(model: nn.Module) -> Iterator[None]:
    """Other threads that come here with the same model wait; the same thread may come once more inside."""
    with _LOCKS_LOCK:
        lock = _LOCKS.setdefault(model, threading.RLock())
    with lock:
        yield
