"""What a run did, counted and timed: the summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from batchkv.errors import RowError
from batchkv.job_plan import Plan
from batchkv.step import Step


@dataclass(slots=True)
class RunMetrics:
    """Counters of a run in progress. Times are seconds of wall clock; tokens as in the summary."""

    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    scored_tokens: int = 0  # log-probabilities computed of given tokens; what several rows share counts once
    preempted_sequences: int = 0
    steps: int = 0
    wasted_rows: int = 0  # of sequences that had ended when the step ran, which was not known when it was scheduled
    peak_kv_tokens: int = 0
    load_s: float = 0.0
    read_s: float = 0.0
    tokenize_s: float = 0.0
    plan_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    sampling_s: float = 0.0
    write_s: float = 0.0
    elapsed_s: float = 0.0
    decode_graphs: str = "off"
    graph_steps: int = 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time of the block to `{name}_s`."""
        started = perf_counter()
        try:
            yield
        finally:
            setattr(self, f"{name}_s", getattr(self, f"{name}_s") + perf_counter() - started)

    def count_step(self, step: Step, forward_s: float, sampling_s: float) -> None:
        """A step. The time of its forward pass and scheduling is split by the share of prompt tokens in it."""
        self.steps += 1
        self.prefill_tokens += step.prefill_tokens
        self.recomputed_tokens += step.recomputed_tokens
        self.prefill_s += forward_s * step.prefill_tokens / step.num_tokens
        self.decode_s += forward_s * (step.num_tokens - step.prefill_tokens) / step.num_tokens
        self.sampling_s += sampling_s


def summarize(
    plan: Plan, errors: Mapping[int, RowError], metrics: RunMetrics, how: Mapping[str, str | bool]
) -> dict[str, Any]:
    """The summary of a run. Token counts are of this run alone; `generated_tokens_per_s` leaves loading out.

    Args:
        how: what computed it: `attention`, `kv_dtype`, `packed_weights`, `batch_invariant`, `decode_graphs`.
    """
    running_s = metrics.elapsed_s - metrics.load_s
    return {
        "rows": plan.rows,
        "samples": int((~np.isin(plan.sequences.output_row, list(errors))).sum()),
        "ok": plan.rows - len(errors),
        "errors": len(errors),
        "prompt_tokens": plan.prompt_tokens,
        "prefill_tokens": metrics.prefill_tokens,
        "planned_prefill_tokens": plan.prefill_tokens,
        "recomputed_tokens": metrics.recomputed_tokens,
        "preempted_sequences": metrics.preempted_sequences,
        "cached_tokens": plan.prompt_tokens - metrics.prefill_tokens + metrics.recomputed_tokens,
        "sharing_ratio": round(plan.sharing_ratio, 6),
        "generated_tokens": metrics.generated_tokens,
        "peak_kv_tokens": metrics.peak_kv_tokens,
        "planned_peak_kv_tokens": plan.memory.peak_tokens,
        "kv_budget_tokens": plan.memory.budget_tokens,
        "kv_bytes_per_token": plan.memory.bytes_per_token,
        "steps": metrics.steps,
        "graph_steps": metrics.graph_steps,
        **how,
        "load_s": round(metrics.load_s, 3),
        "read_s": round(metrics.read_s, 3),
        "tokenize_s": round(metrics.tokenize_s, 3),
        "plan_s": round(metrics.plan_s, 3),
        "prefill_s": round(metrics.prefill_s, 3),
        "decode_s": round(metrics.decode_s, 3),
        "sampling_s": round(metrics.sampling_s, 3),
        "write_s": round(metrics.write_s, 3),
        "elapsed_s": round(metrics.elapsed_s, 3),
        "generated_tokens_per_s": round(metrics.generated_tokens / running_s, 2) if running_s > 0 else 0.0,
    }
