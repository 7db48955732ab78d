"""Runs a plan to its end: schedule, forward, sample, see who has ended, until nobody is left."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from batchkv.endings import Ending, Endings
from batchkv.job_plan import Plan
from batchkv.kv_layout import KVLayout
from batchkv.metrics import RunMetrics
from batchkv.model_runner import ModelRunner
from batchkv.sampler import InvalidLogitsError, Sampled, SamplingBatch, sample
from batchkv.scheduler import Scheduler
from batchkv.sequence import GeneratedTokens
from batchkv.step import Step
from batchkv.token_arena import TokenArena
from batchkv.writer import Completion

Int64Array = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]  # (sequences that ended, tokens generated) since the last call

_NO_TOKEN = -1


class Executor:
    """One run of one plan.

    Args:
        plan: what to run.
        arena: the prompts.
        layout: KV of the model.
        runner: the model.
        sampling: parameters of every sequence.
        endings: tells who has ended.
        max_batch_rows, max_batch_tokens: limits of a step.
        metrics: counts and times are added here.
        progress: called after every step.
    """

    def __init__(
        self,
        plan: Plan,
        arena: TokenArena,
        layout: KVLayout,
        runner: ModelRunner,
        sampling: SamplingBatch,
        endings: Endings,
        *,
        max_batch_rows: int,
        max_batch_tokens: int,
        metrics: RunMetrics,
        progress: Progress,
    ) -> None:
        self._runner, self._sampling, self._endings = runner, sampling, endings
        self._metrics, self._progress = metrics, progress
        self._generated = GeneratedTokens(len(plan.sequences))
        self._scheduler = Scheduler(
            plan,
            arena,
            layout,
            self._generated,
            max_batch_rows=max_batch_rows,
            max_batch_tokens=max_batch_tokens,
        )
        self._page_bytes = np.array(layout.group_bytes_per_token) * plan.memory.page_size
        self._bytes_per_token = layout.bytes_per_token
        self._completions: list[Completion | None] = [None] * len(plan.sequences)

    def run(self) -> list[Completion | None]:
        """The completion of every sequence; None where the model gave no valid distribution to sample from."""
        while not self._scheduler.is_done:
            started = perf_counter()
            step = self._scheduler.schedule()
            logits = self._runner.forward(step)
            forwarded = perf_counter()
            endings = self._sample(step, logits)
            del logits  # or they would lie beside those of the next step
            sampling_s = perf_counter() - forwarded
            self._count_kv()
            self._scheduler.update(step, endings != Ending.NONE)
            self._progress(int((endings != Ending.NONE).sum()), len(step.sampled))
            self._metrics.count_step(step, perf_counter() - started - sampling_s, sampling_s)
        self._metrics.preempted_sequences += self._scheduler.preempted_sequences
        return self._completions

    def _count_kv(self) -> None:
        held_tokens = int(self._scheduler.pages_held @ self._page_bytes) // self._bytes_per_token
        self._metrics.peak_kv_tokens = max(self._metrics.peak_kv_tokens, held_tokens)

    def _sample(self, step: Step, logits: torch.Tensor) -> npt.NDArray[np.int8]:
        """Gives every sampled sequence its next token; how each of them ends with it (`Ending`, int8 [N])."""
        token_ids = self._append_tokens(step, logits)
        endings = self._endings.check(step.sampled, token_ids, self._generated)
        endings[token_ids == _NO_TOKEN] = Ending.INVALID
        self._collect(step.sampled, endings)
        return endings

    def _append_tokens(self, step: Step, logits: torch.Tensor) -> npt.NDArray[np.int32]:
        """Appends the next token of every sampled sequence; int32 [N], _NO_TOKEN where there is none."""
        token_ids = np.full(len(step.sampled), _NO_TOKEN, np.int32)
        at, sampled = self._sample_valid(step, logits, np.arange(len(step.sampled)))
        self._generated.append(step.sampled[at], sampled.token_ids.astype(np.int32), sampled.logprobs)
        token_ids[at] = sampled.token_ids
        self._metrics.generated_tokens += len(at)
        return token_ids

    def _sample_valid(self, step: Step, logits: torch.Tensor, at: Int64Array) -> tuple[Int64Array, Sampled]:
        """Samples for the sequences `step.sampled[at]`, without those whose logits are not finite."""
        sequences = step.sampled[at]
        positions = self._generated.lengths[sequences].astype(np.int64)
        try:
            return at, sample(logits, self._sampling.take(sequences), positions, step.sampled_logits[at])
        except InvalidLogitsError as invalid:
            return self._sample_valid(step, logits, np.delete(at, invalid.rows))

    def _collect(self, sequences: Int64Array, endings: npt.NDArray[np.int8]) -> None:
        ended = np.flatnonzero(endings != Ending.NONE)
        for sequence, ending in zip(sequences[ended].tolist(), endings[ended].tolist(), strict=True):
            if ending != Ending.INVALID:
                self._completions[sequence] = Completion(
                    token_ids=self._generated.tokens(sequence).copy(),
                    logprobs=self._generated.logprobs(sequence).copy(),
                    finish_reason="length" if ending == Ending.LENGTH else "stop",
                    stop_string=self._endings.stop_string(sequence),
                )
            self._generated.drop(sequence)
