"""Runs steps through the model: the only place that calls it, and that holds the KV tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from batchkv.attention import IMPLEMENTATION, StepAttention
from batchkv.kernels.attention import AttentionBackend
from batchkv.kv_layout import KVLayout
from batchkv.step import Step

ROW_MULTIPLE = 16


class ModelRunner:
    """One ragged forward pass `[1, T]` per step, without padding.

    Args:
        model: a decoder in place; it must be inside `paged_attention_of(model)` when steps run.
        layout: its KV.
        kv_dtype: in which the pages are kept.
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
        kv_dtype: torch.dtype,
        backend: AttentionBackend[Any, Any],
        pool_pages: tuple[int, ...],
        page_size: int,
        row_multiple: int = ROW_MULTIPLE,
    ) -> None:
        self._model, self._layout, self._backend = model, layout, backend
        self._device, self._row_multiple = model.device, row_multiple
        self._pages = tuple(
            backend.allocate(pool_pages[group], page_size, spec, kv_dtype, model.device)
            for spec, group in zip(layout.layers, layout.layer_group, strict=True)
        )

    def forward(self, step: Step) -> torch.Tensor:
        """Logits [L, V] of `step.logits_tokens`, in the model's dtype."""
        plans = [self._backend.plan(batch) for batch in step.attention]
        attention = StepAttention(
            backend=self._backend,
            specs=self._layout.layers,
            pages=self._pages,
            plans=tuple(plans[group] for group in self._layout.layer_group),
            num_tokens=step.num_tokens,
        )
        with torch.inference_mode():
            output = self._model(
                input_ids=self._filled(step.token_ids).unsqueeze(0),
                position_ids=self._filled(step.positions).unsqueeze(0),
                use_cache=False,
                logits_to_keep=self._filled(step.logits_tokens),
                step_attention=attention,
            )
        logits: torch.Tensor = output.logits[0, : len(step.logits_tokens)]
        return logits

    def _filled(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        """On the device, with zeros up to the next multiple; nothing stays nothing."""
        filled = np.pad(numbers, (0, -len(numbers) % self._row_multiple))
        return torch.from_numpy(filled).to(self._device)


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
