"""A constrained row gets the same tokens whatever is computed with it, in whatever order and memory."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from batchkv.engine import Engine
from batchkv.kernels.native_attention import is_covered
from batchkv.sampling_params import SamplingParams
from batchkv.writer import summary_of
from tests.tiny_models import FAMILIES, tiny_tokenizer

needs_native = pytest.mark.skipif(not is_covered(torch.float32), reason="the native kernel was not built")

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["in", "on", "other"]}, "count": {"type": "integer", "maximum": 999, "minimum": 0}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"choices": ["red", "green", "redder", "grey"]},
    {"regex": r"[a-d]{2,9}( \d+)?"},
    {},
    {"json_schema": json.dumps(SCHEMA)},
    {"regex": "(the|thing)+y"},
)
JOB = pa.schema(
    [
        ("id", pa.int64()),
        ("prompt", pa.string()),
        ("choices", pa.list_(pa.string())),
        ("regex", pa.string()),
        ("json_schema", pa.string()),
    ]
)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, n=2, top_k=60, logprobs=True)
GREEDY = SamplingParams(max_tokens=24, logprobs=True)


def jobs(count: int) -> pa.Table:
    """Rows under two headers, some of which end where others go on."""
    random = np.random.default_rng(3)
    headers = ("the answer to the question is here: ", "and another one. ")
    rows = [
        {"id": i, "prompt": headers[i % 2] + "and you " * int(random.integers(0, 5))}
        | CONSTRAINTS[i % len(CONSTRAINTS)]
        for i in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=JOB)


def run(table: pa.Table, sampling: SamplingParams, *, overlap: bool = False, **config: Any) -> pa.Table:
    engine = Engine(FAMILIES["llama"](), tiny_tokenizer(), **config)
    engine._overlap = overlap
    return engine.run(table, sampling)


def samples(results: pa.Table) -> dict[tuple[int, int], tuple[Any, ...]]:
    return {
        (row["id"], row["sample_index"]): (row["token_ids"], row["logprobs"], row["finish_reason"], row["error"])
        for row in results.to_pylist()
    }


@needs_native
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_do_not_depend_on_what_runs_together(sampling: SamplingParams) -> None:
    table = jobs(20)
    expected = samples(run(table, sampling))
    assert {sample[3] for sample in expected.values()} == {None}
    assert {sample[2] for sample in expected.values()} == {"stop", "length"}
    alone: dict[tuple[int, int], tuple[Any, ...]] = {}
    for row in range(0, 20, 3):
        alone |= samples(run(table.slice(row, 1), sampling))
    assert alone == {key: sample for key, sample in expected.items() if key[0] % 3 == 0}
    order = np.random.default_rng(4).permutation(20)
    assert samples(run(table.take(order), sampling)) == expected
    assert samples(run(table, sampling, overlap=True)) == expected
    for limits in ({"max_batch_rows": 3}, {"max_batch_tokens": 16}, {"page_size": 4}, {"no_prefix_sharing": True}):
        assert samples(run(table, sampling, **limits)) == expected
        assert samples(run(table, sampling, overlap=True, **limits)) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sequence_that_was_set_aside_goes_on_where_it_was(overlap: bool) -> None:
    """The samples of a first row end at once, so that more are let in than fit to their ends; these run on."""
    first = pa.Table.from_pylist([{"id": 99, "prompt": "x", "choices": ["y"]}], schema=JOB)
    table = pa.concat_tables([first, jobs(12).filter([i % 5 in (1, 2, 3) for i in range(12)])])
    table = table.append_column("n", pa.array([40] + 7 * [3]))
    sampling = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=False)
    expected = {key: sample[0] for key, sample in samples(run(table, sampling)).items()}
    kv_memory = 240 * Engine(FAMILIES["llama"]()).layout.bytes_per_token
    results = run(table, sampling, overlap=overlap, kv_memory=kv_memory, page_size=4)
    assert summary_of(results.schema)["preempted_sequences"] > 0
    assert {key: sample[0] for key, sample in samples(results).items()} == expected
