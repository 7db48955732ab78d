"""`python -m benchmarks.offline JOBS...`: the same jobs through batchkv and its peers, in turn."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import polars as pl
import typer

from batchkv.errors import UserError
from benchmarks import machine
from benchmarks.comparison import ENOUGH_RATIOS, Pair, Series, comparison_table, markdown
from benchmarks.model_files import ModelFiles, model_files
from benchmarks.peer import BATCHKV, ENVIRONMENTS, PEERS, Peer, PeerProcess
from benchmarks.protocol import Failure, Limits, Outcome
from benchmarks.results_file import RESULTS, write_section

Run = Callable[[Peer], Outcome | Failure]


@dataclass(frozen=True, slots=True)
class Job:
    """A job file, as far as the tables tell of it.

    Attributes:
        path: Parquet.
        limit: only the first rows; None runs all.
        rows: that are run.
        greedy: of every sample.
    """

    path: Path
    limit: int | None
    rows: int
    greedy: tuple[bool, ...]

    @classmethod
    def read(cls, path: Path, limit: int | None) -> Job:
        frame = pl.read_parquet(path, n_rows=limit)
        columns = {"n": 1, "temperature": 0.0}
        given = [
            frame[name].fill_null(default).to_list() if name in frame.columns else [default] * len(frame)
            for name, default in columns.items()
        ]
        samples = [temperature == 0 for n, temperature in zip(*given, strict=True) for _ in range(int(n))]
        return cls(path, limit, len(frame), tuple(samples))


def take_turns(peers: list[Peer], missing: Mapping[str, Failure], repeats: int, run: Run) -> Iterator[Series]:
    """Every peer's runs, each right after one of batchkv's; a peer that fails is not run again.

    The first series is batchkv's own, all its runs; where no peer is left, it is run alone.
    """
    series = {peer.name: Series(peer.name, failure=missing.get(peer.name)) for peer in peers}
    own = Series(BATCHKV.name)
    for _ in range(repeats):
        turns: list[Peer | None] = [peer for peer in peers if not series[peer.name].failure]
        for peer in turns or [None]:
            outcome = run(BATCHKV)
            if isinstance(outcome, Failure):
                raise UserError(f"batchkv itself {outcome.reason}")
            own = replace(own, pairs=(*own.pairs, Pair(outcome, outcome)))
            if peer is not None:
                series[peer.name] = _extended(series[peer.name], outcome, run(peer))
    yield own
    yield from series.values()


def _extended(series: Series, batchkv: Outcome, outcome: Outcome | Failure) -> Series:
    if isinstance(outcome, Failure):
        return replace(series, failure=outcome)
    return replace(series, pairs=(*series.pairs, Pair(batchkv, outcome)))


def parse_peers(names: str) -> list[Peer]:
    """Of `vllm,max`; `all` are all of them, in the order of the list.

    Raises:
        UserError: names one that there is not.
    """
    wanted = list(PEERS) if names == "all" else [name for name in names.split(",") if name]
    for name in wanted:
        if name not in PEERS:
            raise UserError(f"--peers {name!r} is not one of all, {', '.join(PEERS)}")
    return [PEERS[name] for name in wanted]


def describe_job(job: Job, limits: Limits, series: list[Series], repeats: int) -> str:
    """What stands above a table."""
    outcome = series[0].pairs[-1].peer
    return (
        f"{job.path.name}: {job.rows:,} rows{' (limited: no result)' if job.limit else ''}, "
        f"{outcome.prompt_tokens:,} prompt tokens, {outcome.generated_tokens:,} generated; {limits.dtype}, "
        f"{limits.kv_tokens:,} KV tokens, at most {limits.max_rows} sequences, {limits.threads} threads, "
        f"{repeats} rounds"
    )


def main(
    jobs: Annotated[list[Path], typer.Argument(help="Parquet files with prompt_token_ids and sampling columns.")],
    peers: Annotated[str, typer.Option(help=f"all, or some of: {', '.join(PEERS)}.")] = "all",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; at least 3 for a result.")] = ENOUGH_RATIOS,
    model: Annotated[str, typer.Option(help="A folder with safetensors, a .gguf file or smollm2.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="Of weights and KV: float32 or bfloat16.")] = "float32",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows: a smoke test.")] = None,
    kv_tokens: Annotated[int, typer.Option(min=1, help="Tokens that the KV has room for.")] = 32768,
    max_rows: Annotated[int, typer.Option(min=1, help="Most sequences in flight.")] = 256,
    threads: Annotated[int | None, typer.Option(min=1, help="Cores to compute on; default: all.")] = None,
    environments: Annotated[
        Path, typer.Option(envvar="BATCHKV_PEERS", help="Folder of the peers' virtual environments.")
    ] = ENVIRONMENTS,
    stay_loaded: Annotated[
        bool, typer.Option("--stay-loaded", help="Load every engine once for all runs, of all jobs.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Most seconds for one run.")] = 3600.0,
    write: Annotated[bool, typer.Option("--write", help=f"Also write the tables to {RESULTS.name}.")] = False,
) -> None:
    """Run the same jobs through batchkv and its peers, in turn, and print a table for each."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a peer in progress is ended, too
    environments = environments.absolute()
    try:
        chosen = parse_peers(peers)
        if peers == "all":  # without those that run as another does
            chosen = [peer for peer in chosen if peer.dtype != dtype]
        files = model_files(model)
        missing = {peer.name: failure for peer in chosen if (failure := peer.missing(files, environments))}
        limits = Limits(dtype, kv_tokens, max_rows, threads or machine.cores())
        read = [Job.read(path, limit) for path in jobs]
        with Engines(limits, files, environments, stay_loaded=stay_loaded) as engines:
            for job in read:
                run = partial(engines.run, job.path, limit, timeout)
                series = list(take_turns(chosen, missing, repeats, run))
                table = markdown(comparison_table(series, job.greedy))
                caption = describe_job(job, limits, series, repeats)
                print(f"\n{caption}\n\n{table}\n", flush=True)
                if write:
                    command = _command(job, limits, peers, repeats, model, stay_loaded)
                    body = f"`{command}`\n\n{machine.describe()}\n\n{caption}\n\n{table}"
                    write_section(f"{job.path.stem}, {dtype}, {kv_tokens:,} KV tokens, {machine.best_feature()}", body)
    except (UserError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


class Engines:
    """The processes of a series of runs.

    Args:
        limits: what they are loaded for.
        files: the model.
        environments: folder of the peers' virtual environments.
        stay_loaded: a process takes as many runs as it can; else each run is in a process of its own.
    """

    def __init__(self, limits: Limits, files: ModelFiles, environments: Path, *, stay_loaded: bool) -> None:
        self._limits, self._files, self._environments = limits, files, environments
        self._stay_loaded = stay_loaded
        self._processes: dict[str, PeerProcess] = {}

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._processes):
            self._processes.pop(name).end()

    def run(self, job: Path, limit: int | None, timeout_s: float, peer: Peer) -> Outcome | Failure:
        """Runs a job, and says so on stderr."""
        busy = machine.load_average()
        outcome = self._process(peer).run(job, limit, timeout_s)
        if not self._stay_loaded or peer.runs_once or isinstance(outcome, Failure):
            self._processes.pop(peer.name).end()
        told = outcome.reason if isinstance(outcome, Failure) else f"{outcome.run_s:.2f} s, load {outcome.load_s:.1f} s"
        print(f"{job.stem} {peer.name}: {told} (load average before: {busy:.1f})", file=sys.stderr, flush=True)
        return outcome

    def _process(self, peer: Peer) -> PeerProcess:
        if peer.name not in self._processes:
            command = peer.command(self._limits, self._files, self._environments)
            self._processes[peer.name] = PeerProcess(command)
        return self._processes[peer.name]


def _command(job: Job, limits: Limits, peers: str, repeats: int, model: str, stay_loaded: bool) -> str:
    """The command to run again, without the paths of this machine."""
    options = {
        "peers": peers or '""',
        "repeats": repeats,
        "model": Path(model).name,
        "dtype": limits.dtype,
        "limit": job.limit,
        "kv-tokens": limits.kv_tokens,
        "max-rows": limits.max_rows,
        "threads": limits.threads,
    }
    given = [f"--{name} {value}" for name, value in options.items() if value is not None]
    return " ".join(["python -m benchmarks.offline", job.path.name, *given, *["--stay-loaded"] * stay_loaded])


if __name__ == "__main__":
    typer.run(main)
