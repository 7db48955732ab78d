"""Seconds on a device, and what the device can do at best: the roofs that kernels are held against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

Run = Callable[[], object]

WARM_UPS = 3
_MOST_FLUSHES = 40


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds, medians.

    Attributes:
        ms: on the device.
        host_ms: until the call returned; on a GPU the work may still be under way then.
    """

    ms: float
    host_ms: float


@dataclass(frozen=True, slots=True)
class Roof:
    """What this device did in this run, whatever its data sheet says.

    Attributes:
        copy_bytes_per_s: read and written, of a large copy.
        flops: of a large product.
    """

    copy_bytes_per_s: float
    flops: float

    def floor_ms(self, kv_bytes: int, flops: int) -> float:
        """No kernel that reads and computes so much takes less."""
        return 1e3 * max(kv_bytes / self.copy_bytes_per_s, flops / self.flops)

    def is_memory_bound(self, kv_bytes: int, flops: int) -> bool:
        return kv_bytes / self.copy_bytes_per_s > flops / self.flops


class Stopwatch:
    """Times calls.

    Before each call a buffer larger than any cache is written, so that nothing is found in the cache. That also gives
    the host a lead: it has queued the call before the device gets to it, and launching is not part of the time.

    Args:
        device: where the work is done.
        repeats: timed calls.
        flush_bytes: of the buffer.
    """

    def __init__(self, device: torch.device, repeats: int = 20, flush_bytes: int = 1 << 30) -> None:
        self._device, self._repeats = device, repeats
        self._buffer = torch.empty(flush_bytes, dtype=torch.int8, device=device)

    def time(self, run: Run) -> Timing:
        return self._time_on_gpu(run) if self._device.type == "cuda" else self._time_on_cpu(run)

    def _time_on_cpu(self, run: Run) -> Timing:
        times = []
        for _ in range(self._repeats):
            self._buffer.zero_()
            times.append(_host_ms(run))
        return Timing(median(times), median(times))

    def _time_on_gpu(self, run: Run) -> Timing:
        for _ in range(WARM_UPS):
            run()
        host_ms = self._host_ms_on_gpu(run)
        flushes = self._flushes(host_ms)
        spans = []
        for _ in range(self._repeats):
            for _ in range(flushes):
                self._buffer.zero_()
            spans.append(self._span_ms(run))
        return Timing(median(spans), host_ms)

    def _host_ms_on_gpu(self, run: Run) -> float:
        times = []
        for _ in range(5):
            torch.cuda.synchronize(self._device)
            times.append(_host_ms(run))
        torch.cuda.synchronize(self._device)
        return median(times)

    def _flushes(self, host_ms: float) -> int:
        """Writes of the buffer that take longer than the host needs to queue the call."""
        flush_ms = self._span_ms(self._buffer.zero_)
        return min(_MOST_FLUSHES, 1 + math.ceil(2 * host_ms / max(flush_ms, 1e-3)))

    def _span_ms(self, run: Run) -> float:
        """Between two events around a call; waits for it, so that calls do not queue up."""
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize(self._device)
        return float(start.elapsed_time(end))


def measure_roof(stopwatch: Stopwatch, device: torch.device, dtype: torch.dtype, *, small: bool = False) -> Roof:
    """A copy of a GiB and a product of 8192 x 8192 in `dtype`; tiny ones to try the code."""
    size, side = (1 << 20, 64) if small else (1 << 30, 8192)
    source, target = (torch.zeros(size, dtype=torch.int8, device=device) for _ in range(2))
    copy_ms = stopwatch.time(lambda: target.copy_(source)).ms
    left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    product_ms = stopwatch.time(lambda: torch.mm(left, right, out=out)).ms
    return Roof(copy_bytes_per_s=2e3 * size / copy_ms, flops=2e3 * side**3 / product_ms)


def _host_ms(run: Run) -> float:
    started = perf_counter()
    run()
    return 1e3 * (perf_counter() - started)
