"""Rollouts of several turns: what follows a turn of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from batchkv.errors import RowError, UserError
from batchkv.io.prompts import Message
from batchkv.rl.trajectory import Branch, Trajectory
from batchkv.token_arena import TokenIds
from batchkv.tokenization import continuation_ids
from batchkv.turns import Turn as NextTurn
from batchkv.turns import TurnTokenizer, end_token_of


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn of the model that has ended.

    Attributes:
        number: 0 for the first one of a sample.
        token_ids: int32, what the model generated in it, the end token included.
        text: the same as text without special tokens; None without a tokenizer.
        trajectory: the sample with all turns so far.
    """

    number: int
    token_ids: TokenIds
    text: str | None
    trajectory: Trajectory

    @property
    def prompt_index(self) -> int:
        return self.trajectory.prompt_index

    @property
    def sample_index(self) -> int:
        return self.trajectory.sample_index


# What the environment says: a text or token ids that follow the turn as they are, messages that go through the chat
# template behind a reply, or None: the sample is done.
Reply: TypeAlias = "str | Sequence[int] | list[Message] | None"
Environment: TypeAlias = Callable[[Turn], Reply]


class Replies:
    """Makes the environment's replies tokens, each once, and puts them behind the samples.

    Args:
        environment: called for every turn that ended with `stop`.
        tokenizer: of the policy, with its chat template.
        end_token_ids: of the policy.
        context_length: most tokens of a sample; None if there is no limit.
    """

    def __init__(
        self,
        environment: Environment,
        tokenizer: Any,
        end_token_ids: Sequence[int],
        context_length: int | None,
    ) -> None:
        self._environment, self._tokenizer = environment, tokenizer
        self._end_token_ids, self._context_length = end_token_ids, context_length
        self._turns = TurnTokenizer(tokenizer) if tokenizer is not None else None

    def behind(
        self,
        number: int,
        ended: Sequence[Trajectory],
        lengths: Sequence[int],
        texts: Sequence[str | None],
        version: int,
    ) -> tuple[list[Branch], list[Trajectory]]:
        """The samples that go on, with the reply behind them, and those that are done.

        Args:
            number: of the turn that ended.
            ended: the samples.
            lengths: tokens that the turn gave each.
            texts: of these tokens.
            version: of the weights.

        Raises:
            UserError: a reply is none; names the sample.
        """
        going, done = list[Branch](), list[Trajectory]()
        for trajectory, length, text in zip(ended, lengths, texts, strict=True):
            reply = None
            if trajectory.finish_reason == "stop":
                turn = Turn(number, trajectory.token_ids[len(trajectory) - length :], text, trajectory)
                reply = self._environment(turn)
            if reply is None:
                done.append(trajectory)
                continue
            longer = trajectory.with_reply(self._token_ids(reply, trajectory), version)
            if self._context_length is not None and len(longer.all_token_ids) >= self._context_length:
                done.append(replace(trajectory, finish_reason="length"))
            else:
                going.append(Branch(longer, (trajectory.sample_index,)))
        return going, done

    def _token_ids(self, reply: Any, trajectory: Trajectory) -> TokenIds:
        where = f"the environment's reply to sample {trajectory.sample_index} of prompt {trajectory.prompt_index}"
        if isinstance(reply, str):
            return continuation_ids([reply], self._tokenizer)[0]
        if len(reply) and isinstance(reply[0], dict):
            if self._turns is None:
                raise UserError(f"{where} is messages, but there is no tokenizer: give token ids, or a tokenizer")
            found = self._turns.token_ids([NextTurn(reply, end_token_of(trajectory.token_ids, self._end_token_ids))])[0]
            if isinstance(found, RowError):
                raise UserError(f"{where}: {found.message}")
            return found
        return np.asarray(reply, np.int32)
