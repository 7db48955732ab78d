"""`python -m benchmarks.memory JOBS`: how much a run's resident memory grows beyond what the model itself takes.

The model's own is its peak in one forward pass of a full step. A few rows run before that, so that what libraries load
when they are first used is not counted as the job's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer

from batchkv.engine import Engine
from batchkv.heap import return_large_blocks
from batchkv.writer import summary_of

_INTERVAL_S = 0.005
_MIB = 1 << 20


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """The greatest resident memory in the block, in bytes, as the only entry of the list."""
    process, peak, is_over = psutil.Process(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(_INTERVAL_S):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield peak
    is_over.set()
    thread.join()


def own_peak(engine: Engine) -> int:
    """Bytes while the model alone computes a step of 512 tokens and 256 logits."""
    with torch.inference_mode(), peak_memory() as peak:
        for _ in range(2):
            engine.model(torch.zeros(1, 512, dtype=torch.long), use_cache=False, logits_to_keep=256)
    return peak[0]


def main(
    jobs: Annotated[Path, typer.Argument(help="A job file.")],
    model: Annotated[str, typer.Option(help="A folder, a .gguf file or smollm2.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    kv_memory: Annotated[str, typer.Option(help="The KV budget.")] = "360MiB",
) -> None:
    """Run a job and print what its memory grew by, and what is allowed: the KV budget and twice the job's tokens."""
    return_large_blocks()  # as `batchkv run` does
    options: dict[str, Any] = {"dtype": dtype, "kv_memory": kv_memory}
    engine = Engine(model, **options)
    engine.run(str(jobs), limit=2)
    own = own_peak(engine)
    with peak_memory() as peak:
        summary = summary_of(engine.run(str(jobs)).schema)
    tokens = summary["prompt_tokens"] + summary["generated_tokens"]
    budget = summary["kv_budget_tokens"] * summary["kv_bytes_per_token"]
    held = summary["peak_kv_tokens"] * summary["kv_bytes_per_token"]
    print(
        f"{jobs.name}, {dtype}: grew by {(peak[0] - own) / _MIB:.0f} MiB over the model's own {own / _MIB:.0f} MiB; "
        f"allowed {(budget + 2 * 4 * tokens) / _MIB:.0f} MiB "
        f"(KV budget {budget / _MIB:.0f}, of which {held / _MIB:.0f} held)"
    )


if __name__ == "__main__":
    typer.run(main)
