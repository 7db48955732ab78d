"""Small job files of every format, from which mutations start. All text of rows holds `MARK`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

MARK = "Zq9SecretZq9"  # no message may quote it

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobFile:
    """The content of a job file, and the ending that tells its format."""

    suffix: str
    content: bytes


def _said(text: str) -> str:
    return f"{MARK} {text}"


def plain_rows() -> list[Row]:
    """Prompts of all kinds, with all parameters but constraints."""
    return [
        {"id": "a", "prompt": _said("the one"), "n": 2, "max_tokens": 4, "temperature": 0.5, "seed": 1},
        {"id": "b", "messages": [{"role": "system", "content": _said("be")}, {"role": "user", "content": _said("x")}]},
        {"id": "c", "prompt_token_ids": [7, 8, 9], "top_p": 0.5, "top_k": 3, "min_p": 0.1, "logprobs": True},
        {"id": "d", "prompt": _said("the two"), "stop": ["\n", "end"], "stop_token_ids": [3], "ignore_eos": True},
        {"id": "e", "prompt": _said("the one"), "continuation": _said("and"), "tenant": "t1"},
        {"id": "f", "prompt": _said("the one"), "tenant": "t2", "sampling_params": {"n": 3, "temperature": 1.0}},
        {"id": "g", "messages": [{"role": "user", "content": [{"type": "text", "text": _said("part")}]}]},
    ]


def dependent_rows() -> list[Row]:
    """Rows that continue others, or use their outputs."""
    return [
        {"id": "a", "prompt": _said("first"), "n": 2},
        {"id": "b", "prompt": _said("more"), "parent": "a", "parent_sample": 1},
        {"id": "c", "prompt": _said('of {{ outputs["a"] }}'), "depends_on": ["a"]},
        {"id": "d", "prompt": _said("{{ outputs['b'] }}{% for x in samples['a'] %}{{ x }}{% endfor %}"),
         "depends_on": ["a", "b"]},
        {"id": "e", "prompt": _said("{% for x in range(10**10) %}x{% endfor %}"), "depends_on": ["d"]},
    ]  # fmt: skip


def constrained_rows() -> list[Row]:
    """One row of each constraint."""
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    return [
        {"id": 1, "prompt": _said("one"), "choices": ["yes", "no"], "regex": None, "json_schema": None},
        {"id": 2, "prompt": _said("two"), "choices": None, "regex": "[a-z]{1,5}", "json_schema": None},
        {"id": 3, "prompt": _said("three"), "choices": None, "regex": None, "json_schema": schema},
    ]


def carried_rows() -> list[Row]:
    """Columns that are copied to the result, nested ones among them."""
    return [
        {"prompt": _said(str(i)), "x": i, "y": i / 3, "z": _said("kept"), "list": [[i], []], "when": None,
         "struct": {"a": {"b": _said("deep")}, "c": [1, i]}, "flag": i % 2 == 0}
        for i in range(5)
    ]  # fmt: skip


def batch_rows() -> list[Row]:
    """Requests of an OpenAI batch."""
    body = {"model": "m", "messages": [{"role": "user", "content": _said("hello")}], "max_tokens": 3}
    return [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(3)]


def json_lines(rows: list[Row]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@cache
def tables() -> list[pa.Table]:
    """All rows but those of OpenAI batches as Arrow tables."""
    plain = [{**row} for row in plain_rows()]
    plain[-1]["messages"] = [{"role": "user", "content": _said("part")}]
    names = list(dict.fromkeys(name for row in plain for name in row))
    wide = pa.table({name: pa.array([row.get(name) for row in plain]) for name in names})
    dependent = [{"parent": None, "parent_sample": None, "depends_on": None} | row for row in dependent_rows()]
    few = [pa.Table.from_pylist(rows) for rows in (dependent, constrained_rows(), carried_rows())]
    return [wide, *few, _encoded_table()]


def _encoded_table() -> pa.Table:
    """Columns of less usual types: dictionaries, views, large lists, maps, decimals, times, bytes."""
    texts = [_said(str(i % 2)) for i in range(6)]
    return pa.table(
        {
            "id": pa.array(range(6), pa.uint64()),
            "prompt": pa.array(texts).dictionary_encode(),
            "tenant": pa.array(["t", None] * 3, pa.large_string()),
            "stop": pa.array([["x"], []] * 3, pa.large_list(pa.string())),
            "n": pa.array([1, 2] * 3, pa.int8()),
            "map": pa.array([[("k", 1)], []] * 3, pa.map_(pa.string(), pa.int64())),
            "decimal": pa.array([1, None] * 3, pa.decimal128(20, 2)),
            "time": pa.array([0, 1] * 3, pa.timestamp("us", "UTC")),
            "bytes": pa.array([b"\xff\x00", b""] * 3),
            "fixed": pa.array([[1, 2]] * 6, pa.list_(pa.int16(), 2)),
        }
    )


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def arrow_file(table: pa.Table, compression: str | None = None, *, stream: bool = False, rows: int = 3) -> bytes:
    sink = io.BytesIO()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


_PARQUET_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"compression": "none", "use_dictionary": False, "row_group_size": 2},
    {"compression": "zstd", "data_page_version": "2.0", "row_group_size": 3},
    {"compression": "gzip", "use_dictionary": False, "write_statistics": False},
    {"compression": "lz4", "store_schema": False, "data_page_size": 64},
    {"compression": "none", "write_page_index": True, "write_page_checksum": True},
)


def _arrow_files() -> Iterator[JobFile]:
    for number, table in enumerate(tables()):
        for options in _PARQUET_OPTIONS if number != 1 else _PARQUET_OPTIONS[:2]:
            yield JobFile(".parquet", parquet(table, **options))
        for compression in (None, "lz4", "zstd"):
            yield JobFile(".arrow", arrow_file(table, compression))
            yield JobFile(".ipc", arrow_file(table, compression, stream=True))
        sink = io.BytesIO()
        feather.write_feather(table, sink)
        yield JobFile(".feather", sink.getvalue())


def encoded_parquet() -> list[JobFile]:
    """Integers and strings in the encodings that are not the default."""
    table = pa.table({"id": range(20), "prompt": [_said(str(i)) for i in range(20)], "y": [i / 7 for i in range(20)]})
    encodings = (
        {"id": "DELTA_BINARY_PACKED", "prompt": "DELTA_BYTE_ARRAY", "y": "BYTE_STREAM_SPLIT"},
        {"id": "PLAIN", "prompt": "DELTA_LENGTH_BYTE_ARRAY", "y": "PLAIN"},
    )
    return [
        JobFile(".parquet", parquet(table, use_dictionary=False, column_encoding=each, compression="none"))
        for each in encodings
    ]


@cache
def seed_files() -> tuple[JobFile, ...]:
    """The corpus. Constraints, which a compiler has to look at, are few in it: each takes a while."""
    lines = [
        JobFile(".jsonl", json_lines(rows))
        for rows in (plain_rows(), dependent_rows(), carried_rows(), batch_rows(), constrained_rows())
    ]
    return (*lines, *lines[:2], *_arrow_files(), *encoded_parquet())
