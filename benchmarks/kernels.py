"""`python -m benchmarks.kernels`: attention of one layer on a GPU, against the machine's roof and other kernels.

Every implementation runs in a process of its own: a kernel that reads where it must not ends its process only, and
memory that one fails to get does not touch the others. What each computes is held against plain attention in fp32
before it is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.attention_cases import (
    Case,
    Inputs,
    Shape,
    largest_error,
    make_inputs,
    reference,
    standard_cases,
    tolerance,
)
from benchmarks.attention_peers import BATCHKV, IMPLEMENTATIONS, NotComparedError, Prepare
from benchmarks.device_timing import Roof, Stopwatch, measure_roof
from benchmarks.markdown import markdown_table

ROOF = "roof"
SMOKE_CASES = (Case(32, 2, 4), Case(0, 1, 8, 8), Case(16, 2, 3, 2))
_CHILD_TIMEOUT_S = 1800
_SMALL_FLUSH = 1 << 16


@dataclass(frozen=True, slots=True)
class Measurement:
    """An implementation on a case.

    Attributes:
        case: its number.
        ms, host_ms: see `Timing`; None where nothing was timed.
        error: see `largest_error`.
        note: why nothing was timed.
    """

    implementation: str
    case: int
    ms: float | None = None
    host_ms: float | None = None
    error: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured, and where."""

    cases: tuple[Case, ...]
    shape: Shape
    device: torch.device
    repeats: int
    is_smoke: bool

    def stopwatch(self) -> Stopwatch:
        options = {"flush_bytes": _SMALL_FLUSH} if self.is_smoke else {}
        return Stopwatch(self.device, self.repeats, **options)


def measure_all(name: str, setup: Setup) -> Iterator[Measurement]:
    """One implementation on every case."""
    stopwatch = setup.stopwatch()
    for number, case in enumerate(setup.cases):
        yield measure(name, IMPLEMENTATIONS[name], number, case, setup, stopwatch)
        if setup.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def measure(name: str, prepare: Prepare, number: int, case: Case, setup: Setup, stopwatch: Stopwatch) -> Measurement:
    """Checked, then timed. Whatever goes wrong stands in the note."""
    try:
        inputs = make_inputs(case, setup.shape, setup.device)
        return _checked_and_timed(name, prepare, number, inputs, stopwatch)
    except ModuleNotFoundError as error:
        return Measurement(name, number, note=f"not installed ({error.name})")
    except NotComparedError as error:
        return Measurement(name, number, note=f"not compared: {error}")
    except torch.cuda.OutOfMemoryError:
        return Measurement(name, number, note="out of memory")
    except Exception as error:  # of any library, on any GPU: the others are to be measured all the same
        first_line = (str(error).strip().splitlines() or [""])[0]
        return Measurement(name, number, note=f"failed: {type(error).__name__}: {first_line[:200]}")


def _checked_and_timed(name: str, prepare: Prepare, number: int, inputs: Inputs, stopwatch: Stopwatch) -> Measurement:
    with torch.inference_mode():
        expected = reference(inputs)  # first, while there is memory: some keep a copy of the prefix for every row
        attend = prepare(inputs)
        error = largest_error(attend(), expected)
        if not error <= tolerance(inputs.shape.dtype):
            return Measurement(name, number, error=error, note=f"wrong: off by {error:.2g}")
        timing = stopwatch.time(attend)
    return Measurement(name, number, timing.ms, timing.host_ms, error)


