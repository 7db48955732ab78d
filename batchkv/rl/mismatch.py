"""How far a rollout's log-probabilities are from those that the trainer's own forward pass gives."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from batchkv.engine import Engine
from batchkv.errors import UserError
from batchkv.model_lock import alone_with
from batchkv.rl.policy import unwrap, whose_forward_trainers_call
from batchkv.rl.rollout_batch import RolloutBatch
from batchkv.rl.scoring import check_tokens

Array = npt.NDArray[Any]

# Bytes of fp32 logits worked on at once: those of a long row are never there as a whole a second time.
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What a rollout says of its tokens, against what the trainer would say of them with the same weights.

    With `d = log p_trainer(token) - log p_rollout(token)` for each token of the model:

    | attribute | formula | elsewhere |
    |---|---|---|
    | `mean_abs`, `max_abs` | mean and maximum of abs(d) | |
    | `kl` | mean of exp(d) - 1 - d | `rollout_corr/k3_kl` in verl, `gen_kl_error` in NeMo-RL |
    | `mult_prob_error` | mean of exp(abs(d)) | `token_mult_prob_error` in NeMo-RL |

    `kl` is the estimator k3 of J. Schulman, "Approximating KL Divergence" (2020), of KL(rollout ‖ trainer) from tokens
    of the rollout: never below 0, and 0 where all are equal. `mult_prob_error` is 1 there.

    A `kl` up to some 1e-3 is what trainers see with other engines in 16 bits; a `mult_prob_error` above 1.05 should be
    looked into. Both stay flat from step to step where the learning rate is 0: what grows then is a bug.

    Attributes:
        rows: samples that were scored.
        tokens: tokens of the model in them.
        worst_row, worst_position: where `max_abs` is: the row of the batch, the place in its `token_ids`.
    """

    rows: int
    tokens: int
    mean_abs: float
    max_abs: float
    kl: float
    mult_prob_error: float
    worst_row: int
    worst_position: int

    def to_json(self) -> dict[str, Any]:
        """All attributes by name; None where a number is not finite, which JSON cannot say."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}

    def __str__(self) -> str:
        """One line, for logs."""
        return (
            f"mismatch over {self.tokens:,} tokens of {self.rows:,} rows: |Δlogp| mean {self.mean_abs:.2e}, "
            f"max {self.max_abs:.2e} (row {self.worst_row}, token {self.worst_position}); "
            f"KL {self.kl:.2e}; multiplicative error {self.mult_prob_error:.6f}"
        )


def mismatch(
    policy: nn.Module | Engine,
    batch: RolloutBatch,
    *,
    rows: Sequence[int] | None = None,
    temperature: float | None = None,
    max_rows: int | None = 32,
) -> Mismatch:
    """Scores samples again with the policy's own forward pass, and tells how far the rollout is from it.

    Each row goes through the model alone, without padding, without a cache, in evaluation mode, with the attention that
    the model has for training; log-probabilities are fp32, as trainers take them. Tokens of an environment are read,
    not compared. It is to be called before the weights change: samples of earlier weights differ by more than rounding.

    Args:
        policy: as in `rollout`. It is left as it was, also after an error.
        batch: of the rollout.
        rows: which rows of the batch; by default as many as `max_rows`, evenly over the batch.
        temperature: what logits are divided by; by default the batch's.
        max_rows: how many rows there are at most where `rows` does not name them; None for all.

    Raises:
        UserError: the policy cannot be run in place, or does not have a token of the batch.
        ValueError: a row is not in the batch, there is nothing to compare, or a number is out of range.
    """
    if not isinstance(batch, RolloutBatch):
        raise UserError(f"what is to be compared is a {type(batch).__name__}, must be a RolloutBatch")
    temperature = batch.temperature if temperature is None else temperature
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature {temperature} must be above 0; logprobs of greedy samples are at 1")
    chosen = _chosen(len(batch), rows, max_rows)
    policy = policy.model if isinstance(policy, Engine) else policy
    inner, outer = unwrap(policy), whose_forward_trainers_call(policy)
    check_tokens(batch.token_arena, len(inner.get_input_embeddings().get_parameter("weight")))
    logits_of = partial(_logits, outer, inner)
    with alone_with(inner), _evaluating(outer):
        differences = [_differences(logits_of, sample, temperature) for sample in _samples(batch, chosen)]
    return _summary(differences)


@dataclass(frozen=True, slots=True)
class _Differences:
    """Of a row: trainer's log-probability minus rollout's, float64 [M], where in `token_ids` these are, int64 [M]."""

    row: int
    positions: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


def _chosen(num_rows: int, rows: Sequence[int] | None, max_rows: int | None) -> list[int]:
    """The rows to score."""
    if rows is None:
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows {max_rows} must be at least 1, or None for all rows")
        count = num_rows if max_rows is None else min(max_rows, num_rows)
        # Neighbours are samples of one prompt: in the middle of equal parts, these are of as many as there are.
        return [(2 * part + 1) * num_rows // (2 * count) for part in range(count)]
    if wrong := [row for row in rows if not 0 <= row < num_rows]:
        raise ValueError(f"row {wrong[0]} is not in the batch, which has {num_rows} rows")
    return [int(row) for row in rows]


@dataclass(frozen=True, slots=True)
class _Sample:
    """A row of the batch: token ids [prompt], and [T] after it, their log-probabilities, and which are the model's."""

    row: int
    prompt: Array
    completion: Array
    logprobs: Array
    env_mask: Array


