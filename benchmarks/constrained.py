"""`python -m benchmarks.constrained`: the throughput that is left when output is constrained.

The prompts are the tickets of `data/`, short and with nothing shared, so that little but decoding counts. For each kind
of constraint the job runs with it and without it in turn; without it, every row has just as many tokens to generate as
it got with it, so both do the same work but for the masks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import polars as pl
import pyarrow as pa
import typer

from batchkv.engine import Engine
from batchkv.sampling_params import SamplingParams
from batchkv.writer import summary_of

TICKETS = Path(__file__).resolve().parents[1] / "data" / "tickets.csv"
CATEGORIES = ["billing", "bug", "account", "shipping", "feature"]
SCHEMA = {
    "type": "object",
    "properties": {
        "category": {"enum": CATEGORIES},
        "urgency": {"enum": ["low", "medium", "high"]},
        "summary": {"type": "string", "maxLength": 60},
    },
    "required": ["category", "urgency", "summary"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, Any] = {
    "choices": [f" {category}" for category in CATEGORIES],
    "regex": r" [A-Z][a-z ,']{20,80}\.",
    "json_schema": json.dumps(SCHEMA),
}


@dataclass(frozen=True, slots=True)
class Timing:
    """One run.

    Attributes:
        tokens: generated.
        seconds: of forward passes and sampling, masks included; without reading, compiling, planning and writing.
        total_seconds: all but loading.
    """

    tokens: int
    seconds: float
    total_seconds: float

    @classmethod
    def of(cls, results: pa.Table) -> Timing:
        summary = summary_of(results)
        seconds = summary["prefill_s"] + summary["decode_s"] + summary["sampling_s"]
        return cls(summary["generated_tokens"], seconds, summary["elapsed_s"] - summary["load_s"])


def constrained_job(column: str, rows: int) -> pa.Table:
    """The first tickets, all with the constraint."""
    texts = pl.read_csv(TICKETS)["text"].to_list()[:rows]
    prompts = [f"Ticket: {text}\nAnswer:" for text in texts]
    kind = pa.list_(pa.string()) if column == "choices" else pa.string()
    return pa.table({"prompt": prompts, column: pa.array([CONSTRAINTS[column]] * len(prompts), kind)})


def free_job(constrained: pa.Table, results: pa.Table) -> pa.Table:
    """The same prompts, and as many tokens for each as it got."""
    job = pa.table({"prompt": constrained["prompt"], "max_tokens": results["num_generated_tokens"].cast(pa.int64())})
    return job.append_column("ignore_eos", pa.array([True] * len(job)))


def compare(engine: Engine, column: str, rows: int, turns: int, sampling: SamplingParams) -> tuple[str, str]:
    """A line of the table, and the first of the texts."""
    job = constrained_job(column, rows)
    first = engine.run(job, sampling)
    pairs = [
        (Timing.of(engine.run(job, sampling)), Timing.of(engine.run(free_job(job, first), sampling)))
        for _ in range(turns)
    ]
    constrained, free = zip(*pairs, strict=True)
    cells = [
        column,
        f"{constrained[0].tokens:,}",
        f"{median(t.tokens / t.seconds for t in constrained):.0f}",
        f"{median(t.tokens / t.seconds for t in free):.0f}",
        f"{median(b.seconds / a.seconds for a, b in pairs):.2f}",
        f"{median(b.total_seconds / a.total_seconds for a, b in pairs):.2f}",
    ]
    return f"| {' | '.join(cells)} |", str(first["text"][0])


def main(
    rows: Annotated[int, typer.Option(help="Tickets.")] = 128,
    turns: Annotated[int, typer.Option(help="Runs of each kind, in turn; the medians are printed.")] = 2,
    max_tokens: Annotated[int, typer.Option(help="At most, for each row.")] = 64,
    model: Annotated[str, typer.Option(help="A folder, a .gguf file or smollm2.")] = "smollm2",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
) -> None:
    """Print tokens per second with and without constraints, and their ratios."""
    engine = Engine(model)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    print("| constraint | tokens | tokens/s with | tokens/s without | ratio | ratio, whole run |")
    print("|---|---|---|---|---|---|")
    for column in CONSTRAINTS:
        line, text = compare(engine, column, rows, turns, sampling)
        print(line, flush=True)
        typer.echo(f"  {text}", err=True)


if __name__ == "__main__":
    typer.run(main)
