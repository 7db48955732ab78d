"""Runs a plan to its end: schedule, forward, sample, see who has ended, until nobody is left.

On a device that works by itself the host does not wait for it. While the device is at step k, the host finishes step
k - 1, then schedules and prepares step k + 1 as if nobody ended in step k but by length:

    device   forward k                              sample k   forward k + 1
    host     finish k - 1 · schedule, prepare k + 1 ·  launch  · finish k · schedule, prepare k + 2 · launch

Decode rows of step k + 1 take their tokens on the device, from what step k sampled. Where tokens are drafted, the host
waits: drafts follow tokens that are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchkv.drafts import Drafts
from batchkv.endings import Ending, Endings
from batchkv.errors import RowError
from batchkv.job_plan import Plan
from batchkv.kv_cache import KVCache
from batchkv.kv_layout import KVLayout
from batchkv.matchers import Matchers
from batchkv.metrics import RunMetrics
from batchkv.model_runner import ModelRunner
from batchkv.progress import OnStep
from batchkv.sampler import sample, score
from batchkv.sampling_batch import SamplingBatch
from batchkv.sampling_record import SamplingRecords
from batchkv.sampling_source import SampledFrom
from batchkv.scheduler import Scheduler
from batchkv.scoring import Scores, build_score_table
from batchkv.sequence import GeneratedTokens
from batchkv.speculation import Speculation
from batchkv.step import Drafted, Step
from batchkv.token_arena import TokenArena
from batchkv.transfers import HostCopies
from batchkv.writer import Completion

Int64Array = npt.NDArray[np.int64]
_Source = Sequence[npt.NDArray[Any]]  # of what tokens are drawn, as `SamplingRecords.append` takes it
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


@dataclass(frozen=True, slots=True, eq=False)
class RunOptions:
    """What only some runs want.

    Attributes:
        record_sampling: completions tell what their tokens were drawn from (`Completion.sampling`).
        score_temperature: what logits are divided by where given tokens are scored.
        unwanted: bool [sequences], as of `Endings`: what `on_ended` sets there ends with its next token.
        drafts: earlier completions for the sequences of the plan. They change no token, only how fast it comes: what a
            model would sample next is computed for several tokens at once, where they are likely.
    """

    record_sampling: bool = False
    score_temperature: float = 1.0
    unwanted: npt.NDArray[np.bool_] | None = None
    drafts: Drafts | None = None


DEFAULTS = RunOptions()


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens of N places of a step: the sequences that sampled them, int64, and int32, float32, bool."""

    sequences: Int64Array
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    is_valid: npt.NDArray[np.bool_]

    def take(self, at: Int64Array) -> _Tokens:
        return _Tokens(self.sequences[at], self.token_ids[at], self.logprobs[at], self.is_valid[at])


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
        options: what only some runs want.
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
        options: RunOptions = DEFAULTS,
    ) -> None:
        self._runner, self._sampling, self._endings = runner, sampling, endings
        self._metrics, self._on_ended, self._progress = metrics, on_ended, progress
        self._plan, self._matchers = plan, matchers
        self._generated = GeneratedTokens(len(plan.sequences))
        self._sampling_records = SamplingRecords() if options.record_sampling else None
        self._score_temperature = options.score_temperature
        self._score_table = build_score_table(plan.trie, plan.sequences, arena)
        self._scores = Scores(len(self._score_table))
        self._speculation = self._speculation_of(options.drafts)
        self._scheduler = Scheduler(
            plan,
            arena,
            layout,
            self._generated,
            self._score_table,
            max_batch_rows=max_batch_rows,
            max_batch_tokens=max_batch_tokens,
            cache=cache,
            speculation=self._speculation,
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
            if not self._overlap or self._scheduler.awaits(step):
                launched, drawn = None, self._draw(launched)
                self._finish(drawn)
        self._finish(self._draw(launched))
        self._metrics.decode_graphs = self._runner.decode_graphs
        self._metrics.graph_steps += self._runner.graph_steps - graph_steps
        self._metrics.preempted_sequences += self._scheduler.preempted_sequences
        return self._kept(self._scheduler.close())

    def _speculation_of(self, drafts: Drafts | None) -> Speculation | None:
        """Who is scored or constrained has none: the masks of a step are those of known tokens."""
        if drafts is None:
            return None
        self._metrics.count_drafts(0, 0)
        may_have = ~self._plan.sequences.is_scored
        if self._matchers:
            may_have &= ~self._matchers.is_constrained
        return Speculation(drafts, self._generated, may_have)

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
            length = self._cache.length(handle)
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
        if step.drafted is not None:
            positions += step.drafted.before
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
        is_wanted = ~self._has_ended[step.sampled]  # the others had a row that nobody needs
        tokens = _Tokens(step.sampled, token_ids.astype(np.int32), logprobs, is_valid)
        endings = np.full(len(step.sampled), Ending.NONE, np.int8)
        at = np.flatnonzero(is_wanted if step.drafted is None else is_wanted & (step.drafted.before == 0))
        source = drawn.source.wait() if drawn.source else None
        endings[at] = self._append(tokens, at, source)
        accepted = 0 if step.drafted is None else self._append_accepted(tokens, step.drafted, at, endings, source)
        self._sampling_s += perf_counter() - started
        self._scheduler.update(step, endings != Ending.NONE)
        self._progress(int((endings != Ending.NONE).sum()) + len(step.scored_sequences), len(at) + accepted)
        self._metrics.wasted_rows += int((~is_wanted).sum())
        self._count(step)

    def _append(self, step: _Tokens, places: Int64Array, source: _Source | None) -> npt.NDArray[np.int8]:
        """Gives distinct sequences their next token, if they have one; how each ends with it (`Ending`, int8 [N]).

        Args:
            step: tokens of all places of a step.
            places: int64 [N], those of these sequences.
            source: what all of them are drawn from, if that is recorded.
        """
        tokens = step.take(places)
        if self._sampling_records and source:
            self._sampling_records.append(step.sequences, places, *source)
        sequences, at = tokens.sequences, np.flatnonzero(tokens.is_valid)
        valid, token_ids = sequences[at], tokens.token_ids[at]
        self._generated.append(valid, token_ids, tokens.logprobs[at])
        self._metrics.generated_tokens += len(at)
        endings = np.full(len(sequences), Ending.INVALID, np.int8)
        is_complete = self._matchers.advance(valid, token_ids) if self._matchers else None
        endings[at] = self._endings.check(valid, token_ids, self._generated, is_complete)
        if self._matchers:
            self._matchers.settle(sequences, endings != Ending.NONE)
        self._collect(sequences, endings)
        return endings

    def _append_accepted(
        self,
        tokens: _Tokens,
        drafted: Drafted,
        at: Int64Array,
        endings: npt.NDArray[np.int8],
        source: _Source | None,
    ) -> int:
        """Gives sequences the tokens behind those that were drafted right; how many that is.

        Such a token was sampled where the sequence went on as drafted up to there, so it is what a step of its own
        would have given. Nothing is taken behind the token that ends a sequence.

        Args:
            tokens: of all places of a step.
            at: first places of the sequences, which have these tokens already.
            endings: int8 of all places, written for those whose token is taken.
            source: as of `_append`.
        """
        accepted, compared, is_right = 0, [], []
        while len(at := at[drafted.token_ids[at] >= 0]):
            compared.append(at)
            is_right.append(tokens.token_ids[at] == drafted.token_ids[at])
            at = at[is_right[-1] & (endings[at] == Ending.NONE)] + 1
            endings[at] = self._append(tokens, at, source)
            accepted += len(at)
        if self._speculation is not None and compared:
            places = np.concatenate(compared)
            self._speculation.learn(tokens.sequences[places], drafted.matched[places], np.concatenate(is_right))
        self._metrics.count_drafts(drafted.num_tokens, accepted)
        return accepted

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
