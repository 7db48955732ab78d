"""What trainers take, made of a `RolloutBatch`.

The layouts were read from the trainers' code; each function names the module and the release. Masks come from
lengths, never from ids that equal the pad token: a sample may end with it. No trainer has to be installed.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from batchkv.rl.ragged import Ragged

if TYPE_CHECKING:
    from batchkv.rl.rollout_batch import RolloutBatch


def to_padded(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    """Plain tensors: prompts filled up on the left, completions on the right, so that they meet in the middle.

    Returns:
        `prompt_ids`, `prompt_mask`: int64 [rows, longest prompt].
        `completion_ids`, `completion_mask`, `env_mask`: int64 [rows, longest completion]; `completion_mask` is 1 for
        all tokens of a completion, `env_mask` only for those of the model.
        `logprobs`: float32 [rows, longest completion], 0 where `env_mask` is 0.
        `truncated`: bool [rows].
    """
    prompts, completions = batch.prompts, batch.completions
    matrices = {
        "prompt_ids": prompts.padded(batch.pad_token_id, left=True, dtype=np.int64),
        "prompt_mask": prompts.mask(left=True),
        "completion_ids": completions.padded(batch.pad_token_id, dtype=np.int64),
        "completion_mask": completions.mask(),
        "env_mask": batch.env_mask.padded(0, dtype=np.int64),
        "logprobs": batch.logprobs.padded(0.0),
        "truncated": batch.truncated,
    }
    return _tensors(matrices)


def to_trl(batch: RolloutBatch) -> dict[str, Any]:
    """What TRL's `GRPOTrainer(rollout_func=...)` wants back (`trl/trainer/grpo_trainer.py`, 1.16).

    Returns:
        `prompt_ids`, `completion_ids`, `logprobs`: a list for each row, not filled up, end tokens kept.
        `env_mask`: the same, 1 for tokens of the model; only where an environment has added any, since without it
        the trainer takes all tokens, and trainers that do not know it would hand it to reward functions.
    """
    fields: dict[str, Any] = {
        "prompt_ids": batch.prompts.lists(),
        "completion_ids": batch.completions.lists(),
        "logprobs": batch.logprobs.lists(),
    }
    if not batch.env_mask.values.all():
        fields["env_mask"] = batch.env_mask.lists()
    return fields


def to_verl(
    batch: RolloutBatch, *, prompt_length: int | None = None, response_length: int | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of the `DataProto` that verl's rollout hands on: `DataProto.from_dict(tensors=batch.to_verl())`.

    As in `verl/experimental/agent_loop/agent_loop.py` (0.8 dev) and `compute_position_id_with_mask`: positions stand
    still where a row is filled up.

    Args:
        prompt_length, response_length: the widths of the trainer's config; by default those of the longest rows.

    Returns:
        `prompts` int64 [rows, P], filled up on the left; `responses` int64 [rows, R], on the right;
        `response_mask` int64 [rows, R], 1 for tokens of the model;
        `input_ids`, `attention_mask`, `position_ids` int64 [rows, P + R]; `rollout_log_probs` float32 [rows, R].

    Raises:
        ValueError: if a prompt or a response is longer than its width.
    """
    prompts, responses = batch.prompts, batch.completions
    _check_width(prompts, prompt_length, "prompt_length")
    _check_width(responses, response_length, "response_length")
    prompt_ids = prompts.padded(batch.pad_token_id, width=prompt_length, left=True, dtype=np.int64)
    response_ids = responses.padded(batch.pad_token_id, width=response_length, dtype=np.int64)
    attention = np.concatenate(
        [prompts.mask(width=prompt_length, left=True), responses.mask(width=response_length)], axis=1
    )
    matrices = {
        "prompts": prompt_ids,
        "responses": response_ids,
        "response_mask": batch.env_mask.padded(0, width=response_length, dtype=np.int64),
        "input_ids": np.concatenate([prompt_ids, response_ids], axis=1),
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
        "rollout_log_probs": batch.logprobs.padded(0.0, width=response_length),
    }
    return _tensors(matrices)


def to_openrlhf(batch: RolloutBatch) -> list[dict[str, Any]]:
    """What OpenRLHF's agent executors return, for each sample (`openrlhf/utils/agent.py`, 0.11).

    The trainer's code adds `prompt` and `label`, and what there is of `reward`, `scores`, `images`, `mm_train_inputs`
    and `extra_logs`: `{**sample, "prompt": ..., "label": ...}`.

    Returns:
        `observation_tokens`: the prompt and all that came after it; `rollout_log_probs`: as long, 0 where the token
        is not the model's; `action_ranges`: (start, end) of each run of tokens of the model in it; `truncated`.
    """
    sequences = batch.prompts.then(batch.completions).lists()
    logprobs = _whole(batch, batch.logprobs).lists()
    return [
        {"observation_tokens": tokens, "action_ranges": ranges, "rollout_log_probs": row_logprobs, "truncated": cut}
        for tokens, ranges, row_logprobs, cut in zip(
            sequences, _action_ranges(batch), logprobs, batch.truncated.tolist(), strict=True
        )
    ]


