"""Jobs of rows that are scored and rows that are generated, run on an engine from token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from batchkv.engine import Engine
from batchkv.errors import RowError
from batchkv.job_plan import Plan
from batchkv.metrics import RunMetrics
from batchkv.preparation import PreparedWave, prepare_wave
from batchkv.sampling_params import RowParams, SamplingParams
from batchkv.scoring import SCORING, split_last_tokens
from batchkv.token_arena import TokenArena
from batchkv.wave import Wave
from batchkv.waves import NOTHING
from batchkv.writer import Completion


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens before, and those to score after them; without any, the row is generated."""

    context: tuple[int, ...]
    continuation: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.context + self.continuation


@dataclass(frozen=True, slots=True)
class Outcome:
    """Completions by row (of the first sample where there are several); None where the logits were no distribution."""

    completions: list[Completion | None]
    plan: Plan
    metrics: RunMetrics


def prepare_rows(
    engine: Engine, rows: Sequence[Row], generated: SamplingParams | Mapping[Row, SamplingParams]
) -> PreparedWave:
    """Rows without a continuation are generated with the parameters given, the same or by row."""
    score_from = np.array([len(row.context) if row.continuation else -1 for row in rows])
    arena, scored = split_last_tokens(
        TokenArena.from_rows([np.array(row.tokens, np.int32) for row in rows]), score_from
    )
    params = RowParams.of(
        SCORING if row.continuation else generated if isinstance(generated, SamplingParams) else generated[row]
        for row in rows
    )
    prepared = prepare_wave(Wave.of(arena, params, scored), NOTHING, engine.layout, engine.limits())
    assert not prepared.errors
    return prepared


def run_rows(
    engine: Engine, rows: Sequence[Row], generated: SamplingParams | Mapping[Row, SamplingParams] | None = None
) -> Outcome:
    """Scores rows with a continuation, generates for the others."""
    metrics = RunMetrics()
    prepared = prepare_rows(engine, rows, generated or SamplingParams(max_tokens=6))
    completions: dict[int, Completion | None] = {}

    def note(ended: Sequence[tuple[int, Completion | RowError]]) -> None:
        completions.update((i, one if isinstance(one, Completion) else None) for i, one in ended)

    memory = prepared.plan.memory
    runner = engine.new_runner(memory.pool_pages, memory.page_size)
    try:
        engine.execute(prepared, runner, None, note, metrics)
    finally:
        runner.release()
    first = np.searchsorted(prepared.wave.output_request, np.arange(len(rows)))
    of_rows = [completions[sequence] for sequence in prepared.plan.sequences.output_sequence[first].tolist()]
    return Outcome(of_rows, prepared.plan, metrics)
