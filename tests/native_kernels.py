"""Native kernels as parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest

from batchkv.kernels.native_library import instruction_sets

INSTRUCTION_SETS: list[Any] = [
    pytest.param(
        name, marks=pytest.mark.skipif(name not in instruction_sets(), reason="not built, or not this processor's")
    )
    for name in ("portable", "avx2", "avx512", "amx")
]
needs_native = pytest.mark.skipif(not instruction_sets(), reason="the native kernels were not built")
