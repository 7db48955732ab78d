"""All rows of a job, as far as they are needed to run it: flat arrays in files that are mapped.

Rows come in blocks and leave nothing else behind. Ids and carried columns are read again from the job when results are
written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir
from time import perf_counter

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from batchkv.choices import check_choices
from batchkv.constraints import ConstraintChecks
from batchkv.deferred import DeferredPrompts
from batchkv.dependencies import Dependencies, find_dependencies
from batchkv.errors import RowError, UserError, is_disk_full
from batchkv.io.carried import CarriedSchema, conformed
from batchkv.io.columns import CONTINUATION_COLUMN
from batchkv.io.dependencies import References
from batchkv.io.job_blocks import job_blocks
from batchkv.io.read import JobSource
from batchkv.job import IdKind, Job, carried_columns, check_columns, check_rows, read_ids
from batchkv.mapped_array import ArrayWriter, release_pages, without_repeats
from batchkv.metrics import RunMetrics
from batchkv.progress import OnProgress, no_progress
from batchkv.random_numbers import row_key
from batchkv.sampling_params import RowParams, SamplingParams
from batchkv.scoring import SCORING
from batchkv.token_arena import TokenArena, take_scattered
from batchkv.tokenization import Tokenizer, check_prompts, continuation_ids, tokenize

Int64Array = npt.NDArray[np.int64]
Errors = Mapping[int, RowError]
Reject = Callable[[Errors], None]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a job.

    Attributes:
        arena: prompts; rows that cannot run have no tokens.
        params: a row with an error has the job's defaults, one that is scored `SCORING`. Seeds are 0: they are in the
            keys.
        keys: uint64 [rows], from `random_numbers.row_key`.
        tenants: int32 [rows], rows of different ones share nothing.
        score_from: int32 [rows], where the continuation begins among the tokens of a row that has one, else -1.
        has_continuations: whether the job has that column.
        dependencies: which rows wait for which; None if none does.
        deferred: the prompts of rows that wait. They have no tokens here.
        ids: string or int64 [rows], only if there are dependencies.
        id_kind: what the ids of the job are.
        is_batch: whether the job is OpenAI Batch requests.
        carried: schema of the columns that are copied to the result.
        stamp: of the job's files, before they were read.
    """

    arena: TokenArena
    params: RowParams
    keys: npt.NDArray[np.uint64]
    tenants: npt.NDArray[np.int32]
    score_from: npt.NDArray[np.int32]
    has_continuations: bool
    dependencies: Dependencies | None
    deferred: DeferredPrompts
    ids: pa.Array | None
    id_kind: IdKind | None
    is_batch: bool
    carried: pa.Schema
    stamp: tuple[tuple[int, int, int], ...]

    @property
    def num_rows(self) -> int:
        return len(self.keys)

    @property
    def num_outputs(self) -> int:
        """Result rows of all rows that have tokens, or will have some."""
        outputs = self.outputs_of_rows()
        waiting = list(self.dependencies.required) if self.dependencies else []
        return int(outputs.sum(where=self.arena.lengths > 0) + outputs[waiting].sum())

    def outputs_of_rows(self) -> Int64Array:
        """int64 [rows]: result rows of each, if it has no error."""
        return self.params.column(lambda params: params.num_outputs, np.int64)

    def prompts(self, picked: Int64Array) -> TokenArena:
        """The tokens of some rows, which ascend: a copy, or the arena itself if it is all of them."""
        if len(picked) == self.num_rows:
            return self.arena
        return take_scattered(self.arena, picked, self.release_pages)

    def release_pages(self) -> None:
        """Lets the system have back the memory in which parts of the token file are; they are read again if needed."""
        release_pages([self.arena.tokens, self.arena.lengths, self.keys])


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
    scratch: Path | None,
    constraints: ConstraintChecks,
    reject: Reject,
    metrics: RunMetrics,
    *,
    only_scored: bool = False,
    on_progress: OnProgress = no_progress,
) -> Rows:
    """Reads, checks and tokenizes a job.

    Args:
        source: the job.
        defaults: the parameters of a row that does not set its own.
        tokenizer: of the model; jobs of token ids need none.
        limits: what the model takes.
        scratch: folder for files without a name, which are there as long as the rows are used; by default that of
            the system.
        constraints: looks at those of the rows.
        reject: called with the rows that cannot run, by row number, some at a time.
        metrics: times are added here.
        only_scored: a row without a continuation is an error, a job without one is of no use.
        on_progress: called with the number of rows so far.

    Raises:
        UserError: no row of the job can be run, or the token file cannot be written.
    """
    try:
        intake = _Intake(defaults, tokenizer, limits, scratch, constraints, reject, metrics, only_scored)
        return _take_in(intake, source, on_progress)
    except OSError as error:
        if is_disk_full(error):
            where = scratch or f"the temporary folder {gettempdir()}"
            raise UserError(
                f"{where} has no room for the job's tokens: {error.strerror}: "
                "free some space and give the same command again"
            ) from error
        raise


