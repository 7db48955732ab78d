"""batchkv itself, and the floor under it.

The floor is the same model over as many tokens, in steps of the same sizes as the run has just had, with attention left
out: what the job would cost if attention, scheduling and sampling were free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from peer_protocol import Row, Samples, Task, answer, asked_jobs, measure, parse_task, read_rows, with_floor

STARTED = perf_counter()

from batchkv.idle_threads import let_waiting_threads_sleep  # noqa: E402

let_waiting_threads_sleep()  # as the command line does, before torch is there

import numpy as np  # noqa: E402
import polars as pl  # noqa: E402
import torch  # noqa: E402

from batchkv import Engine  # noqa: E402
from batchkv.attention import StepAttention  # noqa: E402
from batchkv.kernels.selection import select_attention  # noqa: E402
from batchkv.kv_layout import KVLayout, layer_specs  # noqa: E402
from batchkv.model_loader import load_config, resolve_model  # noqa: E402
from batchkv.model_runner import paged_attention_of  # noqa: E402
from batchkv.step import AttentionBatch  # noqa: E402

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class StepSize:
    """How much one forward pass had to do."""

    tokens: int
    logits: int


def load(task: Task) -> Engine:
    torch.set_num_threads(task.threads)
    layout = KVLayout(layer_specs(load_config(resolve_model(str(task.model)))), getattr(torch, task.dtype).itemsize)
    return Engine(
        task.model,
        dtype=task.dtype,
        kv_memory=f"{task.kv_tokens * layout.bytes_per_token}B",
        max_batch_rows=task.max_rows,
    )


def run(engine: Engine, job: pl.DataFrame, rows: list[Row]) -> Samples:
    table = engine.run(job)
    if errors := [error for error in table["error"].to_pylist() if error]:
        raise RuntimeError(f"{len(errors)} rows have errors: {errors[0]}")
    tokens = iter(table["token_ids"].to_pylist())
    return [[next(tokens) for _ in range(row.params.n)] for row in rows]


@contextmanager
def recorded(model: torch.nn.Module) -> Iterator[list[StepSize]]:
    """The sizes of the steps that go through the model meanwhile."""
    steps: list[StepSize] = []

    def record(_: torch.nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        steps.append(StepSize(kwargs["input_ids"].shape[1], len(kwargs["logits_to_keep"])))

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield steps
    finally:
        hook.remove()


def no_attention(engine: Engine) -> StepAttention:
    """Of a step whose first token attends to itself, and no other to anything."""
    device, specs = engine.model.device, engine.layout.layers
    backend = select_attention(engine.model.dtype, device)
    one, ends, slots = np.ones(1, np.int64), np.arange(2), np.zeros(1, np.int64)
    table = np.zeros((1, 1), np.int32)
    plans = [backend.plan(AttentionBatch(PAGE_SIZE, spec.window, table, one, ends, slots), spec) for spec in specs]
    pages = [backend.allocate(1, PAGE_SIZE, spec, engine.model.dtype, device) for spec in specs]
    return StepAttention(backend, specs, tuple(pages), tuple(plans), num_tokens=1)


def floor(engine: Engine, steps: list[StepSize]) -> float:
    """Seconds that the steps take without attention."""
    started, attention = perf_counter(), no_attention(engine)
    with torch.inference_mode(), paged_attention_of(engine.model):
        for step in steps:
            positions = torch.arange(step.tokens).unsqueeze(0)
            engine.model(
                input_ids=positions % engine.model.config.vocab_size,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=torch.arange(step.tokens - step.logits, step.tokens),
                step_attention=attention,
            )
    return perf_counter() - started


def main() -> None:
    task = parse_task()
    engine = load(task)
    load_s = perf_counter() - STARTED
    for job in asked_jobs():
        table = pl.read_parquet(job.path, n_rows=job.limit)
        with recorded(engine.model) as steps:
            result = measure(load_s, read_rows(job), partial(run, engine, table), distribution="batchkv")
        answer(with_floor(result, floor(engine, steps)))


if __name__ == "__main__":
    main()
