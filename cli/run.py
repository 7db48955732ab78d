"""`batchkv run`: plan and execute a job file."""

from __future__ import annotations

import glob
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchkv.cli import options
from batchkv.cli.output import ProgressBar, say
from batchkv.config import DEFAULT_KV_MEMORY, DEFAULT_MODEL, EngineConfig
from batchkv.errors import Interrupted, UserError
from batchkv.heap import return_large_blocks
from batchkv.idle_threads import let_waiting_threads_sleep
from batchkv.io.write import checked_target
from batchkv.progress import Watch
from batchkv.run_folder import RunFolder, open_run_folder
from batchkv.run_log import RunLog

if TYPE_CHECKING:
    from batchkv.engine import Engine

_ROW_ERRORS = 3
_TIMES = ("load", "read", "tokenize", "plan", "prefill", "decode", "sampling", "write")


def run(
    jobs: options.Jobs,
    out: Annotated[Path, typer.Option(help="Where the results go: .parquet, .arrow or .jsonl.")],
    model: options.Model = DEFAULT_MODEL,
    tokenizer: options.Tokenizer = None,
    trust_remote_code: options.TrustRemoteCode = False,
    dtype: options.Dtype = "auto",
    kv_dtype: options.KvDtype = "auto",
    device: options.Device = "auto",
    attention: options.Attention = "auto",
    kv_memory: options.KvMemory = DEFAULT_KV_MEMORY,
    max_batch_tokens: options.MaxBatchTokens = 0,
    max_batch_rows: options.MaxBatchRows = 256,
    no_prefix_sharing: options.NoPrefixSharing = False,
    deterministic: options.Deterministic = False,
    n: options.N = options.DEFAULTS.n,
    max_tokens: options.MaxTokens = options.DEFAULTS.max_tokens,
    temperature: options.Temperature = options.DEFAULTS.temperature,
    top_p: options.TopP = options.DEFAULTS.top_p,
    top_k: options.TopK = options.DEFAULTS.top_k,
    min_p: options.MinP = options.DEFAULTS.min_p,
    seed: options.Seed = options.DEFAULTS.seed,
    stop: options.Stop = None,
    logprobs: options.Logprobs = False,
    choice_mode: options.ChoiceMode = options.DEFAULTS.choice_mode,
    limit: options.Limit = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace results that are there, and give up another unfinished run.")
    ] = False,
    allow_row_errors: Annotated[
        bool, typer.Option("--allow-row-errors", help="Exit with 0 even if rows have errors.")
    ] = False,
    summary: Annotated[Path | None, typer.Option(help="Also write the summary to this JSON file.")] = None,
    log: Annotated[Path | None, typer.Option(help="Append what happens to this file, as JSON lines.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Plan and execute a job file; writes one result row per row and sample.

    A run that was interrupted goes on when the same command is given again.

    Exit codes: 0 every row ok, 3 some rows have errors, 2 the command, the job or the model is unusable,
    130 interrupted, 1 a bug.
    """
    checked_target(out)
    _check_apart(out, summary, log, jobs)
    sampling = options.sampling_params(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        logprobs=logprobs,
        choice_mode=choice_mode,
    )
    config = options.engine_config(
        model=model,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        attention=attention,
        kv_memory=kv_memory,
        max_batch_tokens=max_batch_tokens,
        max_batch_rows=max_batch_rows,
        no_prefix_sharing=no_prefix_sharing,
        deterministic=deterministic,
    )
    with RunLog(log) as run_log, open_run_folder(out, overwrite=overwrite) as folder, _saying_how_to_go_on(folder):
        engine, import_s = _load_engine(config)
        with ProgressBar(quiet=quiet) as bar:
            totals = engine.run_into(
                folder,
                options.job_paths(jobs),
                sampling,
                limit=limit,
                watch=Watch(bar.prepare, bar.start, run_log.event),
            )
    for name in ("load_s", "elapsed_s"):
        totals[name] = round(totals[name] + import_s, 3)
    if summary:
        write_summary(totals, summary)
    if not quiet:
        say(describe(totals, out))
    if not allow_row_errors:
        _exit_if_errors(totals, out)


@contextmanager
def _saying_how_to_go_on(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except Interrupted:
        if folder.holds_results:
            print(f"batchkv: what is finished is in {folder.path}: give the same command to go on", file=sys.stderr)
        raise


def _load_engine(config: EngineConfig) -> tuple[Engine, float]:
    """The engine, and the seconds that importing it took."""
    started = perf_counter()
    let_waiting_threads_sleep()
    from batchkv.engine import Engine  # torch and transformers take seconds

    import_s = perf_counter() - started
    return_large_blocks()
    return Engine(**asdict(config)), import_s


def _exit_if_errors(totals: dict[str, Any], out: Path) -> None:
    if totals["errors"]:
        print(
            f"batchkv: {totals['errors']:,} of {totals['rows']:,} rows have errors: see error_code and error in {out} "
            f"(exit code 3; 0 with --allow-row-errors); the first: {totals['first_error']}",
            file=sys.stderr,
        )
        raise typer.Exit(_ROW_ERRORS)


def _check_apart(out: Path, summary: Path | None, log: Path | None, jobs: list[str]) -> None:
    """No output replaces an input or another output, and the summary has a folder to go to.

    Raises:
        UserError: names the file.
    """
    taken = {
        Path(file).resolve(): "the job file itself" for job in jobs for file in [job, *glob.glob(job, recursive=True)]
    }
    for name, path in (("--out", out), ("--summary", summary), ("--log", log)):
        if path is None:
            continue
        if path.resolve() in taken:
            raise UserError(f"{name} {path} is {taken[path.resolve()]}: name another file")
        taken[path.resolve()] = f"named by {name}, too"
    if summary is not None and (summary.is_dir() or not summary.parent.is_dir()):
        raise UserError(f"--summary {summary}: name a file in a folder that is there")


def write_summary(totals: dict[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(totals, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--summary {path}: {error.strerror}: name a file in a folder that is there") from None


def describe(totals: dict[str, Any], out: Path) -> str:
    """The summary for people."""
    lines = [
        f"{totals['ok']:,} of {totals['rows']:,} rows ok, {totals['samples']:,} samples -> {out}",
        f"prompt    {totals['prompt_tokens']:,} tokens, {totals['prefill_tokens']:,} prefilled "
        f"(planned {totals['planned_prefill_tokens']:,}), {totals['sharing_ratio']:.1%} shared",
        f"generated {totals['generated_tokens']:,} tokens, {totals['generated_tokens_per_s']:,.0f} per second",
        f"KV        peak {totals['peak_kv_tokens']:,} tokens (planned {totals['planned_peak_kv_tokens']:,}, "
        f"budget {totals['kv_budget_tokens']:,})",
        "seconds   "
        + ", ".join(f"{name} {totals[f'{name}_s']:.1f}" for name in _TIMES)
        + f"; {totals['elapsed_s']:.1f} in all",
    ]
    if totals["resumed_samples"]:
        lines.insert(1, f"resumed   {totals['resumed_samples']:,} samples of an earlier run, not counted below")
    if totals["attention"] == "torch":
        lines.append("attention torch operations: the native kernel is faster, if it was built and has the KV dtype")
    if totals["decode_graphs"] not in ("off", "recorded"):
        lines.append(f"decode    without CUDA graphs, one launch for each kernel: {totals['decode_graphs']}")
    if totals["preempted_sequences"]:
        lines.append(
            f"memory was short: {totals['preempted_sequences']:,} sequences were set aside and "
            f"{totals['recomputed_tokens']:,} tokens computed again; more --kv-memory avoids that"
        )
    return "\n".join(lines)
