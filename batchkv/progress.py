"""How far a job has come, for whoever watches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# (what is being done, how much of it is done, how much there is of it); called from time to time. Where nobody counts,
# it is 0 of 0, once, when it begins.
OnProgress = Callable[[str, int, int], None]
# (sequences that ended, tokens generated) since the last call
OnStep = Callable[[int, int], None]
# With the number of outputs to be computed, when the job is read.
OnStart = Callable[[int], OnStep]
# (what happened, numbers and names that tell more); nothing of any row's text.
OnEvent = Callable[[str, Mapping[str, Any]], None]


def no_progress(doing: str, done: int, total: int) -> None:
    """Nobody watches."""


def no_step(ended: int, generated: int) -> None:
    """Nobody watches."""


def no_start(outputs: int) -> OnStep:
    """Nobody watches."""
    return no_step


def no_event(event: str, fields: Mapping[str, Any]) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told what while a job runs.

    Attributes:
        on_progress: while the job is read, tokenized and planned.
        on_start: when it is read, before it is executed; what it returns is called after every step.
        on_event: what happens, for a log.
    """

    on_progress: OnProgress = no_progress
    on_start: OnStart = no_start
    on_event: OnEvent = no_event


NOBODY = Watch()
