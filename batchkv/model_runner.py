"""Runs steps through the model: the only place that calls it, and that holds the KV tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from batchkv.attention import IMPLEMENTATION, StepAttention
from batchkv.kernels.attention import AttentionBackend
from batchkv.kv_layout import KVLayout
from batchkv.step import Step


class ModelRunner:
    """One ragged forward pass `[1, T]` per step, without padding.

    Args:
        model: a decoder in place; it must be inside `paged_attention_of(model)` when steps run.
        layout: its KV.
        backend: attention kernels.
        pool_pages: pages of each group of layers.
        page_size: tokens per page.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: KVLayout,
        backend: AttentionBackend[Any, Any],
        pool_pages: tuple[int, ...],
        page_size: int,
    ) -> None:
        self._model, self._layout, self._backend = model, layout, backend
        self._device = model.device
        self._pages = tuple(
            backend.allocate(
                pool_pages[group],
                page_size,
                spec.num_kv_heads,
                spec.key_dim,
                spec.value_dim,
                model.dtype,
                model.device,
            )
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
        )
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.from_numpy(step.token_ids).unsqueeze(0).to(self._device),
                position_ids=torch.from_numpy(step.positions).unsqueeze(0).to(self._device),
                use_cache=False,
                logits_to_keep=torch.from_numpy(step.logits_tokens).to(self._device),
                step_attention=attention,
            )
        logits: torch.Tensor = output.logits[0]
        return logits


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
