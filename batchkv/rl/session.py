"""A policy between the updates of its weights: rollouts of it, and KV that stays from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from types import TracebackType
from typing import Any

from torch import nn

from batchkv.conversation_kv import ConversationKV
from batchkv.engine import Engine
from batchkv.errors import UserError
from batchkv.fingerprint import model_fingerprint
from batchkv.job_plan import PlanTotals
from batchkv.metrics import RunMetrics
from batchkv.model_lock import alone_with
from batchkv.rl.asked import ASKED, OF_ENGINES, Asked, check_names
from batchkv.rl.branching import Branching, Forks
from batchkv.rl.environment import Environment, Replies
from batchkv.rl.generation import Draw, check_recorded, grow, with_room
from batchkv.rl.groups import Enough, Groups
from batchkv.rl.policy import adapters_of, engine_of, left_as_it_was
from batchkv.rl.prompts import read_branches
from batchkv.rl.rollout_batch import RolloutBatch
from batchkv.rl.trajectory import Trajectory, as_table


class Session:
    """Rollouts of one policy. A context manager.

    KV of prompts stays in the cache from one call to the next, where it has room; none after calls with an environment
    or branching. It is that of the weights as they are: call `refresh` after every update of them. A forgotten one is
    found by a fingerprint of the weights, which is computed at every call and takes as long as reading them twice.

    Args:
        policy: a live module, possibly wrapped (`batchkv.rl.policy.unwrap`), used in place; or an engine.
        tokenizer: of the policy; not needed where prompts are token ids.
        weight_version: of the weights as they are, that of the batches until `refresh` counts it up.
        config: fields of `EngineConfig`.

    Raises:
        UserError: the policy cannot be run in place.
        TypeError: there is no such parameter.
    """

    def __init__(
        self, policy: nn.Module | Engine, tokenizer: Any = None, *, weight_version: int = 0, **config: Any
    ) -> None:
        check_names(config, OF_ENGINES, "Session")
        if isinstance(policy, Engine) and (config or tokenizer is not None):
            raise UserError("the policy is an engine, which has its tokenizer and config: leave them out")
        self._policy, self._tokenizer, self._config = policy, tokenizer, config
        self.engine = engine_of(policy, tokenizer, config)
        self.weight_version = weight_version
        self._kv: ConversationKV | None = None
        self._fingerprint: str | None = None
        self._is_closed = False

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of all KV; nothing can be sampled any more."""
        with alone_with(self.engine.model):
            self._drop_kv()
            self._is_closed = True

    def _drop_kv(self) -> None:
        if self._kv is not None:
            self._kv.release()
            self._kv = None

    def refresh(self) -> None:
        """The weights have been updated, or the module: KV of the old ones is dropped, and a module is looked at anew.

        Raises:
            UserError: the session is closed.
        """
        with alone_with(self.engine.model):
            self._check_open()
            self._drop_kv()
            self.engine = engine_of(self._policy, self._tokenizer, self._config)
            self._fingerprint = None
            self.weight_version += 1

    def rollout(self, prompts: Sequence[Any], n: int = 16, **options: Any) -> RolloutBatch:
        """Samples of every prompt.

        Args:
            prompts, n, options: as of `batchkv.rollout`, but for the tokenizer and the config, which are the session's.
                `step` is for random numbers alone: the weight version is the session's as well.

        Raises:
            UserError: as there; or the weights have changed since the KV was computed, or the session is closed.
            ValueError, TypeError: as there.
        """
        check_names(options, ASKED, "Session.rollout")
        asked = Asked(n=n, **options)
        with alone_with(self.engine.model):
            return self._rollout(prompts, asked)

    def _rollout(self, prompts: Sequence[Any], asked: Asked) -> RolloutBatch:
        self._check_open()
        self._check_weights()
        self._kv = self._kv or new_kv(self.engine)
        try:
            batch = roll_out(self.engine, prompts, asked, asked.draw(self.weight_version), self._kv)
        except BaseException:
            self._drop_kv()  # what is in the cache is not known
            raise
        if asked.goes_on:
            self._drop_kv()  # whole conversations and trees, which nobody goes on with
        return batch

    def _check_open(self) -> None:
        if self._is_closed:
            raise UserError("the session is closed: open another one")

    def _check_weights(self) -> None:
        found = f"{model_fingerprint(self.engine.model)}/{adapters_of(self.engine.model)}"
        if self._fingerprint not in (None, found):
            raise UserError(
                f"the policy's weights have changed since version {self.weight_version}, and KV of the old ones is "
                "kept: call session.refresh() after every update"
            )
        self._fingerprint = found


