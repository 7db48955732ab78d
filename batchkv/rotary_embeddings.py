"""Rotary embeddings on a CPU by the native kernel.

An attention layer turns its queries and keys by a function of the module that its class is in. Here the layer computes
by its own `forward` with another function in that place: neither the class nor its module is touched. (What else is put
into the module meanwhile is not seen.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers.models.llama import modeling_llama

from batchkv.kernels import native_rotary
from batchkv.same_code import is_copy, original, vars_of

_FUNCTION = "apply_rotary_pos_emb"  # as all families name it

Turn = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def fast_rotary(module: nn.Module) -> Callable[..., Any] | None:
    """A `forward` that turns queries and keys faster; None for modules that turn none, or otherwise than Llama."""
    if "forward" in vars(module) or not turns_like_llama(module):
        return None
    forward = original(type(module).forward)
    names = forward.__globals__ | {_FUNCTION: partial(_turn, forward.__globals__[_FUNCTION])}
    faster = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    faster.__kwdefaults__ = forward.__kwdefaults__
    return partial(_attend, module, faster)


def _attend(module: nn.Module, faster: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`past_key_values` is a name of before, which only what transformers wraps a layer's `forward` in understands."""
    forward = type(module).forward if kwargs.get("past_key_values") is not None else faster
    return forward(module, *args, **kwargs)


def turns_like_llama(module: nn.Module) -> bool:
    """Whether a layer turns queries and keys by a copy of Llama's function."""
    forward = original(type(module).forward)
    return (
        isinstance(forward, FunctionType)
        and _FUNCTION in forward.__code__.co_names
        and _is_llamas(vars_of(forward).get(_FUNCTION))
    )


def _is_llamas(turn: object) -> bool:
    """Whether a function is a copy of Llama's, down to the half that it turns."""
    wanted, half = modeling_llama.apply_rotary_pos_emb, modeling_llama.rotate_half
    return (
        all(
            vars_of(function).get("__name__") == modeling_llama.__name__ for function in (wanted, half)
        )  # nobody put others there
        and is_copy(turn, wanted)
        and turn.__defaults__ == wanted.__defaults__
        and is_copy(turn.__globals__.get("rotate_half"), half)
    )


def _turn(turn: Turn, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    turned: tuple[torch.Tensor, torch.Tensor]
    is_plain = len(args) == 4 and not kwargs and not torch.is_autocast_enabled("cpu")
    turned = native_rotary.rotate(*args) if is_plain and native_rotary.is_covered(*args) else turn(*args, **kwargs)
    return turned
