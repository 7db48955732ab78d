"""From the rows of a job to waves: rows that are planned and executed together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchkv.choices import ChoiceTokens, with_choices
from batchkv.intervals import count_up
from batchkv.partition import Parts, partition
from batchkv.rows import Rows
from batchkv.scoring import split_last_tokens
from batchkv.token_arena import TokenArena
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


def split(rows: Rows) -> Parts:
    """The rows that have tokens, in parts that can be planned at once."""
    return partition(
        rows.arena,
        rows.tenants,
        rows.outputs_of_rows(),
        max_outputs=MAX_OUTPUTS,
        max_tokens=MAX_TOKENS,
        after_block=rows.release_pages,
    )


def wave_of(rows: Rows, picked: Int64Array, arena: TokenArena, choices: ChoiceTokens) -> Wave:
    """All outputs of some rows.

    Args:
        rows: of the job.
        picked: row numbers, ascending.
        arena: their tokens, none of them empty; continuations included.
        choices: for rows whose choices are scored.
    """
    params = rows.params.take(picked)
    counts = params.column(lambda one: one.num_outputs, np.int64)
    prompts, scored = split_last_tokens(arena, rows.score_from[picked].astype(np.int64))
    wave = Wave(
        arena=prompts,
        params=params,
        keys=rows.keys[picked],
        scored=scored,
        group=rows.tenants[picked].astype(np.int64),
        row=picked,
        choice=np.full(len(picked), -1),
        output_request=np.repeat(np.arange(len(picked)), counts),
        output_sample=count_up(counts),
    )
    return with_choices(wave, choices)
