"""From prompts to a plan: what is shared, in which order it runs, and how much KV that takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchkv.errors import RowError
from batchkv.intervals import count_up, subtree_ends
from batchkv.job import Job, output_offsets
from batchkv.job_plan import Plan, SharedPrefix, rows_below
from batchkv.kv_layout import KVLayout
from batchkv.memory_plan import (
    LEAST_SLACK_PAGES,
    MemoryPlan,
    PageCosts,
    page_costs,
    plan_memory,
    prefix_pages,
    sequence_pages,
)
from batchkv.sampling_params import SamplingParams
from batchkv.scoring import Scored
from batchkv.sequence import SequenceTable
from batchkv.token_arena import TokenArena
from batchkv.trie import PrefixTrie, build_trie

_TOP_PREFIXES = 20
_PREVIEW_TOKENS = 24

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


def new_token_limits(job: Job, arena: TokenArena, limits: Limits) -> npt.NDArray[np.int64]:
    """int64 [rows]: most tokens each row's samples can have, by `max_tokens` and by the context."""
    wanted = job.params.column(lambda params: params.max_tokens, np.int64)
    if limits.context_length is None:
        return wanted
    return np.minimum(wanted, limits.context_length - arena.lengths)


def check_kv_budget(job: Job, arena: TokenArena, layout: KVLayout, limits: Limits) -> dict[int, RowError]:
    """Rows that take more KV than the budget has even when nothing else runs: `too_long`.

    Each group of layers has a pool that holds its largest row. Where rows are largest in different groups, those
    that need most go first.
    """
    length = arena.lengths
    new_tokens = new_token_limits(job, arena, limits)
    token_bytes = np.array(layout.group_bytes_per_token)
    needed = _tokens_alone(job, layout, length, new_tokens) * token_bytes[:, None]
    total = needed.sum(axis=0)
    order = np.argsort(-total, kind="stable")
    pools = np.maximum.accumulate(needed[:, order[::-1]], axis=1)[:, ::-1].sum(axis=0)
    errors: dict[int, RowError] = {}
    for row in order[(pools > limits.kv_bytes) & (length[order] > 0)].tolist():
        errors[row] = RowError(
            "too_long",
            f"prompt of {length[row]} tokens and {new_tokens[row]} to generate need {total[row]:,} bytes of KV cache, "
            f"the budget of {limits.kv_bytes:,} has no room for them: raise --kv-memory or lower max_tokens",
        )
    return dict(sorted(errors.items()))


