"""What the attention kernels are measured on: rows below one shared prefix, in one layer.

Decode, prompt chunks and leaves are all of that form. The page table is what the KV cache makes of such rows, with the
pages of rows that grow side by side; keys and values are random and lie where they would have been stored.

Shape suffixes: T tokens of the step, H query heads, K KV heads, D head dim, S slots, R rows, Q queries and L keys of
a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchkv.kv_cache import KVCache
from batchkv.kv_layout import LayerSpec
from batchkv.step import AttentionBatch

PAGE_SIZE = 16
_REFERENCE_QUERIES = 128  # at a time: bounds the scores of the reference


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer.

    Attributes:
        dtype: of queries and results.
        kv_dtype: of keys and values; int8 has a scale for each vector.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(self.heads, self.kv_heads, self.head_dim, self.head_dim, None)

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.head_dim**-0.5)

    @property
    def bytes_per_key(self) -> int:
        """Of one position's keys and values, with their scales."""
        scale_bytes = 4 if self.kv_dtype == torch.int8 else 0
        return 2 * self.kv_heads * (self.head_dim * self.kv_dtype.itemsize + scale_bytes)


@dataclass(frozen=True, slots=True)
class Case:
    """`rows` rows of `own` tokens each below a prefix; the last `queries` of each row are the step's.

    Attributes:
        prefix: tokens, whole pages.
    """

    prefix: int
    rows: int
    own: int
    queries: int = 1

    def __post_init__(self) -> None:
        if self.prefix % PAGE_SIZE:
            raise ValueError(f"prefix {self.prefix} must be a multiple of {PAGE_SIZE}, so that no page is half shared")
        if not 0 < self.queries <= self.own:
            raise ValueError(f"queries {self.queries} must be at least 1 and at most own {self.own}")

    @property
    def name(self) -> str:
        if self.queries == 1:
            return f"decode, {self.rows:,} rows x {self.own} under {_thousands(self.prefix)}"
        if self.rows == 1:
            return f"prefill, {self.queries:,} at {_thousands(self.prefix + self.own - self.queries)}"
        return f"prefill, {self.rows} leaves x {self.queries} under {_thousands(self.prefix)}"

    @property
    def live_keys(self) -> int:
        """Positions of the trie: what has to be read, once each."""
        return self.prefix + self.rows * self.own

    @property
    def seen_keys(self) -> int:
        """Summed over all queries."""
        first = self.prefix + self.own - self.queries + 1
        return self.rows * self.queries * (2 * first + self.queries - 1) // 2

    def kv_bytes(self, shape: Shape) -> int:
        """That have to be read."""
        return self.live_keys * shape.bytes_per_key

    def flops(self, shape: Shape) -> int:
        """Of both products, keys that a query does not see left out."""
        return 4 * shape.heads * shape.head_dim * self.seen_keys


