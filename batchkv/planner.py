"""From prompts to a plan: what is shared, in which order it runs, and how much KV that takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchkv.carried import CachedNodes, Carried, Keep, cached_nodes
from batchkv.errors import RowError
from batchkv.intervals import count_up, subtree_ends
from batchkv.job_plan import TOP_PREFIXES, Plan, SharedPrefix, rows_below
from batchkv.kv_layout import KVLayout
from batchkv.memory_plan import (
    LEAST_SLACK_PAGES,
    MemoryPlan,
    PageCosts,
    page_costs,
    plan_memory,
    plan_memory_beside,
    prefix_pages,
    sequence_pages,
)
from batchkv.sampling_params import SamplingParams
from batchkv.sequence import SequenceTable
from batchkv.token_arena import TokenArena, joined
from batchkv.trie import PrefixTrie, build_trie
from batchkv.wave import Wave

_PREVIEW_TOKENS = 24
_LONGEST_FIRST = "longest first"

Detokenize = Callable[[npt.NDArray[np.int32]], str]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan has to keep to.

    Attributes:
        kv_bytes: the KV budget.
        max_batch_rows: most sequences in flight.
        max_batch_tokens: most tokens in one forward pass.
        page_size: tokens per page; smaller ones are taken where the budget is so tight that partly filled pages matter.
        context_length: most tokens of prompt and output together; None if the model knows no limit.
        share_prefixes: False prefills every row on its own.
    """

    kv_bytes: int
    max_batch_rows: int
    max_batch_tokens: int
    page_size: int = 16
    context_length: int | None = None
    share_prefixes: bool = True


def new_token_limits(wave: Wave, limits: Limits) -> npt.NDArray[np.int64]:
    """int64 [requests]: most tokens each request's samples can have, by `max_tokens` and by the context."""
    wanted = wave.params.column(lambda params: params.max_tokens, np.int64)
    if limits.context_length is None:
        return wanted
    room = limits.context_length - wave.arena.lengths
    return np.where(wave.scored.is_scored, wanted, np.minimum(wanted, room))  # what is scored is not put in


def check_kv_budget(wave: Wave, layout: KVLayout, limits: Limits) -> dict[int, RowError]:
    """Requests that take more KV than the budget has even when nothing else runs, or of which what is scored does not
    fit into the model's context: `too_long`.

    Each group of layers has a pool that holds its largest request. Where requests are largest in different groups,
    those that need most go first.
    """
    length = wave.arena.lengths
    new_tokens = new_token_limits(wave, limits)
    token_bytes = np.array(layout.group_bytes_per_token)
    needed = _tokens_alone(wave, layout, new_tokens) * token_bytes[:, None]
    total = needed.sum(axis=0)
    order = np.argsort(-total, kind="stable")
    pools = np.maximum.accumulate(needed[:, order[::-1]], axis=1)[:, ::-1].sum(axis=0)
    errors = _behind_context(wave, limits)
    for request in order[pools > limits.kv_bytes].tolist():
        errors[request] = RowError(
            "too_long",
            f"prompt of {length[request]} tokens and {new_tokens[request]} to generate need {total[request]:,} bytes "
            f"of KV cache, the budget of {limits.kv_bytes:,} has no room for them: raise --kv-memory or "
            "lower max_tokens",
        )
    return dict(sorted(errors.items()))


def _behind_context(wave: Wave, limits: Limits) -> dict[int, RowError]:
    """Requests of choices that are scored: their prompts alone would fit."""
    if limits.context_length is None:
        return {}
    too_long = np.flatnonzero(wave.scored.is_scored & (wave.arena.lengths > limits.context_length))
    return {
        request: RowError(
            "too_long",
            f"the prompt and what is scored behind it have {wave.arena.lengths[request] + 1} tokens, but the model's "
            f"context of {limits.context_length} must hold all but the last",
        )
        for request in too_long.tolist()
    }


