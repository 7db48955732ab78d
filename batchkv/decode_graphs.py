"""Decode steps on a GPU as CUDA graphs: one launch in place of hundreds, each of which takes longer than its kernel.

A graph is a forward pass over buffers that stay where they are, for up to so many rows of one token; what fills them up
is stored nowhere and attends to nothing. Between replays only the contents of the buffers change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from batchkv.attention import StepAttention
from batchkv.kernels.triton_attention import TritonAttention, TritonWorkPlan
from batchkv.kv_layout import LayerSpec
from batchkv.step import AttentionBatch, Step
from batchkv.transfers import to_device

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepAttention], torch.Tensor]
"""(input_ids [T], positions [T], logits_tokens [L], attention) to logits [L, V]."""
AttentionOf = Callable[[Mapping[LayerSpec, TritonWorkPlan], int], StepAttention]
"""(plans, number of tokens) to what the layers need."""


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """The forward pass of up to `rows` decode rows.

    Attributes:
        rows: how many.
        input_ids, positions: int64 [rows] on the device.
        plans: of the attention layers.
        replay: computes the logits [rows, V], always in the same place.
    """

    rows: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    plans: dict[LayerSpec, TritonWorkPlan]
    replay: Callable[[], torch.Tensor]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits [rows, V] of the step that was loaded; the next `forward` overwrites them."""
        self.input_ids.copy_(input_ids)
        return self.replay()


class DecodeGraphs:
    """Graphs by number of rows, recorded when they are first needed.

    On a device without CUDA nothing is recorded: a replay is the same forward pass over the same buffers.

    Args:
        backend: attention kernels.
        num_pages: of the pool of each kind of layer.
        forward: the model's forward pass.
        attention_of: what its layers need.
        max_rows: most rows of a decode step.
        device: where.
    """

    def __init__(
        self,
        backend: TritonAttention,
        num_pages: dict[LayerSpec, int],
        forward: Forward,
        attention_of: AttentionOf,
        max_rows: int,
        device: torch.device,
    ) -> None:
        self.failure: str | None = None
        """Why there are none: what the model's code does cannot be recorded."""
        self._backend, self._num_pages = backend, num_pages
        self._forward, self._attention_of, self._device = forward, attention_of, device
        self._buckets = buckets(max_rows)
        self._graphs: dict[int, DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._graph(self._buckets[0])  # also has all variants of the kernels compiled before the job begins

    def load(self, step: Step, batches: Mapping[LayerSpec, AttentionBatch]) -> DecodeGraph | None:
        """The graph for a step, with the step in its buffers; None if it has to run without."""
        is_decode = step.num_tokens == len(step.attention[0].kv_lens) == len(step.logits_tokens)
        if self.failure or not is_decode or step.num_tokens > self._buckets[-1]:
            return None
        graph = self._graph(next(rows for rows in self._buckets if rows >= step.num_tokens))
        if graph is None or not self._backend.reload(graph.plans, batches):
            return None
        positions = np.pad(step.positions, (0, graph.rows - step.num_tokens))
        graph.positions.copy_(to_device(positions, self._device), non_blocking=True)
        return graph

    def _graph(self, rows: int) -> DecodeGraph | None:
        if rows not in self._graphs:
            try:
                self._graphs[rows] = self._record(rows)
            except RuntimeError as error:  # torch's, of operations that need the host
                self.failure = str(error).splitlines()[0]
                self._graphs.clear()
        return self._graphs.get(rows)

    def _record(self, rows: int) -> DecodeGraph:
        input_ids, positions, logits_tokens = (
            torch.zeros(rows, dtype=torch.int64, device=self._device),
            torch.zeros(rows, dtype=torch.int64, device=self._device),
            torch.arange(rows, device=self._device),
        )
        plans = {spec: self._backend.decode_plan(rows, pages, spec) for spec, pages in self._num_pages.items()}
        attention = self._attention_of(plans, rows)

        def run() -> torch.Tensor:
            return self._forward(input_ids, positions, logits_tokens, attention)

        replay = run if self._pool is None else _record(run, self._pool)
        return DecodeGraph(rows, input_ids, positions, plans, replay)


def buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that there are graphs for: at most a third of a step's rows fill it up, from 48 on."""
    steps = [16, 32, 48, 64]
    while steps[-1] < max_rows:
        steps += [steps[-2] * 2, steps[-1] * 2]
    return tuple(steps[: bisect_left(steps, max_rows) + 1])


def _record(run: Callable[[], torch.Tensor], pool: tuple[int, int]) -> Callable[[], torch.Tensor]:
    """`run` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # kernels are compiled and libraries set up outside of the recording
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        logits = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay
