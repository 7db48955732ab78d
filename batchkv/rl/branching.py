"""Trees: samples that go another way from a token of a finished one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from batchkv.rl.trajectory import Branch, Trajectory

# Called for every sample that is done, forks too: (token, samples) pairs, so many new ones from before that token on.
Branching: TypeAlias = Callable[[Trajectory], Iterable[tuple[int, int]]]


class Forks:
    """Numbers the new samples of each prompt behind those that it has.

    Args:
        branching: says where to fork; what it returns for forks ends the tree.
        branches: what the rollout begins with.
    """

    def __init__(self, branching: Branching | None, branches: Sequence[Branch]) -> None:
        self._branching = branching
        self._next: defaultdict[int, int] = defaultdict(int)
        for branch in branches:
            number = branch.trunk.prompt_index
            self._next[number] = max(self._next[number], max(branch.samples) + 1)

    def of(self, done: Sequence[Trajectory]) -> list[Branch]:
        """Where new samples begin.

        Raises:
            ValueError: a sample cannot be forked there.
        """
        if self._branching is None:
            return []
        return [
            self._fork(trajectory, at_token, n)
            for trajectory in done
            for at_token, n in self._branching(trajectory)
            if n > 0
        ]

    def _fork(self, trajectory: Trajectory, at_token: int, n: int) -> Branch:
        first = self._next[trajectory.prompt_index]
        self._next[trajectory.prompt_index] += n
        return trajectory.fork(at_token, range(first, first + n))
