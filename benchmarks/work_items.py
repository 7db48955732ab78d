"""`python -m benchmarks.work_items`: what the host does before each step, in milliseconds on one core.

1,024 rows below 300 nodes of a random trie decode for a while. Every step's work is made twice: from that of the step
before, as where nothing but the ends of rows has changed, and from nothing, as where a row has come or gone; then it is
packed for the device. No GPU is needed, and no kernel runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import TypeVar

import numpy as np
import torch

from batchkv.kernels.device_work import DeviceWork, WorkSizes
from batchkv.kernels.extend_work import PlannedStep, extend_work
from batchkv.kernels.tiles import load_tiles
from batchkv.kernels.work_items import WorkItems, plan_work, traffic
from batchkv.kv_cache import KVCache
from batchkv.step import AttentionBatch
from benchmarks.markdown import markdown_table

TARGETS_MS = {"extended": 2.0, "planned anew": 10.0}
PAGE_SIZE = 16
HEADS = 4  # query heads for each of 8 KV heads
ITEMS_WANTED = 132  # a program for each multiprocessor of an H100
TOKENS_PER_NODE, TOKENS_PER_ROW = (10, 120), (1, 120)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spent:
    """Milliseconds by the clock and of the CPU: they differ where other work disturbs."""

    ms: float
    cpu_ms: float


@dataclass(frozen=True, slots=True)
class Times:
    """Of each step."""

    extended: list[Spent]
    planned: list[Spent]
    packed: list[Spent]


@dataclass(frozen=True, slots=True)
class Size:
    """How large the last step was; bytes are those sent to the device."""

    live_tokens: int
    keys_from_memory: int
    items: int
    block_bytes: int


class Decode:
    """Rows of a random trie, which grow by one token a step."""

    def __init__(self, rows: int, nodes: int, steps: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        parents = [-1, *(int(random.integers(max(0, node - 20), node)) for node in range(1, nodes))]
        node_tokens = random.integers(*TOKENS_PER_NODE, nodes)
        row_tokens = random.integers(*TOKENS_PER_ROW, rows)
        node_of_row = np.sort(random.integers(0, nodes, rows))
        # a page more for each that is partly filled or copied, and those that the steps fill
        pages = int((node_tokens // PAGE_SIZE + 2).sum() + ((row_tokens + steps) // PAGE_SIZE + 2).sum())
        self._cache = KVCache((pages,), (None,), PAGE_SIZE)
        handles: list[int] = []
        for parent, count in zip(parents, node_tokens.tolist(), strict=True):
            handles.append(self._cache.create() if parent < 0 else self._cache.fork(handles[parent]))
            self._cache.append(np.array([handles[-1]]), np.array([count]))
        own = np.array([self._cache.fork(handles[node]) for node in node_of_row.tolist()])
        self._cache.append(own, row_tokens)
        self._rows = own[_depth_first(parents, node_of_row)]
        self.live_tokens = int(node_tokens.sum() + row_tokens.sum())

    def next_step(self) -> AttentionBatch:
        count = len(self._rows)
        appended = self._cache.append(self._rows, np.ones(count, np.int64))
        self.live_tokens += count
        return AttentionBatch(
            page_size=PAGE_SIZE,
            window=None,
            page_table=self._cache.page_table(0, self._rows),
            kv_lens=self._cache.lengths(self._rows),
            cu_seqlens_q=np.arange(count + 1),
            slots=appended.slots[0],
            copies=tuple(appended.copies),
        )


def _depth_first(parents: Sequence[int], node_of_row: np.ndarray) -> np.ndarray:
    """The rows in the order of the trie."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)

    def visit(node: int) -> Iterator[int]:
        yield node
        for child in children.get(node, ()):
            yield from visit(child)

    place = np.empty(len(parents), np.int64)
    place[list(visit(0))] = np.arange(len(parents))
    return np.argsort(place[node_of_row], kind="stable")


def measure(rows: int, nodes: int, steps: int, seed: int = 0) -> tuple[Times, Size]:
    """Every step in all three ways.

    Raises:
        RuntimeError: a step could not be made from the one before, though only the ends of rows have changed.
    """
    tiles = load_tiles("sm_90").tiles(128)
    decode, times = Decode(rows, nodes, steps + 1, seed), Times([], [], [])
    before = decode.next_step()
    planned = PlannedStep(before, plan_work(before, tiles, HEADS, ITEMS_WANTED))
    for _ in range(steps):
        batch = decode.next_step()
        anew = _timed(times.planned, partial(plan_work, batch, tiles, HEADS, ITEMS_WANTED))
        extended = _timed(times.extended, partial(extend_work, planned, batch, tiles[0]))
        if extended is None or extended.num_tokens != anew.num_tokens:
            raise RuntimeError("the work of a decode step was not extended from the step before")
        _timed(times.packed, partial(_pack, extended))
        planned = PlannedStep(batch, extended)
    read = traffic(anew)
    items = sum(map(len, anew.items))
    return times, Size(decode.live_tokens, read.from_memory, items, 4 * sum(WorkSizes.of(anew).lengths))


def _pack(work: WorkItems) -> None:
    """As for a GPU, but to memory of the host."""
    DeviceWork.allocate(WorkSizes.of(work), torch.device("cpu")).load(work)


def _timed(times: list[Spent], run: Callable[[], T]) -> T:
    """What `run` gives; what it took is added to `times`."""
    started, cpu_started = perf_counter(), thread_time()
    result = run()
    times.append(Spent(1e3 * (perf_counter() - started), 1e3 * (thread_time() - cpu_started)))
    return result


def _middle_and_tail(ms: Sequence[float]) -> list[str]:
    return [f"{median(ms):.2f}", f"{np.percentile(ms, 95):.2f}"]


def report(rows: int, nodes: int, times: Times, size: Size) -> str:
    """As Markdown."""
    ways = {"extended": times.extended, "planned anew": times.planned, "packed": times.packed}
    table = markdown_table(
        ["step", "median, ms", "95 %, ms", "CPU median, ms", "CPU 95 %, ms", "wanted"],
        [
            [
                way,
                *_middle_and_tail([spent.ms for spent in times]),
                *_middle_and_tail([spent.cpu_ms for spent in times]),
                f"under {TARGETS_MS[way]:g}" if way in TARGETS_MS else "",
            ]
            for way, times in ways.items()
        ],
    )
    return (
        f"{rows:,} rows below {nodes} nodes, {len(times.planned)} steps; {size.live_tokens:,} live tokens, "
        f"{size.keys_from_memory / size.live_tokens:.3f} of them read from memory, {size.items:,} items, "
        f"{size.block_bytes / 1024:.0f} KiB to the device.\n\n{table}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.work_items", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--nodes", type=int, default=300)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--markdown", type=Path, help="also write the table there")
    options = parser.parse_args(arguments)
    text = report(options.rows, options.nodes, *measure(options.rows, options.nodes, options.steps))
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
