"""`batchkv` again and again in processes that are forked from one that has imported everything: each is a real process
that can be killed at any instant, and starts in a moment instead of in seconds.

The parent of them, `python -m tests.cli_forks MODEL`, has loaded the model once, with one thread, so that none is lost
in a fork. It reads one request a line from its input and answers each with a line, both JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_POLL_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class Stop:
    """When a process gets a signal: some time after an event of its log, or right before or after a file is renamed to
    `target`.
    """

    event: str | None = None  # None: the start of the process
    after_s: float = 0.0
    number: int = signal.SIGKILL
    target: str | None = None
    is_before: bool = True


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit code (negative for a signal), the seconds it took, and what it printed."""

    code: int
    seconds: float
    stderr: str


class ForkedCli:
    """A context manager whose calls run the command line.

    Args:
        model: the directory of a model, whose code is imported.
    """

    def __init__(self, model: Path) -> None:
        self._model = model

    def __enter__(self) -> ForkedCli:
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.cli_forks", str(self._model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait()

    def __call__(self, arguments: Sequence[str], *, log: Path, stop: Stop | None = None) -> Ended:
        """Runs `batchkv ARGUMENTS --log LOG` to its end."""
        log.unlink(missing_ok=True)
        request = {
            "argv": ["batchkv", *arguments, "--log", str(log)],
            "log": str(log),
            "stop": None if stop is None else asdict(stop),
        }
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(request) + "\n")
        self._parent.stdin.flush()
        return Ended(**json.loads(self._parent.stdout.readline()))


def _serve() -> None:
    import batchkv.cli.main
    import batchkv.results  # noqa: F401
    from batchkv.engine import Engine

    Engine(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(asdict(_run(request))), flush=True)


def _run(request: dict[str, Any]) -> Ended:
    stop = None if request["stop"] is None else Stop(**request["stop"])
    printed = Path(request["log"]).with_suffix(".stderr")
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _become_cli(request["argv"], printed, stop)
    if stop is not None and stop.target is None:
        _send_in_time(child, Path(request["log"]), stop, started)
    _, status = os.waitpid(child, 0)
    return Ended(os.waitstatus_to_exitcode(status), time.monotonic() - started, printed.read_text())


def _send_in_time(child: int, log: Path, stop: Stop, started: float) -> None:
    """Waits for the instant, but not longer than the child lives. The caller collects it."""
    since = started if stop.event is None else None
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if since is None and _has_event(log, stop.event or ""):
            since = time.monotonic()
        if since is not None and time.monotonic() - since >= stop.after_s:
            os.kill(child, stop.number)
            return
        time.sleep(_POLL_SECONDS)


def _has_event(log: Path, event: str) -> bool:
    return log.exists() and f'"event": "{event}"' in log.read_text()


def _become_cli(argv: list[str], printed: Path, stop: Stop | None) -> None:
    """In the child; does not return."""
    from batchkv.cli.main import main

    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    if stop is not None and stop.target is not None:
        _die_at_rename(stop)
    sys.argv = argv
    code = 1
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _die_at_rename(stop: Stop) -> None:
    replace = os.replace

    def replace_and_die(source: Any, target: Any) -> None:
        if os.fspath(target) != stop.target:
            replace(source, target)
            return
        if not stop.is_before:
            replace(source, target)
        os.kill(os.getpid(), stop.number)

    os.replace = replace_and_die  # type: ignore[assignment]


if __name__ == "__main__":
    _serve()
