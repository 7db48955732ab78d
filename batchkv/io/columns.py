"""The columns of the job format, and the two forms their cells come in."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchkv.errors import UserError

ID_COLUMN = "id"
TOKEN_IDS_COLUMN = "prompt_token_ids"
PROMPT_COLUMNS = ("prompt", "messages", TOKEN_IDS_COLUMN)
PARAMETER_COLUMNS = (
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "choices",
    "regex",
    "json_schema",
    "choice_mode",
)
PARAMETER_STRUCT = "sampling_params"
TENANT_COLUMN = "tenant"
CONTINUATION_COLUMN = "continuation"
DEPENDENCY_COLUMNS = ("parent", "parent_sample", "depends_on")
JOB_COLUMNS = frozenset(
    (
        ID_COLUMN,
        *PROMPT_COLUMNS,
        *PARAMETER_COLUMNS,
        PARAMETER_STRUCT,
        TENANT_COLUMN,
        CONTINUATION_COLUMN,
        *DEPENDENCY_COLUMNS,
    )
)
RESULT_COLUMNS = (
    "id",
    "sample_index",
    "text",
    "token_ids",
    "finish_reason",
    "logprobs",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_generated_tokens",
    "error_code",
    "error",
)

REQUEST_COLUMNS = ("custom_id", "method", "url", "body")  # of OpenAI Batch files

# A job column of JSON lines stays a list of Python values: there every line may hold another type, and one
# odd line must not spoil the column for the others. All other columns have an Arrow type.
Column: TypeAlias = "pa.ChunkedArray | list[Any]"


def is_batch(names: Collection[str]) -> bool:
    """Whether a job with columns of these names is one of OpenAI Batch requests."""
    return "custom_id" in names and "body" in names and not any(name in names for name in PROMPT_COLUMNS)


def to_cells(column: Column) -> list[Any]:
    """The cells as Python values, null as None."""
    return column if isinstance(column, list) else column.to_pylist()


def is_given(column: Column) -> npt.NDArray[np.bool_]:
    """Which cells are not null: bool [rows]."""
    if isinstance(column, list):
        return np.fromiter((cell is not None for cell in column), dtype=np.bool_, count=len(column))
    given: npt.NDArray[np.bool_] = column.is_valid().to_numpy()
    return given


def is_string(dtype: pa.DataType) -> bool:
    return dtype in (pa.string(), pa.large_string(), pa.string_view())


def is_list(dtype: pa.DataType) -> bool:
    """Whether `dtype` is any of Arrow's list types."""
    return isinstance(
        dtype, (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)
    )


def decoded(column: Column) -> Column:
    """The column without a dictionary: a pandas or polars categorical is its plain values.

    Runs of equal values are written out, too, of a type that someone else has defined its storage is taken, and views
    are copied: Arrow can do little with those.
    """
    if isinstance(column, list) or _is_plain(column.type):
        return column
    chunks = [_decoded_chunk(chunk) for chunk in column.chunks]
    if not chunks:
        chunks = [_decoded_chunk(pa.nulls(0, column.type))]
    return decoded(pa.chunked_array(chunks))


def _is_plain(dtype: pa.DataType) -> bool:
    is_encoded = pa.types.is_dictionary(dtype) or pa.types.is_run_end_encoded(dtype) or dtype in _PLAIN_OF_VIEW
    return not is_encoded and not isinstance(dtype, pa.BaseExtensionType)


_PLAIN_OF_VIEW = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def _decoded_chunk(chunk: pa.Array) -> pa.Array:
    if isinstance(chunk, pa.ExtensionArray):
        return chunk.storage
    if chunk.type in _PLAIN_OF_VIEW:
        return chunk.cast(_PLAIN_OF_VIEW[chunk.type])
    if pa.types.is_run_end_encoded(chunk.type):
        return pc.run_end_decode(chunk)
    # Not a cast, which there is not for nested values.
    return chunk.dictionary.take(chunk.indices) if pa.types.is_dictionary(chunk.type) else chunk


