"""From logits to the next token of every row, or the one given, and its log-probability.

The filters and their order are those of transformers: temperature, top_k, top_p, min_p. (vLLM applies min_p
before top_k and top_p, which gives other samples where min_p meets top_p.)

Shape suffixes: L rows of logits, B rows that are drawn, M tokens that are scored, U rows of logits that these have, V
vocabulary, W the W largest logits of a row in descending order, N blocks of _BLOCK tokens, K tokens of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchkv.kernels import native_sampling
from batchkv.random_numbers import uniforms
from batchkv.sampling_params import SamplingParams
from batchkv.transfers import to_device

# Tokens whose weights are summed together for the two-level search of the inverse CDF: near the square root
# of common vocabularies (49k to 262k), where the two levels cost the same.
_BLOCK = 256
# How many of a row's largest logits are looked at to find where top_k and top_p cut; the whole row is sorted
# only when the cut lies beyond the last of these.
_WIDTHS = (64, 1024)
# Bytes of fp32 logits worked on at once. On a CPU they stay in cache. Elsewhere they are enough to fill the
# device; sorting whole rows takes some ten times as much.
_CHUNK_BYTES_CPU = 4 << 20
_CHUNK_BYTES = 128 << 20


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
class SampledFrom:
    """What the tokens of B rows were really drawn from, on the device of the logits.

    A row's log-probability is that of its token under the softmax of logits / temperature over the tokens kept.

    Attributes:
        logprobs: float32 [B]: `Sampled.logprobs`, to the bit, where all tokens were kept; 0 for greedy rows.
        entropies: float32 [B], in nats, of softmax(logits / temperature) (greedy rows: of the logits) over all of the
            vocabulary, before any filter.
        kept_ids: int32 [kept], the tokens that were allowed and passed all filters, by row, ascending within it. For a
            greedy row its token. Tokens with a weight of 0 in fp32 cannot be drawn and are not among them.
        kept_counts: int64 [B], how many of these each row has; 0 where all of the vocabulary was kept.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    kept_ids: torch.Tensor
    kept_counts: torch.Tensor


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
    memory = _Memory.of(logits_LV, len(batch))
    sources = _Sources(len(batch), device) if with_source else None
    for kind, rows, bits in _chunks(batch, logits_LV, allowed):
        params = _Rows.on(device, batch.take(rows), uniforms_B[rows])
        allowed_BV = None if bits is None else _unpacked(bits, logits_LV)
        at = to_device(rows, device)
        on_drawn = None if sources is None else partial(sources.add, at, kind)
        logits_BV = _select(logits_LV, logits_rows[rows], memory, as_floats=kind is _Kind.FILTERED)
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
    step, memory = _chunk_rows(logits_LV), _Memory.of(logits_LV, len(distinct))
    for start in range(0, len(distinct), step):
        part = slice(start, start + step)
        logits_BV = _select(logits_LV, distinct[part], memory, as_floats=False)
        weighed = _weigh(logits_BV, torch.full_like(best_U[part], temperature), memory)
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


