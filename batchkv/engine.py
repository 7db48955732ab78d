"""The composition root: a model, and what is done with it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from batchkv import __version__
from batchkv.batch_invariance import row_multiple
from batchkv.config import DEFAULT_MODEL, EngineConfig, parse_memory_size
from batchkv.constraints import ConstraintChecks, Grammars
from batchkv.endings import Endings
from batchkv.errors import UserError
from batchkv.executor import DEFAULTS, Executor, Kept, OnEnded, RunOptions
from batchkv.fingerprint import model_fingerprint, tokenizer_fingerprint
from batchkv.io.read import Jobs, JobSource, open_jobs
from batchkv.job_plan import JobPlan
from batchkv.job_run import JobRun
from batchkv.kernels.attention import AttentionBackend
from batchkv.kernels.native_attention import is_covered
from batchkv.kernels.quantization import scale_bytes, storage_dtype
from batchkv.kernels.selection import select_attention
from batchkv.kernels.torch_cpu import TorchAttention
from batchkv.kv_cache import KVCache
from batchkv.kv_layout import KVLayout
from batchkv.ledger import Ledger
from batchkv.linear_layers import is_worth_packing, linear_backend, pack_linears
from batchkv.manifest import Manifest
from batchkv.matchers import Matchers
from batchkv.metrics import RunMetrics
from batchkv.model_loader import (
    checkpoint_dtype,
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    resolve_model,
)
from batchkv.model_runner import ROW_MULTIPLE, ModelRunner, paged_attention_of
from batchkv.model_support import check_supported
from batchkv.parity_probe import check_parity
from batchkv.plan_job import plan_job
from batchkv.planner import Limits
from batchkv.preparation import ModelFacts, PreparedWave
from batchkv.progress import NOBODY, OnProgress, OnStep, Watch, no_progress, no_step
from batchkv.random_numbers import stream_keys
from batchkv.records import Record, RecordsInMemory
from batchkv.results import in_order, response_lines, result_blocks, result_schema
from batchkv.rows import PromptLimits, take_in
from batchkv.run_folder import RunFolder
from batchkv.run_log import Snapshots
from batchkv.sampling_batch import SamplingBatch
from batchkv.sampling_params import SamplingParams
from batchkv.stopping import end_token_ids as find_end_token_ids
from batchkv.summary import FinishedRun
from batchkv.wave import Int64Array
from batchkv.writer import with_summary


def _nothing_earlier(rows: Int64Array) -> list[Record]:
    """No run was interrupted."""
    return []


class Engine:
    """Runs jobs on one model.

    Args:
        model: a path, a hub id, the alias `smollm2`, or a live transformers module, which is used in place.
        tokenizer: a tokenizer or where one is; by default that of `model` (none for a live module).
        config: fields of `EngineConfig`.

    Raises:
        UserError: the model cannot be loaded or is not supported.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel = DEFAULT_MODEL,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        **config: Any,
    ) -> None:
        started = perf_counter()
        _check_kind(model, config)
        name = str(model.name_or_path) if isinstance(model, PreTrainedModel) else os.fspath(model)
        tokenizer_name = tokenizer if isinstance(tokenizer, str) else None
        self.config = EngineConfig(model=name, tokenizer=tokenizer_name, **config)
        self.device = _execution_device(self.config.device)
        _check_memory(self.config, model.device if isinstance(model, PreTrainedModel) else self.device)
        if isinstance(model, PreTrainedModel):
            check_supported(model.config, type(model))
            _check_device(model.device)
            check_parity(model.config, type(model))
            self.model, self.device = model, model.device
            self._fingerprint = None  # a live module may change
        else:
            source = resolve_model(name, trust_remote_code=self.config.trust_remote_code)
            self.model = load_model(source, self.config.dtype, self.device)
            self._fingerprint = model_fingerprint(self.model)  # while its weights can be read
            _check_and_pack(self.model)
        self._linear_layers = linear_backend(self.model)
        self.tokenizer = _tokenizer(model, tokenizer, self.config.trust_remote_code)
        self._kv_dtype = storage_dtype(self.config.kv_dtype, self.model.dtype)
        self._backend = select_attention(self._kv_dtype, self.device, self.config.attention)
        # where the host computes itself there is nothing to gain, and every wasted row costs
        self._overlap = self._backend.is_asynchronous
        self._row_multiple = row_multiple(self.model) if self._backend.is_batch_invariant else None
        if self.config.deterministic and self._row_multiple is None:
            raise UserError(_why_not_deterministic(self.model, self._kv_dtype, self._backend))
        facts = _facts(self.model.config, self._kv_dtype)
        self._facts = replace(facts, end_token_ids=self.end_token_ids)
        self._load_s = perf_counter() - started

    @property
    def layout(self) -> KVLayout:
        """What a token costs in KV."""
        return self._facts.layout

    @property
    def prompt_limits(self) -> PromptLimits:
        """What prompts have to keep to."""
        return self._facts.prompt_limits

    def plan(self, jobs: Jobs, sampling: SamplingParams | None = None, *, limit: int | None = None) -> JobPlan:
        """What `run` would do."""
        return plan_job(
            open_jobs(jobs, limit),
            sampling or SamplingParams(),
            self.tokenizer,
            self._facts,
            self.limits(),
        )

    def run(
        self,
        jobs: Jobs,
        sampling: SamplingParams | None = None,
        *,
        limit: int | None = None,
        watch: Watch = NOBODY,
    ) -> pa.Table:
        """Generates for every row of a job.

        Args:
            jobs: a path, a glob, several paths, a pyarrow table or a polars frame.
            sampling: parameters of the rows that do not set their own.
            limit: only the first rows.
            watch: told how far it is.

        Returns:
            One row per (row, sample) in the order of the job. The summary is JSON in the schema's metadata under
            `batchkv.summary`.

        Raises:
            UserError: the job as a whole is unusable. What is wrong with single rows stands in their result.
        """
        return self._run(open_jobs(jobs, limit), sampling or SamplingParams(), watch)

    def score(self, jobs: Jobs, *, limit: int | None = None, watch: Watch = NOBODY) -> pa.Table:
        """Log-probabilities of the `continuation` (a text or token ids) of every row of a job, behind its prompt.

        What contexts share, and what continuations of one context share, is computed once.

        Args:
            jobs: as in `run`, with a column `continuation`. A text is tokenized on its own, without special tokens.
            limit: only the first rows.
            watch: told how far it is.

        Returns:
            One row per row of the job, in order: `token_ids` are the continuation's, `logprobs` theirs under
            softmax(logits), `is_greedy` says whether greedy decoding gives the continuation.

        Raises:
            UserError: as in `run`; or there is no column `continuation`.
        """
        return self._run(open_jobs(jobs, limit), SamplingParams(), watch, only_scored=True)

    def run_into(
        self,
        folder: RunFolder,
        jobs: Jobs,
        sampling: SamplingParams | None = None,
        *,
        limit: int | None = None,
        watch: Watch = NOBODY,
    ) -> dict[str, Any]:
        """`run` with the result in a file. What is finished is kept if it is interrupted, and is not computed again
        when the same job is run into the same folder.

        Args:
            folder: where the results go, and until then what is finished.

        Returns:
            The summary.

        Raises:
            UserError: as in `run`; or the folder holds another job, or cannot be written.
        """
        source, sampling = open_jobs(jobs, limit), sampling or SamplingParams()
        if (published := folder.begin(self._manifest(source, sampling))) is not None:
            return published
        with folder.records() as records:
            ledger = Ledger(records, *folder.done())
            watch.on_event("started", {"batchkv": __version__, "model": self.config.model, "resumed": len(ledger.done)})
            run = self._execute(source, sampling, ledger, watch, folder=folder)
        watch.on_event("publishing", {"rows": run.rows.num_rows})
        with run.metrics.timed("write"):
            self._publish(folder, source, run)
        watch.on_event("finished", run.summary())
        return run.summary()

    def _run(self, source: JobSource, sampling: SamplingParams, watch: Watch, *, only_scored: bool = False) -> pa.Table:
        """A job whose result is a table."""
        records = RecordsInMemory()
        run = self._execute(source, sampling, Ledger(records), watch, only_scored=only_scored)
        blocks = result_blocks(
            source, run.rows, in_order(records.batches(), run.rows.num_rows, None, run.rows.num_outputs)
        )
        with run.metrics.timed("write"):
            table = pa.concat_tables(blocks)
        return table.replace_schema_metadata(with_summary(table.schema, run.summary()).metadata)

    def _publish(self, folder: RunFolder, source: JobSource, run: FinishedRun) -> None:
        """The result of a job whose records are in its folder."""
        ordered = in_order(folder.batches(), run.rows.num_rows, folder.path, run.rows.num_outputs)
        if not run.rows.is_batch:
            schema = with_summary(result_schema(run.rows), run.summary())
            folder.publish(result_blocks(source, run.rows, ordered), schema, run.summary())
            return
        lines = response_lines(
            source,
            run.rows,
            ordered,
            self.tokenizer,
            created=folder.begun_at,
            run_id=folder.run_id,
            served_model=self.config.model,
        )
        folder.publish_lines(lines, run.summary())

    def _execute(
        self,
        source: JobSource,
        sampling: SamplingParams,
        ledger: Ledger,
        watch: Watch,
        *,
        folder: RunFolder | None = None,
        only_scored: bool = False,
    ) -> FinishedRun:
        """Every row of a job, to its records."""
        started = perf_counter()
        metrics = RunMetrics(load_s=self._load_s)
        self._load_s = 0.0  # counted once
        constraints = ConstraintChecks(self.tokenizer, self._facts.vocab_size, self._facts.end_token_ids)
        rows = take_in(
            source,
            sampling,
            self.tokenizer,
            self._facts.prompt_limits,
            folder.path if folder else None,
            constraints,
            ledger.reject,
            metrics,
            only_scored=only_scored,
            on_progress=watch.on_progress,
        )
        ledger.expect(rows.num_rows)
        (folder.check_columns if folder else result_schema)(rows)  # before any work: can there be a result?
        numbers = {"rows": rows.num_rows, "errors": ledger.num_errors, "outputs": rows.num_outputs}
        watch.on_event("read", numbers)
        show = watch.on_start(rows.num_outputs - len(ledger.done))
        snapshots = Snapshots(watch.on_event, folder.metrics if folder else None)

        def after_step(ended: int, generated: int) -> None:
            show(ended, generated)
            metrics.elapsed_s = metrics.load_s + perf_counter() - started
            snapshots.after_step(metrics, ledger)

        watch.on_progress("plan", 0, 0)
        run = JobRun(
            rows=rows,
            ledger=ledger,
            facts=self._facts,
            limits=self.limits(),
            tokenizer=self.tokenizer,
            detokenize=self.detokenize,
            metrics=metrics,
            on_event=watch.on_event,
        )
        earlier = folder.records_of if folder else _nothing_earlier
        totals = run.run(_Machine(self, metrics, after_step, constraints), earlier)
        metrics.elapsed_s = metrics.load_s + perf_counter() - started
        return FinishedRun(rows, ledger, totals, metrics, self._how(metrics))

    def new_runner(self, pool_pages: tuple[int, ...], page_size: int) -> ModelRunner:
        """The model with a KV pool."""
        with _launching_on(self.device), paged_attention_of(self.model):
            return ModelRunner(
                self.model,
                self.layout,
                self._kv_dtype,
                self._backend,
                pool_pages,
                page_size,
                self._row_multiple or ROW_MULTIPLE,
                graph_rows=self.config.max_batch_rows if self._backend.is_asynchronous else 0,
            )

    def execute(
        self,
        prepared: PreparedWave,
        runner: ModelRunner,
        cache: KVCache | None,
        on_ended: OnEnded,
        metrics: RunMetrics,
        progress: OnStep = no_step,
        grammars: Grammars | None = None,
        options: RunOptions = DEFAULTS,
    ) -> list[Kept]:
        """Computes all outputs of a wave.

        Args:
            prepared: the wave.
            runner: has the pool that it is planned for.
            cache: what the plan goes on from; None if the pool is the wave's alone.
            on_ended: gets the outputs as they end.
            metrics: counts and times are added here.
            progress: called after every step.
            grammars: of all constraints in the wave.
            options: what only some runs want.

        Returns:
            What stays in the cache.

        Raises:
            UserError: the device is out of memory.
            ValueError: drafts are of other sequences, or of tokens that the model does not have.
        """
        highest = options.drafts.references.highest_token if options.drafts is not None else -1
        if highest >= self._facts.vocab_size:
            raise ValueError(
                f"token id {highest} in a reference completion: the model has {self._facts.vocab_size} "
                "tokens, take completions of the same tokenizer"
            )
        with _launching_on(self.device), paged_attention_of(self.model):
            with metrics.timed("plan"):
                executor = self._executor(prepared, runner, cache, on_ended, metrics, progress, grammars, options)
            try:
                return executor.run()
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"{self.device} is out of memory in a forward pass: use less --kv-memory or --max-batch-tokens"
                ) from error
            finally:
                executor.release()

    def _manifest(self, source: JobSource, sampling: SamplingParams) -> Manifest:
        return Manifest.of(
            batchkv=__version__,
            job=source.fingerprint(),
            limit=source.limit,
            model={"name": self.config.model, "weights": self._fingerprint or model_fingerprint(self.model)},
            tokenizer={"rules": tokenizer_fingerprint(self.tokenizer)},
            dtype=str(self.model.dtype),
            kv_dtype=str(self._kv_dtype),
            end_token_ids=self.end_token_ids,
            **asdict(sampling),
        )

    def limits(self) -> Limits:
        """What plans for this engine have to keep to, now."""
        return self._facts.plan_limits(
            self.config, kv_bytes=kv_budget_bytes(self.config, self.device), device_type=self.device.type
        )

    def _how(self, metrics: RunMetrics) -> dict[str, str | bool]:
        return {
            "attention": self._backend.name,
            "kv_dtype": str(self._kv_dtype).removeprefix("torch."),
            "linear_layers": self._linear_layers,
            "batch_invariant": self._row_multiple is not None,
            "decode_graphs": metrics.decode_graphs,
        }

    def _executor(
        self,
        prepared: PreparedWave,
        runner: ModelRunner,
        cache: KVCache | None,
        on_ended: OnEnded,
        metrics: RunMetrics,
        progress: OnStep,
        grammars: Grammars | None,
        options: RunOptions,
    ) -> Executor:
        wave, sequences = prepared.wave, prepared.plan.sequences
        params = [wave.params[request] for request in sequences.row.tolist()]
        return Executor(
            prepared.plan,
            prepared.arena,
            self.layout,
            runner,
            SamplingBatch.from_params(params, stream_keys(wave.keys[sequences.row], sequences.sample)),
            Endings(params, sequences.max_new_tokens, self.end_token_ids, self.tokenizer, options.unwanted),
            max_batch_rows=self.config.max_batch_rows,
            max_batch_tokens=self.config.batch_tokens(self.device.type),
            overlap=self._overlap,
            metrics=metrics,
            on_ended=on_ended,
            progress=progress,
            cache=cache,
            matchers=Matchers(grammars, params) if grammars else None,
            options=options,
        )

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sample: all of the generation config's, else the config's, else the tokenizer's."""
        generation_config = getattr(self.model, "generation_config", None)
        return find_end_token_ids(
            getattr(generation_config, "eos_token_id", None),
            getattr(self.model.config, "eos_token_id", None),
            getattr(self.tokenizer, "eos_token_id", None),
        )

    def detokenize(self, samples: list[npt.NDArray[np.int32]]) -> list[str] | list[None]:
        """Texts without special tokens; null where there is no tokenizer."""
        if self.tokenizer is None:
            return [None] * len(samples)
        token_ids = [sample.tolist() for sample in samples]
        return list(self.tokenizer.batch_decode(token_ids, skip_special_tokens=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Machine:
    """An engine for one run."""

    engine: Engine
    metrics: RunMetrics
    progress: OnStep
    constraints: ConstraintChecks

    def new_runner(self, pool_pages: tuple[int, ...], page_size: int) -> ModelRunner:
        return self.engine.new_runner(pool_pages, page_size)

    def execute(
        self, prepared: PreparedWave, runner: ModelRunner, cache: KVCache | None, on_ended: OnEnded
    ) -> list[Kept]:
        grammars = self.constraints.grammars
        return self.engine.execute(prepared, runner, cache, on_ended, self.metrics, self.progress, grammars)


def _launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the first one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _check_and_pack(model: PreTrainedModel) -> None:
    """Packs the layers of a model that was loaded to a CPU where that is worth it, unless its code does not run with
    them, as where it reads weights.

    Raises:
        UserError: the model does not run with paged attention either way.
    """
    if model.device.type != "cpu" or not is_worth_packing(model.dtype):
        check_parity(model.config, type(model))
        return
    try:
        check_parity(model.config, type(model), packed=True)
    except UserError:
        check_parity(model.config, type(model))
        return
    pack_linears(model)


def _why_not_deterministic(model: PreTrainedModel, kv_dtype: torch.dtype, attention: AttentionBackend[Any, Any]) -> str:
    if attention.is_asynchronous:
        return "--deterministic: the kernels for GPUs do not give a row the same bits in any company: do without"
    if isinstance(attention, TorchAttention) and is_covered(kv_dtype):
        return "--deterministic needs the native attention kernel: take --attention auto, or do without"
    if not is_covered(torch.float32):
        return (
            "--deterministic needs the native attention kernel, which was not built: "
            "install a C++ compiler and batchkv again, or do without"
        )
    if not attention.is_batch_invariant:
        return (
            f"--deterministic needs the native attention kernel, which has no KV in {kv_dtype}: "
            "take --kv-dtype auto and --dtype float32"
        )
    return (
        f"--deterministic: with {type(model).__name__} in {model.dtype} and {torch.get_num_threads()} threads on this "
        "machine a row's bits depend on the other rows of a step: take --dtype float32, or fewer threads "
        "(OMP_NUM_THREADS=2), or do without"
    )


def kv_budget_bytes(config: EngineConfig, device: torch.device) -> int:
    """Bytes of KV that `--kv-memory` allows on this device, now: before or after the weights are loaded."""
    return parse_memory_size(config.kv_memory, free_bytes=_free_bytes(device))


def _check_memory(config: EngineConfig, device: torch.device) -> None:
    """A job that took such a budget at its word would be killed in the middle."""
    total = (
        torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else psutil.virtual_memory().total
    )
    if parse_memory_size(config.kv_memory, free_bytes=total) > total:
        raise UserError(
            f"--kv-memory {config.kv_memory} is more than the {total / (1 << 30):.1f} GiB that there are: "
            "give less, or a fraction of what is free such as 0.8"
        )


def _free_bytes(device: torch.device) -> int:
    """On a GPU with what torch keeps of memory that it has no use for: an earlier run's KV."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def plan(
    jobs: Jobs,
    sampling: SamplingParams | None = None,
    *,
    model: str = DEFAULT_MODEL,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    limit: int | None = None,
    on_progress: OnProgress = no_progress,
    **config: Any,
) -> JobPlan:
    """What a job would do on `model`, from its config and tokenizer alone: no weights are loaded.

    `on_progress` is called while the job is read, tokenized and planned.

    Raises:
        UserError: the job as a whole or the model is unusable.
    """
    tokenizer_name = tokenizer if isinstance(tokenizer, str) else None
    engine_config = EngineConfig(model=model, tokenizer=tokenizer_name, **config)
    source = resolve_model(model, trust_remote_code=engine_config.trust_remote_code)
    model_config = load_config(source)
    check_supported(model_config)
    device = _execution_device(engine_config.device)
    dtype = resolve_dtype(engine_config.dtype, checkpoint_dtype(model_config), device)
    facts = _facts(model_config, storage_dtype(engine_config.kv_dtype, dtype))
    kv_bytes = kv_budget_bytes(engine_config, device)
    return plan_job(
        open_jobs(jobs, limit),
        sampling or SamplingParams(),
        _tokenizer(model, tokenizer, engine_config.trust_remote_code),
        facts,
        facts.plan_limits(engine_config, kv_bytes=kv_bytes, device_type=device.type),
        on_progress=on_progress,
    )


def _facts(config: PretrainedConfig, kv_dtype: torch.dtype) -> ModelFacts:
    return ModelFacts.of(config, kv_dtype.itemsize, scale_bytes(kv_dtype))


def _execution_device(name: str) -> torch.device:
    """`auto` is a GPU if torch sees one."""
    device = resolve_device(name)
    _check_device(device)
    return device


def _check_kind(model: object, config: dict[str, Any]) -> None:
    if not isinstance(model, (str, os.PathLike, PreTrainedModel)):
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        raise UserError(f"model is a {kind}, must be a path, a hub id or a transformers model: unwrap it")
    if isinstance(model, PreTrainedModel) and config.get("dtype", "auto") != "auto":
        raise UserError("dtype is for models that are loaded: convert a live module with model.to(dtype)")


def _check_device(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {device}: there are attention kernels for the CPU and for CUDA: use --device cpu")


def _tokenizer(
    model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: str | PreTrainedTokenizerBase | None,
    trust_remote_code: bool,
) -> PreTrainedTokenizerBase | None:
    """The tokenizer given, or the one at the place given, or the model's own."""
    if tokenizer is None:
        if isinstance(model, PreTrainedModel):
            return None
        tokenizer = os.fspath(model)
    if not isinstance(tokenizer, str):
        return tokenizer
    return load_tokenizer(resolve_model(tokenizer, trust_remote_code=trust_remote_code))
