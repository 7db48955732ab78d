"""From logits to the next token of every row, or the one given, and its log-probability.

Shape suffixes: L rows of logits, B rows that are drawn, M tokens that are scored, U rows of logits that these have, V
vocabulary, N blocks of tokens, K tokens of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchkv.random_numbers import uniforms
from batchkv.sampling_batch import AllowedTokens, ChunkParams, SamplingBatch
from batchkv.sampling_source import Choice, SampledFrom, Sources, entropies_of
from batchkv.token_filters import remove_filtered
from batchkv.token_weights import ChunkMemory, chunk_rows, search, select, weigh
from batchkv.transfers import to_device


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of each of B rows, on the device of the logits, which may still be computing it.

    Attributes:
        token_ids: int64 [B], each in the vocabulary.
        logprobs: float32 [B], log-softmax of logits / temperature (greedy rows: of the logits) at the token,
            before any filter.
        is_valid: bool [B], false where there is no distribution to sample from: the logits hold a NaN or a +inf, or
            mask every token with -inf, or allowed tokens have no weight. The row's token and logprob mean nothing then.
        source: what they were drawn from; None unless asked for. Means nothing where `is_valid` is false.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    is_valid: torch.Tensor
    source: SampledFrom | None = None


@torch.no_grad()
def sample(
    logits_LV: torch.Tensor,
    batch: SamplingBatch,
    positions: npt.NDArray[np.int64],
    logits_rows: npt.NDArray[np.int64] | None = None,
    allowed: AllowedTokens | None = None,
    *,
    with_source: bool = False,
) -> Sampled:
    """Samples one token per row.

    Greedy rows take the likeliest token, the lowest id among equals. Other rows invert the CDF over the
    tokens kept, in vocabulary order, at `uniforms(key, position)`. A row's result does not depend on the
    other rows.

    Args:
        logits_LV: fp32, bf16 or fp16 on any device. Tokens at -inf are never sampled. Not changed.
        batch: parameters of the B rows.
        positions: int64 [B], index of the token within its sample.
        logits_rows: int64 [B], which of the L logits each row is drawn from; by default there is one for each.
        allowed: the tokens that some rows are limited to, before all filters. Log-probabilities are as without.
        with_source: tell what the tokens were drawn from, too. Where a row is filtered or limited, the host waits for
            the device.

    Raises:
        ValueError: the arguments have different numbers of rows.
    """
    if logits_rows is None:
        logits_rows = np.arange(len(logits_LV))
    if not len(logits_rows) == len(batch) == len(positions):
        raise ValueError(
            f"{len(logits_rows)} rows of logits, {len(batch)} of parameters and {len(positions)} positions: "
            "must be as many of each"
        )
    uniforms_B = uniforms(batch.key, positions)
    # Made before the chunks: results allocated between their temporaries would keep the heap from reusing these.
    device = logits_LV.device
    token_ids_B = torch.empty(len(batch), dtype=torch.int64, device=device)
    logprobs_B, best_B = (torch.empty(len(batch), dtype=torch.float32, device=device) for _ in range(2))
    memory = ChunkMemory.of(logits_LV, len(batch))
    sources = Sources(len(batch), device) if with_source else None
    for kind, rows, bits in _chunks(batch, logits_LV, allowed):
        params = ChunkParams.on(device, batch.take(rows), uniforms_B[rows])
        allowed_BV = None if bits is None else _unpacked(bits, logits_LV)
        at = to_device(rows, device)
        on_drawn = None if sources is None else partial(sources.add, at)
        logits_BV = select(logits_LV, logits_rows[rows], memory, as_floats=kind is _Kind.FILTERED)
        drawn = _draw_chunk(logits_BV, kind, params, memory, allowed_BV, on_drawn)
        token_ids_B[at], logprobs_B[at], best_B[at] = drawn
    return Sampled(token_ids_B, logprobs_B, best_B.isfinite(), sources.gathered() if sources else None)


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """What the model says of M given tokens, on the device of the logits, which may still be computing it.

    Attributes:
        logprobs: float32 [M], log-softmax of the logits at the token; NaN where they hold a NaN or a +inf, or mask
            every token with -inf.
        is_greedy: bool [M], whether it is the likeliest token, the lowest id among equals.
    """

    logprobs: torch.Tensor
    is_greedy: torch.Tensor


@torch.no_grad()
def score(
    logits_LV: torch.Tensor,
    rows: npt.NDArray[np.int64],
    targets: npt.NDArray[np.integer[Any]],
    temperature: float = 1.0,
) -> ScoredTokens:
    """Log-probabilities of given tokens: the bits that `sample` gives rows of this temperature with these tokens.

    A token's result does not depend on the others.

    Args:
        logits_LV: fp32, bf16 or fp16 on any device. Not changed.
        rows: int64 [M], which of the L logits each token is scored with; each of them is worked on once.
        targets: int [M], the tokens, in the vocabulary.
        temperature: what logits are divided by; at 1 they are those of greedy rows.
    """
    device = logits_LV.device
    if len(rows) == 0:
        nothing = torch.empty(0, dtype=torch.float32, device=device)
        return ScoredTokens(nothing, nothing.bool())
    distinct, which = np.unique(rows, return_inverse=True)
    best_U, log_mass_U, likeliest_U = (
        torch.empty(len(distinct), dtype=dtype, device=device) for dtype in (torch.float32, torch.float64, torch.int64)
    )
    step, memory = chunk_rows(logits_LV), ChunkMemory.of(logits_LV, len(distinct))
    for start in range(0, len(distinct), step):
        part = slice(start, start + step)
        logits_BV = select(logits_LV, distinct[part], memory, as_floats=False)
        weighed = weigh(logits_BV, torch.full_like(best_U[part], temperature), memory)
        best_U[part], likeliest_U[part] = weighed.best, weighed.likeliest
        log_mass_U[part] = weighed.mass.log()
    rows_M, which_M, targets_M = (to_device(a.astype(np.int64), device) for a in (rows, which, targets))
    # where there is no distribution the weight of the greatest logit is NaN, and so is the mass
    scaled_M = (logits_LV[rows_M, targets_M].float() - best_U[which_M]) / temperature
    logprobs_M = scaled_M - log_mass_U[which_M]
    return ScoredTokens(logprobs_M.float(), likeliest_U[which_M] == targets_M)


class _Kind(IntEnum):
    """What a row needs. Rows of a kind are worked on together, so that none pays for another's filters."""

    GREEDY = 0
    UNFILTERED = 1
    FILTERED = 2


