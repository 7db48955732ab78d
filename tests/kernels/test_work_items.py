"""The work that is planned for the Triton kernels: every key once for every query, shared keys once for all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkv.kernels.device_work import WorkSizes, decode_sizes
from batchkv.kernels.extend_work import PlannedStep, extend_work
from batchkv.kernels.reference import ReferenceAttention
from batchkv.kernels.tiles import Tile, load_tiles
from batchkv.kernels.work_items import WorkItems, plan_work, traffic
from batchkv.kv_cache import KVCache, PageCopies
from batchkv.step import AttentionBatch
from benchmarks.work_items import Decode
from tests.conftest import WORKLOADS
from tests.kernels.test_attention import Case, Trie, cases, decode_case, depth_first
from tests.plans.test_workloads import Scheduled, steps_of

TILES = (Tile(16, 16, 1, 1, 32), Tile(32, 32, 1, 1, 64), Tile(64, 32, 1, 1, 128))


def step_of(case: Case) -> AttentionBatch:
    """The step under test, as it comes from the KV cache."""
    trie = Trie(case, ReferenceAttention())
    order = depth_first(case.nodes)
    trie.store([(node, case.nodes[node].cached) for node in order if case.nodes[node].cached] or [(order[0], 1)])
    return trie.store([(node, case.nodes[node].chunk) for node in order if case.nodes[node].chunk])[0]


def keys_of_queries(work: WorkItems, batch: AttentionBatch) -> list[list[tuple[int, int]]]:
    """For every token the (position, page) of the keys that its items hold, in the order in which they are merged."""
    states: dict[int, list[tuple[int, int]]] = {}
    direct: dict[int, list[tuple[int, int]]] = {}
    row = np.repeat(np.arange(len(batch.kv_lens)), np.diff(batch.cu_seqlens_q))
    for items in work.items:
        for q_start, q_len, page_start, k_lo, _, k_hi, state, _ in items.tolist():
            first = k_lo // batch.page_size
            for token in range(q_start, q_start + q_len):
                visible = [k for k in range(k_lo, k_hi) if sees(batch, int(work.positions[token]), k)]
                keys = [(k, int(work.pages[page_start + k // batch.page_size - first])) for k in visible]
                assert all(batch.page_table[row[token], k // batch.page_size] == page for k, page in keys)
                if state < 0:
                    assert token not in direct
                    direct[token] = keys
                else:
                    states[state + token - q_start] = keys
    merged = {int(token): i for i, token in enumerate(work.merged_tokens)}
    assert set(merged) | set(direct) == set(range(batch.num_tokens))
    assert not set(merged) & set(direct)
    assert sorted(states) == sorted(work.states.tolist()) == list(range(work.num_states))
    for token, i in merged.items():
        parts = [states[int(s)] for s in work.states[work.first_state[i] : work.first_state[i + 1]]]
        assert len(parts) > 1 or work.num_states
        direct[token] = [key for part in parts for key in part]
    return [direct[token] for token in range(batch.num_tokens)]


def sees(batch: AttentionBatch, query: int, key: int) -> bool:
    return key <= query and (batch.window is None or query - key < batch.window)


@settings(max_examples=150)
@given(case=cases(), heads=st.sampled_from([1, 3, 8, 16]), items_wanted=st.sampled_from([1, 1000]))
def test_every_visible_key_is_in_one_item_of_a_query_and_merged_in_the_order_of_positions(
    case: Case, heads: int, items_wanted: int
) -> None:
    batch = step_of(case)
    keys = keys_of_queries(plan_work(batch, TILES, heads, items_wanted), batch)
    for position, found in zip(batch.query_positions.tolist(), keys, strict=True):
        assert [k for k, _ in found] == [k for k in range(position + 1) if sees(batch, position, k)]


@settings(max_examples=150)
@given(case=cases(), heads=st.sampled_from([1, 3, 16]))
def test_tiles_that_are_not_masked_are_whole_and_seen_by_every_query(case: Case, heads: int) -> None:
    batch = step_of(case)
    work = plan_work(batch, TILES, heads)
    for tile, items in zip(TILES, work.items, strict=True):
        for q_start, q_len, _, k_lo, k_unmasked, k_hi, _, _ in items.tolist():
            assert q_len * heads <= tile.block_m
            assert k_unmasked - k_lo >= 0
            assert (k_unmasked - k_lo) % tile.block_n == 0
            assert k_unmasked <= k_hi
            for query in work.positions[q_start : q_start + q_len].tolist():
                assert all(sees(batch, query, k) for k in range(k_lo, k_unmasked))


def next_token(batch: AttentionBatch, fresh_page: int) -> AttentionBatch:
    """The same rows, one token on; rows that begin a page get pages from `fresh_page` on."""
    rows = np.flatnonzero(batch.kv_lens % batch.page_size == 0)
    width = int(batch.kv_lens.max()) // batch.page_size + 1
    table = np.full((len(batch.kv_lens), max(width, batch.page_table.shape[1])), -1, np.int32)
    table[:, : batch.page_table.shape[1]] = batch.page_table
    table[rows, batch.kv_lens[rows] // batch.page_size] = fresh_page + np.arange(len(rows))
    return replace(batch, page_table=table, kv_lens=batch.kv_lens + 1, slots=batch.slots + 1, copies=())


@settings(max_examples=60)
@given(case=cases(), num_steps=st.integers(1, 20))
def test_a_step_with_the_next_token_of_the_same_rows_extends_the_work_before(case: Case, num_steps: int) -> None:
    """And gives every query the keys that work planned anew would."""
    nodes = tuple(replace(node, chunk=min(node.chunk, 1)) for node in case.nodes)
    batch = step_of(replace(case, nodes=nodes, window=None))
    planned = PlannedStep(batch, plan_work(batch, TILES, heads=3))
    for number in range(num_steps):
        batch = next_token(batch, fresh_page=10_000 + 100 * number)
        work = extend_work(planned, batch, TILES[0])
        if work is None:
            lengths = planned.work.items[0][:, 5] - planned.work.items[0][:, 3]
            if lengths.max(initial=0) < 2 * TILES[0].keys_per_item:
                # a row's last key is another row's too: an inner node that was decoded with its leaves
                assert number == 0
                return
            work = plan_work(batch, TILES, heads=3)
        planned = PlannedStep(batch, work)
        assert keys_of_queries(work, batch) == keys_of_queries(plan_work(batch, TILES, heads=3), batch)


def test_work_is_extended_for_rows_below_a_shared_prefix() -> None:
    batch = step_of(decode_case(20))
    assert extend_work(PlannedStep(batch, plan_work(batch, TILES, 3)), next_token(batch, 10_000), TILES[0]) is not None


@pytest.mark.parametrize("change", ["row less", "other page", "longer step", "window", "copies"])
def test_work_is_planned_anew_where_anything_but_the_ends_of_rows_has_changed(change: str) -> None:
    before = step_of(decode_case(20, window=64 if change == "window" else None))
    planned = PlannedStep(before, plan_work(before, TILES, 3))
    batch = next_token(before, 10_000)
    if change == "row less":
        batch = replace(batch, page_table=batch.page_table[1:], kv_lens=batch.kv_lens[1:], cu_seqlens_q=np.arange(20))
    elif change == "other page":
        batch.page_table[7, 3] = 9_999
    elif change == "longer step":
        batch = replace(batch, kv_lens=batch.kv_lens + np.eye(20, dtype=np.int64)[4])
    elif change == "copies":
        batch = replace(batch, copies=(PageCopies(*(np.array([n], np.int32) for n in (3, 9_000, 5))),))
    assert extend_work(planned, batch, TILES[0]) is None


GPU_TILES = load_tiles("sm_90").tiles(128)


@pytest.mark.parametrize(
    ("rows", "shared", "own"),
    [
        (16, 2048, 64),
        (16, 16384, 64),
        (64, 16384, 64),
        (8, 0, 2000),
        (32, 0, 5000),
        (256, 2048, 64),
        (256, 0, 8000),
        (1024, 4096, 64),
    ],
)
def test_graphs_have_room_for_usual_decode_steps(rows: int, shared: int, own: int) -> None:
    """With the tiles and the processors of an H100, in a pool that holds these rows and no more."""
    num_pages = shared // 16 + rows * (-(-own // 16))
    cache = KVCache((num_pages,), (None,), 16)
    root = cache.create()
    cache.append(np.array([root]), np.array([shared]))
    handles = np.array([cache.fork(root) for _ in range(rows)])
    cache.append(handles, np.full(rows, own))
    table, lengths = cache.page_table(0, handles), cache.lengths(handles)
    batch = AttentionBatch(16, None, table, lengths, np.arange(rows + 1), np.zeros(rows, np.int64))
    work = plan_work(batch, GPU_TILES, 4, items_wanted=132)
    assert decode_sizes(rows, num_pages, 16, GPU_TILES, 4, 132).hold(WorkSizes.of(work))


@pytest.mark.parametrize("heads", [1, 4, 8])
def test_a_decode_step_of_1024_rows_below_300_nodes_reads_little_more_than_the_live_trie(heads: int) -> None:
    decode = Decode(rows=1024, nodes=300, steps=1, seed=0)
    read = traffic(plan_work(decode.next_step(), GPU_TILES, heads, items_wanted=132))
    assert decode.live_tokens <= read.from_memory <= 1.15 * decode.live_tokens


def test_traffic_counts_keys_again_that_are_not_read_by_neighbours() -> None:
    """The measure itself: with the items shuffled, shared keys are read from memory again."""
    batch = step_of(decode_case(100))
    work = plan_work(batch, TILES, 3)
    read = traffic(work)
    order = np.random.default_rng(0).permutation(len(work.items[2]))
    shuffled = replace(work, items=(*work.items[:2], work.items[2][order]))
    assert len(order) > 2
    assert read.from_memory < traffic(shuffled).from_memory <= read.loaded == traffic(shuffled).loaded


@pytest.mark.skipif(not WORKLOADS.is_dir(), reason="job files that are not part of the project")
@pytest.mark.parametrize("name", ["label", "docqa", "tree", "rollout"])
def test_decode_steps_of_real_workloads_read_little_more_than_the_live_trie(name: str) -> None:
    """Summed over the decode steps of a whole job: keys read from memory against distinct tokens seen."""
    read = live = 0
    for scheduled in steps_of(name):
        if not scheduled.step.prefill_tokens:
            read += traffic(plan_work(scheduled.step.attention[0], GPU_TILES, 3, items_wanted=132)).from_memory
            live += live_tokens(scheduled)
    assert live <= read <= 1.15 * live


def live_tokens(scheduled: Scheduled) -> int:
    """Distinct tokens that the rows of a decode step see: of the prompts' trie, and those generated so far."""
    trie, sequences = scheduled.plan.trie, scheduled.step.sampled
    nodes = trie.prompt_node[scheduled.plan.sequences.prompt[sequences]]
    paths = np.unique(np.concatenate([trie.path(node) for node in np.unique(nodes).tolist()]))
    return int((trie.end - trie.start)[paths].sum() + scheduled.generated.lengths[sequences].sum())
