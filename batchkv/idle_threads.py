"""How threads that compute together wait for each other."""

from __future__ import annotations

import os

# What libgomp takes by itself where it knows of more threads than cores: some 20 microseconds.
_SPINS = "1000"


def let_waiting_threads_sleep() -> None:
    """Has threads give up their core soon when they wait for others, unless the environment says how they wait.

    By default libgomp has them spin for milliseconds. If another process takes one of the cores meanwhile, the thread
    that is waited for competes with those that wait, at every barrier: runs took five times as long as with sleeping
    threads. On cores of its own a run takes as long either way. It is read when torch is imported, and is the
    process's, so it is for the command line to say, not for a library.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