def readable(name: str, column: pa.ChunkedArray, where: str) -> Column:
    """A job column as its readers take it: decoded, and with cells that can become Python values.

    Raises:
        UserError: they cannot, as times that Python has no type for; the column begins at `where`.
    """
    try:
        plain = decoded(column)
        if not isinstance(plain, list) and _holds_times(plain.type):
            plain.to_pylist()
    except (ValueError, OverflowError, TypeError, NotImplementedError, SystemError):
        raise UserError(
            f"{where}: column {name!r} is {shown_type(column.type)} and holds values that cannot be read: "
            "cast it to the type that the job format has for it"
        ) from None
    return plain


def _holds_times(dtype: pa.DataType) -> bool:
    """Whether `dtype` holds dates, times or what else has values that Python has not, at any depth."""
    if dtype.num_fields and _is_plain(dtype):
        return any(_holds_times(dtype.field(i).type) for i in range(dtype.num_fields))
    if not _is_plain(dtype) and dtype not in _PLAIN_OF_VIEW:
        inner = dtype.storage_type if isinstance(dtype, pa.BaseExtensionType) else dtype.value_type
        return _holds_times(inner)
    return bool(pa.types.is_temporal(dtype))


def distinct(column: Column) -> tuple[npt.NDArray[np.int64], list[Any]]:
    """The different cells, and which of them each row holds: (int64 [rows], values).

    Cells differ when Python shows them differently: 1, 1.0 and True are three cells.
    """
    column = decoded(column)
    if not isinstance(column, list) and not pa.types.is_nested(column.type):
        encoded = column.combine_chunks().dictionary_encode("encode")
        return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()
    codes: dict[str, int] = {}
    values: list[Any] = []
    row_codes = np.empty(len(column), dtype=np.int64)
    for row, cell in enumerate(to_cells(column)):
        code = codes.setdefault(repr(cell), len(values))
        if code == len(values):
            values.append(cell)
        row_codes[row] = code
    return row_codes, values


def storable(array: pa.Array) -> pa.Array:
    """The array with its empty structs, at any depth, turned into nulls: Parquet cannot store them."""
    if not _has_empty_struct(array.type):
        return array
    valid = array.is_valid()
    if pa.types.is_struct(array.type) and array.type.num_fields:
        children = [storable(child) for child in array.flatten()]
        names = [field.name for field in array.type]
        return pa.StructArray.from_arrays(children, names, mask=pc.invert(valid))
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        lists = pa.LargeListArray if pa.types.is_large_list(array.type) else pa.ListArray
        offsets = pa.array(array.offsets.to_numpy())  # copied: a mask is not allowed beside sliced offsets
        return lists.from_arrays(offsets, storable(array.values), mask=pc.invert(valid))
    return pa.nulls(len(array))


def _has_empty_struct(dtype: pa.DataType) -> bool:
    if pa.types.is_struct(dtype):
        return dtype.num_fields == 0 or any(_has_empty_struct(field.type) for field in dtype)
    if pa.types.is_map(dtype):
        return _has_empty_struct(dtype.item_type)
    return is_list(dtype) and _has_empty_struct(dtype.value_type)


def shown(value: object, width: int = 80) -> str:
    """`value` as a message shows it: its repr, cut to `width` characters."""
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 1]}…"


def shown_type(dtype: pa.DataType) -> str:
    """A type as a message shows it: of one with thousands of fields not all."""
    return one_line(str(dtype), 80)


def shown_names(names: Iterable[str], most: int = 20) -> str:
    """Names of columns as a message lists them; there can be thousands, with anything in them."""
    all_names = list(names)
    listed = ", ".join(one_line(name, 40) for name in all_names[:most])
    return listed if len(all_names) <= most else f"{listed} and {len(all_names) - most} more"


def one_line(text: str, width: int = 200) -> str:
    """The first line of a text, cut to `width` characters, with what cannot be printed written as an escape."""
    line = next(iter(text.strip().splitlines()), "")[: width + 1]
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    return line if len(line) <= width else f"{line[: width - 1]}…"


def kind_of(value: object) -> str:
    """What kind of JSON value `value` is, in words, for messages that must not quote it."""
    kinds = ((bool, "true or false"), ((int, float), "a number"), (str, "a string"), (list, "a list"))
    return next((name for types, name in kinds if isinstance(value, types)), "an object")
