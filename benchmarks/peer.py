"""The peers: their scripts, their environments, and the processes that they run in."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from batchkv.errors import UserError
from benchmarks.model_files import ModelFiles
from benchmarks.protocol import Failure, Limits, Outcome, parse_failure, parse_outcome, request_line

SCRIPTS = Path(__file__).parent / "peers"
ENVIRONMENTS = Path(__file__).parent / ".peers"
_POLL_S = 0.2  # how often it is looked whether a script is still there
_TIME_TO_END_S = 20.0


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that runs jobs in a process and an environment of its own.

    Attributes:
        name: as on the command line and in tables.
        script: in `peers/`.
        environment: folder of its virtual environment below the folder of all of them.
        takes_gguf: it is given the GGUF file instead of safetensors.
        needs_own: it does not run in batchkv's environment, which has transformers.
        dtype: of weights and KV, whatever is asked for.
        runs_once: a process answers one run only.
    """

    name: str
    script: str
    environment: str
    takes_gguf: bool = False
    needs_own: bool = True
    dtype: str | None = None
    runs_once: bool = False

    def python(self, environments: Path) -> Path | None:
        """The interpreter to run it with; None if there is none."""
        own = environments / self.environment / "bin" / "python"
        if own.exists():
            return own
        return None if self.needs_own else Path(sys.executable)

    def missing(self, files: ModelFiles, environments: Path) -> Failure | None:
        """Why it need not be tried."""
        if self.python(environments) is None:
            return Failure(f"not installed: there is no {Path(self.environment, 'bin', 'python')} in --environments")
        if self.takes_gguf and files.gguf is None:
            return Failure("not run: it takes GGUF files, and the model is none")
        return None

    def command(self, limits: Limits, files: ModelFiles, environments: Path) -> list[str]:
        """What starts its script.

        Raises:
            UserError: it is `missing`.
        """
        python = self.python(environments)
        model = files.gguf if self.takes_gguf else files.safetensors
        if python is None or model is None:
            raise UserError(f"{self.name}: its environment or its model has gone")
        limits = replace(limits, dtype=self.dtype or limits.dtype)
        return [str(python), str(SCRIPTS / self.script), *limits.arguments(model)]


BATCHKV = Peer("batchkv", "batchkv_engine.py", "batchkv", needs_own=False)
PEERS = {
    peer.name: peer
    for peer in (
        Peer("transformers", "transformers_generate.py", "transformers", needs_own=False),
        Peer("transformers-cb", "transformers_continuous.py", "transformers", needs_own=False),
        Peer("vllm", "vllm_cpu.py", "vllm"),
        Peer("vllm-float32", "vllm_cpu.py", "vllm", dtype="float32"),
        Peer("max", "max_pipeline.py", "max", runs_once=True),
        Peer("llama.cpp", "llama_cpp_batch.py", "llama_cpp", takes_gguf=True),
    )
}


class PeerProcess:
    """A peer's script in a process of its own: loaded once, it answers one run after the other.

    Args:
        command: see `Peer.command`.
    """

    def __init__(self, command: list[str]) -> None:
        self._errors = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 - for as long as the process
        self._errors_told = 0  # how much of them is of runs that were answered
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            env=_environment(),
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        # what a script has started may hold its stdout open after it has ended: so it is read by a thread that may wait
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def run(self, job: Path, limit: int | None, timeout_s: float) -> Outcome | Failure:
        """One run; after a failure the process has ended."""
        deadline = monotonic() + timeout_s
        self._ask(request_line(job, limit))
        while monotonic() < deadline:
            has_ended = self._process.poll() is not None  # asked before the last line is taken
            try:
                outcome = parse_outcome(self._lines.get(timeout=_POLL_S))
            except queue.Empty:
                if has_ended:
                    self._kill()
                    self._errors.seek(self._errors_told)
                    return parse_failure(self._errors.read(), self._process.returncode)
                continue
            if outcome is not None:
                self._errors_told = os.fstat(self._errors.fileno()).st_size
                return outcome
        self._kill()
        return Failure(f"failed: no answer within {timeout_s:g} s")

    def _ask(self, request: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has failed: its errors say why
            self._process.stdin.write(request)
            self._process.stdin.flush()

    def end(self) -> None:
        """Has the script end, as there are no more runs, and then whatever is left of all that it started."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_TIME_TO_END_S)
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _environment() -> dict[str, str]:
    """Ours, without what would lead a peer to other packages, and nothing is sent or fetched."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return environment | {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
