"""The score table has what rows want, each once, where the trie has its tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchkv import sampler, token_weights
from batchkv.intervals import NO_MINIMUM, minima
from batchkv.kv_layout import KVLayout, LayerSpec
from batchkv.planner import Limits, list_sequences, make_plan
from batchkv.random_numbers import stream_keys
from batchkv.sampler import score
from batchkv.sampling_batch import SamplingBatch
from batchkv.sampling_params import RowParams, SamplingParams
from batchkv.scoring import SCORING, ScoreTable, build_score_table, split_last_tokens
from batchkv.sequence import SequenceTable
from batchkv.token_arena import TokenArena
from batchkv.trie import PrefixTrie, build_trie
from batchkv.wave import Wave

Tokens = tuple[int, ...]
Row = tuple[Tokens, int]  # tokens, and from where on they are scored; -1 if the row is generated


@st.composite
def scored_rows(draw: st.DrawFn) -> list[Row]:
    """Rows most of which go on from somewhere inside an earlier one; some are generated."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 12))):
        earlier = draw(st.sampled_from([(), *(tokens for tokens, _ in rows)]))
        kept = draw(st.one_of(st.just(len(earlier)), st.integers(0, len(earlier))))
        tail = draw(st.lists(st.integers(0, 2), min_size=max(0, 2 - kept), max_size=8))
        tokens = (*earlier[:kept], *tail)
        is_scored = draw(st.sampled_from([True, True, False]))
        rows.append((tokens, draw(st.integers(1, len(tokens) - 1)) if is_scored else -1))
    return rows


def wave_of(rows: list[Row]) -> Wave:
    whole = TokenArena.from_rows([np.array(tokens, np.int32) for tokens, _ in rows])
    arena, scored = split_last_tokens(whole, np.array([score_from for _, score_from in rows]))
    params = RowParams.of(SamplingParams(max_tokens=1) if score_from < 0 else SCORING for _, score_from in rows)
    return Wave.of(arena, params, scored)


def table_of(rows: list[Row], *, is_shared: bool = True) -> tuple[ScoreTable, PrefixTrie, SequenceTable, TokenArena]:
    wave = wave_of(rows)
    arena = wave.arena
    trie = build_trie(arena, None if is_shared else np.arange(len(rows)))
    trie = trie.reordered(-trie.lengths.astype(np.float64))
    sequences = list_sequences(wave, trie, np.ones(len(rows), np.int64))
    return build_score_table(trie, sequences, arena), trie, sequences, arena


def texts_before(table: ScoreTable, trie: PrefixTrie, arena: TokenArena) -> list[Tokens]:
    """What the model has seen when it scores each entry."""
    texts = []
    for node in range(trie.num_nodes):
        text = [token for on_path in trie.path(node) for token in trie.node_tokens(arena, on_path).tolist()]
        for position in table.position[table.first[node] : table.first[node + 1]].tolist():
            assert trie.start[node] <= position < trie.end[node]
            texts.append(tuple(text[: position + 1]))
    return texts


@given(scored_rows(), st.booleans())
def test_every_row_finds_its_tokens_each_after_what_stands_before_it(rows: list[Row], is_shared: bool) -> None:
    table, trie, sequences, arena = table_of(rows, is_shared=is_shared)
    texts = texts_before(table, trie, arena)
    for row, sequence in enumerate(sequences.output_sequence.tolist()):
        tokens, score_from = rows[row]
        assert sequences.score_from[sequence] == score_from
        if score_from < 0:
            assert sequences.forced_token[sequence] == table.last_entry[sequence] == -1
            continue
        entries = table.entries_of(sequence, trie, sequences)
        assert tuple(table.target[entries].tolist()) == tokens[score_from:]
        assert [texts[entry] for entry in entries.tolist()] == [tokens[:i] for i in range(score_from, len(tokens))]


@given(scored_rows(), st.booleans())
def test_the_table_has_nothing_else_and_is_sorted(rows: list[Row], is_shared: bool) -> None:
    table, trie, _, arena = table_of(rows, is_shared=is_shared)
    wanted = {
        (0 if is_shared else row, tokens[:i], tokens[i])
        for row, (tokens, score_from) in enumerate(rows)
        for i in range(score_from, len(tokens))
        if score_from > 0
    }
    assert len(table) == len(wanted)
    node = np.repeat(np.arange(trie.num_nodes), np.diff(table.first))
    order = np.lexsort((table.target, table.position, node))
    assert order.tolist() == list(range(len(table)))
    texts = texts_before(table, trie, arena)
    assert set(zip(texts, table.target.tolist(), strict=True)) == {pair[1:] for pair in wanted}


