"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import psutil

_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe() -> str:
    """One line: processor, cores, memory, system, date."""
    parts = (
        _cpu_info().get("model name", platform.machine()),
        f"{cores()} cores",
        " ".join(_features()) or "no AVX2",
        f"{psutil.virtual_memory().total / (1 << 30):.0f} GiB",
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}",
        f"torch {importlib.metadata.version('torch')}",
        datetime.now(UTC).date().isoformat(),
    )
    return ", ".join(parts)


def best_feature() -> str:
    """The widest instructions that figures may rest on."""
    return [platform.machine(), *_features()][-1]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float:
    """Processes that want to run, over the last minute: others' work disturbs the figures."""
    return os.getloadavg()[0]


def _features() -> list[str]:
    flags = _cpu_info().get("flags", "").split()
    return [feature for feature in _FEATURES if feature in flags]


def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    lines = path.read_text().split("\n\n", 1)[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}
