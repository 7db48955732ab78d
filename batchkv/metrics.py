"""What a run did, counted and timed: the summary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from batchkv.plan import Plan


@dataclass(slots=True)
class RunMetrics:
    """Counters of a run in progress. Times are seconds of wall clock; tokens as in the summary."""

    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    preempted_sequences: int = 0
    steps: int = 0
    peak_kv_tokens: int = 0
    load_s: float = 0.0
    tokenize_s: float = 0.0
    plan_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    sampling_s: float = 0.0
    write_s: float = 0.0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time of the block to `{name}_s`."""
        started = perf_counter()
        try:
            yield
        finally:
            setattr(self, f"{name}_s", getattr(self, f"{name}_s") + perf_counter() - started)

    def count_step(self, num_tokens: int, prefill_tokens: int, recomputed_tokens: int, seconds: float) -> None:
        """A forward pass; its time is split by the share of prompt tokens in it."""
        self.steps += 1
        self.prefill_tokens += prefill_tokens
        self.recomputed_tokens += recomputed_tokens
        self.prefill_s += seconds * prefill_tokens / num_tokens
        self.decode_s += seconds * (num_tokens - prefill_tokens) / num_tokens
