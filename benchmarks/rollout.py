"""`python -m benchmarks.rollout`: rollouts on a live policy beside the two ways in which TRL generates on a CPU itself.

All three are given the module of a real `GRPOTrainer` (it needs `batchkv[rl]`) and the same token ids: so many samples
of each prompt, all of the same length, as end tokens are switched off. Prompts are the tickets of `data/`, end to end
and cut into pieces of one length; none begins as another does, so nothing but the prompts themselves is shared. A
second table scores samples of one long prompt, as trainers do with a reference model, beside the padded forward pass.
Runs are taken in turn.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import polars as pl
import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from batchkv.model_loader import load_model, load_tokenizer, resolve_model
from batchkv.rl.rollout_batch import RolloutBatch
from batchkv.rl.scoring import score
from batchkv.rl.session import rollout
from benchmarks.machine import describe, load_average
from benchmarks.scoring import Row, score_padded

TICKETS = Path(__file__).resolve().parents[1] / "data" / "tickets.csv"
TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True)
class Size:
    """So many prompts of so many tokens, samples of each, tokens of each."""

    prompts: int
    prompt_tokens: int
    samples: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.prompts} of {self.prompt_tokens:,} × {self.samples} × {self.tokens}"


def prompts_of(tokenizer: PreTrainedTokenizerBase, size: Size) -> list[list[int]]:
    """Token ids of prompts.

    Raises:
        ValueError: there are not enough tickets.
    """
    ids = tokenizer("\n".join(pl.read_csv(TICKETS)["text"]))["input_ids"]
    if len(ids) < size.prompts * size.prompt_tokens:
        raise ValueError(f"{size.prompts} prompts of {size.prompt_tokens} tokens: the tickets have only {len(ids)}")
    return [ids[row * size.prompt_tokens :][: size.prompt_tokens] for row in range(size.prompts)]


def trainer_of(model: PreTrainedModel, tokenizer: Any, size: Size, folder: str, *, continuous: bool) -> Any:
    """TRL's, which generates itself."""
    import trl
    from datasets import Dataset

    arguments = trl.GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=size.samples,
        num_generations=size.samples,
        max_completion_length=size.tokens,
        temperature=TEMPERATURE,
        use_transformers_continuous_batching=continuous,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 2}),
    )
    trainer.generation_config.eos_token_id = None
    trainer.eos_token_ids = []
    return trainer


def trl_tokens(trainer: Any, prompts: list[list[int]], size: Size) -> int:
    """How many tokens TRL's own back end generates."""
    repeated = [ids for ids in prompts for _ in range(size.samples)]
    completions = trainer._generate_single_turn(repeated, None, {}, size.samples)[0]
    return sum(map(len, completions))


def our_tokens(model: PreTrainedModel, prompts: list[list[int]], size: Size, step: int) -> int:
    batch = rollout(model, prompts, size.samples, max_tokens=size.tokens, temperature=TEMPERATURE, step=step)
    return len(batch.completions.values)


def seconds_of(run: Callable[[], int], expected: int) -> float:
    seconds, found = _timed(run)
    if found != expected:
        raise RuntimeError(f"{found} tokens were generated, {expected} were asked for: the runs cannot be compared")
    return seconds


def ratios(ours: Callable[[int], int], theirs: Callable[[], int], tokens: int, turns: int) -> tuple[list[float], float]:
    """Their time by ours, in turn; the median of our seconds."""
    pairs = [(seconds_of(lambda: ours(turn), tokens), seconds_of(theirs, tokens)) for turn in range(turns)]  # noqa: B023
    return [other / own for own, other in pairs], median(own for own, _ in pairs)


def compare_generation(model: PreTrainedModel, tokenizer: Any, size: Size, turns: int) -> None:
    prompts = prompts_of(tokenizer, size)
    tokens = size.prompts * size.samples * size.tokens
    print("| TRL generates by | prompts × samples × tokens | s by batchkv | TRL's time / batchkv's |")
    print("|---|---|---|---|")
    for name, continuous in (("`generate`", False), ("continuous batching", True)):
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(model, tokenizer, size, folder, continuous=continuous)
            found, seconds = ratios(
                lambda turn: our_tokens(trainer.model, prompts, size, turn),  # noqa: B023
                lambda: trl_tokens(trainer, prompts, size),  # noqa: B023
                tokens,
                turns,
            )
        print(f"| {name} | {size} | {seconds:.1f} | {_spread(found)} |", flush=True)


def compare_scoring(model: PreTrainedModel, size: Size, turns: int, batch_size: int) -> None:
    """Samples of one prompt each, under the model that drew them."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.config.vocab_size, (size.prompts, size.prompt_tokens)).tolist()
    batch = rollout(model, prompts, size.samples, max_tokens=size.tokens)
    rows = [
        Row(tuple(prompt), tuple(ids))
        for prompt, ids in zip(batch.prompts.lists(), batch.completions.lists(), strict=True)
    ]
    found, seconds, difference = [], [], 0.0
    for _ in range(turns):
        own, ours = _timed(lambda: _scored(model, batch))
        other, theirs = _timed(lambda: np.concatenate(list(score_padded(model, rows, batch_size))))
        found.append(other / own)
        seconds.append(own)
        difference = max(difference, float(np.abs(ours - theirs).max()))
    print("| scored: prompts × samples × tokens | s by batchkv | padded forward's time / batchkv's | max Δlogp |")
    print("|---|---|---|---|")
    print(f"| {size} | {median(seconds):.1f} | {_spread(found)} | {difference:.1e} |", flush=True)


def _scored(model: PreTrainedModel, batch: RolloutBatch) -> Any:
    return score(model, batch).values


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    started = perf_counter()
    result = run()
    return perf_counter() - started, result


def _spread(found: list[float]) -> str:
    return f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def main(
    prompts: Annotated[int, typer.Option(help="Prompts that are sampled from.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Of each of them.")] = 128,
    n: Annotated[int, typer.Option(help="Samples of each.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Of each sample.")] = 64,
    scored_prompt_tokens: Annotated[int, typer.Option(help="Of the one prompt whose samples are scored.")] = 1024,
    scored_tokens: Annotated[int, typer.Option(help="Of each sample that is scored.")] = 32,
    batch_size: Annotated[int, typer.Option(help="Rows of the padded forward pass.")] = 4,
    turns: Annotated[int, typer.Option(help="Runs of each kind, in turn.")] = 3,
    model: Annotated[str, typer.Option(help="A folder, a .gguf file or smollm2.")] = "smollm2",
) -> None:
    """Print how long TRL's own back ends take in batchkv's time, and a padded forward pass; float32."""
    source = resolve_model(model)
    policy = load_model(source, "float32", torch.device("cpu"))
    policy.generation_config.eos_token_id = policy.config.eos_token_id = None
    print(f"{describe()}, {torch.get_num_threads()} threads, load {load_average():.1f}", flush=True)
    compare_scoring(policy, Size(1, scored_prompt_tokens, n, scored_tokens), turns, batch_size)
    compare_generation(policy, load_tokenizer(source), Size(prompts, prompt_tokens, n, max_tokens), turns)


if __name__ == "__main__":
    typer.run(main)
