"""Runs a plan to its end: schedule, forward, sample, see who has ended, until nobody is left.

On a device that works by itself the host does not wait for it. While the device is at step k, the host finishes step
k - 1, then schedules and prepares step k + 1 as if nobody ended in step k but by length:

    device   forward k                              sample k   forward k + 1
    host     finish k - 1 · schedule, prepare k + 1 ·  launch  · finish k · schedule, prepare k + 2 · launch

Decode rows of step k + 1 take their tokens on the device, from what step k sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from batchkv.endings import Ending, Endings
from batchkv.errors import RowError
from batchkv.job_plan import Plan
from batchkv.kv_cache import KVCache
from batchkv.kv_layout import KVLayout
from batchkv.matchers import Matchers
from batchkv.metrics import RunMetrics
from batchkv.model_runner import ModelRunner
from batchkv.progress import OnStep
from batchkv.sampler import SampledFrom, SamplingBatch, sample, score
from batchkv.sampling_record import SamplingRecords
from batchkv.scheduler import Scheduler
from batchkv.scoring import Scores, build_score_table
from batchkv.sequence import GeneratedTokens
from batchkv.step import Step
from batchkv.token_arena import TokenArena
from batchkv.transfers import HostCopies
from batchkv.writer import Completion

Int64Array = npt.NDArray[np.int64]
# Sequences that ended, each with its completion, or with what kept it from one.
OnEnded = Callable[[Sequence[tuple[int, Completion | RowError]]], None]
_BAD_LOGITS = RowError("bad_logits", "the model's logits were not finite: try --dtype float32")


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A sequence that has ended and stays in the cache, with all tokens that have KV (int32)."""

    sequence: int
    handle: int
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose logits [L, V] the device computes."""

    step: Step
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A step whose tokens the device computes: int64 [N] there, and on their way to the host with all about them."""

    step: Step
    token_ids: torch.Tensor
    results: HostCopies
    source: HostCopies | None  # what they are drawn from, if that is recorded


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
        overlap: whether the host works on the next step while the device is at one. Each sequence that ends by a token
            then has one row too many.
        metrics: counts and times are added here.
        on_ended: called with the sequences that ended in a step.
        progress: called after every step that is finished.
        cache: what the plan goes on from; by default a new one.
        matchers: of sequences whose output is constrained, if there are any.
        record_sampling: completions tell what their tokens were drawn from, too.
        score_temperature: what logits are divided by where given tokens are scored.
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
        overlap: bool,
        metrics: RunMetrics,
        on_ended: OnEnded,
        progress: OnStep,
        cache: KVCache | None = None,
        matchers: Matchers | None = None,
        record_sampling: bool = False,
        score_temperature: float = 1.0,
    ) -> None:
        self._runner, self._sampling, self._endings = runner, sampling, endings
        self._metrics, self._on_ended, self._progress = metrics, on_ended, progress
        self._plan, self._matchers = plan, matchers
        self._generated = GeneratedTokens(len(plan.sequences))
        self._sampling_records = SamplingRecords() if record_sampling else None
        self._score_temperature = score_temperature
        self._score_table = build_score_table(plan.trie, plan.sequences, arena)
        self._scores = Scores(len(self._score_table))
        self._scheduler = Scheduler(
            plan,
            arena,
            layout,
            self._generated,
            self._score_table,
            max_batch_rows=max_batch_rows,
            max_batch_tokens=max_batch_tokens,
            cache=cache,
        )
        self._cache, self._arena = cache, arena
        self._kept_tokens: dict[int, npt.NDArray[np.int32]] = {}  # generated by sequences that stay in the cache
        self._page_bytes = np.array(layout.group_bytes_per_token) * plan.memory.page_size
        self._bytes_per_token = layout.bytes_per_token
        self._has_ended = np.zeros(len(plan.sequences), bool)
        self._overlap = overlap
        self._counted_to, self._sampling_s = 0.0, 0.0  # times of the step that is finished next

    def run(self) -> list[Kept]:
        """Until every sequence has ended; those that stay in the cache."""
        self._counted_to = perf_counter()
        graph_steps = self._runner.graph_steps  # of waves before, where they share a runner
        launched: _Launched | None = None
        while not self._scheduler.is_done:
            step = self._scheduler.schedule()
            prepared = self._runner.prepare(step)
            # the logits of the step before go as soon as they have been sampled from, or they would lie beside the next
            launched, drawn = None, self._draw(launched)
            launched = _Launched(step, self._runner.forward(prepared, drawn.token_ids if drawn else None))
            self._finish(drawn)
            if not self._overlap:
                launched, drawn = None, self._draw(launched)
                self._finish(drawn)
        self._finish(self._draw(launched))
        self._metrics.decode_graphs = self._runner.decode_graphs
        self._metrics.graph_steps += self._runner.graph_steps - graph_steps
        self._metrics.preempted_sequences += self._scheduler.preempted_sequences
        return self._kept(self._scheduler.close())

    def _kept(self, handles: dict[int, int]) -> list[Kept]:
        """With the tokens that have KV: the last one generated mostly has none."""
        kept: list[Kept] = []
        for sequence, handle in handles.items():
            if self._cache is None:
                continue
            if sequence not in self._kept_tokens:  # it ended without a valid token
                self._cache.free(handle)
                continue
            node = int(self._plan.trie.prompt_node[self._plan.sequences.prompt[sequence]])
            row = int(self._plan.trie.prompt_row[self._plan.sequences.prompt[sequence]])
            prompt = self._arena.row(row)[: int(self._plan.trie.end[node])]
            length = int(self._cache.lengths(np.array([handle]))[0])
            kept.append(Kept(sequence, handle, np.concatenate([prompt, self._kept_tokens[sequence]])[:length]))
        return kept

    def release(self) -> None:
        """Lets go of what only this run needed."""
        if self._matchers:
            self._matchers.close()

    def _draw(self, launched: _Launched | None) -> _Drawn | None:
        """Has the device sample from a step's logits and score with them. All steps before it are finished."""
        if launched is None:
            return None
        started = perf_counter()
        step = launched.step
        positions = self._generated.lengths[step.sampled].astype(np.int64)
        allowed = self._matchers.masks(step.sampled) if self._matchers else None
        sampled = sample(
            launched.logits,
            self._sampling.take(step.sampled),
            positions,
            step.sampled_logits,
            allowed,
            with_source=self._sampling_records is not None,
        )
        scored = score(
            launched.logits, step.scored_logits, self._score_table.target[step.scored], self._score_temperature
        )
        results = HostCopies(sampled.token_ids, sampled.logprobs, sampled.is_valid, scored.logprobs, scored.is_greedy)
        drawn = _Drawn(step, sampled.token_ids, results, _copies(sampled.source))
        self._sampling_s += perf_counter() - started
        return drawn

    def _finish(self, drawn: _Drawn | None) -> None:
        """Waits for what a step drew, and does what follows from it: tokens, endings, completions, memory."""
        if drawn is None:
            return
        step, (token_ids, logprobs, is_valid, *scores) = drawn.step, drawn.results.wait()
        started = perf_counter()
        self._scores.store(step.scored, *scores)
        self._metrics.scored_tokens += len(step.scored)
        self._collect_scored(step.scored_sequences)
        at = np.flatnonzero(~self._has_ended[step.sampled])  # the others had a row that nobody needs
        if self._sampling_records and drawn.source:
            self._sampling_records.append(step.sampled, at, *drawn.source.wait())
        endings = np.full(len(step.sampled), Ending.NONE, np.int8)
        endings[at] = self._append(step.sampled[at], token_ids[at], logprobs[at], is_valid[at])
        self._sampling_s += perf_counter() - started
        self._scheduler.update(step, endings != Ending.NONE)
        self._progress(int((endings != Ending.NONE).sum()) + len(step.scored_sequences), len(at))
        self._metrics.wasted_rows += len(step.sampled) - len(at)
        self._count(step)

    def _append(
        self,
        sequences: Int64Array,
        token_ids: Int64Array,
        logprobs: npt.NDArray[np.float32],
        is_valid: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.int8]:
        """Gives every sequence its next token, if it has one; how each of them ends with it (`Ending`, int8 [N])."""
        at = np.flatnonzero(is_valid)
        valid, tokens = sequences[at], token_ids[at].astype(np.int32)
        self._generated.append(valid, tokens, logprobs[at])
        self._metrics.generated_tokens += len(at)
        endings = np.full(len(sequences), Ending.INVALID, np.int8)
        is_complete = self._matchers.advance(valid, tokens) if self._matchers else None
        endings[at] = self._endings.check(valid, tokens, self._generated, is_complete)
        if self._matchers:
            self._matchers.settle(sequences, endings != Ending.NONE)
        self._collect(sequences, endings)
        return endings

    def _collect(self, sequences: Int64Array, endings: npt.NDArray[np.int8]) -> None:
        ended = np.flatnonzero(endings != Ending.NONE)
        self._has_ended[sequences[ended]] = True
        found: list[tuple[int, Completion | RowError]] = []
        for sequence, ending in zip(sequences[ended].tolist(), endings[ended].tolist(), strict=True):
            found.append((sequence, self._completion(sequence, ending)))
            self._generated.drop(sequence)
            if self._sampling_records:
                self._sampling_records.drop(sequence)
        if found:
            self._on_ended(found)

    def _completion(self, sequence: int, ending: Ending) -> Completion | RowError:
        if ending == Ending.INVALID:
            return (self._matchers.failures.get(sequence) if self._matchers else None) or _BAD_LOGITS
        token_ids = self._generated.tokens(sequence).copy()
        if self._plan.costs.keeps[sequence]:
            self._kept_tokens[sequence] = token_ids
        return Completion(
            token_ids=token_ids,
            logprobs=self._generated.logprobs(sequence).copy(),
            finish_reason="length" if ending == Ending.LENGTH else "stop",
            stop_string=self._endings.stop_string(sequence),
            sampling=self._sampling_records.record(sequence) if self._sampling_records else None,
        )

    def _collect_scored(self, sequences: Int64Array) -> None:
        """Completions of sequences that have all their scores; an error where one of these is of no distribution."""
        if len(sequences):
            self._on_ended([(sequence, self._scored_completion(sequence)) for sequence in sequences.tolist()])

    def _scored_completion(self, sequence: int) -> Completion | RowError:
        entries = self._score_table.entries_of(sequence, self._plan.trie, self._plan.sequences)
        logprobs = self._scores.logprobs[entries]
        if np.isnan(logprobs).any():
            return _BAD_LOGITS
        return Completion(
            token_ids=self._score_table.target[entries],
            logprobs=logprobs,
            finish_reason="length",
            is_greedy=self._scores.is_greedy[entries],
        )

    def _count(self, step: Step) -> None:
        """A finished step; all time since the last one was is its."""
        held_tokens = int(step.pages_held @ self._page_bytes) // self._bytes_per_token
        self._metrics.peak_kv_tokens = max(self._metrics.peak_kv_tokens, held_tokens)
        now = perf_counter()
        self._metrics.count_step(step, now - self._counted_to - self._sampling_s, self._sampling_s)
        self._counted_to, self._sampling_s = now, 0.0


def _copies(source: SampledFrom | None) -> HostCopies | None:
    """On their way to the host, if it was told what tokens were drawn from."""
    return HostCopies(source.logprobs, source.entropies, source.kept_ids, source.kept_counts) if source else None
