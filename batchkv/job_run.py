"""The run of a job: batch by batch, in each batch generation by generation: waves that are planned and executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchkv.choices import ChoiceTokens
from batchkv.conversation_kv import ConversationKV
from batchkv.errors import RowError
from batchkv.executor import Kept, OnEnded
from batchkv.generations import Batch, LaterRows, batches
from batchkv.job_plan import PlanTotals
from batchkv.kv_cache import KVCache
from batchkv.kv_layout import KVLayout
from batchkv.ledger import Ledger
from batchkv.metrics import RunMetrics
from batchkv.model_runner import ModelRunner
from batchkv.planner import Limits
from batchkv.preparation import ModelFacts, PreparedWave, prepare_wave
from batchkv.progress import OnEvent
from batchkv.records import Record
from batchkv.rows import Rows
from batchkv.sampling_params import MAX_SAMPLES
from batchkv.token_arena import TokenArena
from batchkv.turns import DecodingTokenizer
from batchkv.wave import Int64Array
from batchkv.waves import output_keys, wave_of
from batchkv.writer import Detokenize, Writer


class Machine(Protocol):
    """What computes: an engine."""

    def new_runner(self, pool_pages: tuple[int, ...], page_size: int) -> ModelRunner:
        """What holds KV pages and calls the model."""

    def execute(
        self, prepared: PreparedWave, runner: ModelRunner, cache: KVCache | None, on_ended: OnEnded
    ) -> Sequence[Kept]:
        """Computes all outputs of a wave; what stays in the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class JobRun:
    """A job that is read, and what it takes to run it.

    Attributes:
        rows: of the job.
        ledger: where records go.
        facts, limits, layout: of the model and the device.
        tokenizer, detokenize: of the model.
        metrics: times are added here.
        on_event: told of every wave.
    """

    rows: Rows
    ledger: Ledger
    facts: ModelFacts
    limits: Limits
    tokenizer: DecodingTokenizer | None
    detokenize: Detokenize
    metrics: RunMetrics
    on_event: OnEvent

    @property
    def layout(self) -> KVLayout:
        return self.facts.layout

    def run(self, machine: Machine, earlier: Callable[[Int64Array], Sequence[Record]]) -> PlanTotals:
        """Every row, to its records.

        Args:
            machine: computes.
            earlier: what an earlier run has recorded of rows.

        Returns:
            What was planned.
        """
        totals = PlanTotals()
        choices = ChoiceTokens(self.tokenizer)
        with ExitStack() as stack:
            later: LaterRows | None = None
            if self.rows.dependencies is not None:
                later = stack.enter_context(
                    LaterRows(
                        self.rows,
                        self.rows.dependencies,
                        self.tokenizer,
                        self.facts.prompt_limits,
                        self.facts.end_token_ids,
                    )
                )
            for batch in batches(self.rows, self.limits.kv_bytes // self.layout.bytes_per_token):
                if self._is_done(batch):
                    continue
                run = _BatchRun(self, machine, choices, later)
                totals = run.run(batch, earlier, totals)
                self.rows.release_pages()
        return totals

    def _is_done(self, batch: Batch) -> bool:
        """Whether an earlier run has finished all of it."""
        if not len(self.ledger.done):
            return False
        rows = np.concatenate(batch.generations)
        bounds = [output_keys(rows, np.full(len(rows), sample)) for sample in (0, MAX_SAMPLES)]
        first, last = (np.searchsorted(self.ledger.done, bound) for bound in bounds)
        return bool((last - first == self.rows.outputs_of_rows()[rows]).all())


class _BatchRun:
    """One batch of a job."""

    def __init__(self, job: JobRun, machine: Machine, choices: ChoiceTokens, later: LaterRows | None) -> None:
        self._job, self._machine, self._choices, self._later = job, machine, choices, later

    def run(self, batch: Batch, earlier: Callable[[Int64Array], Sequence[Record]], totals: PlanTotals) -> PlanTotals:
        job, later = self._job, self._later
        shares = job.limits.share_prefixes and len(batch.generations) > 1
        kv = ConversationKV(job.layout, job.limits, self._machine.new_runner) if shares else None
        if later is not None:
            later.note(earlier(np.concatenate(batch.generations)))
        try:
            for number, picked in enumerate(batch.generations):
                arena = job.rows.prompts(picked) if number == 0 else None
                is_last = number == len(batch.generations) - 1
                totals = self._run_wave(picked, arena, kv, totals, is_last=is_last)
        finally:
            if kv is not None:
                kv.release()
        if later is not None:
            later.forget()
        return totals

    def _run_wave(
        self,
        picked: Int64Array,
        arena: TokenArena | None,
        kv: ConversationKV | None,
        totals: PlanTotals,
        *,
        is_last: bool,
    ) -> PlanTotals:
        """A generation of a batch. arena: its prompts; None if they have yet to be built."""
        job, later = self._job, self._later
        if arena is None and later is not None:
            with job.metrics.timed("tokenize"):
                arena, errors = later.prompts(picked)
            self._reject(errors)
            good = np.flatnonzero(arena.lengths > 0)
            picked, arena = picked[good], arena.take(good)
        if arena is None or not len(picked):
            return totals
        if later is not None:
            later.note_prompts(picked, arena)
        whole = wave_of(job.rows, picked, arena, self._choices)
        done = job.ledger.done
        if kv is None or later is None:
            with job.metrics.timed("plan"):
                prepared = prepare_wave(whole, done, job.layout, job.limits)
            self._reject(prepared.errors)
            job.on_event("wave", prepared.plan.numbers())
            self._execute_alone(prepared)
        else:
            with job.metrics.timed("plan"):
                prepared, expected = kv.prepare(whole, done, later.needed, is_last=is_last)
            self._reject(prepared.errors)
            job.on_event("wave", prepared.plan.numbers())
            if expected is None:
                self._execute_alone(prepared)
            else:
                if prepared.wave.num_outputs:
                    kept = self._machine.execute(prepared, kv.runner, kv.cache, self._writer(prepared).write)
                    kv.keep(prepared, kept, later.needed)
                kv.expect(expected, later.continued_output)
        return totals.plus(prepared.plan)

    def _execute_alone(self, prepared: PreparedWave) -> None:
        """In a pool that is made for it."""
        if not prepared.wave.num_outputs:
            return
        memory = prepared.plan.memory
        with self._job.metrics.timed("plan"):
            runner = self._machine.new_runner(memory.pool_pages, memory.page_size)
        try:
            self._machine.execute(prepared, runner, None, self._writer(prepared).write)
        finally:
            runner.release()

    def _writer(self, prepared: PreparedWave) -> Writer:
        job = self._job
        return Writer(
            prepared.wave,
            prepared.plan.sequences,
            prepared.cached,
            job.rows.params,
            job.detokenize,
            self._record,
            self._reject,
        )

    def _record(self, records: Sequence[Record]) -> None:
        self._job.ledger.append(records)
        if self._later is not None:
            self._later.note(records)

    def _reject(self, errors: Mapping[int, RowError]) -> None:
        self._job.ledger.reject(errors)
        if self._later is not None:
            self._later.note([Record.of_error(row, error) for row, error in errors.items()])
