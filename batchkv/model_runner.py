"""Runs steps through the model: the only place that calls it, and that holds the KV tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from batchkv.attention import IMPLEMENTATION, StepAttention
from batchkv.compiled_code import as_written
from batchkv.errors import UserError
from batchkv.fast_layers import with_fast_layers
from batchkv.kernels.attention import AttentionBackend
from batchkv.kv_layout import KVLayout, LayerSpec
from batchkv.model_lock import alone_with
from batchkv.step import AttentionBatch, Step
from batchkv.transfers import to_device

if TYPE_CHECKING:
    from batchkv.decode_graphs import DecodeGraphs

ROW_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step on the device, but for the tokens that the step before is still computing.

    Attributes:
        token_ids: int64 [T], filled up.
        token_sources: int64 [T], which of the tokens sampled in the step before a token is, -1 where `token_ids` has
            it; None if it has all.
        num_logits: how many logits are wanted.
        forward: from all token ids, int64 [T], to these logits and what fills them up.
    """

    token_ids: torch.Tensor
    token_sources: torch.Tensor | None
    num_logits: int
    forward: Callable[[torch.Tensor], torch.Tensor]


class ModelRunner:
    """One ragged forward pass `[1, T]` per step, without padding.

    `prepare` is the host's part and needs nothing of the step before; `forward` is the device's.

    Args:
        model: a decoder in place; it must be inside `paged_attention_of(model)` when steps run, and already here if
            there are `graph_rows`.
        layout: its KV.
        kv_dtype: in which the pages are kept.
        backend: attention kernels.
        pool_pages: pages of each group of layers.
        page_size: tokens per page.
        row_multiple: forward passes are filled up to a multiple of this many tokens and of logits. Products of few rows
            cost about the same; there are fewer sizes that libraries prepare for and that memory is split into; and
            a row's bits need not depend on how many rows there are (`batch_invariance`).
        graph_rows: decode steps of up to so many rows are recorded as graphs; 0 is none. Needs the Triton kernels.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: KVLayout,
        kv_dtype: torch.dtype,
        backend: AttentionBackend[Any, Any],
        pool_pages: tuple[int, ...],
        page_size: int,
        row_multiple: int = ROW_MULTIPLE,
        graph_rows: int = 0,
    ) -> None:
        self._model, self._layout, self._backend = model, layout, backend
        self._device, self._row_multiple = model.device, row_multiple
        self._group_of = dict(zip(layout.layers, layout.layer_group, strict=True))
        try:
            self._pages = tuple(
                backend.allocate(pool_pages[group], page_size, spec, kv_dtype, model.device)
                for spec, group in zip(layout.layers, layout.layer_group, strict=True)
            )
        except torch.OutOfMemoryError as error:
            raise UserError(f"the KV cache does not fit into {model.device}: use less --kv-memory") from error
        self._graphs = self._record(pool_pages, page_size, graph_rows) if graph_rows else None

    def release(self) -> None:
        """Lets go of pages and graphs. They refer to this runner, and so would stay until they are looked for."""
        self._pages, self._graphs = (), None

    @property
    def decode_graphs(self) -> str:
        """Whether decode steps are recorded: `recorded`, or why not; `off` if nobody asked for it."""
        return (self._graphs.failure or "recorded") if self._graphs else "off"

    @property
    def graph_steps(self) -> int:
        """Steps that were recorded ones."""
        return self._graphs.steps if self._graphs else 0

    @torch.inference_mode()  # so that buffers of graphs, which were made in it, can be changed
    def prepare(self, step: Step) -> PreparedStep:
        """Plans the attention and brings the step to the device."""
        batches = {spec: step.attention[group] for spec, group in self._group_of.items()}
        graph = self._graphs.load(step, batches) if self._graphs else None
        multiple = graph.rows if graph else self._row_multiple
        is_known = bool((step.token_sources < 0).all())
        return PreparedStep(
            token_ids=self._filled(step.token_ids, multiple),
            token_sources=None if is_known else self._filled(step.token_sources, multiple, -1),
            num_logits=len(step.logits_tokens),
            forward=graph.forward if graph else self._forward_of(step, batches),
        )

    def forward(self, prepared: PreparedStep, previous_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [L, V] of the step's `logits_tokens`, in the model's dtype.

        Args:
            prepared: the step.
            previous_tokens: int64 [N] on the device, what the step before sampled; None if all tokens are known.
        """
        with torch.inference_mode():
            return prepared.forward(_input_ids(prepared, previous_tokens))[: prepared.num_logits]

    def _forward_of(
        self, step: Step, batches: dict[LayerSpec, AttentionBatch]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        plans = {spec: self._backend.plan(batch, spec) for spec, batch in batches.items()}
        return partial(
            self._run_model,
            positions=self._filled(step.positions, self._row_multiple),
            logits_tokens=self._filled(step.logits_tokens, self._row_multiple),
            attention=self._attention_of(plans, step.num_tokens),
        )

    def _attention_of(self, plans: Mapping[LayerSpec, Any], num_tokens: int) -> StepAttention:
        return StepAttention(
            backend=self._backend,
            specs=self._layout.layers,
            pages=self._pages,
            plans=tuple(plans[spec] for spec in self._layout.layers),
            num_tokens=num_tokens,
        )

    def _run_model(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_tokens: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        output = self._model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logits_tokens,
            step_attention=attention,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _record(self, pool_pages: tuple[int, ...], page_size: int, max_rows: int) -> DecodeGraphs:
        from batchkv.decode_graphs import DecodeGraphs  # Triton is not there on every system
        from batchkv.kernels.triton_attention import TritonAttention

        if not isinstance(self._backend, TritonAttention):
            raise ValueError(f"graph_rows {max_rows}: only steps of the Triton kernels can be recorded")
        num_pages = {spec: pool_pages[group] for spec, group in self._group_of.items()}
        with torch.inference_mode():
            return DecodeGraphs(
                self._backend, num_pages, page_size, self._run_model, self._attention_of, max_rows, self._device
            )

    def _filled(self, numbers: npt.NDArray[np.int64], multiple: int, filling: int = 0) -> torch.Tensor:
        """On the device, filled up to the next multiple; nothing stays nothing."""
        filled = np.pad(numbers, (0, -len(numbers) % multiple), constant_values=filling)
        return to_device(filled, self._device)


def _input_ids(prepared: PreparedStep, previous_tokens: torch.Tensor | None) -> torch.Tensor:
    """int64 [T]: all token ids, without the host knowing them."""
    sources = prepared.token_sources
    if sources is None:
        return prepared.token_ids
    if previous_tokens is None:
        raise ValueError("a step with tokens of the step before needs previous_tokens")
    return torch.where(sources < 0, prepared.token_ids, previous_tokens[sources.clamp(min=0)])


@contextmanager
def paged_attention_of(model: PreTrainedModel) -> Iterator[None]:
    """The model in evaluation mode with our attention and fast layers; as it was, afterwards. Others wait."""
    with alone_with(model), as_written(), with_fast_layers(model), _with_paged_attention(model):
        yield


@contextmanager
def _with_paged_attention(model: PreTrainedModel) -> Iterator[None]:
    implementation = model.config._attn_implementation
    was_training = [(module, module.training) for module in model.modules()]
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        model.train(False)
        yield
    finally:
        model.set_attn_implementation(implementation)
        for module, training in was_training:
            module.training = training
