"""A run that is killed at any instant, or that finds its disk full, is gone on with: no row is lost, none is computed
twice, and the result is that of a run which nothing came between.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkv.engine import Engine
from batchkv.errors import UserError
from batchkv.parts import read_part
from batchkv.run_folder import open_run_folder, parts_path
from batchkv.sampling_params import SamplingParams
from tests.cli_forks import Ended, ForkedCli, Stop
from tests.tiny_models import FAMILIES, save_tiny, tiny_tokenizer

# How many kills fall into each part of a run's life, which begins with that event of its log.
KILLS: dict[str | None, int] = {None: 4, "started": 3, "read": 9, "publishing": 4}
OPTIONS = ("--max-tokens", "10", "--max-batch-rows", "8", "--kv-memory", "8MiB")


def job_rows() -> list[dict[str, Any]]:
    """Samples and greedy rows, twins, tenants, errors, and conversations of three rows with several samples."""
    rows: list[dict[str, Any]] = []
    for i in range(8):
        says = {"role": "system", "content": "you are the editor of the king and write one line"}
        common = {"tenant": ("red", "blue", None)[i % 3], "logprobs": i % 2 == 0, "temperature": 0.9 if i % 4 else 0.0}
        draft = [says, {"role": "user", "content": f"write of the thing {i % 5}"}]
        critique = [says, {"role": "user", "content": f'what is wrong in: {{{{ outputs["draft {i}"] }}}}'}]
        revise = [{"role": "user", "content": f'now mend it: {{{{ outputs["critique {i}"] }}}}'}]
        rows += [
            {"id": f"draft {i}", "messages": draft, "n": i % 3 + 1, **common},
            {"id": f"critique {i}", "messages": critique, "depends_on": [f"draft {i}"], "n": 1, **common},
            {
                "id": f"revise {i}",
                "messages": revise,
                "parent": f"draft {i}",
                "parent_sample": i % 3,
                "depends_on": [f"critique {i}"],
                "n": 2,
                **common,
            },
        ]
    for i in range(16):
        stem = ("the king and the other one are in the ring", "on and on", "you")[i % 3]
        greedy = i % 4 == 0
        rows.append({"id": f"row {i}", "prompt": f"{stem} {i}", "n": i % 3 + 1, "temperature": 0.0 if greedy else 0.7})
    rows += [
        {"id": "twin", "prompt": "the king and the other one are in the ring 0", "temperature": 0.0, "n": 2},
        {"id": "cold", "prompt": "x", "temperature": -1.0},
        {"id": "empty", "prompt_token_ids": []},
        {"id": "orphan", "prompt": "x", "parent": "nobody"},
        {"id": "downstream", "prompt": "x", "parent": "cold"},
        {"id": "after long", "prompt": "x", "depends_on": ["long"]},
        {"id": "long", "prompt": "x" * 600, "depends_on": ["draft 0"]},
    ]
    return [{**row, "tag": number} for number, row in enumerate(rows)]


@dataclass(frozen=True, slots=True)
class Whole:
    """A job, and what a run of it gives that nothing comes between."""

    cli: ForkedCli
    command: tuple[str, ...]  # without where the result goes
    results: pa.Table
    summary: dict[str, Any]
    phases: dict[str | None, float]  # seconds, by the event that each begins with

    def run(
        self, out: Path, stop: Stop | None = None, *, told: Path | None = None
    ) -> tuple[Ended, dict[str, Any] | None]:
        """The command, and its summary if it ended as it should. `told` is where its log goes."""
        folder = (told or out.parent) / f"{out.name}.told"
        folder.mkdir(exist_ok=True)
        summary = folder / "summary.json"
        summary.unlink(missing_ok=True)
        arguments = [*self.command, "--out", str(out), "--summary", str(summary)]
        ended = self.cli(arguments, log=folder / "log.jsonl", stop=stop)
        return ended, json.loads(summary.read_text()) if ended.code == 3 else None


def command_of(folder: Path) -> tuple[str, ...]:
    jobs = folder / "jobs.jsonl"
    jobs.write_text("".join(json.dumps(row) + "\n" for row in job_rows()))
    return ("run", str(jobs), "--model", str(save_tiny(FAMILIES["llama"](), folder / "model")), *OPTIONS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    folder = tmp_path_factory.mktemp("whole")
    command, out = command_of(folder), folder / "whole.parquet"
    with ForkedCli(folder / "model") as cli:
        for _ in range(2):  # the first one warms what the file system holds
            out.unlink(missing_ok=True)
            first = Whole(cli, command, pa.table({}), {}, {})
            ended, summary = first.run(out)
            assert summary is not None, ended
        assert summary is not None
        phases = phases_of(folder / "whole.parquet.told" / "log.jsonl", ended.seconds)
        yield Whole(cli, command, pq.read_table(out), summary, phases)


def phases_of(log: Path, seconds: float) -> dict[str | None, float]:
    times = {line["event"]: datetime.fromisoformat(line["time"]) for line in map(json.loads, log.open())}
    events = ["started", "read", "publishing", "finished"]
    lengths = {one: (times[next_one] - times[one]).total_seconds() for one, next_one in pairwise(events)}
    return {None: seconds - sum(lengths.values()), **lengths}


def same_results(one: pa.Table, other: pa.Table, *, exactly: bool) -> bool:
    """In all columns; logprobs to rounding where a row's bits depend on the rows that run with it."""
    if exactly:
        return bool(one.equals(other))
    lists = (table["logprobs"].to_pylist() for table in (one, other))
    return bool(one.drop_columns("logprobs").equals(other.drop_columns("logprobs"))) and all(
        (a is None) == (b is None) and (a is None or np.allclose(a, b, atol=1e-5)) for a, b in zip(*lists, strict=True)
    )


