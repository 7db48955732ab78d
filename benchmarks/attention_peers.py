"""batchkv's Triton kernels and what they are held against, each as a function of the inputs that returns a call.

Whatever an implementation can do once for all layers of a step (plans, masks, page tables) is done before, and not
timed. Nor is the gathering of keys for those that cannot read pages, which they would have to do in every layer.

Shape suffixes: T tokens, H query heads, K KV heads, D head dim, R rows, Q queries and L keys of a row, P pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from benchmarks.attention_cases import PAGE_SIZE, Inputs, page_rows

Attend = Callable[[], torch.Tensor]  # [T, H, D]
Prepare = Callable[[Inputs], Attend]

FLASH_PAGE = 256  # flash-attn takes pages of multiples of this
_WORKSPACE_BYTES = 256 << 20  # of FlashInfer, twice what its documentation asks for


class NotComparedError(Exception):
    """What an implementation does not offer."""


def batchkv(inputs: Inputs) -> Attend:
    from batchkv.kernels.triton_attention import TritonAttention, TritonKV

    backend = TritonAttention(inputs.device)
    kv = TritonKV(PAGE_SIZE, inputs.key_SKD, inputs.value_SKD, inputs.key_scale_SK, inputs.value_scale_SK)
    plan = backend.plan(inputs.batch, inputs.shape.spec)
    query_HTD = inputs.query_THD.transpose(0, 1)  # as a model's projections leave it
    return lambda: backend.attend(kv, plan, query_HTD, scale=inputs.shape.scale)


def sdpa(inputs: Inputs) -> Attend:
    """torch's, every row over keys of its own."""
    from torch.nn.attention.bias import causal_lower_right

    _refuse_quantized(inputs)
    case, shape = inputs.case, inputs.shape
    slots_RL = inputs.slots()
    key_RKLD = inputs.key_SKD[slots_RL].transpose(1, 2)
    value_RKLD = inputs.value_SKD[slots_RL].transpose(1, 2)
    query_RHQD = inputs.query_THD.view(case.rows, case.queries, shape.heads, shape.head_dim).transpose(1, 2)
    options: dict[str, Any] = {"scale": shape.scale, "enable_gqa": shape.heads != shape.kv_heads}
    if case.queries > 1:
        options["attn_mask"] = causal_lower_right(case.queries, slots_RL.shape[1])

    def attend() -> torch.Tensor:
        out_RHQD = functional.scaled_dot_product_attention(query_RHQD, key_RKLD, value_RKLD, **options)
        return out_RHQD.transpose(1, 2).flatten(0, 1)

    return attend


