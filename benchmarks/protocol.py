"""What the harness asks of a peer's script and what it gets back: arguments, and one JSON line."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

Tokens = tuple[tuple[int, ...], ...]  # of every sample, in order


@dataclass(frozen=True, slots=True)
class Request:
    """A run that a peer is asked for; see `peers/peer_protocol.py` for the fields."""

    job: Path
    dtype: str
    limit: int | None
    kv_tokens: int
    max_rows: int
    threads: int

    def arguments(self, model: Path) -> list[str]:
        """The command line of a peer's script."""
        options = {
            "--job": self.job,
            "--model": model,
            "--dtype": self.dtype,
            "--limit": self.limit,
            "--kv-tokens": self.kv_tokens,
            "--max-rows": self.max_rows,
            "--threads": self.threads,
        }
        return [word for name, value in options.items() if value is not None for word in (name, str(value))]


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


def parse_outcome(stdout: str) -> Outcome | None:
    """The answer in what a script printed; None if there is none. Engines print to stdout, too."""
    names = {field.name for field in fields(Outcome)}
    for line in reversed(stdout.splitlines()):
        answer = _json_object(line)
        if answer is not None and answer.keys() == names:
            token_ids = tuple(tuple(sample) for sample in answer.pop("token_ids"))
            return Outcome(token_ids=token_ids, **answer)
    return None


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
