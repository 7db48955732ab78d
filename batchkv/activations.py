"""Activations on a CPU by the native kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers.activations import GELUTanh, SiLUActivation

from batchkv.kernels import native_activation
from batchkv.kernels.native_activation import Activation

_MODULES_OF_ACTIVATIONS = (SiLUActivation.__module__, nn.SiLU.__module__)


def fast_activation(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What computes an activation faster than its `forward`; None for all other modules."""
    kind = kind_of(module)
    return None if kind is None else partial(_compute, module, kind)


def kind_of(module: nn.Module) -> Activation | None:
    """Which of the activations a module is for which there is native code; None if it is another, or something else."""
    if "forward" in vars(module):
        return None
    if type(module) in (SiLUActivation, nn.SiLU):
        return "silu"
    if type(module) is GELUTanh or (type(module) is nn.GELU and module.approximate == "tanh"):
        return "gelu_tanh"
    return None


def are_native(model: nn.Module, dtypes: set[torch.dtype]) -> bool:
    """Whether a model on a CPU has its activations in modules, and native code computes all of them, of rows of these
    dtypes. What a `forward` computes besides, without a module, cannot be seen; logits' soft-caps are told by configs.
    """
    kinds = [kind_of(module) for module in model.modules() if type(module).__module__ in _MODULES_OF_ACTIVATIONS]
    has_softcap = getattr(getattr(model, "config", None), "final_logit_softcapping", None) is not None
    is_covered = all(native_activation.is_covered(torch.device("cpu"), dtype) for dtype in dtypes)
    return bool(kinds) and None not in kinds and not has_softcap and is_covered


def _compute(module: nn.Module, kind: Activation, rows: torch.Tensor) -> torch.Tensor:
    activated: torch.Tensor
    if native_activation.is_covered(rows.device, rows.dtype):
        activated = native_activation.activate(rows, kind)
    else:
        activated = type(module).forward(module, rows)
    return activated
