"""Attention over a trie of KV pages on a GPU, in Triton: work items of (queries x keys), then a merge of their states.

A work item (`work_items`) is one interval of the step's tokens against one interval of key positions that all of them
have in their page tables: a prefill chunk and decode rows under a shared node are the same thing. A program takes one
item and one KV head. The query heads that share the KV head are packed into the rows of the tile, so that a shared key
is read once for all queries under it and all their heads.

A token with one item is written out at once. The items of other tokens leave *states*: the normalized result in fp32
and the log of the sum of exponentials, from which `merge_states` makes the result in the order of key positions.

Shape suffixes: T tokens, H query heads, K KV heads, D head dim, S slots, P states.
Rows of a tile: M = queries x heads of a group; N keys. Scores are kept in base 2: exp2 is what the hardware has.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# The largest score so far of a row that has seen no key, and the log-sum-exp of an empty state. Finite, since a
# difference of infinities is not a number.
NOTHING = tl.constexpr(-1e30)


# Numbers that differ from model to model or from launch to launch make no variants of their own.
@triton.jit(do_not_specialize=["num_kv_heads", "window"], do_not_specialize_on_alignment=["num_items_ptr"])
def attend_items(
    query_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    sinks_ptr,
    out_ptr,
    state_out_ptr,
    state_lse_ptr,
    items_ptr,
    num_items_ptr,
    pages_ptr,
    positions_ptr,
    stride_query_head,
    stride_query_token,
    stride_key_slot,
    stride_value_slot,
    num_kv_heads,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (items or more, H / HEADS). A loop over items here would have registers spilled for what stays the same.

    Args:
        query_ptr: [H, T, D], any strides but 1 between elements.
        key_ptr, value_ptr: [S, K, D] of one layer; fp32, fp16, bf16, or int8 and fp8 with scales.
        key_scale_ptr, value_scale_ptr: fp32 [S, K], read where IS_QUANTIZED.
        sinks_ptr: [H], read where HAS_SINKS, and then entered where a token has one item.
        out_ptr: [T, H, VALUE_DIM], contiguous.
        state_out_ptr, state_lse_ptr: fp32 [P, H, VALUE_DIM] and [P, H], contiguous.
        items_ptr, num_items_ptr, pages_ptr, positions_ptr: int32, see `WorkItems`.
        GROUP: query heads per KV head, of which HEADS (a divisor) go into one program.
        PRECISION: how fp32 queries are multiplied (tl.dot's input_precision).
        KEY_BLOCK, VALUE_BLOCK: the dims rounded up to powers of two.
    """
    first_head = tl.program_id(1) * HEADS
    kv_head = first_head // GROUP
    row = tl.arange(0, BLOCK_M)
    key_dim = tl.arange(0, KEY_BLOCK)
    value_dim = tl.arange(0, VALUE_BLOCK)
    head = first_head + row % HEADS

    item = tl.program_id(0)
    if item < tl.load(num_items_ptr):
        field_ptr = items_ptr + item * 8  # fields of `WorkItems.items`
        q_start = tl.load(field_ptr)
        q_len = tl.load(field_ptr + 1)
        page_start = tl.load(field_ptr + 2)
        k_lo = tl.load(field_ptr + 3)
        k_unmasked = tl.load(field_ptr + 4)
        k_hi = tl.load(field_ptr + 5)
        state = tl.load(field_ptr + 6)

        is_real = row < q_len * HEADS
        token = q_start + row // HEADS
        position = tl.load(positions_ptr + token, mask=is_real, other=0)
        query = tl.load(
            query_ptr
            + head[:, None].to(tl.int64) * stride_query_head
            + token[:, None].to(tl.int64) * stride_query_token
            + key_dim[None, :],
            mask=is_real[:, None] & (key_dim[None, :] < KEY_DIM),
            other=0.0,
        )
        # entry i of the list is the page of key position i, once divided by the page size
        page_ptr = pages_ptr + page_start - k_lo // PAGE_SIZE
        largest = tl.full([BLOCK_M], NOTHING, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if HAS_SINKS:  # noqa: SIM102  a constant of the kernel; what follows is not
            if state < 0:  # the only item of its tokens begins with what the sinks have
                largest = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
                total = tl.full([BLOCK_M], 1.0, tl.float32)
        out = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
        for k in range(k_lo, k_unmasked, BLOCK_N):
            out, total, largest = _attend_tile(
                query, position, out, total, largest, k, k_hi, page_ptr, key_ptr, value_ptr, key_scale_ptr,
                value_scale_ptr, stride_key_slot, stride_value_slot, num_kv_heads, kv_head, key_dim, value_dim,
                scale, softcap, window, KEY_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP,
                IS_QUANTIZED, PRECISION, False,
            )  # fmt: skip
        for k in range(k_unmasked, k_hi, BLOCK_N):
            out, total, largest = _attend_tile(
                query, position, out, total, largest, k, k_hi, page_ptr, key_ptr, value_ptr, key_scale_ptr,
                value_scale_ptr, stride_key_slot, stride_value_slot, num_kv_heads, kv_head, key_dim, value_dim,
                scale, softcap, window, KEY_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP,
                IS_QUANTIZED, PRECISION, True,
            )  # fmt: skip

        is_value = is_real[:, None] & (value_dim[None, :] < VALUE_DIM)
        if state < 0:
            at = (token.to(tl.int64) * tl.num_programs(1) * HEADS + head) * VALUE_DIM
            result = out / tl.where(total == 0, 1.0, total)[:, None]  # rows that are not real have seen nothing
            tl.store(out_ptr + at[:, None] + value_dim[None, :], result.to(out_ptr.dtype.element_ty), mask=is_value)
        else:
            at = (state + row // HEADS).to(tl.int64) * tl.num_programs(1) * HEADS + head
            _store_state(state_out_ptr, state_lse_ptr, at, value_dim, out, total, largest, is_real, is_value, VALUE_DIM)


@triton.jit
def _attend_tile(
    query,
    position,
    out,
    total,
    largest,
    k,
    k_hi,
    page_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    stride_key_slot,
    stride_value_slot,
    num_kv_heads,
    kv_head,
    key_dim,
    value_dim,
    scale,
    softcap,
    window,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Goes on with the online softmax of a tile of queries over the BLOCK_N keys from position `k` on.

    IS_MASKED is false where every query sees every one of these keys.
    """
    key_position = k + tl.arange(0, BLOCK_N)
    is_key = key_position < k_hi
    if IS_MASKED:
        page = tl.load(page_ptr + key_position // PAGE_SIZE, mask=is_key, other=0)
    else:
        page = tl.load(page_ptr + key_position // PAGE_SIZE)
    slot = page.to(tl.int64) * PAGE_SIZE + key_position % PAGE_SIZE

    key_ptrs = key_ptr + slot[None, :] * stride_key_slot + kv_head * KEY_DIM + key_dim[:, None]
    key = _load_vectors(key_ptrs, is_key[None, :], key_dim[:, None] < KEY_DIM, key_dim.shape[0] != KEY_DIM, IS_MASKED)
    score = tl.dot(query, key.to(query.dtype), input_precision=PRECISION) * scale
    if IS_QUANTIZED:
        key_scale = tl.load(key_scale_ptr + slot * num_kv_heads + kv_head, mask=is_key, other=0.0)
        score = score * key_scale[None, :]
    if HAS_SOFTCAP:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # softcap * tanh(score / softcap)
    score = score * LOG2E
    if IS_MASKED:
        distance = position[:, None] - key_position[None, :]
        is_visible = is_key[None, :] & (distance >= 0)
        if HAS_WINDOW:
            is_visible = is_visible & (distance < window)
        score = tl.where(is_visible, score, NOTHING)
    new_largest = tl.maximum(largest, tl.max(score, 1))
    weight = tl.exp2(score - new_largest[:, None])
    if IS_MASKED:
        weight = tl.where(is_visible, weight, 0.0)  # where no key is visible, the largest score is of none
    kept = tl.exp2(largest - new_largest)
    total = total * kept + tl.sum(weight, 1)

    if IS_QUANTIZED:
        value_scale = tl.load(value_scale_ptr + slot * num_kv_heads + kv_head, mask=is_key, other=0.0)
        weight = weight * value_scale[None, :]
    value_ptrs = value_ptr + slot[:, None] * stride_value_slot + kv_head * VALUE_DIM + value_dim[None, :]
    is_dim = value_dim[None, :] < VALUE_DIM
    value = _load_vectors(value_ptrs, is_key[:, None], is_dim, value_dim.shape[0] != VALUE_DIM, IS_MASKED)
    weighted = tl.dot(weight.to(query.dtype), value.to(query.dtype), input_precision=PRECISION)
    return out * kept[:, None] + weighted, total, new_largest


@triton.jit
def _load_vectors(ptrs, is_slot, is_dim, HAS_PADDING: tl.constexpr, IS_MASKED: tl.constexpr):
    """Keys or values, [D, N] or [N, D], with zeros where there are none; masks only where they are needed."""
    if IS_MASKED:
        vectors = tl.load(ptrs, mask=is_slot & is_dim, other=0.0)
    elif HAS_PADDING:
        vectors = tl.load(ptrs, mask=is_dim, other=0.0)
    else:
        vectors = tl.load(ptrs)
    return vectors


@triton.jit
def _store_state(out_ptr, lse_ptr, at, value_dim, out, total, largest, is_real, is_value, VALUE_DIM: tl.constexpr):
    """What a tile of queries has of the keys of its item, as states `at` [M]."""
    has_seen = total > 0
    lse = tl.where(has_seen, (largest + tl.log2(tl.where(has_seen, total, 1.0))) * LN2, NOTHING)
    # a row that is not a number has no positive total; it must stay not a number
    lse = tl.where(total == total, lse, total)
    result = out / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(lse_ptr + at, lse, mask=is_real)
    tl.store(out_ptr + at[:, None] * VALUE_DIM + value_dim[None, :], result, mask=is_value)


@triton.jit(do_not_specialize=["num_heads"], do_not_specialize_on_alignment=["num_tokens_ptr"])
def merge_states(
    state_out_ptr,
    state_lse_ptr,
    sinks_ptr,
    out_ptr,
    tokens_ptr,
    num_tokens_ptr,
    first_state_ptr,
    states_ptr,
    num_heads,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid (programs, blocks of heads). Token `tokens[i]` has the states `states[first_state[i] : first_state[i + 1]]`.

    They are merged in this order, which is that of the key positions they cover: with o_i the result over some keys
    and lse_i the log of the sum of their exponentials, `lse = log sum exp(lse_i)`, `o = sum exp(lse_i - lse) o_i`.
    A sink is a state without a value, and enters once, here.
    """
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < num_heads
    value_dim = tl.arange(0, VALUE_BLOCK)
    is_value = is_head[:, None] & (value_dim[None, :] < VALUE_DIM)
    for i in range(tl.program_id(0), tl.load(num_tokens_ptr), tl.num_programs(0)):
        if HAS_SINKS:
            largest = tl.load(sinks_ptr + head, mask=is_head, other=0.0).to(tl.float32)
            total = tl.full([BLOCK_H], 1.0, tl.float32)
        else:
            largest = tl.full([BLOCK_H], NOTHING, tl.float32)
            total = tl.zeros([BLOCK_H], tl.float32)
        out = tl.zeros([BLOCK_H, VALUE_BLOCK], tl.float32)
        for at in range(tl.load(first_state_ptr + i), tl.load(first_state_ptr + i + 1)):
            state = tl.load(states_ptr + at).to(tl.int64) * num_heads + head
            lse = tl.load(state_lse_ptr + state, mask=is_head, other=0.0)
            partial = tl.load(state_out_ptr + state[:, None] * VALUE_DIM + value_dim[None, :], mask=is_value, other=0.0)
            new_largest = tl.maximum(largest, lse)
            kept = tl.exp2((largest - new_largest) * LOG2E)
            weight = tl.where(lse > NOTHING, tl.exp2((lse - new_largest) * LOG2E), 0.0)
            weight = tl.where(lse == lse, weight, lse)
            total = total * kept + weight
            out = out * kept[:, None] + partial * weight[:, None]
            largest = new_largest
        token = tl.load(tokens_ptr + i).to(tl.int64)
        result = out / total[:, None]
        tl.store(
            out_ptr + (token * num_heads + head[:, None]) * VALUE_DIM + value_dim[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=is_value,
        )
