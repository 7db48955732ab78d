"""Planning is array operations: what it does in Python, line by line, does not grow with the number of rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv.config import EngineConfig
from batchkv.io.read import open_jobs
from batchkv.job_plan import JobPlan
from batchkv.kv_layout import KVLayout, LayerSpec
from batchkv.plan_job import plan_job
from batchkv.planner import list_sequences
from batchkv.preparation import ModelFacts
from batchkv.sampling_params import SamplingParams
from batchkv.token_arena import TokenArena
from batchkv.trie import build_trie
from batchkv.wave import Wave

FACTS = ModelFacts(KVLayout((LayerSpec(1, 1, 1, 1, None),), 1), 1_000, None)
FEW, MANY = 250, 2_000


def forest(rows: int) -> pa.Table:
    """Prompts under a few headers, many of them twins, with parameters of their own."""
    rng = np.random.default_rng(0)
    own = rng.integers(0, 1_000, (rows, 4), np.int32)
    own[::3] = own[0]
    tokens = np.concatenate([np.repeat(rng.integers(0, 3, (rows, 2), np.int32), 40, axis=1), own], axis=1)
    offsets = pa.array(np.arange(0, tokens.size + 1, tokens.shape[1], dtype=np.int32))
    ids = pa.ListArray.from_arrays(offsets, pa.array(tokens.ravel()))
    return pa.table({"prompt_token_ids": ids, "n": 1 + np.arange(rows) % 3, "temperature": np.arange(rows) % 2 * 1.0})


def planned(table: pa.Table | Path) -> JobPlan:
    limits = FACTS.plan_limits(EngineConfig(), kv_bytes=1 << 16, device_type="cpu")
    return plan_job(open_jobs(table), SamplingParams(), None, FACTS, limits)


def lines_run(function: Callable[[], object]) -> int:
    """Lines of Python that `function` runs, every turn of a loop or comprehension counted."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def lines_of_planning(rows: int, folder: Path | None) -> int:
    """Lines of Python run to plan so many rows: of a table, or of a file in the folder."""
    table: pa.Table | Path = forest(rows)
    if folder is not None:
        pq.write_table(table, folder / f"{rows}.parquet")
        table = folder / f"{rows}.parquet"
    planned(table)  # what is done once and kept is not counted

    def plan_all() -> list[object]:
        plan = planned(table)
        return [plan.to_json(), plan.first.cached_tokens()]

    return lines_run(plan_all)


@pytest.mark.parametrize("as_file", [True, False])
def test_nothing_but_the_hash_of_its_id_is_done_for_every_row(tmp_path: Path, as_file: bool) -> None:
    # In a process of its own: CPython 3.11 can hang where code that ran before is traced.
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        folder = tmp_path if as_file else None
        few, many = (processes.submit(lines_of_planning, rows, folder).result() for rows in (FEW, MANY))
    # the key of each row is a hash of its id: that, and nothing else, is done one by one
    assert many - few < 12 * (MANY - FEW)


def test_no_object_is_kept_for_every_row() -> None:
    table = forest(MANY)
    planned(table)
    before = sys.getallocatedblocks()
    kept = planned(table)
    assert sys.getallocatedblocks() - before < MANY / 2
    assert kept.rows == MANY


def naive_sequences(wave: Wave, row_prompt: list[int]) -> tuple[list[tuple[int, int, int]], list[int]]:
    """(prompt, row, sample) of each sequence, and the sequence of each result row: one row after the other."""
    found: list[tuple[int, int, int]] = []
    twins: dict[tuple[int, int, tuple[str, ...]], int] = {}
    outputs: dict[tuple[int, int], int] = {}
    for row in sorted(range(len(row_prompt)), key=lambda row: (row_prompt[row], row)):
        params, prompt = wave.params[row], row_prompt[row]
        for sample in range(params.n):
            twin = (prompt, params.max_tokens, params.stop)
            if params.greedy and twin in twins:
                outputs[row, sample] = twins[twin]
                continue
            outputs[row, sample] = len(found)
            if params.greedy:
                twins[twin] = len(found)
            found.append((prompt, row, sample))
    return found, [outputs[place] for place in sorted(outputs)]


a_row = st.tuples(
    st.integers(0, 3),
    st.builds(
        SamplingParams,
        n=st.integers(1, 3),
        max_tokens=st.sampled_from([4, 5]),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 1),
        stop=st.sampled_from([(), ("x",)]),
        logprobs=st.booleans(),
    ),
)


@given(st.lists(a_row, max_size=12))
def test_sequences_are_listed_as_one_row_after_the_other_would_be(rows: list[tuple[int, SamplingParams]]) -> None:
    arena = TokenArena.from_rows([np.array([first, 7], np.int32) for first, _ in rows])
    wave = Wave.of(arena, [params for _, params in rows])
    trie = build_trie(arena)
    new_tokens = np.array([params.max_tokens for _, params in rows], np.int64)
    table = list_sequences(wave, trie, new_tokens)
    expected, outputs = naive_sequences(wave, trie.row_prompt.tolist())
    got = zip(table.prompt.tolist(), table.row.tolist(), table.sample.tolist(), strict=True)
    assert list(got) == expected
    assert table.output_sequence.tolist() == outputs
    assert table.max_new_tokens.tolist() == [int(new_tokens[row]) for _, row, _ in expected]
