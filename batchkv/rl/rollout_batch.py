"""`RolloutBatch`: the samples of a rollout as an Arrow table, and the ways out of it to trainers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchkv.rl import exports
from batchkv.rl.ragged import Ragged
from batchkv.rl.sampling_columns import SAMPLING_SCHEMA
from batchkv.rl.token_tree import TokenTree
from batchkv.rl.trajectory import Branch, Trajectory, trajectory_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from batchkv.engine import Engine

SCHEMA = pa.schema(
    {
        "prompt_index": pa.int32(),
        "sample_index": pa.int32(),
        "prompt_token_ids": pa.list_(pa.int32()),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "finish_reason": pa.string(),
        "truncated": pa.bool_(),
        "env_mask": pa.list_(pa.int8()),
        "seed": pa.uint64(),
        "weight_version": pa.int64(),
        "num_cached_tokens": pa.int32(),
    }
)
"""The columns of a batch. `seed` may be int64 as well; a table may have more columns."""

OPTIONAL_SCHEMA = pa.schema(
    {
        "row": pa.int64(),
        "token_versions": pa.list_(pa.int64()),
        "forked_from": pa.int32(),
        "forked_at": pa.int32(),
        **dict(zip(SAMPLING_SCHEMA.names, SAMPLING_SCHEMA.types, strict=True)),
    }
)
"""Columns that have a meaning if they are there."""

# A value of these belongs to each of `token_ids`.
_OF_TOKENS = ("logprobs", "env_mask", "token_versions", *SAMPLING_SCHEMA.names)

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """One row for each sample.

    | column | what |
    |---|---|
    | `prompt_index`, `sample_index` | which prompt of the call, which of its samples |
    | `prompt_token_ids` | the prompt |
    | `token_ids` | what came after it: tokens of the model, its end token included, and of an environment |
    | `logprobs` | of `token_ids`, under softmax(logits / temperature); 0 for tokens of an environment |
    | `finish_reason`, `truncated` | `stop`, `length` or `abort` (others were enough); whether the sample was cut off |
    | `env_mask` | 1 for tokens of the model, 0 for those of an environment |
    | `seed` | of the random numbers |
    | `weight_version` | of the weights that made the tokens |
    | `num_cached_tokens` | prompt tokens that were not computed for this sample |
    | `row` (optional) | the global number of the prompt, which the random numbers are of |
    | `token_versions` (optional) | of the weights when each of `token_ids` came, where a sample saw an update |
    | `forked_from`, `forked_at` (optional) | the sample whose first tokens were taken over, how many; -1 if none |
    | `sampling_logprobs` (optional) | of `token_ids`, over the tokens that filters left there; 0 where greedy |
    | `entropies` (optional) | at the places of `token_ids`, of softmax(logits / temperature) before filters, in nats |
    | `kept_token_ids` (optional) | for each of `token_ids` those that filters left, ascending; none of them: all were |

    The last three are there where sampling was recorded (`batchkv.rollout`). Tokens of an environment have log-
    probabilities and entropies of 0, and no kept ids.

    Attributes:
        table: the samples, with the columns of `SCHEMA`.
        pad_token_id: what padded token ids are filled up with. It may be an end token: masks never come from it.
        temperature: what logits were divided by before `logprobs` were taken; 1 where samples are greedy.
        summary: what the rollout cost, with the names of a job's summary.

    Raises:
        ValueError: if a column is missing or of another type, a row's lists do not fit together, or the temperature
            is not above 0.
    """

    table: pa.Table
    pad_token_id: int
    temperature: float = 1.0
    summary: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.pad_token_id < 0:
            raise ValueError(f"pad_token_id {self.pad_token_id} must be at least 0")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature {self.temperature} must be above 0; logprobs of greedy samples are at 1")
        _check_columns(self.table)
        _check_lists(self.table, self.completions)
        _check_values(self.completions, self.env_mask, self.logprobs)
        _check_sampling(self)
        reasons = pc.is_in(self.table["finish_reason"], pa.array(FINISH_REASONS)).to_numpy()
        if not reasons.all():
            row = int(np.argmin(reasons))
            value = self.table["finish_reason"][row].as_py()
            raise ValueError(f"row {row}: finish_reason {value!r} is not one of {', '.join(FINISH_REASONS)}")

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def prompts(self) -> Ragged:
        """Token ids of the prompts: int32."""
        return Ragged.of(self.table["prompt_token_ids"])

    @property
    def completions(self) -> Ragged:
        """Token ids after the prompts: int32."""
        return Ragged.of(self.table["token_ids"])

    @property
    def logprobs(self) -> Ragged:
        """Of the tokens of `completions`: float32."""
        return Ragged.of(self.table["logprobs"])

    @property
    def env_mask(self) -> Ragged:
        """1 for the tokens of `completions` that the model made: int8."""
        return Ragged.of(self.table["env_mask"])

    @property
    def token_versions(self) -> Ragged:
        """Of the weights when each token of `completions` came: int64."""
        if "token_versions" in self.table.column_names:
            return Ragged.of(self.table["token_versions"])
        completions = self.completions
        versions = np.asarray(self.table["weight_version"].to_numpy())
        return Ragged(versions[completions.owners], completions.offsets)

    @property
    def entropies(self) -> Ragged | None:
        """At the tokens of `completions`: float32; None where they were not recorded."""
        return self._optional("entropies")

    @property
    def sampling_logprobs(self) -> Ragged | None:
        """Of the tokens of `completions`, under what they were drawn from: float32; None where it was not recorded."""
        return self._optional("sampling_logprobs")

    @property
    def kept_token_ids(self) -> Ragged | None:
        """A list for each token of `completions`, of all rows one behind the other: int32; None if not recorded."""
        if "kept_token_ids" not in self.table.column_names:
            return None
        return Ragged.of(_by_token(self.table["kept_token_ids"]))

    def _optional(self, name: str) -> Ragged | None:
        return Ragged.of(self.table[name]) if name in self.table.column_names else None

    @property
    def truncated(self) -> npt.NDArray[np.bool_]:
        """Which samples were cut off: bool [rows]."""
        return np.asarray(self.table["truncated"].to_numpy(), dtype=np.bool_)

    def trajectory(self, row: int) -> Trajectory:
        """A row of the batch. It must be of a rollout: tables from elsewhere lack columns."""
        return trajectory_of(self.table, row)

    def fork(self, sample: int, at_token: int, n: int) -> Branch:
        """New samples that have the first tokens of one in common, to stand among the prompts of a rollout.

        Args:
            sample: row of the batch.
            at_token: the token behind the prompt that is drawn anew, one of the model's.
            n: how many.

        Raises:
            ValueError: there is no such sample or token, it is not the model's, or there are no samples to draw.
        """
        if not 0 <= sample < len(self):
            raise ValueError(f"sample {sample} must be a row of the batch, from 0 to {len(self) - 1}")
        if n < 1:
            raise ValueError(f"n {n} must be at least 1")
        return self.trajectory(sample).fork(at_token, range(n))

    def unfinished(self) -> list[Branch]:
        """The samples that were cut off, to stand among the prompts of a later rollout: they go on where they were, and
        keep their logprobs and the weight versions of their tokens.
        """
        cut = [self.trajectory(row) for row in np.flatnonzero(self.truncated).tolist()]
        return [Branch(trajectory, (trajectory.sample_index,)) for trajectory in cut]

    def completions_by_prompt(self) -> dict[bytes, list[npt.NDArray[np.int32]]]:
        """Token ids after each distinct prompt, by the bytes of its int32 token ids."""
        found: dict[bytes, list[npt.NDArray[np.int32]]] = {}
        prompts, completions = self.prompts, self.completions
        for row in range(len(self)):
            found.setdefault(prompts.row(row).tobytes(), []).append(completions.row(row))
        return found

    def finished(self) -> RolloutBatch:
        """Without the samples that were cut off because others of their prompt were enough."""
        return replace(self, table=self.table.filter(pc.field("finish_reason") != "abort"))

    def score(self, policy: nn.Module | Engine, **config: Any) -> Ragged:
        """Log-probabilities of the tokens under another model: see `scoring.score`."""
        from batchkv.rl.scoring import score

        return score(policy, self, **config)

    def tree(self) -> TokenTree:
        """The trie of all samples, for training over it."""
        return TokenTree.of(self)

    def to_padded(self) -> dict[str, torch.Tensor]:
        """Plain padded tensors: see `exports.to_padded`."""
        return exports.to_padded(self)

    def to_trl(self) -> dict[str, Any]:
        """What a `rollout_func` of TRL returns: see `exports.to_trl`."""
        return exports.to_trl(self)

    def to_verl(
        self, *, prompt_length: int | None = None, response_length: int | None = None
    ) -> dict[str, torch.Tensor]:
        """The tensors of verl's `DataProto`: see `exports.to_verl`."""
        return exports.to_verl(self, prompt_length=prompt_length, response_length=response_length)

    def to_openrlhf(self) -> list[dict[str, Any]]:
        """What an agent executor of OpenRLHF returns, for each sample: see `exports.to_openrlhf`."""
        return exports.to_openrlhf(self)

    def to_openrlhf_experience(self) -> dict[str, torch.Tensor]:
        """The tensors of OpenRLHF's `Experience`: see `exports.to_openrlhf_experience`."""
        return exports.to_openrlhf_experience(self)

    def to_nemo_rl(self) -> dict[str, torch.Tensor]:
        """NeMo-RL's `GenerationOutputSpec`: see `exports.to_nemo_rl`."""
        return exports.to_nemo_rl(self)

    def to_slime(self, *, top_p: float = 1.0) -> list[dict[str, Any]]:
        """Fields of slime's `Sample`, for each sample: see `exports.to_slime`."""
        return exports.to_slime(self, top_p=top_p)

    def to_areal(self) -> list[dict[str, torch.Tensor]]:
        """What a workflow of AReaL returns, for each sample: see `exports.to_areal`."""
        return exports.to_areal(self)


