"""Decode steps on a GPU as CUDA graphs: one launch in place of hundreds, each of which takes longer than its kernel.

A graph is a forward pass over buffers that stay where they are, for up to so many rows of one token; what fills them up
is stored nowhere and attends to nothing. Between replays only the contents of the buffers change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from batchkv.attention import StepAttention
from batchkv.kernels.triton_attention import TritonAttention, TritonWorkPlan
from batchkv.kv_layout import LayerSpec
from batchkv.step import AttentionBatch, Step
from batchkv.transfers import to_device

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepAttention], torch.Tensor]
"""(input_ids [T], positions [T], logits_tokens [L], attention) to logits [L, V]."""
Recorder = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
"""From a forward pass to what replays it."""
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
        page_size: tokens per page.
        forward: the model's forward pass.
        attention_of: what its layers need.
        max_rows: most rows of a decode step.
        device: where.
    """

    def __init__(
        self,
        backend: TritonAttention,
        num_pages: dict[LayerSpec, int],
        page_size: int,
        forward: Forward,
        attention_of: AttentionOf,
        max_rows: int,
        device: torch.device,
    ) -> None:
        self.steps = 0
        """That were loaded."""
        self.failure: str | None = None
        """Why there are none: what the model's code does cannot be recorded."""
        self._backend, self._num_pages, self._page_size = backend, num_pages, page_size
        self._forward, self._attention_of, self._device = forward, attention_of, device
        self._buckets = buckets(max_rows)
        self._graphs: dict[int, DecodeGraph] = {}
        self._recorder = _recorder_of(device)
        self._graph(self._buckets[0])  # also has all variants of the kernels compiled before the job begins

    def load(self, step: Step, batches: Mapping[LayerSpec, AttentionBatch]) -> DecodeGraph | None:
        """The graph for a step, with the step in its buffers; None if it has to run without."""
        is_decode = step.num_tokens == len(step.attention[0].kv_lens) == len(step.logits_tokens)
        rows = next((rows for rows in self._buckets if rows >= step.num_tokens), None)
        if self.failure or not is_decode or rows is None:
            return None
        graph = self._graph(rows)
        if graph is None or not self._backend.reload(graph.plans, batches):
            return None
        positions = np.pad(step.positions, (0, graph.rows - step.num_tokens))
        graph.positions.copy_(to_device(positions, self._device), non_blocking=True)
        self.steps += 1
        return graph

    def _graph(self, rows: int) -> DecodeGraph | None:
        if rows not in self._graphs:
            graph = self._buffers(rows)
            graph.replay()  # as it is; what fails here would fail without graphs
            try:
                self._graphs[rows] = replace(graph, replay=self._recorder(graph.replay)) if self._recorder else graph
            except torch.OutOfMemoryError:
                self._buckets = tuple(fewer for fewer in self._buckets if fewer < rows)
            except RuntimeError as error:  # torch's, of operations that need the host
                self.failure = str(error).splitlines()[0]
                self._graphs.clear()
        return self._graphs.get(rows)

    def _buffers(self, rows: int) -> DecodeGraph:
        """A forward pass over buffers of its own, not recorded."""
        input_ids, positions, logits_tokens = (
            torch.zeros(rows, dtype=torch.int64, device=self._device),
            torch.zeros(rows, dtype=torch.int64, device=self._device),
            torch.arange(rows, device=self._device),
        )
        plans = {
            spec: self._backend.decode_plan(rows, pages, self._page_size, spec)
            for spec, pages in self._num_pages.items()
        }
        run = partial(self._forward, input_ids, positions, logits_tokens, self._attention_of(plans, rows))
        return DecodeGraph(rows, input_ids, positions, plans, run)


def _recorder_of(device: torch.device) -> Recorder | None:
    return CudaRecorder(device) if device.type == "cuda" else None


class CudaRecorder:
    """Makes CUDA graphs of forward passes, all on one stream and with memory that they share."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """`run` as a graph.

        Raises:
            RuntimeError: it does what cannot be recorded, such as waiting for the device.
        """
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):  # also has the stream restored if recording fails
            with _waiting_is_an_error():  # a recording that fails leaves more behind than this does
                run()  # libraries set themselves up for the stream
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                logits = run()
        before.wait_stream(self._stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that there are graphs for: at most a third of a step's rows fill it up, from 48 on."""
    steps = [16, 32, 48, 64]
    while steps[-1] < max_rows:
        steps += [steps[-2] * 2, steps[-1] * 2]
    return tuple(steps[: bisect_left(steps, max_rows) + 1])
