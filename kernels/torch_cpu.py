"""Attention with torch operations: each shared segment of keys is read once for all queries under it.

Pages are kept as [K, pages, page_size, D], so that a run of pages is gathered into [K, keys, D] by one `index_select`.
The segments of a step (`shared_segments`) are cut into tiles of queries x keys, on a grid of absolute positions:

- a *wide* tile has many queries: one matrix product per KV head;
- *narrow* tiles (decode rows, short leaves) of similar size go together into one batched product.

Every tile gives partial states, merged per query in the order of positions (`merge_states`). Scores are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchkv.kernels.attention import AttentionBackend, copied_slots
from batchkv.kernels.merge_states import MergePlan, merge_states, plan_merge
from batchkv.kernels.quantization import as_stored, is_quantized
from batchkv.kernels.shared_segments import SharedSegments, find_shared_segments, reduce_over, repeat
from batchkv.kv_layout import LayerSpec
from batchkv.step import AttentionBatch

KEYS_PER_TILE = 512
QUERIES_PER_TILE = 128
MOST_NARROW_QUERIES = 32
_NARROW_BYTES = 8 << 20  # narrow tiles computed at once hold at most this much in scores and gathered keys and values
_SMALLEST = -1e30  # stands for the largest score of a query that sees no key of a tile

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TorchKV:
    """Pages of one layer, [K, pages, page_size, D], and their scales, [K, pages, page_size], if they are quantized."""

    key_KPSD: torch.Tensor
    value_KPSD: torch.Tensor
    key_scale_KPS: torch.Tensor | None
    value_scale_KPS: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pieces of (queries x keys); int64 [tiles] each.

    Attributes:
        row: a row whose page table holds the keys.
        q_lo, q_hi: queries `[q_lo, q_hi)` of the step.
        k_lo, k_hi: key positions `[k_lo, k_hi)`.
    """

    row: Int64Array
    q_lo: Int64Array
    q_hi: Int64Array
    k_lo: Int64Array
    k_hi: Int64Array

    def __len__(self) -> int:
        return len(self.row)

    def take(self, index: Int64Array | npt.NDArray[np.bool_]) -> Tiles:
        return Tiles(self.row[index], self.q_lo[index], self.q_hi[index], self.k_lo[index], self.k_hi[index])


@dataclass(frozen=True, slots=True)
class WideTile:
    """One tile with many queries; its states are `[state, state + q_hi - q_lo)`.

    Attributes:
        pages: int64 [pages], the pages that hold its keys.
        first_slot: where in the first page its first key lies.
        hidden_QL: bool [queries, keys], keys that a query must not see; None if it sees all.
    """

    q_lo: int
    q_hi: int
    num_keys: int
    state: int
    pages: torch.Tensor
    first_slot: int
    hidden_QL: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class NarrowTiles:
    """B tiles padded to the same Q queries and L keys; their states are `[state, state + B * Q)`.

    Attributes:
        queries_BQ: int64, the token of each query; padding repeats a real one.
        pages: int64 [B * pages per tile].
        hidden_BQL: bool, keys that a query must not see, padding included.
        unused_BL: bool, slots that hold no key of the tile.
    """

    state: int
    queries_BQ: torch.Tensor
    pages: torch.Tensor
    hidden_BQL: torch.Tensor
    unused_BL: torch.Tensor

    def split(self, most: int) -> Iterator[NarrowTiles]:
        """At most `most` tiles at a time."""
        num_tiles, num_queries = self.queries_BQ.shape
        pages_per_tile = len(self.pages) // num_tiles
        for lo in range(0, num_tiles, most):
            yield NarrowTiles(
                self.state + lo * num_queries,
                self.queries_BQ[lo : lo + most],
                self.pages[lo * pages_per_tile : (lo + most) * pages_per_tile],
                self.hidden_BQL[lo : lo + most],
                self.unused_BL[lo : lo + most],
            )


