"""What a call of `rollout` asks for, checked."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from batchkv.config import EngineConfig
from batchkv.rl.branching import Branching, is_integer
from batchkv.rl.environment import Environment
from batchkv.rl.generation import Draw, Earlier
from batchkv.rl.groups import Enough, at_least
from batchkv.rl.rollout_batch import RolloutBatch
from batchkv.sampling_params import SamplingParams

_LEAST = {"n": 1, "max_tokens": 1, "max_turns": 1, "oversample": 0, "step": 0}
_INTEGERS = (*_LEAST, "top_k", "seed")
_NUMBERS = ("temperature", "top_p", "min_p")
_INTEGER_LISTS = ("stop_token_ids", "rows")
_FUNCTIONS = ("environment", "branching", "enough")

# What others call the parameters.
_ELSEWHERE = {
    "eos_token_id": "stop_token_ids",
    "max_completion_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_generations": "n",
    "num_return_sequences": "n",
    "stop": "stop_token_ids",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """Fields as the arguments of `batchkv.rollout`.

    Raises:
        ValueError: one is out of range, or of another type.
    """

    n: int = 16
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: Sequence[int] | None = None
    seed: int = 0
    step: int = 0
    rows: Sequence[int] | None = None
    environment: Environment | None = None
    max_turns: int = 16
    branching: Branching | None = None
    oversample: int = 0
    enough: Enough | None = None
    record_sampling: bool = False
    earlier: RolloutBatch | None = None

    def __post_init__(self) -> None:
        self._make_plain()
        for name in _NUMBERS:
            self._require(name, isinstance(getattr(self, name), Real), "a number")
        for name in _FUNCTIONS:
            self._require(name, getattr(self, name) is None or callable(getattr(self, name)), "a function, or None")
        self._require(
            "earlier", self.earlier is None or isinstance(self.earlier, RolloutBatch), "a RolloutBatch, or None"
        )
        for name, least in _LEAST.items():
            self._require(name, getattr(self, name) >= least, f"at least {least}")
        self._require("seed", -(1 << 63) <= self.seed < 1 << 64, "a 64-bit integer")
        self._require("step", self.step < 1 << 63, "an integer of 63 bits")
        self._require("rows", all(0 <= row < 1 << 63 for row in self.rows or ()), "integers of 63 bits, from 0")
        object.__setattr__(self, "seed", self.seed % (1 << 64))  # as the batch has it

    def _make_plain(self) -> None:
        """Numbers of numpy, arrays and tensors become Python's own."""
        for name in _INTEGERS:
            self._require(name, is_integer(getattr(self, name)), "an integer")
            object.__setattr__(self, name, int(getattr(self, name)))
        for name in _INTEGER_LISTS:
            if (values := getattr(self, name)) is not None:
                self._require(name, _are_integers(values), "integers, or None")
                object.__setattr__(self, name, tuple(map(int, values)))

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            value = getattr(self, name)
            shown = repr(value) if isinstance(value, (str, Real)) else f"a {type(value).__name__}"
            raise ValueError(f"{name} is {shown}, must be {wanted}")

    @property
    def goes_on(self) -> bool:
        """Whether something may follow the first turn."""
        return self.environment is not None or self.branching is not None

    @property
    def enough_of_a_group(self) -> Enough | None:
        return self.enough or at_least(self.n if self.oversample else None)

    def draw(self, weight_version: int) -> Draw:
        """How samples are drawn with weights of this version."""
        params = SamplingParams(
            n=self.n + self.oversample,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            seed=self.seed,
        )
        earlier = None if self.earlier is None else Earlier.of(self.earlier.completions_by_prompt())
        return Draw(params, self.step, weight_version, self.goes_on, self.record_sampling, earlier)


ASKED = tuple(field.name for field in fields(Asked))
OF_ENGINES = tuple(field.name for field in fields(EngineConfig))


def check_names(given: Iterable[str], known: Collection[str], of: str) -> None:
    """Raises TypeError if an argument has a name that is not known, and says which one may be meant.

    Args:
        given: the names of arguments.
        known: names that there are.
        of: what has them.
    """
    for name in given:
        if name not in known:
            elsewhere = _ELSEWHERE.get(name)
            meant = [elsewhere] if elsewhere in known else difflib.get_close_matches(name, known, 1)
            hint = f"is {meant[0]!r} meant?" if meant else f"there are {', '.join(known)}"
            raise TypeError(f"{of} has no parameter {name!r}: {hint}")


def _are_integers(values: Any) -> bool:
    """Of lists and their like, arrays and tensors."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    return isinstance(listed, Collection) and all(map(is_integer, listed))
