"""What a run computes is told apart from what another does, and written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchkv.manifest import Manifest


def test_a_manifest_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    manifest = Manifest.of(limit=None, stop=("a", "é"), temperature=0.1, job={"file": "jobs", "bytes": 2**40})
    manifest.write(tmp_path / "manifest.json")
    assert Manifest.read(tmp_path / "manifest.json") == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("content", [None, b"", b'{"limit": 1', b"[1]", b"\0" * 100, b"\xff"])
def test_one_that_is_not_whole_is_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "manifest.json"
    if content is not None:
        path.write_bytes(content)
    assert Manifest.read(path) is None


def test_differences_are_named_for_people() -> None:
    before = Manifest.of(limit=None, seed=0, model={"name": "a", "weights": "1"}, gone="x", same=1)
    after = Manifest.of(limit=5, seed=0, model={"name": "a", "weights": "2"}, new="y", same=1)
    assert before.differences(after) == [
        "limit was None and is 5",
        "model has changed",
        "gone was 'x' and is None",
        "new was None and is 'y'",
    ]
    assert before.differences(before) == []