@dataclass(frozen=True, slots=True)
class TorchWorkPlan:
    """What all layers of a group do in one step."""

    slots: torch.Tensor
    copied: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    wide: tuple[WideTile, ...]
    narrow: tuple[NarrowTiles, ...]
    num_states: int
    merge: MergePlan
    keys_read: int


class TorchAttention(AttentionBackend[TorchKV, TorchWorkPlan]):
    name = "torch"
    is_batch_invariant = False

    def allocate(
        self, num_pages: int, page_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> TorchKV:
        shape = (spec.num_kv_heads, num_pages, page_size)  # not filled: a page costs memory when it is first written
        scales = (torch.empty(shape, device=device) if is_quantized(dtype) else None for _ in range(2))
        return TorchKV(
            torch.empty(*shape, spec.key_dim, dtype=dtype, device=device),
            torch.empty(*shape, spec.value_dim, dtype=dtype, device=device),
            *scales,
        )

    def plan(self, batch: AttentionBatch, spec: LayerSpec) -> TorchWorkPlan:
        tiles = cut_into_tiles(find_shared_segments(batch), batch)
        is_wide = tiles.q_hi - tiles.q_lo > MOST_NARROW_QUERIES
        planner = _StatePlanner()
        wide = tuple(_wide_tile(tiles.take(np.array([i])), batch, planner) for i in np.flatnonzero(is_wide))
        narrow = tuple(_narrow_tiles(same, batch, planner) for same in _by_padded_size(tiles.take(~is_wide), batch))
        copied = (copied_slots(copies, batch.page_size) for copies in batch.copies)
        return TorchWorkPlan(
            slots=torch.from_numpy(batch.slots),
            copied=tuple((torch.from_numpy(src), torch.from_numpy(dst)) for src, dst in copied),
            wide=wide,
            narrow=narrow,
            num_states=planner.num_states,
            merge=planner.merge_plan(),
            keys_read=int((tiles.k_hi - tiles.k_lo).sum()),
        )

    def store(self, kv: TorchKV, plan: TorchWorkPlan, key_KTD: torch.Tensor, value_KTD: torch.Tensor) -> None:
        for pool_KPSD, scale_KPS, new_KTD in (
            (kv.key_KPSD, kv.key_scale_KPS, key_KTD),
            (kv.value_KPSD, kv.value_scale_KPS, value_KTD),
        ):
            for pool_KPS, new_KT in as_stored(pool_KPSD, scale_KPS, new_KTD):
                _write(pool_KPS, plan, new_KT)

    def attend(
        self,
        kv: TorchKV,
        plan: TorchWorkPlan,
        query_HTD: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_kv_heads = kv.key_KPSD.shape[0]
        num_tokens, head_dim = query_HTD.shape[1:]
        query_TKGD = query_HTD.transpose(0, 1).reshape(num_tokens, num_kv_heads, -1, head_dim).float() * scale
        states = _States.allocate(plan.num_states, query_TKGD, kv.value_KPSD.shape[-1])
        for wide in plan.wide:
            _attend_wide(kv, wide, query_TKGD, softcap, states)
        for narrow in plan.narrow:
            _attend_narrow(kv, narrow, query_TKGD, softcap, states)
        out_THD = merge_states(
            plan.merge,
            states.max_PKG.flatten(1),
            states.sum_PKG.flatten(1),
            states.out_PKGD.flatten(1, 2),
            sinks_H,
        )
        return out_THD.to(query_HTD.dtype)


@dataclass(frozen=True, slots=True)
class _States:
    """Partial states of all tiles of a layer: P states, K KV heads, G query heads each."""

    max_PKG: torch.Tensor
    sum_PKG: torch.Tensor
    out_PKGD: torch.Tensor

    @staticmethod
    def allocate(num_states: int, query_TKGD: torch.Tensor, value_dim: int) -> _States:
        heads = query_TKGD.shape[1:3]
        return _States(
            query_TKGD.new_empty(num_states, *heads),
            query_TKGD.new_empty(num_states, *heads),
            query_TKGD.new_empty(num_states, *heads, value_dim),
        )


class _StatePlanner:
    """Hands out places for partial states and remembers whose they are."""

    def __init__(self) -> None:
        self.num_states = 0
        self._query: list[Int64Array] = []
        self._state: list[Int64Array] = []
        self._position: list[Int64Array] = []

    def place(self, query_BQ: Int64Array, is_real_BQ: npt.NDArray[np.bool_], position_B: Int64Array) -> int:
        """First of `query_BQ.size` places; those that are not real are never merged."""
        first, self.num_states = self.num_states, self.num_states + query_BQ.size
        places = first + np.arange(query_BQ.size).reshape(query_BQ.shape)
        positions = np.broadcast_to(position_B[:, None], query_BQ.shape)
        self._query.append(query_BQ[is_real_BQ])
        self._state.append(places[is_real_BQ])
        self._position.append(positions[is_real_BQ])
        return first

    def merge_plan(self) -> MergePlan:
        return plan_merge(*(np.concatenate(parts) for parts in (self._query, self._state, self._position)))


def cut_into_tiles(segments: SharedSegments, batch: AttentionBatch) -> Tiles:
    """Tiles of at most QUERIES_PER_TILE x KEYS_PER_TILE, none of which is entirely above the diagonal.

    Keys are cut at multiples of KEYS_PER_TILE of their absolute position, whatever is shared.
    """
    tiles = Tiles(segments.row, segments.q_lo, segments.q_hi, segments.k_lo, segments.k_hi)
    first, last = tiles.k_lo // KEYS_PER_TILE, (tiles.k_hi - 1) // KEYS_PER_TILE
    source, piece = repeat(last - first + 1)
    block = (first[source] + piece) * KEYS_PER_TILE
    tiles = tiles.take(source)
    k_lo, k_hi = np.maximum(tiles.k_lo, block), np.minimum(tiles.k_hi, block + KEYS_PER_TILE)
    source, piece = repeat(-(-(tiles.q_hi - tiles.q_lo) // QUERIES_PER_TILE))
    tiles = tiles.take(source)
    q_lo = tiles.q_lo + piece * QUERIES_PER_TILE
    tiles = Tiles(tiles.row, q_lo, np.minimum(tiles.q_hi, q_lo + QUERIES_PER_TILE), k_lo[source], k_hi[source])
    last_position = reduce_over(np.maximum, batch.query_positions, tiles.q_lo, tiles.q_hi)
    return tiles.take(tiles.k_lo <= last_position)


def _hidden(query_positions: Int64Array, key_positions: Int64Array, window: int | None) -> npt.NDArray[np.bool_]:
    """bool [..., Q, L]: keys after the query or behind its window."""
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    hidden: npt.NDArray[np.bool_] = distance < 0
    return hidden if window is None else hidden | (distance >= window)


def _wide_tile(tile: Tiles, batch: AttentionBatch, planner: _StatePlanner) -> WideTile:
    row, q_lo, q_hi, k_lo, k_hi = (int(value[0]) for value in (tile.row, tile.q_lo, tile.q_hi, tile.k_lo, tile.k_hi))
    queries = np.arange(q_lo, q_hi)[None]
    state = planner.place(queries, np.ones_like(queries, bool), tile.k_lo)
    hidden = _hidden(batch.query_positions[q_lo:q_hi], np.arange(k_lo, k_hi), batch.window)
    first_page, last_page = k_lo // batch.page_size, (k_hi - 1) // batch.page_size
    pages = batch.page_table[row, first_page : last_page + 1].astype(np.int64)
    return WideTile(
        q_lo=q_lo,
        q_hi=q_hi,
        num_keys=k_hi - k_lo,
        state=state,
        pages=torch.from_numpy(pages),
        first_slot=k_lo % batch.page_size,
        hidden_QL=torch.from_numpy(hidden) if hidden.any() else None,
    )


def _by_padded_size(tiles: Tiles, batch: AttentionBatch) -> Iterator[Tiles]:
    """Tiles that are padded to the same powers of two of queries and pages."""
    if len(tiles) == 0:
        return
    num_pages = (tiles.k_hi - 1) // batch.page_size - tiles.k_lo // batch.page_size + 1
    size = np.stack([_log2_ceil(tiles.q_hi - tiles.q_lo), _log2_ceil(num_pages)], axis=1)
    sizes, which = np.unique(size, axis=0, return_inverse=True)
    for i in range(len(sizes)):
        yield tiles.take(which.ravel() == i)


def _log2_ceil(values: Int64Array) -> Int64Array:
    return np.ceil(np.log2(values)).astype(np.int64)


def _narrow_tiles(tiles: Tiles, batch: AttentionBatch, planner: _StatePlanner) -> NarrowTiles:
    """Tiles of one padded size. Padding repeats a real query or page and is hidden or never merged."""
    num_queries = tiles.q_hi - tiles.q_lo
    first_page, last_page = tiles.k_lo // batch.page_size, (tiles.k_hi - 1) // batch.page_size
    query_number = np.arange(1 << int(_log2_ceil(num_queries).max()))
    page_number = np.arange(1 << int(_log2_ceil(last_page - first_page + 1).max()))

    queries = tiles.q_lo[:, None] + np.minimum(query_number, num_queries[:, None] - 1)
    state = planner.place(queries, query_number < num_queries[:, None], tiles.k_lo)
    pages = batch.page_table[tiles.row[:, None], np.minimum(first_page[:, None] + page_number, last_page[:, None])]
    positions = first_page[:, None] * batch.page_size + np.arange(len(page_number) * batch.page_size)
    unused = (positions < tiles.k_lo[:, None]) | (positions >= tiles.k_hi[:, None])
    hidden = _hidden(batch.query_positions[queries], positions, batch.window) | unused[:, None, :]
    return NarrowTiles(
        state=state,
        queries_BQ=torch.from_numpy(queries),
        pages=torch.from_numpy(pages.astype(np.int64).ravel()),
        hidden_BQL=torch.from_numpy(hidden),
        unused_BL=torch.from_numpy(unused),
    )


def _write(pool_KPS: torch.Tensor, plan: TorchWorkPlan, new_KT: torch.Tensor) -> None:
    """To the slots of the step's tokens, then makes the page copies."""
    slots_KS = pool_KPS.flatten(1, 2)
    slots_KS[:, plan.slots] = new_KT
    for src, dst in plan.copied:
        slots_KS[:, dst] = slots_KS[:, src]


def _attend_wide(kv: TorchKV, tile: WideTile, query_TKGD: torch.Tensor, softcap: float | None, states: _States) -> None:
    keys = slice(tile.first_slot, tile.first_slot + tile.num_keys)

    def gather(pool_KPS: torch.Tensor) -> torch.Tensor:
        return pool_KPS.index_select(1, tile.pages).flatten(1, 2)[:, keys].float()

    def gather_scales(scale_KPS: torch.Tensor | None) -> torch.Tensor | None:
        return None if scale_KPS is None else gather(scale_KPS)

    query_KQGD = query_TKGD[tile.q_lo : tile.q_hi].transpose(0, 1)
    num_queries, group = query_KQGD.shape[1:3]
    scores_KXL = torch.bmm(query_KQGD.flatten(1, 2), gather(kv.key_KPSD).transpose(1, 2))
    scores_KXL = _capped(_scaled(scores_KXL, gather_scales(kv.key_scale_KPS)), softcap)
    if tile.hidden_QL is not None:
        scores_KQGL = scores_KXL.view(-1, num_queries, group, tile.num_keys)
        scores_KQGL.masked_fill_(tile.hidden_QL.unsqueeze(1), -torch.inf)
    max_KX, sum_KX, out_KXD = _partial_softmax(scores_KXL, gather(kv.value_KPSD), gather_scales(kv.value_scale_KPS))
    at = slice(tile.state, tile.state + num_queries)
    states.max_PKG[at] = max_KX.view(-1, num_queries, group).transpose(0, 1)
    states.sum_PKG[at] = sum_KX.view(-1, num_queries, group).transpose(0, 1)
    states.out_PKGD[at] = out_KXD.view(-1, num_queries, group, out_KXD.shape[2]).transpose(0, 1)


def _attend_narrow(
    kv: TorchKV, tiles: NarrowTiles, query_TKGD: torch.Tensor, softcap: float | None, states: _States
) -> None:
    num_kv_heads, group, key_dim = query_TKGD.shape[1:]
    num_queries, num_keys = tiles.hidden_BQL.shape[1:]
    bytes_per_tile = 4 * num_kv_heads * num_keys * (group * num_queries + key_dim + kv.value_KPSD.shape[-1])
    for part in tiles.split(max(1, _NARROW_BYTES // bytes_per_tile)):
        _attend_narrow_at_once(kv, part, query_TKGD, softcap, states)


def _attend_narrow_at_once(
    kv: TorchKV, tiles: NarrowTiles, query_TKGD: torch.Tensor, softcap: float | None, states: _States
) -> None:
    num_tiles, num_queries, num_keys = tiles.hidden_BQL.shape
    num_kv_heads, group = query_TKGD.shape[1:3]

    def gather(pool_KPSD: torch.Tensor) -> torch.Tensor:
        pages_KPSD = pool_KPSD.index_select(1, tiles.pages).float()
        pages_KBLD = pages_KPSD.view(num_kv_heads, num_tiles, num_keys, -1)
        return pages_KBLD.masked_fill_(tiles.unused_BL.unsqueeze(-1), 0.0).flatten(0, 1)

    def gather_scales(scale_KPS: torch.Tensor | None) -> torch.Tensor | None:
        return None if scale_KPS is None else gather(scale_KPS.unsqueeze(-1)).squeeze(-1)

    query_BQKGD = query_TKGD[tiles.queries_BQ]
    query_ZXD = query_BQKGD.permute(2, 0, 1, 3, 4).flatten(0, 1).flatten(1, 2)  # Z = K * B, X = Q * G
    scores_ZXL = torch.bmm(query_ZXD, gather(kv.key_KPSD).transpose(1, 2))
    scores_ZXL = _capped(_scaled(scores_ZXL, gather_scales(kv.key_scale_KPS)), softcap)
    scores_KBQGL = scores_ZXL.view(num_kv_heads, num_tiles, num_queries, group, num_keys)
    scores_KBQGL.masked_fill_(tiles.hidden_BQL.unsqueeze(2), -torch.inf)
    max_ZX, sum_ZX, out_ZXD = _partial_softmax(scores_ZXL, gather(kv.value_KPSD), gather_scales(kv.value_scale_KPS))
    at = slice(tiles.state, tiles.state + num_tiles * num_queries)

    def by_state(result_ZX: torch.Tensor) -> torch.Tensor:
        by_head = result_ZX.view(num_kv_heads, num_tiles * num_queries, group, *result_ZX.shape[2:])
        return by_head.transpose(0, 1)

    states.max_PKG[at], states.sum_PKG[at], states.out_PKGD[at] = map(by_state, (max_ZX, sum_ZX, out_ZXD))


def _scaled(scores_ZXL: torch.Tensor, scale_ZL: torch.Tensor | None) -> torch.Tensor:
    return scores_ZXL if scale_ZL is None else scores_ZXL.mul_(scale_ZL.unsqueeze(1))


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def _partial_softmax(
    scores_ZXL: torch.Tensor, value_ZLD: torch.Tensor, value_scale_ZL: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partial states (max [Z, X], sum [Z, X], out [Z, X, D]) of masked scores, which are overwritten."""
    max_ZX1 = scores_ZXL.amax(dim=2, keepdim=True).clamp_(min=_SMALLEST)
    weights_ZXL = scores_ZXL.sub_(max_ZX1).exp_()
    sum_ZX = weights_ZXL.sum(dim=2)
    return max_ZX1.squeeze(2), sum_ZX, torch.bmm(_scaled(weights_ZXL, value_scale_ZL), value_ZLD)
