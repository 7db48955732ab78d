"""Requests that are planned and executed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchkv.intervals import count_up
from batchkv.sampling_params import RowParams, SamplingParams
from batchkv.scoring import Scored
from batchkv.token_arena import TokenArena

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Wave:
    """R requests with O outputs between them; a job has one wave or more.

    Most rows of a job are one request. A row of which several continuations are scored is several.

    Attributes:
        arena: their prompts, none of them empty.
        params: how each is sampled.
        keys: uint64 [R], from `random_numbers.row_key`.
        scored: which of them are given continuations.
        group: int64 [R], requests of different groups share nothing.
        row: int64 [R], the row of the job that each belongs to.
        choice: int64 [R], which of the row's choices is scored; -1 for other requests.
        output_request: int64 [O], whose output each is; never decreases.
        output_sample: int64 [O], which of the request's samples; those that are there already are not asked for again.
    """

    arena: TokenArena
    params: RowParams
    keys: npt.NDArray[np.uint64]
    scored: Scored
    group: Int64Array
    row: Int64Array
    choice: Int64Array
    output_request: Int64Array
    output_sample: Int64Array

    @classmethod
    def of(cls, arena: TokenArena, params: RowParams | Sequence[SamplingParams], scored: Scored | None = None) -> Wave:
        """Every sample of every prompt, each its own row, with keys that are their numbers."""
        params = params if isinstance(params, RowParams) else RowParams.of(params)
        number = np.arange(arena.num_rows)
        counts = params.column(lambda p: p.n, np.int64)
        return cls(
            arena=arena,
            params=params,
            keys=number.astype(np.uint64),
            scored=scored or Scored.none(arena.num_rows),
            group=np.zeros_like(number),
            row=number,
            choice=np.full_like(number, -1),
            output_request=np.repeat(number, counts),
            output_sample=count_up(counts),
        )

    @property
    def num_requests(self) -> int:
        return len(self.row)

    @property
    def num_outputs(self) -> int:
        return len(self.output_request)

    def with_outputs(self, outputs: Int64Array) -> Wave:
        """Only `outputs`, which ascend, and the requests that have one."""
        left = replace(self, output_request=self.output_request[outputs], output_sample=self.output_sample[outputs])
        requests = np.unique(left.output_request)
        return left if len(requests) == self.num_requests else left.take(requests)

    def take(self, requests: Int64Array) -> Wave:
        """Only `requests`, which ascend."""
        new_number = np.full(self.num_requests, -1, np.int64)
        new_number[requests] = np.arange(len(requests))
        kept = new_number[self.output_request] >= 0
        return replace(
            self,
            arena=self.arena.take(requests),
            params=self.params.take(requests),
            keys=self.keys[requests],
            scored=self.scored.take(requests),
            group=self.group[requests],
            row=self.row[requests],
            choice=self.choice[requests],
            output_request=new_number[self.output_request[kept]],
            output_sample=self.output_sample[kept],
        )
