"""Linear layers by oneDNN's matrix products, and with their weights in the order in which these read them.

oneDNN otherwise brings them into that order in every call, which costs a third of the time of a product and more when
there are few rows. A packed layer takes the place of its module in a model that the engine has loaded itself; the
weights of a live module are never copied: there only the product is another one, for the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn


@contextmanager
def with_onednn(model: nn.Module) -> Iterator[None]:
    """Linear layers of a live model in float32 on a CPU compute by oneDNN, on their weights as they are. torch takes
    MKL, which needs a fifth more time for 256 rows, and almost twice as much over a vocabulary (measured on an AMD EPYC
    with AVX2).

    Layers of other kinds, and those whose instance has a `forward` of its own, are left alone.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear and _takes_onednn(module)]
    try:
        for layer in layers:
            layer.forward = partial(_product, layer)  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _takes_onednn(layer: nn.Linear) -> bool:
    """Whether nothing about a layer is out of the ordinary. (oneDNN reads biases as if they were contiguous.)"""
    is_plain = type(layer.weight) is nn.Parameter and "forward" not in vars(layer)
    has_plain_bias = layer.bias is None or (type(layer.bias) is nn.Parameter and layer.bias.is_contiguous())
    return is_plain and has_plain_bias and layer.weight.dtype == torch.float32 and _can_pack(layer.weight)


def _product(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """What `layer` computes of [..., in_features]."""
    if torch.is_autocast_enabled("cpu") or rows.dtype != layer.weight.dtype:
        return nn.functional.linear(rows, layer.weight, layer.bias)
    return _pointwise(rows, layer.weight, layer.bias)


def _pointwise(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """oneDNN's product; the weight may be packed."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out


def pack_linears(model: nn.Module) -> None:
    """Replaces the linear layers of a model on a CPU in place, where oneDNN has products of their dtype.

    The plain weights are dropped with their modules, but for those that an embedding shares: what is left computes,
    but cannot be saved or trained.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and _can_pack(child.weight):
                setattr(parent, name, PackedLinear(child))
    if is_packed(model):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # a view into the loaded file would keep all of it in memory


def is_packed(model: nn.Module) -> bool:
    return any(isinstance(module, PackedLinear) for module in model.modules())


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class PackedLinear(nn.Module):
    """`nn.Linear` for inference.

    Args:
        linear: the layer whose weight is packed and whose bias is taken over.
    """

    packed: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = None if linear.bias is None else linear.bias.detach().clone()

    @torch.no_grad()
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return _pointwise(rows, self.packed, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
