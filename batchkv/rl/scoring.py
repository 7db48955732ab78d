"""Log-probabilities of a rollout under another model: the reference, the policy before an update."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from batchkv.engine import Engine
from batchkv.errors import RowError, UserError
from batchkv.executor import RunOptions
from batchkv.metrics import RunMetrics
from batchkv.preparation import prepare_wave
from batchkv.rl.asked import OF_ENGINES, check_names
from batchkv.rl.generation import execute_alone
from batchkv.rl.policy import engine_of, left_as_it_was
from batchkv.rl.ragged import Ragged
from batchkv.rl.rollout_batch import RolloutBatch
from batchkv.sampling_params import RowParams
from batchkv.scoring import SCORING, split_last_tokens
from batchkv.token_arena import TokenArena
from batchkv.wave import Int64Array, Wave
from batchkv.waves import NOTHING
from batchkv.writer import Completion


def score(policy: nn.Module | Engine, batch: RolloutBatch, **config: Any) -> Ragged:
    """Log-probabilities of a batch's tokens under a model, in place. What samples have in common is computed once:
    each prompt, and what forks have taken over.

    Args:
        policy: as of `batchkv.rollout`.
        batch: the samples, and their temperature.
        config: fields of `EngineConfig`, for a module.

    Returns:
        float32, a list for each row, as long as its `token_ids`, under softmax(logits / temperature); 0 where
        `env_mask` is 0.

    Raises:
        UserError: the model cannot be run in place, a row is too long for it, or it gives no probabilities.
        TypeError: there is no such parameter.
    """
    check_names(config, OF_ENGINES, "score")
    engine = engine_of(policy, None, config)
    arena = batch.token_arena
    values = np.zeros(len(batch.completions.values), np.float32)
    offsets, mask = batch.completions.offsets, batch.env_mask.values
    rows = np.flatnonzero(batch.completions.lengths)
    found: dict[int, Completion | RowError] = {}
    if len(rows):
        check_tokens(arena, engine.prompt_limits.vocab_size)
        wave = _wave_of(arena.take(rows), batch.prompts.lengths[rows])
        prepared = prepare_wave(wave, NOTHING, engine.layout, engine.limits())
        for request, error in prepared.errors.items():
            raise UserError(f"row {rows[request]}: {error.message}")
        with left_as_it_was(engine.model):
            options = RunOptions(score_temperature=batch.temperature)
            execute_alone(engine, prepared, lambda ended: found.update(ended), RunMetrics(), options)
        sequences = prepared.plan.sequences.output_sequence.tolist()
        for row, sequence in zip(rows.tolist(), sequences, strict=True):
            scores = found[sequence]
            if isinstance(scores, RowError):
                raise UserError(f"row {row}: {scores.message}")
            values[offsets[row] : offsets[row + 1]] = scores.logprobs
    return Ragged(np.where(mask == 1, values, np.float32(0)), offsets)


def check_tokens(arena: TokenArena, vocab_size: int) -> None:
    """Raises UserError if the model does not have a token."""
    for row, token in zip(*arena.tokens_outside(vocab_size), strict=True):
        raise UserError(f"row {row} has token id {token}, the model has {vocab_size}: its tokenizer has to be the same")


def _wave_of(arena: TokenArena, score_from: Int64Array) -> Wave:
    """A request to score for each row."""
    shorter, scored = split_last_tokens(arena, score_from)
    return Wave.of(shorter, RowParams.of([SCORING] * arena.num_rows), scored)
