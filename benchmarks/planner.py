"""What planning costs: seconds per stage and memory for jobs of token ids, and how fast texts are tokenized.

    python benchmarks/planner.py                        # up to 1,000,000 rows of 512 token ids: some 8 GB of memory
    python benchmarks/planner.py --rows 10000 100000    # 100,000 texts take some minutes, --texts 0 leaves them out

No model is loaded. Every size is built in one process and planned in another, so that memory is that of planning alone.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from batchkv.choices import ChoiceTokens
from batchkv.config import EngineConfig
from batchkv.constraints import ConstraintChecks
from batchkv.io.read import open_jobs
from batchkv.job import check_rows
from batchkv.job_plan import PlanTotals
from batchkv.kv_layout import KVLayout, LayerSpec
from batchkv.metrics import RunMetrics
from batchkv.model_loader import load_tokenizer, resolve_model
from batchkv.preparation import ModelFacts, prepare_wave
from batchkv.rows import take_in
from batchkv.sampling_params import SamplingParams
from batchkv.tokenization import tokenize
from batchkv.waves import NOTHING, split, wave_of

PROMPT_TOKENS = 512
LEVEL_ENDS = (192, 320, 416, PROMPT_TOKENS)  # where the nodes of each depth end
ZIPF = 1.3
VOCAB_SIZE = 49_152
# SmolLM2-135M in two bytes
FACTS = ModelFacts(KVLayout(tuple(LayerSpec(9, 3, 64, 64, None) for _ in range(30)), 2), VOCAB_SIZE, 8192)
TICKETS = Path(__file__).resolve().parents[1] / "data" / "tickets.parquet"
WORDS_PER_TEXT = (30, 90)
TEXTS_AT_ONCE = 20_000

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of planning one job: seconds by the clock and of the CPU; `peak_bytes` is how much the process grew at most."""

    rows: int
    waves: int
    nodes: int
    prefill_tokens: int
    read_s: float
    check_s: float
    plan_s: float
    cpu_s: float
    peak_bytes: int

    @property
    def seconds(self) -> float:
        return self.read_s + self.check_s + self.plan_s

    @property
    def token_bytes(self) -> int:
        return self.rows * PROMPT_TOKENS * 4


def forest(rows: int, seed: int) -> npt.NDArray[np.int32]:
    """int32 [rows, PROMPT_TOKENS]: prompts that share prefixes to depth 3, in random order.

    Below every node the rows choose among its children by Zipf's law, so that a few have most of the rows; at depth 4
    each has tokens of its own.
    """
    rng = np.random.default_rng(seed)
    tokens = np.empty((rows, PROMPT_TOKENS), np.int32)
    fan_out = max(2, round(2 * rows**0.25))
    node = np.zeros(rows, np.int64)
    start = 0
    for end in LEVEL_ENDS:
        child = np.minimum(rng.zipf(ZIPF, rows), fan_out) if end < PROMPT_TOKENS else np.arange(rows)
        distinct, node = np.unique(node * max(rows, fan_out + 1) + child, return_inverse=True)
        own = rng.integers(0, VOCAB_SIZE, (len(distinct), end - start), np.int32)
        for lo in range(0, rows, 1 << 16):
            tokens[lo : lo + (1 << 16), start:end] = own[node[lo : lo + (1 << 16)]]
        start = end
    rng.shuffle(tokens)
    return tokens


def write_forest(path: Path, rows: int, seed: int) -> None:
    """A job file with one row group, as `pyarrow.parquet.write_table` makes it."""
    tokens = forest(rows, seed)
    offsets = pa.array(np.arange(0, tokens.size + 1, PROMPT_TOKENS, dtype=np.int32))
    pq.write_table(pa.table({"prompt_token_ids": pa.ListArray.from_arrays(offsets, pa.array(tokens.ravel()))}), path)


def plan_file(path: Path) -> Cost:
    """What `batchkv plan` does with a job file."""
    before = psutil.Process().memory_info().rss
    cpu_started = process_time()
    metrics, totals = RunMetrics(), PlanTotals()
    limits = FACTS.plan_limits(EngineConfig(), kv_bytes=2 << 30, device_type="cpu")
    checks = ConstraintChecks(None, VOCAB_SIZE, ())
    rows = take_in(
        open_jobs(path), SamplingParams(), None, FACTS.prompt_limits, None, checks, lambda errors: None, metrics
    )
    started = perf_counter()
    for picked in split(rows):
        wave = wave_of(rows, picked, rows.prompts(picked), ChoiceTokens(None))
        totals = totals.plus(prepare_wave(wave, NOTHING, FACTS.layout, limits).plan)
    plan_s = perf_counter() - started
    return Cost(
        rows=rows.num_rows,
        waves=totals.waves,
        nodes=totals.nodes,
        prefill_tokens=totals.prefill_tokens,
        read_s=metrics.read_s,
        check_s=metrics.tokenize_s,
        plan_s=plan_s,
        cpu_s=process_time() - cpu_started,
        peak_bytes=peak_bytes() - before,
    )


