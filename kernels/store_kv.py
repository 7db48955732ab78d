"""Writing keys and values to their pages on a GPU, in Triton, and copying pages of a fork.

Shape suffixes: T tokens, K KV heads, D head dim, S slots.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_vectors", "num_kv_heads"])
def store_kv(
    new_ptr,
    pool_ptr,
    scale_ptr,
    slots_ptr,
    stride_new_head,
    stride_new_token,
    num_vectors,
    num_kv_heads,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VECTORS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    IS_INTEGER: tl.constexpr,
):
    """Writes [K, T, D] keys (or values) to slots `slots[t]` of a pool [S, K, D]; slot -1 is nowhere.

    Grid (T * K / VECTORS): a program stores VECTORS of the `num_vectors` = T * K vectors.

    Where LARGEST is not 0, each vector is stored as `x / scale` with `scale = max |x| / LARGEST` beside it, fp32
    [S, K], rounded to the nearest integer if IS_INTEGER: the arithmetic of `quantization.quantize`, to the bit.
    """
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    token, head = vector // num_kv_heads, vector % num_kv_heads
    slot = tl.load(slots_ptr + token, mask=vector < num_vectors, other=-1).to(tl.int64)
    is_stored = slot >= 0
    dim = tl.arange(0, DIM_BLOCK)
    is_element = is_stored[:, None] & (dim[None, :] < DIM)
    from_ = head.to(tl.int64) * stride_new_head + token.to(tl.int64) * stride_new_token
    new = tl.load(new_ptr + from_[:, None] + dim[None, :], mask=is_element, other=0.0)
    to = slot * num_kv_heads + head
    if LARGEST != 0:
        x = new.to(tl.float32)
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), LARGEST), SMALLEST_SCALE)
        is_broken = tl.max((x - x != 0).to(tl.int32), 1) > 0  # infinities and what is not a number
        scale = tl.where(is_broken, float("nan"), scale)  # they must show in every result
        x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        x = _nearest_integer(x, 12582912.0) if IS_INTEGER else _nearest_e4m3(x)
        new = x.to(pool_ptr.dtype.element_ty)
        tl.store(scale_ptr + to, scale, mask=is_stored)
    tl.store(pool_ptr + to[:, None] * DIM + dim[None, :], new.to(pool_ptr.dtype.element_ty), mask=is_element)


@triton.jit
def _nearest_integer(x, magic):
    """With 1.5 * 2^23 added and taken away, nothing is left behind the point: ties go to even."""
    return (x + magic) - magic


@triton.jit
def _nearest_e4m3(x):
    """fp32 rounded to what fp8 (e4m3) can hold, ties to even: then the conversion is exact, however a target rounds."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)  # 3 bits of mantissa
    subnormal = _nearest_integer(x, 24576.0)  # multiples of 2^-9: 1.5 * 2^(23 - 9)
    rounded = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
    return tl.where(x == x, rounded, x)


@triton.jit(do_not_specialize_on_alignment=["first_copy_ptr"])
def copy_pages(
    pool_ptr,
    copies_ptr,
    first_copy_ptr,
    row_elements,
    PAGE_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (programs, blocks of a slot's elements): the first `num_slots` slots of page `src` go to page `dst`.

    Args:
        pool_ptr: [S, ...], `row_elements` of them in every slot.
        copies_ptr: int32 [copies, 3] of (src, dst, num_slots).
        first_copy_ptr: int32 [2], which of the copies to make: those that do not read what another one writes.
    """
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_element = element < row_elements
    end = tl.load(first_copy_ptr + 1)
    for copy in range(tl.load(first_copy_ptr) + tl.program_id(0), end, tl.num_programs(0)):
        src = tl.load(copies_ptr + copy * 3).to(tl.int64) * PAGE_SIZE
        dst = tl.load(copies_ptr + copy * 3 + 1).to(tl.int64) * PAGE_SIZE
        num_slots = tl.load(copies_ptr + copy * 3 + 2)
        for first in range(0, num_slots, SLOTS):
            slot = (first + tl.arange(0, SLOTS))[:, None]
            is_moved = (slot < num_slots) & is_element[None, :]
            moved = tl.load(pool_ptr + (src + slot) * row_elements + element[None, :], mask=is_moved)
            tl.store(pool_ptr + (dst + slot) * row_elements + element[None, :], moved, mask=is_moved)
