"""What sequences may go on like: completions that were generated before from the same prompts, found again by suffix.

The tokens that a sequence has so far end like some completion did somewhere; what followed there is its draft:

    earlier     ⊢ a b c d e f ⊣     ⊢ a b x c d e f ⊣     ⊢ a b c d y ⊣
    so far      ⊢ b c d             the longest suffix that occurs is "b c d", in the first and in the third
    draft           e f             the first, or the third's y: what followed most often after that suffix

Numbers only, and no randomness: a draft says nothing about which token is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from batchkv.sequence import SequenceTable

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

LONGEST_SUFFIX = 8
START = -2  # before the first token of a completion: a suffix can begin there
END = -1  # behind its last token
_NONE = -1

_MULTIPLIER = np.uint64(0x9FB21C651E98DF25)  # odd, its bits are well mixed


@dataclass(frozen=True, eq=False)
class References:
    """Earlier completions. What is found out about them is found out once.

    Attributes:
        lists: of completions, each its token ids (integers), usually one list per prompt.

    Raises:
        ValueError: a token id is negative.
    """

    lists: tuple[tuple[npt.NDArray[np.integer[Any]], ...], ...]

    def __post_init__(self) -> None:
        lowest = min((int(tokens.min(initial=0)) for tokens in self._all()), default=0)
        if lowest < 0:
            raise ValueError(f"token id {lowest} in a reference completion is negative: leave out what fills it up")

    @cached_property
    def highest_token(self) -> int:
        """The highest token id in them; -1 without any."""
        return max((int(tokens.max(initial=_NONE)) for tokens in self._all()), default=_NONE)

    @cached_property
    def index(self) -> SuffixIndex:
        """Made when it is first asked for."""
        return SuffixIndex(self.lists)

    def _all(self) -> list[npt.NDArray[np.integer[Any]]]:
        return [tokens for completions in self.lists for tokens in completions]


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Earlier completions for each sequence of a plan.

    Attributes:
        references: lists of completions; several plans can have the same.
        of_sequence: int64 [sequences], which of the lists each sequence has; -1 where it has none.

    Raises:
        ValueError: there is no such list.
    """

    references: References
    of_sequence: Int64Array

    def __post_init__(self) -> None:
        outside = (self.of_sequence < _NONE) | (self.of_sequence >= len(self.references.lists))
        if outside.any():
            raise ValueError(
                f"sequence {int(np.flatnonzero(outside)[0])} has list {int(self.of_sequence[outside][0])} of "
                f"{len(self.references.lists)} lists of reference completions: number them from 0, -1 is none"
            )

    @classmethod
    def of_requests(
        cls, references: Sequence[Sequence[npt.NDArray[np.integer[Any]]]], sequences: SequenceTable
    ) -> Drafts:
        """Where there is a list, which may be empty, for each request of a wave (`SequenceTable.row`).

        Raises:
            ValueError: there are more requests than lists, or a token id is negative.
        """
        lists = tuple(tuple(completions) for completions in references)
        return cls(References(lists), sequences.row.astype(np.int64))


