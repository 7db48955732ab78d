"""`python -m benchmarks.scoring`: log-probabilities of given continuations against padded batches of transformers.

Each prompt has several continuations. transformers computes the whole of every row, in batches padded on the left,
with the model's own attention, and logits only where they are needed; both have the same weights in float32. Runs are
taken in turn, as the speed of a shared machine drifts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import typer
from transformers import PreTrainedModel

from batchkv.engine import Engine
from batchkv.model_loader import load_model, resolve_model
from benchmarks.machine import describe, load_average

Logprobs = list[npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens before, and those to score after them."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.context + self.continuation


def make_rows(prompts: int, prompt_tokens: int, continuations: int, continuation_tokens: int, vocab: int) -> list[Row]:
    """Random tokens: what they are changes neither's time."""
    random = np.random.default_rng(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.integers(0, vocab, count).tolist())

    contexts = [tokens(prompt_tokens) for _ in range(prompts)]
    return [Row(context, tokens(continuation_tokens)) for context in contexts for _ in range(continuations)]


def score_shared(engine: Engine, rows: list[Row]) -> Logprobs:
    """Ours, from a table of token ids to a table."""
    job = pa.table(
        {"prompt_token_ids": [row.context for row in rows], "continuation": [row.continuation for row in rows]}
    )
    logprobs = engine.score(job).column("logprobs").combine_chunks()
    return np.split(np.asarray(logprobs.flatten()), np.asarray(logprobs.offsets)[1:-1])


@torch.inference_mode()
def score_padded(model: PreTrainedModel, rows: list[Row], batch_size: int) -> Logprobs:
    """Those of transformers."""
    return [logprobs for batch in _batches(rows, batch_size) for logprobs in _score_batch(model, batch)]


def _batches(rows: list[Row], batch_size: int) -> Iterator[list[Row]]:
    for start in range(0, len(rows), batch_size):
        yield rows[start : start + batch_size]


def _score_batch(model: PreTrainedModel, rows: list[Row]) -> Iterator[npt.NDArray[np.float32]]:
    width = max(len(row.tokens) for row in rows)
    kept = max(len(row.continuation) for row in rows) + 1
    ids = torch.tensor([[0] * (width - len(row.tokens)) + list(row.tokens) for row in rows])
    mask = torch.tensor([[0] * (width - len(row.tokens)) + [1] * len(row.tokens) for row in rows])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=kept)
    logprobs = output.logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1 - kept :, None])[..., 0]
    for row, of_row in zip(rows, logprobs, strict=True):
        yield of_row[-len(row.continuation) :].numpy()


def main(
    prompts: Annotated[int, typer.Option(help="Contexts.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 1024,
    continuations: Annotated[int, typer.Option(help="Continuations of each.")] = 16,
    continuation_tokens: Annotated[int, typer.Option(help="Tokens of each continuation.")] = 32,
    batch_size: Annotated[int, typer.Option(help="Rows of a padded batch.")] = 8,
    rounds: Annotated[int, typer.Option(help="Runs of each.")] = 3,
    model: Annotated[str, typer.Option(help="A folder, a .gguf file or smollm2.")] = "smollm2",
) -> None:
    """Score the same rows both ways, and print the ratio of their times."""
    engine = Engine(model, dtype="float32", device="cpu")
    peer = load_model(resolve_model(model), "float32", torch.device("cpu"))
    vocab = int(engine.model.config.vocab_size)
    rows = make_rows(prompts, prompt_tokens, continuations, continuation_tokens, vocab)
    few = make_rows(1, 64, 2, 8, vocab)
    score_shared(engine, few), score_padded(peer, few, batch_size)  # warm up
    print(f"{describe()}, {torch.get_num_threads()} threads, load {load_average():.1f}")
    ratios = []
    for _ in range(rounds):
        started = perf_counter()
        ours = score_shared(engine, rows)
        between = perf_counter()
        theirs = score_padded(peer, rows, batch_size)
        ended = perf_counter()
        ratios.append((ended - between) / (between - started))
        print(f"batchkv {between - started:.2f} s, transformers {ended - between:.2f} s, ratio {ratios[-1]:.1f}x")
    differences = np.abs(np.concatenate(ours) - np.concatenate(theirs))
    print(
        f"{len(rows)} rows, median {median(ratios):.1f}x ({min(ratios):.1f} to {max(ratios):.1f}), "
        f"log-probabilities differ by {differences.mean():.1e}, at most {differences.max():.1e}"
    )


if __name__ == "__main__":
    typer.run(main)