def _take_in(intake: _Intake, source: JobSource, on_progress: OnProgress) -> Rows:
    started = perf_counter()
    intake.stamp = source.stamp()
    for block, requests in ((one.table, one.requests) for one in job_blocks(source)):
        intake.is_batch = requests is not None
        job = check_rows(block, intake.defaults, first_row=intake.num_rows, id_kind=intake.id_kind)
        intake.carried.add(job.carried.schema, block.where)
        intake.columns.update(dict.fromkeys(block.columns))
        intake.add(job)
        on_progress("tokenize", intake.num_rows, 0)
    check_columns(intake.columns)
    if intake.only_scored and CONTINUATION_COLUMN not in intake.columns:
        raise UserError("the job has no column continuation: name the one that holds what is to be scored so")
    rows = intake.finish()
    if intake.carried.is_mixed:  # before hours of work
        for block in (one.table for one in job_blocks(source)):
            conformed(carried_columns(block), rows.carried, block.num_rows, block.where)
    twins = _rows_with_taken_ids(intake, source)
    intake.reject(
        {
            row: RowError("duplicate_id", f"row {row} has the id of row {twin}: make ids unique")
            for row, twin in twins.items()
        }
    )
    intake.failed.append(np.fromiter(twins, np.int64))
    if twins:
        rows = replace(rows, arena=rows.arena.with_rows_dropped(twins))
    rows = _with_dependencies(rows, intake, source)
    intake.metrics.read_s += perf_counter() - started - intake.metrics.tokenize_s
    return rows


def _with_dependencies(rows: Rows, intake: _Intake, source: JobSource) -> Rows:
    """The rows with what they wait for; those that wait in vain are rejected."""
    if not len(rows.deferred):
        return rows
    ids: list[pa.Array] = []
    for block in (one.table for one in job_blocks(source)):
        ids.append(read_ids(block, sum(map(len, ids)), rows.id_kind)[0])
    all_ids = pa.concat_arrays(ids)
    failed = np.concatenate(intake.failed).tolist()
    found = find_dependencies(all_ids, References.joined(intake.references), rows.outputs_of_rows(), failed)
    intake.reject(found.errors)
    return replace(rows, dependencies=found, ids=all_ids)


