"""Lists of different lengths as flat arrays, and the padded matrices that trainers want."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Lists of numbers: list `i` is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: of all lists, one behind the other [T].
        offsets: int64 [lists + 1], from 0 to T.
    """

    values: Array
    offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, lists: pa.ChunkedArray) -> Ragged:
        """The lists of a column without nulls, sliced or in several chunks."""
        lengths = pc.list_value_length(lists).to_numpy().astype(np.int64)
        return cls(pc.list_flatten(lists).to_numpy(), _offsets(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, i: int) -> Array:
        """A view of list i."""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Values of each list: int64 [lists]."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> npt.NDArray[np.int64]:
        """Which list each value is of: int64 [T]."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def filled_with(self, value: float, dtype: npt.DTypeLike) -> Ragged:
        """Lists of the same lengths, with one value everywhere."""
        return Ragged(np.full(len(self.values), value, dtype), self.offsets)

    def then(self, other: Ragged) -> Ragged:
        """Each list followed by the list of `other` in the same place. `other` has values of the same type."""
        joined = Ragged(np.empty(len(self.values) + len(other.values), self.values.dtype), self.offsets + other.offsets)
        joined.values[_places(self, joined.offsets[:-1])] = self.values
        joined.values[_places(other, joined.offsets[1:] - other.lengths)] = other.values
        return joined

    def padded(
        self, fill: float, *, width: int | None = None, left: bool = False, dtype: npt.DTypeLike | None = None
    ) -> Array:
        """The lists as rows of a matrix [lists, width].

        Args:
            fill: what stands where a row has no value.
            width: of the matrix; no list may be longer. The longest list's length by default.
            left: fill up in front of the values, not behind them.
            dtype: of the matrix; that of the values by default.
        """
        width = int(self.lengths.max(initial=0)) if width is None else width
        matrix = np.full((len(self), width), fill, self.values.dtype if dtype is None else dtype)
        starts = np.arange(len(self)) * width + (width - self.lengths if left else 0)
        matrix.reshape(-1)[_places(self, starts)] = self.values
        return matrix

    def mask(self, *, width: int | None = None, left: bool = False) -> npt.NDArray[np.int64]:
        """1 where `padded` has a value, 0 where it is filled up: int64 [lists, width]."""
        return self.filled_with(1, np.int64).padded(0, width=width, left=left)

    def lists(self) -> list[list[Any]]:
        """As Python lists."""
        flat, bounds = self.values.tolist(), self.offsets.tolist()
        return [flat[start:end] for start, end in itertools.pairwise(bounds)]


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _places(lists: Ragged, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where each value goes if list `i` is written from `starts[i]` on: int64 [T]."""
    return np.arange(len(lists.values)) + np.repeat(starts - lists.offsets[:-1], lists.lengths)
