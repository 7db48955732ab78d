"""From branches to the samples that grow from them: one wave of the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchkv.conversation_kv import ConversationKV
from batchkv.drafts import Drafts, References
from batchkv.engine import Engine
from batchkv.errors import RowError, UserError
from batchkv.executor import DEFAULTS, OnEnded, RunOptions
from batchkv.job_plan import Plan
from batchkv.metrics import RunMetrics
from batchkv.preparation import PreparedWave, prepare_wave
from batchkv.random_numbers import row_key
from batchkv.rl.groups import Groups
from batchkv.rl.trajectory import Branch, Trajectory
from batchkv.sampling_params import RowParams, SamplingParams
from batchkv.scoring import Scored
from batchkv.token_arena import TokenArena, TokenIds
from batchkv.wave import Int64Array, Wave
from batchkv.waves import NOTHING
from batchkv.writer import Completion


@dataclass(frozen=True, slots=True, eq=False)
class Earlier:
    """Completions of an earlier rollout, found by their prompts.

    Attributes:
        references: a list of completions for each distinct prompt.
        numbers: which list, by the bytes of a prompt's int32 token ids.
    """

    references: References
    numbers: Mapping[bytes, int]

    @classmethod
    def of(cls, completions: Mapping[bytes, Sequence[TokenIds]]) -> Earlier:
        lists = tuple(tuple(some) for some in completions.values())
        return cls(References(lists), {prompt: number for number, prompt in enumerate(completions)})

    def number(self, prompt: TokenIds) -> int:
        """-1 if the prompt was not among those."""
        return self.numbers.get(prompt.tobytes(), -1)


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
        earlier: completions of the same prompts, for drafts; None for no drafts.
    """

    params: SamplingParams
    step: int
    weight_version: int
    may_go_on: bool = False
    record_sampling: bool = False
    earlier: Earlier | None = None

    def goes_on(self, rows: Int64Array, samples: Int64Array) -> npt.NDArray[np.bool_]:
        """Of outputs, whether they may be continued."""
        return np.full(len(rows), self.may_go_on)


