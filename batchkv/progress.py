"""How far a job has come, for whoever watches."""

from __future__ import annotations

from collections.abc import Callable

# (what is being done, how much of it is done, how much there is of it); called from time to time. Where nobody counts,
# it is 0 of 0, once, when it begins.
OnProgress = Callable[[str, int, int], None]


def no_progress(doing: str, done: int, total: int) -> None:
    """Nobody watches."""
