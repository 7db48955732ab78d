"""The peers: their scripts and their environments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.model_files import ModelFiles
from benchmarks.protocol import Failure, Outcome, Request, parse_failure, parse_outcome

SCRIPTS = Path(__file__).parent / "peers"
ENVIRONMENTS = Path(__file__).parent / ".peers"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that runs jobs in a process and an environment of its own.

    Attributes:
        name: as on the command line and in tables.
        script: in `peers/`.
        environment: folder of its virtual environment below the folder of all of them.
        takes_gguf: it is given the GGUF file instead of safetensors.
        needs_own: it does not run in batchkv's environment, which has transformers.
    """

    name: str
    script: str
    environment: str
    takes_gguf: bool = False
    needs_own: bool = True

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

    def run(self, request: Request, files: ModelFiles, environments: Path, timeout_s: float) -> Outcome | Failure:
        """One run in a process of its own."""
        python = self.python(environments)
        model = files.gguf if self.takes_gguf else files.safetensors
        if python is None or model is None:
            return self.missing(files, environments) or Failure("failed: its environment has gone")
        command = [str(python), str(SCRIPTS / self.script), *request.arguments(model)]
        return _answer_of(command, timeout_s)


BATCHKV = Peer("batchkv", "batchkv_engine.py", "batchkv", needs_own=False)
PEERS = {
    peer.name: peer
    for peer in (
        Peer("transformers", "transformers_generate.py", "transformers", needs_own=False),
        Peer("transformers-cb", "transformers_continuous.py", "transformers", needs_own=False),
        Peer("vllm", "vllm_cpu.py", "vllm"),
        Peer("max", "max_pipeline.py", "max"),
        Peer("llama.cpp", "llama_cpp_batch.py", "llama_cpp", takes_gguf=True),
    )
}


def _answer_of(command: list[str], timeout_s: float) -> Outcome | Failure:
    """What a script answers. Engines start processes of their own, so the whole session is ended with it."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(),
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Failure(f"failed: no answer within {timeout_s:.0f} s")
    finally:
        _end_session(process)
    outcome = parse_outcome(stdout)
    if outcome is None or process.returncode:
        return parse_failure(stderr, process.returncode)
    return outcome


def _end_session(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _environment() -> dict[str, str]:
    """Ours, without what would lead a peer to other packages, and nothing is sent or fetched."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return environment | {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
