"""Job files, Arrow tables and polars frames as one table of columns."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from batchkv.errors import RowError, UserError
from batchkv.io.columns import JOB_COLUMNS, TOKEN_IDS_COLUMN, Column, kind_of, to_cells
from batchkv.io.token_lists import holds_integers, joined

if TYPE_CHECKING:
    import polars as pl

StrPath: TypeAlias = "str | os.PathLike[str]"
Jobs: TypeAlias = "StrPath | Sequence[StrPath] | pa.Table | pl.DataFrame"

# Arrow writes Parquet columns of any depth, but reads back no more than about 45 levels.
MAX_JSON_DEPTH = 32
_LISTS_READ = 2048  # rows of a Parquet file with token ids that are read at once
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class JobTable:
    """The rows of a job as they were found, nothing checked but that each line is a JSON object.

    Attributes:
        columns: by name, in order, all `num_rows` long.
        num_rows: rows, those with an error included.
        errors: by row number; such a row is null in every column.
    """

    columns: Mapping[str, Column]
    num_rows: int
    errors: Mapping[int, RowError]

    def head(self, limit: int) -> JobTable:
        """The first `limit` rows."""
        num_rows = min(limit, self.num_rows)
        columns = {name: column[:num_rows] for name, column in self.columns.items()}
        return JobTable(columns, num_rows, {row: e for row, e in self.errors.items() if row < num_rows})


def read_jobs(jobs: Jobs) -> JobTable:
    """Reads a path, a glob, several paths, a pyarrow table or a polars frame.

    Files of a glob follow each other in sorted order, those of a list in the order given. Columns that a
    file lacks are null in its rows.

    Raises:
        UserError: names the file or the column, what is wrong with it and how to mend it.
    """
    if isinstance(jobs, (str, os.PathLike)):
        return _read_files(_expand(jobs))
    if isinstance(jobs, pa.Table):
        return _from_arrow(jobs, "the table")
    if hasattr(jobs, "to_arrow"):
        return _from_arrow(jobs.to_arrow(), "the data frame")
    if isinstance(jobs, Sequence) and jobs and all(isinstance(path, (str, os.PathLike)) for path in jobs):
        return _read_files([file for path in jobs for file in _expand(path)])
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


def _read_files(paths: Sequence[Path]) -> JobTable:
    tables = [_read_file(path) for path in paths]
    return tables[0] if len(tables) == 1 else _concatenate(tables, paths)


def _read_file(path: Path) -> JobTable:
    reader = _READERS.get(path.suffix.lower())
    if os.path.isdir(path):
        raise UserError(f"{path} is a directory: name its files, for example '{path}/*.parquet'")
    if not os.path.exists(path):
        raise UserError(f"{path} does not exist: check the path of the job file")
    if reader is None:
        endings = " ".join(_READERS)
        raise UserError(f"{path} has the unknown ending {path.suffix!r}: a job file ends in one of {endings}")
    try:
        return reader(path)
    except (OSError, pa.ArrowException) as error:
        reason = (getattr(error, "strerror", None) or str(error) or "unknown reason").splitlines()[0]
        raise UserError(f"{path} cannot be read as a {path.suffix} file: {reason}") from error


def _read_parquet(path: Path) -> JobTable:
    # Not `pq.read_table`: that adds columns for folders named `key=value`.
    with pq.ParquetFile(path) as file:
        _check_names(file.schema_arrow.names, str(path))
        index = file.schema_arrow.get_field_index(TOKEN_IDS_COLUMN)  # -1 if there are none
        has_token_ids = index >= 0 and holds_integers(file.schema_arrow.field(index).type)
        return _from_arrow(_read_token_ids(file) if has_token_ids else file.read(), str(path))


def _read_token_ids(file: pq.ParquetFile) -> pa.Table:
    """A file with token ids, some rows at a time: all lists at once take five times the memory of their values."""
    metadata = file.metadata
    columns = [i for i, c in enumerate(metadata.schema) if c.path.split(".")[0] == TOKEN_IDS_COLUMN]
    most = sum(metadata.row_group(g).column(i).num_values for g in range(metadata.num_row_groups) for i in columns)
    others: list[pa.RecordBatch] = []

    def lists() -> Iterator[pa.Array]:
        for batch in file.iter_batches(_LISTS_READ):
            others.append(batch.drop_columns([TOKEN_IDS_COLUMN]))
            yield batch.column(TOKEN_IDS_COLUMN)

    token_ids = joined(lists(), most)
    names = [name for name in file.schema_arrow.names if name != TOKEN_IDS_COLUMN]
    if not others:
        return file.schema_arrow.empty_table()
    table = pa.Table.from_batches(others)
    return pa.table({**{name: table.column(name) for name in names}, TOKEN_IDS_COLUMN: token_ids})


def _read_ipc(path: Path) -> JobTable:
    with pa.OSFile(str(path)) as source:
        magic = source.read(6)
        source.seek(0)
        reader = pa.ipc.open_file(source) if magic == b"ARROW1" else pa.ipc.open_stream(source)
        return _from_arrow(reader.read_all(), str(path))


def _from_arrow(table: pa.Table, source: str) -> JobTable:
    _check_names(table.column_names, source)
    return JobTable(dict(zip(table.column_names, table.columns, strict=True)), table.num_rows, {})


def _check_names(names: list[str], source: str) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{source} has two columns named {twice!r}: rename one of them")


def _read_json_lines(path: Path) -> JobTable:
    lines: list[int] = []
    objects: list[dict[str, Any]] = []
    errors: dict[int, RowError] = {}
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                parsed = parse_line(raw)
            except ValueError as error:
                parsed = {}
                message = f"{path} line {number} is no JSON object: {error}"
                errors[len(objects)] = RowError("bad_json", message)
            lines.append(number)
            objects.append(parsed)
    if objects and len(errors) == len(objects):
        raise UserError(f"{errors[0].message}; and so are all others: write one JSON object on each line")
    names = dict.fromkeys(name for parsed in objects for name in parsed)
    columns: dict[str, Column] = {}
    for name in names:
        cells = [parsed.get(name) for parsed in objects]
        columns[name] = cells if name in JOB_COLUMNS else _infer(name, cells, path, lines)
    return JobTable(columns, len(objects), errors)


def parse_line(raw: bytes) -> dict[str, Any]:
    """The JSON object on one line; a `ValueError` says why there is none, without quoting the line."""
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
            f"{path} line {lines[high - 1]}: column {name!r} holds {kind_of(cells[high - 1])} "
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


def _concatenate(tables: Sequence[JobTable], paths: Sequence[Path]) -> JobTable:
    names = dict.fromkeys(name for table in tables for name in table.columns)
    columns = {name: _concatenate_column(name, tables, paths) for name in names}
    errors: dict[int, RowError] = {}
    start = 0
    for table in tables:
        errors.update((start + row, error) for row, error in table.errors.items())
        start += table.num_rows
    return JobTable(columns, start, errors)


def _concatenate_column(name: str, tables: Sequence[JobTable], paths: Sequence[Path]) -> Column:
    parts = [
        table.columns[name] if name in table.columns else pa.chunked_array([pa.nulls(table.num_rows)])
        for table in tables
    ]
    arrays = [part for part in parts if not isinstance(part, list)]
    if len(arrays) < len(parts):
        return [cell for part in parts for cell in to_cells(part)]
    try:
        tables_of_one = [pa.table({name: array}) for array in arrays]
        return pa.concat_tables(tables_of_one, promote_options="permissive").column(0)
    except pa.ArrowException:
        first_with: dict[pa.DataType, Path] = {}
        for array, path in zip(arrays, paths, strict=True):
            first_with.setdefault(array.type, path)
        found = " and ".join(f"{dtype} in {path}" for dtype, path in first_with.items() if dtype != pa.null())
        raise UserError(f"column {name!r} has conflicting types, {found}: write it with one type") from None


_READERS: dict[str, Callable[[Path], JobTable]] = {
    ".parquet": _read_parquet,
    ".arrow": _read_ipc,
    ".feather": _read_ipc,
    ".ipc": _read_ipc,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
}
