"""All rows of a job, as far as they are needed to run it: token ids in a mapped file, the rest in flat arrays.

Rows come in blocks and leave nothing else behind. Ids and carried columns are read again from the job when results are
written.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from batchkv.errors import RowError, UserError
from batchkv.io.carried import CarriedSchema, conformed
from batchkv.io.read import JobSource
from batchkv.job import IdKind, Job, carried_columns, check_columns, check_rows, read_ids
from batchkv.metrics import RunMetrics
from batchkv.progress import OnProgress, no_progress
from batchkv.random_numbers import row_key
from batchkv.sampling_params import RowParams, SamplingParams
from batchkv.token_arena import TokenArena
from batchkv.tokenization import Tokenizer, check_prompts, tokenize

Int64Array = npt.NDArray[np.int64]
Errors = Mapping[int, RowError]
Reject = Callable[[Errors], None]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a job.

    Attributes:
        arena: prompts, in a mapped file; rows that cannot run have no tokens.
        params: a row with an error has the job's defaults. Seeds are 0: they are in the keys.
        keys: uint64 [rows], from `random_numbers.row_key`.
        tenants: int32 [rows], rows of different ones share nothing.
        id_kind: what the ids of the job are.
        carried: schema of the columns that are copied to the result.
        mapped: the token file; None if it is empty.
    """

    arena: TokenArena
    params: RowParams
    keys: npt.NDArray[np.uint64]
    tenants: npt.NDArray[np.int32]
    id_kind: IdKind | None
    carried: pa.Schema
    mapped: mmap.mmap | None

    @property
    def num_rows(self) -> int:
        return len(self.keys)

    @property
    def num_outputs(self) -> int:
        """Samples of all rows that have tokens."""
        return int(self.params.column(lambda params: params.n, np.int64)[self.arena.lengths > 0].sum())

    def release_pages(self) -> None:
        """Lets the system have back the memory in which parts of the token file are; they are read again if needed."""
        if self.mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a model takes: token ids below `vocab_size`, and prompts shorter than `context_length` (None: no limit)."""

    vocab_size: int
    context_length: int | None


def take_in(
    source: JobSource,
    defaults: SamplingParams,
    tokenizer: Tokenizer | None,
    limits: PromptLimits,
    token_file: IO[bytes],
    reject: Reject,
    metrics: RunMetrics,
    *,
    limit: int | None = None,
    on_progress: OnProgress = no_progress,
) -> Rows:
    """Reads, checks and tokenizes a job.

    Args:
        source: the job.
        defaults: the parameters of a row that does not set its own.
        tokenizer: of the model; jobs of token ids need none.
        limits: what the model takes.
        token_file: empty, for the token ids; it stays mapped as long as the rows are used.
        reject: called with the rows that cannot run, by row number, some at a time.
        metrics: times are added here.
        limit: only the first rows.
        on_progress: called with the number of rows so far.

    Raises:
        UserError: no row of the job can be run, or the token file cannot be written.
    """
    started = perf_counter()
    intake = _Intake(defaults, tokenizer, limits, token_file, reject, metrics)
    for block in source.blocks(limit):
        job = check_rows(block, defaults, first_row=intake.num_rows, id_kind=intake.id_kind)
        intake.carried.add(job.carried.schema, block.where)
        intake.columns.update(dict.fromkeys(block.columns))
        intake.add(job)
        on_progress("tokenize", intake.num_rows, 0)
    check_columns(intake.columns)
    rows = intake.finish()
    if intake.carried.is_mixed:  # before hours of work
        for block in source.blocks(limit):
            conformed(carried_columns(block), rows.carried, block.num_rows, block.where)
    twins = _rows_with_taken_ids(intake, source, limit)
    reject(
        {
            row: RowError("duplicate_id", f"row {row} has the id of row {twin}: make ids unique")
            for row, twin in twins.items()
        }
    )
    metrics.read_s += perf_counter() - started - metrics.tokenize_s
    return replace(rows, arena=rows.arena.with_rows_dropped(twins))


@dataclass(slots=True)
class _Intake:
    """Rows in the making."""

    defaults: SamplingParams
    tokenizer: Tokenizer | None
    limits: PromptLimits
    token_file: IO[bytes]
    reject: Reject
    metrics: RunMetrics
    num_rows: int = 0
    id_kind: IdKind | None = None
    columns: dict[str, None] = field(default_factory=dict)
    carried: CarriedSchema = field(default_factory=CarriedSchema)
    id_hashes: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    _lengths: list[Int64Array] = field(default_factory=list)
    _params: list[npt.NDArray[np.int32]] = field(default_factory=list)
    _keys: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    _tenants: list[npt.NDArray[np.int32]] = field(default_factory=list)
    _number_of_params: dict[SamplingParams, int] = field(default_factory=dict)
    _number_of_tenant: dict[str | None, int] = field(default_factory=lambda: {None: 0})

    def add(self, job: Job) -> None:
        with self.metrics.timed("tokenize"):
            arena, errors = self._tokenize(job)
        self.reject({self.num_rows + row: error for row, error in errors.items()})
        self._write(arena)
        self._lengths.append(arena.lengths)
        self._params.append(self._params_of(job))
        ids = job.ids.to_pylist()
        seeds = (params.seed for params in job.params)
        self._keys.append(np.fromiter(map(row_key, seeds, ids), np.uint64, job.num_rows))
        self._tenants.append(self._tenants_of(job))
        if job.id_kind != "numbered":
            hashes = pl.Series(job.ids).hash().to_numpy().copy()
            self.id_hashes.append(hashes)
        self.id_kind = job.id_kind
        self.num_rows += job.num_rows

    def finish(self) -> Rows:
        """All rows that were added."""
        lengths = _joined(self._lengths, np.int64)
        self.token_file.flush()
        mapped = mmap.mmap(self.token_file.fileno(), 0, access=mmap.ACCESS_READ) if lengths.any() else None
        tokens = np.zeros(0, np.int32) if mapped is None else np.frombuffer(mapped, np.int32)
        return Rows(
            arena=TokenArena.from_lengths(tokens, lengths),
            params=RowParams(tuple(self._number_of_params), _joined(self._params, np.int32)),
            keys=_joined(self._keys, np.uint64),
            tenants=_joined(self._tenants, np.int32),
            id_kind=self.id_kind,
            carried=self.carried.schema,
            mapped=mapped,
        )

    def _tokenize(self, job: Job) -> tuple[TokenArena, dict[int, RowError]]:
        """The prompts, and all errors of the rows: those have no tokens."""
        arena, errors = tokenize(job, self.tokenizer)
        errors = {**errors, **job.errors}
        if self.tokenizer is None:
            errors |= _without_text(job, errors)
        errors |= check_prompts(
            arena,
            job,
            vocab_size=self.limits.vocab_size,
            context_length=self.limits.context_length,
            errors=errors,
        )
        lengths = arena.lengths.copy()
        lengths[list(errors)] = 0
        return arena.take(np.where(lengths > 0, np.arange(job.num_rows), -1)), errors

    def _write(self, arena: TokenArena) -> None:
        try:
            self.token_file.write(np.ascontiguousarray(arena.tokens).data)
        except OSError as error:
            where = "the temporary folder" if error.errno == errno.ENOSPC else "a temporary file"
            raise UserError(
                f"the job's tokens cannot be written to {where}: {error.strerror}: free some space"
            ) from error

    def _params_of(self, job: Job) -> npt.NDArray[np.int32]:
        """int32 [rows]: which of all parameters each row has."""
        number = self._number_of_params
        mapped = [number.setdefault(replace(one, seed=0), len(number)) for one in job.params.distinct]
        numbers: npt.NDArray[np.int32] = np.array(mapped, np.int32)[job.params.index]
        return numbers

    def _tenants_of(self, job: Job) -> npt.NDArray[np.int32]:
        if job.tenants is None:
            return np.zeros(job.num_rows, np.int32)
        number = self._number_of_tenant
        return np.array([number.setdefault(tenant, len(number)) for tenant in job.tenants], np.int32)


def _joined(parts: list[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts])


def _without_text(job: Job, errors: Errors) -> dict[int, RowError]:
    """Rows with stop strings, which are found in text: without a tokenizer there is none."""
    error = RowError("bad_parameter", "stop is set, but there is no tokenizer to find it: name one, or stop_token_ids")
    has_stop = job.params.column(lambda params: bool(params.stop), np.bool_)
    return {row: error for row in np.flatnonzero(has_stop).tolist() if row not in errors}


def _rows_with_taken_ids(intake: _Intake, source: JobSource, limit: int | None) -> dict[int, int]:
    """Rows whose id an earlier row has, and which row that is."""
    if not intake.id_hashes:
        return {}
    hashes = _joined(intake.id_hashes, np.uint64)
    order = np.argsort(hashes, kind="stable")
    twice = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    if not len(twice):
        return {}
    # Hashes can be equal by chance, and null ids are no ids: those few are looked at.
    suspects = np.unique(np.concatenate([order[twice], order[twice + 1]]))
    first: dict[object, int] = {}
    taken: dict[int, int] = {}
    row, kind = 0, None
    for block in source.blocks(limit):
        ids, kind, _ = read_ids(block, row, kind)
        for suspect in suspects[
            np.searchsorted(suspects, row) : np.searchsorted(suspects, row + block.num_rows)
        ].tolist():
            identity = ids[suspect - row].as_py()
            if identity is not None and first.setdefault(identity, suspect) != suspect:
                taken[suspect] = first[identity]
        row += block.num_rows
    return taken
