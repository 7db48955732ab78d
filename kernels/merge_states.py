"""Merging partial attention results of the same queries over different keys.

The state of a query over some keys is (m, l, o): the largest score, the sum of exp(score - m) and the weighted sum of
values. Merging two states is associative, so attention can be cut at will:

    m = max(m1, m2),  l = l1 e^(m1-m) + l2 e^(m2-m),  o = o1 e^(m1-m) + o2 e^(m2-m)      (result: o / l)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class MergePlan:
    """In which order the partial states of every query are merged: round i merges each query's i-th state.

    Attributes:
        queries: per round, int64 tensor of the queries that have an i-th state; round 0 has them all in order.
        states: per round, int64 tensor of those states.
    """

    queries: tuple[torch.Tensor, ...]
    states: tuple[torch.Tensor, ...]


def plan_merge(
    query: npt.NDArray[np.int64], state: npt.NDArray[np.int64], position: npt.NDArray[np.int64]
) -> MergePlan:
    """Merges the states of each query in the order of the key positions they cover.

    Args:
        query: [states], the query of each state; every query has at least one.
        state: [states], where the state is kept.
        position: [states], the first key position it covers.
    """
    order = np.lexsort((position, query))
    query, state = query[order], state[order]
    rank = np.arange(len(query)) - np.searchsorted(query, query)
    rounds = [np.flatnonzero(rank == r) for r in range(int(rank.max(initial=0)) + 1)]
    return MergePlan(
        tuple(torch.from_numpy(query[at]) for at in rounds),
        tuple(torch.from_numpy(state[at]) for at in rounds),
    )


def merge_states(
    plan: MergePlan,
    max_PH: torch.Tensor,
    sum_PH: torch.Tensor,
    out_PHD: torch.Tensor,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """[T, H, D] fp32: the merged and normalized results of P partial states.

    A state over no visible key has `sum == 0` and any finite `max`. Sinks are a logit without a value and enter once.
    """
    max_TH, sum_TH, out_THD = (states[plan.states[0]] for states in (max_PH, sum_PH, out_PHD))
    for queries, states in zip(plan.queries[1:], plan.states[1:], strict=True):
        old, new = max_TH[queries], max_PH[states]
        largest = torch.maximum(old, new)
        old_weight, new_weight = torch.exp(old - largest), torch.exp(new - largest)
        max_TH[queries] = largest
        sum_TH[queries] = sum_TH[queries] * old_weight + sum_PH[states] * new_weight
        out_THD[queries] = out_THD[queries] * old_weight.unsqueeze(-1) + out_PHD[states] * new_weight.unsqueeze(-1)
    if sinks_H is not None:
        sinks = sinks_H.float().expand_as(max_TH)
        largest = torch.maximum(max_TH, sinks)
        weight = torch.exp(max_TH - largest)
        sum_TH = sum_TH * weight + torch.exp(sinks - largest)
        out_THD = out_THD * weight.unsqueeze(-1)
    return out_THD / sum_TH.unsqueeze(-1)
