"""From branches to the samples that grow from them: one wave of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchkv.conversation_kv import ConversationKV
from batchkv.engine import Engine
from batchkv.errors import RowError, UserError
from batchkv.executor import OnEnded
from batchkv.job_plan import Plan
from batchkv.metrics import RunMetrics
from batchkv.preparation import PreparedWave, prepare_wave
from batchkv.random_numbers import row_key
from batchkv.rl.trajectory import Branch, Trajectory
from batchkv.sampling_params import RowParams, SamplingParams
from batchkv.scoring import Scored
from batchkv.token_arena import TokenArena, TokenIds
from batchkv.wave import Int64Array, Wave
from batchkv.waves import NOTHING
from batchkv.writer import Completion


@dataclass(frozen=True, slots=True)
class Draw:
    """How samples of a rollout are drawn.

    Attributes:
        params: of all samples; `max_tokens` is of what is generated in one turn.
        step: of the training. Random numbers are a function of (seed, step, row, sample, position).
        weight_version: of the policy.
        may_go_on: whether samples may be continued when they have ended, so that their KV is worth keeping; otherwise
            that of prompts is.
        record_sampling: whether samples tell what their tokens were drawn from (`Trajectory.sampling`).
    """

    params: SamplingParams
    step: int
    weight_version: int
    may_go_on: bool = False
    record_sampling: bool = False

    def goes_on(self, rows: Int64Array, samples: Int64Array) -> npt.NDArray[np.bool_]:
        """Of outputs, whether they may be continued."""
        return np.full(len(rows), self.may_go_on)


def grow(
    engine: Engine, branches: Sequence[Branch], draw: Draw, metrics: RunMetrics, kv: ConversationKV | None = None
) -> tuple[list[list[Trajectory]], Plan]:
    """Generates the samples of every branch, prefixes that they share computed once.

    Args:
        engine: of the policy.
        branches: where samples begin, at least one, none of them without tokens or samples.
        draw: how they are drawn.
        metrics: counts and times are added here.
        kv: what earlier waves have left in the cache, and where the KV of this one stays; None if nothing does.

    Returns:
        The samples of each branch, and what was planned. Samples of a trunk that has become too long are as long as it
        and end there, `length`.

    Raises:
        UserError: a prompt is longer than the model's context or the KV budget, or the policy gives no probabilities.
    """
    wave = _wave_of(branches, draw)
    with metrics.timed("plan"):
        prepared, expected = (
            kv.prepare(wave, NOTHING, draw.goes_on, is_last=False)
            if kv is not None
            else (prepare_wave(wave, NOTHING, engine.layout, engine.limits()), None)
        )
    for number, error in prepared.errors.items():
        if not len(branches[number].trunk):
            raise UserError(f"{_name(branches[number])}: {error.message}")
    ended = _Ended(branches, prepared)
    if kv is not None and expected is not None:
        kept = engine.execute(prepared, kv.runner, kv.cache, ended.note, metrics, record_sampling=draw.record_sampling)
        kv.keep(prepared, kept, draw.goes_on)
        kv.expect(expected, ended.token_ids)
    else:
        execute_alone(engine, prepared, ended.note, metrics, record_sampling=draw.record_sampling)
    return ended.trajectories(draw.weight_version), prepared.plan


def check_recorded(branches: Sequence[Branch]) -> None:
    """Raises UserError if what a branch goes on from was not recorded: the record of its samples would have gaps."""
    for branch in branches:
        if len(branch.trunk) and branch.trunk.sampling is None:
            raise UserError(
                f"{_name(branch)} goes on from tokens that were drawn without record_sampling: use it from the first "
                "rollout of a sample on, or not at all"
            )


def with_room(branches: Sequence[Branch], context_length: int | None) -> tuple[list[Branch], list[Trajectory]]:
    """The branches that can grow, and the samples of those that fill the context: these end with it, `length`."""
    is_full = [
        context_length is not None and len(branch.trunk) > 0 and len(branch.trunk.all_token_ids) >= context_length
        for branch in branches
    ]
    going = [branch for branch, full in zip(branches, is_full, strict=True) if not full]
    ended = [
        replace(branch.trunk, sample_index=sample, finish_reason="length")
        for branch, full in zip(branches, is_full, strict=True)
        if full
        for sample in branch.samples
    ]
    return going, ended


def _wave_of(branches: Sequence[Branch], draw: Draw) -> Wave:
    """A request for each branch, an output for each of its samples."""
    seed, number = draw.params.seed, np.arange(len(branches))
    counts = [len(branch.samples) for branch in branches]
    return Wave(
        arena=TokenArena.from_rows([branch.trunk.all_token_ids for branch in branches]),
        params=RowParams.of(replace(draw.params, n=count, seed=0) for count in counts),
        keys=np.array([row_key(seed, _stream(branch, draw.step)) for branch in branches], np.uint64),
        scored=Scored.none(len(branches)),
        group=np.zeros_like(number),
        row=number,
        choice=np.full_like(number, -1),
        output_request=np.repeat(number, counts),
        output_sample=np.concatenate([np.array(branch.samples, np.int64) for branch in branches]),
    )


def _stream(branch: Branch, step: int) -> str:
    """Names the random numbers of a branch. Those of later turns and of forks are others than those of the first."""
    trunk = branch.trunk
    is_first = not len(trunk) and trunk.forked_from < 0
    return f"{step}/{trunk.row}" if is_first else f"{step}/{trunk.row}/{trunk.forked_from}/{len(trunk)}"


def execute_alone(
    engine: Engine,
    prepared: PreparedWave,
    on_ended: OnEnded,
    metrics: RunMetrics,
    *,
    record_sampling: bool = False,
    score_temperature: float = 1.0,
) -> None:
    """Computes a wave in a pool that is made for it; arguments as of `Engine.execute`."""
    memory = prepared.plan.memory
    runner = engine.new_runner(memory.pool_pages, memory.page_size)
    try:
        engine.execute(
            prepared,
            runner,
            None,
            on_ended,
            metrics,
            record_sampling=record_sampling,
            score_temperature=score_temperature,
        )
    finally:
        runner.release()


def _name(branch: Branch) -> str:
    return f"prompt {branch.trunk.prompt_index}"


class _Ended:
    """The sequences of a wave as they end."""

    def __init__(self, branches: Sequence[Branch], prepared: PreparedWave) -> None:
        wave = prepared.wave
        self._branches, self._prepared = branches, prepared
        self._completions: dict[int, Completion] = {}  # by sequence
        places = zip(wave.row[wave.output_request].tolist(), wave.output_sample.tolist(), strict=True)
        self._output = {place: output for output, place in enumerate(places)}  # by branch and sample

    def note(self, ended: Sequence[tuple[int, Completion | RowError]]) -> None:
        """Raises UserError if the policy's logits were no distribution."""
        for sequence, completion in ended:
            if isinstance(completion, RowError):
                request = int(self._prepared.plan.sequences.row[sequence])
                raise UserError(f"{_name(self._branches[request])}: {completion.message}")
            self._completions[sequence] = completion

    def token_ids(self, branch: int, sample: int) -> TokenIds:
        """What was generated."""
        return self._completion(self._output[branch, sample]).token_ids

    def trajectories(self, weight_version: int) -> list[list[Trajectory]]:
        """All samples of each branch."""
        return [
            [
                self._trajectory(branch, sample, self._output.get((number, sample)), weight_version)
                for sample in branch.samples
            ]
            for number, branch in enumerate(self._branches)
        ]

    def _trajectory(self, branch: Branch, sample: int, output: int | None, weight_version: int) -> Trajectory:
        if output is None:
            return replace(branch.trunk, sample_index=sample, finish_reason="length")
        return branch.grown(sample, self._completion(output), int(self._prepared.cached[output]), weight_version)

    def _completion(self, output: int) -> Completion:
        return self._completions[int(self._prepared.plan.sequences.output_sequence[output])]
