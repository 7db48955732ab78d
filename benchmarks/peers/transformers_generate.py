"""transformers `generate`: static batches of 32 sequences, left padded, in the order of the job."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from peer_protocol import Params, Row, Samples, Task, by_params, cut_at_end, parse_task, serve

STARTED = perf_counter()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: E402

SEQUENCES = 32
PAD = 0


def load(task: Task) -> Any:
    torch.set_num_threads(task.threads)
    return AutoModelForCausalLM.from_pretrained(task.model, dtype=getattr(torch, task.dtype))


def generation_config(params: Params, end_token: int | None) -> Any:
    sampled = (
        {}
        if params.greedy
        else {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p or None,
        }
    )
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=params.max_tokens,
        do_sample=not params.greedy,
        num_return_sequences=params.n,
        eos_token_id=None if params.ignore_eos else end_token,
        pad_token_id=PAD,
        **sampled,
    )


def generate(model: Any, prompts: list[list[int]], config: Any) -> list[list[int]]:
    """The samples of one batch, those of a row side by side."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    tokens: list[list[int]] = out[:, longest:].tolist()
    return tokens


def run(model: Any, rows: list[Row]) -> Samples:
    end_token = model.config.eos_token_id
    model.generation_config.eos_token_id = None  # what a call leaves out is taken from here
    samples: Samples = [[] for _ in rows]
    for params, numbers in by_params(rows):
        config = generation_config(params, end_token)
        size = max(1, SEQUENCES // params.n)
        for lo in range(0, len(numbers), size):
            batch = numbers[lo : lo + size]
            out = generate(model, [rows[number].prompt for number in batch], config)
            out = out if params.ignore_eos else [cut_at_end(sample, end_token) for sample in out]
            for place, number in enumerate(batch):
                samples[number] = out[place * params.n : (place + 1) * params.n]
    return samples


def main() -> None:
    task = parse_task()
    model = load(task)
    note = f"static batches of {SEQUENCES}, left padded"
    serve(STARTED, lambda rows: run(model, rows), distribution="transformers", note=note)


if __name__ == "__main__":
    main()
