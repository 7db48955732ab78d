"""What every peer's script shares: its arguments, the jobs that it is asked to run, and the answers.

A script loads its engine once. Then each line of stdin asks for a run and is answered by a line of stdout, until there
are no more; both are JSON.

The scripts run in environments of their own, with this folder alone on their path: nothing here needs more than
pyarrow, and nothing here, nor in the scripts but `batchkv_engine.py`, is batchkv's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import pyarrow.parquet as pq

PARAMETERS = ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos")
NOT_PASSED_ON = ("seed", "stop", "stop_token_ids", "logprobs", "sampling_params")


@dataclass(frozen=True, slots=True)
class Task:
    """What a peer's engine is loaded for.

    Attributes:
        model: folder with safetensors, config and tokenizer; of llama.cpp, the GGUF file.
        dtype: of weights and KV.
        kv_tokens: tokens that the KV cache has room for.
        max_rows: most sequences in flight.
        threads: cores to compute on.
    """

    model: Path
    dtype: str
    kv_tokens: int
    max_rows: int
    threads: int


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run.

    Attributes:
        path: Parquet file with `prompt_token_ids` and sampling columns.
        limit: only the first rows; None runs all.
    """

    path: Path
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Params:
    """How rows are sampled; the defaults are the job format's."""

    n: int = 1
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the job."""

    prompt: list[int]
    params: Params


@dataclass(frozen=True, slots=True)
class Answer:
    """What a peer did.

    Attributes:
        version: of the engine.
        load_s: from the start of the script to the model being ready, imports included; once for all runs.
        run_s: from the rows in memory to all samples in memory.
        prompt_tokens: of all rows, each counted once whatever its `n`.
        generated_tokens: of all samples.
        token_ids: of every sample, rows in order, the samples of a row in order.
        note: what has to be known to read the figures.
        floor_s: of batchkv's script only: see `batchkv_engine.py`.
    """

    version: str
    load_s: float
    run_s: float
    prompt_tokens: int
    generated_tokens: int
    token_ids: list[list[int]]
    note: str = ""
    floor_s: float | None = None


Samples = list[list[list[int]]]  # [row][sample][position]
Run = Callable[[list[Row]], Samples]


def read_rows(job: Job) -> list[Row]:
    """The rows of a job.

    Raises:
        ValueError: a row sets a parameter that the peers are not given.
    """
    table = pq.read_table(job.path)
    table = table if job.limit is None else table.slice(0, job.limit)
    for name in NOT_PASSED_ON:
        if name in table.column_names and table[name].null_count < len(table):
            raise ValueError(f"{job.path}: column {name!r} is not passed on to the peers: drop it")
    names = [name for name in PARAMETERS if name in table.column_names]
    prompts = table["prompt_token_ids"].to_pylist()
    cells = zip(*(table[name].to_pylist() for name in names), strict=True) if names else itertools.repeat(())
    params = ({k: v for k, v in zip(names, values, strict=True) if v is not None} for values in cells)
    return [Row(prompt, Params(**given)) for prompt, given in zip(prompts, params, strict=False)]


def by_params(rows: list[Row]) -> Iterator[tuple[Params, list[int]]]:
    """Row numbers of each set of parameters, for engines that take one set per call."""
    groups: dict[Params, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.params, []).append(number)
    yield from groups.items()


def cut_at_end(tokens: Iterable[int], end_token: int | None) -> list[int]:
    """The tokens up to the end token, which is kept; all of them if there is none."""
    kept = list(tokens)
    return kept[: kept.index(end_token) + 1] if end_token in kept else kept


def parse_task(arguments: list[str] | None = None) -> Task:
    """The task that the command line gives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-tokens", type=int, default=32768)
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    return Task(**vars(parser.parse_args(arguments)))


def asked_jobs() -> Iterator[Job]:
    """The jobs that stdin asks for."""
    for line in sys.stdin:
        asked = json.loads(line)
        yield Job(Path(asked["job"]), asked["limit"])


def serve(
    started: float, run: Run, *, distribution: str, note: str = "", forget: Callable[[], None] = lambda: None
) -> None:
    """Runs every job that is asked for, and answers; the engine is ready now.

    Args:
        started: when the script started.
        run: generates.
        distribution: whose version is told.
        note: goes into the answers.
        forget: empties the caches that a run leaves.
    """
    load_s = perf_counter() - started
    for number, job in enumerate(asked_jobs()):
        if number:
            forget()
        answer(measure(load_s, read_rows(job), run, distribution=distribution, note=note))


def measure(load_s: float, rows: list[Row], run: Run, *, distribution: str, note: str = "") -> Answer:
    """Runs the rows, and checks that every sample is there.

    Args:
        load_s: what loading took.
        rows: of the job.
        run: generates.
        distribution: whose version is told.
        note: goes into the answer.

    Raises:
        RuntimeError: samples are missing or empty, as engines that give up on a row return them.
    """
    ready = perf_counter()
    samples = run(rows)
    ended = perf_counter()
    for number, (row, ofrow) in enumerate(zip(rows, samples, strict=True)):
        if len(ofrow) != row.params.n or not all(ofrow):
            raise RuntimeError(f"row {number} has {sum(map(bool, ofrow))} samples instead of {row.params.n}")
        if row.params.ignore_eos and any(len(sample) != row.params.max_tokens for sample in ofrow):
            raise RuntimeError(f"row {number} has samples of {[*map(len, ofrow)]} tokens, not {row.params.max_tokens}")
    token_ids = [sample for ofrow in samples for sample in ofrow]
    return Answer(
        version=f"{distribution} {importlib.metadata.version(distribution)}",
        load_s=load_s,
        run_s=ended - ready,
        prompt_tokens=sum(len(row.prompt) for row in rows),
        generated_tokens=sum(map(len, token_ids)),
        token_ids=token_ids,
        note=note,
    )


def answer(result: Answer) -> None:
    """Prints the answer, on a line of its own."""
    print()  # whatever the engine left unfinished
    print(json.dumps(asdict(result)))
    sys.stdout.flush()


def with_floor(result: Answer, floor_s: float) -> Answer:
    return replace(result, floor_s=floor_s)


def pages(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens`, at least one."""
    return max(1, math.ceil(tokens / page_size))
