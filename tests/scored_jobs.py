"""Jobs of rows that are scored and rows that are generated, run on an engine from token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from batchkv.engine import Engine, kv_budget_bytes
from batchkv.job import Job, Prompts
from batchkv.job_plan import Plan
from batchkv.metrics import RunMetrics
from batchkv.planner import Limits, check_kv_budget, make_plan
from batchkv.preparation import PreparedJob
from batchkv.sampling_params import RowParams, SamplingParams
from batchkv.scoring import SCORING, split_last_tokens
from batchkv.token_arena import TokenArena
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
) -> PreparedJob:
    """Rows without a continuation are generated with the parameters given, the same or by row."""
    score_from = np.array([len(row.context) if row.continuation else -1 for row in rows])
    arena, scored = split_last_tokens(
        TokenArena.from_rows([np.array(row.tokens, np.int32) for row in rows]), score_from
    )
    params = RowParams.of(
        SCORING if row.continuation else generated if isinstance(generated, SamplingParams) else generated[row]
        for row in rows
    )
    job = Job(pa.array(range(len(rows))), Prompts.of_token_ids(arena), params, {}, pa.table({}))
    config = engine.config
    limits = Limits(
        kv_budget_bytes(config, engine.device),
        config.max_batch_rows,
        config.batch_tokens(engine.device.type),
        config.page_size,
        share_prefixes=not config.no_prefix_sharing,
    )
    assert not check_kv_budget(job, arena, engine.layout, limits)
    return PreparedJob(job, arena, {}, make_plan(job, arena, {}, engine.layout, limits, scored=scored))


def run_rows(
    engine: Engine, rows: Sequence[Row], generated: SamplingParams | Mapping[Row, SamplingParams] | None = None
) -> Outcome:
    """Scores rows with a continuation, generates for the others."""
    metrics = RunMetrics()
    prepared = prepare_rows(engine, rows, generated or SamplingParams(max_tokens=6))
    completions = engine._execute(prepared, metrics, lambda ended, tokens: None)
    sequences = prepared.plan.sequences
    is_first = np.diff(sequences.output_row, prepend=-1) > 0
    of_rows = [completions[sequence] for sequence in sequences.output_sequence[is_first].tolist()]
    return Outcome(of_rows, prepared.plan, metrics)