@dataclass(frozen=True, slots=True)
class Inputs:
    """A case on a device.

    Attributes:
        batch: the step, as the KV cache gives it.
        query_THD: contiguous.
        key_SKD, value_SKD: the pool of pages.
        key_scale_SK, value_scale_SK: fp32, of int8.
    """

    case: Case
    shape: Shape
    batch: AttentionBatch
    query_THD: torch.Tensor
    key_SKD: torch.Tensor
    value_SKD: torch.Tensor
    key_scale_SK: torch.Tensor | None
    value_scale_SK: torch.Tensor | None

    @property
    def device(self) -> torch.device:
        return self.query_THD.device

    def slots(self) -> torch.Tensor:
        """int64 [R, L], where the keys of each row lie."""
        positions = np.arange(self.case.prefix + self.case.own)
        pages = self.batch.page_table[:, positions // PAGE_SIZE].astype(np.int64)
        return torch.from_numpy(pages * PAGE_SIZE + positions % PAGE_SIZE).to(self.device)


def standard_cases(prefixes: Sequence[int], rows: Sequence[int], own: int) -> list[Case]:
    """Decode at every size, then prefill: a chunk of a first prompt, one further on, and many short leaves."""
    decode = [Case(prefix, count, own) for prefix in prefixes for count in rows]
    return [*decode, Case(0, 1, 2048, 2048), Case(8192, 1, 2048, 2048), Case(4096, 64, 32, 32)]


def make_inputs(case: Case, shape: Shape, device: torch.device, seed: int = 0) -> Inputs:
    """The same numbers for the same seed on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    batch, num_pages = make_batch(case)

    def pool() -> tuple[torch.Tensor, torch.Tensor | None]:
        size = (num_pages * PAGE_SIZE, shape.kv_heads)
        if shape.kv_dtype != torch.int8:
            vectors = torch.randn(*size, shape.head_dim, generator=generator, device=device, dtype=shape.kv_dtype)
            return vectors, None
        steps = torch.randint(-127, 128, (*size, shape.head_dim), generator=generator, device=device, dtype=torch.int8)
        return steps, torch.rand(*size, generator=generator, device=device) / 64  # values up to 2

    tokens = case.rows * case.queries
    query_THD = torch.randn(tokens, shape.heads, shape.head_dim, generator=generator, device=device, dtype=shape.dtype)
    (key, key_scale), (value, value_scale) = pool(), pool()
    return Inputs(case, shape, batch, query_THD, key, value, key_scale, value_scale)


def make_batch(case: Case) -> tuple[AttentionBatch, int]:
    """The step of a case, and how many pages it takes."""
    num_pages = case.prefix // PAGE_SIZE + case.rows * -(-case.own // PAGE_SIZE)
    cache = KVCache((num_pages,), (None,), PAGE_SIZE)
    root = cache.create()
    cache.append(np.array([root]), np.array([case.prefix]))
    rows = np.array([cache.fork(root) for _ in range(case.rows)])
    for start in range(0, case.own, PAGE_SIZE):  # rows grow side by side, so their pages alternate
        cache.append(rows, np.full(case.rows, min(PAGE_SIZE, case.own - start)))
    table = cache.page_table(0, rows)
    positions = np.arange(case.prefix + case.own - case.queries, case.prefix + case.own)
    slots = table[:, positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
    batch = AttentionBatch(
        page_size=PAGE_SIZE,
        window=None,
        page_table=table,
        kv_lens=cache.lengths(rows),
        cu_seqlens_q=np.arange(case.rows + 1) * case.queries,
        slots=slots.ravel(),
    )
    return batch, num_pages


def reference(inputs: Inputs) -> torch.Tensor:
    """Every row on its own, dense, in fp32: [T, H, D]."""
    case, shape, slots_RL = inputs.case, inputs.shape, inputs.slots()
    rows = []
    for row in range(case.rows):
        key_HLD = _heads(inputs.key_SKD, inputs.key_scale_SK, slots_RL[row], shape)
        value_HLD = _heads(inputs.value_SKD, inputs.value_scale_SK, slots_RL[row], shape)
        for lo in range(0, case.queries, _REFERENCE_QUERIES):
            hi = min(case.queries, lo + _REFERENCE_QUERIES)
            query_HQD = inputs.query_THD[row * case.queries + lo : row * case.queries + hi].float().transpose(0, 1)
            position_Q = torch.arange(lo, hi, device=inputs.device) + case.prefix + case.own - case.queries
            hidden_QL = torch.arange(key_HLD.shape[1], device=inputs.device) > position_Q[:, None]
            scores_HQL = (query_HQD @ key_HLD.transpose(1, 2) * shape.scale).masked_fill_(hidden_QL, -torch.inf)
            rows.append((torch.softmax(scores_HQL, dim=2) @ value_HLD).transpose(0, 1))
    return torch.cat(rows)


def _heads(pool_SKD: torch.Tensor, scale_SK: torch.Tensor | None, slots: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Vectors of some slots in fp32, for every query head: [H, L, D]."""
    vectors = pool_SKD[slots].float()
    if scale_SK is not None:
        vectors = vectors * scale_SK[slots].unsqueeze(2)
    return vectors.transpose(0, 1).repeat_interleave(shape.heads // shape.kv_heads, dim=0)


def largest_error(out_THD: torch.Tensor, expected_THD: torch.Tensor) -> float:
    """In parts of the root mean square of its head: results over many keys are small, and zeros must not pass."""
    difference = (out_THD.float() - expected_THD).abs().amax(dim=2)
    size = expected_THD.square().mean(dim=2).sqrt()
    return float((difference / size).nan_to_num(nan=torch.inf).max())


def tolerance(dtype: torch.dtype) -> float:
    """Of `largest_error`: an element of four times the mean, and weights, rounded to `dtype`."""
    return {torch.bfloat16: 0.06, torch.float16: 0.01}.get(dtype, 1e-3)


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def page_rows(inputs: Inputs) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """int32 [shared pages], and int32 [R, own pages]."""
    shared = inputs.case.prefix // PAGE_SIZE
    return inputs.batch.page_table[0, :shared], inputs.batch.page_table[:, shared:]