def measure_in_process(name: str, setup: Setup, arguments: Sequence[str]) -> Iterator[Measurement | Roof]:
    """The same in a process of its own; a case that it did not get to is said to have failed."""
    command = [sys.executable, "-m", "benchmarks.kernels", *arguments, "--child", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(_CHILD_TIMEOUT_S, process.kill)
    watchdog.start()
    done = 0
    try:
        for line in process.stdout or ():
            if not line.startswith('{"benchmark":'):
                print(line, end="", file=sys.stderr)  # libraries print what they like
                continue
            answer = json.loads(line)["benchmark"]
            yield Roof(**answer) if name == ROOF else Measurement(**answer)
            done += 1
        code = process.wait()
    finally:
        watchdog.cancel()
        process.kill()
    note = f"failed: its process ended with {code} (after {_CHILD_TIMEOUT_S} s it is ended)"
    for number in range(done, 0 if name == ROOF else len(setup.cases)):
        yield Measurement(name, number, note=note)


def report(setup: Setup, roof: Roof | None, measurements: Sequence[Measurement], names: Sequence[str]) -> str:
    """As Markdown: a row for each case, a column for each implementation, and the notes below."""
    found = {(m.implementation, m.case): m for m in measurements}
    peers = [name for name in names if name != BATCHKV]
    columns = ["case", "batchkv, ms", "GB/s", "TFLOP/s", "of the roof", "launch, ms", "error", *peers]
    rows = []
    for number, case in enumerate(setup.cases):
        own = found.get((BATCHKV, number))
        cells = [_peer_cell(found.get((name, number)), own) for name in peers]
        rows.append([case.name, *_own_cells(own, case, setup.shape, roof), *cells])
    parts = [_shape_line(setup), _roof_line(roof), markdown_table(columns, rows), _notes(setup, measurements)]
    return "\n\n".join(filter(None, parts))


def _own_cells(own: Measurement | None, case: Case, shape: Shape, roof: Roof | None) -> list[str]:
    if own is None or own.ms is None:
        return [_short(own), "", "", "", "", "" if own is None or own.error is None else f"{own.error:.1e}"]
    kv_bytes, flops = case.kv_bytes(shape), case.flops(shape)
    share = ""
    if roof is not None:
        limit = "memory" if roof.is_memory_bound(kv_bytes, flops) else "compute"
        share = f"{roof.floor_ms(kv_bytes, flops) / own.ms:.0%} {limit}"
    rates = [f"{kv_bytes / own.ms / 1e6:,.0f}", f"{flops / own.ms / 1e9:,.1f}"]
    return [f"{own.ms:.3f}", *rates, share, f"{own.host_ms:.3f}", f"{own.error:.1e}"]


def _peer_cell(peer: Measurement | None, own: Measurement | None) -> str:
    if peer is None or peer.ms is None:
        return _short(peer)
    if own is None or own.ms is None:
        return f"{peer.ms:.3f}"
    return f"{peer.ms:.3f} ({peer.ms / own.ms:.2f}x)"


def _short(measurement: Measurement | None) -> str:
    return "" if measurement is None else measurement.note.split(":")[0].split(" (")[0]


def _shape_line(setup: Setup) -> str:
    shape = setup.shape
    return (
        f"One layer: {shape.heads} query heads, {shape.kv_heads} KV heads of {shape.head_dim}, {_name(shape.dtype)}, "
        f"KV in {_name(shape.kv_dtype)}; medians of {setup.repeats} calls."
    )


def _roof_line(roof: Roof | None) -> str:
    if roof is None:
        return "The roof was not measured."
    return (
        f"Roof, measured in the same run: {roof.copy_bytes_per_s / 1e9:,.0f} GB/s read and written by a large copy, "
        f"{roof.flops / 1e12:,.1f} TFLOP/s by a large product."
    )


def _notes(setup: Setup, measurements: Sequence[Measurement]) -> str:
    """Every reason once for each implementation, with how many cases it is of."""
    counts: dict[tuple[str, str], list[int]] = {}
    for m in measurements:
        if m.note:
            counts.setdefault((m.implementation, m.note), []).append(m.case)
    lines = []
    for (name, note), cases in counts.items():
        which = "all cases" if len(cases) == len(setup.cases) else "; ".join(setup.cases[i].name for i in cases)
        lines.append(f"- {name}: {note} ({which})")
    return "\n".join(lines)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="of queries and results")
    parser.add_argument("--kv-dtype", choices=["auto", "int8"], default="auto", help="auto is that of the queries")
    parser.add_argument("--prefixes", type=_numbers, default=[256, 1024, 4096, 16384], help="tokens, with commas")
    parser.add_argument("--rows", type=_numbers, default=[16, 64, 256, 1024], help="with commas")
    parser.add_argument("--own", type=int, default=64, help="tokens of each row's own")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", type=_names, default=list(IMPLEMENTATIONS), help=", ".join(IMPLEMENTATIONS))
    parser.add_argument("--markdown", type=Path, help="also write the table there, after every implementation")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, in Triton's interpreter")
    parser.add_argument("--one-process", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(IMPLEMENTATIONS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(IMPLEMENTATIONS)}")
    return names


def make_setup(options: argparse.Namespace) -> Setup:
    if options.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
        kv_dtype = torch.int8 if options.kv_dtype == "int8" else torch.float32  # bfloat16 is wrong there
        return Setup(SMOKE_CASES, Shape(2, 1, 16, torch.float32, kv_dtype), torch.device("cpu"), 1, is_smoke=True)
    dtype: torch.dtype = getattr(torch, options.dtype)
    kv_dtype = torch.int8 if options.kv_dtype == "int8" else dtype
    shape = Shape(options.heads, options.kv_heads, options.head_dim, dtype, kv_dtype)
    cases = tuple(standard_cases(options.prefixes, options.rows, options.own))
    return Setup(cases, shape, torch.device("cuda"), options.repeats, is_smoke=False)


def _run_child(name: str, setup: Setup) -> None:
    """Answers in lines of JSON."""
    if name == ROOF:
        answers: Iterator[Roof | Measurement] = iter([_measure_roof(setup)])
    else:
        answers = iter(measure_all(name, setup))
    for answer in answers:
        print(json.dumps({"benchmark": asdict(answer)}), flush=True)


def _measure_roof(setup: Setup) -> Roof:
    return measure_roof(setup.stopwatch(), setup.device, setup.shape.dtype, small=setup.is_smoke)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if batchkv was measured on every case and was right."""
    options = parse(arguments)
    setup = make_setup(options)
    if options.child:
        _run_child(options.child, setup)
        return 0
    if setup.device.type == "cuda" and not torch.cuda.is_available():
        print("No GPU: torch sees none here; --smoke tries the code on the CPU.", file=sys.stderr)
        return 2
    roof, measurements = None, list[Measurement]()
    for name in [ROOF, *options.only]:
        for answer in _answers(name, setup, options.one_process, sys.argv[1:] if arguments is None else arguments):
            if isinstance(answer, Roof):
                roof = answer
            else:
                measurements.append(answer)
                print(f"{name}, {setup.cases[answer.case].name}: {answer.note or f'{answer.ms:.3f} ms'}", flush=True)
        if options.markdown:
            options.markdown.write_text(report(setup, roof, measurements, options.only) + "\n")
    print("\n" + report(setup, roof, measurements, options.only))
    own = [m for m in measurements if m.implementation == BATCHKV]
    return int(any(m.ms is None for m in own) or roof is None)


def _answers(name: str, setup: Setup, one_process: bool, arguments: Sequence[str]) -> Iterator[Measurement | Roof]:
    if not one_process:
        yield from measure_in_process(name, setup, arguments)
    elif name == ROOF:
        yield _measure_roof(setup)
    else:
        yield from measure_all(name, setup)


if __name__ == "__main__":
    sys.exit(main())
