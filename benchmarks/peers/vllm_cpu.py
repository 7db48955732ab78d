"""vLLM's CPU build: one `LLM.generate` call, prefix caching on, every core computing."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from peer_protocol import Params, Row, Samples, Task, pages, parse_task, serve

STARTED = perf_counter()
BLOCK_SIZE = 128  # its default on a CPU
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


def load(task: Task) -> Any:
    set_environment(task.threads)
    from vllm import LLM

    return LLM(
        model=str(task.model),
        dtype=task.dtype,
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


def forget(llm: Any) -> None:
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache of the last run could not be emptied")


def main() -> None:
    task = parse_task()
    llm = load(task)
    note = f"{task.dtype}, blocks of {BLOCK_SIZE}, all cores"
    serve(STARTED, partial(run, llm), distribution="vllm-cpu", note=note, forget=partial(forget, llm))


if __name__ == "__main__":
    main()
