"""What a run computes, so that it is not gone on with by another."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that decides what the results are: what it is called, and a value that JSON can hold.

    Memory and batch sizes are not in it: they do not change results, and a run may be gone on with on another machine.
    """

    entries: Mapping[str, Any]

    @classmethod
    def of(cls, **entries: Any) -> Manifest:
        """With the entries as JSON gives them back."""
        return cls(json.loads(json.dumps(entries)))

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """None if there is none that is whole: then nothing was begun."""
        try:
            entries = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        return cls(entries) if isinstance(entries, dict) else None

    def write(self, path: Path) -> None:
        """At once and on the disk, or not at all."""
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("w") as file:
            json.dump(self.entries, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    def differences(self, other: Mapping[str, Any] | Manifest) -> list[str]:
        """What has changed from this one to the other, for people."""
        entries = other.entries if isinstance(other, Manifest) else other
        names = [*self.entries, *(name for name in entries if name not in self.entries)]
        return [
            _change(name, self.entries.get(name), entries.get(name))
            for name in names
            if self.entries.get(name) != entries.get(name)
        ]


def _change(name: str, before: Any, after: Any) -> str:
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        changed = [new["file"] for old, new in zip(before, after, strict=True) if old != new and isinstance(new, dict)]
        if changed:
            return f"{name} has changed ({', '.join(changed)})"
    if isinstance(before, (dict, list)) or isinstance(after, (dict, list)):
        return f"{name} has changed"
    return f"{name} was {before!r} and is {after!r}"