@dataclass(frozen=True, slots=True)
class _Rows:
    """Parameters of the rows of a chunk, each [B], on the logits' device; temperature is 1 in greedy rows."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, batch: SamplingBatch, uniforms_B: npt.NDArray[np.float64]) -> _Rows:
        temperature_B = np.where(batch.temperature == 0, np.float32(1), batch.temperature)
        arrays = (temperature_B, batch.top_k.astype(np.int64), batch.top_p, batch.min_p, uniforms_B)
        return cls(*(to_device(array, device) for array in arrays))

    def take(self, indices: torch.Tensor) -> _Rows:
        return _Rows(
            self.temperature[indices],
            self.top_k[indices],
            self.top_p[indices],
            self.min_p[indices],
            self.uniform[indices],
        )


def _chunks(
    batch: SamplingBatch, logits_LV: torch.Tensor, allowed: AllowedTokens | None = None
) -> Iterator[tuple[_Kind, npt.NDArray[np.int64], npt.NDArray[np.int32] | None]]:
    """Every row once, with the bits of allowed tokens where they are limited.

    Rows of one kind at a time, ascending, limited ones on their own, as many as fit the memory for temporaries.
    """
    step = _chunk_rows(logits_LV)
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


def _chunk_rows(logits_LV: torch.Tensor) -> int:
    """How many rows are worked on at once."""
    chunk_bytes = _CHUNK_BYTES_CPU if logits_LV.device.type == "cpu" else _CHUNK_BYTES
    return max(1, chunk_bytes // (4 * logits_LV.shape[1]))


@dataclass(frozen=True, slots=True)
class _Memory:
    """What all chunks of a call are worked on in: memory that is new each time costs a CPU as much as the work.

    Attributes:
        logits: fp32 [chunk, V]; empty if the logits are fp32.
        weights: fp32 [chunk, N * K].
    """

    logits: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, logits_LV: torch.Tensor, num_rows: int) -> _Memory:
        rows, vocabulary = min(_chunk_rows(logits_LV), num_rows), logits_LV.shape[1]
        blocks = -(-vocabulary // _BLOCK)
        return cls(
            logits_LV.new_empty(0 if logits_LV.dtype == torch.float32 else rows, vocabulary, dtype=torch.float32),
            logits_LV.new_empty(rows, blocks * _BLOCK, dtype=torch.float32),
        )


def _select(logits_LV: torch.Tensor, rows: npt.NDArray[np.int64], memory: _Memory, *, as_floats: bool) -> torch.Tensor:
    """The given rows; a view where nothing has to be moved. As fp32, where that is wanted or `_weigh` needs it."""
    first = int(rows[0])
    if np.array_equal(rows, np.arange(first, first + len(rows))):
        selected = logits_LV[first : first + len(rows)]
    else:
        selected = logits_LV[to_device(rows, logits_LV.device)]
    is_read = native_sampling.is_covered(selected.device) and native_sampling.reads(selected.dtype)
    if selected.dtype == torch.float32 or (is_read and not as_floats):
        return selected
    return memory.logits[: len(rows)].copy_(selected)


def _greatest(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest logit of each row (fp32 [B]) and its token (int64 [B]), the first of equals."""
    if logits_BV.device.type != "cpu":
        return logits_BV.max(-1)  # documented to be the first
    # torch's on a CPU has no vector instructions: ten times slower
    return logits_BV.amax(-1), torch.from_numpy(logits_BV.numpy().argmax(-1))


@dataclass(frozen=True, slots=True)
class _Weighed:
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


def _weigh(logits_BV: torch.Tensor, temperature_B: torch.Tensor, memory: _Memory) -> _Weighed:
    """The likeliest token weighs 1. Subtracting before dividing keeps tiny temperatures from overflowing."""
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
    return _Weighed(best_B, likeliest_B, weights_BNK, weights_BNK.sum(-1))


@dataclass(frozen=True, slots=True)
class _Choice:
    """How the tokens of a chunk were chosen.

    Attributes:
        tokens: int64 [B].
        scaled: fp32 [B], logit / temperature of the token, relative to the likeliest that was allowed.
        weights: fp32 [B, N, K], of the tokens kept; 0 at all others.
        mass: float64 [B], the sums of these.
        logits: fp32 [B, V], of all tokens.
        entropies: fp32 [B], of all tokens before any filter.
        is_limited: whether only some were allowed.
    """

    tokens: torch.Tensor
    scaled: torch.Tensor
    weights: torch.Tensor
    mass: torch.Tensor
    logits: torch.Tensor
    entropies: torch.Tensor
    is_limited: bool


class _Sources:
    """Gathers what the tokens of B rows were drawn from, chunk by chunk."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._logprobs_B = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._entropies_B = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._counts_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._rows: list[torch.Tensor] = []
        self._ids: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor, kind: _Kind, choice: _Choice) -> None:
        """Rows (int64) of one kind, in ascending order."""
        self._rows.append(rows)
        self._entropies_B[rows] = choice.entropies
        if kind is _Kind.GREEDY:
            self._ids.append(choice.tokens.int())
            self._counts_B[rows] = 1
            return
        self._logprobs_B[rows] = (choice.scaled - choice.mass.log()).float()
        if kind is _Kind.FILTERED or choice.is_limited:
            ids, self._counts_B[rows] = _kept(choice.weights, choice.logits)
            self._ids.append(ids)

    def gathered(self) -> SampledFrom:
        """With the ids in the order of the rows."""
        if not self._ids:
            no_ids = self._counts_B.new_empty(0, dtype=torch.int32)
            return SampledFrom(self._logprobs_B, self._entropies_B, no_ids, self._counts_B)
        ids, rows = torch.cat(self._ids), torch.cat(self._rows)
        counts = self._counts_B[rows]
        shift_B = torch.empty_like(self._counts_B)
        shift_B[rows] = counts.cumsum(0) - counts  # where each row's ids begin, as they were added
        shift_B -= self._counts_B.cumsum(0) - self._counts_B
        at = torch.arange(len(ids), device=ids.device)
        at += shift_B.repeat_interleave(self._counts_B, output_size=len(ids))
        return SampledFrom(self._logprobs_B, self._entropies_B, ids[at], self._counts_B)


def _kept(weights_BNK: torch.Tensor, logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the tokens with weight (int32, row by row) and their number (int64 [B]); none and 0 where it is all."""
    kept_BV = weights_BNK.flatten(1)[:, : logits_BV.shape[1]] > 0
    counts_B = kept_BV.sum(-1)
    counts_B.masked_fill_(counts_B == (logits_BV > -torch.inf).sum(-1), 0)
    kept_BV &= (counts_B > 0)[:, None]
    return kept_BV.nonzero()[:, 1].int(), counts_B


