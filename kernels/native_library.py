"""The extension with the kernels for CPUs (`kernels/cpu`), and what the processor can run of it."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache

import torch  # noqa: F401  with it comes the OpenMP runtime that both use: two would fight for the cores

_LIBRARY = "batchkv.kernels._cpu"
_INSTRUCTION_SETS = {"avx512": 2, "avx2": 1, "portable": 0}  # the best first


@cache
def _library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec(_LIBRARY)
    if spec is None or spec.origin is None:
        return None
    try:
        return ctypes.CDLL(spec.origin)
    except OSError:
        return None


def open_library(**structures: type[ctypes.Structure]) -> ctypes.CDLL | None:
    """The extension; None if it could not be built, does not load here, or was built from other sources, which shows in
    the sizes of its structures.

    Args:
        structures: what a caller passes to it, by the name that the function of its size has.
    """
    library = _library()
    if library is None:
        return None
    try:
        sizes = [getattr(library, f"batchkv_{name}_size")() for name in structures]
    except AttributeError:
        return None
    return library if sizes == [ctypes.sizeof(structure) for structure in structures.values()] else None


def instruction_sets() -> list[str]:
    """Those that this processor has kernels for, the best first; none where there are no native kernels."""
    library = _library()
    return [name for name, number in _INSTRUCTION_SETS.items() if library and library.batchkv_supports(number)]


def instruction_set_number(name: str) -> int:
    """As the C interface numbers it."""
    return _INSTRUCTION_SETS[name]
