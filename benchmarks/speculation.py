"""`python -m benchmarks.speculation`: a second epoch over the same prompts, with drafts from the first one and without.

The prompts are the tickets of `data/`, a few samples of each. In the second epoch either the random numbers are the
same, so that all outputs repeat, or they are others, as in training: then samples share words with earlier ones, and
drafts should cost nothing at least. Both kinds are run with drafts and without in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
import typer

from batchkv.drafts import Drafts
from batchkv.engine import Engine
from batchkv.errors import RowError
from batchkv.executor import RunOptions
from batchkv.metrics import RunMetrics
from batchkv.preparation import prepare_wave
from batchkv.random_numbers import row_key
from batchkv.sampling_params import SamplingParams
from batchkv.token_arena import TokenArena
from batchkv.wave import Wave
from batchkv.writer import Completion
from benchmarks.machine import describe, load_average

TICKETS = Path(__file__).resolve().parents[1] / "data" / "tickets.csv"
Completions = list[list[npt.NDArray[np.int32]]]


@dataclass(frozen=True, slots=True, eq=False)
class Epoch:
    """What came of one run over all prompts.

    Attributes:
        completions: of each prompt.
        metrics: counts.
        seconds: of execution, the index of drafts included; without planning.
    """

    completions: Completions
    metrics: RunMetrics
    seconds: float


def wave_of(engine: Engine, prompts: int, sampling: SamplingParams) -> Wave:
    """The first tickets."""
    if engine.tokenizer is None:
        raise typer.BadParameter("the model has no tokenizer")
    texts = pl.read_csv(TICKETS)["text"].to_list()[:prompts]
    token_ids = [engine.tokenizer(f"Ticket: {text}\nAnswer:")["input_ids"] for text in texts]
    arena = TokenArena.from_rows([np.array(ids, np.int32) for ids in token_ids])
    return Wave.of(arena, [sampling] * arena.num_rows)


def with_seed(wave: Wave, seed: int) -> Wave:
    """With other random numbers."""
    return replace(wave, keys=np.array([row_key(seed, i) for i in range(wave.num_requests)], np.uint64))


def run_epoch(engine: Engine, wave: Wave, earlier: Completions | None = None) -> Epoch:
    """All samples, with drafts from `earlier` completions if there are any."""
    prepared = prepare_wave(wave, np.zeros(0, np.int64), engine.layout, engine.limits())
    sequences, memory = prepared.plan.sequences, prepared.plan.memory
    runner = engine.new_runner(memory.pool_pages, memory.page_size)
    completions: Completions = [[] for _ in range(wave.num_requests)]

    def on_ended(ended: Sequence[tuple[int, Completion | RowError]]) -> None:
        for sequence, completion in ended:
            if isinstance(completion, Completion):
                completions[int(sequences.row[sequence])].append(completion.token_ids)

    metrics, started = RunMetrics(), perf_counter()
    drafts = None if earlier is None else Drafts.of_requests(earlier, sequences)
    engine.execute(prepared, runner, None, on_ended, metrics, options=RunOptions(drafts=drafts))
    seconds = perf_counter() - started
    runner.release()
    return Epoch(completions, metrics, seconds)


def compare(engine: Engine, name: str, wave: Wave, earlier: Completions, turns: int) -> str:
    """A line of the table."""
    pairs = [(run_epoch(engine, wave), run_epoch(engine, wave, earlier)) for _ in range(turns)]
    plain, drafted = pairs[0][0].metrics, pairs[0][1].metrics
    ratios = [without.seconds / with_drafts.seconds for without, with_drafts in pairs]
    cells = [
        name,
        f"{drafted.generated_tokens:,}",
        f"{drafted.draft_tokens or 0:,}",
        f"{drafted.accepted_tokens:,}",
        f"{plain.steps:,} / {drafted.steps:,}",
        f"{median(without.seconds for without, _ in pairs):.2f}",
        f"{median(with_drafts.seconds for _, with_drafts in pairs):.2f}",
        f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
    ]
    return f"| {' | '.join(cells)} |"


def main(
    prompts: Annotated[int, typer.Option(help="Tickets.")] = 16,
    n: Annotated[int, typer.Option(help="Samples of each.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="At most, for each sample.")] = 64,
    temperature: Annotated[float, typer.Option(help="Of all samples.")] = 0.7,
    turns: Annotated[int, typer.Option(help="Runs of each kind, in turn.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    model: Annotated[str, typer.Option(help="A folder, a .gguf file or smollm2.")] = "smollm2",
    max_batch_rows: Annotated[int, typer.Option(help="Samples in flight.")] = 64,
) -> None:
    """Print the time of a second epoch with drafts and without, and the ratios: above 1, drafts are faster."""
    engine = Engine(model, dtype=dtype, max_batch_rows=max_batch_rows)
    wave = wave_of(engine, prompts, SamplingParams(n=n, max_tokens=max_tokens, temperature=temperature))
    first = run_epoch(engine, with_seed(wave, 0))
    print(f"{describe()}, {torch.get_num_threads()} threads, load {load_average():.1f}", flush=True)
    print("| random numbers | tokens | drafted | accepted | steps | s without | s with | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for name, seed in (("the same", 0), ("others", 1)):
        print(compare(engine, name, with_seed(wave, seed), first.completions, turns), flush=True)


if __name__ == "__main__":
    typer.run(main)
