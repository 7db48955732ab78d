"""Result files: complete or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from batchkv.errors import UserError
from batchkv.io.columns import one_line, shown
from batchkv.io.read import StrPath

JSON_LINES = (".jsonl", ".ndjson")
# Polars panics, which is no `Exception`, where it has no code for a type.
_CANNOT = (pa.ArrowException, pl.exceptions.PolarsError, pl.exceptions.PanicException)
_GROUP_ROWS, _GROUP_BYTES = 1 << 16, 32 << 20  # of a row group in Parquet


def check_schema(path: StrPath, schema: pa.Schema) -> None:
    """Finds out before hours of work whether the file can hold columns of these types.

    Raises:
        UserError: names the column and says how to mend it.
    """
    target = checked_target(path)
    with open(os.devnull, "wb") as nowhere:
        try:
            _WRITERS[target.suffix.lower()]([schema.empty_table()], schema, nowhere)
        except (*_CANNOT, OSError) as error:  # Parquet has an OSError for decimals that it has not
            raise _cannot_be_stored(error, target) from error


def write_table(table: pa.Table, path: StrPath) -> None:
    """`write_tables` of one table.

    Raises:
        UserError: it cannot be written.
    """
    target = checked_target(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write_tables([table], table.schema, path, temporary)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from error


def write_tables(
    tables: Iterable[pa.Table],
    schema: pa.Schema,
    path: StrPath,
    temporary: Path,
    *,
    before_rename: Callable[[], None] = lambda: None,
) -> None:
    """Writes Parquet, Arrow IPC or JSON lines, told by the ending of `path`, replacing what is there.

    The file appears at once when it is complete and on the disk; if that fails, what was there stays.
    JSON has no NaN and no infinity: in JSON lines they become null, as polars writes them. Parquet and
    Arrow IPC keep them, and keep the schema's metadata.

    Args:
        tables: one after the other, each with the columns of `schema`.
        schema: of the file.
        path: of the file.
        temporary: where it is written until it is complete, on the same file system.
        before_rename: called when the temporary file is complete and on the disk.

    Raises:
        UserError: unknown ending, no such folder, no permission, or a column that the format cannot hold.
        OSError: the disk is full or broken.
    """
    target = checked_target(path)

    def write(file: IO[bytes]) -> None:
        try:
            _WRITERS[target.suffix.lower()](tables, schema, file)
        except _CANNOT as error:
            raise _cannot_be_stored(error, target) from error
        except OSError as error:
            # Parquet has an OSError without a number for decimals that it has not, polars has one for the disk.
            if error.errno is None and "os error" not in str(error):
                raise _cannot_be_stored(error, target) from error
            raise

    replace_file(target, temporary, write, before_rename)


def write_lines(
    lines: Iterable[str], path: StrPath, temporary: Path, *, before_rename: Callable[[], None] = lambda: None
) -> None:
    """Writes a text file, line by line; the rest is as in `write_tables`."""

    def write(file: IO[bytes]) -> None:
        for line in lines:
            file.write(line.encode() + b"\n")

    replace_file(checked_target(path), temporary, write, before_rename)


def replace_file(
    target: Path, temporary: Path, write: Callable[[IO[bytes]], None], before_rename: Callable[[], None]
) -> None:
    """Has `write` fill `temporary`, which becomes `target` when it is complete and on the disk.

    Raises:
        OSError: it cannot be written; `target` is as before then.
    """
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        before_rename()
        os.replace(temporary, target)
        sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def checked_target(path: StrPath) -> Path:
    """The file that `path` means, through links, once its ending and folder are checked."""
    target = Path(os.path.realpath(path))
    if target.suffix.lower() not in _WRITERS:
        endings = " ".join(_WRITERS)
        raise UserError(f"{path} has the unknown ending {target.suffix!r}: a result ends in one of {endings}")
    if target.is_dir():
        raise UserError(f"{path} is a directory: name a file in it")
    if not target.parent.is_dir():
        raise UserError(f"the folder {target.parent} does not exist: make it first")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UserError(f"the folder {target.parent} is not writable: choose another, or change its permissions")
    return target


def _cannot_be_stored(error: Exception, target: Path) -> UserError:
    return UserError(f"a column cannot be stored in a {target.suffix} file: {one_line(str(error))}")


def _write_parquet(tables: Iterable[pa.Table], schema: pa.Schema, file: IO[bytes]) -> None:
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in _joined(tables, _GROUP_ROWS):
            writer.write_table(table)


def _write_ipc(tables: Iterable[pa.Table], schema: pa.Schema, file: IO[bytes]) -> None:
    with pa.ipc.new_file(file, schema) as writer:
        for table in tables:
            writer.write_table(table)


def _write_json_lines(tables: Iterable[pa.Table], schema: pa.Schema, file: IO[bytes]) -> None:
    for field in schema:
        kind = _without_json(field.type)
        if kind is not None:
            raise UserError(f"column {shown(field.name)} is {kind}, which JSON cannot hold: write .parquet, or drop it")
    for table in tables:
        pl.DataFrame(table).write_ndjson(file)


def _joined(tables: Iterable[pa.Table], most_rows: int) -> Iterator[pa.Table]:
    """Tables joined as long as they have no more rows and bytes together than a row group should."""
    held: list[pa.Table] = []
    for table in tables:
        if held and (sum(map(len, held)) + len(table) > most_rows or sum(one.nbytes for one in held) > _GROUP_BYTES):
            yield pa.concat_tables(held)
            held = []
        held.append(table)
    if held:
        yield pa.concat_tables(held)


def _without_json(dtype: pa.DataType) -> str | None:
    """What polars, which would end the process, cannot write as JSON, at any depth."""
    if isinstance(dtype, pa.BaseExtensionType):
        return _without_json(dtype.storage_type)
    if dtype.num_fields:
        return next(filter(None, (_without_json(dtype.field(i).type) for i in range(dtype.num_fields))), None)
    if pa.types.is_dictionary(dtype):
        return _without_json(dtype.value_type)
    if pa.types.is_decimal256(dtype):
        return "decimal256"
    return "binary" if "binary" in str(dtype) else None


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` outlast a loss of power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_WRITERS: dict[str, Callable[[Iterable[pa.Table], pa.Schema, IO[bytes]], None]] = {
    ".parquet": _write_parquet,
    ".arrow": _write_ipc,
    ".feather": _write_ipc,
    ".ipc": _write_ipc,
    ".jsonl": _write_json_lines,
    ".ndjson": _write_json_lines,
}
