"""Inputs made from the corpus: bytes that are wrong, and values that are wrong in files that are right."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from batchkv.io.columns import JOB_COLUMNS
from tests.fuzz import seeds
from tests.fuzz.seeds import MARK, JobFile, Row

_EXTREMES = (0, 1, -1, 127, 255, 2**15, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, -(2**63))


def make_input(seed: int, number: int) -> JobFile:
    """The input with a number: the same in every run with the same seed."""
    rng = random.Random(f"{seed} {number}")
    kind = rng.random()
    if kind < 0.6:
        return _with_wrong_bytes(rng, rng.choice(seeds.seed_files()))
    if kind < 0.8:
        return JobFile(rng.choice((".jsonl", ".ndjson")), wrong_lines(rng))
    made = _wrong_table(rng)
    return made if rng.random() < 0.7 else _with_wrong_bytes(rng, made)


# Bytes


def _with_wrong_bytes(rng: random.Random, file: JobFile) -> JobFile:
    data = bytearray(file.content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8, 40))):
        if not data:
            break
        rng.choice(_BYTE_MUTATORS)(rng, data)
    return JobFile(file.suffix, bytes(data))


def _place(rng: random.Random, data: bytearray) -> int:
    """Anywhere, or, as likely, in the last part, where Parquet and Arrow have their footers."""
    low = 0 if rng.random() < 0.5 else max(0, len(data) - rng.choice((16, 200, 2000)))
    return rng.randrange(low, len(data))


def _flip(rng: random.Random, data: bytearray) -> None:
    data[_place(rng, data)] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray) -> None:
    data[_place(rng, data)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _cut(rng: random.Random, data: bytearray) -> None:
    at = _place(rng, data)
    del data[at : at + rng.choice((1, 4, 8, 100, len(data)))]


def _insert(rng: random.Random, data: bytearray) -> None:
    at = _place(rng, data)
    data[at:at] = rng.choice((b"\0", b"\0" * 64, rng.randbytes(rng.randrange(1, 20)), b"\xed\xa0\x80", b"\xff\n"))


def _duplicate(rng: random.Random, data: bytearray) -> None:
    at, to = _place(rng, data), _place(rng, data)
    data[to:to] = data[at : at + rng.choice((1, 8, 64, 500))]


def _splice(rng: random.Random, data: bytearray) -> None:
    other = rng.choice(seeds.seed_files()).content
    at, start = _place(rng, data), rng.randrange(len(other))
    length = rng.choice((8, 64, 500, len(other)))
    data[at : at + rng.choice((0, length))] = other[start : start + length]


def _integer(rng: random.Random, data: bytearray) -> None:
    width = rng.choice((4, 8))
    at = _place(rng, data) & (~3 if rng.random() < 0.7 else ~0)
    value = rng.choice(_EXTREMES) + rng.choice((0, 0, 1, -1))
    data[at : at + width] = struct.pack("<q", (value + 2**63) % 2**64 - 2**63)[:width]


def _varint(rng: random.Random, data: bytearray) -> None:
    """Thrift, in the footers and page headers of Parquet, has numbers of 7 bits a byte."""
    at = _place(rng, data)
    data[at : at + rng.choice((1, 2))] = rng.choice(
        (b"\xff\xff\xff\xff\x0f", b"\xfe\xff\xff\xff\xff\x07", b"\x80\x80\x04")
    )


def _length_field(rng: random.Random, data: bytearray) -> None:
    """The length of a Parquet footer, or of an Arrow message."""
    at = len(data) - 8 if rng.random() < 0.5 else max(data.find(b"\xff\xff\xff\xff"), 0) + 4
    if 0 <= at < len(data) - 4:
        data[at : at + 4] = struct.pack("<I", rng.choice(_EXTREMES) % 2**32)


_BYTE_MUTATORS: tuple[Callable[[random.Random, bytearray], None], ...] = (
    _flip, _flip, _flip, _set, _set, _cut, _insert, _duplicate, _splice, _integer, _integer, _varint, _length_field,
)  # fmt: skip

# JSON


def _nested(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + closing * levels


# As text, since not all of them are values of Python that can be written.
_RAW_VALUES = (
    "null", "true", "false", "0", "-1", "1", "3", "2147483648", "9223372036854775808", "18446744073709551616",
    "1000000000000000000", "1" + "0" * 400, "1" + "0" * 5000, "1.5", "-0.0", "NaN", "Infinity", "-Infinity", "1e308",
    "1e-320", "1e999", '""', '"\\u0000"', '"a\\u0000b"', '"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"', "[]",
    "{}", "[[]]", "[null]", "[true]", "[1.5]", '["a", 1]', "[1, 2, 3]", "[-1]", "[99999999999]", '[""]', '["a"]',
    '["a", "a"]', '{"role": "user"}', '[{"role": "user", "content": "x"}]', '[{"role": "king", "content": "x"}]',
    '[{"role": ["user"], "content": "x"}]', '[{"role": {"a": 1}, "content": {}}]',
    '[{"role": "user", "content": null}]',
    '[{"role": "user", "content": [{"type": "image"}]}]',
    '[{"role": "user", "content": [{"type": "text", "text": 1}]}]',
    '"[{\\"role\\": \\"user\\", \\"content\\": \\"\\\\ud800\\"}]"', '"[1"', '"{"', '{"n": 1e99}', '{"n": [], "x": {}}',
    '{"stop": [[]]}', '{"": ""}', '{"a": NaN}', '"a"', '"b"', '"e"', '["b", "c", "d"]', '"\\u2028"', '"2020-01-01"',
    '"{{ outputs[\\"a\\"] }}"', '"{{"', '"{% raw %}"', '{"type": "object"}', '{"$ref": "#"}', '"(a*)*"', '"["',
    _nested(30), _nested(31), _nested(33), _nested(1000), _nested(20_000),
    _nested(40, '{"a":', "}").replace(":}", ":1}"),
    _nested(5000, '{"a":[', "]}"), '"' + "x" * 3000 + '"', '"' + "é" * 70_000 + '"', "[" + "1," * 2000 + "1]",
    "[" + '"s",' * 500 + '"s"]', "{" + ",".join(f'"k{i}":{i}' for i in range(300)) + "}", f'"{MARK}"', f'["{MARK}"]',
    f'{{"a": "{MARK}"}}', "[1", "1 2", "'", "\\", "",
)  # fmt: skip
_KEYS = (*sorted(JOB_COLUMNS), "x", "y", "", "\0", "a\nb", "text", "error", "custom_id", "body", "k" * 2000, "\ud800")


def wrong_lines(rng: random.Random) -> bytes:
    """JSON lines with some values, keys or whole lines replaced."""
    makers = (seeds.plain_rows, seeds.plain_rows, seeds.dependent_rows, seeds.dependent_rows, seeds.carried_rows)
    make = rng.choice(makers) if rng.random() < 0.97 else rng.choice((seeds.constrained_rows, seeds.batch_rows))
    rows = make()
    raws: list[str] = []
    for _ in range(rng.choice((1, 1, 2, 5))):
        _wrong_row(rng, rng.choice(rows), raws)
    if rng.random() < 0.1:
        rows = rows * rng.choice((2, 20))
    text = "\n".join(json.dumps(row) for row in rows)
    for number, raw in enumerate(raws):
        text = text.replace(f'"@{number}@"', raw)
    data = bytearray(text.encode())
    if rng.random() < 0.1:
        rng.choice(_BYTE_MUTATORS)(rng, data)
    return bytes(data) + rng.choice((b"\n", b"\n", b"", b"\r\n", b"\xef\xbb\xbf{}", b"\n\n\0\n"))


def _wrong_row(rng: random.Random, row: Row, raws: list[str]) -> None:
    names = list(row)
    choice = rng.random()
    if choice < 0.15 and names:
        row.pop(rng.choice(names))
    elif choice < 0.3 and names:
        row[rng.choice(_KEYS)] = row[rng.choice(names)]
    else:
        raws.append(rng.choice(_RAW_VALUES))
        holder: Any = row
        key: Any = rng.choice(_KEYS) if rng.random() < 0.4 or not names else rng.choice(names)
        while rng.random() < 0.5 and isinstance(holder, (dict, list)) and _has(holder, key) and holder[key]:
            inner = holder[key]
            if not isinstance(inner, (dict, list)):
                break
            holder, key = inner, rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        holder[key] = f"@{len(raws) - 1}@"


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else True


# Arrow


def _wrong_table(rng: random.Random) -> JobFile:
    tables = seeds.tables()
    table = tables[rng.choice((0, 0, 1, 3, 4)) if rng.random() < 0.97 else 2]
    for _ in range(rng.choice((1, 1, 2, 4))):
        table = rng.choice(_TABLE_MUTATORS)(rng, table)
    try:
        return _written(rng, table)
    except (pa.ArrowException, OSError, ValueError, TypeError, NotImplementedError):  # not every format has every type
        return JobFile(".arrow", seeds.arrow_file(tables[0]))


def _written(rng: random.Random, table: pa.Table) -> JobFile:
    if rng.random() < 0.4:
        return JobFile(".parquet", seeds.parquet(table, row_group_size=rng.choice((1, 3, 100))))
    stream = rng.random() < 0.5
    content = seeds.arrow_file(table, rng.choice((None, "lz4", "zstd")), stream=stream, rows=rng.choice((1, 4, 1000)))
    return JobFile(rng.choice((".arrow", ".feather", ".ipc")), content)


def _put(table: pa.Table, name: str, column: Any) -> pa.Table:
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, column)
    return table.append_column(name, column)


def _any_name(rng: random.Random, table: pa.Table) -> str:
    names = table.column_names
    return rng.choice(names) if names and rng.random() < 0.6 else rng.choice(_KEYS[:-1])


def _other_type(rng: random.Random, table: pa.Table) -> pa.Table:
    make = rng.choice(_ARRAYS)
    return _put(table, _any_name(rng, table), make(table.num_rows))


def _wrapped(rng: random.Random, table: pa.Table) -> pa.Table:
    if not table.column_names:
        return table
    number = rng.randrange(table.num_columns)
    name, column = table.column_names[number], table.column(number).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0)
    try:
        return _put(table, name, rng.choice(_WRAPPERS)(column))
    except (pa.ArrowException, ValueError, TypeError, AttributeError, NotImplementedError):
        return table


def _swapped(rng: random.Random, table: pa.Table) -> pa.Table:
    if not table.column_names:
        return table
    return _put(table, _any_name(rng, table), table.column(rng.randrange(table.num_columns)))


def _renamed(rng: random.Random, table: pa.Table) -> pa.Table:
    names = table.column_names
    if names:
        names[rng.randrange(len(names))] = rng.choice(_KEYS[:-1])
    return table.rename_columns(names)


def _resized(rng: random.Random, table: pa.Table) -> pa.Table:
    choice = rng.random()
    if choice < 0.3:
        return table.slice(0, 0)
    if choice < 0.5:
        return table.select([])
    if choice < 0.7:
        return table.slice(1, 2)
    return pa.concat_tables([table] * rng.choice((2, 40)))


def _unions(rows: int) -> pa.Array:
    types = pa.array([i % 2 for i in range(rows)], pa.int8())
    return pa.UnionArray.from_sparse(types, [pa.array(range(rows)), pa.array([MARK] * rows)])


def _repeated(column: pa.Array, rows: int) -> pa.Array:
    ends = pa.array([rows], pa.int32()) if rows else pa.array([], pa.int32())
    return pa.RunEndEncodedArray.from_arrays(ends, column.slice(0, 1 if rows else 0))


def _cells(cell: Any, dtype: pa.DataType | None = None) -> Callable[[int], pa.Array]:
    return lambda rows: pa.array([cell] * rows, dtype)


_ARRAYS: tuple[Callable[[int], pa.Array], ...] = (
    pa.nulls, _unions, _cells(True), _cells(2**63 - 1), _cells(2**64 - 1, pa.uint64()), _cells(-1), _cells(10**18),
    _cells(float("nan")), _cells(float("inf")), _cells(1e308), _cells(0.5, pa.float32()), _cells(MARK),
    _cells("\0"), _cells(b"\xff"), _cells("x" * 5000), _cells([]), _cells([[]]), _cells([None]), _cells({}),
    _cells([{}]),
    _cells([-1, 2**40]), _cells([1, None]), _cells([0.5]), _cells([MARK, None]), _cells({"n": 2**62, "zz": [1]}),
    _cells({"temperature": float("nan")}), _cells([{"role": "user", "content": MARK, "x": None}]),
    _cells([{"role": 1, "content": 2}]), _cells(10**30, pa.decimal256(60, 2)), _cells(2**62, pa.duration("ns")),
    _cells(2**62, pa.timestamp("s")), _cells(2**62, pa.timestamp("ns", "Mars/Olympus")), _cells(2**31 - 1, pa.date32()),
    _cells(86_400_000_000_001, pa.time64("ns")), _cells([("k", None)], pa.map_(pa.string(), pa.string())),
    _cells([(b"\xff", 1.5)], pa.map_(pa.binary(), pa.float64())), _cells("v", pa.string_view()),
    _cells(b"1234567890abcdef", pa.binary(16)), _cells(1, pa.int16()),
    _cells((1, 2, 3), pa.month_day_nano_interval()), _cells([1, 2], pa.list_view(pa.int64())),
    lambda rows: pa.array(range(rows)), lambda rows: pa.array([str(i) for i in range(rows)]),
    lambda rows: pa.array([MARK if i else None for i in range(rows)]).dictionary_encode(),
    lambda rows: pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"] * rows, pa.binary(16))),
    lambda rows: pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}'] * rows, pa.string())),
)  # fmt: skip


def _deep(column: pa.Array) -> pa.Array:
    for _ in range(60):
        column = pa.StructArray.from_arrays([column], ["a"])
    return column


_WRAPPERS: tuple[Callable[[pa.Array], Any], ...] = (
    lambda column: column.dictionary_encode(),
    lambda column: pa.ListArray.from_arrays(pa.array(range(len(column) + 1), pa.int32()), column),
    lambda column: pa.LargeListArray.from_arrays(pa.array(range(len(column) + 1), pa.int64()), column),
    lambda column: pa.FixedSizeListArray.from_arrays(column, 1),
    lambda column: pa.StructArray.from_arrays([column], ["n"]),
    lambda column: _repeated(column, len(column)),
    lambda column: pa.DictionaryArray.from_arrays(pa.array([0] * len(column), pa.int8()), column),
    lambda column: column.cast(pa.string()),
    lambda column: column.cast(pa.large_binary()),
    lambda column: column.cast(pa.float64()),
    lambda column: column.cast(pa.list_view(column.type.value_type)),
    _deep,
)
_TABLE_MUTATORS: tuple[Callable[[random.Random, pa.Table], pa.Table], ...] = (
    _other_type, _other_type, _other_type, _wrapped, _wrapped, _swapped, _renamed, _resized,
)  # fmt: skip
