"""From a wave to its plan. Needs a config of the model, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from batchkv.config import EngineConfig
from batchkv.errors import RowError
from batchkv.job_plan import Plan
from batchkv.kv_layout import KVLayout, layer_specs
from batchkv.planner import Detokenize, Limits, check_kv_budget, make_plan
from batchkv.rows import PromptLimits
from batchkv.token_arena import TokenArena
from batchkv.wave import Int64Array, Wave
from batchkv.waves import output_keys

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

    @property
    def prompt_limits(self) -> PromptLimits:
        return PromptLimits(self.vocab_size, self.context_length)

    def plan_limits(self, config: EngineConfig, *, kv_bytes: int, device_type: str) -> Limits:
        """What plans on a device with room for `kv_bytes` of KV have to keep to."""
        return Limits(
            kv_bytes=kv_bytes,
            max_batch_rows=config.max_batch_rows,
            max_batch_tokens=config.batch_tokens(device_type),
            page_size=config.page_size,
            context_length=self.context_length,
            share_prefixes=not config.no_prefix_sharing,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PreparedWave:
    """A wave that is ready to run.

    Attributes:
        wave: what is to be computed.
        plan: how.
        arena: the tokens that its trie is of.
        cached: int64 [outputs], prompt tokens not computed for each output where nothing of the job was done before: a
            job that was interrupted gives the same result as one that was not.
        errors: rows left out, by their number in the job.
    """

    wave: Wave
    plan: Plan
    arena: TokenArena
    cached: Int64Array
    errors: dict[int, RowError]


def prepare_wave(
    whole: Wave, done: Int64Array, layout: KVLayout, limits: Limits, detokenize: Detokenize | None = None
) -> PreparedWave:
    """Plans a wave.

    Args:
        whole: all outputs of its rows.
        done: int64, ascending, `waves.output_keys` of those that are there already.
        layout: KV of the model.
        limits: memory and batch limits.
        detokenize: shows how shared prefixes begin.
    """
    whole, errors = without_too_long(whole, done, layout, limits)
    left = outputs_left(whole, done)
    wave = whole.with_outputs(left)
    plan = make_plan(wave, layout, limits, detokenize)
    as_whole = plan if len(left) == whole.num_outputs else make_plan(whole, layout, limits)
    return PreparedWave(wave, plan, wave.arena, as_whole.cached_tokens()[left], errors)


def without_too_long(
    wave: Wave, done: Int64Array, layout: KVLayout, limits: Limits
) -> tuple[Wave, dict[int, RowError]]:
    """The wave without rows that take more KV than there is, and their errors by row number.

    A row that is finished has no error: an earlier run had more memory.
    """
    too_long = check_kv_budget(wave, layout, limits)
    if not too_long:
        return wave, {}
    of_row = {int(wave.row[request]): error for request, error in too_long.items()}
    left = set(wave.row[wave.output_request[outputs_left(wave, done)]].tolist())
    outputs = np.flatnonzero(~np.isin(wave.row[wave.output_request], list(of_row)))
    return wave.with_outputs(outputs), {row: error for row, error in of_row.items() if row in left}


def outputs_left(whole: Wave, done: Int64Array) -> Int64Array:
    """int64: the outputs of a wave that are not among those `done` (ascending, from `waves.output_keys`)."""
    keys = output_keys(whole.row[whole.output_request], whole.output_sample)
    at = np.searchsorted(done, keys)
    return np.flatnonzero(np.append(done, -1)[at] != keys)


def preview(tokenizer: PreTrainedTokenizerBase | None) -> Detokenize | None:
    """Shows how a prefix begins."""
    if tokenizer is None:
        return None
    return lambda token_ids: str(tokenizer.decode(token_ids.tolist()))
