"""One run at a time has the folder; whatever instant it ends at, what is finished or the results are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkv import run_folder
from batchkv.errors import RowError, UserError
from batchkv.manifest import Manifest
from batchkv.records import Record
from batchkv.run_folder import RunFolder, open_run_folder, parts_path
from batchkv.waves import output_keys

MANIFEST = Manifest.of(model="m", seed=0)
TABLE = pa.table({"x": [1, 2]})


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results.parquet"


class Killed(BaseException):
    """Stands for the end of the process: nothing is cleaned up."""


def record(folder: RunFolder, *records: Record) -> None:
    with folder.records() as part:
        part.append(records)


def run_and_stop(out: Path, *records: Record, manifest: Manifest = MANIFEST) -> None:
    """A run that ends before it has results."""
    with open_run_folder(out, overwrite=False) as folder:
        assert folder.begin(manifest) is None
        record(folder, *records)


def names(out: Path) -> list[str]:
    return sorted(path.name for path in parts_path(out).iterdir())


class TestLock:
    def test_a_second_run_is_refused_while_the_first_goes_on(self, out: Path) -> None:
        with open_run_folder(out, overwrite=False):
            for overwrite in (False, True):
                with pytest.raises(UserError, match=r"another run is writing .*results\.parquet: wait"):
                    open_run_folder(out, overwrite=overwrite).__enter__()

    def test_another_process_is_refused_too(self, out: Path) -> None:
        code = (
            "import sys; from pathlib import Path; from batchkv.errors import UserError\n"
            "from batchkv.run_folder import open_run_folder\n"
            "try:\n    open_run_folder(Path(sys.argv[1]), overwrite=True).__enter__()\n"
            "except UserError as error:\n    print(error); raise SystemExit(7)"
        )
        with open_run_folder(out, overwrite=False):
            refused = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True)
        assert refused.returncode == 7
        assert "another run is writing" in refused.stdout
        assert subprocess.run([sys.executable, "-c", code, str(out)]).returncode == 0

    def test_a_process_that_was_killed_holds_nothing(self, out: Path) -> None:
        code = (
            "import os, sys; from pathlib import Path; from batchkv.run_folder import open_run_folder\n"
            "from batchkv.manifest import Manifest; from batchkv.records import Record\n"
            "with open_run_folder(Path(sys.argv[1]), overwrite=False) as folder:\n"
            "    folder.begin(Manifest.of(model='m', seed=0))\n"
            "    with folder.records() as part:\n"
            "        part.append([Record(4, 0, 'stop', 'text')]); os._exit(9)"
        )
        assert subprocess.run([sys.executable, "-c", code, str(out)]).returncode == 9
        with open_run_folder(out, overwrite=False) as folder:
            assert folder.begin(MANIFEST) is None
            assert folder.done()[1].tolist() == [4]

    def test_the_same_file_through_a_link_is_the_same_run(self, out: Path, tmp_path: Path) -> None:
        (tmp_path / "link.parquet").symlink_to(out)
        with open_run_folder(tmp_path / "link.parquet", overwrite=False) as folder:
            assert folder.out == out
            with pytest.raises(UserError, match="another run"):
                open_run_folder(out, overwrite=False).__enter__()


class TestUnused:
    def test_a_run_that_is_refused_before_it_began_leaves_nothing(self, out: Path) -> None:
        with pytest.raises(UserError, match="no model"), open_run_folder(out, overwrite=False):
            raise UserError("no model")
        assert not parts_path(out).exists()

    def test_one_that_began_leaves_what_it_has(self, out: Path) -> None:
        run_and_stop(out, Record(0, 0, "stop"))
        assert names(out) == ["lock", "manifest.json", "part-00001"]

    def test_results_that_are_there_are_refused_at_once(self, out: Path) -> None:
        out.write_text("precious")
        with pytest.raises(UserError, match=r"results\.parquet exists: .*--overwrite"):
            open_run_folder(out, overwrite=False).__enter__()
        assert not parts_path(out).exists()
        assert out.read_text() == "precious"

    def test_results_that_came_while_an_unfinished_run_lay_there_are_refused(self, out: Path) -> None:
        run_and_stop(out, Record(0, 0, "stop"))
        out.write_text("precious")
        with open_run_folder(out, overwrite=False) as folder, pytest.raises(UserError, match="exists"):
            folder.begin(MANIFEST)
        assert out.read_text() == "precious"
        with open_run_folder(out, overwrite=True) as folder:
            assert folder.begin(MANIFEST) is None
            assert folder.done()[1].tolist() == [0]


class TestGoingOn:
    def test_samples_of_all_runs_are_done_once(self, out: Path) -> None:
        run_and_stop(out, Record(5, 1, "stop", "b"), Record(2, 0, "stop", "a"))
        run_and_stop(out, Record(5, 1, "stop", "again"), Record(5, 0, "stop", "c"))
        with open_run_folder(out, overwrite=False) as folder:
            folder.begin(MANIFEST)
            keys, rows = folder.done()
            assert keys.tolist() == output_keys(np.array([2, 5, 5]), np.array([0, 0, 1])).tolist()
            assert rows.tolist() == [2, 5, 5]
            record(folder, Record(9, 0, "stop", "d"))
            texts = [text for batch in folder.batches() for text in batch["text"].to_pylist()]
        assert texts == ["b", "a", "again", "c", "d"]
        assert names(out) == ["lock", "manifest.json", "part-00001", "part-00002", "part-00003"]

    def test_rows_with_errors_are_tried_again(self, out: Path) -> None:
        bad = Record.of_error(1, RowError("bad_logits", "first"))
        run_and_stop(out, Record(0, 0, "stop", "a"), bad)
        with open_run_folder(out, overwrite=False) as folder:
            folder.begin(MANIFEST)
            assert folder.done()[1].tolist() == [0]
            record(folder, Record.of_error(1, RowError("bad_logits", "second")))
            assert [error for batch in folder.batches() for error in batch["error"].to_pylist()] == [None, "second"]

    def test_nothing_is_done_at_first(self, out: Path) -> None:
        with open_run_folder(out, overwrite=False) as folder:
            folder.begin(MANIFEST)
            assert [array.tolist() for array in folder.done()] == [[], []]

    def test_a_damaged_part_is_good_up_to_the_damage(self, out: Path) -> None:
        run_and_stop(out, Record(0, 0, "stop"))
        part = parts_path(out) / "part-00001"
        part.write_bytes(part.read_bytes() + b"\0" * 50)
        with open_run_folder(out, overwrite=False) as folder:
            folder.begin(MANIFEST)
            assert folder.done()[1].tolist() == [0]

    def test_another_job_is_not_mixed_with_it_and_the_differences_are_named(self, out: Path) -> None:
        run_and_stop(out, Record(0, 0, "stop"))
        with (
            open_run_folder(out, overwrite=False) as folder,
            pytest.raises(
                UserError,
                match=r"unfinished run of another job: seed was 0 and is 1; new was None and is 'x': .*--overwrite",
            ),
        ):
            folder.begin(Manifest.of(model="m", seed=1, new="x"))
        with open_run_folder(out, overwrite=False) as folder:
            assert folder.begin(MANIFEST) is None
            assert folder.done()[1].tolist() == [0]

    def test_overwrite_gives_another_job_up(self, out: Path) -> None:
        run_and_stop(out, Record(0, 0, "stop"))
        with open_run_folder(out, overwrite=True) as folder:
            assert folder.begin(Manifest.of(model="n")) is None
            assert folder.done()[1].tolist() == []
            assert Manifest.read(parts_path(out) / "manifest.json") == Manifest.of(model="n")
        assert not parts_path(out).exists()  # nothing is finished

    def test_overwrite_goes_on_with_the_same_job(self, out: Path) -> None:
        run_and_stop(out, Record(0, 0, "stop"))
        with open_run_folder(out, overwrite=True) as folder:
            folder.begin(MANIFEST)
            assert folder.done()[1].tolist() == [0]

    @pytest.mark.parametrize("records", [[], [Record.of_error(0, RowError("bad_prompt", ""))]])
    def test_another_job_that_has_finished_nothing_is_given_up(self, out: Path, records: list[Record]) -> None:
        run_and_stop(out, *records)
        with open_run_folder(out, overwrite=False) as folder:
            assert folder.begin(Manifest.of(model="n")) is None

    def test_a_manifest_that_is_not_whole_is_no_run(self, out: Path) -> None:
        run_and_stop(out, Record(0, 0, "stop"))
        (parts_path(out) / "manifest.json").write_text('{"model')
        with open_run_folder(out, overwrite=False) as folder:
            assert folder.begin(MANIFEST) is None
            assert folder.done()[1].tolist() == []

    def test_records_need_a_beginning(self, out: Path) -> None:
        with open_run_folder(out, overwrite=False) as folder, pytest.raises(RuntimeError), folder.records():
            pass


class TestPublishing:
    SUMMARY: dict[str, Any] = {"rows": 2}  # noqa: RUF012

    def publish(self, out: Path, *, overwrite: bool = False) -> None:
        with open_run_folder(out, overwrite=overwrite) as folder:
            folder.begin(MANIFEST)
            record(folder, Record(0, 0, "stop"))
            folder.publish([TABLE], TABLE.schema, self.SUMMARY)

    def test_results_are_in_their_place_and_the_folder_is_gone(self, out: Path) -> None:
        self.publish(out)
        assert pq.read_table(out) == TABLE
        assert os.listdir(out.parent) == [out.name]

    def test_results_that_were_there_are_replaced(self, out: Path) -> None:
        out.write_text("old")
        self.publish(out, overwrite=True)
        assert pq.read_table(out) == TABLE

    def test_a_write_that_fails_keeps_what_is_finished(self, out: Path) -> None:
        def tables() -> Any:
            yield TABLE
            raise OSError(28, "No space left on device")

        with open_run_folder(out, overwrite=False) as folder:
            folder.begin(MANIFEST)
            record(folder, Record(0, 0, "stop"))
            with pytest.raises(UserError, match="No space left"):
                folder.publish(tables(), TABLE.schema, self.SUMMARY)
        assert names(out) == ["lock", "manifest.json", "part-00001"]
        with open_run_folder(out, overwrite=False) as folder:
            assert folder.begin(MANIFEST) is None
            assert folder.done()[1].tolist() == [0]

    def killed(self, out: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
        """A run whose process ends while it publishes: before or after the rename, or while the folder is removed."""

        def die(*args: Any, **kwargs: Any) -> None:
            raise Killed

        replace, unlink = os.replace, Path.unlink

        def replace_or_die(source: Path, target: Path) -> None:
            if Path(target) == out:
                if at == "before":
                    raise Killed
                replace(source, target)
                raise Killed
            replace(source, target)

        def unlink_or_not(path: Path, missing_ok: bool = False) -> None:
            if path.name != "result":  # a process that is killed cleans nothing up
                unlink(path, missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink_or_not)
            if at == "removing":
                patch.setattr(run_folder.shutil, "rmtree", die)
            else:
                patch.setattr(os, "replace", replace_or_die)
            with pytest.raises(Killed):
                self.publish(out, overwrite=out.exists())

    @pytest.mark.parametrize("at", ["before", "after", "removing"])
    @pytest.mark.parametrize("was_there", [False, True])
    def test_the_same_run_finds_its_results_complete(
        self, out: Path, monkeypatch: pytest.MonkeyPatch, at: str, was_there: bool
    ) -> None:
        if was_there:
            out.write_text("old")
        self.killed(out, monkeypatch, at)
        assert (out.exists() and out.read_bytes() != b"old") == (at != "before")
        with open_run_folder(out, overwrite=False) as folder:
            assert folder.begin(MANIFEST) == self.SUMMARY
        assert pq.read_table(out) == TABLE
        assert not parts_path(out).exists()

    @pytest.mark.parametrize("at", ["before", "after", "removing"])
    def test_another_run_keeps_the_results_and_is_refused(
        self, out: Path, monkeypatch: pytest.MonkeyPatch, at: str
    ) -> None:
        self.killed(out, monkeypatch, at)
        other = Manifest.of(model="n")
        with open_run_folder(out, overwrite=False) as folder, pytest.raises(UserError, match="exists"):
            folder.begin(other)
        assert pq.read_table(out) == TABLE
        with open_run_folder(out, overwrite=True) as folder:
            assert folder.begin(other) is None
            assert folder.done()[1].tolist() == []

    def test_results_that_were_taken_away_are_computed_again(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.killed(out, monkeypatch, "after")
        out.unlink()
        with open_run_folder(out, overwrite=False) as folder:
            assert folder.begin(MANIFEST) is None
            assert folder.done()[1].tolist() == [0]

    def test_other_results_in_their_place_are_not_taken_for_them(
        self, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.killed(out, monkeypatch, "after")
        out.unlink()
        out.write_text("precious")
        with open_run_folder(out, overwrite=False) as folder, pytest.raises(UserError, match="exists"):
            folder.begin(MANIFEST)
        assert out.read_text() == "precious"

    @pytest.mark.parametrize("content", ["", "{", json.dumps({"inode": 0, "bytes": 0, "summary": {}})])
    def test_a_mark_that_is_not_whole_says_nothing(self, out: Path, content: str) -> None:
        run_and_stop(out, Record(0, 0, "stop"))
        (parts_path(out) / "complete.json").write_text(content)
        (parts_path(out) / "result").write_text("half")
        with open_run_folder(out, overwrite=False) as folder:
            assert folder.begin(MANIFEST) is None
            assert folder.done()[1].tolist() == [0]
