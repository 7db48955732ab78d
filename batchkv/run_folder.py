"""`RESULTS.parts/`: what a run has finished, until its results are there. Only one run at a time has it.

lock           held while the process lives
manifest.json  what is run: another job, model or parameter is not mixed with it
part-NNNNN     records (`parts`), one file for each time that the run was started
metrics.json   the latest numbers of the run, every few seconds
complete.json  the results are complete: what is left is to put them in their place
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock, Timeout

from batchkv.errors import UserError, cannot_go_on, is_disk_full
from batchkv.io.columns import shown
from batchkv.io.write import JSON_LINES, check_schema, checked_target, sync_folder, write_lines, write_tables
from batchkv.manifest import Manifest
from batchkv.parts import PartFile, read_part
from batchkv.records import Record, as_records
from batchkv.results import result_schema
from batchkv.rows import Rows
from batchkv.waves import output_keys

Int64Array = npt.NDArray[np.int64]

_OWN = re.compile(
    r"lock|(manifest|metrics|complete)\.(json|tmp)|manifest\.json\.tmp|part-\d{5}|result|bucket-\d+\.arrow"
)


class RunFolder:
    """The folder of a run, locked. Made by `open_run_folder`."""

    def __init__(self, out: Path, *, overwrite: bool) -> None:
        self.out = out
        self.path = parts_path(out)
        self._overwrite = overwrite
        self._part: Path | None = None

    def begin(self, manifest: Manifest) -> dict[str, Any] | None:
        """Prepares the folder for a run, or for going on with one.

        Returns:
            The summary, if that very run had completed its results and was stopped before it could say so.

        Raises:
            UserError: there are results, or an unfinished run of another job that has finished samples, which
                `overwrite` would replace.
        """
        before = Manifest.read(self._manifest)
        published = self._finish_publishing()
        if published is not None:
            self._clear()
            if Manifest(published["manifest"]) == manifest:
                summary: dict[str, Any] = published["summary"]
                return summary
            before = None
        self._complete.unlink(missing_ok=True)
        if self.out.exists() and not self._overwrite:
            raise UserError(f"{self.out} exists: choose another path, or replace it with --overwrite")
        if before is not None and before != manifest:
            if not self._overwrite and self.holds_results:
                changes = "; ".join(before.differences(manifest))
                raise UserError(
                    f"{self.path} holds an unfinished run of another job: {changes}: give the same command to go on "
                    "with it, --overwrite to give it up, or another --out"
                )
            self._clear()
        elif before is None:
            self._clear()
        if before != manifest:
            manifest.write(self._manifest)
        last = max((int(path.name.removeprefix("part-")) for path in self._parts()), default=0)
        self._part = self.path / f"part-{last + 1:05}"
        return None

    def check_columns(self, rows: Rows) -> None:
        """Finds out before hours of work whether the result file can hold the job's columns.

        Raises:
            UserError: names the column.
        """
        if rows.is_batch and self.out.suffix.lower() not in JSON_LINES:
            raise UserError(f"{self.out}: responses to OpenAI Batch requests are JSON lines: name a .jsonl file")
        check_schema(self.out, result_schema(rows))

    @property
    def metrics(self) -> Path:
        """The latest numbers of the run, for those who watch it."""
        return self.path / "metrics.json"

    @property
    def holds_results(self) -> bool:
        """Whether samples are finished, of this run or of one before it: there is something to go on with."""
        batches = (batch for path in self._parts() for batch in read_part(path))
        return self._complete.exists() or any(batch.column("error_code").null_count for batch in batches)

    def done(self) -> tuple[Int64Array, Int64Array]:
        """What earlier runs have finished: their outputs as `waves.output_keys`, ascending, and the row of each."""
        rows, samples = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for batch in self._earlier():
            rows.append(batch.column("row").to_numpy())
            samples.append(batch.column("sample").to_numpy())
        keys, first = np.unique(output_keys(np.concatenate(rows), np.concatenate(samples)), return_index=True)
        return keys, np.concatenate(rows)[first]

    @contextmanager
    def records(self) -> Iterator[PartFile]:
        """Where this run's records go."""
        if self._part is None:
            raise RuntimeError("begin comes first")
        part = PartFile(self._part)
        try:
            yield part
        finally:
            part.close()

    def records_of(self, rows: Int64Array) -> list[Record]:
        """What earlier runs have recorded of some rows (int64, in any order)."""
        wanted = pa.array(np.sort(rows))
        found = (batch.filter(pc.is_in(batch.column("row"), wanted)) for batch in self._earlier())
        return [record for batch in found if len(batch) for record in as_records(batch)]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All records. Errors are those of this run alone: rows that had one before were tried again."""
        yield from self._earlier()
        if self._part is not None:
            yield from read_part(self._part)

    def publish(self, tables: Iterable[pa.Table], schema: pa.Schema, summary: dict[str, Any]) -> None:
        """Writes the results and puts them in their place; then the folder is gone.

        Whatever instant the process ends at, the results are complete or there is still all that they are made of.

        Raises:
            UserError: they cannot be written.
        """
        self._publish(partial(write_tables, tables, schema), summary)

    def publish_lines(self, lines: Iterable[str], summary: dict[str, Any]) -> None:
        """`publish` of a result that is lines of text."""
        self._publish(partial(write_lines, lines), summary)

    def _publish(self, write: Callable[..., None], summary: dict[str, Any]) -> None:
        try:
            write(self.out, self._result, before_rename=lambda: self._mark_complete(summary))
        except OSError as error:
            raise cannot_go_on(self.out, error) from error
        self._remove()

    @property
    def begun_at(self) -> int:
        """Seconds since 1970; a run that is gone on with began when it was begun first."""
        return int(self._manifest.stat().st_mtime)

    @property
    def run_id(self) -> str:
        """The same for all runs of what the manifest says."""
        return hashlib.blake2b(self._manifest.read_bytes(), digest_size=16).hexdigest()

    # -- how

    @property
    def _manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def _result(self) -> Path:
        return self.path / "result"

    @property
    def _complete(self) -> Path:
        return self.path / "complete.json"

    def _parts(self) -> list[Path]:
        return sorted(path for path in self.path.iterdir() if re.fullmatch(r"part-\d{5}", path.name))

    def _earlier(self) -> Iterator[pa.RecordBatch]:
        for path in self._parts():
            if path != self._part:
                for batch in read_part(path):
                    yield batch.filter(pc.is_null(batch.column("error_code")))

    def _mark_complete(self, summary: dict[str, Any]) -> None:
        status, manifest = self._result.stat(), Manifest.read(self._manifest)
        mark = {
            "inode": status.st_ino,
            "bytes": status.st_size,
            "manifest": manifest.entries if manifest else {},
            "summary": summary,
        }
        with self._complete.open("w") as file:
            json.dump(mark, file)
            file.flush()
            os.fsync(file.fileno())

    def _finish_publishing(self) -> dict[str, Any] | None:
        """Puts results in their place that were complete, and were not there yet or not known to be; their mark."""
        try:
            mark = json.loads(self._complete.read_text())
        except (OSError, ValueError):
            return None
        for path in (self._result, self.out):
            with suppress(OSError):
                if (path.stat().st_ino, path.stat().st_size) == (mark["inode"], mark["bytes"]):
                    if path != self.out:
                        os.replace(path, self.out)
                    sync_folder(self.out.parent)
                    found: dict[str, Any] = mark
                    return found
        return None

    def _clear(self, *kept: str) -> None:
        for path in self.path.iterdir():
            if path.name not in ("lock", *kept):
                path.unlink()

    def remove_if_nothing_is_finished(self) -> None:
        """A run that was refused, or stopped before its first sample, leaves nothing behind."""
        with suppress(OSError):
            if self.path.exists() and not self.holds_results:
                self._remove()

    def _remove(self) -> None:
        """What tells that the results are complete goes last."""
        with suppress(OSError):
            self._clear(self._manifest.name, self._complete.name)
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def open_run_folder(out: Path, *, overwrite: bool) -> Iterator[RunFolder]:
    """The folder of the run that writes `out`, made if need be.

    Raises:
        UserError: another run has it; or it cannot be made; or the disk is full, now or while the run goes on.
    """
    target = checked_target(out)
    path = parts_path(target)
    if target.exists() and not overwrite and not path.exists():
        raise UserError(f"{out} exists: choose another path, or replace it with --overwrite")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError(f"{path} is no folder: what is finished is to lie there: move it away, or choose another --out")
    try:
        path.mkdir(exist_ok=True)
        foreign = sorted(entry.name for entry in path.iterdir() if not _OWN.fullmatch(entry.name) or entry.is_dir())
        if foreign:
            raise UserError(
                f"{path} holds {shown(foreign[0])}, which is not of a run: move it, or choose another --out"
            )
        with FileLock(path / "lock", timeout=0):
            folder = RunFolder(target, overwrite=overwrite)
            try:
                yield folder
            finally:
                folder.remove_if_nothing_is_finished()
    except FileNotFoundError:  # the run that had it has just finished
        raise UserError(f"another run has just written {out}: give the command again") from None
    except Timeout:
        raise UserError(f"another run is writing {out}: wait for it, or choose another --out") from None
    except OSError as error:
        if is_disk_full(error):
            raise cannot_go_on(path, error) from error
        raise


def parts_path(out: Path) -> Path:
    """Where what is finished lies until the results are complete."""
    return out.with_name(f"{out.name}.parts")
