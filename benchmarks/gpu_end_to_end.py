"""`python -m benchmarks.gpu_end_to_end`: whole jobs through batchkv and through transformers on one GPU.

The model has the shape of Llama-3.2-1B or Llama-3.1-8B and random weights, made on the device: nothing is downloaded,
and what it computes costs the same. The jobs are token ids, and all samples run to their full length. Engines take
turns on the same module.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import psutil
import torch

from batchkv.config import parse_memory_size
from batchkv.engine import Engine
from batchkv.writer import summary_of
from benchmarks.comparison import ENOUGH_RATIOS, same_share
from benchmarks.gpu_jobs import SMOKE_SIZES, JobSizes, TokenJob, make_jobs
from benchmarks.markdown import markdown_table
from benchmarks.protocol import Tokens

BATCHKV, UNSHARED, TRANSFORMERS = "batchkv", "batchkv, nothing shared", "transformers"
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_factor": 32.0,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_factor": 8.0,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rope_factor": 8.0,
        "vocab_size": 512,
    },
}
SUMMARY_FIELDS = (
    "prefill_tokens",
    "sharing_ratio",
    "steps",
    "preempted_sequences",
    "peak_kv_tokens",
    "plan_s",
    "prefill_s",
    "decode_s",
    "sampling_s",
    "write_s",
    "elapsed_s",
    "attention",
)
_WARM_UP_ROWS, _WARM_UP_TOKENS = 16, 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a job.

    Attributes:
        run_s: from the rows in memory to all samples in memory.
        token_ids: of every sample, rows in order.
        summary: batchkv's.
        note: what has to be known to read the figures.
    """

    run_s: float
    token_ids: Tokens
    summary: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(slots=True)
class Runs:
    """All runs of one engine on one job, one for each round, and why there are no more of them."""

    name: str
    outcomes: list[Outcome] = field(default_factory=list)
    failure: str = ""


RunJob = Callable[[TokenJob], Outcome]


def make_model(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama with random weights, made on the device. It has no end token."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes: dict[str, Any] = {"vocab_size": 128_256, **SHAPES[shape]}
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": sizes.pop("rope_factor"),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    sizes |= {"rope_parameters": rope, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
    sizes |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=dtype)  # type: ignore[no-untyped-call]
    return model.train(False)


class BatchkvRun:
    """batchkv in place on a live module."""

    def __init__(self, model: Any, kv_memory: str, max_batch_rows: int, *, shares: bool) -> None:
        self._options: dict[str, Any] = {
            "kv_memory": kv_memory,
            "max_batch_rows": max_batch_rows,
            "no_prefix_sharing": not shares,
        }
        self._model = model
        self._engine: Engine | None = None

    def __call__(self, job: TokenJob) -> Outcome:
        self._engine = self._engine or Engine(self._model, **self._options)
        rows = job.table()
        started = perf_counter()
        table = self._engine.run(rows)
        run_s = perf_counter() - started
        if errors := [error for error in table["error"].to_pylist() if error]:
            raise RuntimeError(f"{len(errors)} rows have errors: {errors[0]}")
        return Outcome(run_s, tuple(map(tuple, table["token_ids"].to_pylist())), summary_of(table.schema))


