"""What `gpu.sh` runs: tests and benchmarks on a GPU one after the other, and GPU.md.

Only the standard library is imported here. Every part is a process of its own with a log of its own. What it needs and
is not installed is said in the table, and whatever happens to it, the others are run. GPU.md is written after each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from benchmarks.markdown import markdown_table

ROOT = Path(__file__).resolve().parents[1]
LOGS = "gpu_logs"
TITLE = "# On a GPU\n\nWritten by `benchmarks/gpu.sh`. [README.md](README.md) says how to read it."
KERNEL_NEEDS = ("numpy", "torch", "triton")
ENGINE_NEEDS = (*KERNEL_NEEDS, "transformers", "pyarrow", "psutil", "jinja2")
TEST_NEEDS = ("pytest", "hypothesis", *ENGINE_NEEDS, "polars")


@dataclass(frozen=True, slots=True)
class Part:
    """One command.

    Attributes:
        title: also the heading of its section.
        name: of its log and of the Markdown that it writes.
        command: arguments of Python.
        needs: modules without which it cannot run.
        timeout_s: then it is ended.
        outcome: what to say when it has ended, given its exit code and the folder of logs.
    """

    title: str
    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...]
    timeout_s: float
    outcome: Callable[[int, Path], str]


@dataclass(frozen=True, slots=True)
class Result:
    """How a part went."""

    part: Part
    outcome: str
    went_through: bool
    minutes: float = 0.0


def plain_outcome(code: int, _: Path) -> str:
    return "done" if code == 0 else f"failed with {code}, see the log"


def test_outcome(code: int, logs: Path) -> str:
    """Counts out of pytest's report."""
    try:
        suites = ElementTree.parse(logs / "tests.xml").getroot().iter("testsuite")
        counts = [
            {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")} for suite in suites
        ]
    except (OSError, ElementTree.ParseError):
        return plain_outcome(code, logs)
    total = {name: sum(count[name] for count in counts) for name in counts[0]} if counts else {}
    failed = total.get("failures", 0) + total.get("errors", 0)
    passed = total.get("tests", 0) - failed - total.get("skipped", 0)
    text = f"{passed} passed, {failed} failed, {total.get('skipped', 0)} skipped"
    return text if code == 0 or failed else f"{text}; pytest ended with {code}"


def make_parts(logs: Path, *, is_smoke: bool, hours: float) -> list[Part]:
    """In the order in which they are run."""
    smoke = ("--smoke",) if is_smoke else ()
    tests = ("tests/kernels", f"--junitxml={logs / 'tests.xml'}", "-o", "pythonpath=", "-p", "no:cacheprovider", "-rf")
    chosen = ("-k", "traffic_counts") if is_smoke else ()
    few_steps = ("--steps", "5") if is_smoke else ()
    timeout_s = 3600 * hours

    def module(name: str, *arguments: str, markdown: str) -> tuple[str, ...]:
        return ("-m", f"benchmarks.{name}", "--markdown", str(logs / f"{markdown}.md"), *arguments)

    parts = [
        Part(
            "Kernel tests",
            "tests",
            ("-m", "pytest", *tests, *chosen),
            TEST_NEEDS,
            timeout_s,
            test_outcome,
        ),
        Part(
            "Planning a step",
            "work_items",
            module("work_items", *few_steps, markdown="work_items"),
            KERNEL_NEEDS,
            timeout_s,
            plain_outcome,
        ),
        Part(
            "Attention",
            "kernels",
            module("kernels", *smoke, markdown="kernels"),
            KERNEL_NEEDS,
            timeout_s,
            plain_outcome,
        ),
        Part(
            "Attention, KV in int8",
            "kernels_int8",
            module("kernels", "--kv-dtype", "int8", "--only", "batchkv", *smoke, markdown="kernels_int8"),
            KERNEL_NEEDS,
            timeout_s,
            plain_outcome,
        ),
    ]
    for shape in ("1B",) if is_smoke else ("1B", "8B"):
        name = f"end_to_end_{shape}"
        command = module("gpu_end_to_end", "--shape", shape, *smoke, markdown=name)
        parts.append(Part(f"End to end, {shape}", name, command, ENGINE_NEEDS, timeout_s, plain_outcome))
    return parts


def pyproject() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@contextmanager
def import_folder() -> Iterator[Path]:
    """A folder of links from which this checkout is imported as if it were installed, folders beside it included."""
    folders: dict[str, str] = pyproject()["tool"]["setuptools"]["package-dir"]
    with tempfile.TemporaryDirectory(prefix="batchkv-import-") as name:
        folder = Path(name)
        for package, source in sorted(folders.items()):  # the package itself before what lies in it
            target = folder.joinpath(*package.split("."))
            if "." in package:
                target.symlink_to(ROOT / source, target_is_directory=True)
                continue
            target.mkdir()
            for entry in (ROOT / source).iterdir():
                if entry.name != "__pycache__":
                    (target / entry.name).symlink_to(entry)
        yield folder


def environment(folder: Path) -> dict[str, str]:
    """For the parts: the checkout before anything installed, and kernels compiled, not interpreted."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # safe path: the working folder, where batchkv lies without its kernels, must not come first
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}


def run_part(part: Part, logs: Path, env: Mapping[str, str]) -> Result:
    """Whatever becomes of it."""
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        return Result(part, f"left out: {', '.join(missing)} not installed", went_through=False)
    started = perf_counter()
    with (logs / f"{part.name}.log").open("w") as log:
        print("$ python", *part.command, file=log, flush=True)
        code = _run(part, env, log)
    minutes = (perf_counter() - started) / 60
    if code is None:
        return Result(part, f"ended after {part.timeout_s / 3600:g} h", False, minutes)
    return Result(part, part.outcome(code, logs), code == 0, minutes)


def _run(part: Part, env: Mapping[str, str], log: TextIO) -> int | None:
    """The exit code; None if it took too long. Nothing that it started is left: that would hold the GPU."""
    process = subprocess.Popen(
        [sys.executable, *part.command],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(part.timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def find_machine(env: Mapping[str, str]) -> dict[str, Any] | str:
    """What `gpu_machine` says; a text says why it says nothing."""
    command = [sys.executable, "-m", "benchmarks.gpu_machine"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    machine: dict[str, Any] = json.loads(lines[-1])
    return machine


def commit() -> str:
    """Of the checkout, and whether there is more than that in it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (" and changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def document(machine: Mapping[str, Any], results: Sequence[Result], logs: Path, *, is_smoke: bool) -> str:
    """GPU.md so far."""
    facts = [
        (
            "GPU",
            f"{machine['gpu']}, {machine['capability']}, {machine['memory_gib']} GiB" if machine["gpu"] else "none",
        ),
        ("driver", machine["driver"] or "unknown"),
        ("torch", f"{machine['torch']}, {machine['toolkit']}"),
        ("Triton", machine["triton"] or "not installed"),
        ("Python", machine["python"]),
        ("C compiler", machine["compiler"] or "none: Triton cannot launch kernels"),
        ("batchkv", f"commit {commit()}"),
        ("date", datetime.now(UTC).date().isoformat()),
    ]
    went = [[r.part.title, r.outcome, f"{r.minutes:.1f}", f"`{LOGS}/{r.part.name}.log`"] for r in results]
    parts = [TITLE, *(["**A smoke test on the CPU, in Triton's interpreter: no results.**"] if is_smoke else [])]
    parts += [markdown_table(["", ""], facts), markdown_table(["part", "outcome", "minutes", "log"], went)]
    for result in results:
        fragment = logs / f"{result.part.name}.md"
        if fragment.exists():
            parts.append(f"## {result.part.title}\n\n{fragment.read_text().strip()}")
    return "\n\n".join(parts) + "\n"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "benchmarks", help="where GPU.md is written")
    parser.add_argument("--smoke", action="store_true", help="tiny, without a GPU: tries the code, measures nothing")
    parser.add_argument("--hours", type=float, default=2.0, help="after which a part is ended")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with import_folder() as folder:
        env = environment(folder)
        machine = find_machine(env)
        if isinstance(machine, str):
            print(f"gpu.sh: torch cannot be asked for a GPU with {sys.executable}: {machine}", file=sys.stderr)
            return 2
        if not machine["gpu"] and not options.smoke:
            print(
                f"gpu.sh: no GPU: torch {machine['torch']} ({machine['toolkit']}) sees none on this machine; "
                "--smoke tries the code without one",
                file=sys.stderr,
            )
            return 2
        if options.smoke:
            env["CUDA_VISIBLE_DEVICES"] = ""
        logs = options.out.resolve() / LOGS
        try:
            shutil.rmtree(logs, ignore_errors=True)  # of an earlier run: nothing of it may be taken for this one's
            logs.mkdir(parents=True)
        except OSError as error:
            print(f"gpu.sh: cannot write to {options.out}: {error}", file=sys.stderr)
            return 2
        parts = make_parts(logs, is_smoke=options.smoke, hours=options.hours)
        return run_parts(parts, machine, options.out.resolve(), env, is_smoke=options.smoke)


def run_parts(
    parts: Sequence[Part], machine: Mapping[str, Any], out: Path, env: Mapping[str, str], *, is_smoke: bool
) -> int:
    """0 if all went through."""
    results: list[Result] = []
    for part in parts:
        print(f"{part.title} ... ", end="", flush=True)
        results.append(run_part(part, out / LOGS, env))
        print(f"{results[-1].outcome} ({results[-1].minutes:.1f} min)", flush=True)
        (out / "GPU.md").write_text(document(machine, results, out / LOGS, is_smoke=is_smoke))
    print(f"{out / 'GPU.md'} written")
    return int(not all(result.went_through for result in results))


if __name__ == "__main__":
    sys.exit(main())
