"""What recipes write: checked before the work begins, complete or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from batchkv.errors import UserError


def check_output(path: Path, endings: Sequence[str], overwrite: bool) -> None:
    """Raises UserError if there can be no such file, or there is one that must stay."""
    if path.suffix not in endings:
        raise UserError(f"--out {str(path)!r} must end in {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise UserError(f"--out {str(path)!r} is in a folder that does not exist")
    if path.exists() and not overwrite:
        raise UserError(f"--out {str(path)!r} exists; add --overwrite to replace it")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which takes its place at the end, unless there was an error."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
