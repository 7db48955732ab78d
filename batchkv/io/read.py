"""Job files, Arrow tables and polars frames as blocks of rows: read one after the other, never held together."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from batchkv.errors import RowError, UserError
from batchkv.io.columns import JOB_COLUMNS, REQUEST_COLUMNS, Column, is_batch, kind_of, one_line, readable, shown

if TYPE_CHECKING:
    import polars as pl

StrPath: TypeAlias = "str | os.PathLike[str]"
Jobs: TypeAlias = "StrPath | Sequence[StrPath] | pa.Table | pl.DataFrame"

BLOCK_ROWS = 1 << 13
BLOCK_BYTES = 64 << 20  # of a block, where rows are so large that a block has fewer
MAX_LINE_BYTES = 64 << 20
# Arrow writes Parquet columns of any depth, but reads back no more than about 45 levels.
MAX_JSON_DEPTH = 32
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class JobTable:
    """A block of rows of a job as they were found, nothing checked but that each line is a JSON object.

    Attributes:
        columns: by name, in order, all `num_rows` long.
        num_rows: rows, those with an error included.
        errors: by row number in the block; such a row is null in every column.
        where: of the first row, for messages.
    """

    columns: Mapping[str, Column]
    num_rows: int
    errors: Mapping[int, RowError]
    where: str = "the job"

    def head(self, limit: int) -> JobTable:
        """The first `limit` rows."""
        num_rows = min(limit, self.num_rows)
        columns = {name: column[:num_rows] for name, column in self.columns.items()}
        return JobTable(columns, num_rows, {row: e for row, e in self.errors.items() if row < num_rows}, self.where)


@dataclass(frozen=True, slots=True)
class JobSource:
    """Where the rows of a job are: files one after the other, or a table. Can be read any number of times.

    Attributes:
        inputs: files whose endings are known, or one table.
        name: for messages.
        limit: only so many rows (or lines of requests) are read.
    """

    inputs: tuple[Path | pa.Table, ...]
    name: str
    limit: int | None = None

    def blocks(self) -> Iterator[JobTable]:
        """All rows in order, some thousands at a time; at least one block. Columns that a file lacks are not in its
        blocks.

        Raises:
            UserError: names the file or the column, what is wrong with it and how to mend it.
        """
        left = self.limit
        num_blocks = 0
        for block in self._all_blocks():
            part = block if left is None else block.head(left)
            num_blocks += 1
            yield part
            if left is not None:
                left -= part.num_rows
                if left <= 0:
                    return
        if not num_blocks:
            yield JobTable({}, 0, {})

    def _all_blocks(self) -> Iterator[JobTable]:
        for source in self.inputs:
            if isinstance(source, Path):
                yield from _blocks_of_file(source)
            else:
                yield from _blocks_of_table(source, self.name)

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """What changes when a file is written to or replaced: sizes, times and numbers of the files.

        Raises:
            UserError: a file is gone.
        """
        found = []
        for path in self.inputs:
            if isinstance(path, Path):
                try:
                    status = path.stat()
                except OSError as error:
                    raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
                found.append((status.st_size, status.st_mtime_ns, status.st_ino))
        return tuple(found)

    def fingerprint(self) -> list[dict[str, Any]]:
        """Of each file its name, size and a hash of its content.

        Raises:
            UserError: a file cannot be read.
        """
        found = []
        for path in self.inputs:
            if not isinstance(path, Path):
                raise UserError("a job that is not in a file cannot be resumed: write it to one")
            try:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
                found.append({"file": path.name, "bytes": path.stat().st_size, "blake2b": digest})
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
        return found


def open_jobs(jobs: Jobs, limit: int | None = None) -> JobSource:
    """A path, a glob, several paths, a pyarrow table or a polars frame.

    Files of a glob follow each other in sorted order, those of a list in the order given. `limit` is that of
    `JobSource`.

    Raises:
        UserError: there is no such file, or none that a job can be read from.
    """
    return replace(_opened(jobs), limit=limit)


def _opened(jobs: Jobs) -> JobSource:
    if isinstance(jobs, (str, os.PathLike)):
        return _of_files(_expand(jobs))
    if isinstance(jobs, pa.Table):
        return JobSource((_with_distinct_names(jobs, "the table"),), "the table")
    if hasattr(jobs, "to_arrow"):
        return JobSource((_with_distinct_names(jobs.to_arrow(), "the data frame"),), "the data frame")
    if isinstance(jobs, Sequence) and jobs and all(isinstance(path, (str, os.PathLike)) for path in jobs):
        return _of_files([file for path in jobs for file in _expand(path)])
    raise UserError(
        f"jobs is a {type(jobs).__name__}, must be a path, a list of paths, a pyarrow.Table or a polars.DataFrame"
    )


def _expand(path: StrPath) -> list[Path]:
    """The file at `path`, or the files that it matches as a glob, sorted."""
    text = os.fspath(path)
    if os.path.exists(text) or not glob.has_magic(text):
        return [Path(text)]
    found = sorted(glob.glob(text, recursive=True))
    if not found:
        raise UserError(f"no file matches {text}: check the pattern, and quote it in the shell")
    return [Path(name) for name in found]


def _of_files(paths: Sequence[Path]) -> JobSource:
    for path in paths:
        if os.path.isdir(path):
            raise UserError(f"{path} is a directory: name its files, for example '{path}/*.parquet'")
        if not os.path.exists(path):
            raise UserError(f"{path} does not exist: check the path of the job file")
        if path.suffix.lower() not in _READERS:
            endings = " ".join(_READERS)
            raise UserError(f"{path} has the unknown ending {path.suffix!r}: a job file ends in one of {endings}")
    return JobSource(tuple(paths), ", ".join(map(str, paths)))


def _blocks_of_file(path: Path) -> Iterator[JobTable]:
    try:
        yield from _READERS[path.suffix.lower()](path)
    except UnicodeDecodeError:
        raise UserError(f"{path} cannot be read as a {path.suffix} file: a name in it is not UTF-8") from None
    except (OSError, pa.ArrowException) as error:
        reason = one_line(getattr(error, "strerror", None) or str(error)) or "unknown reason"
        raise UserError(f"{path} cannot be read as a {path.suffix} file: {reason}") from error


def _blocks_of_parquet(path: Path) -> Iterator[JobTable]:
    # Not `pq.read_table`: that adds columns for folders named `key=value`.
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        # of rows in memory; what a file says of itself can be wrong, but no worse than too few rows at a time
        row_bytes = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
        rows = min(max(BLOCK_BYTES // max(row_bytes, 1), 1), BLOCK_ROWS)
        yield from _blocks_of_batches(file.iter_batches(rows), file.schema_arrow, str(path))


def _blocks_of_ipc(path: Path) -> Iterator[JobTable]:
    with pa.OSFile(str(path)) as source:
        magic = source.read(6)
        source.seek(0)
        if magic != b"ARROW1":
            reader = pa.ipc.open_stream(source)
            yield from _blocks_of_batches(reader, reader.schema, str(path))
            return
        file = pa.ipc.open_file(source)
        batches = (file.get_batch(i) for i in range(file.num_record_batches))
        yield from _blocks_of_batches(batches, file.schema, str(path))


def _blocks_of_batches(batches: Iterable[pa.RecordBatch], schema: pa.Schema, where: str) -> Iterator[JobTable]:
    _check_schema(schema, where)
    first = 0
    for table in _joined(batches):
        for start in range(0, table.num_rows, BLOCK_ROWS):
            part = table.slice(start, BLOCK_ROWS)
            yield _block_of(part, f"{where} row {first}")
            first += part.num_rows
    if not first:
        yield _block_of(schema.empty_table(), where)


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches that are valid, small ones together: a block of each row by itself would take long."""
    held: list[pa.RecordBatch] = []
    rows, held_bytes = 0, 0
    for batch in batches:
        # Offsets and indices that point anywhere, and strings that are no UTF-8 (which the reader of Parquet does not
        # look for): what reads them next would crash.
        batch.validate(full=True)
        if held and (rows + batch.num_rows > BLOCK_ROWS or held_bytes + batch.nbytes > BLOCK_BYTES):
            yield pa.Table.from_batches(held)
            held, rows, held_bytes = [], 0, 0
        held.append(batch)
        rows, held_bytes = rows + batch.num_rows, held_bytes + batch.nbytes
    if held:
        yield pa.Table.from_batches(held)


