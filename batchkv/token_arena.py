"""The prompts of a whole job in one flat array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TokenArena:
    """The prompts of all rows, one after the other: row i is `tokens[offsets[i] : offsets[i + 1]]`.

    Attributes:
        tokens: int32 [total].
        offsets: int64 [rows + 1]; a row with an error has no tokens.
    """

    tokens: TokenIds
    offsets: npt.NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Sequence[TokenIds]) -> TokenArena:
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.concatenate([np.empty(0, np.int32), *rows]), offsets)

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row: int64 [rows]."""
        return np.diff(self.offsets)

    def row(self, i: int) -> TokenIds:
        """A view of row i."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def with_rows_dropped(self, rows: Iterable[int]) -> TokenArena:
        """The same arena with `rows` (those that have an error) left without tokens."""
        keep = np.ones(self.num_rows, dtype=np.bool_)
        keep[list(rows)] = False
        offsets = np.zeros_like(self.offsets)
        np.cumsum(np.where(keep, self.lengths, 0), out=offsets[1:])
        return TokenArena(self.tokens[np.repeat(keep, self.lengths)], offsets)
