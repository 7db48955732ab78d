"""The GPU and what drives it. Run as a script it prints that as JSON: asking torch leaves a process with a context."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class GpuMachine:
    """What GPU.md says of the machine; empty is unknown or not there.

    Attributes:
        gpu: the card's name.
        memory_gib: of the card.
        capability: as in `sm_90`, or AMD's architecture.
        toolkit: the CUDA or ROCm release that torch was built with.
        compiler: a C compiler, without which Triton cannot launch anything.
    """

    gpu: str
    memory_gib: float
    capability: str
    driver: str
    toolkit: str
    torch: str
    triton: str
    python: str
    compiler: str


def find_machine() -> GpuMachine:
    """Raises ModuleNotFoundError where there is no torch."""
    import torch

    gpu, memory_gib, capability = "", 0.0, ""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu, memory_gib = properties.name, round(properties.total_memory / (1 << 30), 1)
        capability = f"sm_{properties.major}{properties.minor}"
        if torch.version.hip:
            capability = str(properties.gcnArchName)
    return GpuMachine(
        gpu=gpu,
        memory_gib=memory_gib,
        capability=capability,
        driver=_driver() if gpu else "",
        toolkit=f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda or 'none'}",
        torch=str(torch.__version__),
        triton=_triton(),
        python=platform.python_version(),
        compiler=next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), ""),
    )


def _driver() -> str:
    """As nvidia-smi tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


if __name__ == "__main__":
    print(json.dumps(asdict(find_machine())))
