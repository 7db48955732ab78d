"""What a call of `rollout` asks for, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchkv.rl.branching import Branching
from batchkv.rl.environment import Environment
from batchkv.rl.generation import Draw, Earlier
from batchkv.rl.groups import Enough, at_least
from batchkv.rl.rollout_batch import RolloutBatch
from batchkv.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """Fields as the arguments of `batchkv.rollout`.

    Raises:
        ValueError: one is out of range.
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
        for name, least in (("n", 1), ("max_turns", 1), ("oversample", 0)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} {value} must be at least {least}")

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
