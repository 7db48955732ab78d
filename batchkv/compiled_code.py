"""What `torch.compile` has compiled runs as it was written while the engine runs a model.

A compiler would trace its way into native code, with tensors that are nowhere.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

_LOCK = threading.Lock()
_stances: list[AbstractContextManager[None]] = []  # as many as are inside


@contextmanager
def as_written() -> Iterator[None]:
    """Nothing is compiled, and nothing compiled runs, in the whole process: torch knows no other way to say so. What
    was before comes back when the last thread has left.
    """
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled then; importing it takes a second
        yield
        return
    with _LOCK:
        _stances.append(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _LOCK:
            _stances.pop().__exit__(None, None, None)  # back to what was before it: only the first knows another