def peak_bytes() -> int:
    """The most memory that this process has held (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def make_texts(count: int, seed: int) -> list[str]:
    """Texts of the words of the example job, all different."""
    words = np.array(" ".join(pl.read_parquet(TICKETS)["ticket"]).split())
    rng = np.random.default_rng(seed)
    lengths = rng.integers(*WORDS_PER_TEXT, count)
    return [" ".join(words[rng.integers(0, len(words), length)].tolist()) for length in lengths.tolist()]


@dataclass(frozen=True, slots=True)
class Rate:
    """Of a part of the texts: seconds of the tokenizer alone and of ours, by the clock and of the CPU."""

    tokens: int
    alone_s: float
    ours_s: float
    alone_cpu_s: float
    ours_cpu_s: float


def tokenize_rates(count: int, seed: int) -> list[Rate]:
    """The tokenizer alone and ours in turn, on all cores."""
    tokenizer: Any = load_tokenizer(resolve_model("smollm2"))
    texts = make_texts(count, seed)
    rates = []
    for start in range(0, count, TEXTS_AT_ONCE):
        part = texts[start : start + TEXTS_AT_ONCE]
        jobs = [check_rows(block, SamplingParams()) for block in open_jobs(pa.table({"prompt": part})).blocks()]
        clock, cpu = perf_counter(), process_time()
        alone = tokenizer.backend_tokenizer.encode_batch(part)
        alone_s, alone_cpu_s = perf_counter() - clock, process_time() - cpu
        del alone
        clock, cpu = perf_counter(), process_time()
        tokens = sum(len(tokenize(job.prompts, tokenizer)[0].tokens) for job in jobs)
        rates.append(Rate(tokens, alone_s, perf_counter() - clock, alone_cpu_s, process_time() - cpu))
    return rates


def in_own_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *args, **kwargs).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.rows:
        print_costs(options.rows, options.seed)
    if options.texts:
        print_rates(in_own_process(tokenize_rates, options.texts, options.seed))


def print_costs(sizes: list[int], seed: int) -> None:
    """Peak memory is a multiple of the tokens' own; the last column is by the clock and of the CPU."""
    titles = (
        "rows",
        "waves",
        "nodes",
        "prefill tokens",
        "read s",
        "check s",
        "plan s",
        "all s",
        "CPU s",
        "peak",
        "10x rows",
    )
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    before: Cost | None = None
    for rows in sorted(sizes):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "jobs.parquet"
            in_own_process(write_forest, path, rows, seed)
            cost = in_own_process(plan_file, path)
        counts = (f"{count:,}" for count in (cost.rows, cost.waves, cost.nodes, cost.prefill_tokens))
        seconds = (f"{s:.2f}" for s in (cost.read_s, cost.check_s, cost.plan_s, cost.seconds, cost.cpu_s))
        peak = f"{cost.peak_bytes / cost.token_bytes:.2f}"
        print(f"| {' | '.join((*counts, *seconds, peak, tenfold(before, cost)))} |", flush=True)
        before = cost


def tenfold(small: Cost | None, large: Cost) -> str:
    """How many times longer ten times the rows take, if time grows as it does between these two."""
    if small is None:
        return ""
    power = 1 / math.log10(large.rows / small.rows)
    return f"{(large.seconds / small.seconds) ** power:.1f}, {(large.cpu_s / small.cpu_s) ** power:.1f}"


def print_rates(rates: list[Rate]) -> None:
    by_clock = median(rate.alone_s / rate.ours_s for rate in rates)
    of_cpu = median(rate.alone_cpu_s / rate.ours_cpu_s for rate in rates)
    alone_s, ours_s = sum(rate.alone_s for rate in rates), sum(rate.ours_s for rate in rates)
    print(f"\n{sum(rate.tokens for rate in rates):,} tokens: tokenizer alone {alone_s:.1f} s, tokenize {ours_s:.1f} s")
    print(f"medians of parts: {by_clock:.0%} of the tokenizer's rate by the clock, {of_cpu:.0%} of the CPU")


if __name__ == "__main__":
    main()
