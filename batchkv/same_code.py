"""Which code is a copy of other code: most families of models have Llama's parts under names of their own.

Instructions are compared, not names: a copy that differs in anything computes something else.
"""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any, TypeGuard

from torch import nn
from torch.nn.modules import module as torch_module

_CALLS = ("__call__", "_wrapped_call_impl", "_call_impl")  # what torch goes through on the way to `forward`


def original(function: Any) -> Any:
    """A function without what transformers wraps it in, which is for arguments of other versions. Whatever else is
    around it stays: it may compute something else.
    """
    while hasattr(function, "__wrapped__") and vars_of(function).get("__name__", "").startswith("transformers."):
        function = function.__wrapped__
    return function


def vars_of(function: Any) -> dict[str, Any]:
    """The names that a function finds in its module; none if it is something else that can be called."""
    return function.__globals__ if isinstance(function, FunctionType) else {}


def has_hooks(module: nn.Module) -> bool:
    """Whether something else is called with a module: its forward alone is not all of it then."""
    of_all = torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
    return bool(of_all or module._forward_hooks or module._forward_pre_hooks)


def is_copy(function: Any, of: Any) -> TypeGuard[FunctionType]:
    """Whether a function has the instructions of another one, whatever its docstring says."""
    return (
        isinstance(function, FunctionType)
        and isinstance(of, FunctionType)
        and _instructions(function.__code__, function.__doc__) == _instructions(of.__code__, of.__doc__)
    )


def computes_like(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module's `forward` is a copy of that of another class, as transformers has it, and called as that is:
    some libraries put other code into its classes, hooks of others give an instance a `forward` of its own, and a
    subclass may do more where it is called.
    """
    wanted = original(kind.forward)
    is_its_own = vars_of(wanted).get("__name__") == kind.__module__
    is_called_alike = all(getattr(type(module), name) is getattr(kind, name) for name in _CALLS)
    has_its_class_forward = "forward" not in vars(module) and is_copy(original(type(module).forward), wanted)
    return is_its_own and is_called_alike and has_its_class_forward


def _instructions(code: CodeType, docstring: str | None) -> tuple[Any, ...]:
    constants = tuple(constant for constant in code.co_consts if constant is None or constant != docstring)
    return code.co_code, code.co_names, constants