class _Intake:
    """Rows in the making. Arguments as of `take_in`."""

    def __init__(
        self,
        defaults: SamplingParams,
        tokenizer: Tokenizer | None,
        limits: PromptLimits,
        scratch: Path | None,
        constraints: ConstraintChecks,
        reject: Reject,
        metrics: RunMetrics,
        only_scored: bool,
    ) -> None:
        self.defaults, self.tokenizer, self.limits = defaults, tokenizer, limits
        self.constraints, self.reject, self.metrics, self.only_scored = constraints, reject, metrics, only_scored
        self.stamp: tuple[tuple[int, int, int], ...] = ()
        self.num_rows = 0
        self.id_kind: IdKind | None = None
        self.is_batch = False
        self.columns: dict[str, None] = {}
        self.carried = CarriedSchema()
        self.failed: list[Int64Array] = []
        self.references: list[References] = []
        self.deferred = DeferredPrompts(scratch)
        self.id_hashes = ArrayWriter(np.uint64, scratch)
        self._tokens = ArrayWriter(np.int32, scratch)
        self._lengths = ArrayWriter(np.int64, scratch)
        self._params = ArrayWriter(np.int32, scratch)
        self._keys = ArrayWriter(np.uint64, scratch)
        self._tenants = ArrayWriter(np.int32, scratch)
        self._score_from = ArrayWriter(np.int32, scratch)
        self._number_of_params: dict[SamplingParams, int] = {}
        self._number_of_tenant: dict[str | None, int] = {None: 0}

    def add(self, job: Job) -> None:
        waiting = self._defer(job)
        with self.metrics.timed("tokenize"):
            arena, score_from, errors = self._tokenize(job, waiting)
        self.failed.append(self.num_rows + np.fromiter(errors, np.int64))
        self.reject({self.num_rows + row: error for row, error in errors.items()})
        self._tokens.append(arena.tokens)
        self._score_from.append(score_from)
        self._lengths.append(arena.lengths)
        self._params.append(self._params_of(job))
        ids = job.ids.to_pylist()
        seeds = (params.seed for params in job.params)
        self._keys.append(np.fromiter(map(row_key, seeds, ids), np.uint64, job.num_rows))
        self._tenants.append(self._tenants_of(job))
        if job.id_kind != "numbered":
            self.id_hashes.append(_hashes(job.ids))
        self.id_kind = job.id_kind
        self.num_rows += job.num_rows

    def finish(self) -> Rows:
        """All rows that were added."""
        lengths = self._lengths.finish()
        return Rows(
            arena=TokenArena.from_lengths(self._tokens.finish(), lengths),
            params=RowParams(tuple(self._number_of_params), without_repeats(self._params.finish())),
            keys=self._keys.finish(),
            tenants=without_repeats(self._tenants.finish()),
            score_from=without_repeats(self._score_from.finish()),
            has_continuations=CONTINUATION_COLUMN in self.columns,
            dependencies=None,
            deferred=self.deferred,
            ids=None,
            id_kind=self.id_kind,
            is_batch=self.is_batch,
            carried=self.carried.schema,
            stamp=self.stamp,
        )

    def _defer(self, job: Job) -> list[int]:
        """Puts the prompts of rows that wait for others aside; those rows, by number in the block."""
        references = job.references
        named = sorted({*references.parents, *references.depends_on})
        waiting = [row - self.num_rows for row in named if row - self.num_rows not in job.errors]
        if waiting:
            self.references.append(references)
            prompts = ((self.num_rows + row, job.prompts[row]) for row in waiting)
            self.deferred.put({row: prompt for row, prompt in prompts if prompt is not None})
        return waiting

    def _tokenize(self, job: Job, waiting: list[int]) -> tuple[TokenArena, npt.NDArray[np.int32], dict[int, RowError]]:
        """Tokens of the rows that can run now, where their continuations begin, and all errors of the rows."""
        arena, errors = tokenize(job.prompts.without(waiting), self.tokenizer, self.limits.context_length)
        errors = {**errors, **job.errors}
        if self.tokenizer is None:
            errors |= _without_text(job, errors)
        errors |= dict.fromkeys((row for row in waiting if row in job.continuations), _WAITS_AND_SCORED)
        if self.only_scored:
            missing = (row for row in range(job.num_rows) if row not in job.continuations and row not in errors)
            errors |= dict.fromkeys(missing, _NOT_SCORED)
        arena, score_from = self._with_continuations(arena, job, errors)
        errors |= check_prompts(
            arena,
            vocab_size=self.limits.vocab_size,
            context_length=self.limits.context_length,
            is_scored=score_from >= 0,
            errors={*errors, *waiting},
        )
        bad_choices = check_choices(job.params, self.tokenizer, self.limits.vocab_size)
        errors |= {row: e for row, e in bad_choices.items() if row not in errors and row not in job.continuations}
        errors |= self.constraints.check(job.params, errors)
        lengths = arena.lengths.copy()
        lengths[list(errors)] = 0
        return arena.take(np.where(lengths > 0, np.arange(job.num_rows), -1)), score_from, errors

    def _with_continuations(
        self, arena: TokenArena, job: Job, errors: dict[int, RowError]
    ) -> tuple[TokenArena, npt.NDArray[np.int32]]:
        """The prompts with what is scored after them, and where that begins. Adds to the errors."""
        score_from = np.full(job.num_rows, -1, np.int32)
        scored = [row for row in job.continuations if row not in errors and arena.lengths[row]]
        if not scored:
            return arena, score_from
        rows = [arena.row(row) for row in range(arena.num_rows)]
        continuations = continuation_ids([job.continuations[row] for row in scored], self.tokenizer)
        for row, token_ids in zip(scored, continuations, strict=True):
            if not len(token_ids):
                errors[row] = RowError("bad_parameter", "the continuation has no tokens")
                continue
            score_from[row] = len(rows[row])
            rows[row] = np.concatenate([rows[row], token_ids])
        return TokenArena.from_rows(rows), score_from

    def _params_of(self, job: Job) -> npt.NDArray[np.int32]:
        """int32 [rows]: which of all parameters each row has."""
        number = self._number_of_params
        mapped = [number.setdefault(replace(one, seed=0), len(number)) for one in job.params.distinct]
        numbers: npt.NDArray[np.int32] = np.array(mapped, np.int32)[job.params.index]
        if job.continuations:
            numbers[list(job.continuations)] = number.setdefault(SCORING, len(number))
        return numbers

    def _tenants_of(self, job: Job) -> npt.NDArray[np.int32]:
        if job.tenants is None:
            return np.zeros(job.num_rows, np.int32)
        number = self._number_of_tenant
        return np.array([number.setdefault(tenant, len(number)) for tenant in job.tenants], np.int32)


