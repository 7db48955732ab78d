"""The summary of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchkv.job_plan import PlanTotals
from batchkv.ledger import Ledger
from batchkv.metrics import RunMetrics
from batchkv.rows import Rows

_TIMES = ("load", "read", "tokenize", "plan", "prefill", "decode", "sampling", "write", "elapsed")


@dataclass(frozen=True, slots=True, eq=False)
class FinishedRun:
    """A run whose rows all have their records.

    Attributes:
        rows: of the job.
        ledger: what was recorded.
        totals: what was planned.
        metrics: what happened.
        how: what computed it: `attention`, `kv_dtype`, `linear_layers`, `batch_invariant`, `decode_graphs`.
    """

    rows: Rows
    ledger: Ledger
    totals: PlanTotals
    metrics: RunMetrics
    how: Mapping[str, str | bool]

    def summary(self) -> dict[str, Any]:
        """Rows and samples are those of the job. Tokens and times are of this run alone, without what an interrupted
        run had computed; `generated_tokens_per_s` leaves loading out.
        """
        totals, metrics = self.totals, self.metrics
        running_s = metrics.elapsed_s - metrics.load_s
        return {
            "rows": self.rows.num_rows,
            "samples": self.ledger.num_samples,
            "ok": self.rows.num_rows - self.ledger.num_errors,
            "errors": self.ledger.num_errors,
            "first_error": self.ledger.first_error,
            "resumed_samples": len(self.ledger.done),
            "waves": totals.waves,
            "prompt_tokens": totals.prompt_tokens,
            "prefill_tokens": metrics.prefill_tokens,
            "planned_prefill_tokens": totals.prefill_tokens,
            "recomputed_tokens": metrics.recomputed_tokens,
            "preempted_sequences": metrics.preempted_sequences,
            "cached_tokens": totals.prompt_tokens - metrics.prefill_tokens + metrics.recomputed_tokens,
            "sharing_ratio": round(totals.sharing_ratio, 6),
            "generated_tokens": metrics.generated_tokens,
            "peak_kv_tokens": metrics.peak_kv_tokens,
            "planned_peak_kv_tokens": totals.peak_kv_tokens,
            "kv_budget_tokens": totals.kv_budget_tokens,
            "kv_bytes_per_token": totals.kv_bytes_per_token,
            "steps": metrics.steps,
            **self._drafts(),
            "graph_steps": metrics.graph_steps,
            **self.how,
            **{f"{name}_s": round(getattr(metrics, f"{name}_s"), 3) for name in _TIMES},
            "generated_tokens_per_s": round(metrics.generated_tokens / running_s, 2) if running_s > 0 else 0.0,
        }

    def _drafts(self) -> dict[str, int]:
        """What came of drafts, if any were given."""
        metrics = self.metrics
        if metrics.draft_tokens is None:
            return {}
        return {"draft_tokens": metrics.draft_tokens, "accepted_tokens": metrics.accepted_tokens}