def _samples(batch: RolloutBatch, rows: Sequence[int]) -> Iterator[_Sample]:
    columns = (batch.prompts, batch.completions, batch.logprobs, batch.env_mask)
    for row in rows:
        yield _Sample(row, *(lists.row(row) for lists in columns))


def _differences(logits_of: Callable[[_Sample], torch.Tensor], sample: _Sample, temperature: float) -> _Differences:
    positions = np.flatnonzero(sample.env_mask)
    if not len(positions):
        return _Differences(sample.row, positions, np.empty(0))
    if not len(sample.prompt):
        raise ValueError(f"row {sample.row}: its prompt is empty, so nothing says how likely its first token is")
    logits_TV = logits_of(sample)
    places_M = torch.from_numpy(positions).to(logits_TV.device)
    targets_M = torch.from_numpy(sample.completion[positions].astype(np.int64)).to(logits_TV.device)
    theirs = _logprobs(logits_TV, places_M, targets_M, temperature).cpu().double().numpy()
    return _Differences(sample.row, positions, theirs - sample.logprobs[positions].astype(np.float64))


def _logits(outer: nn.Module, inner: PreTrainedModel, sample: _Sample) -> torch.Tensor:
    """[T, V], in the dtype of the model: what it expects where each token of the completion is.

    Args:
        outer: what is called: the model, or what wraps it.
        inner: the model.
        sample: one row.
    """
    input_ids = torch.from_numpy(np.concatenate([sample.prompt, sample.completion]).astype(np.int64))
    count = len(sample.completion)
    arguments: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(inner.forward).parameters:
        arguments["logits_to_keep"] = count + 1  # the last ones, so that none are computed for the prompt
    logits: torch.Tensor = outer(input_ids=input_ids[None].to(inner.device), **arguments).logits[0]
    return logits[-count - 1 : -1]


def _logprobs(
    logits_TV: torch.Tensor, places_M: torch.Tensor, targets_M: torch.Tensor, temperature: float
) -> torch.Tensor:
    """fp32 [M], log-softmax(logits / temperature) of each target at its place, a few places at a time."""
    step = max(1, _CHUNK_BYTES // (4 * logits_TV.shape[1]))
    parts = []
    for start in range(0, len(places_M), step):
        part = slice(start, start + step)
        scaled = logits_TV[places_M[part]].float() / temperature
        parts.append(scaled.gather(1, targets_M[part, None])[:, 0] - scaled.logsumexp(-1))
    return torch.cat(parts)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode and without gradients; each module in its own mode again, afterwards."""
    was_training = [(module, module.training) for module in model.modules()]
    try:
        model.train(False)
        with torch.no_grad():  # not inference mode: buffers made in it could not take part in a backward pass
            yield
    finally:
        for module, training in was_training:
            module.training = training


def _summary(differences: Sequence[_Differences]) -> Mismatch:
    rows = np.repeat([one.row for one in differences], [len(one.values) for one in differences])
    positions = np.concatenate([np.empty(0, np.int64), *(one.positions for one in differences)])
    d = np.concatenate([np.empty(0), *(one.values for one in differences)])
    if not len(d):
        raise ValueError(f"no token in {len(differences)} rows is the model's, so there is nothing to compare")
    distance = np.abs(d)
    worst = int(distance.argmax())  # the first NaN, if there is one
    with np.errstate(over="ignore"):
        return Mismatch(
            rows=len(differences),
            tokens=len(d),
            mean_abs=float(distance.mean()),
            max_abs=float(distance[worst]),
            kl=float((np.expm1(d) - d).mean()),
            mult_prob_error=float(np.exp(distance).mean()),
            worst_row=int(rows[worst]),
            worst_position=int(positions[worst]),
        )