def flex(inputs: Inputs) -> Attend:
    """torch's FlexAttention over the trie as one sequence, its block mask the sharing; compiled on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _refuse_quantized(inputs)
    case, shape, device = inputs.case, inputs.shape, inputs.device
    slots_RL, row = inputs.slots(), torch.arange(case.rows, device=device)
    slots = torch.cat([slots_RL[0, : case.prefix], slots_RL[:, case.prefix :].flatten()])
    everybody = torch.full((case.prefix,), -1, device=device)
    row_of_key = torch.cat([everybody, row.repeat_interleave(case.own)])
    own_positions = torch.arange(case.prefix, case.prefix + case.own, device=device)
    position_of_key = torch.cat([torch.arange(case.prefix, device=device), own_positions.repeat(case.rows)])
    row_of_query = row.repeat_interleave(case.queries)
    position_of_query = own_positions[-case.queries :].repeat(case.rows)

    def sees(_: torch.Tensor, __: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_shared = row_of_key[key] < 0
        is_own = row_of_key[key] == row_of_query[query]
        return (is_shared | is_own) & (position_of_key[key] <= position_of_query[query])

    mask = create_block_mask(sees, None, None, len(row_of_query), len(row_of_key), device=device.type)
    key_1KLD, value_1KLD = (
        pool_SKD[slots].transpose(0, 1).contiguous().unsqueeze(0) for pool_SKD in (inputs.key_SKD, inputs.value_SKD)
    )
    query_1HTD = inputs.query_THD.transpose(0, 1).contiguous().unsqueeze(0)
    run: Any = flex_attention
    if device.type == "cuda":
        torch.compiler.reset()  # every case is a shape of its own, and only a few are compiled otherwise
        run = torch.compile(flex_attention, dynamic=False)
    gqa = shape.heads != shape.kv_heads

    def attend() -> torch.Tensor:
        out_1HTD: torch.Tensor = run(
            query_1HTD, key_1KLD, value_1KLD, block_mask=mask, scale=shape.scale, enable_gqa=gqa
        )
        return out_1HTD[0].transpose(0, 1)

    return attend


def flashinfer(inputs: Inputs) -> Attend:
    """Cascade attention over the same pages: the prefix as one level, what rows have of their own as another."""
    import flashinfer as library

    _refuse_quantized(inputs)
    case, shape, device = inputs.case, inputs.shape, inputs.device
    shared, own = page_rows(inputs)
    levels = [(1, torch.from_numpy(shared), case.prefix)] if case.prefix else []
    levels.append((case.rows, torch.from_numpy(own).flatten(), case.own))
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = library.MultiLevelCascadeAttentionWrapper(len(levels), workspace, "NHD")
    wrapper.plan(
        [_ends(count, case.rows * case.queries // count, device) for count, _, _ in levels],
        [_ends(count, len(pages) // count, device) for count, pages, _ in levels],
        [pages.int().to(device) for _, pages, _ in levels],
        [_int32([(tokens - 1) % PAGE_SIZE + 1] * count, device) for count, _, tokens in levels],
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        PAGE_SIZE,
        causal=True,  # of the last level
        sm_scale=shape.scale,
        q_data_type=shape.dtype,
        kv_data_type=shape.kv_dtype,
    )
    pages = tuple(pool.view(-1, PAGE_SIZE, *pool.shape[1:]) for pool in (inputs.key_SKD, inputs.value_SKD))

    def attend() -> torch.Tensor:
        out_THD: torch.Tensor = wrapper.run(inputs.query_THD, pages)
        return out_THD

    return attend


def flash_attn(inputs: Inputs) -> Attend:
    """flash-attn 2, which reads shared pages for every row; its pages are larger, so keys are copied beforehand."""
    from flash_attn import flash_attn_with_kvcache

    return _flash(inputs, flash_attn_with_kvcache, "block_table")


def flash_attn_3(inputs: Inputs) -> Attend:
    """The same of flash-attn 3, which is installed by itself."""
    from flash_attn_interface import flash_attn_with_kvcache

    return _flash(inputs, flash_attn_with_kvcache, "page_table")


def _flash(inputs: Inputs, function: Any, table_name: str) -> Attend:
    _refuse_quantized(inputs)
    case, shape, device = inputs.case, inputs.shape, inputs.device
    slots, table = flash_pages(inputs)
    key_PSKD, value_PSKD = (pool[slots].view(-1, FLASH_PAGE, *pool.shape[1:]) for pool in _pools(inputs))
    query_RQHD = inputs.query_THD.view(case.rows, case.queries, shape.heads, shape.head_dim)
    options = {
        "cache_seqlens": _int32([case.prefix + case.own] * case.rows, device),
        table_name: table,
        "softmax_scale": shape.scale,
        "causal": True,
    }

    def attend() -> torch.Tensor:
        out_RQHD: torch.Tensor = function(query_RQHD, key_PSKD, value_PSKD, **options)
        return out_RQHD.flatten(0, 1)

    return attend


def flash_pages(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of FLASH_PAGE: int64, which slot each of their entries is a copy of; and int32 [R, pages] of each row."""
    case = inputs.case
    if case.prefix % FLASH_PAGE:
        raise NotComparedError(f"pages of {FLASH_PAGE} do not fit a prefix of {case.prefix}")
    slots_RL = inputs.slots()
    shared_pages, own_pages = case.prefix // FLASH_PAGE, math.ceil(case.own / FLASH_PAGE)
    own_RL = functional.pad(slots_RL[:, case.prefix :], (0, own_pages * FLASH_PAGE - case.own))
    slots = torch.cat([slots_RL[0, : case.prefix], own_RL.flatten()])
    shared_RP = torch.arange(shared_pages).expand(case.rows, -1)
    own_RP = shared_pages + torch.arange(case.rows * own_pages).view(case.rows, own_pages)
    return slots, torch.cat([shared_RP, own_RP], dim=1).int().to(inputs.device)


def _pools(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs.key_SKD, inputs.value_SKD


def _refuse_quantized(inputs: Inputs) -> None:
    if inputs.key_scale_SK is not None:
        raise NotComparedError("no int8 KV with a scale for each vector")


def _ends(count: int, length: int, device: torch.device) -> torch.Tensor:
    """Bounds of `count` runs of equal length: int32 [count + 1]."""
    return torch.arange(count + 1, dtype=torch.int32, device=device) * length


def _int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


BATCHKV = "batchkv"
# the one that compiles for a while comes last
IMPLEMENTATIONS: dict[str, Prepare] = {
    BATCHKV: batchkv,
    "SDPA": sdpa,
    "FlashInfer": flashinfer,
    "flash-attn": flash_attn,
    "flash-attn 3": flash_attn_3,
    "FlexAttention": flex,
}