def sequence_of(row: int, sample: int) -> tuple[int, int]:
    """What is generated once: greedy samples of a row and of its twin are the same."""
    rows = job_rows()
    if rows[row]["id"] == "twin":
        row = next(number for number, one in enumerate(rows) if one["id"] == "row 0")
    return row, 0 if rows[row].get("temperature") == 0.0 else sample


def held_by(out: Path) -> set[tuple[int, int]]:
    """The samples that part files hold."""
    found = [
        (cells["row"], cells["sample"])
        for path in sorted(parts_path(out).glob("part-*"))
        for batch in read_part(path)
        for cells in batch.select(["row", "sample", "error_code"]).to_pylist()
        if cells["error_code"] is None
    ]
    assert len(found) == len(set(found))
    return set(found)


def generated_beside(results: pa.Table, done: set[tuple[int, int]]) -> int:
    """Tokens that must be generated if the samples in `done` are there."""
    number = {row["id"]: i for i, row in enumerate(job_rows())}
    left = {
        sequence_of(number[cells["id"]], cells["sample_index"]): cells["num_generated_tokens"]
        for cells in results.select(["id", "sample_index", "num_generated_tokens"]).to_pylist()
        if (number[cells["id"]], cells["sample_index"]) not in done
    }
    return sum(left.values())


def check_gone_on_with(whole: Whole, out: Path, *, told: Path | None = None) -> None:
    """The same command again ends well, having done only what was left."""
    if out.exists() and not parts_path(out).exists():  # nothing was left
        assert same_results(pq.read_table(out), whole.results, exactly=whole.summary["batch_invariant"])
        return
    done, is_complete = held_by(out), (parts_path(out) / "complete.json").exists() or out.exists()
    ended, summary = whole.run(out, told=told)
    assert summary is not None, ended
    results = pq.read_table(out)
    assert same_results(results, whole.results, exactly=whole.summary["batch_invariant"])
    assert not parts_path(out).exists()
    if not is_complete:
        assert summary["resumed_samples"] == len(done)
        assert summary["generated_tokens"] == generated_beside(whole.results, done)
    for name in ("rows", "samples", "ok", "errors"):
        assert summary[name] == whole.summary[name]


