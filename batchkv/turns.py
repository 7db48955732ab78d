"""What follows a reply: the tokens by which a row continues the conversation of its parent.

The tokens of the conversation so far, prompt and reply, stay as they are: made from text again they could be others,
and their KV is there already. Only the turn itself becomes tokens, as it stands behind a reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from batchkv.chat_template import NOT_UNICODE, is_unicode, render_conversations
from batchkv.errors import RowError
from batchkv.io.prompts import Message, Prompt
from batchkv.templates import prompt_texts
from batchkv.token_arena import TokenIds
from batchkv.tokenization import BATCH_TEXTS, Tokenizer, token_ids_of

MAX_CACHED = 4096  # turns, and their texts
_MAX_CACHED_CHARACTERS = 1 << 14  # of a turn; longer ones hardly ever come twice

# What stands for the conversation so far.
_QUESTION: Message = {"role": "user", "content": "q"}
_REPLY = "reply7c0e2"
_WORD = re.compile(r"\w+")

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
# A text to be appended, and the token that it follows if that is known: some tokens swallow spaces behind them.
_Appended: TypeAlias = "tuple[str, int | None]"


class DecodingTokenizer(Tokenizer, Protocol):
    """A tokenizer that also decodes."""

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What a row adds to the conversation of its parent.

    Attributes:
        prompt: the row's own text, messages, or int32 token ids.
        end_token: the token that ended the parent's sample, the last one of it (`end_token_of`); none if it ended
            by its length or with a stop string.
    """

    prompt: Prompt
    end_token: int | None


def end_token_of(token_ids: TokenIds, end_token_ids: Collection[int]) -> int | None:
    """The token that ended a sample: its last one, if that is an end token of the model or a stop token of the row."""
    last = int(token_ids[-1]) if len(token_ids) else None
    return last if last in end_token_ids else None


class TurnTokenizer:
    """Makes turns into tokens. Keeps those it has made last: a million rows may ask the same of their parents.

    Args:
        tokenizer: that of the model, with its chat template.
        max_cached: how many different turns it keeps.
    """

    def __init__(self, tokenizer: DecodingTokenizer, *, max_cached: int = MAX_CACHED) -> None:
        self._tokenizer = tokenizer
        self._suffixes = _Cache(self._render, max_cached)
        self._ids = _Cache(self._tokenize, max_cached)

    def token_ids(self, turns: Sequence[Turn]) -> list[TokenIds | RowError]:
        """The tokens to be appended to the parent's, of each turn.

        A text is tokenized without special tokens, token ids are taken as they are, and messages become what the
        chat template puts behind a reply: what ends the reply, unless its end token did so already, the messages,
        and what begins the next reply. A template that allows no such conversation, or that writes what came before
        in another way, is an error of the row.
        """
        keys = [_key(turn.prompt) if isinstance(turn.prompt, list) else None for turn in turns]
        suffixes = self._suffixes.values(key for key in keys if key is not None)
        appended = [
            self._appended(turn, None if key is None else suffixes[key]) for turn, key in zip(turns, keys, strict=True)
        ]
        ids = self._ids.values(each for each in appended if isinstance(each, tuple))
        return [ids[each] if isinstance(each, tuple) else each for each in appended]

    def _appended(self, turn: Turn, suffix: str | RowError | None) -> _Appended | TokenIds | RowError:
        if isinstance(turn.prompt, str):
            return (turn.prompt, None) if is_unicode(turn.prompt) else NOT_UNICODE
        if isinstance(turn.prompt, np.ndarray):
            return turn.prompt
        if not isinstance(suffix, str):
            return suffix or _REWRITTEN
        if turn.end_token is not None:
            end = self._text_of(turn.end_token)
            # A template may put a space before the end of a reply, which the model has left out.
            for closing in (suffix, suffix.lstrip()):
                if end and closing.startswith(end):
                    return closing.removeprefix(end), turn.end_token
        return suffix, None

    def _render(self, keys: Sequence[str]) -> list[str | RowError]:
        """What the chat template puts behind a reply, for turns in JSON."""
        replies = [_reply_for(key) for key in keys]
        turns: list[list[Message]] = [json.loads(key) for key in keys]
        conversations: dict[int, list[Message]] = {
            i: [_QUESTION, {"role": "assistant", "content": reply}, *turn]
            for i, (reply, turn) in enumerate(zip(replies, turns, strict=True))
        }
        texts, errors = render_conversations(conversations, self._tokenizer)
        return [
            RowError(errors[i].code, f"the turn cannot follow a reply: {errors[i].message}")
            if i in errors
            else _suffix(texts[i], replies[i], turns[i])
            for i in conversations
        ]

    def _tokenize(self, appended: Sequence[_Appended]) -> list[TokenIds]:
        """The tokens of each text; behind an end token, those that follow it when both are tokenized together."""
        ends = ["" if end is None else self._text_of(end) for _, end in appended]
        ids = self._encode([end + text for end, (text, _) in zip(ends, appended, strict=True)])
        for i, (_, end) in enumerate(appended):
            if end is not None and ids[i][:1] == [end]:
                del ids[i][0]
                ends[i] = ""
        merged = [i for i, end in enumerate(ends) if end]  # the end is no token there
        for i, alone in zip(merged, self._encode([appended[i][0] for i in merged]), strict=True):
            ids[i] = alone
        return [np.array(each, np.int32) for each in ids]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        starts = range(0, len(texts), BATCH_TEXTS)
        return [ids for lo in starts for ids in token_ids_of(texts[lo : lo + BATCH_TEXTS], self._tokenizer, False)]

    def _text_of(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))


