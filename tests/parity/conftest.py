"""Shared by the parity tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from batchkv.scheduler import Scheduler


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads only cost with models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def checked_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV cache is checked after every step."""
    for name in ("schedule", "update"):
        method = getattr(Scheduler, name)

        def checked(self: Scheduler, *args: Any, method: Any = method) -> Any:
            result = method(self, *args)
            self._cache.check_integrity()
            return result

        monkeypatch.setattr(Scheduler, name, checked)
