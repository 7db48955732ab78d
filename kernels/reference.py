"""The reference: every row on its own, dense, in fp32. Slow and plainly right; others are held to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from batchkv.kernels.attention import AttentionBackend, copied_slots
from batchkv.kernels.quantization import as_stored, is_quantized
from batchkv.kv_layout import LayerSpec
from batchkv.step import AttentionBatch


@dataclass(frozen=True, slots=True)
class ReferenceKV:
    """Keys and values by slot, [slots, K, D], and their scales, [slots, K], if they are quantized."""

    key_SKD: torch.Tensor
    value_SKD: torch.Tensor
    key_scale_SK: torch.Tensor | None
    value_scale_SK: torch.Tensor | None


class ReferenceAttention(AttentionBackend[ReferenceKV, AttentionBatch]):
    name = "reference"
    is_batch_invariant = False

    def allocate(
        self, num_pages: int, page_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> ReferenceKV:
        heads = (num_pages * page_size, spec.num_kv_heads)
        scales = (torch.zeros(heads, device=device) if is_quantized(dtype) else None for _ in range(2))
        return ReferenceKV(
            torch.zeros(*heads, spec.key_dim, dtype=dtype, device=device),
            torch.zeros(*heads, spec.value_dim, dtype=dtype, device=device),
            *scales,
        )

    def plan(self, batch: AttentionBatch, spec: LayerSpec) -> AttentionBatch:
        return batch

    def store(self, kv: ReferenceKV, plan: AttentionBatch, key_KTD: torch.Tensor, value_KTD: torch.Tensor) -> None:
        for pool, scales, new in (
            (kv.key_SKD, kv.key_scale_SK, key_KTD),
            (kv.value_SKD, kv.value_scale_SK, value_KTD),
        ):
            for part, new_part in as_stored(pool, scales, new):
                _write(part, plan, new_part)

    def attend(
        self,
        kv: ReferenceKV,
        plan: AttentionBatch,
        query_HTD: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = []
        for row in range(len(plan.kv_lens)):
            lo, hi = plan.cu_seqlens_q[row : row + 2].tolist()
            rows.append(_attend_row(kv, plan, row, query_HTD[:, lo:hi], scale, softcap, sinks_H))
        return torch.cat(rows).to(query_HTD.dtype)


def _write(pool: torch.Tensor, batch: AttentionBatch, new_KT: torch.Tensor) -> None:
    """To the slots of the step's tokens, then makes the page copies."""
    pool[torch.from_numpy(batch.slots)] = new_KT.transpose(0, 1)
    for copies in batch.copies:
        src, dst = copied_slots(copies, batch.page_size)
        pool[torch.from_numpy(dst)] = pool[torch.from_numpy(src)]


def _read(pool: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    """[K, slots, D] in fp32."""
    vectors_SKD = pool[slots].float()
    return (vectors_SKD if scales is None else vectors_SKD * scales[slots].unsqueeze(2)).transpose(0, 1)


def _attend_row(
    kv: ReferenceKV,
    batch: AttentionBatch,
    row: int,
    query_HQD: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one row's queries, fp32 [Q, H, value_dim]."""
    kv_len, num_queries = int(batch.kv_lens[row]), query_HQD.shape[1]
    first = kv_len - num_queries
    seen_from = 0 if batch.window is None else max(0, first - batch.window + 1)
    positions = np.arange(seen_from, kv_len)
    pages = batch.page_table[row, positions // batch.page_size].astype(np.int64)
    slots = torch.from_numpy(pages * batch.page_size + positions % batch.page_size)
    group = query_HQD.shape[0] // kv.key_SKD.shape[1]
    key_HSD = _read(kv.key_SKD, kv.key_scale_SK, slots).repeat_interleave(group, dim=0)
    value_HSD = _read(kv.value_SKD, kv.value_scale_SK, slots).repeat_interleave(group, dim=0)

    scores_HQS = query_HQD.float() @ key_HSD.transpose(1, 2) * scale
    if softcap is not None:
        scores_HQS = softcap * torch.tanh(scores_HQS / softcap)
    distance_QS = torch.arange(first, kv_len)[:, None] - torch.from_numpy(positions)
    visible_QS = (distance_QS >= 0) & (distance_QS < (batch.window or math.inf))
    scores_HQS = scores_HQS.masked_fill(~visible_QS, -math.inf)
    if sinks_H is not None:
        sink_HQ1 = sinks_H.float().reshape(-1, 1, 1).expand(-1, num_queries, 1)
        weights_HQS = torch.softmax(torch.cat([scores_HQS, sink_HQ1], dim=2), dim=2)[:, :, :-1]
    else:
        weights_HQS = torch.softmax(scores_HQS, dim=2)
    return (weights_HQS @ value_HSD).transpose(0, 1)
