"""top_k, top_p and min_p: which tokens of a chunk of rows keep their weights.

The filters and their order are those of transformers: temperature, top_k, top_p, min_p. (vLLM applies min_p
before top_k and top_p, which gives other samples where min_p meets top_p.)

Shape suffixes: B rows of a chunk, V vocabulary, W the W largest logits of a row in descending order.
"""

from __future__ import annotations

import numpy as np
import torch

from batchkv.sampling_batch import ChunkParams

# How many of a row's largest logits are looked at to find where top_k and top_p cut; the whole row is sorted
# only when the cut lies beyond the last of these.
_WIDTHS = (64, 1024)


def remove_filtered(
    weights_BV: torch.Tensor, logits_BV: torch.Tensor, best_B: torch.Tensor, mass_B: torch.Tensor, rows: ChunkParams
) -> None:
    """Sets the weights of removed tokens to 0, in place.

    Args:
        weights_BV: fp32 [B, V], exp((logits - best) / temperature).
        logits_BV: fp32 [B, V]. Not changed.
        best_B: fp32 [B], the greatest logits.
        mass_B: float64 [B], the sums of all weights.
        rows: their parameters.
    """
    lowest_B, ties_B = _cut(logits_BV, best_B, mass_B, rows)
    weights_BV.masked_fill_(logits_BV < lowest_B[:, None], 0)
    _remove_ties(weights_BV, logits_BV, lowest_B, ties_B)
    # The likeliest token is never removed and weighs 1, so min_p times its weight is min_p.
    if bool((rows.min_p > 0).any()):
        weights_BV.masked_fill_(weights_BV < rows.min_p[:, None], 0)


def _cut(
    logits_BV: torch.Tensor, best_B: torch.Tensor, mass_B: torch.Tensor, rows: ChunkParams
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
    logits_BW: torch.Tensor, best_B: torch.Tensor, mass_B: torch.Tensor, rows: ChunkParams, vocabulary: int
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
