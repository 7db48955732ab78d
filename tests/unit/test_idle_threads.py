"""Threads that wait for others sleep, unless the environment says something else."""

from __future__ import annotations

import os

import pytest

from batchkv.idle_threads import let_waiting_threads_sleep


@pytest.mark.parametrize(
    ("said", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_what_the_environment_says_stands(
    said: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    let_waiting_threads_sleep()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
