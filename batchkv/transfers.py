"""Between the host and the device without waiting: what a step needs goes over, what it drew comes back."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on the device; a CUDA device fetches it when it gets there, after what was launched before."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # from other memory the host would wait


class HostCopies:
    """Tensors on their way to the host.

    To be made before anything else is launched: a CUDA device works in order, so copies that are asked for later come
    after all that was launched in between.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._copies = [_begin_copy(tensor) for tensor in tensors]
        device = tensors[0].device
        self._arrived = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def wait(self) -> tuple[npt.NDArray[Any], ...]:
        """The tensors as arrays, in the order given, once they are all there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return tuple(copy.numpy() for copy in self._copies)


def _begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
