"""`python -m benchmarks.kv_dtype JOBS...`: what quantized KV changes in greedy tokens and log-probabilities.

Each job runs with KV in the model's dtype and then quantized. Up to a row's first other token both have the same
context, so log-probabilities are compared there, and only there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from batchkv.engine import Engine
from batchkv.sampling_params import SamplingParams
from batchkv.writer import summary_of


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of one job, row by row.

    Attributes:
        tokens: generated with KV in the model's dtype.
        equal: of these, generated at the same place with quantized KV.
        before_difference: of these, before the row's first other token.
        rows, equal_rows: rows, and those without another token.
        logprob_differences: absolute ones, of the tokens before the first other one.
    """

    tokens: int
    equal: int
    before_difference: int
    rows: int
    equal_rows: int
    logprob_differences: npt.NDArray[np.float64]


def compare(plain: pa.Table, quantized: pa.Table) -> Comparison:
    """Results of the same job; the order of their rows is the same."""
    same, differences = [], []
    for ours, theirs in zip(plain.to_pylist(), quantized.to_pylist(), strict=True):
        shorter = min(len(ours["token_ids"]), len(theirs["token_ids"]))
        is_same = np.zeros(len(ours["token_ids"]), bool)
        is_same[:shorter] = np.equal(ours["token_ids"][:shorter], theirs["token_ids"][:shorter])
        first_other = len(is_same) if is_same.all() else int(is_same.argmin())
        same.append((is_same, first_other))
        differences.append(np.subtract(ours["logprobs"][:first_other], theirs["logprobs"][:first_other]))
    return Comparison(
        tokens=sum(len(is_same) for is_same, _ in same),
        equal=sum(int(is_same.sum()) for is_same, _ in same),
        before_difference=sum(first_other for _, first_other in same),
        rows=len(same),
        equal_rows=sum(bool(is_same.all()) for is_same, _ in same),
        logprob_differences=np.abs(np.concatenate(differences)),
    )


def rows_of(job: Path, count: int, max_tokens: int | None) -> pa.Table:
    """The first rows of a job; `max_tokens` replaces its own, and nothing ends a row before."""
    table = pq.read_table(job).slice(0, count)
    if max_tokens is None:
        return table
    table = table.select([name for name in table.column_names if name not in ("max_tokens", "stop", "ignore_eos")])
    return table.append_column("max_tokens", pa.array([max_tokens] * len(table))).append_column(
        "ignore_eos", pa.array([True] * len(table))
    )


def describe(name: str, kv_dtype: str, found: Comparison, summary: dict[str, Any]) -> str:
    """A line of the table."""
    cells = [
        name,
        f"{kv_dtype}, {summary['attention']}",
        f"{found.equal_rows} of {found.rows}",
        f"{found.before_difference / found.tokens:.1%}",
        f"{found.equal / found.tokens:.1%} of {found.tokens:,}",
        f"{found.logprob_differences.mean():.4f}",
        f"{found.logprob_differences.max():.3f}",
        f"{summary['kv_bytes_per_token']:,}",
    ]
    return f"| {' | '.join(cells)} |"


def main(
    jobs: Annotated[list[Path], typer.Argument(help="Parquet files of greedy rows.")],
    rows: Annotated[int, typer.Option(help="Only the first rows of each.")] = 64,
    max_tokens: Annotated[int | None, typer.Option(help="Exactly so many tokens a row, in place of the job's.")] = None,
    model: Annotated[str, typer.Option(help="A folder, a .gguf file or smollm2.")] = "smollm2",
    kv_dtypes: Annotated[str, typer.Option(help="Which are compared with the model's dtype.")] = "int8,fp8",
    dtype: Annotated[str, typer.Option(help="Of the model: float32 or bfloat16.")] = "float32",
) -> None:
    """Run jobs with KV in each dtype, and print what quantization changes."""
    sampling = SamplingParams(logprobs=True)
    tables = {job.stem: rows_of(job, rows, max_tokens) for job in jobs}
    options: dict[str, Any] = {"dtype": dtype}
    engine = Engine(model, **options)
    plain = {name: engine.run(table, sampling) for name, table in tables.items()}
    print(
        "| job | KV | rows equal | tokens before the first other one | tokens equal | Δ logprob | most | bytes/token |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for kv_dtype in kv_dtypes.split(","):
        engine = Engine(model, **options, kv_dtype=kv_dtype)
        for name, table in tables.items():
            results = engine.run(table, sampling)
            print(describe(name, kv_dtype, compare(plain[name], results), summary_of(results.schema)), flush=True)


if __name__ == "__main__":
    typer.run(main)
