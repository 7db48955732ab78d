"""The prompts of a whole job in one flat array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


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
        return cls(tokens, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]), lengths)

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