def _blocks_of_table(table: pa.Table, where: str) -> Iterator[JobTable]:
    for start in range(0, max(table.num_rows, 1), BLOCK_ROWS):
        # A table without columns would become as long as its slice.
        part = table.slice(start, min(BLOCK_ROWS, table.num_rows - start))
        try:
            part.validate(full=True)
        except pa.ArrowException as error:
            raise UserError(f"{where} is not valid from row {start} on: {one_line(str(error))}") from None
        yield _block_of(part, f"{where} row {start}")


def _block_of(table: pa.Table, where: str) -> JobTable:
    columns: dict[str, Column] = {
        name: readable(name, column, where) if name in JOB_COLUMNS else column
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return JobTable(columns, table.num_rows, {}, where)


def _with_distinct_names(table: pa.Table, source: str) -> pa.Table:
    _check_schema(table.schema, source)
    return table


def _check_schema(schema: pa.Schema, source: str) -> None:
    twice = _twice(schema.names)
    if twice is not None:
        raise UserError(f"{source} has two columns named {shown(twice)}: rename one of them")
    for field in schema:
        if _is_nested_deeper(field.type, MAX_JSON_DEPTH):
            raise UserError(
                f"{source}: column {shown(field.name)} is nested more than {MAX_JSON_DEPTH} levels deep: drop it, or "
                "write it as JSON text"
            )
        if (name := _twice_within(field.type)) is not None:
            raise UserError(
                f"{source}: objects in column {shown(field.name)} have two fields named {shown(name)}: rename one"
            )


def _is_nested_deeper(dtype: pa.DataType, levels: int) -> bool:
    if not dtype.num_fields:
        return False
    return levels == 0 or any(_is_nested_deeper(dtype.field(i).type, levels - 1) for i in range(dtype.num_fields))


def _twice_within(dtype: pa.DataType) -> str | None:
    """The name that several fields of a struct have, at any depth."""
    fields = [dtype.field(i) for i in range(dtype.num_fields)]
    if pa.types.is_struct(dtype) and (twice := _twice(field.name for field in fields)) is not None:
        return twice
    return next((name for field in fields if (name := _twice_within(field.type)) is not None), None)


def _twice(names: Iterable[str]) -> str | None:
    """The first name that is there more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a JSON lines file: the object on it, or what is wrong with it."""

    number: int
    object: dict[str, Any]
    error: RowError | None


def _blocks_of_json_lines(path: Path) -> Iterator[JobTable]:
    lines: list[_Line] = []
    held_bytes, num_good = 0, 0
    first_error: RowError | None = None
    with path.open("rb") as file:
        for number, raw in _raw_lines(file):
            line = _read_line(path, number, raw)
            lines.append(line)
            held_bytes += len(raw)
            num_good += line.error is None
            first_error = first_error or line.error
            if len(lines) == BLOCK_ROWS or held_bytes > BLOCK_BYTES:
                yield _block_of_lines(lines, path)
                lines, held_bytes = [], 0
    if first_error and not num_good:
        raise UserError(f"{first_error.message}; and so are all others: write one JSON object on each line")
    if lines:
        yield _block_of_lines(lines, path)


def _raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank and their numbers; of one that is too long, so much that it can be seen."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        is_whole = raw.endswith(b"\n") or len(raw) <= MAX_LINE_BYTES
        if raw.strip():
            yield number, raw
        while not is_whole and (rest := file.readline(MAX_LINE_BYTES)):
            is_whole = rest.endswith(b"\n")


def _read_line(path: Path, number: int, raw: bytes) -> _Line:
    try:
        return _Line(number, parse_line(raw), None)
    except ValueError as error:
        return _Line(number, {}, RowError("bad_json", f"{path} line {number} is no JSON object: {error}"))


def _block_of_lines(lines: Sequence[_Line], path: Path) -> JobTable:
    names = dict.fromkeys(name for line in lines for name in line.object)
    as_they_are = JOB_COLUMNS | set(REQUEST_COLUMNS) if is_batch(names) else JOB_COLUMNS
    columns: dict[str, Column] = {}
    for name in names:
        cells = [line.object.get(name) for line in lines]
        columns[name] = cells if name in as_they_are else _infer(name, cells, path, [line.number for line in lines])
    errors = {row: line.error for row, line in enumerate(lines) if line.error}
    return JobTable(columns, len(lines), errors, f"{path} line {lines[0].number}")


def parse_line(raw: bytes) -> dict[str, Any]:
    """The JSON object on one line; a `ValueError` says why there is none, without quoting the line."""
    if len(raw) > MAX_LINE_BYTES:
        raise ValueError(f"longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        parsed = json.loads(raw.decode("utf-8-sig"))
        if _ESCAPED_SURROGATE.search(raw):
            json.dumps(parsed, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"nested more than {MAX_JSON_DEPTH} levels deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from None
    except UnicodeEncodeError:
        raise ValueError("an escape is half of a surrogate pair, which is no character") from None
    except ValueError:
        raise ValueError("a number has too many digits") from None
    if not isinstance(parsed, dict):
        raise ValueError("it holds another JSON value")
    if raw.count(b"[") + raw.count(b"{") > MAX_JSON_DEPTH and _is_deeper(parsed, MAX_JSON_DEPTH):
        raise ValueError(f"nested more than {MAX_JSON_DEPTH} levels deep")
    return parsed


def _is_deeper(value: object, levels: int) -> bool:
    """Whether lists and objects are nested in `value` more than `levels` deep."""
    if not isinstance(value, (dict, list)):
        return False
    if levels == 0:
        return True
    children = value.values() if isinstance(value, dict) else value
    return any(_is_deeper(child, levels - 1) for child in children)


def _infer(name: str, cells: list[Any], path: Path, lines: Sequence[int]) -> pa.ChunkedArray:
    """A carried column of JSON lines as Arrow; `lines` are the line numbers of the rows."""
    try:
        return _to_arrow(cells)
    except (pa.ArrowException, OverflowError):
        # The first row that does not fit those before it: Arrow says neither which nor why in plain words.
        low, high = 0, len(cells)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _fits(cells[:middle]) else (low, middle)
        raise UserError(
            f"{path} line {lines[high - 1]}: column {shown(name)} holds {kind_of(cells[high - 1])} "
            "that does not fit the lines before: give the column one type, for example make all of it strings"
        ) from None


def _fits(cells: list[Any]) -> bool:
    try:
        _to_arrow(cells)
    except (pa.ArrowException, OverflowError):
        return False
    return True


def _to_arrow(cells: list[Any]) -> pa.ChunkedArray:
    kinds = {type(cell) for cell in cells if cell is not None}
    if bool in kinds and len(kinds) > 1:
        raise pa.ArrowInvalid("Arrow would turn True into 1.0")
    array = pa.array(cells)
    return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])


_READERS: dict[str, Callable[[Path], Iterator[JobTable]]] = {
    ".parquet": _blocks_of_parquet,
    ".arrow": _blocks_of_ipc,
    ".feather": _blocks_of_ipc,
    ".ipc": _blocks_of_ipc,
    ".jsonl": _blocks_of_json_lines,
    ".ndjson": _blocks_of_json_lines,
}