def _tokens_alone(
    job: Job, layout: KVLayout, length: npt.NDArray[np.int64], new_tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """int64 [G, rows]: KV tokens that each row holds at most when nothing else runs; 0 without a prompt."""
    one_sequence = job.params.column(lambda params: params.n == 1 or params.greedy, np.bool_)
    tokens = []
    for window in layout.windows:
        prompt = prefix_pages(np.zeros_like(length), length, 1, window)
        output = sequence_pages(length, length + new_tokens - 1, one_sequence, prompt, 1, window)
        tokens.append(np.where(length > 0, prompt + output + (LEAST_SLACK_PAGES if window else 0), 0))
    return np.stack(tokens)


def make_plan(
    job: Job,
    arena: TokenArena,
    errors: Mapping[int, RowError],
    layout: KVLayout,
    limits: Limits,
    detokenize: Detokenize | None = None,
    scored: Scored | None = None,
) -> Plan:
    """Plans a job.

    Args:
        job: all rows.
        arena: their prompts; rows with errors have no tokens.
        errors: rows that cannot run, `check_kv_budget`'s included.
        layout: KV of the model.
        limits: memory and batch limits.
        detokenize: shows in `Plan.shared` how prefixes begin.
        scored: rows that are scored, with `SCORING` as their parameters; by default all are generated.

    Raises:
        ValueError: a row is scored from before its second or behind its last token, or with other parameters.
    """
    scored = scored or Scored.none(job.num_rows)
    scored.check(job.params, arena, errors)
    group = None if limits.share_prefixes else np.arange(job.num_rows)
    trie = build_trie(arena, group)
    ordered = _best_order(job, arena, errors, layout, limits, trie, scored)
    if ordered is None:  # pages of sharers do not fit into a budget that has room for each alone
        trie = build_trie(arena, np.arange(job.num_rows))
        ordered = _best_order(job, arena, errors, layout, limits, trie, scored)
        if ordered is None:
            raise RuntimeError("a row passed check_kv_budget and does not fit the budget")
        ordered = replace(ordered, name=f"{ordered.name}, nothing shared: the KV budget has no room for it")
    return Plan(
        trie=ordered.trie,
        sequences=ordered.sequences,
        costs=ordered.costs,
        memory=ordered.memory,
        order=ordered.name,
        errors=len(errors),
        prompt_tokens=int(arena.lengths.sum()),
        shared=_top_prefixes(ordered.trie, arena, detokenize),
    )


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


def _best_order(
    job: Job,
    arena: TokenArena,
    errors: Mapping[int, RowError],
    layout: KVLayout,
    limits: Limits,
    trie: PrefixTrie,
    scored: Scored,
) -> _Ordered | None:
    """The order that lets most sequences be in flight and then has the lowest peak; None if nothing fits.

    Rows take longest first, so that no long one is left running alone at the end, unless mixing long and short
    children takes less KV. Large pages are preferred to any order.
    """
    new_tokens = new_token_limits(job, arena, limits)
    orders = {name: trie.reordered(key) for name, key in child_orders(trie, job, new_tokens).items()}
    sequences_of = {
        name: list_sequences(job, in_order, errors, new_tokens, scored) for name, in_order in orders.items()
    }
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


def child_orders(trie: PrefixTrie, job: Job, new_tokens: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.float64]]:
    """Orders to choose from: a sort key for each node among its siblings, by name.

    A node's weight is the KV of its subtree per prompt, its output included.
    """
    has_prompt = trie.row_prompt >= 0
    own = trie.lengths.astype(np.int64)
    samples = job.params.column(_num_sequences, np.int64)
    output = np.bincount(trie.row_prompt[has_prompt], (new_tokens * samples)[has_prompt], minlength=trie.num_prompts)
    np.add.at(own, trie.prompt_node, output.astype(np.int64))
    before = np.concatenate([[0], np.cumsum(own)])
    weight = (before[subtree_ends(trie.prompt_lo, trie.prompt_hi)] - before[:-1]) / (
        trie.prompt_hi - trie.prompt_lo
    ).clip(1)
    return {"longest first": -weight, "long and short in turn": _alternate(trie, -weight)}


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


def list_sequences(
    job: Job,
    trie: PrefixTrie,
    errors: Mapping[int, RowError],
    new_tokens: npt.NDArray[np.int64],
    scored: Scored | None = None,
) -> SequenceTable:
    """Every sample of every row, in the order of `trie`; greedy and scored twins only once."""
    scored = scored or Scored.none(job.num_rows)
    offsets = output_offsets(job, errors)
    rows = np.flatnonzero(trie.row_prompt >= 0)
    rows = rows[np.argsort(trie.row_prompt[rows], kind="stable")]
    first_twin = _first_twins(job, rows, trie.row_prompt, scored)
    counts = np.where(first_twin == np.arange(len(rows)), job.params.column(_num_sequences, np.int64)[rows], 0)
    first_sequence = (np.cumsum(counts) - counts)[first_twin]
    row = np.repeat(rows, counts)
    num_outputs = np.diff(offsets)[rows]
    sample = count_up(num_outputs)
    is_greedy = np.repeat(job.params.column(lambda params: params.greedy, np.bool_)[rows], num_outputs)
    output_sequence = np.full(int(offsets[-1]), -1, np.int32)
    output_sequence[np.repeat(offsets[rows], num_outputs) + sample] = np.repeat(first_sequence, num_outputs) + np.where(
        is_greedy, 0, sample
    )
    return SequenceTable(
        prompt=trie.row_prompt[row],
        row=row.astype(np.int32),
        sample=count_up(counts).astype(np.int32),
        max_new_tokens=new_tokens[row].astype(np.int32),
        score_from=scored.score_from[row].astype(np.int32),
        forced_token=np.where(scored.is_scored[row], scored.forced[row], np.int32(-1)),
        output_sequence=output_sequence,
        output_row=np.repeat(np.arange(job.num_rows, dtype=np.int32), np.diff(offsets)),
    )


def _first_twins(
    job: Job, rows: npt.NDArray[np.int64], row_prompt: npt.NDArray[np.int32], scored: Scored
) -> npt.NDArray[np.int64]:
    """int64 [rows]: where in `rows` the first row stands that must give the same tokens, perhaps the row itself."""
    number: dict[SamplingParams | None, int] = {None: 0}
    what_decides = job.params.column(lambda params: number.setdefault(_what_decides(params), len(number)), np.int64)[
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
    best = np.argsort(-saved, kind="stable")[:_TOP_PREFIXES]
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
