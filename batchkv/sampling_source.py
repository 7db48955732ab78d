"""What tokens were drawn from: the tokens kept, and log-probabilities and entropies under them.

Shape suffixes: B rows of a chunk, V vocabulary, N blocks of tokens, K tokens of one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
class Choice:
    """How the tokens of a chunk were chosen.

    Attributes:
        tokens: int64 [B].
        scaled: fp32 [B], logit / temperature of the token, relative to the likeliest that was allowed.
        weights: fp32 [B, N, K], of the tokens kept; 0 at all others.
        mass: float64 [B], the sums of these.
        logits: fp32 [B, V], of all tokens.
        entropies: fp32 [B], of all tokens before any filter.
        is_greedy: whether each is the likeliest that was allowed.
        is_cut: whether filters, or what is allowed, may have left some tokens out.
    """

    tokens: torch.Tensor
    scaled: torch.Tensor
    weights: torch.Tensor
    mass: torch.Tensor
    logits: torch.Tensor
    entropies: torch.Tensor
    is_greedy: bool
    is_cut: bool


class Sources:
    """Gathers what the tokens of B rows were drawn from, chunk by chunk."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._logprobs_B = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._entropies_B = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._counts_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._rows: list[torch.Tensor] = []
        self._ids: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor, choice: Choice) -> None:
        """Rows (int64 [B]) of a chunk, in ascending order."""
        self._rows.append(rows)
        self._entropies_B[rows] = choice.entropies
        if choice.is_greedy:
            self._ids.append(choice.tokens.int())
            self._counts_B[rows] = 1
            return
        self._logprobs_B[rows] = (choice.scaled - choice.mass.log()).float()
        if choice.is_cut:
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


def entropies_of(weights_BNK: torch.Tensor) -> torch.Tensor:
    """Of the distributions that weights of at most 1 are of, in nats: fp32 [B]."""
    mass_B = weights_BNK.sum(-1).double().sum(-1)
    # entr is -w log w, 0 for tokens without weight; those that fp32 cannot tell from none add nothing that shows
    spread_B: torch.Tensor = torch.special.entr(weights_BNK).sum(-1).double().sum(-1)
    return (mass_B.log() + spread_B / mass_B).float()
