"""What becomes of memory that a step has used."""

from __future__ import annotations

import ctypes
import sys

_M_MMAP_THRESHOLD = -3  # of mallopt in glibc's malloc.h
_LARGE = 8 << 20


def return_large_blocks() -> None:
    """Has blocks from 8 MiB on go back to the system as soon as they are freed, where the C library is glibc.

    By itself glibc keeps ever larger ones in its heap, up to 32 MiB, where they cannot be joined once small ones lie
    between: a hundred MiB and more of a job's logits would stay with the process. The setting is the
    process's, so it is for the command line to make, not for a library.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _LARGE)