class _Cache(Generic[_Key, _Value]):
    """Values that are computed for many keys at once; those used last are kept."""

    def __init__(self, compute: Callable[[Sequence[_Key]], list[_Value]], max_size: int) -> None:
        self._compute = compute
        self._max_size = max_size
        self._kept: dict[_Key, _Value] = {}

    def values(self, keys: Iterable[_Key]) -> dict[_Key, _Value]:
        """The values of all `keys`; more than are kept, if there are."""
        wanted = list(dict.fromkeys(keys))
        found = {key: self._kept.pop(key) for key in wanted if key in self._kept}
        missing = [key for key in wanted if key not in found]
        if missing:
            found |= zip(missing, self._compute(missing), strict=True)
        self._kept |= {key: found[key] for key in wanted if _length(key) <= _MAX_CACHED_CHARACTERS}
        for key in list(islice(self._kept, max(0, len(self._kept) - self._max_size))):
            del self._kept[key]
        return found


def _length(key: Any) -> int:
    """Characters of a turn in JSON, or of a text to be appended."""
    return len(key if isinstance(key, str) else key[0])


def _key(messages: list[Message]) -> str:
    # What JSON does not have can only come from odd columns of Arrow (times); templates see its text.
    return json.dumps(messages, default=str)


def _reply_for(key: str) -> str:
    """A reply whose text is nowhere in the turn."""
    reply = _REPLY
    while reply in key:
        reply += "x"
    return reply


def _suffix(text: str, reply: str, turn: list[Message]) -> str | RowError:
    """What a rendered conversation has behind the reply."""
    if text.count(reply) != 1:
        return _REWRITTEN
    suffix = text.partition(reply)[2]
    # Templates can move messages before the reply (those of the system) or leave them out. They can also change
    # how a text is written, so it is only its longest word that has to be there; and shorten replies.
    for message in turn:
        words = _WORD.findall(" ".join(prompt_texts([message])))
        if message["role"] != "assistant" and words and max(words, key=len) not in suffix:
            return _MOVED
    return suffix


_REWRITTEN = RowError(
    "bad_messages",
    "the chat template does not keep replies as they were generated, so nothing can follow one: "
    "give the turn as prompt or prompt_token_ids",
)
_MOVED = RowError(
    "bad_messages",
    "the chat template puts a message of the turn before the reply that it follows, or leaves it out",
)
