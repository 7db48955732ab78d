"""`python -m tests.fuzz`: many mutated inputs, and what they did."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="inputs")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("fuzz-findings"), help="where offending inputs are kept")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads and forks do not go together
    from tests.fuzz.driver import fuzz

    started = time.perf_counter()
    found = fuzz(range(options.first, options.first + options.count), options.seed, options.folder)
    seconds = time.perf_counter() - started
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in found.outcomes.most_common())
    print(f"{found.inputs:,} inputs in {seconds:.0f} s: {outcomes}")
    print(f"slowest {found.slowest_s:.2f} s, largest {found.largest_bytes >> 20} MiB")
    raise SystemExit(0 if set(found.outcomes) <= {"ok"} else 1)


if __name__ == "__main__":
    main()
