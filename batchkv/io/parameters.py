"""How each row is sampled: the parameter columns, single or as one struct."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from batchkv.errors import RowError
from batchkv.io.columns import (
    PARAMETER_COLUMNS,
    PARAMETER_STRUCT,
    Column,
    distinct,
    shown,
)
from batchkv.sampling_params import CONSTRAINTS, MAX_INT32, MAX_SAMPLES, RowParams, SamplingParams

# What cells set, by parameter.
Values: TypeAlias = dict[str, Any]
# A column: the code of each row's cell, int64 [rows], and what each distinct cell sets, by code.
_Layer: TypeAlias = "tuple[npt.NDArray[np.int64], list[Values | RowError]]"


def read_parameters(
    columns: Mapping[str, Column], defaults: SamplingParams, num_rows: int
) -> tuple[RowParams, dict[int, RowError]]:
    """The parameters of each row and the errors by row number; a row with an error has the defaults.

    A null cell falls back to the default, and a cell of a single column beats its field in the struct.
    Equal parameters are one object, the defaults the first; each distinct combination of cells is checked once.
    """
    layers: list[_Layer] = []
    for name in (PARAMETER_STRUCT, *PARAMETER_COLUMNS):
        if name in columns:
            codes, cells = distinct(columns[name])
            layers.append((codes, [_parse_cell(name, cell) for cell in cells]))
    combinations, first_rows = _combinations(layers, num_rows)
    base = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
    number = {defaults: 0}
    index = np.zeros(len(first_rows), np.int32)  # of each combination, in `number`
    bad: dict[int, RowError] = {}
    for combination, row in enumerate(first_rows.tolist()):
        outcome = _combine(base, [*(values[codes[row]] for codes, values in layers)])
        if isinstance(outcome, RowError):
            bad[combination] = outcome
        else:
            index[combination] = number.setdefault(outcome, len(number))
    bad_rows = np.flatnonzero(np.isin(combinations, list(bad))).tolist() if bad else []
    errors = {row: bad[int(combinations[row])] for row in bad_rows}
    return RowParams(tuple(number), index[combinations]), errors


def _combinations(layers: Sequence[_Layer], num_rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which combination of cells each row has, numbered from 0, and the first row of each combination."""
    combinations = np.zeros(num_rows, dtype=np.int64)
    for codes, values in layers:
        combinations = np.unique(combinations * len(values) + codes, return_inverse=True)[1]
    return combinations, np.unique(combinations, return_index=True)[1]


def _combine(base: Values, values: Sequence[Values | RowError]) -> SamplingParams | RowError:
    """The parameters, where later values are on top; or the first thing that is wrong with them."""
    given: Values = {}
    for part in values:
        if isinstance(part, RowError):
            return part
        given.update(part)
    if any(name in given for name in CONSTRAINTS):  # a row's constraint is instead of the default, of whatever kind
        base = {name: value for name, value in base.items() if name not in CONSTRAINTS}
    try:
        return SamplingParams(**base | given)
    except ValueError as error:
        return RowError("bad_parameter", str(error))


def _parse_cell(column: str, cell: object) -> Values | RowError:
    """The parameters that one cell sets: none if it is null, several if it is the struct."""
    if cell is None:
        return {}
    try:
        if column != PARAMETER_STRUCT:
            return {column: _PARSERS[column](column, cell)}
        if not isinstance(cell, dict):
            raise _wrong(column, cell, "a struct of parameters")
        given = {name: value for name, value in cell.items() if value is not None}
        unknown = [name for name in given if name not in _PARSERS]
        if unknown:
            raise ValueError(f"{column} has the unknown fields {shown(unknown)}, can have {', '.join(_PARSERS)}")
        return {name: _PARSERS[name](name, value) for name, value in given.items()}
    except ValueError as error:
        return RowError("bad_parameter", str(error))


def _wrong(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{name} is {shown(value)}, must be {allowed}")


def _is_finite(value: object) -> TypeGuard[int | float]:
    """Whether `value` is an int or a float, but no bool, that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _integer(name: str, value: object, low: int, high: int, allowed: str) -> int:
    # pandas turns a column of integers that has nulls into floats: 3.0 is meant as 3.
    if _is_finite(value) and value == int(value) and low <= value <= high:
        return int(value)
    raise _wrong(name, value, allowed)


def _samples(name: str, value: object) -> int:
    return _integer(name, value, 1, MAX_SAMPLES, f"an integer from 1 to {MAX_SAMPLES}")


def _max_tokens(name: str, value: object) -> int:
    return _integer(name, value, 1, MAX_INT32, f"an integer from 1 to {MAX_INT32}")


def _top_k(name: str, value: object) -> int:
    # -1 switches it off in vLLM.
    return max(0, _integer(name, value, -1, MAX_INT32, f"an integer from 0 (off) to {MAX_INT32}"))


def _seed(name: str, value: object) -> int:
    return _integer(name, value, -(2**63), 2**64 - 1, "a 64-bit integer")


def _number(name: str, value: object) -> float:
    if not _is_finite(value):
        raise _wrong(name, value, "a finite number")
    return float(value)


def _flag(name: str, value: object) -> bool:
    if value in (0, 1) and isinstance(value, (int, float)):
        return bool(value)
    no_alternatives = ": no alternatives to the sampled token are returned" if name == "logprobs" else ""
    raise _wrong(name, value, f"true or false{no_alternatives}")


def _stop_strings(name: str, value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise _wrong(name, value, "a string or a list of strings, none of them empty")
    return tuple(strings)


def _stop_tokens(name: str, value: object) -> tuple[int, ...]:
    allowed = f"a list of integers from 0 to {MAX_INT32}"
    if not isinstance(value, list):
        raise _wrong(name, value, allowed)
    return tuple(_integer(name, token, 0, MAX_INT32, allowed) for token in value)


def _choices(name: str, value: object) -> tuple[str, ...]:
    allowed = "a list of strings, none of them empty and none of them twice"
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise _wrong(name, value, allowed)
    if len(set(value)) < len(value):
        raise _wrong(name, value, allowed)
    return tuple(value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def _schema(name: str, value: object) -> str:
    """The text of a schema; whether it is one is seen when it is compiled."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise _wrong(name, value, "a JSON schema: an object, or its text")
    try:
        return json.dumps(_without_filling(value))
    except (RecursionError, TypeError, ValueError) as error:  # nested too deeply; or dates and bytes of Arrow
        raise ValueError(f"{name} cannot be written as JSON ({type(error).__name__}), must be a JSON schema") from None


def _without_filling(value: Any) -> Any:
    """Without the nulls that Arrow fills structs up with: all structs of a column have the same fields.

    No keyword has null for a value, except `const`, which is kept where it stands alone.
    """
    if isinstance(value, list):
        return [_without_filling(item) for item in value]
    if not isinstance(value, dict):
        return value
    given = {key: _without_filling(item) for key, item in value.items() if item is not None}
    return {"const": None} if not given and "const" in value else given


_PARSERS: dict[str, Callable[[str, object], Any]] = {
    "n": _samples,
    "max_tokens": _max_tokens,
    "temperature": _number,
    "top_p": _number,
    "top_k": _top_k,
    "min_p": _number,
    "seed": _seed,
    "stop": _stop_strings,
    "stop_token_ids": _stop_tokens,
    "ignore_eos": _flag,
    "logprobs": _flag,
    "choices": _choices,
    "regex": _text,
    "json_schema": _schema,
    "choice_mode": _text,
}
