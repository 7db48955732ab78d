"""What the harness asks of a peer's script and what it gets back: arguments, and a JSON line for each run."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

Tokens = tuple[tuple[int, ...], ...]  # of every sample, in order


@dataclass(frozen=True, slots=True)
class Limits:
    """What engines are loaded for; see `Task` in `peers/peer_protocol.py` for the fields."""

    dtype: str
    kv_tokens: int
    max_rows: int
    threads: int

    def arguments(self, model: Path) -> list[str]:
        """The command line of a peer's script."""
        options = {
            "--model": model,
            "--dtype": self.dtype,
            "--kv-tokens": self.kv_tokens,
            "--max-rows": self.max_rows,
            "--threads": self.threads,
        }
        return [word for name, value in options.items() for word in (name, str(value))]


def request_line(job: Path, limit: int | None) -> str:
    """What asks a peer's script to run a job, or its first rows."""
    return json.dumps({"job": str(job.absolute()), "limit": limit}) + "\n"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a peer did; see `peers/peer_protocol.py` for the fields."""

    version: str
    load_s: float
    run_s: float
    prompt_tokens: int
    generated_tokens: int
    token_ids: Tokens
    note: str = ""
    floor_s: float | None = None

    @property
    def total_s(self) -> float:
        """With loading."""
        return self.load_s + self.run_s


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no outcome."""

    reason: str


def parse_outcome(line: str) -> Outcome | None:
    """The answer in a line that a script printed; None if it is none. Engines print to stdout, too."""
    answer = _json_object(line)
    if answer is None or answer.keys() != {field.name for field in fields(Outcome)}:
        return None
    token_ids = tuple(tuple(sample) for sample in answer.pop("token_ids"))
    return Outcome(token_ids=token_ids, **answer)


def parse_failure(stderr: str, code: int) -> Failure:
    """The last line that a script left, and whether that means that the peer is not installed."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if _names_error(line)]
    last = (errors or lines or [f"exit code {code} and no word"])[-1]
    if last.startswith("ModuleNotFoundError: "):
        return Failure(f"not installed: {last.removeprefix('ModuleNotFoundError: ')}")
    return Failure(f"failed: {last[:300]}")


def _names_error(line: str) -> bool:
    """Whether a line is the last one of a traceback: `SomeError: ...`."""
    kind = line.split(":", 1)[0]
    return kind.replace(".", "").isidentifier() and kind.endswith(("Error", "Exception", "Interrupt", "Exit"))


def _json_object(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None
