"""What a run does, counted and timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter

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
    draft_tokens: int | None = None  # that went through the model; None if no drafts were given
    accepted_tokens: int = 0  # generated tokens that had not cost a step of their own, as they were drafted
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

    def counts(self) -> dict[str, int | float]:
        """All counters and times so far, by name; times in seconds."""
        numbers = asdict(self)
        return {name: round(value, 3) for name, value in numbers.items() if isinstance(value, (int, float))}

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Tokens of a step, or of none: from now on they are reported."""
        self.draft_tokens = (self.draft_tokens or 0) + drafted
        self.accepted_tokens += accepted

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