def kill(whole: Whole, out: Path, event: str | None, share: float) -> bool:
    """Kills a run when a share of that part of its life is over.

    Returns:
        Whether one had come to its end before, as it was faster than the one that was measured.
    """
    for attempt in range(10):
        ended, _ = whole.run(out, Stop(event, share / 2**attempt * whole.phases[event]))
        if ended.code == -signal.SIGKILL:
            return attempt > 0
        assert ended.code == 3, ended
        out.unlink()
    raise AssertionError("no run could be killed")


def test_the_job_has_all_that_can_be_lost(whole: Whole) -> None:
    codes = [code for code in whole.results["error_code"].to_pylist() if code]
    assert codes == ["bad_parameter", "empty_prompt", "missing_dependency", *["dependency_failed"] * 2, "too_long"]
    assert whole.summary["generated_tokens"] == generated_beside(whole.results, set())
    assert 0 < whole.summary["prefill_tokens"] == whole.summary["planned_prefill_tokens"]
    assert len(set(whole.results["num_cached_tokens"].to_pylist())) > 10
    assert set(whole.results["finish_reason"].to_pylist()) == {"stop", "length", "error"}
    assert min(whole.phases.values()) > 0, whole.phases


def instants(seed: int) -> list[tuple[str | None, float]]:
    """Parts of a run's life and shares of them, in random order."""
    chance = random.Random(seed)
    found = [(event, (i + chance.random()) / count) for event, count in KILLS.items() for i in range(count)]
    chance.shuffle(found)
    return found