class SuffixIndex:
    """Where suffixes of up to `LONGEST_SUFFIX` tokens occur in completions.

    A table of the hashes of all of them, sorted: eight entries of 16 bytes for each token. To look up R sequences is
    one binary search for R x 8 hashes, whatever the number of tokens; following what was found takes two gathers a
    token. A false match (two hashes of 64 bits that are equal) would cost a useless draft.

    Args:
        references: lists of completions.
    """

    def __init__(self, references: Sequence[Sequence[npt.NDArray[np.integer[Any]]]]) -> None:
        self._tokens, at, start, group = _laid_out(references)
        self._follower = np.arange(len(self._tokens))  # where to read on in place of each position
        keys, positions = [], []
        key = _seeds(group)
        for length in range(1, LONGEST_SUFFIX + 1):
            is_there = at - length >= start
            at, start = at[is_there], start[is_there]
            key = _extended(key[is_there], self._tokens[at - length])
            firsts, most_common, of_occurrence = _most_common(key, self._tokens[at], at)
            keys.append(firsts)
            positions.append(most_common)
            if length == LONGEST_SUFFIX:
                self._follower[at] = most_common[of_occurrence]
        order = np.argsort(np.concatenate(keys))
        self._keys, self._positions = np.concatenate(keys)[order], np.concatenate(positions)[order]

    def find(self, lists: Int64Array, suffixes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The longest suffix of each of R sequences that occurs in its list.

        Args:
            lists: int64 [R], a list of each; -1 is none.
            suffixes: int64 [R, LONGEST_SUFFIX], the last tokens of each, the newest first; behind the first token
                `START`, and then anything.

        Returns:
            int64 [R]: the position of what followed there most often, the earliest of equals; -1 if nothing did.
            int64 [R]: length of the suffix, `START` included; 0 if nothing occurs.
        """
        keys = np.empty(suffixes.shape, np.uint64)
        key = _seeds(lists)
        for i in range(suffixes.shape[1]):
            key = keys[:, i] = _extended(key, suffixes[:, i])
        place = np.searchsorted(self._keys, keys)
        place[place == len(self._keys)] = 0
        occurs = self._keys[place] == keys if len(self._keys) else np.zeros(keys.shape, bool)
        is_of_output = np.cumsum(suffixes == START, axis=1) - (suffixes == START) == 0
        occurs &= is_of_output & (lists >= 0)[:, None]
        matched = np.logical_and.accumulate(occurs, axis=1).sum(axis=1)
        found = np.full(len(lists), _NONE)
        some = np.flatnonzero(matched)
        found[some] = self._positions[place[some, matched[some] - 1]]
        return found, matched

    def follow(self, positions: Int64Array, most: int) -> Int64Array:
        """int64 [R, most]: the tokens from each position on; `END` from where a completion ends.

        From token to token it goes on where the last `LONGEST_SUFFIX` tokens were followed by what followed most often.
        """
        tokens = np.empty((len(positions), most), np.int64)
        for i in range(most):
            tokens[:, i] = self._tokens[positions]
            positions = np.where(tokens[:, i] == END, positions, self._follower[positions + (tokens[:, i] != END)])
        return tokens


def _laid_out(
    references: Sequence[Sequence[npt.NDArray[np.integer[Any]]]],
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """All completions in one array, each between `START` and `END`; and, int64 [tokens] each, where their tokens are,
    where the completion of each token starts, and the list it is in.
    """
    completions = [np.asarray(tokens) for some in references for tokens in some]
    lengths = np.array([len(tokens) for tokens in completions], np.int64)
    starts = np.cumsum(lengths + 2) - (lengths + 2)
    flat = np.full(int((lengths + 2).sum()), END, np.int64)
    flat[starts] = START
    at = np.arange(int(lengths.sum())) + np.repeat(2 * np.arange(len(lengths)) + 1, lengths)
    if completions:
        flat[at] = np.concatenate(completions)
    group = np.repeat(np.arange(len(references)), [len(some) for some in references])
    return flat, at, np.repeat(starts, lengths), np.repeat(group, lengths)


def _most_common(
    keys: UInt64Array, tokens: Int64Array, positions: Int64Array
) -> tuple[UInt64Array, Int64Array, npt.NDArray[np.intp]]:
    """What follows each suffix most often.

    Args:
        keys, tokens, positions: [N], the hash of a suffix, the token behind it, and where that is; positions ascend.

    Returns:
        [M] the distinct keys, ascending; [M] the first position of the token that follows each of them most often, of
        equals that of the one which stands first; [N] which of the M each of the N has.
    """
    distinct, of_occurrence = np.unique(keys, return_inverse=True)
    _, first, votes = np.unique(_extended(keys, tokens), return_index=True, return_counts=True)
    order = np.lexsort((-first, votes, of_occurrence[first]))
    most_votes = np.searchsorted(of_occurrence[first][order], np.arange(len(distinct)), side="right") - 1
    return distinct, positions[first[order[most_votes]]], of_occurrence


def _seeds(lists: Int64Array) -> UInt64Array:
    """uint64: what the hashes of all suffixes in a list begin with."""
    return _extended(np.zeros(len(lists), np.uint64), lists)


def _extended(keys: UInt64Array, tokens: Int64Array) -> UInt64Array:
    """The hashes of suffixes with one more token at their front, or behind them."""
    mixed: UInt64Array = (keys ^ (tokens + 3).astype(np.uint64)) * _MULTIPLIER
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MULTIPLIER
    return mixed ^ (mixed >> np.uint64(32))
