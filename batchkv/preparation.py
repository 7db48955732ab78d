"""From a job to a plan: tokenize, check against the model, plan. Needs a tokenizer and a config, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from batchkv.config import EngineConfig
from batchkv.constraints import Grammars, check_constraints
from batchkv.errors import RowError
from batchkv.job import Job
from batchkv.job_plan import Plan
from batchkv.kv_layout import KVLayout, layer_specs
from batchkv.metrics import RunMetrics
from batchkv.planner import Detokenize, Limits, check_kv_budget, make_plan
from batchkv.progress import OnProgress, no_progress
from batchkv.token_arena import TokenArena
from batchkv.tokenization import check_prompts, tokenize

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What planning has to know of a model.

    Attributes:
        layout: its KV.
        vocab_size: token ids are below it.
        context_length: most tokens of prompt and output together; None if there is no limit.
        end_token_ids: tokens that end a sample; by default the tokenizer's.
    """

    layout: KVLayout
    vocab_size: int
    context_length: int | None
    end_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: PretrainedConfig, element_bytes: int, scale_bytes: int) -> ModelFacts:
        """Of the model that `config` describes, with KV elements and scales of so many bytes (`KVLayout`)."""
        return cls(
            layout=KVLayout(layer_specs(config), element_bytes, scale_bytes),
            vocab_size=config.vocab_size,
            context_length=getattr(config, "max_position_embeddings", None),
        )


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job that is ready to run.

    Attributes:
        job: its rows.
        arena: their prompts; rows with errors have no tokens.
        errors: all rows that cannot run, by row number.
        plan: how the others do.
        grammars: of the rows whose output is constrained; None if there are none.
    """

    job: Job
    arena: TokenArena
    errors: dict[int, RowError]
    plan: Plan
    grammars: Grammars | None = None


def prepare(
    job: Job,
    tokenizer: PreTrainedTokenizerBase | None,
    facts: ModelFacts,
    config: EngineConfig,
    *,
    kv_bytes: int,
    device_type: str,
    metrics: RunMetrics,
    on_progress: OnProgress = no_progress,
) -> PreparedJob:
    """Tokenizes and plans a job.

    Raises:
        UserError: rows hold text and there is no tokenizer.
    """
    limits = Limits(
        kv_bytes=kv_bytes,
        max_batch_rows=config.max_batch_rows,
        max_batch_tokens=config.batch_tokens(device_type),
        page_size=config.page_size,
        context_length=facts.context_length,
        share_prefixes=not config.no_prefix_sharing,
    )
    with metrics.timed("tokenize"):
        arena, errors = tokenize(job, tokenizer, on_progress)
        errors = {**errors, **job.errors}
        if tokenizer is None:
            errors |= _without_text(job, errors)
        errors |= check_prompts(
            arena, job, vocab_size=facts.vocab_size, context_length=facts.context_length, errors=errors
        )
        grammars, bad = check_constraints(job.params, errors, tokenizer, facts.vocab_size, facts.end_token_ids)
        errors |= bad
        arena = arena.with_rows_dropped(errors)
    on_progress("plan", 0, 0)
    with metrics.timed("plan"):
        errors |= check_kv_budget(job, arena, facts.layout, limits)
        arena = arena.with_rows_dropped(errors)
        plan = make_plan(job, arena, errors, facts.layout, limits, _preview(tokenizer))
    return PreparedJob(job, arena, errors, plan, grammars)


def _without_text(job: Job, errors: Mapping[int, RowError]) -> dict[int, RowError]:
    """Rows with stop strings, which are found in text: without a tokenizer there is none."""
    error = RowError("bad_parameter", "stop is set, but there is no tokenizer to find it: name one, or stop_token_ids")
    has_stop = job.params.column(lambda params: bool(params.stop), np.bool_)
    return {row: error for row in np.flatnonzero(has_stop).tolist() if row not in errors}


def _preview(tokenizer: PreTrainedTokenizerBase | None) -> Detokenize | None:
    """Shows how a prefix begins."""
    if tokenizer is None:
        return None

    def decode(token_ids: npt.NDArray[np.int32]) -> str:
        return str(tokenizer.decode(token_ids.tolist()))

    return decode