def _chunks(
    batch: SamplingBatch, logits_LV: torch.Tensor, allowed: AllowedTokens | None = None
) -> Iterator[tuple[_Kind, npt.NDArray[np.int64], npt.NDArray[np.int32] | None]]:
    """Every row once, with the bits of allowed tokens where they are limited.

    Rows of one kind at a time, ascending, limited ones on their own, as many as fit the memory for temporaries.
    """
    step = chunk_rows(logits_LV)
    filtered_B = (batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)
    kind_B = np.where(filtered_B, _Kind.FILTERED, _Kind.UNFILTERED)
    kind_B[batch.temperature == 0] = _Kind.GREEDY
    place_B = np.full(len(batch), -1)  # of each row among the limited ones
    if allowed is not None:
        place_B[allowed.rows] = np.arange(len(allowed.rows))
    for kind in _Kind:
        of_kind = kind_B == kind
        for is_limited in (False, True) if allowed is not None else (False,):
            rows = np.flatnonzero(of_kind & ((place_B >= 0) == is_limited))
            for start in range(0, len(rows), step):
                chunk = rows[start : start + step]
                yield kind, chunk, allowed.bits[place_B[chunk]] if allowed is not None and is_limited else None


@dataclass(frozen=True, slots=True)
class _Whole:
    """What is true of all tokens, whatever is allowed or kept.

    Attributes:
        best: fp32 [B], the greatest logits.
        mass: float64 [B], the sums of all weights beside theirs.
        entropies: fp32 [B]; None unless asked for.
    """

    best: torch.Tensor
    mass: torch.Tensor
    entropies: torch.Tensor | None


def _whole(logits_BV: torch.Tensor, temperature_B: torch.Tensor, memory: ChunkMemory, with_entropies: bool) -> _Whole:
    weighed = weigh(logits_BV, temperature_B, memory)
    return _Whole(weighed.best, weighed.mass, entropies_of(weighed.weights) if with_entropies else None)


def _draw_chunk(
    logits_BV: torch.Tensor,
    kind: _Kind,
    rows: ChunkParams,
    memory: ChunkMemory,
    allowed_BV: torch.Tensor | None = None,
    on_drawn: Callable[[Choice], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens (int64 [B]), log-probabilities (fp32 [B]) and the greatest logits (fp32 [B]) of a chunk.

    The greatest logit is not finite where there is nothing to sample from. `on_drawn` is told what they come from.
    """
    vocabulary, wants_entropies = logits_BV.shape[1], on_drawn is not None
    open_BV = logits_BV if allowed_BV is None else logits_BV.masked_fill(~allowed_BV, -torch.inf)
    whole = None if allowed_BV is None else _whole(logits_BV, rows.temperature, memory, wants_entropies)
    weighed = weigh(open_BV, rows.temperature, memory)
    best_B, weights_BNK, sums_BN = weighed.best, weighed.weights, weighed.sums
    if whole is None:  # before the filters, which work in place
        whole = _Whole(best_B, weighed.mass, entropies_of(weights_BNK) if wants_entropies else None)
    if kind is _Kind.FILTERED:
        weights_BV = weights_BNK.flatten(1)[:, :vocabulary]
        remove_filtered(weights_BV, open_BV, best_B, weighed.mass, rows)
        sums_BN = weights_BNK.sum(-1)
    tokens_B = weighed.likeliest if kind is _Kind.GREEDY else search(weights_BNK, sums_BN, rows.uniform)
    chosen_B = logits_BV.gather(1, tokens_B[:, None])[:, 0].float()
    logprobs_B = (chosen_B - whole.best) / rows.temperature - whole.mass.log()
    if on_drawn and whole.entropies is not None:
        scaled_B = (chosen_B - best_B) / rows.temperature
        kept_mass_B = sums_BN.double().sum(-1)
        is_greedy, is_cut = kind is _Kind.GREEDY, kind is _Kind.FILTERED or allowed_BV is not None
        on_drawn(Choice(tokens_B, scaled_B, weights_BNK, kept_mass_B, logits_BV, whole.entropies, is_greedy, is_cut))
    return tokens_B, logprobs_B.float(), torch.where(whole.best.isfinite(), best_B, whole.best)


def _unpacked(bits: npt.NDArray[np.int32], logits_LV: torch.Tensor) -> torch.Tensor:
    """bool [B, V] on the device of the logits, from int32 [B, words], which go over packed."""
    octets = to_device(bits.astype("<i4", copy=False).view(np.uint8), logits_LV.device)
    powers = torch.arange(8, dtype=torch.uint8, device=logits_LV.device)
    return ((octets[:, :, None] >> powers) & 1).bool().flatten(1)[:, : logits_LV.shape[1]]
