"""The rows of a job, block by block, whatever its file is made of: rows, or OpenAI Batch requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchkv.errors import UserError
from batchkv.io.columns import is_batch
from batchkv.io.read import JobSource, JobTable

if TYPE_CHECKING:
    from batchkv.io.openai_batch import Requests


@dataclass(frozen=True, slots=True)
class JobBlock:
    """A block of rows; of OpenAI Batch requests also these, which are a row or more each."""

    table: JobTable
    requests: Requests | None = None


def job_blocks(source: JobSource) -> Iterator[JobBlock]:
    """All blocks of a job.

    Raises:
        UserError: as `JobSource.blocks`; or only part of the job is requests.
    """
    first_line = 0
    are_requests: bool | None = None
    for block in source.blocks():
        says_nothing = block.num_rows == len(block.errors)
        found = bool(are_requests) if says_nothing else is_batch(block.columns)
        if are_requests is not None and found != are_requests:
            raise UserError(f"{block.where}: OpenAI Batch requests and other rows are in one job: make it two")
        are_requests = found
        yield JobBlock(*_as_rows(block, first_line)) if found else JobBlock(block)
        first_line += block.num_rows


def _as_rows(block: JobTable, first_line: int) -> tuple[JobTable, Requests]:
    from batchkv.io.openai_batch import read_requests  # takes most of a second, and most jobs need none of it

    requests = read_requests(block, first_line)
    return requests.rows, requests
