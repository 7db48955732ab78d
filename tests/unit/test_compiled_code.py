"""Compiled code runs as it was written while anyone is inside, and as it is compiled again afterwards."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch._dynamo  # so that something can be compiled

from batchkv.compiled_code import as_written


@pytest.fixture
def compiled() -> tuple[Any, list[int]]:
    """A compiled function, and one entry for each time that it was compiled or that its graph ran."""
    runs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph(*args)

        return run

    return torch.compile(lambda x: x + 1, backend=backend), runs


def test_whoever_leaves_first_leaves_the_others_as_they_are(compiled: tuple[Any, list[int]]) -> None:
    function, runs = compiled
    first, second = ExitStack(), ExitStack()
    first.enter_context(as_written())
    second.enter_context(as_written())
    first.close()
    assert function(torch.ones(2)).tolist() == [2, 2]
    assert not runs
    second.close()
    assert function(torch.ones(2)).tolist() == [2, 2]
    assert runs


def test_it_ends_with_an_exception(compiled: tuple[Any, list[int]]) -> None:
    function, runs = compiled
    with pytest.raises(ZeroDivisionError), as_written():
        raise ZeroDivisionError
    function(torch.ones(2))
    assert runs
