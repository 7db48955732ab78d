"""The attention contract that every implementation keeps.

Shape suffixes: T tokens of the step, H query heads, K KV heads, D head dim, R rows (sequences in the step).

What there is to attend to stands in `batchkv.step.AttentionBatch`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from batchkv.kv_cache import PageCopies
from batchkv.kv_layout import LayerSpec
from batchkv.step import AttentionBatch

KV = TypeVar("KV")
WorkPlan = TypeVar("WorkPlan")


class AttentionBackend(ABC, Generic[KV, WorkPlan]):
    """One implementation. `KV` is its page layout, `WorkPlan` what it prepares once per step for all layers."""

    name: str
    is_batch_invariant: bool
    """Whether a token's result is bitwise the same whatever else is in the step."""
    is_asynchronous: bool = False
    """Whether the host goes on while a device computes: then steps overlap, and decode steps are recorded as graphs."""

    @abstractmethod
    def allocate(self, num_pages: int, page_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device) -> KV:
        """The pages of one layer. In int8 and float8_e4m3fn keys and values are quantized (`quantization`)."""

    @abstractmethod
    def plan(self, batch: AttentionBatch, spec: LayerSpec) -> WorkPlan:
        """Work shared by all layers of this kind in this step."""

    @abstractmethod
    def store(self, kv: KV, plan: WorkPlan, key_KTD: torch.Tensor, value_KTD: torch.Tensor) -> None:
        """Writes this step's keys and values to their slots, then makes the page copies."""

    @abstractmethod
    def attend(
        self,
        kv: KV,
        plan: WorkPlan,
        query_HTD: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """softmax(mask(cap(scale * QK^T))) V, [T, H, value_dim] in the query's dtype.

        Args:
            scale: positive.
            softcap: scores become `softcap * tanh(score / softcap)` before the mask.
            sinks_H: a logit per head that takes part in the softmax and has no value.
        """


def copied_slots(copies: PageCopies, page_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """int64 [slots] each: the slots that page copies read and write."""
    copy = np.repeat(np.arange(len(copies)), copies.num_slots)
    ends = np.cumsum(copies.num_slots)
    offset = np.arange(len(copy)) - np.repeat(ends - copies.num_slots, copies.num_slots)
    return (
        copies.src[copy].astype(np.int64) * page_size + offset,
        copies.dst[copy].astype(np.int64) * page_size + offset,
    )