_NOT_SCORED = RowError("bad_parameter", "the row has no continuation to be scored: it is null")
_WAITS_AND_SCORED = RowError("bad_parameter", "a row with a continuation to be scored cannot wait for other rows")


def _without_text(job: Job, errors: Errors) -> dict[int, RowError]:
    """Rows with stop strings, which are found in text: without a tokenizer there is none."""
    error = RowError("bad_parameter", "stop is set, but there is no tokenizer to find it: name one, or stop_token_ids")
    has_stop = job.params.column(lambda params: bool(params.stop), np.bool_)
    return {row: error for row in np.flatnonzero(has_stop).tolist() if row not in errors}


def _rows_with_taken_ids(intake: _Intake, source: JobSource) -> dict[int, int]:
    """Rows whose id an earlier row has, and which row that is."""
    hashes = np.sort(intake.id_hashes.finish())
    taken_hashes = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
    if not len(taken_hashes):
        return {}
    # Hashes can be equal by chance, and null ids are no ids: those few are looked at.
    first: dict[object, int] = {}
    taken: dict[int, int] = {}
    row, kind = 0, None
    for block in (one.table for one in job_blocks(source)):
        ids, kind, _ = read_ids(block, row, kind)
        for suspect in np.flatnonzero(np.isin(_hashes(ids), taken_hashes)).tolist():
            identity = ids[suspect].as_py()
            if identity is not None and first.setdefault(identity, row + suspect) != row + suspect:
                taken[row + suspect] = first[identity]
        row += block.num_rows
    return taken


def _hashes(ids: pa.Array) -> npt.NDArray[np.uint64]:
    return pl.Series(ids).hash().to_numpy()
