"""The plan of a job: a value that says what will run, in which order and in how much memory, and explains it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchkv.memory_plan import MemoryPlan, PageCosts
from batchkv.sequence import SequenceTable
from batchkv.trie import PrefixTrie

_TREE_CHILDREN = 6  # children of a node that are drawn one by one
_TREE_DEPTH = 4


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
    """What a job will do. `str(plan)` is its EXPLAIN.

    Attributes:
        trie: nodes and prompts in execution order.
        sequences: what is generated, in execution order.
        costs: KV pages and lifetimes of nodes and sequences.
        memory: the KV pool.
        order: how the children of a node were ordered.
        errors: rows that cannot run.
        prompt_tokens: tokens of all rows' prompts.
        shared: the prefixes that save most, best first.
    """

    trie: PrefixTrie
    sequences: SequenceTable
    costs: PageCosts
    memory: MemoryPlan
    order: str
    errors: int
    prompt_tokens: int
    shared: tuple[SharedPrefix, ...]

    @property
    def rows(self) -> int:
        return len(self.trie.row_prompt)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that go through the model: every trie token once."""
        return self.trie.num_tokens

    @property
    def saved_tokens(self) -> int:
        return self.prompt_tokens - self.prefill_tokens

    @property
    def sharing_ratio(self) -> float:
        """Share of the prompt tokens that need not be computed."""
        return self.saved_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def cached_tokens(self) -> npt.NDArray[np.int64]:
        """int64 [outputs]: prompt tokens that need not be computed for each result row; 0 for an error row.

        A node's tokens are computed for the first sequence below it, and a sequence for the first result row it serves.
        """
        sequences = self.sequences
        if len(sequences) == 0:
            return np.zeros(len(sequences.output_sequence), np.int64)
        computed = np.zeros(len(sequences), np.int64)
        np.add.at(computed, self.costs.first_sequence, self.trie.lengths)
        served = np.flatnonzero(sequences.output_sequence >= 0)
        sequence, first = np.unique(sequences.output_sequence[served], return_index=True)
        cached = np.zeros(len(sequences.output_sequence), np.int64)
        cached[served] = self.trie.end[self.trie.prompt_node[sequences.prompt[sequences.output_sequence[served]]]]
        cached[served[first]] -= computed[sequence]
        return cached

    def to_json(self) -> dict[str, Any]:
        """The plan's totals and top shared prefixes, as `batchkv plan --format json` prints them."""
        return {
            "rows": self.rows,
            "errors": self.errors,
            "sequences": len(self.sequences),
            "prompt_tokens": self.prompt_tokens,
            "prefill_tokens": self.prefill_tokens,
            "saved_tokens": self.saved_tokens,
            "sharing_ratio": round(self.sharing_ratio, 6),
            "peak_kv_tokens": self.memory.peak_tokens,
            "kv_budget_tokens": self.memory.budget_tokens,
            "kv_bytes_per_token": self.memory.bytes_per_token,
            "page_size": self.memory.page_size,
            "window_rows": self.memory.window_rows,
            "order": self.order,
            "depth": int(self.trie.depth.max()),
            "nodes": self.trie.num_nodes - 1,
            "shared_prefixes": [asdict(prefix) for prefix in self.shared],
        }

    def explain(self) -> str:
        """Totals and the upper part of the trie, for people."""
        return "\n".join([*self._totals(), "", *self._tree()])

    def __str__(self) -> str:
        return self.explain()

    def _totals(self) -> list[str]:
        memory = self.memory
        peak_mib = memory.peak_tokens * memory.bytes_per_token / (1 << 20)
        errors = f", {self.errors:,} with errors" if self.errors else ""
        return [
            f"rows      {self.rows:,}{errors}; {len(self.sequences):,} sequences to generate",
            f"prompt    {self.prompt_tokens:,} tokens",
            f"prefill   {self.prefill_tokens:,} tokens, saves {self.saved_tokens:,} ({self.sharing_ratio:.1%})",
            f"trie      {self.trie.num_nodes - 1:,} nodes, depth {int(self.trie.depth.max())}, {self.order}",
            f"KV        peak {memory.peak_tokens:,} of {memory.budget_tokens:,} tokens ({peak_mib:,.0f} MiB), "
            f"pages of {memory.page_size}",
            f"in flight {min(memory.window_rows, len(self.sequences)):,} sequences fit at any point",
        ]

    def _tree(self) -> list[str]:
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


def rows_below(trie: PrefixTrie) -> npt.NDArray[np.int64]:
    """int64 [nodes]: job rows whose prompt begins with the node's prefix."""
    rows_of_prompt = np.bincount(trie.row_prompt[trie.row_prompt >= 0], minlength=trie.num_prompts)
    before = np.concatenate([[0], np.cumsum(rows_of_prompt)])
    rows: npt.NDArray[np.int64] = before[trie.prompt_hi] - before[trie.prompt_lo]
    return rows
