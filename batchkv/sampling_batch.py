"""Sampling parameters of many rows as arrays, and what rows are limited to.

Shape suffixes: B rows, C of them that are constrained, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchkv.sampling_params import SamplingParams
from batchkv.transfers import to_device


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of B rows as arrays.

    Attributes:
        temperature: float32 [B], 0 is greedy; otherwise a normal number.
        top_k: int32 [B], 0 keeps all.
        top_p: float64 [B], 1 keeps all. In double precision, or a cut at exactly 0.3 would be at 0.30000001.
        min_p: float32 [B], 0 keeps all.
        key: uint64 [B], from `random_numbers.stream_keys`.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    key: npt.NDArray[np.uint64]

    @classmethod
    def from_params(cls, params: Sequence[SamplingParams], keys: npt.ArrayLike) -> SamplingBatch:
        """Parameters of each row, with the key of its stream of random numbers (uint64 [B])."""
        temperature = np.array([p.temperature for p in params], np.float64)
        limits = np.finfo(np.float32)
        # A temperature that fp32 cannot hold would become 0 (greedy) or inf: take the nearest that it can.
        temperature = np.where(temperature > 0, np.clip(temperature, limits.tiny, limits.max), 0)
        int32_max = np.iinfo(np.int32).max
        return cls(
            temperature=temperature.astype(np.float32),
            top_k=np.array([min(p.top_k, int32_max) for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float64),
            min_p=np.array([p.min_p for p in params], np.float32),
            key=np.asarray(keys, np.uint64),
        )

    def __len__(self) -> int:
        return len(self.key)

    def take(self, indices: npt.NDArray[np.integer]) -> SamplingBatch:
        """The rows at `indices`, in that order; repeats are fine."""
        return SamplingBatch(
            self.temperature[indices],
            self.top_k[indices],
            self.top_p[indices],
            self.min_p[indices],
            self.key[indices],
        )


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """What rows whose output is constrained may be given.

    Attributes:
        rows: int64 [C], which of the B rows these are, ascending.
        bits: int32 [C, at least ceil(V / 32)]: bit t % 32 of word t // 32 says whether token t is allowed. Bits past
            the vocabulary mean nothing.
    """

    rows: npt.NDArray[np.int64]
    bits: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ChunkParams:
    """Parameters of the rows of a chunk, each [B], on the logits' device; temperature is 1 in greedy rows."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, batch: SamplingBatch, uniforms_B: npt.NDArray[np.float64]) -> ChunkParams:
        temperature_B = np.where(batch.temperature == 0, np.float32(1), batch.temperature)
        arrays = (temperature_B, batch.top_k.astype(np.int64), batch.top_p, batch.min_p, uniforms_B)
        return cls(*(to_device(array, device) for array in arrays))

    def take(self, indices: torch.Tensor) -> ChunkParams:
        return ChunkParams(
            self.temperature[indices],
            self.top_k[indices],
            self.top_p[indices],
            self.min_p[indices],
            self.uniform[indices],
        )
