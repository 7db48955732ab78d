"""The samples of a prompt as a group, which may have enough of them before all have ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from batchkv.rl.trajectory import Branch, Trajectory

# Called with the samples of a prompt that are done whenever there is one more.
Enough: TypeAlias = Callable[[Sequence[Trajectory]], bool]


def at_least(n: int | None) -> Enough | None:
    """So many are enough; None for all."""
    return None if n is None else lambda done: len(done) >= n


class Groups:
    """Which prompts have enough.

    Args:
        enough: says so; None if all samples run to their ends.
    """

    def __init__(self, enough: Enough | None) -> None:
        self._enough = enough
        self._done: defaultdict[int, list[Trajectory]] = defaultdict(list)  # by prompt
        self._closed: set[int] = set()

    @property
    def can_end(self) -> bool:
        """Whether any group may have enough."""
        return self._enough is not None

    def is_closed(self, prompt: int) -> bool:
        return prompt in self._closed

    def add(self, done: Trajectory) -> bool:
        """Notes a sample that is done; whether its prompt has enough now, and had not before."""
        prompt = done.prompt_index
        if self._enough is None or prompt in self._closed:
            return False
        self._done[prompt].append(done)
        if self._enough(self._done[prompt]):
            self._closed.add(prompt)
        return prompt in self._closed

    def closed(self, going: Sequence[Branch], done: Sequence[Trajectory]) -> tuple[list[Branch], list[Trajectory]]:
        """After a turn: the samples that go on, and those that are done, with those that others have made unwanted."""
        for trajectory in done:
            self.add(trajectory)
        cut = [branch for branch in going if branch.trunk.prompt_index in self._closed]
        left = [branch for branch in going if branch.trunk.prompt_index not in self._closed]
        aborted = [replace(b.trunk, sample_index=s, finish_reason="abort") for b in cut for s in b.samples]
        return left, [*done, *aborted]
