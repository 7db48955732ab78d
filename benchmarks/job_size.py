"""Does throughput fall with the size of a job? Rows of a few random tokens, one token each to generate.

    python -m benchmarks.job_size                     # 1,000 and 50,000 rows of the default model: ten minutes
    python -m benchmarks.job_size --rows 100 1000 --model DIR

`batchkv run` in a process of its own for each job, the small one right before and right after the large one. Tokens per
second are the summary's: of generation, loading left out. Hardly anything is shared, so what a row costs besides the
model shows as well as it can.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TOKEN_IDS = range(100, 49_000)  # of the default model, no special ones
_RUN = "from batchkv.cli.main import main; main()"


def write_job(path: Path, rows: int, tokens: int) -> None:
    rng = np.random.default_rng(rows)
    prompts = rng.integers(TOKEN_IDS.start, TOKEN_IDS.stop, (rows, tokens), np.int32)
    pq.write_table(pa.table({"id": np.arange(rows), "prompt_token_ids": list(prompts)}), path)


def tokens_per_second(job: Path, model: str, dtype: str) -> float:
    """Of one run, from its summary."""
    summary = job.with_suffix(".json")
    arguments = ["run", str(job), "--out", str(job.with_suffix(".results.parquet")), "--summary", str(summary)]
    arguments += ["--model", model, "--dtype", dtype, "--max-tokens", "1", "--overwrite", "--quiet"]
    subprocess.run([sys.executable, "-c", _RUN, *arguments], check=True)
    found: dict[str, float] = json.loads(summary.read_text())
    if found["errors"]:
        raise RuntimeError(f"{found['errors']} rows have errors")
    return found["generated_tokens_per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs=2, default=[1_000, 50_000], metavar=("SMALL", "LARGE"))
    parser.add_argument("--tokens", type=int, default=4, help="of a prompt")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small, large = jobs = [Path(folder, f"{rows}.parquet") for rows in options.rows]
        for job, rows in zip(jobs, options.rows, strict=True):
            write_job(job, rows, options.tokens)
        print("| small, tokens/s | large, tokens/s | large / small |\n|---|---|---|", flush=True)
        for _ in range(options.turns):
            before, of_large, after = (
                tokens_per_second(j, options.model, options.dtype) for j in (small, large, small)
            )
            of_small = (before + after) / 2
            print(f"| {before:.1f}, {after:.1f} | {of_large:.1f} | {of_large / of_small:.3f} |", flush=True)


if __name__ == "__main__":
    main()
