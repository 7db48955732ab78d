"""Runs steps through the model: the only place that calls it, and that holds the KV tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from batchkv.attention import IMPLEMENTATION, StepAttention
from batchkv.kernels.attention import AttentionBackend
from batchkv.kv_layout import KVLayout
from batchkv.step import Step
from batchkv.transfers import to_device

ROW_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step on the device, but for the tokens that the step before is still computing. Filled up, see `row_multiple`.

    Attributes:
        token_ids, positions: int64 [T].
        token_sources: int64 [T], which of the tokens sampled in the step before a token is, -1 where `token_ids` has
            it; None if it has all.
        logits_tokens: int64 [L], the tokens whose logits are wanted.
        num_logits: how many of these are not there to fill up.
        attention: what the layers need.
    """

    token_ids: torch.Tensor
    token_sources: torch.Tensor | None
    positions: torch.Tensor
    logits_tokens: torch.Tensor
    num_logits: int
    attention: StepAttention


class ModelRunner:
    """One ragged forward pass `[1, T]` per step, without padding.

    `prepare` is the host's part and needs nothing of the step before; `forward` is the device's.

    Args:
        model: a decoder in place; it must be inside `paged_attention_of(model)` when steps run.
        layout: its KV.
        backend: attention kernels.
        pool_pages: pages of each group of layers.
        page_size: tokens per page.
        row_multiple: forward passes are filled up to a multiple of this many tokens and of logits. Products of few rows
            cost about the same; there are fewer sizes that libraries prepare for and that memory is split into; and
            a row's bits need not depend on how many rows there are (`batch_invariance`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: KVLayout,
        backend: AttentionBackend[Any, Any],
        pool_pages: tuple[int, ...],
        page_size: int,
        row_multiple: int = ROW_MULTIPLE,
    ) -> None:
        self._model, self._layout, self._backend = model, layout, backend
        self._device, self._row_multiple = model.device, row_multiple
        self._pages = tuple(
            backend.allocate(pool_pages[group], page_size, spec, model.dtype, model.device)
            for spec, group in zip(layout.layers, layout.layer_group, strict=True)
        )

    def prepare(self, step: Step) -> PreparedStep:
        """Plans the attention and brings the step to the device."""
        plans = [self._backend.plan(batch) for batch in step.attention]
        attention = StepAttention(
            backend=self._backend,
            specs=self._layout.layers,
            pages=self._pages,
            plans=tuple(plans[group] for group in self._layout.layer_group),
            num_tokens=step.num_tokens,
        )
        is_known = bool((step.token_sources < 0).all())
        return PreparedStep(
            token_ids=self._filled(step.token_ids),
            token_sources=None if is_known else self._filled(step.token_sources, -1),
            positions=self._filled(step.positions),
            logits_tokens=self._filled(step.logits_tokens),
            num_logits=len(step.logits_tokens),
            attention=attention,
        )

    def forward(self, prepared: PreparedStep, previous_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [L, V] of the step's `logits_tokens`, in the model's dtype.

        Args:
            prepared: the step.
            previous_tokens: int64 [N] on the device, what the step before sampled; None if all tokens are known.
        """
        with torch.inference_mode():
            output = self._model(
                input_ids=_input_ids(prepared, previous_tokens).unsqueeze(0),
                position_ids=prepared.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=prepared.logits_tokens,
                step_attention=prepared.attention,
            )
        logits: torch.Tensor = output.logits[0, : prepared.num_logits]
        return logits

    def _filled(self, numbers: npt.NDArray[np.int64], filling: int = 0) -> torch.Tensor:
        """On the device, filled up to the next multiple; nothing stays nothing."""
        filled = np.pad(numbers, (0, -len(numbers) % self._row_multiple), constant_values=filling)
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
    """The model in evaluation mode with our attention; as it was before, afterwards."""
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
