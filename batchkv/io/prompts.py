"""What each row asks: the columns `prompt`, `messages` and `prompt_token_ids`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchkv.errors import RowError, RowErrorCode
from batchkv.io.columns import PROMPT_COLUMNS, Column, decoded, is_given, is_list, is_string, kind_of, shown, shown_type
from batchkv.io.token_lists import as_int32, holds_integers, list_lengths
from batchkv.token_arena import TokenArena

Message: TypeAlias = dict[str, Any]
Bools: TypeAlias = npt.NDArray[np.bool_]
# Text, a conversation, or int32 token ids.
Prompt: TypeAlias = "str | list[Message] | npt.NDArray[np.int32]"

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TOKEN_ID = 2**31 - 1


class _BadPromptError(ValueError):
    def __init__(self, code: RowErrorCode, message: str) -> None:
        super().__init__(message)
        self.error = RowError(code, message)


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """What each row asks, by kind: a row has its prompt in one of them, a row with an error in none.

    Attributes:
        texts: large_string [rows], null where there is none.
        conversations: by row number.
        token_ids: of each row, none where there are none.
    """

    texts: pa.ChunkedArray
    conversations: Mapping[int, list[Message]]
    token_ids: TokenArena

    @classmethod
    def of_token_ids(cls, token_ids: TokenArena) -> Prompts:
        """Of rows that are all token ids."""
        return cls(_no_texts(token_ids.num_rows), {}, token_ids)

    def __len__(self) -> int:
        return self.token_ids.num_rows

    def __getitem__(self, row: int) -> Prompt | None:
        if row in self.conversations:
            return self.conversations[row]
        text: str | None = self.texts[row].as_py()  # first, for this raises IndexError after the last row
        return self.token_ids.row(row) if self.token_ids.lengths[row] else text

    def without(self, rows: Collection[int]) -> Prompts:
        """The same prompts, but none in `rows`."""
        if not rows:
            return self
        dropped = np.zeros(len(self), dtype=np.bool_)
        dropped[list(rows)] = True
        return Prompts(
            texts=_null_where(dropped, self.texts),
            conversations={row: messages for row, messages in self.conversations.items() if not dropped[row]},
            token_ids=self.token_ids.with_rows_dropped(rows),
        )


def read_prompts(columns: Mapping[str, Column], num_rows: int) -> tuple[Prompts, dict[int, RowError]]:
    """The prompt of each row, none where the row has an error, and those errors by row number."""
    found = {name: decoded(columns[name]) for name in PROMPT_COLUMNS if name in columns}
    given = {name: is_given(column) for name, column in found.items()}
    num_given = sum(given.values(), np.zeros(num_rows, dtype=np.int64))
    errors: dict[int, RowError] = {}
    for row in np.flatnonzero(num_given != 1).tolist():
        names = [name for name in given if given[name][row]]
        errors[row] = RowError("bad_prompt", _not_exactly_one(names))

    wanted = {name: given[name] & (num_given == 1) for name in found}
    texts, conversations, token_ids = _no_texts(num_rows), dict[int, list[Message]](), _no_token_ids(num_rows)
    if "prompt" in found:
        texts, bad = _texts(found["prompt"], wanted["prompt"])
        errors |= bad
    if "messages" in found:
        conversations, bad = _conversations(found["messages"], wanted["messages"])
        errors |= bad
    if "prompt_token_ids" in found:
        token_ids, bad = _token_lists(found["prompt_token_ids"], wanted["prompt_token_ids"])
        errors |= bad
    return Prompts(texts, conversations, token_ids), errors


def _not_exactly_one(names: list[str]) -> str:
    if names:
        return f"{' and '.join(names)} are given together, must be only one of them"
    return f"none of {', '.join(PROMPT_COLUMNS)} is given, must be one of them"


def _texts(column: Column, wanted: Bools) -> tuple[pa.ChunkedArray, dict[int, RowError]]:
    if not isinstance(column, list):
        if not is_string(column.type):
            error = RowError("bad_prompt", f"prompt is {shown_type(column.type)}, must be a string")
            return _no_texts(len(column)), _all_bad(wanted, error)
        return _null_where(~wanted, column.cast(pa.large_string())), {}
    cells = [cell if isinstance(cell, str) and ok else None for cell, ok in zip(column, wanted.tolist(), strict=True)]
    errors = {
        row: RowError("bad_prompt", f"prompt is {kind_of(column[row])}, must be a string")
        for row in np.flatnonzero(wanted).tolist()
        if cells[row] is None
    }
    return pa.chunked_array([pa.array(cells, pa.large_string())]), errors


def _null_where(dropped: Bools, texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """The texts without those of the rows `dropped`; a copy only if these have any."""
    if not (dropped & is_given(texts)).any():
        return texts
    return pc.if_else(pa.array(dropped), pa.scalar(None, texts.type), texts)


def _no_texts(num_rows: int) -> pa.ChunkedArray:
    return pa.chunked_array([pa.nulls(num_rows, pa.large_string())])


def _conversations(column: Column, wanted: Bools) -> tuple[dict[int, list[Message]], dict[int, RowError]]:
    cells = column if isinstance(column, list) else column.to_pylist()
    # Arrow gives every struct the fields of all of them; those that a message never had are null.
    padded = not isinstance(column, list) and is_list(column.type)
    conversations: dict[int, list[Message]] = {}
    errors: dict[int, RowError] = {}
    for row in np.flatnonzero(wanted).tolist():
        try:
            conversations[row] = _messages(_without_nulls(cells[row]) if padded else cells[row])
        except _BadPromptError as error:
            errors[row] = error.error
    return conversations, errors


def _messages(cell: object) -> list[Message]:
    if isinstance(cell, str):
        cell = _parse_json(cell)
    if not isinstance(cell, list):
        raise _BadPromptError("bad_messages", f"messages is {kind_of(cell)}, must be a list of messages")
    if not cell:
        raise _BadPromptError("empty_prompt", "messages is an empty list")
    return [_message(number, message) for number, message in enumerate(cell)]


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno} column {error.colno}"
    except (ValueError, RecursionError):
        reason = "nested too deeply, or a number has too many digits"
    raise _BadPromptError("bad_messages", f"messages is a string that is no JSON: {reason}")


def _message(number: int, message: object) -> Message:
    if not isinstance(message, dict):
        raise _BadPromptError("bad_messages", f"message {number} is {kind_of(message)}, must be an object")
    kept = {key: value for key, value in message.items() if value is not None}
    role, content = kept.get("role"), kept.get("content")
    if role not in ROLES:
        allowed = f"must be one of {', '.join(ROLES)}"
        raise _BadPromptError("bad_messages", f"the role of message {number} is {shown(role)}, {allowed}")
    if isinstance(content, list):
        _check_parts(number, content)
    elif not isinstance(content, str) and not (content is None and "tool_calls" in kept):
        has = "has no content" if content is None else f"has {kind_of(content)} as content"
        raise _BadPromptError("bad_messages", f"message {number} {has}, must be a string")
    return kept


def _check_parts(number: int, parts: list[Any]) -> None:
    """Parts go to the template as they are, if all of them are text."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise _BadPromptError("bad_messages", f"message {number} has a content part without a type")
        if kind != "text":
            message = f"message {number} has a content part of type {shown(kind)}, only text is supported"
            raise _BadPromptError("unsupported", message)
        if not isinstance(part.get("text"), str):
            raise _BadPromptError("bad_messages", f"message {number} has a text part without text")


