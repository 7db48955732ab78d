"""The Triton kernels as an implementation of the attention contract; in Triton's interpreter they also run on a CPU.

Shape suffixes: T tokens, H query heads, K KV heads, D head dim, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
import triton

from batchkv.errors import UserError
from batchkv.kernels.attention import AttentionBackend
from batchkv.kernels.device_work import DeviceWork, WorkSizes, decode_sizes
from batchkv.kernels.extend_work import PlannedStep, extend_work
from batchkv.kernels.launch import Launch
from batchkv.kernels.quantization import SMALLEST_SCALE, is_quantized, largest_stored
from batchkv.kernels.store_kv import copy_pages, store_kv
from batchkv.kernels.tiles import Tile, load_tiles, processors_of, target_of
from batchkv.kernels.tree_attention import attend_items, merge_states
from batchkv.kernels.work_items import WorkItems, no_work, plan_work
from batchkv.kv_layout import LayerSpec
from batchkv.step import AttentionBatch

_MOST_HEADS = 16  # query heads in one tile: what the smallest one holds
_PROGRAMS_PER_PROCESSOR = 8
_MOST_PROGRAMS = 1 << 16
_STORED_VECTORS = 16  # by one program
_COPIED_SLOTS, _COPIED_ELEMENTS = 4, 512  # by one program at a time
_MERGED_HEADS = 16


@dataclass(frozen=True, slots=True)
class TritonKV:
    """Keys and values of one layer by slot: [S, K, D]; with int8 and fp8 a scale for each vector, fp32 [S, K]."""

    page_size: int
    key_SKD: torch.Tensor
    value_SKD: torch.Tensor
    key_scale_SK: torch.Tensor | None
    value_scale_SK: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TritonWorkPlan:
    """What all layers of a kind do in one step.

    Attributes:
        tiles: the variants of the kernel, one launch each.
        heads: query heads in one item.
        window: of the layers.
        precision: of products in fp32.
        work: the items, on the device.
    """

    tiles: tuple[Tile, ...]
    heads: int
    window: int | None
    precision: str
    work: DeviceWork


class TritonAttention(AttentionBackend[TritonKV, TritonWorkPlan]):
    """The Triton kernels on one device.

    Args:
        device: a GPU, or the CPU where Triton interprets.
    """

    name = "triton"
    is_batch_invariant = False
    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.device, self._target = device, target_of(device)
        self._table = load_tiles(self._target)
        self._processors = processors_of(device)
        self._before: dict[LayerSpec, PlannedStep] = {}

    def allocate(
        self, num_pages: int, page_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> TritonKV:
        if dtype == torch.float8_e4m3fn and not supports_fp8(self._target):
            raise UserError(f"this GPU ({self._target}) has no fp8: keep keys and values in int8 instead")
        return empty_pages(num_pages, page_size, spec, dtype, device)

    def plan(self, batch: AttentionBatch, spec: LayerSpec) -> TritonWorkPlan:
        work = self._work(batch, spec)
        plan = self._empty_plan(spec, WorkSizes.of(work))
        plan.work.load(work)
        return plan

    def decode_plan(self, rows: int, num_pages: int, page_size: int, spec: LayerSpec) -> TritonWorkPlan:
        """A plan whose arrays stay where they are, for decode steps of up to `rows` rows; at first without work.

        Args:
            num_pages: of the pool, which no step can hold more of.
        """
        tiles, heads = self._tiles(spec), heads_per_item(spec)
        sizes = decode_sizes(rows, num_pages, page_size, tiles, heads, self._items_wanted(spec))
        plan = self._empty_plan(spec, sizes)
        plan.work.load(no_work(len(plan.tiles)))
        return plan

    def reload(self, plans: Mapping[LayerSpec, TritonWorkPlan], batches: Mapping[LayerSpec, AttentionBatch]) -> bool:
        """Puts a step's work into plans made by `decode_plan`; false, and nothing done, if it does not fit."""
        works = {spec: self._work(batches[spec], spec) for spec in plans}
        if not all(plan.work.sizes.hold(WorkSizes.of(works[spec])) for spec, plan in plans.items()):
            return False
        for spec, plan in plans.items():
            plan.work.load(works[spec])
        return True

    def _tiles(self, spec: LayerSpec) -> tuple[Tile, ...]:
        return self._table.tiles(max(spec.key_dim, spec.value_dim))

    def _items_wanted(self, spec: LayerSpec) -> int:
        """So many keep the device busy."""
        return self._processors * _PROGRAMS_PER_PROCESSOR * heads_per_item(spec) // spec.num_heads

    def _empty_plan(self, spec: LayerSpec, sizes: WorkSizes) -> TritonWorkPlan:
        work = DeviceWork.allocate(sizes, self.device)
        return TritonWorkPlan(self._tiles(spec), heads_per_item(spec), spec.window, precision_on(self._target), work)

    def _work(self, batch: AttentionBatch, spec: LayerSpec) -> WorkItems:
        tiles, before = self._tiles(spec), self._before.get(spec)
        if before and before.batch is batch:  # it did not fit a graph
            return before.work
        work = extend_work(before, batch, tiles[0]) if before else None
        if work is None:
            work = plan_work(batch, tiles, heads_per_item(spec), self._items_wanted(spec))
        self._before[spec] = PlannedStep(batch, work)
        return work

    def store(self, kv: TritonKV, plan: TritonWorkPlan, key_KTD: torch.Tensor, value_KTD: torch.Tensor) -> None:
        for pool_SKD, scale_SK, new_KTD in (
            (kv.key_SKD, kv.key_scale_SK, key_KTD),
            (kv.value_SKD, kv.value_scale_SK, value_KTD),
        ):
            store_launch(pool_SKD, scale_SK, _last_dim_contiguous(new_KTD), plan.work).run()
            pools = [pool_SKD] if scale_SK is None else [pool_SKD, scale_SK]
            for pool, i in product(pools, range(plan.work.sizes.copy_rounds)):
                copy_launch(pool, kv.page_size, plan.work, i).run()

    def attend(
        self,
        kv: TritonKV,
        plan: TritonWorkPlan,
        query_HTD: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_heads, num_tokens = query_HTD.shape[:2]
        sizes, value_dim = plan.work.sizes, kv.value_SKD.shape[2]
        # zeros for tokens that fill up a step: they have no items
        out_THD = query_HTD.new_zeros(num_tokens, num_heads, value_dim)
        states = States(
            torch.empty(sizes.states, num_heads, value_dim, dtype=torch.float32, device=out_THD.device),
            torch.empty(sizes.states, num_heads, dtype=torch.float32, device=out_THD.device),
        )
        query_HTD = _last_dim_contiguous(query_HTD)
        for i in (i for i, items in enumerate(sizes.items) if items):
            attention_launch(kv, plan, i, query_HTD, out_THD, states, scale, softcap, sinks_H).run()
        if sizes.states:
            merge_launch(plan.work, states, out_THD, sinks_H).run()
        return out_THD


@dataclass(frozen=True, slots=True)
class States:
    """Partial results: fp32 [P, H, value_dim] and the log of their sums, fp32 [P, H]."""

    out_PHD: torch.Tensor
    lse_PH: torch.Tensor


def precision_on(target: str) -> str:
    """How fp32 is multiplied: on NVIDIA's GPUs by three products in TF32, which is close and does not spill."""
    return "tf32x3" if target.startswith("sm_") else "ieee"


def supports_fp8(target: str) -> bool:
    """Whether kernels can read fp8 (e4m3): NVIDIA's GPUs from sm_89 on."""
    return not target.startswith("sm_") or int(target[3:]) >= 89


def empty_pages(num_pages: int, page_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device) -> TritonKV:
    """The pages of one layer."""
    heads = (num_pages * page_size, spec.num_kv_heads)
    scales: list[torch.Tensor | None] = [None, None]
    if is_quantized(dtype):
        scales = [torch.empty(*heads, dtype=torch.float32, device=device) for _ in scales]
    return TritonKV(
        page_size,
        torch.empty(*heads, spec.key_dim, dtype=dtype, device=device),
        torch.empty(*heads, spec.value_dim, dtype=dtype, device=device),
        *scales,
    )


def heads_per_item(spec: LayerSpec) -> int:
    """Query heads packed into one item: all that share a KV head, or as large a part of them as a tile holds."""
    group = spec.num_heads // spec.num_kv_heads
    return max(n for n in range(1, min(group, _MOST_HEADS) + 1) if group % n == 0)


def attention_launch(
    kv: TritonKV,
    plan: TritonWorkPlan,
    number: int,
    query_HTD: torch.Tensor,
    out_THD: torch.Tensor,
    states: States,
    scale: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> Launch:
    """The items of tile `number`."""
    work, tile, num_heads = plan.work, plan.tiles[number], query_HTD.shape[0]
    key_dim, value_dim = kv.key_SKD.shape[2], kv.value_SKD.shape[2]
    arguments = {
        "query_ptr": query_HTD,
        "key_ptr": kv.key_SKD,
        "value_ptr": kv.value_SKD,
        "key_scale_ptr": kv.key_scale_SK,
        "value_scale_ptr": kv.value_scale_SK,
        "sinks_ptr": sinks_H,
        "out_ptr": out_THD,
        "state_out_ptr": states.out_PHD,
        "state_lse_ptr": states.lse_PH,
        "items_ptr": work.items[number],
        "num_items_ptr": work.counts[number:],
        "pages_ptr": work.pages,
        "positions_ptr": work.positions,
        "stride_query_head": query_HTD.stride(0),
        "stride_query_token": query_HTD.stride(1),
        "stride_key_slot": kv.key_SKD.stride(0),
        "stride_value_slot": kv.value_SKD.stride(0),
        "num_kv_heads": kv.key_SKD.shape[1],
        "scale": scale,
        "softcap": softcap or 0.0,
        "window": plan.window or 0,
        "GROUP": num_heads // kv.key_SKD.shape[1],
        "HEADS": plan.heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_BLOCK": block_of(key_dim),
        "VALUE_BLOCK": block_of(value_dim),
        "PAGE_SIZE": kv.page_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "HAS_WINDOW": plan.window is not None,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_SINKS": sinks_H is not None,
        "IS_QUANTIZED": kv.key_scale_SK is not None,
        "PRECISION": plan.precision,
    }
    grid = (work.sizes.items[number], num_heads // plan.heads)
    return Launch(attend_items, grid, arguments, tile.num_warps, tile.num_stages)


def merge_launch(work: DeviceWork, states: States, out_THD: torch.Tensor, sinks_H: torch.Tensor | None) -> Launch:
    """The results of tokens with several items."""
    num_heads, value_dim = out_THD.shape[1:]
    arguments = {
        "state_out_ptr": states.out_PHD,
        "state_lse_ptr": states.lse_PH,
        "sinks_ptr": sinks_H,
        "out_ptr": out_THD,
        "tokens_ptr": work.merged_tokens,
        "num_tokens_ptr": work.counts[len(work.items) :],
        "first_state_ptr": work.first_state,
        "states_ptr": work.states,
        "num_heads": num_heads,
        "VALUE_DIM": value_dim,
        "VALUE_BLOCK": block_of(value_dim),
        "BLOCK_H": _MERGED_HEADS,
        "HAS_SINKS": sinks_H is not None,
    }
    grid = (min(work.sizes.merged_tokens, _MOST_PROGRAMS), triton.cdiv(num_heads, _MERGED_HEADS))
    return Launch(merge_states, grid, arguments)


def store_launch(
    pool_SKD: torch.Tensor, scale_SK: torch.Tensor | None, new_KTD: torch.Tensor, work: DeviceWork
) -> Launch:
    """New keys or values, to their slots."""
    num_kv_heads, num_tokens, dim = new_KTD.shape
    arguments = {
        "new_ptr": new_KTD,
        "pool_ptr": pool_SKD,
        "scale_ptr": scale_SK,
        "slots_ptr": work.slots,
        "stride_new_head": new_KTD.stride(0),
        "stride_new_token": new_KTD.stride(1),
        "num_vectors": num_tokens * num_kv_heads,
        "num_kv_heads": num_kv_heads,
        "DIM": dim,
        "DIM_BLOCK": triton.next_power_of_2(dim),
        "VECTORS": _STORED_VECTORS,
        "LARGEST": largest_stored(pool_SKD.dtype),
        "SMALLEST_SCALE": SMALLEST_SCALE,
        "IS_INTEGER": not pool_SKD.dtype.is_floating_point,
    }
    return Launch(store_kv, (triton.cdiv(num_tokens * num_kv_heads, _STORED_VECTORS),), arguments)


def copy_launch(pool: torch.Tensor, page_size: int, work: DeviceWork, number: int) -> Launch:
    """Round `number` of the page copies."""
    row_elements = pool[0].numel()
    arguments = {
        "pool_ptr": pool,
        "copies_ptr": work.copies,
        "first_copy_ptr": work.copy_rounds[number:],
        "row_elements": row_elements,
        "PAGE_SIZE": page_size,
        "SLOTS": _COPIED_SLOTS,
        "BLOCK": min(_COPIED_ELEMENTS, triton.next_power_of_2(row_elements)),
    }
    grid = (min(work.sizes.copies, _MOST_PROGRAMS), triton.cdiv(row_elements, _COPIED_ELEMENTS))
    return Launch(copy_pages, grid, arguments)


def _last_dim_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def block_of(dim: int) -> int:
    """The width of a tile that holds a head: a power of two, at least what a matrix product takes."""
    return max(16, int(triton.next_power_of_2(dim)))
