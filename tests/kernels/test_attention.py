"""Every implementation of the attention contract agrees with plain attention in fp64, on random tries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkv.kernels.attention import AttentionBackend
from batchkv.kernels.native_attention import NativeAttention
from batchkv.kernels.native_library import instruction_sets
from batchkv.kernels.quantization import is_quantized, quantize
from batchkv.kernels.reference import ReferenceAttention
from batchkv.kernels.torch_cpu import TorchAttention
from batchkv.kernels.triton_attention import TritonAttention
from batchkv.kv_cache import KVCache, in_few_rounds
from batchkv.kv_layout import LayerSpec
from batchkv.step import AttentionBatch

# The Triton kernels run where Triton does: on a GPU, or in its interpreter.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_INTERPRETED = DEVICE.type == "cpu"


def native(instruction_set: str) -> Any:
    missing = pytest.mark.skipif(instruction_set not in instruction_sets(), reason="not built, or not this processor's")
    return pytest.param(partial(NativeAttention, instruction_set), id=f"native-{instruction_set}", marks=missing)


NATIVE = [native(name) for name in ("portable", "avx2", "avx512", "amx")]
IN_TILES = NATIVE[-1:]  # if keys have a multiple of 32 dims in bfloat16
IN_TORCH: list[Any] = [pytest.param(backend, id=backend.name) for backend in (ReferenceAttention, TorchAttention)]
TRITON = [pytest.param(partial(TritonAttention, DEVICE), id="triton")]
BACKENDS = [*IN_TORCH, *NATIVE, *TRITON]
INT8, FP8 = torch.int8, torch.float8_e4m3fn


def keeping(kv_dtype: torch.dtype, backends: list[Any]) -> list[Any]:
    """Implementations, each with what its pages are kept in."""
    return [pytest.param(*b.values, kv_dtype, id=f"{b.id}-{str(kv_dtype)[6:]}", marks=b.marks) for b in backends]


QUANTIZED = [*keeping(INT8, BACKENDS), *keeping(FP8, [*IN_TORCH, *TRITON])]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
QUANTIZATION_ERROR = {INT8: 2e-2, FP8: 1e-1}  # against the original keys and values, all inputs from N(0, 1)


@dataclass(frozen=True)
class Node:
    """Tokens of one trie node: a prefix in the cache, then a chunk that is in the step under test."""

    parent: int
    cached: int
    chunk: int


@dataclass(frozen=True)
class Case:
    nodes: tuple[Node, ...]
    page_size: int
    window: int | None
    group: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    softcap: float | None
    sinks: bool
    dtype: torch.dtype
    seed: int


@st.composite
def cases(draw: st.DrawFn, max_nodes: int = 14, in_tiles: bool = False) -> Case:
    """Ragged tries of depth 1-6, forks in the middle of a page, empty chunks, windows shorter than a node.

    Args:
        in_tiles: such as are computed in tiles, where there are any.
    """
    num_nodes = draw(st.integers(1, max_nodes))
    nodes: list[Node] = []
    for i in range(num_nodes):
        parent = draw(st.integers(-1, i - 1))
        # below a node with a chunk in this step nothing can be cached yet
        may_cache = parent < 0 or nodes[parent].chunk == 0
        cached = draw(st.integers(0, 40)) if may_cache else 0
        nodes.append(Node(parent, cached, draw(st.sampled_from([0, 1, 1, 3, 20]))))
    if not any(node.chunk for node in nodes):
        nodes[-1] = Node(nodes[-1].parent, nodes[-1].cached, 1)
    return Case(
        nodes=tuple(nodes),
        page_size=draw(st.sampled_from([1, 3, 4, 16, 32, 48])),
        window=draw(st.sampled_from([None, None, 1, 5, 17])),
        group=draw(st.sampled_from([1, 2, 3, 8])),
        num_kv_heads=draw(st.sampled_from([1, 2])),
        head_dim=draw(st.sampled_from([32, 64, 96] if in_tiles else [8, 20])),
        value_dim=draw(st.sampled_from([8, 20, 64] if in_tiles else [8, 20])),
        softcap=draw(st.sampled_from([None, 2.0])),
        sinks=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.bfloat16] if in_tiles else DTYPES)),
        seed=draw(st.integers(0, 1 << 16)),
    )


class Result(NamedTuple):
    """What attention gives; what it should give, with keys and values as they are stored and with the original ones.

    All in fp64; `dtype` is that of the inputs.
    """

    out: torch.Tensor
    expected: torch.Tensor
    exact: torch.Tensor
    dtype: torch.dtype

    def is_close(self) -> bool:
        tolerance = TOLERANCE[self.dtype]
        return torch.allclose(self.out, self.expected, atol=tolerance, rtol=tolerance)


def examples(make_backend: partial[AttentionBackend[Any, Any]] | type, compiled: int) -> int:
    """How many cases: the interpreter takes a second for each, and on a GPU most are variants that are compiled."""
    return compiled // 6 if getattr(make_backend, "func", None) is TritonAttention else compiled


class Trie:
    """Keeps every sequence's keys and values densely, next to an implementation that keeps them in pages.

    Args:
        kv_dtype: what the pages are kept in, if not the dtype of the case.
    """

    def __init__(self, case: Case, backend: AttentionBackend[Any, Any], kv_dtype: torch.dtype | None = None) -> None:
        self.device = backend.device if isinstance(backend, TritonAttention) else torch.device("cpu")
        if IS_INTERPRETED and isinstance(backend, TritonAttention) and case.dtype == torch.bfloat16:
            case = replace(case, dtype=torch.float16)  # the interpreter computes wrong products in bf16
        if isinstance(backend, NativeAttention) and case.dtype == torch.float16:
            case = replace(case, dtype=torch.bfloat16)  # the 16 bits that it has
        self.case, self.backend, self.kv_dtype = case, backend, kv_dtype or case.dtype
        self.generator = torch.Generator().manual_seed(case.seed)
        num_pages = sum((node.cached + node.chunk) // case.page_size + 2 for node in case.nodes) + 4
        self.cache = KVCache((num_pages,), (case.window,), case.page_size)
        heads = case.num_kv_heads
        self.spec = LayerSpec(case.group * heads, heads, case.head_dim, case.value_dim, case.window)
        self.pages = backend.allocate(num_pages, case.page_size, self.spec, self.kv_dtype, self.device)
        for pool in (getattr(self.pages, name) for name in self.pages.__slots__):
            if isinstance(pool, torch.Tensor):  # whatever was not stored must not matter
                pool.fill_(math.nan if pool.is_floating_point() else 111)
        self.handles: dict[int, int] = {}  # by node
        self.keys: dict[int, torch.Tensor] = {}  # by node: [K, tokens of the path, D]
        self.values: dict[int, torch.Tensor] = {}

    def random(self, *shape: int) -> torch.Tensor:
        """Heads lie side by side in memory, [T, H, D], as a model's projections leave them."""
        values = torch.randn(*shape, generator=self.generator).to(self.case.dtype)
        return values.transpose(0, 1).contiguous().transpose(0, 1) if len(shape) == 3 else values

    def begin(self, node: int) -> None:
        """Forks the node from what its parent has by now."""
        parent = self.case.nodes[node].parent
        empty_key = torch.zeros(self.case.num_kv_heads, 0, self.case.head_dim, dtype=self.case.dtype)
        empty_value = torch.zeros(self.case.num_kv_heads, 0, self.case.value_dim, dtype=self.case.dtype)
        if parent >= 0 and parent not in self.handles:
            self.begin(parent)
        self.handles[node] = self.cache.create() if parent < 0 else self.cache.fork(self.handles[parent])
        self.keys[node] = empty_key if parent < 0 else self.keys[parent]
        self.values[node] = empty_value if parent < 0 else self.values[parent]

    def store(self, rows: list[tuple[int, int]]) -> tuple[AttentionBatch, Any]:
        """Appends `count` tokens to each (node, count), parents first, and stores their keys and values."""
        case, parts, keys, values = self.case, [], [], []
        for node, count in rows:
            if node not in self.handles:
                self.begin(node)
            parts.append(self.cache.append(np.array([self.handles[node]]), np.array([count])))
            keys.append(self.random(case.num_kv_heads, count, case.head_dim))
            values.append(self.random(case.num_kv_heads, count, case.value_dim))
            self.keys[node] = torch.cat([self.keys[node], keys[-1]], dim=1)
            self.values[node] = torch.cat([self.values[node], values[-1]], dim=1)
        handles = np.array([self.handles[node] for node, _ in rows])
        batch = AttentionBatch(
            page_size=case.page_size,
            window=case.window,
            page_table=self.cache.page_table(0, handles),
            kv_lens=self.cache.lengths(handles),
            cu_seqlens_q=np.cumsum([0] + [count for _, count in rows]),
            slots=np.concatenate([part.slots[0] for part in parts]),
            copies=in_few_rounds([part.copies[0] for part in parts]),
        )
        plan = self.backend.plan(batch, self.spec)
        new = (torch.cat(parts, dim=1).to(self.device) for parts in (keys, values))
        self.backend.store(self.pages, plan, *new)
        self.cache.trim(handles)
        return batch, plan

    def dequantized(self, vectors_KTD: torch.Tensor) -> torch.Tensor:
        """What pages of `kv_dtype` hold of these vectors."""
        if not is_quantized(self.kv_dtype):
            return vectors_KTD
        stored_KTD, scale_KT = quantize(vectors_KTD, self.kv_dtype)
        return stored_KTD.double() * scale_KT.unsqueeze(2)

    def step(self, rows: list[tuple[int, int]]) -> Result:
        """A step with `count` new tokens for each (node, count): what attention gives and what it should give."""
        case = self.case
        batch, plan = self.store(rows)
        query_HTD = self.random(case.group * case.num_kv_heads, batch.num_tokens, case.head_dim)
        sinks_H = self.random(query_HTD.shape[0]) if case.sinks else None
        out = self.attend(plan, query_HTD, sinks_H)
        expected = self.expected(rows, query_HTD, sinks_H, self.dequantized)
        exact = self.expected(rows, query_HTD, sinks_H, lambda vectors_KTD: vectors_KTD)
        return Result(out.double(), expected, exact, case.dtype)

    def attend(self, plan: Any, query_HTD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        on_device = query_HTD.to(self.device), None if sinks_H is None else sinks_H.to(self.device)
        softcap = self.case.softcap
        out = self.backend.attend(self.pages, plan, on_device[0], scale=0.3, softcap=softcap, sinks_H=on_device[1])
        return out.cpu()

    def expected(
        self,
        rows: list[tuple[int, int]],
        query_HTD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        kept: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Plain attention in fp64, a row at a time.

        Args:
            kept: what is left of keys and values in the pages.
        """
        case, outs, first = self.case, [], 0
        for node, count in rows:
            query_HQD = query_HTD[:, first : first + count].double()
            key_HLD = kept(self.keys[node]).double().repeat_interleave(case.group, dim=0)
            value_HLD = kept(self.values[node]).double().repeat_interleave(case.group, dim=0)
            scores_HQL = torch.einsum("hqd,hld->hql", query_HQD, key_HLD) * 0.3
            if case.softcap:
                scores_HQL = case.softcap * torch.tanh(scores_HQL / case.softcap)
            length = key_HLD.shape[1]
            distance_QL = torch.arange(length - count, length)[:, None] - torch.arange(length)
            is_seen_QL = (distance_QL >= 0) & (distance_QL < (case.window or math.inf))
            weights_HQL = scores_HQL.exp() * is_seen_QL
            total_HQ = weights_HQL.sum(dim=2)
            if sinks_H is not None:
                total_HQ = total_HQ + sinks_H.double().exp()[:, None]
            outs.append(torch.einsum("hql,hld->qhd", weights_HQL / total_HQ[:, :, None], value_HLD))
            first += count
        return torch.cat(outs)


def run(case: Case, backend: AttentionBackend[Any, Any], kv_dtype: torch.dtype | None = None) -> Result:
    """Fills the cache in one step, then takes the step under test; both in depth-first order."""
    trie = Trie(case, backend, kv_dtype)
    cached = [(node, case.nodes[node].cached) for node in depth_first(case.nodes) if case.nodes[node].cached]
    if cached:
        trie.store(cached)
    result = trie.step([(node, case.nodes[node].chunk) for node in depth_first(case.nodes) if case.nodes[node].chunk])
    trie.cache.check_integrity()
    return result


def depth_first(nodes: tuple[Node, ...], parent: int = -1) -> list[int]:
    order = []
    for i, node in enumerate(nodes):
        if node.parent == parent:
            order += [i, *depth_first(nodes, i)]
    return order


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_agrees_with_plain_attention_on_random_tries(make_backend: Callable[[], AttentionBackend[Any, Any]]) -> None:
    @settings(max_examples=examples(make_backend, 120))
    @given(case=cases())
    def agrees(case: Case) -> None:
        assert run(case, make_backend()).is_close()

    agrees()


@pytest.mark.parametrize("make_backend", IN_TILES)
@settings(max_examples=200)
@given(case=cases(in_tiles=True))
def test_tiles_agree_with_plain_attention_on_random_tries(
    make_backend: Callable[[], NativeAttention], case: Case
) -> None:
    assert run(case, make_backend()).is_close()


@pytest.mark.parametrize("make_backend", IN_TILES)
@pytest.mark.parametrize("page_size", [8, 16, 32, 64])
def test_tiles_agree_on_rows_under_a_long_prefix(make_backend: Callable[[], NativeAttention], page_size: int) -> None:
    dims = {"head_dim": 64, "value_dim": 64}
    assert run(decode_case(50, dtype=torch.bfloat16, page_size=page_size, **dims), make_backend()).is_close()


@pytest.mark.parametrize(("make_backend", "kv_dtype"), QUANTIZED)
def test_agrees_on_quantized_keys_and_values(
    make_backend: Callable[[], AttentionBackend[Any, Any]], kv_dtype: torch.dtype
) -> None:
    """As closely as ever with attention over what the pages hold; and, root mean square, with the original ones."""

    @settings(max_examples=examples(make_backend, 50))
    @given(case=cases())
    def agrees(case: Case) -> None:
        result = run(case, make_backend(), kv_dtype)
        assert result.is_close()
        assert (result.out - result.exact).square().mean().sqrt() < QUANTIZATION_ERROR[kv_dtype]

    agrees()


@pytest.mark.parametrize("kv_dtype", [INT8, FP8])
def test_triton_stores_quantized_keys_and_values_to_the_bit_as_torch_does(kv_dtype: torch.dtype) -> None:
    """Every exponent, subnormal results, vectors of zeros, one that is not a number."""
    backend, tokens = TritonAttention(DEVICE), 61
    spec = LayerSpec(2, 2, 96, 96, None)
    numbers = torch.randn(2, tokens, 96, generator=torch.Generator().manual_seed(0))
    numbers *= torch.logspace(-12, 3, 96) * torch.logspace(-30, 30, tokens)[:, None]
    numbers[:, 7], numbers[1, 9, 3] = 0, math.nan
    batch = AttentionBatch(16, None, np.arange(4)[None], np.array([tokens]), np.array([0, tokens]), np.arange(tokens))
    pages = backend.allocate(4, 16, spec, kv_dtype, DEVICE)
    backend.store(pages, backend.plan(batch, spec), numbers.to(DEVICE), numbers.to(DEVICE))
    stored, scales = quantize(numbers, kv_dtype)
    for pool, scale_SK in ((pages.key_SKD, pages.key_scale_SK), (pages.value_SKD, pages.value_scale_SK)):
        assert torch.equal(scale_SK[:tokens].cpu().nan_to_num(-1), scales.T.nan_to_num(-1))
        is_number = ~scales.T.isnan()
        assert torch.equal(pool[:tokens].cpu().float()[is_number], stored.transpose(0, 1).float()[is_number])


@pytest.mark.parametrize(("make_backend", "kv_dtype"), QUANTIZED)
@pytest.mark.parametrize("num_rows", [1, 300])
def test_quantization_costs_little_precision_under_a_long_prefix(
    make_backend: Callable[[], AttentionBackend[Any, Any]], kv_dtype: torch.dtype, num_rows: int
) -> None:
    """The largest absolute difference of any output from attention over the original keys and values."""
    if make_backend is TRITON[0].values[0]:
        num_rows = min(num_rows, 20)  # the interpreter takes a minute for 300
    result = run(decode_case(num_rows), make_backend(), kv_dtype)
    assert result.is_close()
    assert (result.out - result.exact).abs().max() < QUANTIZATION_ERROR[kv_dtype]


def decode_case(num_rows: int, **overrides: Any) -> Case:
    """A prefix of 700 tokens, a middle node, and rows of one token each below them."""
    rows = tuple(Node(1, 5 + row % 40, 1) for row in range(num_rows))
    return Case(
        nodes=(Node(-1, 700, 0), Node(0, 37, 0), *rows),
        **{
            "page_size": 16,
            "window": None,
            "group": 3,
            "num_kv_heads": 2,
            "head_dim": 16,
            "value_dim": 16,
            "softcap": None,
            "sinks": False,
            "dtype": torch.float32,
            "seed": 0,
            **overrides,
        },
    )


@pytest.mark.parametrize("make_backend", BACKENDS)
@pytest.mark.parametrize("num_rows", [1, 300])
@pytest.mark.parametrize("window", [None, 64, 720])
def test_agrees_on_one_row_and_on_300_rows_under_a_long_prefix(
    make_backend: Callable[[], AttentionBackend[Any, Any]], num_rows: int, window: int | None
) -> None:
    if make_backend is TRITON[0].values[0]:
        num_rows = min(num_rows, 20 if window else 100)  # the interpreter takes a minute for 300
    assert run(decode_case(num_rows, window=window), make_backend()).is_close()


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float32, None), (torch.float16, None), (torch.float16, INT8)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_triton_agrees_for_the_head_dims_of_models(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    nodes = (Node(-1, 45, 0), Node(0, 3, 18), Node(0, 9, 1), Node(0, 2, 1))
    case = Case(nodes, 16, None, 4, 1, head_dim, head_dim, None, False, dtype, 3)
    assert run(case, TritonAttention(DEVICE), kv_dtype).is_close()


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_agrees_on_a_long_prompt_chunk_and_its_leaves_in_one_step(
    make_backend: Callable[[], AttentionBackend[Any, Any]],
) -> None:
    leaves = tuple(Node(1, 0, 24) for _ in range(21))
    prefix, chunk = (200, 150) if make_backend is TRITON[0].values[0] else (600, 300)  # the interpreter is slow
    nodes = (Node(-1, prefix, 0), Node(0, 0, chunk), *leaves)
    case = Case(nodes, 16, None, 3, 2, 16, 16, None, False, torch.float32, 1)
    assert run(case, make_backend()).is_close()


def test_a_shared_prefix_is_read_once_for_all_rows_below_it() -> None:
    """Keys read by the torch work plan: the live trie plus what copied pages repeat, not rows x prefix."""
    case = decode_case(100)
    trie = Trie(case, TorchAttention())
    trie.store([(node, case.nodes[node].cached) for node in depth_first(case.nodes)])
    handles = np.array([trie.handles[node] for node in range(2, 102)])
    trie.cache.append(handles, np.ones(100, np.int64))
    batch = AttentionBatch(
        page_size=16,
        window=None,
        page_table=trie.cache.page_table(0, handles),
        kv_lens=trie.cache.lengths(handles),
        cu_seqlens_q=np.arange(101),
        slots=np.zeros(100, np.int64),
    )
    live_trie = 737 + sum(5 + row % 40 + 1 for row in range(100))
    copied = 100 * (737 % 16)
    assert TorchAttention().plan(batch, trie.spec).keys_read == live_trie + copied - 737 % 16


@pytest.mark.parametrize(("make_backend", "kv_dtype"), [*keeping(torch.float32, BACKENDS), *QUANTIZED])
def test_a_fork_does_not_write_to_its_parents_page(
    make_backend: Callable[[], AttentionBackend[Any, Any]], kv_dtype: torch.dtype
) -> None:
    """Two children of a partly filled page in one step; then their parent goes on."""
    case = Case((Node(-1, 6, 0), Node(0, 0, 3), Node(0, 0, 3)), 4, None, 1, 1, 8, 8, None, False, torch.float32, 2)
    trie = Trie(case, make_backend(), kv_dtype)
    trie.store([(0, 6)])
    for rows in ([(1, 3), (2, 3)], [(0, 2)], [(0, 1), (1, 1), (2, 1)]):
        assert trie.step(rows).is_close()


@pytest.mark.parametrize("make_backend", NATIVE)
@settings(max_examples=100)
@given(case=cases(), quantized=st.booleans())
def test_native_attention_gives_a_token_the_same_bits_alone_as_in_company(
    make_backend: Callable[[], NativeAttention], case: Case, quantized: bool
) -> None:
    assert_same_bits_alone(case, make_backend(), INT8 if quantized else None)


@pytest.mark.parametrize("make_backend", IN_TILES)
@settings(max_examples=100)
@given(case=cases(in_tiles=True))
def test_tiles_give_a_token_the_same_bits_alone_as_in_company(
    make_backend: Callable[[], NativeAttention], case: Case
) -> None:
    assert_same_bits_alone(case, make_backend())


def assert_same_bits_alone(case: Case, backend: NativeAttention, kv_dtype: torch.dtype | None = None) -> None:
    """Every query by itself against all of them together: other tiles, nothing shared, other ranges of keys."""
    trie = Trie(case, backend, kv_dtype)
    order = depth_first(case.nodes)
    cached = [(node, case.nodes[node].cached) for node in order if case.nodes[node].cached]
    if cached:
        trie.store(cached)
    batch, plan = trie.store([(node, case.nodes[node].chunk) for node in order if case.nodes[node].chunk])
    query_HTD = trie.random(case.group * case.num_kv_heads, batch.num_tokens, case.head_dim)
    sinks_H = trie.random(len(query_HTD)) if case.sinks else None

    def attend(plan: Any, query_HTD: torch.Tensor) -> torch.Tensor:
        return backend.attend(trie.pages, plan, query_HTD, scale=0.3, softcap=case.softcap, sinks_H=sinks_H)

    together = attend(plan, query_HTD)
    for row, (lo, hi) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
        for token in range(lo, hi):
            alone = AttentionBatch(
                page_size=batch.page_size,
                window=batch.window,
                page_table=batch.page_table[row : row + 1],
                kv_lens=batch.kv_lens[row : row + 1] - (hi - 1 - token),
                cu_seqlens_q=np.array([0, 1]),
                slots=batch.slots[token : token + 1],
            )
            assert torch.equal(
                attend(backend.plan(alone, trie.spec), query_HTD[:, token : token + 1])[0], together[token]
            )


@pytest.mark.parametrize("make_backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 16), (torch.bfloat16, 32)])
def test_a_query_that_is_not_a_number_shows_in_its_own_result_alone(
    make_backend: Callable[[], AttentionBackend[Any, Any]], dtype: torch.dtype, dim: int
) -> None:
    """A model that computes NaN must not look as if all were well, and other rows must not suffer."""
    trie = Trie(decode_case(4, dtype=dtype, head_dim=dim, value_dim=dim), make_backend())
    trie.store([(node, trie.case.nodes[node].cached) for node in depth_first(trie.case.nodes)])
    batch, plan = trie.store([(node, 1) for node in range(2, 6)])
    query_HTD = trie.random(6, batch.num_tokens, dim)
    query_HTD[:, 2] = math.nan
    out = trie.attend(plan, query_HTD)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("make_backend", IN_TILES)
@pytest.mark.parametrize("which", ["key", "value"])
def test_tiles_keep_what_is_not_a_number_to_the_rows_that_see_it(
    make_backend: Callable[[], NativeAttention], which: str
) -> None:
    """Rows that share nothing lie in one tile."""
    trie = Trie(decode_case(4, dtype=torch.bfloat16, head_dim=32, value_dim=32), make_backend())
    trie.store([(node, trie.case.nodes[node].cached) for node in depth_first(trie.case.nodes)])
    batch, plan = trie.store([(node, 1) for node in range(2, 6)])
    new = {name: trie.random(2, batch.num_tokens, 32) for name in ("key", "value")}
    new[which][:, 2] = math.nan
    trie.backend.store(trie.pages, plan, new["key"], new["value"])
    out = trie.attend(plan, trie.random(6, batch.num_tokens, 32))
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("make_backend", IN_TILES)
def test_tiles_follow_scores_that_rise_from_block_to_block(make_backend: Callable[[], NativeAttention]) -> None:
    """By more than what weights may exceed 1 by, and in other rows at other blocks."""
    trie = Trie(decode_case(50, dtype=torch.bfloat16, head_dim=64, value_dim=64), make_backend())
    trie.store([(node, trie.case.nodes[node].cached) for node in depth_first(trie.case.nodes)])
    rows = [(node, 1) for node in range(2, 52)]
    batch, plan = trie.store(rows)
    query_HTD = 8 * trie.random(6, batch.num_tokens, 64)
    expected = trie.expected(rows, query_HTD, None, lambda vectors_KTD: vectors_KTD)
    out = trie.attend(plan, query_HTD)
    assert torch.allclose(out.double(), expected, atol=TOLERANCE[torch.bfloat16], rtol=TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize(("make_backend", "kv_dtype"), QUANTIZED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["key", "value"])
def test_quantized_keys_and_values_that_are_not_finite_show_in_the_rows_that_see_them(
    make_backend: Callable[[], AttentionBackend[Any, Any]], kv_dtype: torch.dtype, bad: float, which: str
) -> None:
    """Small integers cannot be NaN, so that scales have to be."""
    trie = Trie(decode_case(4), make_backend(), kv_dtype)
    trie.store([(node, trie.case.nodes[node].cached) for node in depth_first(trie.case.nodes)])
    batch, plan = trie.store([(node, 1) for node in range(2, 6)])
    new = {name: trie.random(2, batch.num_tokens, 16) for name in ("key", "value")}
    new[which][:, 2, 5] = bad
    trie.backend.store(trie.pages, plan, new["key"], new["value"])
    out = trie.backend.attend(trie.pages, plan, trie.random(6, batch.num_tokens, 16), scale=0.3)
    assert out[2].isnan().any(dim=-1).all()
    assert out[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("make_backend", NATIVE[:1])
@pytest.mark.parametrize("page_size", [1, 16])
def test_native_attention_quantizes_bit_for_bit_as_torch_does(
    make_backend: Callable[[], NativeAttention], page_size: int
) -> None:
    """Ties, zeros, numbers next to nothing and large ones."""
    generator = torch.Generator().manual_seed(0)
    vectors_KTD = torch.randn(2, 64, 16, generator=generator) * 10.0 ** torch.randint(
        -42, 38, (2, 64, 1), generator=generator
    )
    vectors_KTD[0, 0] = torch.tensor([127, *(n + 0.5 for n in range(-7, 8))])
    vectors_KTD[1, 0] = 0
    backend, num_pages, spec = make_backend(), 64 // page_size, LayerSpec(2, 2, 16, 16, None)
    batch = AttentionBatch(
        page_size=page_size,
        window=None,
        page_table=np.arange(num_pages, dtype=np.int32)[None],
        kv_lens=np.array([64]),
        cu_seqlens_q=np.array([0, 64]),
        slots=np.arange(64),
    )
    pages = backend.allocate(num_pages, page_size, spec, INT8, torch.device("cpu"))
    backend.store(pages, backend.plan(batch, spec), vectors_KTD, vectors_KTD)
    expected_KTD, scale_KT = quantize(vectors_KTD, INT8)
    assert pages.key_scale_PKS is not None
    assert pages.value_scale_PKS is not None
    assert torch.equal(pages.key.permute(1, 0, 3, 2).reshape(2, 64, 16), expected_KTD)
    assert torch.equal(pages.value.transpose(0, 1).reshape(2, 64, 16), expected_KTD)
    assert torch.equal(pages.key_scale_PKS.transpose(0, 1).reshape(2, 64), scale_KT)
    assert torch.equal(pages.value_scale_PKS.transpose(0, 1).reshape(2, 64), scale_KT)
