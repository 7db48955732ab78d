"""What tokens weigh in the draw of a chunk of rows, and the token at a point of their CDF.

Shape suffixes: L rows of logits, B rows of a chunk, V vocabulary, N blocks of _BLOCK tokens, K tokens of one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchkv.kernels import native_sampling
from batchkv.transfers import to_device

# Tokens whose weights are summed together for the two-level search of the inverse CDF: near the square root
# of common vocabularies (49k to 262k), where the two levels cost the same.
_BLOCK = 256
# Bytes of fp32 logits worked on at once. On a CPU they stay in cache. Elsewhere they are enough to fill the
# device; sorting whole rows takes some ten times as much.
_CHUNK_BYTES_CPU = 4 << 20
_CHUNK_BYTES = 128 << 20


def chunk_rows(logits_LV: torch.Tensor) -> int:
    """How many rows of logits make a chunk."""
    chunk_bytes = _CHUNK_BYTES_CPU if logits_LV.device.type == "cpu" else _CHUNK_BYTES
    return max(1, chunk_bytes // (4 * logits_LV.shape[1]))


@dataclass(frozen=True, slots=True)
class ChunkMemory:
    """What all chunks of a call are worked on in: memory that is new each time costs a CPU as much as the work.

    Attributes:
        logits: fp32 [chunk, V]; empty if the logits are fp32.
        weights: fp32 [chunk, N * K].
    """

    logits: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, logits_LV: torch.Tensor, num_rows: int) -> ChunkMemory:
        rows, vocabulary = min(chunk_rows(logits_LV), num_rows), logits_LV.shape[1]
        blocks = -(-vocabulary // _BLOCK)
        return cls(
            logits_LV.new_empty(0 if logits_LV.dtype == torch.float32 else rows, vocabulary, dtype=torch.float32),
            logits_LV.new_empty(rows, blocks * _BLOCK, dtype=torch.float32),
        )


def select(
    logits_LV: torch.Tensor, rows: npt.NDArray[np.int64], memory: ChunkMemory, *, as_floats: bool
) -> torch.Tensor:
    """The given rows; a view where nothing has to be moved. As fp32, where that is wanted or `weigh` needs it."""
    first = int(rows[0])
    if np.array_equal(rows, np.arange(first, first + len(rows))):
        selected = logits_LV[first : first + len(rows)]
    else:
        selected = logits_LV[to_device(rows, logits_LV.device)]
    is_read = native_sampling.is_covered(selected.device) and native_sampling.reads(selected.dtype)
    if selected.dtype == torch.float32 or (is_read and not as_floats):
        return selected
    return memory.logits[: len(rows)].copy_(selected)


@dataclass(frozen=True, slots=True)
class Weighed:
    """What the tokens of a chunk weigh.

    Attributes:
        best: fp32 [B], the greatest logits.
        likeliest: int64 [B], the first tokens that have them.
        weights: fp32 [B, N, K], exp((logits - best) / temperature) in [0, 1]; zeros after the end of the vocabulary.
        sums: fp32 [B, N], of the weights of each block.
    """

    best: torch.Tensor
    likeliest: torch.Tensor
    weights: torch.Tensor
    sums: torch.Tensor

    @property
    def mass(self) -> torch.Tensor:
        """float64 [B], the sum of a row's weights."""
        return self.sums.double().sum(-1)


def weigh(logits_BV: torch.Tensor, temperature_B: torch.Tensor, memory: ChunkMemory) -> Weighed:
    """Weights of all tokens of a chunk, in `memory`, until the next call.

    The likeliest token weighs 1. Subtracting before dividing keeps tiny temperatures from overflowing.

    Args:
        logits_BV: as from `select`. Not changed.
        temperature_B: fp32 [B], above 0.
    """
    rows, vocabulary = logits_BV.shape
    weights = memory.weights[:rows]
    weights_BNK = weights.view(rows, -1, _BLOCK)
    if native_sampling.is_covered(logits_BV.device):
        best_B, likeliest_B = native_sampling.weigh(logits_BV, temperature_B, weights_BNK)
    else:
        best_B, likeliest_B = _greatest(logits_BV)
        weights[:, vocabulary:] = 0
        torch.sub(logits_BV, best_B[:, None], out=weights[:, :vocabulary])
        weights[:, :vocabulary].div_(temperature_B[:, None]).exp_()
    return Weighed(best_B, likeliest_B, weights_BNK, weights_BNK.sum(-1))


def _greatest(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest logit of each row (fp32 [B]) and its token (int64 [B]), the first of equals."""
    if logits_BV.device.type != "cpu":
        return logits_BV.max(-1)  # documented to be the first
    # torch's on a CPU has no vector instructions: ten times slower
    return logits_BV.amax(-1), torch.from_numpy(logits_BV.numpy().argmax(-1))


def search(weights_BNK: torch.Tensor, sums_BN: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """The tokens at the given points of the CDF, int64 [B]: first the block, then the token within it."""
    if native_sampling.is_covered(weights_BNK.device):
        token_B: torch.Tensor = native_sampling.search(weights_BNK, sums_BN, uniforms_B)
        return token_B
    block_B, within_B = _invert_cdf(sums_BN, uniforms_B)
    weights_BK = weights_BNK[torch.arange(len(block_B), device=block_B.device), block_B]
    token_B, _ = _invert_cdf(weights_BK, within_B)
    return block_B * _BLOCK + token_B


def _invert_cdf(weights_BN: torch.Tensor, uniforms_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the uniforms (float64 in [0, 1]) fall in the CDF, and how far into that entry (in [0, 1]).

    The entry has a weight above 0, whatever the rounding, as long as its row has one.
    """
    # Entries without weight get no place in the CDF: a GPU adds in an order that may differ from entry to
    # entry, and could leave them a gap of one rounding error.
    cdf_BN = weights_BN.cumsum(-1, dtype=torch.float64).masked_fill(weights_BN == 0, 0)
    total_B = cdf_BN.amax(-1)
    target_B = torch.minimum(uniforms_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    index_B = (cdf_BN > target_B[:, None]).byte().argmax(-1)  # the first of equals
    weight_B = weights_BN.gather(1, index_B[:, None])[:, 0].double()
    end_B = cdf_BN.gather(1, index_B[:, None])[:, 0]
    return index_B, (1 - (end_B - target_B) / weight_B).clamp(0, 1)
