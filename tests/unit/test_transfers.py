"""What goes to the device and comes back is the same, and comes back as it was when the copy was asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchkv.transfers import HostCopies, to_device

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("array", [np.arange(5), np.zeros(0, np.float32), np.array([True, False])], ids=str)
def test_arrays_come_back_as_they_went(array: np.ndarray, device: str) -> None:
    there = to_device(array, torch.device(device))
    assert there.device.type == device
    first, second = HostCopies(there, there).wait()
    assert first.dtype == second.dtype == array.dtype
    assert first.tolist() == second.tolist() == array.tolist()


@needs_gpu
def test_copies_do_not_wait_for_what_is_launched_after_them() -> None:
    small, large = to_device(np.arange(7), torch.device("cuda")), torch.randn(8192, 8192, device="cuda")
    large @ large  # the library's start takes long, too
    torch.cuda.synchronize()
    copies = HostCopies(small)
    for _ in range(50):
        large @ large
    done = torch.cuda.Event()
    done.record()
    assert copies.wait()[0].tolist() == list(range(7))
    assert not done.query()
