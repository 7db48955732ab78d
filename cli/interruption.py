"""SIGINT and SIGTERM: the process ends where it is, and says so."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from batchkv.errors import Interrupted

EXIT_CODE = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# What a signal raises is lost if it comes while Python runs a destructor: then `check` raises it again.
_pending: list[int] = []


def watch_for_signals() -> None:
    """From here on the first signal ends the run in order, and a second one at once."""
    _pending.clear()
    sys.unraisablehook = _tell_unless_interrupted
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


def check() -> None:
    """To be called from time to time.

    Raises:
        Interrupted: there was a signal.
    """
    if _pending:
        raise Interrupted(EXIT_CODE)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _pending.append(number)
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_DFL)
    print(f"batchkv: interrupted by {signal.Signals(number).name}", file=sys.stderr)
    raise Interrupted(EXIT_CODE)


def _tell_unless_interrupted(unraisable: sys.UnraisableHookArgs) -> None:
    if not isinstance(unraisable.exc_value, Interrupted):
        sys.__unraisablehook__(unraisable)
