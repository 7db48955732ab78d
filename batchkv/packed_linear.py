"""Linear layers with their weights in the order in which a CPU's matrix products read them.

oneDNN otherwise brings them into that order in every call, which costs a third of the time of a product and more when
there are few rows. A packed layer takes the place of its module in a model that the engine has loaded itself; the
weights of a live module are never copied.
"""

from __future__ import annotations

import torch
from torch import nn


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
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