def to_openrlhf_experience(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    """The tensors of OpenRLHF's `Experience` (`trainer/ppo_utils/samples_generator.py`, `experience.py`, 0.11).

    What belongs to a token stands where it is predicted, one place to the left: there are T - 1 places.

    Returns:
        `sequences`, `attention_mask`: int64 [rows, T], filled up on the right;
        `action_mask`: int64 [rows, T - 1]; `rollout_log_probs`: float32 [rows, T - 1];
        `response_length`: int64 [rows], from the first to the last token of the model;
        `total_length`: float32 [rows]; `truncated`: bool [rows].
    """
    sequences = batch.prompts.then(batch.completions)
    ranges = _action_ranges(batch)
    matrices = {
        "sequences": sequences.padded(batch.pad_token_id, dtype=np.int64),
        "attention_mask": sequences.mask(),
        "action_mask": _whole(batch, batch.env_mask).padded(0, dtype=np.int64)[:, 1:],
        "rollout_log_probs": _whole(batch, batch.logprobs).padded(0.0)[:, 1:],
        "response_length": np.array([row[-1][1] - row[0][0] if row else 0 for row in ranges], dtype=np.int64),
        "total_length": sequences.lengths.astype(np.float32),
        "truncated": batch.truncated,
    }
    return _tensors(matrices)


def to_nemo_rl(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    """NeMo-RL's `GenerationOutputSpec` (`nemo_rl/models/generation/interfaces.py`, 0.6).

    A prompt and its completion stand at the beginning of a row; the rest is filled up.

    Returns:
        `output_ids`: int64 [rows, T]; `logprobs`: float32 [rows, T], 0 on prompts and on tokens of an environment;
        `generation_lengths`, `unpadded_sequence_lengths`: int64 [rows]; `truncated`: bool [rows];
        `token_mask`: int64 [rows, T], 1 on tokens of the model. It is not in the spec, which knows no environment,
        but is named as in the trainer's batches.
    """
    sequences = batch.prompts.then(batch.completions)
    matrices = {
        "output_ids": sequences.padded(batch.pad_token_id, dtype=np.int64),
        "generation_lengths": batch.completions.lengths,
        "unpadded_sequence_lengths": sequences.lengths,
        "logprobs": _whole(batch, batch.logprobs).padded(0.0),
        "truncated": batch.truncated,
        "token_mask": _whole(batch, batch.env_mask).padded(0, dtype=np.int64),
    }
    return _tensors(matrices)


_SLIME_STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}


def to_slime(batch: RolloutBatch, *, top_p: float = 1.0) -> list[dict[str, Any]]:
    """Fields of slime's `Sample` (`slime/utils/types.py`, 0.3): `Sample.from_dict(fields)`.

    Args:
        top_p: slime's `--rollout-top-p`, the samples' own. Below 1, its trainer takes log-probabilities over the tokens
            that were kept at each place, and compares them with the like of the rollout: samples then have these, and
            sampling must have been recorded. (At 1 it takes all tokens, whatever other filters there were.)

    Returns:
        `tokens`: the prompt and all that came after it; `response_length`; `loss_mask` and `rollout_log_probs`: of the
        response; `weight_versions`: as texts, each once as it took over; `status`; `group_index`, `index`: the prompt,
        and the row of this batch. With `top_p` below 1, `rollout_log_probs` are the `sampling_logprobs`, and there
        are `rollout_top_p_token_ids`, int32 [kept], and `rollout_top_p_token_offsets`, int32 [response + 1]: token i
        has `ids[offsets[i] : offsets[i + 1]]`, and none where all were kept or it is of an environment.

    Raises:
        ValueError: `top_p` is below 1, and it was not recorded what tokens were drawn from.
    """
    logprobs, nuclei = (batch.logprobs, [{}] * len(batch)) if top_p == 1 else _truncated(batch)
    columns = zip(
        batch.prompts.then(batch.completions).lists(),
        batch.env_mask.lists(),
        logprobs.lists(),
        _versions(batch),
        batch.table["finish_reason"].to_pylist(),
        batch.table["prompt_index"].to_pylist(),
        nuclei,
        strict=True,
    )
    return [
        {
            "group_index": prompt,
            "index": row,
            "tokens": tokens,
            "response_length": len(mask),
            "loss_mask": mask,
            "rollout_log_probs": row_logprobs,
            "weight_versions": versions,
            "status": _SLIME_STATUS[reason],
            **nucleus,
        }
        for row, (tokens, mask, row_logprobs, versions, reason, prompt, nucleus) in enumerate(columns)
    ]


def _truncated(batch: RolloutBatch) -> tuple[Ragged, list[dict[str, torch.Tensor]]]:
    """Log-probabilities over the tokens that were kept, and these, in slime's fields for each row."""
    logprobs, kept = batch.sampling_logprobs, batch.kept_token_ids
    if logprobs is None or kept is None:
        raise ValueError("slime wants the tokens that top_p kept: roll out with record_sampling=True")
    nuclei = []
    for start, end in itertools.pairwise(batch.completions.offsets.tolist()):
        offsets = kept.offsets[start : end + 1]
        ids = kept.values[offsets[0] : offsets[-1]]
        nuclei.append(
            {
                "rollout_top_p_token_ids": torch.tensor(ids, dtype=torch.int32),
                "rollout_top_p_token_offsets": torch.tensor(offsets - offsets[0], dtype=torch.int32),
            }
        )
    return logprobs, nuclei


def to_areal(batch: RolloutBatch) -> list[dict[str, torch.Tensor]]:
    """What AReaL's workflows return, for each sample, but for `rewards` (`areal/workflow/multi_turn.py`, 1.0).

    Returns:
        Tensors [1, T] over the prompt and all that came after it: `input_ids`, `loss_mask` (1 on tokens of the
        model) and `versions` (of the weights, by token; -1 where the token is not the model's) int32, `logprobs`
        float32, `attention_mask` bool.
    """
    sequences = batch.prompts.then(batch.completions)
    mask = _whole(batch, batch.env_mask).values.astype(np.int32)
    by_token = _whole(batch, batch.token_versions).values
    flat = {
        "input_ids": sequences.values,
        "loss_mask": mask,
        "logprobs": _whole(batch, batch.logprobs).values,
        "versions": np.where(mask == 1, by_token, -1).astype(np.int32),
        "attention_mask": np.ones(len(mask), dtype=np.bool_),
    }
    rows = {name: np.split(values, sequences.offsets[1:-1]) for name, values in flat.items()}
    return [{name: torch.tensor(rows[name][row]).unsqueeze(0) for name in flat} for row in range(len(batch))]


def _versions(batch: RolloutBatch) -> list[list[str]]:
    """For each row, the versions of weights that made its tokens, in their order; its own if it has no tokens."""
    rows = zip(
        batch.token_versions.lists(), batch.env_mask.lists(), batch.table["weight_version"].to_pylist(), strict=True
    )
    return [
        [str(version) for version, _ in itertools.groupby(itertools.compress(versions, mask))] or [str(last)]
        for versions, mask, last in rows
    ]


def _whole(batch: RolloutBatch, of_completions: Ragged) -> Ragged:
    """Values of completions, with a 0 for each token of the prompts in front."""
    return batch.prompts.filled_with(0, of_completions.values.dtype).then(of_completions)


def _action_ranges(batch: RolloutBatch) -> list[list[tuple[int, int]]]:
    """For each row, (start, end) of the runs of tokens of the model, counted from the start of the prompt."""
    mask = _whole(batch, batch.env_mask)
    # A 0 behind each row, so that no run goes on in the next one.
    ends = Ragged(np.zeros(len(batch), mask.values.dtype), np.arange(len(batch) + 1))
    closed = mask.then(ends)
    edges = np.diff(closed.values.astype(np.int8), prepend=0)
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    rows = closed.owners[starts]
    first = closed.offsets[rows]
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(len(batch))]
    for row, start, stop in zip(rows.tolist(), (starts - first).tolist(), (stops - first).tolist(), strict=True):
        ranges[row].append((start, stop))
    return ranges


def _check_width(lists: Ragged, width: int | None, name: str) -> None:
    """Raises ValueError if a row does not fit."""
    if width is not None and (too_long := np.flatnonzero(lists.lengths > width)).size:
        row = int(too_long[0])
        raise ValueError(f"row {row}: {lists.lengths[row]} tokens do not fit into {name}={width}; raise it")


def _tensors(matrices: dict[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
    # A copy: some arrays are views of Arrow's memory, which must not be written to.
    return {name: torch.tensor(matrix) for name, matrix in matrices.items()}
