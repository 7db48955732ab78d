"""What is told of a run: whole lines, the latest numbers, how it ended, and never a row's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchkv import run_log
from batchkv.errors import Interrupted, UserError
from batchkv.ledger import Ledger
from batchkv.metrics import RunMetrics
from batchkv.records import Record, RecordsInMemory
from batchkv.run_log import RunLog, Snapshots


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_appended_as_lines_with_their_time(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        with RunLog(path) as log:
            log.event("read", {"rows": 3})
    assert [line["event"] for line in lines(path)] == ["read", "read"]
    assert lines(path)[0]["rows"] == 3
    assert lines(path)[0]["time"].endswith("+00:00")


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (UserError("jobs.parquet is gone"), {"event": "failed", "error": "jobs.parquet is gone"}),
        (Interrupted(130), {"event": "interrupted"}),
        (KeyError("the text of a row"), {"event": "crashed", "error": "KeyError"}),
    ],
)
def test_how_a_run_ends_is_told(tmp_path: Path, error: BaseException, event: dict[str, Any]) -> None:
    path = tmp_path / "log.jsonl"
    with pytest.raises(type(error)), RunLog(path):
        raise error
    (line,) = lines(path)
    assert line == {"time": line["time"], **event}


def test_a_log_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name a file in a folder that is there"):
        RunLog(tmp_path / "nowhere" / "log.jsonl")


def test_without_a_path_nothing_is_logged() -> None:
    with RunLog(None) as log:
        log.event("read", {})


def test_the_latest_numbers_are_in_a_file_that_is_always_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "_SNAPSHOT_SECONDS", 0.0)
    told: list[str] = []
    ledger = Ledger(RecordsInMemory())
    snapshots = Snapshots(lambda event, fields: told.append(event), tmp_path / "metrics.json")
    for count in (1, 2):
        ledger.append([Record(count, 0, "stop")])
        snapshots.after_step(RunMetrics(steps=count), ledger)
        numbers = json.loads((tmp_path / "metrics.json").read_text())
        assert (numbers["samples"], numbers["errors"], numbers["steps"]) == (count, 0, count)
    assert told == ["progress", "progress"]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


def test_between_snapshots_nothing_is_done(tmp_path: Path) -> None:
    snapshots = Snapshots(lambda event, fields: None, tmp_path / "metrics.json")
    snapshots.after_step(RunMetrics(), Ledger(RecordsInMemory()))
    assert not (tmp_path / "metrics.json").exists()
