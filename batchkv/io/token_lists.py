"""Lists of token ids in Arrow: any type of integers as int32, and no more memory than that."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchkv.io.columns import is_list

_CAST_TOKENS = 1 << 20  # made int32 at once: bounds the temporaries to some 20 MB


def holds_integers(dtype: pa.DataType) -> bool:
    """Whether `dtype` is a list of integers; a list of nulls is what Arrow makes of empty lists alone."""
    return is_list(dtype) and (pa.types.is_integer(dtype.value_type) or pa.types.is_null(dtype.value_type))


def list_lengths(lists: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Values of each list, none for null: int64 [rows]."""
    lengths: npt.NDArray[np.int64] = pc.list_value_length(lists).fill_null(0).to_numpy().astype(np.int64)
    return lengths


def as_int32(values: pa.Array) -> npt.NDArray[np.int32]:
    """Integers as int32, -1 for null and for what does not fit or is negative; a view if all are int32 already."""
    if values.type == pa.int32() and not values.null_count:
        return values.to_numpy()  # type: ignore[no-any-return]
    tokens = np.empty(len(values), dtype=np.int32)
    for start in range(0, len(values), _CAST_TOKENS):
        # Unsafe: an unsigned id too big wraps to a negative one, an error of its row and not of the column.
        wide = values.slice(start, _CAST_TOKENS).cast(pa.int64(), safe=False).fill_null(-1).to_numpy()
        tokens[start : start + _CAST_TOKENS] = np.where((wide < 0) | (wide >= 1 << 31), -1, wide)
    return tokens


def joined(chunks: Iterable[pa.Array], most_values: int) -> pa.LargeListArray:
    """The lists of all `chunks`, which hold no more than `most_values`, as one array of int32.

    Each chunk is copied to its place and let go before the next is made, so there is one copy and no second.
    """
    tokens = np.empty(most_values, dtype=np.int32)
    filled = 0
    lengths, is_null = [np.zeros(1, dtype=np.int64)], [pa.array([], pa.bool_())]
    for chunk in chunks:
        values = as_int32(pc.list_flatten(chunk))
        tokens[filled : filled + len(values)] = values
        filled += len(values)
        lengths.append(list_lengths(chunk))
        is_null.append(chunk.is_null())
    offsets = pa.array(np.cumsum(np.concatenate(lengths)))
    return pa.LargeListArray.from_arrays(offsets, pa.array(tokens[:filled]), mask=pa.concat_arrays(is_null))
