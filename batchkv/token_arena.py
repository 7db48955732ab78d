"""The prompts of a whole job in one flat array."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]

_SCATTERED_ROWS = 1 << 5  # some 2 MiB of pages
_ROWS_TAKEN = 1 << 12  # rows copied at once: bounds the temporaries


@dataclass(frozen=True, slots=True)
class TokenArena:
    """The prompts of all rows, one after the other: row i is `tokens[offsets[i] : offsets[i] + lengths[i]]`.

    Attributes:
        tokens: int32 [total]; can be a view of the job's own memory, so nobody writes to it.
        offsets: int64 [rows + 1], where each row's tokens begin and the last one's end.
        lengths: int64 [rows], tokens of each row. A row with an error has none; what it had before stays in
            `tokens`, where nobody looks at it: to close the gap, all tokens would have to be copied.
    """

    tokens: TokenIds
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Sequence[TokenIds]) -> TokenArena:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return cls.from_lengths(np.concatenate([np.empty(0, np.int32), *rows]), lengths)

    @classmethod
    def from_lengths(cls, tokens: TokenIds, lengths: npt.NDArray[np.int64]) -> TokenArena:
        """Rows of `lengths` [rows] that lie one after the other in `tokens`."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(tokens, offsets, lengths)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def row(self, i: int) -> TokenIds:
        """A view of row i."""
        return self.tokens[self.offsets[i] : self.offsets[i] + self.lengths[i]]

    def with_rows_dropped(self, rows: Iterable[int]) -> TokenArena:
        """The same arena with `rows` (those that have an error) left without tokens."""
        lengths = self.lengths.copy()
        lengths[np.fromiter(rows, np.int64)] = 0
        return replace(self, lengths=lengths)

    def tokens_outside(self, vocab_size: int) -> tuple[npt.NDArray[np.int64], TokenIds]:
        """The rows (dropped ones too) with a token id that is not in `[0, vocab_size)`, and the first of these ids."""
        positions = np.flatnonzero(self.tokens.view(np.uint32) >= vocab_size)  # unsigned, negative ids are the largest
        rows, first = np.unique(np.searchsorted(self.offsets, positions, side="right") - 1, return_index=True)
        return rows, self.tokens[positions[first]]

    def take(self, rows: npt.NDArray[np.int64]) -> TokenArena:
        """An arena of `rows` of this one, in that order; a row without tokens for -1."""
        if len(rows) == self.num_rows and np.array_equal(rows, np.arange(self.num_rows)):
            return self
        lengths = np.zeros(len(rows), np.int64)
        lengths[rows >= 0] = self.lengths[rows[rows >= 0]]
        taken = TokenArena.from_lengths(np.empty(int(lengths.sum()), np.int32), lengths)
        for lo in range(0, len(rows), _ROWS_TAKEN):
            hi = min(lo + _ROWS_TAKEN, len(rows))
            to = taken.offsets[lo:hi]
            at = np.arange(to[0], taken.offsets[hi]) + np.repeat(self.offsets[rows[lo:hi]] - to, lengths[lo:hi])
            taken.tokens[to[0] : taken.offsets[hi]] = self.tokens[at]
        return taken


def take_scattered(arena: TokenArena, rows: npt.NDArray[np.int64], after_piece: Callable[[], None]) -> TokenArena:
    """`arena.take(rows)` where the tokens are in a mapped file and the rows anywhere in it.

    The system maps some pages around each that is read, so after a few rows `after_piece` can let go of them.
    """
    pieces = []
    for start in range(0, max(len(rows), 1), _SCATTERED_ROWS):
        pieces.append(arena.take(rows[start : start + _SCATTERED_ROWS]))
        after_piece()
    return joined(pieces)


def joined(arenas: Sequence[TokenArena]) -> TokenArena:
    """The rows of all `arenas`, one after the other."""
    if len(arenas) == 1:
        return arenas[0]
    ends = np.cumsum([len(arena.tokens) for arena in arenas])
    starts = [arena.offsets[:-1] + end - len(arena.tokens) for arena, end in zip(arenas, ends, strict=True)]
    return TokenArena(
        np.concatenate([arena.tokens for arena in arenas]),
        np.concatenate([*starts, ends[-1:]]),
        np.concatenate([arena.lengths for arena in arenas]),
    )
