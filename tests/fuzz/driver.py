"""Feeds inputs to a child process, and looks after it: its time, its memory, its end."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.mutators import make_input
from tests.fuzz.target import Target

MAX_SECONDS = 5.0  # of the processor, so that a busy machine finds nothing more
_SILENT_SECONDS = 300.0  # of the clock, on which other processes run, too
_CHILD_INPUTS = 1_000  # address space that libraries have once taken they do not give back
MAX_BYTES = 1 << 30  # more than the process had before the input
_GUARD_BYTES = 6 << 30  # address space: ends the child before it takes all of the machine's memory


@dataclass(slots=True)
class Findings:
    """What happened.

    Attributes:
        inputs: so many were tried.
        outcomes: how many went which way.
        slowest_s: of one input, of the processor.
        largest_bytes: what one input took.
    """

    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    largest_bytes: int = 0


def fuzz(numbers: range, seed: int, folder: Path) -> Findings:
    """Tries the inputs with these numbers. Those that are found are kept in `folder`, with a note on each."""
    folder.mkdir(parents=True, exist_ok=True)
    found = Findings()
    target = Target()
    for first in range(0, len(numbers), _CHILD_INPUTS):
        left = numbers[first : first + _CHILD_INPUTS]
        while left:
            left = _with_one_child(left, seed, folder, target, found)
    return found


def _with_one_child(left: range, seed: int, folder: Path, target: Target, found: Findings) -> range:
    """Tries inputs until the process ends; those that are left."""
    work = folder / f"work-{os.getpid()}"
    work.mkdir(exist_ok=True)
    reader, writer = os.pipe()
    copied, is_copied = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.close(is_copied)
        _child(left, seed, work, target, writer, copied)
    os.close(writer)
    os.close(copied)
    try:
        for line in _lines(reader):
            number = int(line[0])
            found.inputs += 1
            seconds, taken = float(line[1]), int(line[2])
            found.slowest_s, found.largest_bytes = max(found.slowest_s, seconds), max(found.largest_bytes, taken)
            if line[3] != "ok":
                _keep(work, folder, number, line[3])
                os.write(is_copied, b"!")
            found.outcomes[line[3]] += 1
            left = left[1:]
        reason = "ended"
    except TimeoutError:
        reason = "hang"
    finally:
        os.close(reader)
        os.close(is_copied)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    if not left:
        shutil.rmtree(work)
        return left
    if reason == "ended":
        reason = f"signal-{os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "exit"
    if not (work / "note").exists():
        (work / "note").write_text(reason)
    _keep(work, folder, left[0], reason)
    found.inputs += 1
    found.outcomes[reason] += 1
    return left[1:]


def _keep(work: Path, folder: Path, number: int, reason: str) -> None:
    for path in work.glob("input.*"):
        shutil.copy(path, folder / f"{number}-{reason}{path.suffix}")
    with contextlib.suppress(FileNotFoundError):
        shutil.copy(work / "note", folder / f"{number}-{reason}.txt")


def _lines(reader: int) -> Iterator[list[str]]:
    """What the child says of each input. A child that stays silent for too long is stuck."""
    held = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            if not selector.select(_SILENT_SECONDS):
                raise TimeoutError
            got = os.read(reader, 4096)
            if not got:
                return
            held += got
            *whole, held = held.split(b"\n")
            for line in whole:
                yield line.decode().split()


def _child(numbers: range, seed: int, work: Path, target: Target, writer: int, copied: int) -> None:
    """Never returns."""
    try:
        os.setpgid(0, 0)
        _guard()
        for number in numbers:
            line = _tried(number, seed, work, target)
            os.write(writer, line.encode())
            if " ok\n" not in line:
                os.read(copied, 1)  # the file is not to be replaced before it is copied
    except BaseException:
        (work / "note").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _tried(number: int, seed: int, work: Path, target: Target) -> str:
    made = make_input(seed, number)
    for old in work.iterdir():
        old.unlink()
    path = work / f"input{made.suffix}"
    path.write_bytes(made.content)
    before = _reset_peak()
    started = _processor_seconds()
    problems = target.problems(path)
    seconds = _processor_seconds() - started
    taken = _peak() - before
    outcome = "ok"
    if problems:
        outcome = "traceback" if problems[0].startswith("Traceback") else "message"
    elif seconds > MAX_SECONDS:
        outcome, problems = "slow", [f"{seconds:.1f} s"]
    elif taken > MAX_BYTES:
        outcome, problems = "memory", [f"{taken >> 20} MiB"]
    if problems:
        (work / "note").write_text("\n".join(problems), errors="backslashreplace")
    return f"{number} {seconds:.4f} {taken} {outcome}\n"


def _processor_seconds() -> float:
    """Of this process and of those that it has started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _guard() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _GUARD_BYTES, size + _GUARD_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Bytes of memory that the process had at most since the last reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10
