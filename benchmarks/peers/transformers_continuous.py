"""transformers' continuous batching: `generate_batch`, paged, prefix blocks shared."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from peer_protocol import Params, Row, Samples, Task, by_params, pages, parse_task, serve

STARTED = perf_counter()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig  # noqa: E402

PAGE_SIZE = 32
NO_END = -1


def load(task: Task) -> Any:
    torch.set_num_threads(task.threads)
    return AutoModelForCausalLM.from_pretrained(
        task.model, dtype=getattr(torch, task.dtype), attn_implementation="sdpa"
    )


def generation_config(params: Params, end_token: int | None) -> Any:
    sampled = {} if params.greedy else {"temperature": params.temperature}
    if not params.greedy and params.top_p < 1:
        sampled["top_p"] = params.top_p
    if not params.greedy and params.min_p > 0:
        raise ValueError("min_p is not passed on to continuous batching: drop the column")
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=params.max_tokens,
        do_sample=not params.greedy,
        num_return_sequences=params.n,
        top_k=params.top_k,
        eos_token_id=NO_END if params.ignore_eos else end_token,
        **sampled,
    )


def run(model: Any, task: Task, rows: list[Row]) -> Samples:
    samples: Samples = [[] for _ in rows]
    for params, numbers in by_params(rows):
        outputs = model.generate_batch(
            inputs=[rows[number].prompt for number in numbers],
            generation_config=generation_config(params, model.config.eos_token_id),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE,
                num_blocks=pages(task.kv_tokens, PAGE_SIZE),
                max_requests_per_batch=task.max_rows,
            ),
        )
        tokens = [list(output.generated_tokens) for output in outputs.values()]  # in order, children side by side
        for place, number in enumerate(numbers):
            samples[number] = tokens[place * params.n : (place + 1) * params.n]
    return samples


def main() -> None:
    task = parse_task()
    model = load(task)
    note = f"pages of {PAGE_SIZE}"
    serve(STARTED, lambda rows: run(model, task, rows), distribution="transformers", note=note)


if __name__ == "__main__":
    main()
