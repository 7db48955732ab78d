"""The columns of a `RolloutBatch`, and what has to hold of what stands in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchkv.rl.ragged import Ragged
from batchkv.rl.sampling_columns import SAMPLING_SCHEMA

if TYPE_CHECKING:
    from batchkv.rl.rollout_batch import RolloutBatch

SCHEMA = pa.schema(
    {
        "prompt_index": pa.int32(),
        "sample_index": pa.int32(),
        "prompt_token_ids": pa.list_(pa.int32()),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "finish_reason": pa.string(),
        "truncated": pa.bool_(),
        "env_mask": pa.list_(pa.int8()),
        "seed": pa.uint64(),
        "weight_version": pa.int64(),
        "num_cached_tokens": pa.int32(),
    }
)
"""The columns of a batch. `seed` may be int64 as well; a table may have more columns."""

OPTIONAL_SCHEMA = pa.schema(
    {
        "row": pa.int64(),
        "token_versions": pa.list_(pa.int64()),
        "forked_from": pa.int32(),
        "forked_at": pa.int32(),
        **dict(zip(SAMPLING_SCHEMA.names, SAMPLING_SCHEMA.types, strict=True)),
    }
)
"""Columns that have a meaning if they are there."""

# A value of these belongs to each of `token_ids`.
_OF_TOKENS = ("logprobs", "env_mask", "token_versions", *SAMPLING_SCHEMA.names)

FINISH_REASONS = ("stop", "length", "abort")


def check_batch(batch: RolloutBatch) -> None:
    """Raises ValueError if a column is missing or of another type, or what stands in a row does not fit together."""
    _check_columns(batch.table)
    _check_lists(batch.table, batch.completions)
    _check_values(batch.completions, batch.env_mask, batch.logprobs)
    _check_sampling(batch)
    _check_reasons(batch.table["finish_reason"])


def _check_columns(table: pa.Table) -> None:
    """Raises ValueError if a column of `SCHEMA` is missing, or one that is there is of another type or has nulls."""
    for name, wanted in (*_columns(SCHEMA), *_columns(OPTIONAL_SCHEMA)):
        if name not in table.column_names:
            if name in OPTIONAL_SCHEMA.names:
                continue
            raise ValueError(f"the table has no column {name!r}; it needs {', '.join(SCHEMA.names)}")
        column = table[name]
        if not (_same(column.type, wanted) or (name == "seed" and column.type == pa.int64())):
            raise ValueError(f"column {name!r} is of type {column.type}, not {wanted}")
        if column.null_count:
            raise ValueError(f"row {_first_null(column)}: {name} is null")


def _columns(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    return list(zip(schema.names, schema.types, strict=True))


def _same(dtype: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether two types are the same, whatever the values of lists are called (Parquet calls them `element`)."""
    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(dtype) and _same(dtype.value_type, wanted.value_type))
    return bool(dtype == wanted)


def _check_lists(table: pa.Table, tokens: Ragged) -> None:
    """Raises ValueError if lists have nulls or lengths that differ from those of `token_ids`."""
    of_tokens = [name for name in _OF_TOKENS if name in table.column_names]
    for name in ("prompt_token_ids", "token_ids", *of_tokens):
        values = pc.list_flatten(table[name])
        if values.null_count:
            row = int(np.repeat(np.arange(len(tokens)), _lengths(table[name]))[_first_null(values)])
            raise ValueError(f"row {row}: a value of {name} is null")
    for name in of_tokens:
        lengths = _lengths(table[name])
        wrong = np.flatnonzero(lengths != tokens.lengths)
        if wrong.size:
            row = int(wrong[0])
            raise ValueError(f"row {row}: {name} has {lengths[row]} values for {tokens.lengths[row]} token_ids")


def _check_values(tokens: Ragged, env_mask: Ragged, logprobs: Ragged) -> None:
    """Raises ValueError if a mask is not 0 or 1, a log-probability is not finite, or one is not of a model's token."""
    from_model = env_mask.values == 1
    _refuse(~from_model & (env_mask.values != 0), "env_mask", "must be 0 or 1", env_mask)
    _check_models("logprobs", logprobs, from_model)
    _refuse(tokens.values < 0, "token_ids", "must be at least 0", tokens)


def _check_sampling(batch: RolloutBatch) -> None:
    """Raises ValueError if what tokens were drawn from cannot be so."""
    tokens, from_model = batch.completions, batch.env_mask.values == 1
    if (logprobs := batch.sampling_logprobs) is not None:
        _check_models("sampling_logprobs", logprobs, from_model)
    if (entropies := batch.entropies) is not None:
        _check_models("entropies", entropies, from_model)
        _refuse(entropies.values < 0, "entropies", "must be at least 0", entropies)
    if "kept_token_ids" in batch.table.column_names:
        lists = by_token(batch.table["kept_token_ids"])
        if (ids := pc.list_flatten(lists)).null_count:
            row = int(np.repeat(tokens.owners, _lengths(lists))[_first_null(ids)])
            raise ValueError(f"row {row}: an id in kept_token_ids is null")
        kept = Ragged.of(lists)
        is_there = np.bincount(kept.owners[kept.values == tokens.values[kept.owners]], minlength=len(kept)) > 0
        _refuse((kept.lengths > 0) & ~is_there, "token_ids", "must be among its kept_token_ids", tokens)
        _refuse((kept.lengths > 0) & ~from_model, "token_ids", "of the environment has kept_token_ids", tokens)


def _check_reasons(column: pa.ChunkedArray) -> None:
    known = pc.is_in(column, pa.array(FINISH_REASONS)).to_numpy()
    if not known.all():
        row = int(np.argmin(known))
        raise ValueError(f"row {row}: finish_reason {column[row].as_py()!r} is not one of {', '.join(FINISH_REASONS)}")


def _check_models(name: str, numbers: Ragged, from_model: npt.NDArray[np.bool_]) -> None:
    """Raises ValueError if one is not finite, or is of a token that is not the model's."""
    _refuse(~np.isfinite(numbers.values), name, "must be finite", numbers)
    _refuse(~from_model & (numbers.values != 0), name, "must be 0 for tokens of the environment", numbers)


def _refuse(where: npt.NDArray[np.bool_], name: str, rule: str, lists: Ragged) -> None:
    if where.any():
        place = int(np.argmax(where))
        raise ValueError(f"row {lists.owners[place]}: {name} {rule}, not {lists.values[place].item()!r}")


def by_token(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Of lists of lists, the inner ones, one behind the other."""
    return pc.list_flatten(column)


def _lengths(lists: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    return np.asarray(pc.list_value_length(lists).to_numpy(), np.int64)


def _first_null(column: pa.ChunkedArray) -> int:
    return int(np.argmax(column.is_null().to_numpy()))
