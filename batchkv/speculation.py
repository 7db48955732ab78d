"""How many drafted tokens go into a step: as many as can be expected to pay.

A pass over T tokens costs about as much as `T + FIXED_TOKENS` tokens would if weights came for nothing. Without drafts
a step gives a token to each decode row and prefills the rest: T tokens of work for T + FIXED_TOKENS. A drafted token
adds 1 to the cost, and to the work the chance that it and all before it are what is sampled. So the likeliest come
first, each only if it makes the work larger in proportion to the cost:

    chance ≥ work / cost        8 rows, nothing drafted yet: 8 / (8 + 24) = 0.25        100 rows: 0.81

In wide steps only what is almost certain is drafted; a straggler gets long drafts. Where drafts fail the chances sink,
and then nothing is drafted. What was seen is forgotten by and by, so it is tried again, rarely.

Chances come from what happened in this run: to tokens behind suffixes of each length, and to each sequence lately.
Times are not looked at, so a run is the same every time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchkv.drafts import LONGEST_SUFFIX, START, Drafts
from batchkv.sequence import GeneratedTokens
from batchkv.step import Drafted

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

FIXED_TOKENS = 24  # measured on CPUs with SmolLM2-135M: passes of 1 and of 32 tokens take as long, 64 twice that
MOST_DRAFTED = 31  # of one sequence in one step; with the token that is known, two multiples of the rows of a pass
LEAST_GAIN = 1 / 8  # tokens of a row in a step: less is not worth that the device waits for the host
_HOPE, _HOPE_WEIGHT = 0.95, 4.0  # before anything is known: so many tokens, of which this share was right
_RUN_WEIGHT = 4.0  # what the run knows weighs as much as so many tokens of a sequence's own
_RUN_FORGETS, _SEQUENCE_FORGETS = 1 / 128, 1 / 16  # of what was seen, in each step


class Speculation:
    """Drafts of a run, and what came of them.

    Costs some numpy operations over the rows of a step, about 0.1 ms; less while it is off.

    Args:
        drafts: where they come from.
        generated: the tokens of the sequences so far.
        may_have: bool [sequences], who may be given any.
    """

    def __init__(self, drafts: Drafts, generated: GeneratedTokens, may_have: npt.NDArray[np.bool_]) -> None:
        if len(drafts.of_sequence) != len(may_have):
            raise ValueError(
                f"drafts are for {len(drafts.of_sequence)} sequences, the plan has {len(may_have)}: "
                "make them from the plan's own table"
            )
        self._index, self._generated = drafts.references.index, generated
        self._list = np.where(may_have, drafts.of_sequence, -1)
        self._seen, self._right = (np.zeros(LONGEST_SUFFIX + 1) for _ in range(2))  # by length of the suffix
        self._own_seen, self._own_right = (np.zeros(len(may_have)) for _ in range(2))
        self._rows, self._gained = 0.0, 0.0  # rows that could be given drafts, and tokens that were right

    def propose(self, sequences: Int64Array, room: Int64Array, work: int, budget: int) -> Drafted | None:
        """Drafts for a step, with places for all R sequences in order; None if nobody gets one.

        Args:
            sequences: int64 [R], all that have a decode row.
            room: int64 [R], most tokens for each.
            work: tokens of the step without drafts.
            budget: most drafted tokens in all.
        """
        self._forget(sequences)
        rates = self._rates()
        could = (self._list[sequences] >= 0) & (room > 0)
        self._rows += float(could.sum())
        hope = self._blended(sequences, np.full(len(sequences), rates.max()))
        at = np.flatnonzero(could & (hope * (work + FIXED_TOKENS) >= work))
        if budget <= 0 or not len(at):
            return None
        asked = sequences[at]
        suffixes = self._generated.newest(asked, LONGEST_SUFFIX, START)
        found, matched = self._index.find(self._list[asked], suffixes)
        lengths = np.minimum(matched[:, None] + np.arange(MOST_DRAFTED), LONGEST_SUFFIX)
        chances = np.cumprod(self._blended(asked[:, None], rates[lengths]), axis=1, dtype=np.float64)
        chances[np.arange(MOST_DRAFTED) >= np.where(matched > 0, room[at], 0)[:, None]] = 0
        counts = worthwhile(chances, work, budget)
        if not counts.any():
            return None
        # the last token of a completion is not drafted: if it is sampled, the sequence mostly ends with it
        tokens = self._index.follow(np.maximum(found, 0), int(counts.max()) + 1)
        tokens, goes_on = tokens[:, :-1], tokens[:, 1:] >= 0
        taken = (np.arange(tokens.shape[1]) < counts[:, None]) & goes_on
        if not taken.any():
            return None
        of_row = np.zeros(len(sequences), np.int64)
        of_row[at] = taken.sum(axis=1)
        return Drafted.of(of_row, tokens[taken], lengths[:, : tokens.shape[1]][taken])

    def learn(self, sequences: Int64Array, matched: Int64Array, is_right: npt.NDArray[np.bool_]) -> None:
        """Takes note of what came of N drafted tokens: of those that were compared with the one that was sampled.

        Args:
            sequences: int64 [N], whose they were.
            matched: int64 [N], length of the suffix that each was found behind.
            is_right: bool [N], whether the same was sampled.
        """
        np.add.at(self._seen, matched, 1)
        np.add.at(self._right, matched, is_right)
        np.add.at(self._own_seen, sequences, 1)
        np.add.at(self._own_right, sequences, is_right)
        self._gained += float(is_right.sum())

    def is_worth_waiting(self, sequences: Int64Array) -> bool:
        """Whether to wait for the newest tokens of these sequences, so as to draft what follows.

        It is if drafts have lately given a row a share of a token more in each step.
        """
        gain = (self._gained + _HOPE * _HOPE_WEIGHT) / (self._rows + _HOPE_WEIGHT)
        return gain >= LEAST_GAIN and bool((self._list[sequences] >= 0).any())

    def _forget(self, sequences: Int64Array) -> None:
        for counts in (self._seen, self._right):
            counts *= 1 - _RUN_FORGETS
        self._rows, self._gained = self._rows * (1 - _RUN_FORGETS), self._gained * (1 - _RUN_FORGETS)
        for counts in (self._own_seen, self._own_right):
            counts[sequences] *= 1 - _SEQUENCE_FORGETS

    def _rates(self) -> Float64Array:
        """float64 [LONGEST_SUFFIX + 1]: the share of tokens that were right, by length of the suffix."""
        rates: Float64Array = (self._right + _HOPE * _HOPE_WEIGHT) / (self._seen + _HOPE_WEIGHT)
        return rates

    def _blended(self, sequences: Int64Array, rates: Float64Array) -> Float64Array:
        """What each sequence may expect, where the run as a whole may expect `rates`."""
        seen, right = self._own_seen[sequences], self._own_right[sequences]
        blended: Float64Array = (right + _RUN_WEIGHT * rates) / (seen + _RUN_WEIGHT)
        return blended


def worthwhile(chances: Float64Array, work: int, budget: int) -> Int64Array:
    """int64 [R]: how many tokens to draft for each row.

    Args:
        chances: float64 [R, K], that each token and all before it are right: falling in each row; 0 is no token.
        work: tokens of the step without drafts.
        budget: most drafted tokens in all.
    """
    order = np.argsort(-chances, axis=None, kind="stable")[:budget]
    chance = chances.ravel()[order]
    gained = work + np.cumsum(chance) - chance
    pays = (chance * (work + FIXED_TOKENS + np.arange(len(order))) >= gained) & (chance > 0)
    number = len(order) if pays.all() else int(np.argmin(pays))
    return np.bincount(order[:number] // chances.shape[1], minlength=len(chances))
