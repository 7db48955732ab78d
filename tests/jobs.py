"""Small jobs for tests: read whole, as one block."""

from __future__ import annotations

from typing import Any

from batchkv.io.read import JobTable, open_jobs
from batchkv.job import Job, check_rows
from batchkv.sampling_params import SamplingParams


def read_block(jobs: Any, limit: int | None = None) -> JobTable:
    """The only block of a small job."""
    (block,) = open_jobs(jobs, limit).blocks()
    return block


def read_job(jobs: Any, defaults: SamplingParams | None = None, *, limit: int | None = None) -> Job:
    """Its rows, checked."""
    return check_rows(read_block(jobs, limit), defaults or SamplingParams())
