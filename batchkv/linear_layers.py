"""Linear layers on a CPU by faster products than torch's.

Where the native kernel is the fastest, it computes every layer that it covers on its weight as it is, in models that
were loaded and in live ones. Elsewhere it is oneDNN, which brings weights into an order of its own in every call: that
costs a third of the time of a product, and more when there are few rows. So the layers of a model that the engine has
loaded are packed, which is to keep the weights in that order. The weights of a live module are never copied: there only
the product is another one, for the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeGuard

import torch
from torch import nn

from batchkv.kernels import native_linear

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def fast_linear(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What computes a linear layer faster than its `forward`, on its weight as it is; None for all other modules."""
    product = product_of(layer)
    return partial(_compute, layer, product) if product is not None and isinstance(layer, nn.Linear) else None


def product_of(layer: nn.Module) -> Product | None:
    """What computes a linear layer that is nothing more; None if it is torch, and for all other modules.

    oneDNN needs a fifth less time than MKL, which torch takes, for 256 rows in float32, and almost half over a
    vocabulary (measured on an AMD EPYC with AVX2). It reads biases as if they were contiguous.
    """
    if not _is_plain(layer):
        return None
    weight, bias = layer.weight, layer.bias
    if native_linear.is_fastest(weight.dtype) and native_linear.is_covered(weight, bias):
        native: Product = native_linear.linear
        return native
    is_for_onednn = weight.dtype == torch.float32 and _can_pack(weight) and (bias is None or bias.is_contiguous())
    return _onednn if is_for_onednn else None


def is_native(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the native kernel computes a linear layer that is nothing more."""
    return product_of(layer) is native_linear.linear


def linear_backend(model: nn.Module) -> str:
    """By what most of a model's parameters are multiplied: `native`, `onednn (packed)`, `onednn` or `torch`."""
    names: dict[Product | None, str] = {native_linear.linear: "native", _onednn: "onednn"}
    sizes = Counter({"torch": 0})
    for module in model.modules():
        if isinstance(module, PackedLinear):
            sizes["onednn (packed)"] += module.in_features * module.out_features
        elif not isinstance(module, nn.Embedding):
            own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            sizes[names.get(product_of(module), "torch")] += own
    return sizes.most_common(1)[0][0]


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and type(layer.weight) is nn.Parameter
        and (layer.bias is None or type(layer.bias) is nn.Parameter)
    )


def _compute(layer: nn.Linear, product: Product, rows: torch.Tensor) -> torch.Tensor:
    """What `layer` computes of [..., in_features]."""
    if torch.is_autocast_enabled("cpu") or rows.dtype != layer.weight.dtype:
        return nn.functional.linear(rows, layer.weight, layer.bias)
    return product(rows, layer.weight, layer.bias)


def _onednn(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The weight may be packed."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out


def is_worth_packing(dtype: torch.dtype) -> bool:
    """Whether there is nothing faster than packed layers."""
    return not native_linear.is_fastest(dtype)


def pack_linears(model: nn.Module) -> None:
    """Replaces the linear layers of a model on a CPU in place, where oneDNN has products of their dtype.

    The plain weights are dropped with their modules, but for those that an embedding shares: what is left computes,
    but cannot be saved or trained.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and _can_pack(child.weight):
                setattr(parent, name, PackedLinear(child))


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
        return _onednn(rows, self.packed, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