@pytest.mark.parametrize("pair", range(sum(KILLS.values()) // 2))
def test_killed_twice_at_any_instant(whole: Whole, tmp_path: Path, pair: int) -> None:
    out = tmp_path / "out.parquet"
    held: set[tuple[int, int]] = set()
    for event, share in instants(seed=5)[2 * pair : 2 * pair + 2]:
        if kill(whole, out, event, share):
            held.clear()
        assert held <= held_by(out)
        held = held_by(out)
    check_gone_on_with(whole, out)


@pytest.mark.parametrize("is_before", [True, False])
def test_killed_at_the_final_rename(whole: Whole, tmp_path: Path, is_before: bool) -> None:
    out = tmp_path / "out.parquet"
    ended, _ = whole.run(out, Stop(target=str(out.resolve()), is_before=is_before))
    assert ended.code == -signal.SIGKILL
    assert out.exists() != is_before
    assert parts_path(out).exists()
    ended, summary = whole.run(out)
    assert summary is not None, ended
    assert pq.read_table(out).equals(whole.results)
    assert not parts_path(out).exists()
    assert summary["generated_tokens"] == whole.summary["generated_tokens"]  # that of the run that was killed
    ended, _ = whole.run(out)
    assert ended.code == 2
    assert "exists" in ended.stderr


def test_a_real_process_is_killed(whole: Whole, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    command = [sys.executable, "-m", "batchkv.cli.main", *whole.command, "--out", str(out), "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        wait_for_samples(out, process)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert held_by(out)
    check_gone_on_with(whole, out)


def wait_for_samples(out: Path, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None and not held_by(out):
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "event", "share"),
    [(signal.SIGTERM, "read", 0.1), (signal.SIGTERM, "read", 0.6), (signal.SIGINT, "started", 0.5)],
)
def test_interrupted(whole: Whole, tmp_path: Path, number: signal.Signals, event: str, share: float) -> None:
    out = tmp_path / "out.parquet"
    ended, _ = whole.run(out, Stop(event, share * whole.phases[event], number))
    assert ended.code == 130, ended
    says, *how = ended.stderr.splitlines()
    assert says == f"batchkv: interrupted by {number.name}"
    go_on = f"batchkv: what is finished is in {parts_path(out)}: give the same command to go on"
    assert how == ([go_on] if parts_path(out).exists() else [])
    assert parts_path(out).exists() == (event == "read" and share > 0.5)  # by then there are samples
    assert not out.exists()
    check_gone_on_with(whole, out)


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_part_that_is_torn_or_damaged_is_used_up_to_there(whole: Whole, tmp_path: Path, is_cut: bool) -> None:
    out = tmp_path / "out.parquet"
    kill(whole, out, "read", 0.7)
    (part,) = parts_path(out).glob("part-*")
    held, data = held_by(out), bytearray(part.read_bytes())
    if is_cut:
        del data[-len(data) // 4 :]
    else:
        data[len(data) // 2] ^= 1
    part.write_bytes(data)
    assert held_by(out) < held
    check_gone_on_with(whole, out)


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """A file system in memory that holds only so much."""

    path: Path

    def resize(self, kib: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={kib}k", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "batchkv-tests", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here: that takes rights that this user has not")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def says_how_to_go_on(ended: Ended) -> bool:
    lines = ended.stderr.splitlines()
    return (
        ended.code == 2
        and len(lines) == 1
        and "No space left on device" in lines[0]
        and lines[0].endswith("what is finished is kept; free some space and give the same command again")
    )


def test_a_disk_that_has_no_room_for_the_parts(whole: Whole, disk: SmallDisk) -> None:
    out = disk.path / "out.parquet"
    disk.resize(40)
    ended, _ = whole.run(out, told=disk.path.parent)
    assert says_how_to_go_on(ended), ended
    assert 0 < len(held_by(out)) < whole.summary["samples"]
    disk.resize(1024)
    check_gone_on_with(whole, out, told=disk.path.parent)


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl"])
def test_a_disk_that_has_no_room_for_the_result(whole: Whole, disk: SmallDisk, ending: str) -> None:
    out = disk.path / f"out.{ending}"
    jobs = disk.path.parent / "jobs.jsonl"
    chance = random.Random(1)
    rows = [{**row, "ballast": chance.randbytes(1 << 14).hex()} for row in job_rows()]
    jobs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    laden = replace(whole, command=("run", str(jobs), *whole.command[2:]))
    disk.resize(512)
    ended, _ = laden.run(out, told=disk.path.parent)
    assert says_how_to_go_on(ended), ended
    assert len(held_by(out)) == whole.summary["samples"]
    assert not out.exists()
    disk.resize(1 << 14)
    ended, summary = laden.run(out, told=disk.path.parent)
    assert summary is not None, ended
    assert (summary["resumed_samples"], summary["generated_tokens"]) == (whole.summary["samples"], 0)
    if ending == "parquet":
        results = pq.read_table(out)
        assert same_results(results.drop_columns("ballast"), whole.results, exactly=whole.summary["batch_invariant"])


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(FAMILIES["llama"](), tiny_tokenizer(), max_batch_rows=8)


def run_or_say_how_to_go_on(engine: Engine, jobs: Path, out: Path, sampling: SamplingParams) -> dict[str, Any] | None:
    try:
        with open_run_folder(out, overwrite=False) as folder:
            return engine.run_into(folder, jobs, sampling)
    except UserError as error:
        if "free some space and give the same command again" not in str(error):
            raise
        return None


def test_wherever_the_disk_is_full_it_is_said_and_gone_on(engine: Engine, disk: SmallDisk) -> None:
    """From no room at all, little by little, until there is enough: one run that has to be started many times."""
    jobs, out = disk.path.parent / "jobs.jsonl", disk.path / "out.jsonl"
    jobs.write_text("".join(json.dumps(row) + "\n" for row in job_rows()[-25:]))
    sampling = SamplingParams(max_tokens=3)
    failures = 0
    for kib in range(4, 1000, 8):
        disk.resize(kib)
        summary = run_or_say_how_to_go_on(engine, jobs, out, sampling)
        if summary is not None:
            break
        failures += 1
    assert summary is not None
    assert failures > 3
    assert summary["resumed_samples"] > 0
    expected = engine.run(jobs, sampling)
    assert [json.loads(line)["token_ids"] for line in out.open()] == expected["token_ids"].to_pylist()
