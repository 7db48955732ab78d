"""What the verbs print for people."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """Prints to stdout; who closed it (`batchkv plan ... | head`) does not want the rest."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
