"""RESULTS.md: one section for each command, the newest of the same command in place of the one before."""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"
TITLE = """# Results

Written by `python -m benchmarks.offline ... --write`. [README.md](README.md) says what is compared and how.
"""


def with_section(text: str, heading: str, body: str) -> str:
    """The file's text with a section, which replaces one of the same heading."""
    head, *sections = re.split(r"^(?=## )", text or TITLE, flags=re.MULTILINE)
    kept = [section.rstrip() for section in sections if section.splitlines()[0] != f"## {heading}"]
    return "\n\n".join([head.rstrip(), *kept, f"## {heading}\n\n{body.strip()}"]) + "\n"


def write_section(heading: str, body: str, path: Path = RESULTS) -> None:
    text = path.read_text() if path.exists() else ""
    path.write_text(with_section(text, heading, body))
