"""The extension with the kernels for CPUs (`kernels/cpu`), and what the processor can run of it."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch  # with it comes the OpenMP runtime that both use: two would fight for the cores

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # as the C interface numbers them; attention knows more

_LIBRARY = "batchkv.kernels._cpu"
_INSTRUCTION_SETS = {"amx": 3, "avx512": 2, "avx2": 1, "portable": 0}  # the best first


class Heads(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("head_stride", ctypes.c_int64), ("token_stride", ctypes.c_int64)]

    @classmethod
    def of(cls, tensor_HTD: torch.Tensor) -> Heads:
        return cls(tensor_HTD.data_ptr(), tensor_HTD.stride(0), tensor_HTD.stride(1))


@cache
def native_library() -> ctypes.CDLL | None:
    """The extension; None if it could not be built, or does not load here."""
    spec = importlib.util.find_spec(_LIBRARY)
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:
        return None
    library.batchkv_supports.argtypes, library.batchkv_supports.restype = [ctypes.c_int32], ctypes.c_bool
    return library


@cache
def instruction_sets() -> tuple[str, ...]:
    """Those that this processor has kernels for, the best first; none where there are no native kernels."""
    library = native_library()
    return tuple(name for name, number in _INSTRUCTION_SETS.items() if library and library.batchkv_supports(number))


def instruction_set_number(name: str | None = None) -> int:
    """As the C interface numbers it; by default the best.

    Raises:
        RuntimeError: this processor has no kernels for it, or they were not built.
    """
    there = instruction_sets()
    name = name or next(iter(there), "any processor")
    if name not in there:
        raise RuntimeError(f"no native kernels for {name}: they were not built, or do not run on this machine")
    return _INSTRUCTION_SETS[name]


def native_function(name: str, *argument_types: Any) -> Callable[..., None] | None:
    """A function of the extension that returns nothing; None if there is none, or if it was built before that was."""
    function = getattr(native_library(), name, None)
    if function is not None:
        function.argtypes, function.restype = argument_types, None
    return function


def fits(library: ctypes.CDLL, **structures: type[ctypes.Structure]) -> bool:
    """Whether the extension was built from these sources, which shows in the sizes of its structures.

    Args:
        structures: what a caller passes to it, by the name that the function of its size has.
    """
    try:
        sizes = [getattr(library, f"batchkv_{name}_size")() for name in structures]
    except AttributeError:
        return False
    return sizes == [ctypes.sizeof(structure) for structure in structures.values()]
