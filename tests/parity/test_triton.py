"""A whole job on the Triton kernels, in the interpreter where there is no GPU: the tokens of each row alone.

Steps overlap and decode steps go through graphs (on a CPU: the same buffers, nothing recorded), as on a GPU.
"""

from __future__ import annotations

import gc
import weakref
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from batchkv.config import EngineConfig
from batchkv.decode_graphs import buckets
from batchkv.engine import Engine, kv_budget_bytes
from batchkv.errors import UserError
from batchkv.kernels.native_library import instruction_sets
from batchkv.kernels.tiles import load_tiles
from batchkv.model_runner import ModelRunner
from batchkv.sampling_params import SamplingParams
from batchkv.writer import summary_of
from tests.kernels.test_attention import DEVICE
from tests.oracle import generate_alone
from tests.parity.test_families import model_of, table
from tests.tiny_models import VOCAB_SIZE

NEW_TOKENS = 4


def on_device(family: str) -> PreTrainedModel:
    """A copy of the family's model where Triton runs."""
    return deepcopy(model_of(family)).to(DEVICE)


def prompts() -> list[list[int]]:
    """Two that fork in the middle of a page of a header, one that is a prefix of another, one that shares nothing."""
    tokens = np.random.default_rng(5).integers(0, VOCAB_SIZE, 60).tolist()
    header = tokens[:19]
    return [header + tokens[19:26], header + tokens[26:29], header, tokens[30:39]]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_job_on_the_triton_kernels_gives_every_row_the_tokens_it_gets_alone(family: str) -> None:
    """Full attention; windows with soft caps; windows with sinks."""
    model = model_of(family)
    results = Engine(on_device(family), attention="triton", max_batch_tokens=24).run(
        table(prompts()), SamplingParams(max_tokens=NEW_TOKENS)
    )
    assert results["token_ids"].to_pylist() == [generate_alone(model, prompt, NEW_TOKENS) for prompt in prompts()]
    summary = summary_of(results.schema)
    assert summary["prefill_tokens"] == summary["planned_prefill_tokens"]
    assert summary["attention"] == "triton"
    # on a GPU experts in fp32 ask the host
    assert summary["decode_graphs"] == "recorded" or (family == "gpt_oss" and DEVICE.type == "cuda")
    assert summary["graph_steps"] or family == "gpt_oss"


def test_quantized_keys_and_values_give_the_same_tokens_on_triton_as_on_torch() -> None:
    tokens = [
        Engine(on_device("llama") if attention == "triton" else model_of("llama"), attention=attention, kv_dtype="int8")
        .run(table(prompts()), SamplingParams(max_tokens=NEW_TOKENS))["token_ids"]
        .to_pylist()
        for attention in ("triton", "torch")
    ]
    assert tokens[0] == tokens[1]


def test_a_model_that_cannot_be_recorded_runs_without_graphs_and_the_summary_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr("batchkv.decode_graphs._recorder_of", lambda device: refuse)
    results = Engine(on_device("llama"), attention="triton").run(table(prompts()[:1]), SamplingParams(max_tokens=2))
    assert results["token_ids"].to_pylist() == [generate_alone(model_of("llama"), prompts()[0], 2)]
    assert summary_of(results.schema)["decode_graphs"] == "operation not permitted when stream is capturing"


@pytest.mark.parametrize(
    ("max_rows", "expected"), [(1, (16,)), (16, (16,)), (40, (16, 32, 48)), (256, (16, 32, 48, 64, 96, 128, 192, 256))]
)
def test_graphs_are_for_few_numbers_of_rows(max_rows: int, expected: tuple[int, ...]) -> None:
    assert buckets(max_rows) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_triton_on_a_cpu_outside_of_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchkv.kernels.selection._interprets", lambda: False)
    with pytest.raises(UserError, match="--attention triton needs a GPU: take --attention auto"):
        Engine(model_of("llama"), attention="triton")


def test_a_fraction_of_gpu_memory_counts_what_an_earlier_run_has_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps that memory, so the driver does not call it free."""
    free = {"mem_get_info": (1 << 30, 4 << 30), "memory_reserved": 2 << 30, "memory_allocated": 1 << 29}
    for name, value in free.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    gpu = torch.device("cuda")
    assert kv_budget_bytes(EngineConfig(kv_memory="0.5"), gpu) == ((1 << 30) + (2 << 30) - (1 << 29)) // 2
    assert kv_budget_bytes(EngineConfig(kv_memory="2GiB"), gpu) == 2 << 30


def test_pages_and_graphs_are_let_go_of_when_a_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for Python to find the circle of references."""
    runners: list[weakref.ref[ModelRunner]] = []
    pages: list[weakref.ref[torch.Tensor]] = []
    release = ModelRunner.release

    def noted(runner: ModelRunner) -> None:
        runners.append(weakref.ref(runner))
        pages.extend(weakref.ref(kv.key_SKD) for kv in runner._pages)
        release(runner)

    monkeypatch.setattr(ModelRunner, "release", noted)
    gc.disable()
    try:
        Engine(on_device("llama"), attention="triton").run(table(prompts()[:1]), SamplingParams(max_tokens=2))
        assert pages
        assert not any(page() for page in pages)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"attention": "triton"}, "the kernels for GPUs do not give a row the same bits"),
        ({"attention": "torch"}, "take --attention auto"),
    ],
)
def test_why_a_kernel_cannot_be_deterministic(options: dict[str, Any], expected: str) -> None:
    if options["attention"] == "torch" and not instruction_sets():
        pytest.skip("no native kernel to point to")
    with pytest.raises(UserError, match=expected):
        Engine(
            on_device("llama") if options["attention"] == "triton" else model_of("llama"), deterministic=True, **options
        )


def test_bfloat16_in_the_interpreter_is_refused() -> None:
    if DEVICE.type == "cuda":
        pytest.skip("nothing is interpreted")
    with pytest.raises(UserError, match="wrong products in bfloat16: take --dtype float32"):
        Engine(on_device("llama").to(torch.bfloat16), attention="triton")


def test_heads_that_there_are_no_tiles_for_are_a_users_error() -> None:
    with pytest.raises(UserError, match="for heads of 320, at most 256: use --device cpu"):
        load_tiles("sm_90").tiles(320)
