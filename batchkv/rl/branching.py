"""Trees: samples that go another way from a token of a finished one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from batchkv.rl.trajectory import Branch, Trajectory

# Called for every sample that is done, forks too: (token, samples) pairs, so many new ones from before that token on.
Branching: TypeAlias = Callable[[Trajectory], Iterable[tuple[int, int]] | None]


class Forks:
    """Numbers the new samples of each row behind those that it has: random numbers go by row and sample.

    Args:
        branching: says where to fork; what it returns for forks ends the tree.
        branches: what the rollout begins with.
    """

    def __init__(self, branching: Branching | None, branches: Sequence[Branch]) -> None:
        self._branching = branching
        self._next: defaultdict[int, int] = defaultdict(int)
        for branch in branches:
            row = branch.trunk.row
            self._next[row] = max(self._next[row], max(branch.samples) + 1)

    def of(self, done: Sequence[Trajectory]) -> list[Branch]:
        """Where new samples begin.

        Raises:
            ValueError: a sample cannot be forked there, or what was returned is no pairs.
        """
        if self._branching is None:
            return []
        return [
            self._fork(trajectory, at_token, n)
            for trajectory in done
            for at_token, n in _pairs(self._branching(trajectory))
            if n > 0
        ]

    def _fork(self, trajectory: Trajectory, at_token: int, n: int) -> Branch:
        first = self._next[trajectory.row]
        self._next[trajectory.row] += n
        return trajectory.fork(at_token, range(first, first + n))


def _pairs(returned: Any) -> list[tuple[int, int]]:
    """Raises ValueError if it is something else."""
    listed = returned.tolist() if hasattr(returned, "tolist") else returned
    pairs = list(listed) if isinstance(listed, Iterable) else ([] if listed is None else [listed])
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(is_integer, pair)) and pair[1] >= 0):
            raise ValueError(f"branching returned {pair!r}, must return pairs of a token and a number of samples")
    return pairs


def is_integer(value: Any) -> bool:
    """Whether it is one, of Python or numpy; truth values are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)
