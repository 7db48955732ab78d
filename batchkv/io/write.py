"""Result files: complete or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from batchkv.errors import UserError
from batchkv.io.columns import is_list
from batchkv.io.read import StrPath


def check_writable(path: StrPath, *, overwrite: bool, schema: pa.Schema | None = None) -> None:
    """Finds out before hours of work whether `write_table` will be able to write `path`.

    Args:
        path: of the result file.
        overwrite: an existing file is in order.
        schema: columns the file must be able to hold, if they are known already.

    Raises:
        UserError: says why not and how to mend it.
    """
    target = _target(path)
    if target.exists() and not overwrite:
        raise UserError(f"{path} exists: choose another path, or replace it with --overwrite")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UserError(f"the folder {target.parent} is not writable: choose another, or change its permissions")
    if schema is not None:
        with open(os.devnull, "wb") as nowhere:
            _write(schema.empty_table(), nowhere, target)


def write_table(table: pa.Table, path: StrPath) -> None:
    """Writes Parquet, Arrow IPC or JSON lines, told by the ending of `path`, replacing what is there.

    The file appears at once when it is complete and on the disk; if that fails, what was there stays.
    JSON has no NaN and no infinity: in JSON lines they become null, as polars writes them. Parquet and
    Arrow IPC keep them, and keep the schema's metadata.

    Raises:
        UserError: unknown ending, no such folder, no permission, disk full, or a column that the format
            cannot hold.
    """
    target = _target(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            _write(table, file, target)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _target(path: StrPath) -> Path:
    """The file that `path` means, through links, once its ending and folder are checked."""
    target = Path(os.path.realpath(path))
    if target.suffix.lower() not in _WRITERS:
        endings = " ".join(_WRITERS)
        raise UserError(f"{path} has the unknown ending {target.suffix!r}: a result ends in one of {endings}")
    if target.is_dir():
        raise UserError(f"{path} is a directory: name a file in it")
    if not target.parent.is_dir():
        raise UserError(f"the folder {target.parent} does not exist: make it first")
    return target


def _write(table: pa.Table, file: IO[bytes], target: Path) -> None:
    try:
        _WRITERS[target.suffix.lower()](table, file)
    except (pa.ArrowException, pl.exceptions.PolarsError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"a column cannot be stored in a {target.suffix} file: {reason}") from error


def _write_parquet(table: pa.Table, file: IO[bytes]) -> None:
    pq.write_table(table, file, compression="zstd")


def _write_ipc(table: pa.Table, file: IO[bytes]) -> None:
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _write_json_lines(table: pa.Table, file: IO[bytes]) -> None:
    binary = next((field.name for field in table.schema if _holds_binary(field.type)), None)
    if binary is not None:
        raise UserError(f"column {binary!r} is binary, which JSON cannot hold: write .parquet, or drop it")
    pl.DataFrame(table).write_ndjson(file)


def _holds_binary(dtype: pa.DataType) -> bool:
    if pa.types.is_struct(dtype):
        return any(_holds_binary(field.type) for field in dtype)
    if pa.types.is_map(dtype):
        return _holds_binary(dtype.key_type) or _holds_binary(dtype.item_type)
    if is_list(dtype) or pa.types.is_dictionary(dtype):
        return _holds_binary(dtype.value_type)
    return "binary" in str(dtype)


def _sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` outlast a loss of power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_WRITERS: dict[str, Callable[[pa.Table, IO[bytes]], None]] = {
    ".parquet": _write_parquet,
    ".arrow": _write_ipc,
    ".feather": _write_ipc,
    ".ipc": _write_ipc,
    ".jsonl": _write_json_lines,
    ".ndjson": _write_json_lines,
}