@given(scored_rows(), st.data())
def test_entries_in_a_part_of_a_node_are_those_at_its_positions(rows: list[Row], data: st.DataObject) -> None:
    table, trie, _, _ = table_of(rows)
    node = data.draw(st.integers(0, trie.num_nodes - 1))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 20), st.integers(0, 20))))
    in_node = np.arange(table.first[node], table.first[node + 1])
    position = table.position[in_node]
    assert table.entries_in(node, start, stop).tolist() == in_node[(start <= position) & (position < stop)].tolist()


@given(scored_rows())
def test_twins_are_one_sequence_and_nobody_else_is(rows: list[Row]) -> None:
    _, _, sequences, _ = table_of(rows)
    sequence_of = dict(zip(sequences.output_sequence.tolist(), rows, strict=True))
    assert len(sequences) == len(set(rows)) == len(set(sequence_of.values()))
    assert all(rows[row] == sequence_of[s] for row, s in enumerate(sequences.output_sequence.tolist()))


def test_a_picture() -> None:
    """That of the module."""
    a, b, c, d, e, f = range(6)
    table, trie, _, _ = table_of([((a, b, c, d, e), 2), ((a, b, c, d, f), 2), ((a, b, c), 2)])
    assert (trie.start.tolist(), trie.end.tolist()) == ([0, 0, 2], [0, 2, 4])
    assert table.first.tolist() == [0, 0, 1, 4]
    assert (table.position.tolist(), table.target.tolist()) == ([1, 2, 3, 3], [c, d, e, f])


def test_a_token_that_is_forced_and_begins_a_child_is_scored_once() -> None:
    table, trie, sequences, _ = table_of([((0, 1, 2), 2), ((0, 1, 2, 3), 2), ((0, 1, 4, 4), 3)])
    assert sorted(table.target.tolist()) == [2, 3, 4]
    short, long = sequences.output_sequence[:2].tolist()
    assert table.entries_of(short, trie, sequences)[0] == table.entries_of(long, trie, sequences)[0]


def test_a_job_that_is_only_generated_scores_nothing() -> None:
    table, trie, _, _ = table_of([((0, 1), -1), ((0, 2), -1)])
    assert len(table) == 0
    assert table.entries_in(trie.num_nodes - 1, 0, 9).tolist() == []


def test_dropped_rows_are_left_alone() -> None:
    whole = TokenArena.from_rows([np.array(tokens, np.int32) for tokens in ([5, 6, 7], [1, 2], [8, 9])])
    arena, scored = split_last_tokens(whole.with_rows_dropped([0]), np.array([1, 1, -1]))
    assert [arena.row(i).tolist() for i in range(3)] == [[], [1], [8, 9]]
    assert scored.forced.tolist() == [-1, 2, -1]


LAYOUT = KVLayout((LayerSpec(1, 1, 1, 1, None),), element_bytes=1)


@pytest.mark.parametrize(
    ("rows", "params", "message"),
    [
        ([((0, 1, 2), 0)], SCORING, "row 0, with 3 tokens, is scored from token 0 on"),
        ([((0, 1), 1), ((0, 1, 2), 3)], SCORING, "row 1, with 3 tokens, is scored from token 3 on"),
        ([((7,), 1)], SCORING, "row 0, with 1 tokens, is scored from token 1 on"),
        ([((0, 1, 2), 1)], SamplingParams(max_tokens=2), "row 0 is scored, but its parameters are"),
        ([((0, 1, 2), 1)], SamplingParams(max_tokens=1, n=3), "row 0 is scored, but its parameters are"),
    ],
)
def test_rows_that_cannot_be_scored_are_refused(rows: list[Row], params: SamplingParams, message: str) -> None:
    wave = replace(wave_of(rows), params=RowParams.of([params] * len(rows)))
    with pytest.raises(ValueError, match=message):
        make_plan(wave, LAYOUT, Limits(1 << 20, 8, 8))


