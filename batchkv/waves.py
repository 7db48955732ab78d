"""From the rows of a job to waves: rows that are planned and executed together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from batchkv.intervals import count_up
from batchkv.partition import partition
from batchkv.rows import Rows
from batchkv.scoring import Scored
from batchkv.wave import Int64Array, Wave

# A job of fewer outputs and tokens is one wave, and every prefix in it is computed once. Larger ones are split, so that
# the memory for planning does not grow with the job.
MAX_OUTPUTS = 1 << 16
MAX_TOKENS = 1 << 25

NOTHING: Int64Array = np.zeros(0, np.int64)  # no output
_SAMPLE_BITS = 17  # an output is one number: its row, and below that its sample


def output_keys(row: npt.NDArray[np.integer], sample: npt.NDArray[np.integer]) -> Int64Array:
    """int64 [outputs]: one number for each (row, sample)."""
    return (row.astype(np.int64) << _SAMPLE_BITS) | sample.astype(np.int64)


def split(rows: Rows) -> list[Int64Array]:
    """Which rows are in which wave."""
    return partition(
        rows.arena,
        rows.tenants,
        rows.params.column(lambda params: params.n, np.int64),
        max_outputs=MAX_OUTPUTS,
        max_tokens=MAX_TOKENS,
    )


def waves(rows: Rows) -> Iterator[Wave]:
    """All waves of a job, in the order of execution."""
    for picked in split(rows):
        yield wave_of(rows, picked)
        rows.release_pages()


def wave_of(rows: Rows, picked: Int64Array) -> Wave:
    """Every sample of the rows that are `picked`, which ascend and have tokens."""
    params = rows.params.take(picked)
    counts = params.column(lambda one: one.n, np.int64)
    return Wave(
        arena=rows.arena.take(picked),
        params=params,
        keys=rows.keys[picked],
        scored=Scored.none(len(picked)),
        group=rows.tenants[picked].astype(np.int64),
        row=picked,
        output_request=np.repeat(np.arange(len(picked)), counts),
        output_sample=count_up(counts),
    )


def without_outputs(wave: Wave, done: Int64Array) -> Wave:
    """The wave without the outputs that are there already.

    Args:
        wave: a wave.
        done: int64, ascending, from `output_keys`.
    """
    keys = output_keys(wave.row[wave.output_request], wave.output_sample)
    at = np.searchsorted(done, keys)
    is_done = np.zeros(len(keys), np.bool_)
    is_done[at < len(done)] = done[at[at < len(done)]] == keys[at < len(done)]
    return wave.with_outputs(np.flatnonzero(~is_done))