def rollout(
    policy: nn.Module | Engine,
    prompts: Sequence[Any],
    n: int = 16,
    *,
    tokenizer: Any = None,
    max_tokens: int = 256,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop_token_ids: Sequence[int] | None = None,
    seed: int = 0,
    step: int = 0,
    rows: Sequence[int] | None = None,
    environment: Environment | None = None,
    max_turns: int = 16,
    branching: Branching | None = None,
    oversample: int = 0,
    enough: Enough | None = None,
    record_sampling: bool = False,
    earlier: RolloutBatch | None = None,
    **config: Any,
) -> RolloutBatch:
    """Samples of every prompt, by a policy that may be in training. It is used in place and left as it was.

    Every prompt is computed once for all its samples, and so is what prompts begin with in common. No KV outlives the
    call (`Session` keeps it).

    Args:
        policy: a live module, possibly wrapped (DDP, `torch.compile`, PEFT); or an engine.
        prompts: each a text, a list of messages, token ids, or a branch of an earlier batch (`RolloutBatch.fork`,
            `RolloutBatch.unfinished`), which has its own row and samples.
        n: samples of each prompt.
        tokenizer: of the policy; not needed where prompts are token ids.
        max_tokens: most tokens that are generated in a turn, and behind what a branch has already.
        temperature, top_p, top_k, min_p: as in jobs; at temperature 0 all samples are the same.
        stop_token_ids: tokens that end a turn, besides the policy's end tokens.
        seed, step, rows: random numbers are a function of (seed, step, row, sample, position), and of what a branch has
            already. `rows` are the prompts' global numbers, by default their places: give them where prompts are
            shuffled, or split among workers. `step` is that of the training, and the weight version in the batch.
        environment: called with every `Turn` that ended with an end or stop token, but for turn `max_turns`; what it
            returns follows the turn, and the model goes on: a text or token ids, as they are, or messages, by the chat
            template. None: the sample is done.
        max_turns: most turns of the model in a sample.
        branching: called with the `Trajectory` of every sample that is done, forks too; returns (token, samples) pairs:
            so many new samples of the prompt go another way from before that token on. The tree ends where it returns
            none.
        oversample: so many samples more of each prompt are begun, and when at least `n` are done the others end,
            `abort`; several may end in one step, so `RolloutBatch.finished(most=n)`. Which ones are cut off depends on
            the order of execution; what they have by then does not. Long samples are: go on with them later
            (`RolloutBatch.unfinished`), or know that the finished ones are shorter than others would be.
        enough: called with the trajectories of a prompt that are done whenever there is one more; true if the others
            can end. By default `n` are enough if there are more.
        record_sampling: whether samples tell what their tokens were drawn from: log-probabilities after all filters,
            entropies, and the tokens that were kept. A `Trajectory` has it in `sampling`, the batch in columns. With
            filters the host then waits for the device in each step.
        earlier: a batch with samples of the same prompts: where they go on as these did, several tokens are computed at
            once. That changes no token, and stops by itself where it does not pay.
        config: fields of `EngineConfig`.

    Returns:
        The samples, in the order of the prompts.

    Raises:
        UserError: the policy cannot be run in place, or a prompt not at all; or sampling is to be recorded where a
            branch goes on from tokens for which it was not.
        ValueError: a parameter is out of range, or of another type.
        TypeError: there is no such parameter.
    """
    check_names(config, ("tokenizer", *ASKED, *OF_ENGINES), "rollout")
    asked = Asked(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop_token_ids=stop_token_ids,
        seed=seed,
        step=step,
        rows=rows,
        environment=environment,
        max_turns=max_turns,
        branching=branching,
        oversample=oversample,
        enough=enough,
        record_sampling=record_sampling,
        earlier=earlier,
    )
    with Session(policy, tokenizer, **config) as session:
        kv = new_kv(session.engine) if asked.goes_on else None
        try:
            return roll_out(session.engine, prompts, asked, asked.draw(step), kv)
        finally:
            if kv is not None:
                kv.release()


def new_kv(engine: Engine) -> ConversationKV:
    """A pool of all of the budget."""
    return ConversationKV(engine.layout, engine.limits(), engine.new_runner)


def roll_out(
    engine: Engine, prompts: Sequence[Any], asked: Asked, draw: Draw, kv: ConversationKV | None
) -> RolloutBatch:
    """Wave by wave, until all samples are done: a turn of those that go on, and the forks of those that are done."""
    metrics, totals, started = RunMetrics(), PlanTotals(), perf_counter()
    with left_as_it_was(engine.model):
        with metrics.timed("tokenize"):
            branches = read_branches(prompts, draw.params.n, asked.rows, engine.tokenizer, engine.prompt_limits)
        if draw.record_sampling:
            check_recorded(branches)
        replies = Replies(asked.environment, engine, asked.max_turns) if asked.environment else None
        forks, groups = Forks(asked.branching, branches), Groups(asked.enough_of_a_group)
        done: list[Trajectory] = []
        while branches:
            branches, full = with_room(branches, engine.prompt_limits.context_length)
            done += full
            if not branches:
                break
            grown, plan = grow(engine, branches, draw, metrics, kv, None if replies else groups)
            totals = totals.plus(plan)
            ended = [sample for samples in grown for sample in samples]
            branches, finished = [], ended
            if replies:
                branches, finished = groups.closed(*replies.behind(ended, draw.weight_version))
            branches += forks.of([one for one in finished if not groups.is_closed(one.prompt_index)])
            done += finished
    metrics.elapsed_s = perf_counter() - started
    done.sort(key=lambda one: (one.prompt_index, one.sample_index))
    return RolloutBatch(
        as_table(done, draw.params.seed, with_sampling=draw.record_sampling),
        _pad_token_id(engine),
        draw.params.temperature or 1.0,
        _summary(len(prompts), len(done), totals, metrics),
    )


def _summary(num_prompts: int, num_samples: int, totals: PlanTotals, metrics: RunMetrics) -> dict[str, Any]:
    """What it cost, named as in the summary of a job."""
    return {
        "prompts": num_prompts,
        "samples": num_samples,
        "waves": totals.waves,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.prompt_tokens - metrics.prefill_tokens + metrics.recomputed_tokens,
        **metrics.counts(),
    }


def _pad_token_id(engine: Engine) -> int:
    """The tokenizer's, else the config's, else an end token, else 0: masks never come from it."""
    found = (getattr(engine.tokenizer, "pad_token_id", None), getattr(engine.model.config, "pad_token_id", None))
    return next((int(one) for one in (*found, *engine.end_token_ids) if isinstance(one, int) and one >= 0), 0)
