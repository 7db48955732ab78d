"""Memory of a whole run by the number of rows: it is to stay flat.

    python -m benchmarks.row_memory                 # 100,000 and 1,000,000 rows: some minutes
    python -m benchmarks.row_memory --rows 5000000
    python -m benchmarks.row_memory --repeats 1         # every prompt once: more than a millisecond a row

Every prompt comes `--repeats` times: greedy twins are computed once, but each is a row that is read, recorded and
written. A tiny model made on the spot, so that what is seen is that of the rows. `batchkv run` in a process of its own;
peak resident memory as the kernel counts it, mapped files included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import LlamaConfig, LlamaForCausalLM

HEADER_TOKENS, OWN_TOKENS, VOCAB_SIZE = 16, 8, 4_096
_BLOCK = 1 << 16
_RUN = """
import sys, json, resource
from batchkv.cli import main
sys.argv = ["batchkv", *sys.argv[1:]]
code = 0
try:
    main.main()
except SystemExit as end:
    code = int(end.code or 0)
print(json.dumps({"peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "code": code}))
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run. Bytes are of resident memory at its peak."""

    rows: int
    seconds: float
    peak_bytes: int


def write_jobs(path: Path, rows: int, repeats: int) -> None:
    """Prompts of token ids under a hundred headers, in random order, with ids and a column that is carried."""
    rng = np.random.default_rng(0)
    pool = rng.integers(0, VOCAB_SIZE, (max(rows // repeats, 1), OWN_TOKENS), np.int32)
    headers = rng.integers(0, VOCAB_SIZE, (100, HEADER_TOKENS), np.int32)
    writer: pq.ParquetWriter | None = None
    for start in range(0, rows, _BLOCK):
        count = min(_BLOCK, rows - start)
        which = rng.integers(0, len(pool), count)
        tokens = np.concatenate([headers[which % 100], pool[which]], axis=1)
        offsets = pa.array(np.arange(0, tokens.size + 1, tokens.shape[1], dtype=np.int32))
        table = pa.table(
            {
                "id": [f"row-{start + i}" for i in range(count)],
                "prompt_token_ids": pa.ListArray.from_arrays(offsets, pa.array(tokens.ravel())),
                "source": ["survey"] * count,
            }
        )
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def save_model(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def run(model: Path, jobs: Path, rows: int) -> Cost:
    """All rows of a job file."""
    out = jobs.with_name("results.parquet")
    arguments = ["run", str(jobs), "--out", str(out), "--model", str(model), "--max-tokens", "2", "--quiet"]
    arguments += ["--kv-memory", "64MiB", "--overwrite"]
    started = perf_counter()
    done = subprocess.run([sys.executable, "-c", _RUN, *arguments], check=True, capture_output=True, text=True)
    seconds = perf_counter() - started
    found = json.loads(done.stdout.splitlines()[-1])
    if found["code"] != 0 or pq.ParquetFile(out).metadata.num_rows != rows:
        raise RuntimeError(f"the run failed: {done.stderr[-500:]}")
    return Cost(rows, seconds, found["peak_kib"] << 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, jobs = Path(folder, "model"), Path(folder, "jobs.parquet")
        save_model(model)
        write_jobs(jobs, 1, 1)
        base = run(model, jobs, 1)
        print("| rows | seconds | peak MiB | over one row, MiB |\n|---|---|---|---|", flush=True)
        for rows in sorted(options.rows):
            write_jobs(jobs, rows, options.repeats)
            cost = run(model, jobs, rows)
            over = (cost.peak_bytes - base.peak_bytes) / (1 << 20)
            print(f"| {rows:,} | {cost.seconds:,.0f} | {cost.peak_bytes >> 20:,} | {over:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