def _check_columns(table: pa.Table) -> None:
    """Raises ValueError if a column of `SCHEMA` is missing, or one that is there is of another type or has nulls."""
    for name, wanted in (*_columns(SCHEMA), *_columns(OPTIONAL_SCHEMA)):
        if name not in table.column_names:
            if name in OPTIONAL_SCHEMA.names:
                continue
            raise ValueError(f"the table has no column {name!r}; it needs {', '.join(SCHEMA.names)}")
        column = table[name]
        if not (_same(column.type, wanted) or (name == "seed" and column.type == pa.int64())):
            raise ValueError(f"column {name!r} is of type {column.type}, not {wanted}")
        if column.null_count:
            raise ValueError(f"row {_first_null(column)}: {name} is null")


def _columns(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    return list(zip(schema.names, schema.types, strict=True))


def _same(dtype: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether two types are the same, whatever the values of lists are called (Parquet calls them `element`)."""
    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(dtype) and _same(dtype.value_type, wanted.value_type))
    return bool(dtype == wanted)


def _check_lists(table: pa.Table, tokens: Ragged) -> None:
    """Raises ValueError if lists have nulls or lengths that differ from those of `token_ids`."""
    of_tokens = [name for name in _OF_TOKENS if name in table.column_names]
    for name in ("prompt_token_ids", "token_ids", *of_tokens):
        values = pc.list_flatten(table[name])
        if values.null_count:
            row = int(np.repeat(np.arange(len(tokens)), _lengths(table[name]))[_first_null(values)])
            raise ValueError(f"row {row}: a value of {name} is null")
    for name in of_tokens:
        lengths = _lengths(table[name])
        wrong = np.flatnonzero(lengths != tokens.lengths)
        if wrong.size:
            row = int(wrong[0])
            raise ValueError(f"row {row}: {name} has {lengths[row]} values for {tokens.lengths[row]} token_ids")


def _check_values(tokens: Ragged, env_mask: Ragged, logprobs: Ragged) -> None:
    """Raises ValueError if a mask is not 0 or 1, a log-probability is not finite, or one is not of a model's token."""
    from_model = env_mask.values == 1
    _refuse(~from_model & (env_mask.values != 0), "env_mask", "must be 0 or 1", env_mask)
    _check_models("logprobs", logprobs, from_model)
    _refuse(tokens.values < 0, "token_ids", "must be at least 0", tokens)


def _check_sampling(batch: RolloutBatch) -> None:
    """Raises ValueError if what tokens were drawn from cannot be so."""
    tokens, from_model = batch.completions, batch.env_mask.values == 1
    if (logprobs := batch.sampling_logprobs) is not None:
        _check_models("sampling_logprobs", logprobs, from_model)
    if (entropies := batch.entropies) is not None:
        _check_models("entropies", entropies, from_model)
        _refuse(entropies.values < 0, "entropies", "must be at least 0", entropies)
    if "kept_token_ids" in batch.table.column_names:
        by_token = _by_token(batch.table["kept_token_ids"])
        if (ids := pc.list_flatten(by_token)).null_count:
            row = int(np.repeat(tokens.owners, _lengths(by_token))[_first_null(ids)])
            raise ValueError(f"row {row}: an id in kept_token_ids is null")
        kept = Ragged.of(by_token)
        is_there = np.bincount(kept.owners[kept.values == tokens.values[kept.owners]], minlength=len(kept)) > 0
        _refuse((kept.lengths > 0) & ~is_there, "token_ids", "must be among its kept_token_ids", tokens)
        _refuse((kept.lengths > 0) & ~from_model, "token_ids", "of the environment has kept_token_ids", tokens)


def _check_models(name: str, numbers: Ragged, from_model: npt.NDArray[np.bool_]) -> None:
    """Raises ValueError if one is not finite, or is of a token that is not the model's."""
    _refuse(~np.isfinite(numbers.values), name, "must be finite", numbers)
    _refuse(~from_model & (numbers.values != 0), name, "must be 0 for tokens of the environment", numbers)


def _refuse(where: npt.NDArray[np.bool_], name: str, rule: str, lists: Ragged) -> None:
    if where.any():
        place = int(np.argmax(where))
        raise ValueError(f"row {lists.owners[place]}: {name} {rule}, not {lists.values[place].item()!r}")


def _by_token(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Of lists of lists, the inner ones, one behind the other."""
    return pc.list_flatten(column)


def _lengths(lists: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    return np.asarray(pc.list_value_length(lists).to_numpy(), np.int64)


def _first_null(column: pa.ChunkedArray) -> int:
    return int(np.argmax(column.is_null().to_numpy()))
