"""Shared by all tests: hypothesis profiles, and where the job files beside a checkout are."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

# Where there is no GPU, the Triton kernels run in the interpreter. Triton looks when kernels are defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("default")

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network
if "PYTEST_XDIST_WORKER" in os.environ:  # a process for each core
    torch.set_num_threads(1)
elif "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(min(2, os.cpu_count() or 1))

WORKLOADS = Path(__file__).resolve().parents[2] / "shared" / "workloads"
