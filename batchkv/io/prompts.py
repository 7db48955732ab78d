"""What each row asks: the columns `prompt`, `messages` and `prompt_token_ids`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchkv.errors import RowError, RowErrorCode
from batchkv.io.columns import PROMPT_COLUMNS, Column, decoded, is_given, is_list, is_string, kind_of, shown

Message: TypeAlias = dict[str, Any]
# Text, a conversation, or int32 token ids.
Prompt: TypeAlias = "str | list[Message] | npt.NDArray[np.int32]"

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TOKEN_ID = 2**31 - 1


class _BadPromptError(ValueError):
    def __init__(self, code: RowErrorCode, message: str) -> None:
        super().__init__(message)
        self.error = RowError(code, message)


def read_prompts(columns: Mapping[str, Column], num_rows: int) -> tuple[list[Prompt | None], dict[int, RowError]]:
    """The prompt of each row, None where the row has an error, and those errors by row number."""
    prompts: list[Prompt | None] = [None] * num_rows
    errors: dict[int, RowError] = {}
    found = {name: decoded(columns[name]) for name in PROMPT_COLUMNS if name in columns}
    given = {name: is_given(column) for name, column in found.items()}
    num_given = np.zeros(num_rows, dtype=np.int64)
    for is_given_here in given.values():
        num_given += is_given_here
    for row in np.flatnonzero(num_given != 1).tolist():
        names = [name for name in given if given[name][row]]
        errors[row] = RowError("bad_prompt", _not_exactly_one(names))
    for name, column in found.items():
        rows = np.flatnonzero(given[name] & (num_given == 1))
        for row, prompt in _CELL_READERS[name](column, rows):
            if isinstance(prompt, RowError):
                errors[row] = prompt
            else:
                prompts[row] = prompt
    return prompts, errors


def _not_exactly_one(names: list[str]) -> str:
    if names:
        return f"{' and '.join(names)} are given together, must be only one of them"
    return f"none of {', '.join(PROMPT_COLUMNS)} is given, must be one of them"


def _texts(column: Column, rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, Prompt | RowError]]:
    if not isinstance(column, list):
        if not is_string(column.type):
            yield from _all_bad(rows, RowError("bad_prompt", f"prompt is {column.type}, must be a string"))
            return
        column = column.to_pylist()
    for row in rows.tolist():
        cell = column[row]
        ok = isinstance(cell, str)
        yield row, cell if ok else RowError("bad_prompt", f"prompt is {kind_of(cell)}, must be a string")


def _conversations(column: Column, rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, Prompt | RowError]]:
    cells = column if isinstance(column, list) else column.to_pylist()
    # Arrow gives every struct the fields of all of them; those that a message never had are null.
    padded = not isinstance(column, list) and is_list(column.type)
    for row in rows.tolist():
        yield row, _conversation(_without_nulls(cells[row]) if padded else cells[row])


def _conversation(cell: object) -> Prompt | RowError:
    try:
        return _messages(cell)
    except _BadPromptError as error:
        return error.error


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


def _token_lists(column: Column, rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, Prompt | RowError]]:
    if isinstance(column, list):
        for row in rows.tolist():
            yield row, _token_ids(column[row])
        return
    dtype = column.type
    # A list of nulls is what Arrow makes of empty lists alone.
    if not is_list(dtype) or not (pa.types.is_integer(dtype.value_type) or pa.types.is_null(dtype.value_type)):
        message = f"prompt_token_ids is {dtype}, must be a list of integers"
        yield from _all_bad(rows, RowError("bad_prompt", message))
        return
    wanted = np.zeros(len(column), dtype=np.bool_)
    wanted[rows] = True
    start = 0
    for chunk in column.chunks:
        for row, prompt in _chunk_token_ids(chunk):
            if wanted[start + row]:
                yield start + row, prompt
        start += len(chunk)


def _chunk_token_ids(chunk: pa.Array) -> Iterator[tuple[int, Prompt | RowError]]:
    """Views into one int32 copy of the chunk's values: no Python object per token."""
    lengths = pc.list_value_length(chunk).fill_null(0).to_numpy()
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
    # Unsafe: an unsigned id too big wraps to a negative one, an error of its row and not of the column.
    wide = pc.list_flatten(chunk).cast(pa.int64(), safe=False).fill_null(-1).to_numpy()
    bad = np.flatnonzero((wide < 0) | (wide > MAX_TOKEN_ID))
    bad_rows = set((np.searchsorted(offsets, bad, side="right") - 1).tolist())
    tokens = wide.astype(np.int32)
    bounds = offsets.tolist()
    for row in range(len(chunk)):
        row_tokens = tokens[bounds[row] : bounds[row + 1]]
        yield row, _BAD_TOKEN_ID if row in bad_rows else row_tokens if len(row_tokens) else _NO_TOKENS


def _token_ids(cell: object) -> Prompt | RowError:
    """One cell of JSON lines."""
    if not isinstance(cell, list):
        message = f"prompt_token_ids is {kind_of(cell)}, must be a list of integers"
        return RowError("bad_prompt", message)
    if not cell:
        return _NO_TOKENS
    if set(map(type, cell)) != {int} or min(cell) < 0 or max(cell) > MAX_TOKEN_ID:
        return _BAD_TOKEN_ID
    return np.array(cell, dtype=np.int32)


def _all_bad(rows: npt.NDArray[np.int64], error: RowError) -> Iterator[tuple[int, RowError]]:
    return ((row, error) for row in rows.tolist())


_NO_TOKENS = RowError("empty_prompt", "prompt_token_ids is an empty list")
_BAD_TOKEN_ID = RowError("bad_token_id", f"prompt_token_ids holds a value that is no integer from 0 to {MAX_TOKEN_ID}")
_CELL_READERS = {"prompt": _texts, "messages": _conversations, "prompt_token_ids": _token_lists}
