"""Samples in the making: a prompt, and what followed it so far, of the model and of the environment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchkv.rl.sampling_columns import sampling_columns, sampling_record
from batchkv.sampling_record import SamplingRecord
from batchkv.token_arena import TokenIds
from batchkv.writer import Completion


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A sample of a prompt, finished or not. T tokens follow the prompt.

    Attributes:
        prompt_index: which of the prompts of the call it is of.
        row: the global number of the prompt, for the random numbers.
        sample_index: which of the prompt's samples it is.
        prompt_token_ids: int32 [prompt].
        token_ids: int32 [T], end tokens included.
        logprobs: float32 [T], under softmax(logits / temperature); 0 for tokens of the environment.
        env_mask: int8 [T], 1 where the token is the model's.
        weight_versions: int64 [T], of the weights when each token came.
        finish_reason: why the last turn ended; None before the first one. `abort`: others of the prompt were enough.
        num_cached_tokens: prompt tokens that were not computed for this sample.
        forked_from: the sample of the prompt whose first tokens it has taken over; -1 if it is on its own.
        forked_at: how many those are.
        sampling: what all T tokens were drawn from; those of the environment have log-probabilities and entropies of 0,
            and no kept ids. None where this was not recorded, or not for all of them.
    """

    prompt_index: int
    row: int
    sample_index: int
    prompt_token_ids: TokenIds
    token_ids: TokenIds
    logprobs: npt.NDArray[np.float32]
    env_mask: npt.NDArray[np.int8]
    weight_versions: npt.NDArray[np.int64]
    finish_reason: Literal["stop", "length", "abort"] | None = None
    num_cached_tokens: int = 0
    forked_from: int = -1
    forked_at: int = 0
    sampling: SamplingRecord | None = None

    def __post_init__(self) -> None:
        for array in (self.prompt_token_ids, self.token_ids, self.logprobs, self.env_mask, self.weight_versions):
            array.flags.writeable = False  # those of environments and hooks are the batch's own

    @classmethod
    def of_prompt(cls, index: int, row: int, token_ids: TokenIds) -> Trajectory:
        """Nothing follows yet."""
        nothing = np.zeros(0, np.int32)
        return cls(
            prompt_index=index,
            row=row,
            sample_index=0,
            prompt_token_ids=token_ids,
            token_ids=nothing,
            logprobs=nothing.astype(np.float32),
            env_mask=nothing.astype(np.int8),
            weight_versions=nothing.astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def all_token_ids(self) -> TokenIds:
        """int32 [prompt + T]."""
        return np.concatenate([self.prompt_token_ids, self.token_ids])

    def first(self, count: int) -> Trajectory:
        """Only the first tokens behind the prompt."""
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            env_mask=self.env_mask[:count],
            weight_versions=self.weight_versions[:count],
            sampling=None if self.sampling is None else self.sampling.first(count),
        )

    @property
    def turns(self) -> int:
        """How many times the model has spoken."""
        return int((np.diff(self.env_mask, prepend=np.int8(0)) == 1).sum())

    @property
    def last_turn(self) -> TokenIds:
        """int32, the model's tokens behind all of the environment's."""
        environments = np.flatnonzero(self.env_mask == 0)
        return self.token_ids[int(environments[-1]) + 1 if len(environments) else 0 :]

    def fork(self, at_token: int, samples: Iterable[int]) -> Branch:
        """New samples that have the first `at_token` tokens behind the prompt in common with this one.

        Args:
            at_token: the token that is drawn anew, one of the model's.
            samples: the index of each.

        Raises:
            ValueError: there is no such token, or it is not the model's.
        """
        if not 0 <= at_token < len(self):
            raise ValueError(f"at_token {at_token} must be one of the sample's {len(self)} tokens, from 0")
        if not self.env_mask[at_token]:
            raise ValueError(f"at_token {at_token} is a token of the environment, must be one of the model's")
        trunk = replace(self.first(at_token), forked_from=self.sample_index, forked_at=at_token, finish_reason=None)
        return Branch(trunk, tuple(samples))

    def with_completion(self, completion: Completion, weight_version: int) -> Trajectory:
        """What the model generated is behind it."""
        longer = self._with(completion.token_ids, completion.logprobs, 1, weight_version, completion.sampling)
        return replace(longer, finish_reason=completion.finish_reason)

    def with_reply(self, token_ids: TokenIds, weight_version: int) -> Trajectory:
        """Tokens of the environment are behind it."""
        count = len(token_ids)
        given = SamplingRecord.of_given(count)
        return self._with(token_ids, np.zeros(count, np.float32), 0, weight_version, given)

    def _with(
        self,
        token_ids: TokenIds,
        logprobs: npt.NDArray[np.float32],
        is_models: int,
        weight_version: int,
        sampling: SamplingRecord | None,
    ) -> Trajectory:
        count = len(token_ids)
        so_far = self.sampling if len(self) else SamplingRecord.of_given(0)
        return replace(
            self,
            token_ids=np.concatenate([self.token_ids, token_ids]),
            logprobs=np.concatenate([self.logprobs, logprobs]),
            env_mask=np.concatenate([self.env_mask, np.full(count, is_models, np.int8)]),
            weight_versions=np.concatenate([self.weight_versions, np.full(count, weight_version)]),
            sampling=so_far.then(sampling) if so_far is not None and sampling is not None else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Where samples begin that have something in common. Can stand among the prompts of a rollout.

    Attributes:
        trunk: what they have in common.
        samples: the index of each sample.
    """

    trunk: Trajectory
    samples: tuple[int, ...]

    def of_prompt(self, index: int) -> Branch:
        """The same as one of the prompts of a call."""
        return replace(self, trunk=replace(self.trunk, prompt_index=index))

    def grown(self, sample: int, completion: Completion, num_cached: int, weight_version: int) -> Trajectory:
        """One of the samples, with what was generated behind the trunk."""
        trunk = replace(self.trunk, sample_index=sample)
        if self.trunk.finish_reason is None:  # the first turn
            trunk = replace(trunk, num_cached_tokens=min(num_cached, len(trunk.prompt_token_ids)))
        return trunk.with_completion(completion, weight_version)


def trajectory_of(table: pa.Table, row: int) -> Trajectory:
    """A row of what `as_table` gives."""

    def numbers(name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.asarray(table[name][row].values.to_numpy(zero_copy_only=False), dtype)

    return Trajectory(
        prompt_index=table["prompt_index"][row].as_py(),
        row=table["row"][row].as_py(),
        sample_index=table["sample_index"][row].as_py(),
        prompt_token_ids=numbers("prompt_token_ids", np.int32),
        token_ids=numbers("token_ids", np.int32),
        logprobs=numbers("logprobs", np.float32),
        env_mask=numbers("env_mask", np.int8),
        weight_versions=numbers("token_versions", np.int64),
        finish_reason=table["finish_reason"][row].as_py(),
        num_cached_tokens=table["num_cached_tokens"][row].as_py(),
        forked_from=table["forked_from"][row].as_py(),
        forked_at=table["forked_at"][row].as_py(),
        sampling=sampling_record(table, row),
    )


def as_table(trajectories: Sequence[Trajectory], seed: int, *, with_sampling: bool = False) -> pa.Table:
    """Finished samples in the columns of a `RolloutBatch`, and in these: `row`, `token_versions` (list of int64, of
    the weights for each token), `forked_from` and `forked_at`; with what all tokens were drawn from, which must have
    been recorded, in those of `SAMPLING_SCHEMA` too.
    """

    def numbers(name: str, dtype: pa.DataType) -> pa.Array:
        return pa.array([getattr(one, name) for one in trajectories], dtype)

    def lists(name: str, dtype: npt.DTypeLike) -> pa.Array:
        rows = [getattr(one, name) for one in trajectories]
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        return pa.ListArray.from_arrays(offsets, np.concatenate([np.zeros(0, dtype), *rows], dtype=dtype))

    reasons = [one.finish_reason for one in trajectories]
    columns: dict[str, Any] = {
        "prompt_index": numbers("prompt_index", pa.int32()),
        "sample_index": numbers("sample_index", pa.int32()),
        "prompt_token_ids": lists("prompt_token_ids", np.int32),
        "token_ids": lists("token_ids", np.int32),
        "logprobs": lists("logprobs", np.float32),
        "finish_reason": pa.array(reasons, pa.string()),
        "truncated": pa.array([reason != "stop" for reason in reasons], pa.bool_()),
        "env_mask": lists("env_mask", np.int8),
        "seed": pa.array([seed % 2**64] * len(trajectories), pa.uint64()),
        "weight_version": pa.array([int(one.weight_versions.max(initial=0)) for one in trajectories], pa.int64()),
        "num_cached_tokens": numbers("num_cached_tokens", pa.int32()),
        "row": numbers("row", pa.int64()),
        "token_versions": lists("weight_versions", np.int64),
        "forked_from": numbers("forked_from", pa.int32()),
        "forked_at": numbers("forked_at", pa.int32()),
    }
    if with_sampling:
        columns |= sampling_columns([one.sampling or SamplingRecord.of_given(0) for one in trajectories])
    return pa.table(columns)
