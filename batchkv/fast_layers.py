"""The layers of a model compute by faster code on a CPU, for the time that the engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from batchkv.activations import fast_activation
from batchkv.decoders import fast_decoder
from batchkv.gated_mlps import fast_mlp
from batchkv.linear_layers import fast_linear
from batchkv.norms import fast_norm
from batchkv.rotary_embeddings import fast_rotary


@contextmanager
def with_fast_layers(model: nn.Module) -> Iterator[None]:
    """Linear layers, activations, norms, gated MLPs, rotary embeddings and whole decoders compute by the fastest
    code there is for them, on weights as they are.

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


def _fast_forward(module: nn.Module) -> Callable[..., Any] | None:
    kinds = (fast_linear, fast_activation, fast_norm, fast_mlp, fast_rotary, fast_decoder)
    return next((forward for kind in kinds if (forward := kind(module)) is not None), None)
