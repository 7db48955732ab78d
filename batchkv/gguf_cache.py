"""Converted GGUF files, kept on disk: transformers takes half a minute to convert even a small one.

A cache entry is a folder as `save_pretrained` writes it, named by the bytes of the GGUF file and the
version of transformers that converted it. It appears by a rename, so it is complete or not there at all,
and processes may race to write it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from batchkv.errors import UserError

logger = logging.getLogger(__name__)

Part = Literal["config", "tokenizer", "model"]
Loaded = TypeVar("Loaded")


class Saveable(Protocol):
    """A config, a tokenizer or a model of transformers."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], /) -> object: ...


def load_converted(
    gguf_path: Path,
    part: Part,
    *,
    convert: Callable[[], Saveable],
    load: Callable[[Path], Loaded],
) -> Loaded | None:
    """Load one part of a GGUF file from its cache entry, which is made first where there is none.

    An entry that cannot be read is made again.

    Args:
        gguf_path: the GGUF file.
        part: what of it is wanted; each part is an entry of its own, as a plan needs no weights.
        convert: reads the part from the GGUF file itself (slow).
        load: reads the part from the folder of a cache entry.

    Returns:
        What `load` returned, or None if the cache folder cannot be written (a warning is logged).
    """
    entry = cache_folder() / _key(gguf_path) / part
    if entry.is_dir():
        try:
            return load(entry)
        except UserError:  # not the entry's fault: too little memory, say
            raise
        except Exception as error:  # whatever is wrong with an entry, making it anew cures it
            logger.warning("the cached conversion %s cannot be read and is made again (%s)", entry, error)
            shutil.rmtree(entry, ignore_errors=True)
    return load(entry) if _store(entry, convert) else None


def cache_folder() -> Path:
    """`$BATCHKV_CACHE`, else `batchkv` in the user's cache folder."""
    if folder := os.environ.get("BATCHKV_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchkv"


def _store(entry: Path, convert: Callable[[], Saveable]) -> bool:
    """Make `entry`; False if it cannot be written. If another process makes it meanwhile, theirs stays."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent)
    except OSError as error:  # found out before the slow conversion
        return _not_stored(entry, error)
    try:
        converted = convert()
        return _publish(converted, unfinished, entry)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _publish(converted: Saveable, unfinished: str, entry: Path) -> bool:
    try:
        converted.save_pretrained(unfinished)
        os.replace(unfinished, entry)
    except OSError as error:
        return entry.is_dir() or _not_stored(entry, error)
    logger.info("keeping the converted GGUF file in %s", entry)
    return True


def _not_stored(entry: Path, error: OSError) -> bool:
    logger.warning(
        "the converted GGUF file cannot be kept in %s (%s); loading will be slow each time: "
        "set BATCHKV_CACHE to a writable folder",
        entry.parent,
        error.strerror or error,
    )
    return False


def _key(gguf_path: Path) -> str:
    """Names the bytes of the file and the converter, as either changes the result."""
    import transformers

    stat = gguf_path.stat()
    digest = _sha256(gguf_path, stat.st_size, stat.st_mtime_ns)
    return f"gguf-{stat.st_size}-{digest[:32]}-transformers-{transformers.__version__}"


@functools.lru_cache(maxsize=8)
def _sha256(path: Path, size: int, modified_ns: int) -> str:
    """Hex digest of the file. Size and time are there so that a changed file is hashed again."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