def grow(
    engine: Engine,
    branches: Sequence[Branch],
    draw: Draw,
    metrics: RunMetrics,
    kv: ConversationKV | None = None,
    groups: Groups | None = None,
) -> tuple[list[list[Trajectory]], Plan]:
    """Generates the samples of every branch, prefixes that they share computed once.

    Args:
        engine: of the policy.
        branches: where samples begin, at least one, none of them without tokens or samples.
        draw: how they are drawn.
        metrics: counts and times are added here.
        kv: what earlier waves have left in the cache, and where the KV of this one stays; None if nothing does.
        groups: told of samples as they end; those of prompts that have enough are cut off.

    Returns:
        The samples of each branch, and what was planned. Samples of a trunk that has become too long are as long as it
        and end there, `length`; those that were cut off end `abort`.

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
    ended = _Ended(branches, prepared, draw, groups or Groups(None))
    options = RunOptions(draw.record_sampling, unwanted=ended.unwanted, drafts=_drafts(branches, prepared, draw))
    if kv is not None and expected is not None:
        kept = engine.execute(prepared, kv.runner, kv.cache, ended.note, metrics, options=options)
        kv.keep(prepared, kept, draw.goes_on)
        kv.expect(expected, ended.token_ids)
    else:
        execute_alone(engine, prepared, ended.note, metrics, options)
    return ended.trajectories(), prepared.plan


def _drafts(branches: Sequence[Branch], prepared: PreparedWave, draw: Draw) -> Drafts | None:
    """What was sampled after the same prompts before."""
    if draw.earlier is None:
        return None
    prompts = [branches[number].trunk.prompt_token_ids for number in prepared.wave.row.tolist()]
    lists = np.array([draw.earlier.number(prompt) for prompt in prompts], np.int64)
    return Drafts(draw.earlier.references, lists[prepared.plan.sequences.row])


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
    """Names the random numbers of a branch: those of later turns and of forks are others for each way there."""
    trunk = branch.trunk
    if not len(trunk) and trunk.forked_from < 0:
        return f"{step}/{trunk.row}"
    way = hashlib.blake2b(trunk.token_ids.tobytes(), digest_size=16).hexdigest()
    return f"{step}/{trunk.row}/{trunk.forked_from}/{way}"


def execute_alone(
    engine: Engine,
    prepared: PreparedWave,
    on_ended: OnEnded,
    metrics: RunMetrics,
    options: RunOptions = DEFAULTS,
) -> None:
    """Computes a wave in a pool that is made for it; arguments as of `Engine.execute`."""
    memory = prepared.plan.memory
    runner = engine.new_runner(memory.pool_pages, memory.page_size)
    try:
        engine.execute(prepared, runner, None, on_ended, metrics, options=options)
    finally:
        runner.release()


def _name(branch: Branch) -> str:
    return f"prompt {branch.trunk.prompt_index}"


class _Ended:
    """The sequences of a wave as they end.

    Attributes:
        unwanted: bool [sequences], those of prompts that have enough samples.
    """

    def __init__(self, branches: Sequence[Branch], prepared: PreparedWave, draw: Draw, groups: Groups) -> None:
        wave, self._of_output = prepared.wave, prepared.plan.sequences.output_sequence
        self._branches, self._prepared, self._groups = branches, prepared, groups
        self._version, self._may_go_on = draw.weight_version, draw.may_go_on
        self.unwanted = np.zeros(len(prepared.plan.sequences), np.bool_)
        self._completions: dict[int, Completion] = {}  # by sequence
        self._branch, self._sample = wave.row[wave.output_request], wave.output_sample  # of each output
        self._prompt = np.array([branch.trunk.prompt_index for branch in branches])[self._branch]
        places = zip(self._branch.tolist(), self._sample.tolist(), strict=True)
        self._output = {place: output for output, place in enumerate(places)}
        by_sequence = np.argsort(self._of_output, kind="stable")
        ends = np.cumsum(np.bincount(self._of_output, minlength=len(self.unwanted)))
        self._outputs = np.split(by_sequence, ends[:-1])  # of each sequence

    def note(self, ended: Sequence[tuple[int, Completion | RowError]]) -> None:
        """Raises UserError if the policy's logits were no distribution."""
        for sequence, completion in ended:
            if isinstance(completion, RowError):
                request = int(self._prepared.plan.sequences.row[sequence])
                raise UserError(f"{_name(self._branches[request])}: {completion.message}")
            self._completions[sequence] = completion
            if self._groups.can_end and not self._is_cut(sequence):
                self._tell_groups(sequence)

    def _tell_groups(self, sequence: int) -> None:
        for output in self._outputs[sequence].tolist():
            if self._groups.add(self._grown(output)):
                self.unwanted[self._of_output[self._prompt == self._prompt[output]]] = True

    def _is_cut(self, sequence: int) -> bool:
        """Whether it ended because it was unwanted."""
        completion = self._completions[sequence]
        most = int(self._prepared.plan.sequences.max_new_tokens[sequence])
        is_shorter = len(completion.token_ids) < most
        return bool(self.unwanted[sequence]) and completion.finish_reason == "length" and is_shorter

    def token_ids(self, branch: int, sample: int) -> TokenIds | None:
        """What was generated, where it may be continued."""
        if not self._may_go_on:
            return None
        return self._completions[int(self._of_output[self._output[branch, sample]])].token_ids

    def trajectories(self) -> list[list[Trajectory]]:
        """All samples of each branch."""
        return [
            [self._trajectory(branch, sample, self._output.get((number, sample))) for sample in branch.samples]
            for number, branch in enumerate(self._branches)
        ]

    def _trajectory(self, branch: Branch, sample: int, output: int | None) -> Trajectory:
        if output is None:
            return replace(branch.trunk, sample_index=sample, finish_reason="length")
        is_cut = self._is_cut(int(self._of_output[output]))
        return replace(self._grown(output), finish_reason="abort") if is_cut else self._grown(output)

    def _grown(self, output: int) -> Trajectory:
        branch, completion = self._branches[int(self._branch[output])], self._completions[int(self._of_output[output])]
        return branch.grown(int(self._sample[output]), completion, int(self._prepared.cached[output]), self._version)