def test_millions_of_tokens_are_no_more_than_array_operations() -> None:
    random = np.random.default_rng(0)
    contexts = [random.integers(0, 50_000, 500) for _ in range(500)]
    rows = np.concatenate(
        [np.concatenate([context, tail]) for context in contexts for tail in random.integers(0, 50_000, (40, 100))]
    )
    count = len(contexts) * 40
    whole = TokenArena.from_lengths(rows.astype(np.int32), np.full(count, 600))
    arena, scored = split_last_tokens(whole, np.full(count, 500))
    params = RowParams((SCORING,), np.zeros(count, np.int32))
    trie = build_trie(arena)
    sequences = list_sequences(Wave.of(arena, params, scored), trie, np.ones(count, np.int64))
    table = build_score_table(trie, sequences, arena)
    assert 1_990_000 < len(table) <= 2_000_000


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40), st.data())
def test_minima_are_those_of_each_interval(values: list[int], data: st.DataObject) -> None:
    bounds = st.tuples(st.integers(0, len(values)), st.integers(0, len(values))).map(sorted)
    intervals = data.draw(st.lists(bounds, max_size=8))
    lo, hi = (np.array([interval[i] for interval in intervals], np.int64) for i in range(2))
    expected = [min(values[a:b], default=NO_MINIMUM) for a, b in intervals]
    assert minima(np.array(values), lo, hi).tolist() == expected


# -- the sampler's side


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_are_the_log_softmax_at_the_targets(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(9, 1000) * 4).to(dtype)
    rows, targets = np.random.default_rng(0).integers(0, (9, 1000), (60, 2)).T
    targets[::3] = logits.float().argmax(1).numpy()[rows[::3]]
    scored = score(logits, rows, targets.astype(np.int32))
    expected = logits.double().log_softmax(1)[rows, targets]
    torch.testing.assert_close(scored.logprobs.double(), expected, rtol=0, atol=1e-5)
    assert scored.logprobs.dtype == torch.float32
    assert scored.is_greedy.tolist() == (logits.float().argmax(1).numpy()[rows] == targets).tolist()
    monkeypatch.setattr(token_weights, "_CHUNK_BYTES_CPU", 2 * 4 * 1000)  # two rows at a time
    in_chunks = score(logits, rows, targets)
    assert torch.equal(in_chunks.logprobs, scored.logprobs)
    assert torch.equal(in_chunks.is_greedy, scored.is_greedy)


def test_scores_are_the_bits_that_greedy_rows_get() -> None:
    logits = torch.randn(16, 777, generator=torch.Generator().manual_seed(1)) * 3
    batch = SamplingBatch.from_params(
        [SamplingParams()] * 16, stream_keys(np.arange(16, dtype=np.uint64), np.zeros(16, np.int64))
    )
    sampled = sampler.sample(logits, batch, np.zeros(16, np.int64))
    scored = score(logits, np.arange(16), sampled.token_ids.numpy())
    assert torch.equal(scored.logprobs, sampled.logprobs)
    assert bool(scored.is_greedy.all())


def test_of_equal_logits_the_lowest_token_is_greedy() -> None:
    scored = score(torch.tensor([[0.0, 2.0, 2.0]]), np.zeros(3, np.int64), np.arange(3))
    assert scored.is_greedy.tolist() == [False, True, False]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_distribution_gives_no_number_and_changes_no_other(bad: float) -> None:
    logits = torch.randn(3, 50)
    expected = score(logits, np.array([0, 2]), np.array([1, 1])).logprobs
    logits[1, 7] = bad
    logprobs = score(logits, np.array([0, 1, 1, 2]), np.array([1, 7, 8, 1])).logprobs
    assert logprobs.isnan().tolist() == [False, True, True, False]
    assert torch.equal(logprobs[[0, 3]], expected)
    logits[1] = -torch.inf
    assert score(logits, np.array([1]), np.array([0])).logprobs.isnan().all()


def test_a_masked_target_is_impossible_not_an_error() -> None:
    scored = score(torch.tensor([[0.0, -torch.inf]]), np.array([0]), np.array([1]))
    assert scored.logprobs.tolist() == [-np.inf]


def test_nothing_to_score_is_fine() -> None:
    scored = score(torch.zeros(0, 5), np.zeros(0, np.int64), np.zeros(0, np.int32))
    assert scored.logprobs.shape == scored.is_greedy.shape == (0,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_scores_as_a_cpu_does() -> None:
    logits = torch.randn(40, 50_000, generator=torch.Generator().manual_seed(2)) * 4
    rows, targets = np.arange(200) % 40, np.random.default_rng(3).integers(0, 50_000, 200)
    targets[:40] = logits.argmax(1).numpy()
    here, there = score(logits, rows, targets), score(logits.cuda(), rows, targets)
    torch.testing.assert_close(there.logprobs.cpu(), here.logprobs, rtol=0, atol=1e-5)
    assert torch.equal(there.is_greedy.cpu(), here.is_greedy)
