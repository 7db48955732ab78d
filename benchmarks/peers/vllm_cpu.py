"""vLLM's CPU build: one `LLM.generate` call, prefix caching on, every core computing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from peer_protocol import Params, Row, Samples, Task, answer, measure, pages, parse_task, read_rows

STARTED = perf_counter()
BLOCK_SIZE = 128  # its default on a CPU
SLOW_BFLOAT16 = "in float32, as its bfloat16 is slower on this processor"
KV_BYTES = 2 << 30  # keeps it from asking for nearly all memory; how many blocks there are is said apart


def set_environment(threads: int) -> None:
    """What its documentation asks for, and every core: by default it keeps one of them for its scheduler.

    Its workers are processes of their own, so it is early enough here.
    """
    openmp = Path(sys.prefix, "lib", "libiomp5.so")  # of the package intel-openmp, which it depends on
    if openmp.exists():
        os.environ.setdefault("LD_PRELOAD", str(openmp))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")


def dtype_of(task: Task) -> str:
    """The one asked for, but float32 where the processor has no instructions for bfloat16: there its products are the
    plain ones of torch."""
    import torch

    has_bfloat16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return task.dtype if has_bfloat16 or task.dtype != "bfloat16" else "float32"


def load(task: Task) -> Any:
    set_environment(task.threads)
    from vllm import LLM

    return LLM(
        model=str(task.model),
        dtype=dtype_of(task),
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=pages(task.kv_tokens, BLOCK_SIZE),
        kv_cache_memory_bytes=KV_BYTES,
        max_num_seqs=task.max_rows,
        enable_prefix_caching=True,
        generation_config="vllm",  # no defaults from the model's folder
    )


def sampling_params(params: Params) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        n=params.n,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        ignore_eos=params.ignore_eos,
    )


def run(llm: Any, rows: list[Row]) -> Samples:
    outputs = llm.generate(
        [{"prompt_token_ids": row.prompt} for row in rows],
        [sampling_params(row.params) for row in rows],
        use_tqdm=False,
    )
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def main() -> None:
    task = parse_task()
    llm = load(task)
    rows = read_rows(task.job, task.limit)
    notes = [f"blocks of {BLOCK_SIZE}", "all cores", *([SLOW_BFLOAT16] if dtype_of(task) != task.dtype else [])]
    answer(measure(STARTED, rows, lambda rows: run(llm, rows), distribution="vllm-cpu", note=", ".join(notes)))


if __name__ == "__main__":
    main()