def _tokens_alone(wave: Wave, layout: KVLayout, new_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64 [G, requests]: KV tokens that each request holds at most when nothing else runs."""
    length = wave.arena.lengths
    one_sequence = wave.params.column(lambda params: params.n == 1 or params.greedy, np.bool_)
    tokens = []
    for window in layout.windows:
        prompt = prefix_pages(np.zeros_like(length), length, 1, window)
        output = sequence_pages(length, length + new_tokens - 1, one_sequence, prompt, 1, window)
        tokens.append(prompt + output + (LEAST_SLACK_PAGES if window else 0))
    return np.stack(tokens)


def make_plan(wave: Wave, layout: KVLayout, limits: Limits, detokenize: Detokenize | None = None) -> Plan:
    """Plans a wave.

    Args:
        wave: requests that `check_kv_budget` finds nothing wrong with.
        layout: KV of the model.
        limits: memory and batch limits.
        detokenize: shows in `Plan.shared` how prefixes begin.

    Raises:
        ValueError: a request is scored from before its second or behind its last token, or with other parameters than
            `SCORING`.
    """
    wave.scored.check(wave.params, wave.arena)
    group = wave.group if limits.share_prefixes else np.arange(wave.num_requests)
    trie = build_trie(wave.arena, group)
    ordered = _best_order(wave, layout, limits, trie)
    if ordered is None:  # pages of sharers do not fit into a budget that has room for each alone
        trie = build_trie(wave.arena, np.arange(wave.num_requests))
        ordered = _best_order(wave, layout, limits, trie)
        if ordered is None:
            raise RuntimeError("a row passed check_kv_budget and does not fit the budget")
        ordered = replace(ordered, name=f"{ordered.name}, nothing shared: the KV budget has no room for it")
    return Plan(
        trie=ordered.trie,
        sequences=ordered.sequences,
        costs=ordered.costs,
        memory=ordered.memory,
        order=ordered.name,
        prompt_tokens=int(wave.arena.lengths.sum()),
        shared=_top_prefixes(ordered.trie, wave.arena, detokenize),
        cached=CachedNodes.none(ordered.trie),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PlanOn:
    """A plan that goes on from what is in the cache, the tokens that its trie is of, and what stays after it."""

    plan: Plan
    arena: TokenArena
    keep: Keep


def plan_on(
    carried: Carried,
    wave: Wave,
    needed: npt.NDArray[np.bool_],
    layout: KVLayout,
    limits: Limits,
    *,
    most: Keep = Keep.ALL,
) -> PlanOn | None:
    """Plans a wave that goes on from what is in the cache, and leaves in it what later waves go on from.

    All that the wave computes stays, if that costs no sequence its place in flight; else what is needed; else nothing.

    Args:
        carried: what is in the cache.
        wave: requests.
        needed: bool [outputs], whose KV later waves go on from.
        layout: KV of the model.
        limits: memory and batch limits; the page size is that of `carried`.
        most: no more than this stays.

    Returns:
        None if the wave has no room beside what is in the cache.
    """
    arena = joined([wave.arena, carried.arena])
    group = np.concatenate([wave.group, carried.group])
    new_tokens = new_token_limits(wave, limits)
    trie = build_trie(arena, group)
    of_requests = replace(trie, row_prompt=trie.row_prompt[: wave.num_requests])
    trie = trie.reordered(child_orders(of_requests, wave, new_tokens)[_LONGEST_FIRST])
    of_requests = replace(trie, row_prompt=trie.row_prompt[: wave.num_requests])
    sequences = list_sequences(wave, of_requests, new_tokens)
    has_sequence = np.bincount(sequences.prompt, minlength=trie.num_prompts) > 0
    windowed = any(window is not None for window in layout.windows)
    kept_prompt = trie.row_prompt[wave.num_requests :].astype(np.int64)
    cached = cached_nodes(trie, kept_prompt, carried.handles, has_sequence, windowed=windowed)
    fitted = _kept_and_fitted(carried, of_requests, sequences, needed, cached, layout, limits, most)
    if fitted is None:
        return None
    keep, costs, memory = fitted
    plan = Plan(
        trie=of_requests,
        sequences=sequences,
        costs=costs,
        memory=memory,
        order=_LONGEST_FIRST,
        prompt_tokens=int(wave.arena.lengths.sum()),
        shared=_top_prefixes(of_requests, arena, None),
        cached=cached,
    )
    return PlanOn(plan, arena, keep)


def _kept_and_fitted(
    carried: Carried,
    trie: PrefixTrie,
    sequences: SequenceTable,
    needed: npt.NDArray[np.bool_],
    cached: CachedNodes,
    layout: KVLayout,
    limits: Limits,
    most: Keep,
) -> tuple[Keep, PageCosts, MemoryPlan] | None:
    """Costs and memory where as much is kept as there is room for; None if there is none even for the wave alone."""
    is_needed = np.zeros(len(sequences), np.bool_)
    is_needed[sequences.output_sequence[needed]] = True
    is_needed &= ~sequences.is_scored  # they end without a sequence of their own in the cache
    widest = min(limits.max_batch_rows, max(len(sequences), 1))
    for keep, keeps, least in (
        (Keep.ALL, ~sequences.is_scored, widest),
        (Keep.NEEDED, is_needed, max(widest // 4, 1)),
        (Keep.NOTHING, np.zeros_like(is_needed), 1),
    ):
        if keep > most:
            continue
        costs = page_costs(trie, sequences, layout, carried.page_size, cached=cached, keeps=keeps)
        memory = plan_memory_beside(
            carried,
            costs,
            layout,
            budget_bytes=limits.kv_bytes,
            max_rows=limits.max_batch_rows,
            max_batch_tokens=limits.max_batch_tokens,
        )
        if memory is None or memory.window_rows < least:
            continue
        room = carried.free_pages - np.array(memory.slack_pages)
        if keep == Keep.NOTHING or (costs.kept_beside_any(trie, sequences) <= room).all():
            return keep, costs, memory
    return None


@dataclass(frozen=True, slots=True)
class _Ordered:
    """A trie with its children in one order, and what follows from it."""

    name: str
    trie: PrefixTrie
    sequences: SequenceTable
    costs: PageCosts
    memory: MemoryPlan

    def peak_bytes(self, layout: KVLayout) -> int:
        """KV bytes of the window of sequences that fits."""
        pages = self.costs.peak(self.memory.window_rows)
        return int(pages @ np.array(layout.group_bytes_per_token)) * self.costs.page_size


def _best_order(wave: Wave, layout: KVLayout, limits: Limits, trie: PrefixTrie) -> _Ordered | None:
    """The order that lets most sequences be in flight and then has the lowest peak; None if nothing fits.

    Rows take longest first, so that no long one is left running alone at the end, unless mixing long and short
    children takes less KV. Large pages are preferred to any order.
    """
    new_tokens = new_token_limits(wave, limits)
    orders = {name: trie.reordered(key) for name, key in child_orders(trie, wave, new_tokens).items()}
    sequences_of = {name: list_sequences(wave, in_order, new_tokens) for name, in_order in orders.items()}
    page_size = limits.page_size
    while page_size:
        candidates = []
        for name, in_order in orders.items():
            sequences = sequences_of[name]
            costs = page_costs(in_order, sequences, layout, page_size)
            memory = plan_memory(
                costs,
                layout,
                budget_bytes=limits.kv_bytes,
                max_rows=limits.max_batch_rows,
                max_batch_tokens=limits.max_batch_tokens,
            )
            if memory is not None:
                candidates.append(_Ordered(name, in_order, sequences, costs, memory))
        if candidates:
            return min(candidates, key=lambda c: (-c.memory.window_rows, c.peak_bytes(layout)))
        page_size //= 2
    return None


def child_orders(trie: PrefixTrie, wave: Wave, new_tokens: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.float64]]:
    """Orders to choose from: a sort key for each node among its siblings, by name.

    A node's weight is the KV of its subtree per prompt, its output included.
    """
    own = trie.lengths.astype(np.int64)
    samples = wave.params.column(_num_sequences, np.int64)
    output = np.bincount(trie.row_prompt, new_tokens * samples, minlength=trie.num_prompts)
    np.add.at(own, trie.prompt_node, output.astype(np.int64))
    before = np.concatenate([[0], np.cumsum(own)])
    weight = (before[subtree_ends(trie.prompt_lo, trie.prompt_hi)] - before[:-1]) / (
        trie.prompt_hi - trie.prompt_lo
    ).clip(1)
    return {_LONGEST_FIRST: -weight, "long and short in turn": _alternate(trie, -weight)}


def _alternate(trie: PrefixTrie, key: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A key that takes the first, the last, the second, the last but one, ... of siblings sorted by `key`."""
    order = np.lexsort((key, trie.parent))
    family = trie.parent[order]
    first = np.searchsorted(family, family)
    size = np.searchsorted(family, family, side="right") - first
    rank = np.arange(trie.num_nodes) - first
    alternating = np.empty(trie.num_nodes)
    alternating[order] = np.where(2 * rank < size, 2 * rank, 2 * (size - 1 - rank) + 1)
    return alternating


def list_sequences(wave: Wave, trie: PrefixTrie, new_tokens: npt.NDArray[np.int64]) -> SequenceTable:
    """Every output of the wave, in the order of `trie`; greedy samples, and greedy and scored twins, only once."""
    requests = np.argsort(trie.row_prompt, kind="stable")
    first_twin = _first_twins(wave, requests, trie.row_prompt)
    outputs = np.bincount(wave.output_request, minlength=wave.num_requests)
    is_greedy = wave.params.column(lambda params: params.greedy, np.bool_)
    counts = np.where(is_greedy, np.minimum(outputs, 1), outputs)[requests]
    counts[first_twin != np.arange(len(requests))] = 0
    first_sequence = np.empty(wave.num_requests, np.int64)
    first_sequence[requests] = (np.cumsum(counts) - counts)[first_twin]
    number = count_up(outputs)  # of each output among those of its request
    sequence_of_output = first_sequence[wave.output_request] + np.where(is_greedy[wave.output_request], 0, number)
    first_output = np.cumsum(outputs) - outputs
    request = np.repeat(requests, counts)
    return SequenceTable(
        prompt=trie.row_prompt[request],
        row=request.astype(np.int32),
        sample=wave.output_sample[first_output[request] + count_up(counts)].astype(np.int32),
        max_new_tokens=new_tokens[request].astype(np.int32),
        score_from=wave.scored.score_from[request].astype(np.int32),
        forced_token=np.where(wave.scored.is_scored[request], wave.scored.forced[request], np.int32(-1)),
        output_sequence=sequence_of_output.astype(np.int32),
    )


def _first_twins(wave: Wave, rows: npt.NDArray[np.int64], row_prompt: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """int64 [requests]: where in `rows` the first one stands that must give the same result, perhaps itself."""
    scored = wave.scored
    number: dict[SamplingParams | None, int] = {None: 0}
    what_decides = wave.params.column(lambda params: number.setdefault(_what_decides(params), len(number)), np.int64)[
        rows
    ]
    is_scored = scored.is_scored[rows]
    distinct, kinds = np.unique(scored.kinds[rows[is_scored]], return_inverse=True)
    what_decides[is_scored] = len(number) + kinds
    same_tokens = row_prompt[rows] * np.int64(len(number) + len(distinct)) + what_decides
    _, first, twins = np.unique(same_tokens, return_index=True, return_inverse=True)
    first_twin: npt.NDArray[np.int64] = np.where(what_decides > 0, first[twins], np.arange(len(rows)))
    return first_twin


def _num_sequences(params: SamplingParams) -> int:
    """Sequences that a row needs: greedy samples are all the same."""
    return 1 if params.greedy else params.n


def _what_decides(params: SamplingParams) -> SamplingParams | None:
    """Equal for greedy parameters that give the same tokens; None for others, of which each is on its own."""
    if not params.greedy:
        return None
    return replace(params, n=1, seed=0, top_p=1.0, top_k=0, min_p=0.0, logprobs=False)


def _top_prefixes(trie: PrefixTrie, arena: TokenArena, detokenize: Detokenize | None) -> tuple[SharedPrefix, ...]:
    rows = rows_below(trie)
    saved = trie.lengths * (rows - 1)
    best = np.argsort(-saved, kind="stable")[:TOP_PREFIXES]
    return tuple(
        SharedPrefix(
            tokens=int(trie.end[node]),
            rows=int(rows[node]),
            saved_tokens=int(saved[node]),
            text=detokenize(trie.node_tokens(arena, node)[:_PREVIEW_TOKENS]) if detokenize else None,
        )
        for node in best.tolist()
        if saved[node] > 0
    )
