"""Flat arrays that are written block by block to files without a name, and then mapped."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Scalar = TypeVar("Scalar", bound=np.generic)


class ArrayWriter(Generic[Scalar]):
    """An array in the making.

    Args:
        dtype: of the elements.
        folder: on whose disk it lies; None is the system's for temporary files.

    Raises:
        OSError: the disk is full; as `append` and `finish`.
    """

    def __init__(self, dtype: type[Scalar], folder: Path | None) -> None:
        self._dtype = dtype
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115 (closed by `finish`)

    def append(self, elements: npt.NDArray[Scalar]) -> None:
        """Adds `elements` [any number] behind those that are there."""
        self._file.write(np.ascontiguousarray(elements, self._dtype).data)

    def finish(self) -> npt.NDArray[Scalar]:
        """All elements, which nobody can write to. The file is there as long as the array is used."""
        with self._file as file:
            if not file.tell():
                return np.zeros(0, self._dtype)
            file.flush()
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), self._dtype)


def release_pages(arrays: Iterable[npt.NDArray[Any]]) -> None:
    """Lets the system have back the memory in which parts of mapped arrays are; they are read again if needed."""
    for array in arrays:
        view: object = array.base
        if isinstance(view, memoryview) and isinstance(view.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            view.obj.madvise(mmap.MADV_DONTNEED)


def without_repeats(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """The same to be read, in no memory to speak of if all elements are equal."""
    if len(array) and (array == array[0]).all():
        return np.broadcast_to(array[0].copy(), array.shape)
    return array
