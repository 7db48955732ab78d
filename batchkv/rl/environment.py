"""Rollouts of several turns: what follows a turn of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from batchkv.engine import Engine
from batchkv.errors import RowError, UserError
from batchkv.io.prompts import Message
from batchkv.rl.trajectory import Branch, Trajectory
from batchkv.token_arena import TokenIds
from batchkv.turns import Turn as NextTurn
from batchkv.turns import TurnTokenizer, end_token_of


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn of the model that has ended.

    Attributes:
        trajectory: the sample with all turns so far; this one is its `last_turn`.
        text: of this turn, without special tokens; None without a tokenizer.
    """

    trajectory: Trajectory
    text: str | None

    @property
    def number(self) -> int:
        """0 for the first one of a sample."""
        return self.trajectory.turns - 1

    @property
    def token_ids(self) -> TokenIds:
        """int32, what the model generated in it, the end token included."""
        return self.trajectory.last_turn


# What the environment says: a text or token ids that follow the turn as they are, messages that go through the chat
# template behind a reply, or None: the sample is done.
Reply: TypeAlias = "str | Sequence[int] | list[Message] | None"
Environment: TypeAlias = Callable[[Turn], Reply]


class Replies:
    """Asks the environment, and makes its replies tokens, each once.

    Args:
        environment: called for every turn that ended with `stop`, but for the last one that there may be.
        engine: of the policy: its tokenizer, chat template and limits.
        max_turns: of a sample; after the last one the environment is not asked.
    """

    def __init__(self, environment: Environment, engine: Engine, max_turns: int) -> None:
        self._environment, self._engine, self._max_turns = environment, engine, max_turns
        self._limits = engine.prompt_limits
        self._turns = TurnTokenizer(engine.tokenizer) if engine.tokenizer is not None else None

    def behind(self, ended: Sequence[Trajectory], version: int) -> tuple[list[Branch], list[Trajectory]]:
        """The samples that go on, with the reply behind them, and those that are done: there is no reply, or the
        context ends with it; then what has room of it is there.

        Args:
            ended: the samples, after a turn.
            version: of the weights.

        Raises:
            UserError: a reply is none; names the sample.
        """
        going, done = list[Branch](), list[Trajectory]()
        texts = self._engine.detokenize([trajectory.last_turn for trajectory in ended])
        for trajectory, text in zip(ended, texts, strict=True):
            reply = self._asked(trajectory, text)
            longer = trajectory.with_reply(self._token_ids(reply, trajectory), version) if reply is not None else None
            if longer is None:
                done.append(trajectory)
            elif (room := self._room(trajectory)) is not None and len(longer) >= room:
                done.append(replace(longer.first(room), finish_reason="length"))
            else:
                going.append(Branch(longer, (trajectory.sample_index,)))
        return going, done

    def _asked(self, trajectory: Trajectory, text: str | None) -> Reply:
        if trajectory.finish_reason != "stop" or trajectory.turns >= self._max_turns:
            return None
        return self._environment(Turn(trajectory, text))

    def _room(self, trajectory: Trajectory) -> int | None:
        """How many tokens can be behind its prompt; None if any number."""
        longest = self._limits.context_length
        return None if longest is None else longest - len(trajectory.prompt_token_ids)

    def _token_ids(self, reply: Any, trajectory: Trajectory) -> TokenIds:
        where = f"the environment's reply to sample {trajectory.sample_index} of prompt {trajectory.prompt_index}"
        reply = reply.tolist() if hasattr(reply, "tolist") else reply  # arrays and tensors
        if not isinstance(reply, (str, list, tuple)):
            raise UserError(f"{where} is {type(reply).__name__}, must be text, messages, token ids or None")
        if not len(reply):
            raise UserError(f"{where} is empty: return None where the sample is done")
        if isinstance(reply, str) or isinstance(reply[0], dict):
            return self._tokenized(reply, trajectory, where)
        try:
            ids = np.asarray(reply)
        except ValueError:  # lists of different lengths
            ids = np.array("no ids")
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not (ids.min() >= 0 and ids.max() < self._limits.vocab_size):
            raise UserError(f"{where} must be token ids from 0 to {self._limits.vocab_size - 1}")
        return ids.astype(np.int32)

    def _tokenized(self, reply: Any, trajectory: Trajectory, where: str) -> TokenIds:
        if self._turns is None:
            raise UserError(f"{where} is no token ids, but there is no tokenizer: pass tokenizer=")
        end = None if isinstance(reply, str) else end_token_of(trajectory.token_ids, self._engine.end_token_ids)
        [found] = self._turns.token_ids([NextTurn(reply, end)])
        if isinstance(found, RowError):
            raise UserError(f"{where}: {found.message}")
        return found
