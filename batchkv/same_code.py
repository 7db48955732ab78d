"""Which code is a copy of other code: most families of models have Llama's parts under names of their own.

Instructions are compared, not names: a copy that differs in anything computes something else.
"""

from __future__ import annotations

from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any, TypeGuard

from torch import nn


def is_copy(function: Any, of: Any) -> TypeGuard[FunctionType]:
    """Whether a function has the instructions of another one, whatever its docstring says."""
    return (
        isinstance(function, FunctionType)
        and isinstance(of, FunctionType)
        and _instructions(function.__code__, function.__doc__) == _instructions(of.__code__, of.__doc__)
    )


def computes_like(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module's `forward` is a copy of that of another class, as transformers has it: some libraries put other
    code into its classes, and hooks of others give an instance a `forward` of its own.
    """
    wanted = unwrap(kind.forward)
    is_original = wanted.__module__ == kind.__module__
    return is_original and "forward" not in vars(module) and is_copy(unwrap(type(module).forward), wanted)


def _instructions(code: CodeType, docstring: str | None) -> tuple[Any, ...]:
    constants = tuple(constant for constant in code.co_consts if constant is None or constant != docstring)
    return code.co_code, code.co_names, constants
