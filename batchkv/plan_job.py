"""What a job would do: all its waves planned, none executed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from batchkv.choices import ChoiceTokens
from batchkv.constraints import ConstraintChecks
from batchkv.errors import RowError, first_of
from batchkv.io.read import JobSource
from batchkv.job_plan import JobPlan, Plan, PlanTotals
from batchkv.metrics import RunMetrics
from batchkv.planner import Limits, make_plan
from batchkv.preparation import ModelFacts, prepare_wave, preview
from batchkv.progress import OnProgress, no_progress
from batchkv.rows import Rows, take_in
from batchkv.sampling_params import SamplingParams
from batchkv.token_arena import TokenArena
from batchkv.wave import Wave
from batchkv.waves import NOTHING, split, wave_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def plan_job(
    source: JobSource,
    sampling: SamplingParams,
    tokenizer: PreTrainedTokenizerBase | None,
    facts: ModelFacts,
    limits: Limits,
    *,
    on_progress: OnProgress = no_progress,
) -> JobPlan:
    """Reads and plans a job; arguments as of `take_in` and `prepare_wave`."""
    errors: dict[int, RowError] = {}

    def reject(found: Mapping[int, RowError]) -> None:
        errors.update(found)

    rows = take_in(
        source,
        sampling,
        tokenizer,
        facts.prompt_limits,
        None,
        ConstraintChecks(tokenizer, facts.vocab_size, facts.end_token_ids),
        reject,
        RunMetrics(),
        on_progress=on_progress,
    )
    on_progress("plan", 0, 0)
    first: Plan | None = None
    totals = PlanTotals()
    choices = ChoiceTokens(tokenizer)
    for picked in split(rows):
        whole = wave_of(rows, picked, rows.prompts(picked), choices)
        prepared = prepare_wave(whole, NOTHING, facts.layout, limits, preview(tokenizer))
        reject(prepared.errors)
        totals = totals.plus(prepared.plan)
        first = first or prepared.plan
    if first is None:
        first = make_plan(Wave.of(TokenArena.from_rows([]), []), facts.layout, limits)
        totals = totals.plus(first)
    return JobPlan(rows.num_rows, len(errors), first_of(errors), _generations(rows, len(errors)), totals, first)


def _generations(rows: Rows, num_errors: int) -> tuple[int, ...]:
    """Rows that can run in each generation: those that wait for nobody, those that wait for these, ..."""
    if rows.dependencies is None:
        return (rows.num_rows - num_errors,)
    waiting = list(rows.dependencies.required)
    later = np.bincount(rows.dependencies.generation[waiting], minlength=1)[1:]
    return (rows.num_rows - num_errors - len(waiting), *later.tolist())