def _entropies(weights_BNK: torch.Tensor) -> torch.Tensor:
    """Of the distributions that weights of at most 1 are of, in nats: fp32 [B]."""
    mass_B = weights_BNK.sum(-1).double().sum(-1)
    # entr is -w log w, 0 for tokens without weight; those that fp32 cannot tell from none add nothing that shows
    spread_B: torch.Tensor = torch.special.entr(weights_BNK).sum(-1).double().sum(-1)
    return (mass_B.log() + spread_B / mass_B).float()


def _draw_chunk(
    logits_BV: torch.Tensor,
    kind: _Kind,
    rows: _Rows,
    memory: _Memory,
    allowed_BV: torch.Tensor | None = None,
    on_drawn: Callable[[_Choice], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens (int64 [B]), log-probabilities (fp32 [B]) and the greatest logits (fp32 [B]) of a chunk.

    The greatest logit is not finite where there is nothing to sample from. `on_drawn` is told what they come from.
    """
    vocabulary, wants_entropies = logits_BV.shape[1], on_drawn is not None
    open_BV = logits_BV if allowed_BV is None else logits_BV.masked_fill(~allowed_BV, -torch.inf)
    whole = None if allowed_BV is None else _whole(logits_BV, rows.temperature, memory, wants_entropies)
    weighed = _weigh(open_BV, rows.temperature, memory)
    best_B, weights_BNK, sums_BN = weighed.best, weighed.weights, weighed.sums
    if whole is None:  # before the filters, which work in place
        whole = _Whole(best_B, weighed.mass, _entropies(weights_BNK) if wants_entropies else None)
    if kind is _Kind.FILTERED:
        weights_BV = weights_BNK.flatten(1)[:, :vocabulary]
        _filter(weights_BV, open_BV, best_B, weighed.mass, rows)
        sums_BN = weights_BNK.sum(-1)
    tokens_B = weighed.likeliest if kind is _Kind.GREEDY else _search(weights_BNK, sums_BN, rows.uniform)
    chosen_B = logits_BV.gather(1, tokens_B[:, None])[:, 0].float()
    logprobs_B = (chosen_B - whole.best) / rows.temperature - whole.mass.log()
    if on_drawn and whole.entropies is not None:
        scaled_B = (chosen_B - best_B) / rows.temperature
        kept_mass_B = sums_BN.double().sum(-1)
        is_limited = allowed_BV is not None
        on_drawn(_Choice(tokens_B, scaled_B, weights_BNK, kept_mass_B, logits_BV, whole.entropies, is_limited))
    return tokens_B, logprobs_B.float(), torch.where(whole.best.isfinite(), best_B, whole.best)


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


def _whole(logits_BV: torch.Tensor, temperature_B: torch.Tensor, memory: _Memory, with_entropies: bool) -> _Whole:
    weighed = _weigh(logits_BV, temperature_B, memory)
    return _Whole(weighed.best, weighed.mass, _entropies(weighed.weights) if with_entropies else None)


def _unpacked(bits: npt.NDArray[np.int32], logits_LV: torch.Tensor) -> torch.Tensor:
    """bool [B, V] on the device of the logits, from int32 [B, words], which go over packed."""
    octets = to_device(bits.astype("<i4", copy=False).view(np.uint8), logits_LV.device)
    powers = torch.arange(8, dtype=torch.uint8, device=logits_LV.device)
    return ((octets[:, :, None] >> powers) & 1).bool().flatten(1)[:, : logits_LV.shape[1]]


def _search(weights_BNK: torch.Tensor, sums_BN: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
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


def _filter(
    weights_BV: torch.Tensor, logits_BV: torch.Tensor, best_B: torch.Tensor, mass_B: torch.Tensor, rows: _Rows
) -> None:
    """Sets the weights of removed tokens to 0, in place. mass_B: sums of all weights, float64."""
    lowest_B, ties_B = _cut(logits_BV, best_B, mass_B, rows)
    weights_BV.masked_fill_(logits_BV < lowest_B[:, None], 0)
    _remove_ties(weights_BV, logits_BV, lowest_B, ties_B)
    # The likeliest token is never removed and weighs 1, so min_p times its weight is min_p.
    if bool((rows.min_p > 0).any()):
        weights_BV.masked_fill_(weights_BV < rows.min_p[:, None], 0)


def _cut(
    logits_BV: torch.Tensor, best_B: torch.Tensor, mass_B: torch.Tensor, rows: _Rows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where top_k and then top_p cut.

    Returns:
        The lowest logit kept (fp32 [B], -inf where both are off), and of the tokens with exactly this logit
        how many are kept (int64 [B], V where it is all of them).
    """
    vocabulary = logits_BV.shape[1]
    lowest_B = torch.full_like(best_B, -torch.inf)
    ties_B = torch.full_like(rows.top_k, vocabulary)
    open_ = ((rows.top_k > 0) | (rows.top_p < 1)).nonzero()[:, 0]
    for width in (*(w for w in _WIDTHS if w < vocabulary), vocabulary):
        if not len(open_):
            break
        logits = logits_BV if len(open_) == len(logits_BV) else logits_BV[open_]
        largest = _largest(logits, width)
        params = rows.take(open_)
        lowest, ties, settled = _cut_within(largest, best_B[open_], mass_B[open_], params, vocabulary)
        lowest_B[open_], ties_B[open_] = lowest, ties
        open_ = open_[~settled]
    return lowest_B, ties_B


def _largest(logits_BV: torch.Tensor, width: int) -> torch.Tensor:
    """The `width` largest logits of each row, descending."""
    if width < logits_BV.shape[1]:
        return logits_BV.topk(width).values
    if logits_BV.device.type == "cpu":
        # Sorts values without their indices, with vector instructions: some ten times as fast as torch.
        return torch.from_numpy(np.sort(logits_BV.numpy())).flip(-1)
    return logits_BV.sort(descending=True).values


def _cut_within(
    logits_BW: torch.Tensor, best_B: torch.Tensor, mass_B: torch.Tensor, rows: _Rows, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_cut` from the W largest logits of each row; the third result is false where these are too few."""
    width = logits_BW.shape[1]
    limited_B = (rows.top_k > 0) & (rows.top_k < vocabulary)
    k_B = torch.where(limited_B, rows.top_k, vocabulary)
    kth_B = logits_BW.gather(1, (k_B.clamp(max=width) - 1)[:, None])
    weights_BW = ((logits_BW - best_B[:, None]) / rows.temperature[:, None]).exp().double()
    top_k_BW = (logits_BW >= kth_B) & (weights_BW > 0)  # all that equal the k-th stay

    # top_p keeps a token when the mass of the likelier ones is below top_p, after top_k is renormalized.
    weights_BW = weights_BW * top_k_BW
    mass_B = torch.where(limited_B, weights_BW.sum(-1), mass_B)
    before_BW = weights_BW.cumsum(-1) - weights_BW
    whole_B = rows.top_p == 1
    kept_BW = top_k_BW & (whole_B[:, None] | (before_BW < (rows.top_p * mass_B)[:, None]))

    last_B = (kept_BW.sum(-1) - 1).clamp(min=0)  # 0 kept: only where the logits are NaN
    lowest_B = logits_BW.gather(1, last_B[:, None])
    equal_BW = logits_BW == lowest_B
    splits_B = (equal_BW & ~kept_BW).any(-1)
    ties_B = torch.where(splits_B, (equal_BW & kept_BW).sum(-1), vocabulary)

    # With top_k the mass is known once all that equal the k-th are here; without, it is known beforehand.
    within_top_k_B = (k_B <= width) & (whole_B | ~top_k_BW[:, -1])
    settled_B = torch.where(limited_B, within_top_k_B, ~kept_BW[:, -1])
    return lowest_B[:, 0], ties_B, settled_B | (width == vocabulary)


def _remove_ties(
    weights_BV: torch.Tensor, logits_BV: torch.Tensor, lowest_B: torch.Tensor, ties_B: torch.Tensor
) -> None:
    """Keeps only the last ties_B of the tokens at the lowest logit, in place.

    Those that stay are the highest ids: as from a stable ascending sort, and the same on every device. (Which
    of them stay in transformers depends on its sort, which is not stable.)
    """
    split = (ties_B < logits_BV.shape[1]).nonzero()[:, 0]
    if not len(split):
        return
    row, token = (logits_BV[split] == lowest_B[split, None]).nonzero(as_tuple=True)
    end_of_row = row.bincount(minlength=len(split)).cumsum(0)
    ties_after = end_of_row[row] - 1 - torch.arange(len(row), device=row.device)
    excess = ties_after >= ties_B[split][row]
    weights_BV[split[row[excess]], token[excess]] = 0
