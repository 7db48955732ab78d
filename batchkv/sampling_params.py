"""How rows are sampled. A column of the job file beats the job's default; a null cell falls back to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

_Scalar = TypeVar("_Scalar", bound=np.generic)

CONSTRAINTS = ("choices", "regex", "json_schema")  # of these a row has at most one

MAX_INT32 = 2**31 - 1
_SHOWN_CHARACTERS = 80
MAX_SAMPLES = 2**16  # one row with more would take the whole job's memory


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one row, checked when made.

    Attributes:
        n: samples per row.
        max_tokens: most tokens generated per sample.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens with at least this mass; 1 keeps all.
        top_k: keep the k likeliest tokens; 0 keeps all.
        min_p: drop tokens below this share of the likeliest one's probability; 0 drops none.
        seed: random numbers are a pure function of (seed, row id, sample, position).
        stop: strings that end a sample; `text` is cut before the first of them.
        stop_token_ids: tokens that end a sample, besides the model's end tokens.
        ignore_eos: go on after the model's end tokens.
        logprobs: return each sampled token's log-probability under softmax(logits / temperature).
        choices: the text is one of these strings.
        regex: all of the text matches this.
        json_schema: the text is JSON that this schema, itself JSON text, describes.
        choice_mode: how one of the choices is found: `generate` samples its tokens, `score` compares their
            log-probabilities.

    Raises:
        ValueError: names the parameter, its value and what is allowed.
    """

    n: int = 1
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    choices: tuple[str, ...] = ()
    regex: str | None = None
    json_schema: str | None = None
    choice_mode: Literal["generate", "score"] = "generate"

    def __post_init__(self) -> None:
        # one string, and lists, are what other engines take
        stop = cast("str | Sequence[str]", self.stop)
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        choices = cast("str | Sequence[str]", self.choices)
        object.__setattr__(self, "choices", (choices,) if isinstance(choices, str) else tuple(choices))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        _require(1 <= self.n <= MAX_SAMPLES, "n", self.n, f"from 1 to {MAX_SAMPLES}")
        _require(1 <= self.max_tokens <= MAX_INT32, "max_tokens", self.max_tokens, f"from 1 to {MAX_INT32}")
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "0 or more"
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.top_k <= MAX_INT32, "top_k", self.top_k, "0 or -1 (off) or more")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(-(1 << 63) <= self.seed < 1 << 64, "seed", self.seed, "a 64-bit integer")
        _require(all(self.stop), "stop", list(self.stop), "strings that are not empty")
        _require(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", list(self.stop_token_ids), "0 or more")
        self._check_constraint()

    def _check_constraint(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in ((), None)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given together, must be only one of them")
        if not all(self.choices) or len(set(self.choices)) < len(self.choices):
            raise ValueError("choices holds an empty string or one string twice, must be distinct strings with text")
        _require(self.choice_mode in ("generate", "score"), "choice_mode", self.choice_mode, "'generate' or 'score'")

    @property
    def num_outputs(self) -> int:
        """Result rows: choices that are scored have one between them."""
        return 1 if self.scores_choices else self.n

    @property
    def scores_choices(self) -> bool:
        return bool(self.choices) and self.choice_mode == "score"

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True, eq=False)
class RowParams:
    """The parameters of each row of a job: a million rows that are sampled alike have one object between them.

    Attributes:
        distinct: the different ones.
        index: int32 [rows], which of them each row has.
    """

    distinct: tuple[SamplingParams, ...]
    index: npt.NDArray[np.int32]

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> RowParams:
        """Of rows with `params` in turn."""
        number: dict[SamplingParams, int] = {}
        index = [number.setdefault(one, len(number)) for one in params]
        return cls(tuple(number), np.array(index, np.int32))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> SamplingParams:
        return self.distinct[int(self.index[row])]

    def __iter__(self) -> Iterator[SamplingParams]:
        return (self.distinct[i] for i in self.index.tolist())

    def take(self, rows: npt.NDArray[np.int64]) -> RowParams:
        """Those of `rows`, in that order."""
        return RowParams(self.distinct, self.index[rows])

    def column(self, value: Callable[[SamplingParams], Any], dtype: type[_Scalar]) -> npt.NDArray[_Scalar]:
        """`value` of each row's parameters, [rows]; computed once for rows that have the same.

        Where `index` is one number for all rows, so is this, and cannot be written to.
        """
        values: npt.NDArray[_Scalar] = np.array([value(params) for params in self.distinct], dtype)
        if len(self.index) and self.index.strides == (0,):
            return np.broadcast_to(values[self.index[0]], self.index.shape)
        return values[self.index]


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        text = repr(value)
        cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
        raise ValueError(f"{name} is {cut}, must be {allowed}")