class TransformersRun:
    """`generate` in static batches, left padded, in the order of the job. Batches shrink until memory suffices."""

    def __init__(self, model: Any, sequences: int) -> None:
        self._model, self._sequences = model, sequences

    def __call__(self, job: TokenJob) -> Outcome:
        while True:
            try:
                started = perf_counter()
                samples = self._generate(job)
                return Outcome(perf_counter() - started, samples, note=f"batches of {self._sequences}")
            except torch.cuda.OutOfMemoryError:
                if self._sequences <= job.n:
                    raise
            self._sequences //= 2  # not in the handler, which keeps what the failed call had allocated
            free_memory()

    def _generate(self, job: TokenJob) -> Tokens:
        size = max(1, self._sequences // job.n)
        samples: list[tuple[int, ...]] = []
        for lo in range(0, len(job.prompts), size):
            samples += self._generate_batch(job, job.prompts[lo : lo + size])
        return tuple(samples)

    def _generate_batch(self, job: TokenJob, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        from transformers import GenerationConfig

        longest, device = max(map(len, prompts)), self._model.device
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampled = {} if job.is_greedy else {"temperature": job.temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=job.max_tokens,
            do_sample=not job.is_greedy,
            num_return_sequences=job.n,
            pad_token_id=0,
            **sampled,
        )
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=config
            )
        return [tuple(sample) for sample in out[:, longest:].tolist()]


def take_turns(engines: Mapping[str, RunJob], job: TokenJob, rounds: int) -> list[Runs]:
    """Every engine warmed up by a few rows, then round after round. One that fails is left out from there on."""
    series = [Runs(name) for name in engines]
    for number in range(-1, rounds):
        for runs in series:
            if runs.failure:
                continue
            part = job if number >= 0 else job.part(_WARM_UP_ROWS, _WARM_UP_TOKENS)
            try:
                outcome = _checked(engines[runs.name](part), part)
            except Exception as error:  # the other engines are to be measured all the same
                first_line = (str(error).strip().splitlines() or [""])[0]
                runs.failure = f"failed: {type(error).__name__}: {first_line[:200]}"
                print(f"{job.name}, {runs.name}: {runs.failure}", flush=True)
            else:
                print(f"{job.name}, {runs.name}: {outcome.run_s:.2f} s" + " to warm up" * (number < 0), flush=True)
                runs.outcomes += [outcome] * (number >= 0)
            free_memory()
    return series


def _checked(outcome: Outcome, job: TokenJob) -> Outcome:
    """Raises RuntimeError where samples are missing or short."""
    lengths = set(map(len, outcome.token_ids))
    if len(outcome.token_ids) != job.samples or lengths != {job.max_tokens}:
        raise RuntimeError(f"{len(outcome.token_ids)} samples of {sorted(lengths)} tokens, not {job.samples} of all")
    return outcome


def free_memory() -> None:
    """What one engine held on a GPU is not to be missing to the next."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def job_report(job: TokenJob, series: Sequence[Runs]) -> str:
    """As Markdown: the engines against each other, then where batchkv's time went."""
    own = series[0].outcomes
    columns = ["engine", "run, s", "tokens/s", "run / batchkv", "same first", "same greedy", "note"]
    rows = [[runs.name, *_engine_cells(job, runs, own)] for runs in series]
    summaries = [(runs.name, runs.outcomes[-1].summary) for runs in series if runs.outcomes]
    split = [[name, *(str(summary.get(f, "")) for f in SUMMARY_FIELDS)] for name, summary in summaries if summary]
    parts = [
        f"### {job.name}",
        f"{len(job.prompts):,} rows x {job.n}, {job.prompt_tokens:,} prompt tokens, "
        f"{job.samples * job.max_tokens:,} generated, {'greedy' if job.is_greedy else 'sampled'}",
        markdown_table(columns, rows),
        markdown_table(["last round", *SUMMARY_FIELDS], split) if split else "",
    ]
    return "\n\n".join(filter(None, parts))


def _engine_cells(job: TokenJob, runs: Runs, own: Sequence[Outcome]) -> list[str]:
    outcomes = runs.outcomes
    few = f"{len(outcomes)} of {ENOUGH_RATIOS} rounds: no result" if 0 < len(outcomes) < ENOUGH_RATIOS else ""
    notes = "; ".join(filter(None, [runs.failure, few, outcomes[-1].note if outcomes else ""]))
    if not outcomes:
        return ["", "", "", "", "", notes]
    run_s = median(outcome.run_s for outcome in outcomes)
    same = ["", ""]
    if own and job.is_greedy and runs.name != BATCHKV:
        same = [_same(outcomes[-1], own[-1], 1), _same(outcomes[-1], own[-1], job.max_tokens)]
    return [f"{run_s:.2f}", f"{job.samples * job.max_tokens / run_s:,.0f}", _ratios(outcomes, own), *same, notes]


def _ratios(outcomes: Sequence[Outcome], own: Sequence[Outcome]) -> str:
    """Median, least and largest over the rounds that both have."""
    ratios = [peer.run_s / batchkv.run_s for peer, batchkv in zip(outcomes, own, strict=False)]
    return f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else ""


def _same(outcome: Outcome, own: Outcome, tokens: int) -> str:
    """The share of samples whose first tokens are all batchkv's."""
    peer, batchkv = (tuple(sample[:tokens] for sample in side.token_ids) for side in (outcome, own))
    share = same_share(peer, batchkv, [True] * len(peer))
    return "" if share is None else f"{share:.1%}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_end_to_end", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "tiny"], default="1B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-memory", default="0.6", help="a size, or a fraction of what the model leaves free")
    parser.add_argument("--max-rows", type=int, default=256, help="most rows in flight in batchkv")
    parser.add_argument("--sequences", type=int, default=64, help="in a batch of transformers")
    parser.add_argument("--markdown", type=Path, help="also write the tables there, after every job")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and tiny jobs on the CPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every engine did every job."""
    options = parse(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not options.smoke and not torch.cuda.is_available():
        print("No GPU: torch sees none here; --smoke tries the code on the CPU.", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.smoke else "cuda")
    shape, sizes = ("tiny", SMOKE_SIZES) if options.smoke else (options.shape, JobSizes())
    dtype = torch.float32 if options.smoke else torch.bfloat16
    model = make_model(shape, device, dtype)
    kv_bytes = kv_memory("64MiB" if options.smoke else options.kv_memory, device)
    engines: dict[str, RunJob] = {
        BATCHKV: BatchkvRun(model, f"{kv_bytes}B", options.max_rows, shares=True),
        UNSHARED: BatchkvRun(model, f"{kv_bytes}B", options.max_rows, shares=False),
        TRANSFORMERS: TransformersRun(model, options.sequences),
    }
    parameters = sum(parameter.numel() for parameter in model.parameters())
    parts = [
        f"Random weights in the shape of {shape} ({parameters / 1e9:.2f} billion), {str(dtype).split('.')[1]}; "
        f"{kv_bytes / (1 << 30):.2f} GiB of KV and {options.max_rows} rows in flight for batchkv, "
        f"{options.rounds} rounds in turn."
    ]
    is_complete = True
    for job in make_jobs(model.config.vocab_size, sizes):
        series = take_turns(engines, job, options.rounds)
        is_complete &= not any(runs.failure for runs in series)
        parts.append(job_report(job, series))
        if options.markdown:
            options.markdown.write_text("\n\n".join(parts) + "\n")
    print("\n" + "\n\n".join(parts))
    return int(not is_complete)


def kv_memory(size: str, device: torch.device) -> int:
    """Bytes; a fraction is of what is free on the device."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return parse_memory_size(size, free_bytes=free)


if __name__ == "__main__":
    sys.exit(main())