def _without_nulls(value: Any) -> Any:
    """`value` without the fields that are null, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(field) for key, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _token_lists(column: Column, wanted: Bools) -> tuple[TokenArena, dict[int, RowError]]:
    if isinstance(column, list):
        return _listed_token_ids(column, wanted)
    if not holds_integers(column.type):
        error = RowError("bad_prompt", f"prompt_token_ids is {shown_type(column.type)}, must be a list of integers")
        return _no_token_ids(len(column)), _all_bad(wanted, error)
    lengths = list_lengths(column)
    parts = [as_int32(pc.list_flatten(chunk)) for chunk in column.chunks]
    arena = TokenArena.from_lengths(parts[0] if len(parts) == 1 else np.concatenate([_NO_TOKENS, *parts]), lengths)
    is_bad = np.zeros(len(column), dtype=np.bool_)
    is_bad[arena.tokens_outside(MAX_TOKEN_ID + 1)[0]] = True
    errors = _all_bad(wanted & is_bad, _BAD_TOKEN_ID) | _all_bad(wanted & (lengths == 0), _EMPTY_LIST)
    return arena.with_rows_dropped(np.flatnonzero(~wanted | is_bad)), errors


def _listed_token_ids(cells: list[Any], wanted: Bools) -> tuple[TokenArena, dict[int, RowError]]:
    """Of JSON lines."""
    rows = [_NO_TOKENS] * len(cells)
    errors: dict[int, RowError] = {}
    for row in np.flatnonzero(wanted).tolist():
        outcome = _token_ids(cells[row])
        if isinstance(outcome, RowError):
            errors[row] = outcome
        else:
            rows[row] = outcome
    return TokenArena.from_rows(rows), errors


def _token_ids(cell: object) -> npt.NDArray[np.int32] | RowError:
    """One cell of JSON lines."""
    if not isinstance(cell, list):
        message = f"prompt_token_ids is {kind_of(cell)}, must be a list of integers"
        return RowError("bad_prompt", message)
    if not cell:
        return _EMPTY_LIST
    if set(map(type, cell)) != {int} or min(cell) < 0 or max(cell) > MAX_TOKEN_ID:
        return _BAD_TOKEN_ID
    return np.array(cell, dtype=np.int32)


def _no_token_ids(num_rows: int) -> TokenArena:
    return TokenArena.from_lengths(_NO_TOKENS, np.zeros(num_rows, np.int64))


def _all_bad(rows: Bools, error: RowError) -> dict[int, RowError]:
    return dict.fromkeys(np.flatnonzero(rows).tolist(), error)


_NO_TOKENS = np.empty(0, dtype=np.int32)
_EMPTY_LIST = RowError("empty_prompt", "prompt_token_ids is an empty list")
_BAD_TOKEN_ID = RowError("bad_token_id", f"prompt_token_ids holds a value that is no integer from 0 to {MAX_TOKEN_ID}")
