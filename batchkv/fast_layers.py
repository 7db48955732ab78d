"""The layers of a model compute by faster code on a CPU, for the time that the engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from batchkv.activations import fast_activation
from batchkv.linear_layers import fast_linear
from batchkv.norms import fast_norm


@contextmanager
def with_fast_layers(model: nn.Module) -> Iterator[None]:
    """Linear layers, activations and norms compute by the fastest code there is for them, on weights as they are.

    Layers of other kinds, and those whose instance has a `forward` of its own, are left alone.
    """
    is_on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    modules = list(model.modules()) if is_on_cpu else []
    fast = [(module, forward) for module in modules if (forward := _fast_forward(module)) is not None]
    try:
        for module, forward in fast:
            module.forward = forward
        yield
    finally:
        for module, _ in fast:
            vars(module).pop("forward", None)


def _fast_forward(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    return fast_linear(module) or fast_activation(module) or fast_norm(module)
