"""The plan of a job: a value that says what will run, in which order and in how much memory, and explains it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchkv.carried import CachedNodes
from batchkv.memory_plan import MemoryPlan, PageCosts
from batchkv.sequence import SequenceTable
from batchkv.trie import PrefixTrie

_TREE_CHILDREN = 6  # children of a node that are drawn one by one
_TREE_DEPTH = 4
TOP_PREFIXES = 20


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A trie node that several rows share.

    Attributes:
        tokens: length of the whole prefix, from the root to the node's end.
        rows: rows that begin with it.
        saved_tokens: prompt tokens that the node itself saves.
        text: how the node's own tokens begin, if there is a tokenizer.
    """

    tokens: int
    rows: int
    saved_tokens: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a wave will do.

    Attributes:
        trie: nodes and prompts in execution order.
        sequences: what is generated, in execution order.
        costs: KV pages and lifetimes of nodes and sequences.
        memory: the KV pool.
        order: how the children of a node were ordered.
        prompt_tokens: tokens of all rows' prompts.
        shared: the prefixes that save most, best first.
        cached: what has KV before the wave begins.
    """

    trie: PrefixTrie
    sequences: SequenceTable
    costs: PageCosts
    memory: MemoryPlan
    order: str
    prompt_tokens: int
    shared: tuple[SharedPrefix, ...]
    cached: CachedNodes

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that go through the model: every trie token once, but for those that have KV already."""
        return int(self.cached.to_prefill(self.trie).sum())

    def cached_tokens(self) -> npt.NDArray[np.int64]:
        """int64 [outputs]: prompt tokens that need not be computed for each output.

        A node's tokens are computed for the first sequence below it, and a sequence for the first output it serves.
        """
        sequences = self.sequences
        if len(sequences) == 0:
            return np.zeros(0, np.int64)
        computed = np.zeros(len(sequences), np.int64)
        needed = np.flatnonzero(self.cached.is_needed & (self.trie.prompt_hi > self.trie.prompt_lo))
        np.add.at(computed, self.costs.first_sequence[needed], self.cached.to_prefill(self.trie)[needed])
        sequence, first = np.unique(sequences.output_sequence, return_index=True)
        cached = self.trie.end[self.trie.prompt_node[sequences.prompt[sequences.output_sequence]]].astype(np.int64)
        cached[first] -= computed[sequence]
        return cached

    def numbers(self) -> dict[str, int]:
        """What it comes to, for those who watch a run."""
        return {
            "sequences": len(self.sequences),
            "prompt_tokens": self.prompt_tokens,
            "prefill_tokens": self.prefill_tokens,
            "peak_kv_tokens": self.memory.peak_tokens,
            "window_rows": self.memory.window_rows,
        }

    def tree(self) -> list[str]:
        """The upper part of the trie, drawn line by line."""
        rows = rows_below(self.trie)
        lines = [f"root · {int(rows[0]):,} rows"]
        self._draw_children(0, "", rows, lines)
        return lines

    def _draw_children(self, node: int, indent: str, rows: npt.NDArray[np.int64], lines: list[str]) -> None:
        end = np.searchsorted(self.trie.prompt_lo, self.trie.prompt_hi[node])  # of its subtree
        children = np.flatnonzero(self.trie.parent[node + 1 : end] == node) + node + 1
        saved = self.trie.lengths[children] * (rows[children] - 1)
        shared = children[np.argsort(-saved, kind="stable")][: int((saved > 0).sum())]
        drawn = shared[:_TREE_CHILDREN] if self.trie.depth[node] < _TREE_DEPTH else shared[:0]
        rest = np.setdiff1d(children, drawn)
        for child in drawn.tolist():
            is_last = child == drawn[-1] and len(rest) == 0
            lines.append(f"{indent}{'└─' if is_last else '├─'} {self._describe(child, rows)}")
            self._draw_children(child, indent + ("   " if is_last else "│  "), rows, lines)
        if len(rest):
            lines.append(f"{indent}└─ {self._describe_rest(rest, rows)}")

    def _describe(self, node: int, rows: npt.NDArray[np.int64]) -> str:
        length, count = int(self.trie.lengths[node]), int(rows[node])
        return f"{length:,} tokens × {count:,} rows, saves {length * (count - 1):,}"

    def _describe_rest(self, nodes: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> str:
        lengths = self.trie.lengths[nodes]
        span = f"{lengths.min():,}" if lengths.min() == lengths.max() else f"{lengths.min():,}-{lengths.max():,}"
        below = int(rows[nodes].sum())
        return f"{len(nodes):,} more of {span} tokens, {below:,} rows"


@dataclass(frozen=True, slots=True)
class PlanTotals:
    """What all waves of a job do, one after the other.

    Attributes:
        waves: how many there are.
        sequences, nodes, prompt_tokens, prefill_tokens: sums.
        depth, peak_kv_tokens: maxima.
        window_rows: the narrowest window.
        orders: how children were ordered, without repeats.
        shared: the prefixes that save most, best first.
        page_size, kv_budget_tokens, kv_bytes_per_token: as in `MemoryPlan`, of the last wave.
    """

    waves: int = 0
    sequences: int = 0
    nodes: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    depth: int = 0
    peak_kv_tokens: int = 0
    window_rows: int | None = None
    orders: tuple[str, ...] = ()
    shared: tuple[SharedPrefix, ...] = ()
    page_size: int = 0
    kv_budget_tokens: int = 0
    kv_bytes_per_token: int = 0

    def plus(self, plan: Plan) -> PlanTotals:
        """With one more wave."""
        memory = plan.memory
        shared = sorted((*self.shared, *plan.shared), key=lambda prefix: -prefix.saved_tokens)
        return PlanTotals(
            waves=self.waves + 1,
            sequences=self.sequences + len(plan.sequences),
            nodes=self.nodes + plan.trie.num_nodes - 1,
            prompt_tokens=self.prompt_tokens + plan.prompt_tokens,
            prefill_tokens=self.prefill_tokens + plan.prefill_tokens,
            depth=max(self.depth, int(plan.trie.depth.max())),
            peak_kv_tokens=max(self.peak_kv_tokens, memory.peak_tokens),
            window_rows=min(memory.window_rows, self.window_rows or memory.window_rows),
            orders=tuple(dict.fromkeys((*self.orders, plan.order))),
            shared=tuple(shared[:TOP_PREFIXES]),
            page_size=memory.page_size,
            kv_budget_tokens=memory.budget_tokens,
            kv_bytes_per_token=memory.bytes_per_token,
        )

    @property
    def saved_tokens(self) -> int:
        return self.prompt_tokens - self.prefill_tokens

    @property
    def sharing_ratio(self) -> float:
        """Share of the prompt tokens that need not be computed."""
        return self.saved_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What a job will do. `str(plan)` is its EXPLAIN.

    Attributes:
        rows: rows of the job, those with errors included.
        errors: rows that cannot run.
        first_error: why the first of these cannot.
        generations: rows that wait for nobody, rows that wait for these, and so on.
        totals: of the rows that wait for nobody; what the others are like depends on what these give.
        first: the first wave's plan, whose trie is drawn; it is the whole job's if there is one wave.
    """

    rows: int
    errors: int
    first_error: str | None
    generations: tuple[int, ...]
    totals: PlanTotals
    first: Plan

    def to_json(self) -> dict[str, Any]:
        """Totals and top shared prefixes, as `batchkv plan --format json` prints them."""
        totals = self.totals
        return {
            "rows": self.rows,
            "errors": self.errors,
            "first_error": self.first_error,
            "generations": list(self.generations),
            "waves": totals.waves,
            "sequences": totals.sequences,
            "prompt_tokens": totals.prompt_tokens,
            "prefill_tokens": totals.prefill_tokens,
            "saved_tokens": totals.saved_tokens,
            "sharing_ratio": round(totals.sharing_ratio, 6),
            "peak_kv_tokens": totals.peak_kv_tokens,
            "kv_budget_tokens": totals.kv_budget_tokens,
            "kv_bytes_per_token": totals.kv_bytes_per_token,
            "page_size": totals.page_size,
            "window_rows": totals.window_rows,
            "order": ", ".join(totals.orders),
            "depth": totals.depth,
            "nodes": totals.nodes,
            "shared_prefixes": [asdict(prefix) for prefix in totals.shared],
        }

    def explain(self) -> str:
        """Totals and the upper part of the trie, for people."""
        return "\n".join([*self._totals(), "", *self.first.tree()])

    def __str__(self) -> str:
        return self.explain()

    def _totals(self) -> list[str]:
        totals = self.totals
        peak_mib = totals.peak_kv_tokens * totals.kv_bytes_per_token / (1 << 20)
        errors = f", {self.errors:,} with errors" if self.errors else ""
        window = min(totals.window_rows or 0, totals.sequences)
        lines = [
            f"rows      {self.rows:,}{errors}; {totals.sequences:,} sequences to generate",
            f"prompt    {totals.prompt_tokens:,} tokens",
            f"prefill   {totals.prefill_tokens:,} tokens, saves {totals.saved_tokens:,} ({totals.sharing_ratio:.1%})",
            f"trie      {totals.nodes:,} nodes, depth {totals.depth}, {', '.join(totals.orders)}",
            f"KV        peak {totals.peak_kv_tokens:,} of {totals.kv_budget_tokens:,} tokens ({peak_mib:,.0f} MiB), "
            f"pages of {totals.page_size}",
            f"in flight {window:,} sequences fit at any point",
        ]
        if self.first_error:
            lines.insert(1, f"errors    the first: {self.first_error}")
        if len(self.generations) > 1:
            counts = ", then ".join(f"{count:,}" for count in self.generations)
            lines.append(f"waiting   {counts} rows, each generation for those before; all above is of the first")
        if totals.waves > 1:
            lines.append(f"waves     {totals.waves:,}, planned one after the other; the first:")
        return lines


def rows_below(trie: PrefixTrie) -> npt.NDArray[np.int64]:
    """int64 [nodes]: job rows whose prompt begins with the node's prefix."""
    rows_of_prompt = np.bincount(trie.row_prompt[trie.row_prompt >= 0], minlength=trie.num_prompts)
    before = np.concatenate([[0], np.cumsum(rows_of_prompt)])
    rows: npt.NDArray[np.int64] = before[trie.prompt_hi] - before[trie.prompt_lo]
    return rows
