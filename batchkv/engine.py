"""The composition root: a model, and what is done with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from batchkv.batch_invariance import row_multiple
from batchkv.config import DEFAULT_MODEL, EngineConfig, parse_memory_size
from batchkv.endings import Endings
from batchkv.errors import RowError, UserError
from batchkv.executor import Executor, Progress
from batchkv.job import Jobs, read_job
from batchkv.job_plan import Plan
from batchkv.kernels.attention import AttentionBackend
from batchkv.kernels.native_cpu import is_covered
from batchkv.kernels.quantization import scale_bytes, storage_dtype
from batchkv.kernels.selection import select_attention
from batchkv.kernels.torch_cpu import TorchAttention
from batchkv.kv_layout import KVLayout
from batchkv.matchers import Matchers
from batchkv.metrics import RunMetrics, summarize
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
from batchkv.packed_linear import is_packed, pack_linears
from batchkv.parity_probe import check_parity
from batchkv.preparation import ModelFacts, PreparedJob, prepare
from batchkv.progress import OnProgress, no_progress
from batchkv.random_numbers import stream_key
from batchkv.sampler import SamplingBatch
from batchkv.sampling_params import SamplingParams
from batchkv.stopping import end_token_ids as find_end_token_ids
from batchkv.writer import Completion, result_table, with_summary

OnPrepared = Callable[[PreparedJob], Progress]


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
        if isinstance(model, PreTrainedModel):
            check_supported(model.config, type(model))
            _check_device(model.device)
            check_parity(model.config, type(model))
            self.model, self.device = model, model.device
        else:
            self.model = load_model(resolve_model(name), self.config.dtype, self.device)
            _check_and_pack(self.model)
        self.tokenizer = _tokenizer(model, tokenizer)
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

    def plan(self, jobs: Jobs, sampling: SamplingParams | None = None, *, limit: int | None = None) -> Plan:
        """What `run` would do."""
        return self._prepare(jobs, sampling, limit, RunMetrics(), no_progress).plan

    def run(
        self,
        jobs: Jobs,
        sampling: SamplingParams | None = None,
        *,
        limit: int | None = None,
        on_prepared: OnPrepared | None = None,
        on_progress: OnProgress = no_progress,
    ) -> pa.Table:
        """Generates for every row of a job.

        Args:
            jobs: a path, a glob, several paths, a pyarrow table or a polars frame.
            sampling: parameters of the rows that do not set their own.
            limit: only the first rows.
            on_prepared: called with the job before it is executed; what it returns is called after every step.
            on_progress: called while the job is read, tokenized and planned.

        Returns:
            One row per (row, sample) in the order of the job. The summary is JSON in the schema's metadata under
            `batchkv.summary`.

        Raises:
            UserError: the job as a whole is unusable. What is wrong with single rows stands in their result.
        """
        started = perf_counter()
        metrics = RunMetrics(load_s=self._load_s)
        self._load_s = 0.0  # counted once
        prepared = self._prepare(jobs, sampling, limit, metrics, on_progress)
        progress = on_prepared(prepared) if on_prepared else _no_progress
        completions = self._execute(prepared, metrics, progress)
        with metrics.timed("write"):
            errors, places = _result_rows(prepared, completions)
            sequence = prepared.plan.sequences.output_sequence[places]
            table = result_table(
                prepared.job,
                errors,
                [completions[s] if s >= 0 else None for s in sequence.tolist()],
                prepared.arena.lengths,
                prepared.plan.cached_tokens()[places],
                self._detokenize,
            )
        metrics.elapsed_s = metrics.load_s + perf_counter() - started
        return with_summary(table, self._summary(prepared, errors, metrics))

    def _summary(self, prepared: PreparedJob, errors: dict[int, RowError], metrics: RunMetrics) -> dict[str, Any]:
        how: dict[str, str | bool] = {
            "attention": self._backend.name,
            "kv_dtype": str(self._kv_dtype).removeprefix("torch."),
            "packed_weights": is_packed(self.model),
            "batch_invariant": self._row_multiple is not None,
            "decode_graphs": metrics.decode_graphs,
        }
        return summarize(prepared.plan, errors, metrics, how)

    def _prepare(
        self,
        jobs: Jobs,
        sampling: SamplingParams | None,
        limit: int | None,
        metrics: RunMetrics,
        on_progress: OnProgress,
    ) -> PreparedJob:
        on_progress("read", 0, 0)
        with metrics.timed("read"):
            job = read_job(jobs, sampling or SamplingParams(), limit=limit)
        return prepare(
            job,
            self.tokenizer,
            self._facts,
            self.config,
            kv_bytes=kv_budget_bytes(self.config, self.device),
            device_type=self.device.type,
            metrics=metrics,
            on_progress=on_progress,
        )

    def _execute(self, prepared: PreparedJob, metrics: RunMetrics, progress: Progress) -> list[Completion | None]:
        """The completion of every sequence of the plan."""
        with _launching_on(self.device), paged_attention_of(self.model):
            with metrics.timed("plan"):
                executor = self._executor(prepared, metrics, progress)
            try:
                return executor.run()
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"{self.device} is out of memory in a forward pass: use less --kv-memory or --max-batch-tokens"
                ) from error
            finally:
                executor.release()

    def _executor(self, prepared: PreparedJob, metrics: RunMetrics, progress: Progress) -> Executor:
        plan, job = prepared.plan, prepared.job
        params = [job.params[row] for row in plan.sequences.row.tolist()]
        ids = job.ids.to_pylist()
        keys = [
            stream_key(p.seed, ids[row], sample)
            for p, row, sample in zip(params, plan.sequences.row.tolist(), plan.sequences.sample.tolist(), strict=True)
        ]
        runner = ModelRunner(
            self.model,
            self.layout,
            self._kv_dtype,
            self._backend,
            plan.memory.pool_pages,
            plan.memory.page_size,
            self._row_multiple or ROW_MULTIPLE,
            graph_rows=self.config.max_batch_rows if self._backend.is_asynchronous else 0,
        )
        return Executor(
            plan,
            prepared.arena,
            self.layout,
            runner,
            SamplingBatch.from_params(params, keys),
            Endings(params, plan.sequences.max_new_tokens, self.end_token_ids, self.tokenizer),
            max_batch_rows=self.config.max_batch_rows,
            max_batch_tokens=self.config.batch_tokens(self.device.type),
            overlap=self._overlap,
            metrics=metrics,
            progress=progress,
            matchers=Matchers(prepared.grammars, params) if prepared.grammars else None,
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

    def _detokenize(self, samples: list[npt.NDArray[np.int32]]) -> list[str] | list[None]:
        """Texts without special tokens; null where there is no tokenizer."""
        if self.tokenizer is None:
            return [None] * len(samples)
        token_ids = [sample.tolist() for sample in samples]
        return list(self.tokenizer.batch_decode(token_ids, skip_special_tokens=True))


def _launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the first one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _check_and_pack(model: PreTrainedModel) -> None:
    """Packs the layers of a model that was loaded to a CPU, unless its code does not run with them, as where it reads
    weights.

    Raises:
        UserError: the model does not run with paged attention either way.
    """
    if model.device.type != "cpu":
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
) -> Plan:
    """What a job would do on `model`, from its config and tokenizer alone: no weights are loaded.

    `on_progress` is called while the job is read, tokenized and planned.

    Raises:
        UserError: the job as a whole or the model is unusable.
    """
    tokenizer_name = tokenizer if isinstance(tokenizer, str) else None
    engine_config = EngineConfig(model=model, tokenizer=tokenizer_name, **config)
    source = resolve_model(model)
    model_config = load_config(source)
    check_supported(model_config)
    device = _execution_device(engine_config.device)
    dtype = resolve_dtype(engine_config.dtype, checkpoint_dtype(model_config), device)
    on_progress("read", 0, 0)
    prepared = prepare(
        read_job(jobs, sampling or SamplingParams(), limit=limit),
        _tokenizer(model, tokenizer),
        _facts(model_config, storage_dtype(engine_config.kv_dtype, dtype)),
        engine_config,
        kv_bytes=kv_budget_bytes(engine_config, device),
        device_type=device.type,
        metrics=RunMetrics(),
        on_progress=on_progress,
    )
    return prepared.plan


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
    model: str | os.PathLike[str] | PreTrainedModel, tokenizer: str | PreTrainedTokenizerBase | None
) -> PreTrainedTokenizerBase | None:
    """The tokenizer given, or the one at the place given, or the model's own."""
    if tokenizer is None:
        return None if isinstance(model, PreTrainedModel) else load_tokenizer(resolve_model(os.fspath(model)))
    return load_tokenizer(resolve_model(tokenizer)) if isinstance(tokenizer, str) else tokenizer


def _result_rows(
    prepared: PreparedJob, completions: list[Completion | None]
) -> tuple[dict[int, RowError], npt.NDArray[np.int64]]:
    """All rows with errors, and the places of the plan's output that are result rows: one for each of those rows."""
    sequences = prepared.plan.sequences
    failed = np.array([completion is None for completion in completions], bool)
    has_failed = (sequences.output_sequence >= 0) & failed[sequences.output_sequence] if len(failed) else failed
    errors = dict(prepared.errors)
    for row in np.unique(sequences.output_row[has_failed]).tolist():
        errors[row] = RowError("bad_logits", "the model's logits were not finite: try --dtype float32")
    for sequence, message in (prepared.grammars.failures if prepared.grammars else {}).items():
        rows = sequences.output_row[sequences.output_sequence == sequence].tolist()
        errors.update(dict.fromkeys(rows, RowError("bad_schema", message)))
    is_first = np.diff(sequences.output_row, prepend=-1) > 0
    has_error = np.isin(sequences.output_row, list(errors))
    return errors, np.flatnonzero(is_first | ~has_error)


def _no_progress(ended: int, generated: int) -> None:
    pass
