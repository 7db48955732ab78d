"""The trie holds every distinct prefix once and no node too many, in depth-first order, whatever the prompts are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchkv.intervals import intervals_from_lcp
from batchkv.token_arena import TokenArena
from batchkv.trie import PrefixTrie, build_trie

Tokens = tuple[int, ...]
Key = tuple[int, Tokens]  # group, tokens

A, B, C = 0, 7, 0x7FFFFF00  # ids whose bytes sort otherwise in another order: little-endian, C comes before B


@st.composite
def prompt_lists(draw: st.DrawFn) -> list[Tokens]:
    """Up to 12 prompts, most of which go on from somewhere inside an earlier one; lengths around 64 and 128 too."""
    alphabet = draw(st.sampled_from([(A, B), (A, B, C)]))
    lengths = st.one_of(st.integers(0, 5), st.sampled_from([63, 64, 65, 127, 128, 129]))
    runs = st.lists(st.tuples(st.sampled_from(alphabet), lengths), max_size=3)
    prompts: list[Tokens] = []
    for _ in range(draw(st.integers(0, 12))):
        earlier = draw(st.sampled_from([(), *prompts]))
        kept = draw(st.one_of(st.just(len(earlier)), st.integers(0, len(earlier))))
        tail = [token for token, count in draw(runs) for _ in range(count)]
        prompts.append((*earlier[:kept], *tail)[:200])
    return prompts


@st.composite
def grouped_prompts(draw: st.DrawFn) -> tuple[list[Tokens], list[int] | None]:
    prompts = draw(prompt_lists())
    ids = st.lists(st.integers(-1, 2), min_size=len(prompts), max_size=len(prompts))
    return prompts, draw(st.one_of(st.none(), ids))


def arena_of(prompts: list[Tokens]) -> TokenArena:
    return TokenArena.from_rows([np.array(prompt, np.int32) for prompt in prompts])


def trie_of(*prompts: Tokens, group: list[int] | None = None) -> PrefixTrie:
    return build_trie(arena_of(list(prompts)), None if group is None else np.array(group, np.int64))


def make(prompts: list[Tokens], group: list[int] | None) -> tuple[PrefixTrie, TokenArena, list[Key]]:
    """The trie, the arena, and the key of each row."""
    trie = trie_of(*prompts, group=group)
    return trie, arena_of(prompts), list(zip(group or [0] * len(prompts), prompts, strict=True))


def expected_nodes(keys: list[Key]) -> set[Key]:
    """Where a dictionary of tokens branches or a prompt ends: no tree with unary nodes merged has fewer."""
    nexts: dict[Key, set[int]] = {}
    for group, tokens in keys:
        for i, token in enumerate(tokens):
            nexts.setdefault((group, tokens[:i]), set()).add(token)
    ends = {key for key in keys if key[1]}
    return ends | {key for key, tokens in nexts.items() if len(tokens) > 1 and key[1]}


def spelled(trie: PrefixTrie, arena: TokenArena, node: int) -> Tokens:
    """The tokens on the path from the root to the end of a node."""
    return tuple(token for on_path in trie.path(node) for token in trie.node_tokens(arena, on_path).tolist())


def check_preorder(trie: PrefixTrie) -> None:
    """Everything that the arrays promise each other."""
    assert (trie.parent[0], trie.start[0], trie.end[0], trie.depth[0]) == (-1, 0, 0, 0)
    assert (trie.prompt_lo[0], trie.prompt_hi[0]) == (0, trie.num_prompts)
    below = np.arange(1, trie.num_nodes)
    parent = trie.parent[1:]
    assert (parent < below).all()
    assert (parent >= 0).all()
    assert (trie.depth[1:] == trie.depth[parent] + 1).all()
    assert (trie.start[1:] == trie.end[parent]).all()
    assert (trie.lengths[1:] > 0).all()
    assert (np.diff(trie.prompt_lo) >= 0).all()
    open_nodes = [0]  # preorder: each node's parent is the innermost node that is still open
    for node in below.tolist():
        while trie.prompt_hi[open_nodes[-1]] <= trie.prompt_lo[node]:
            open_nodes.pop()
        assert trie.parent[node] == open_nodes[-1]
        assert trie.prompt_lo[open_nodes[-1]] <= trie.prompt_lo[node] < trie.prompt_hi[node]
        assert trie.prompt_hi[node] <= trie.prompt_hi[open_nodes[-1]]
        open_nodes.append(node)
    assert len(trie.prompt_row) == trie.num_prompts
    assert (trie.prompt_lo[trie.prompt_node] == np.arange(trie.num_prompts)).all()  # first of all below its node


def check_holds(trie: PrefixTrie, arena: TokenArena, keys: list[Key]) -> None:
    """The trie is the one and only trie of the rows."""
    group_of_prompt = [keys[row][0] for row in trie.prompt_row.tolist()]
    nodes = [(group_of_prompt[trie.prompt_lo[node]], spelled(trie, arena, node)) for node in range(1, trie.num_nodes)]
    assert len(nodes) == len(set(nodes))
    assert set(nodes) == expected_nodes(keys)
    for row, (group, tokens) in enumerate(keys):
        prompt = int(trie.row_prompt[row])
        if not tokens:
            assert prompt == -1
            continue
        assert group_of_prompt[prompt] == group
        assert spelled(trie, arena, int(trie.prompt_node[prompt])) == tokens
    first_row = {key: row for row, key in reversed(list(enumerate(keys))) if key[1]}
    assert trie.num_prompts == len(first_row)  # duplicates are one prompt
    assert sorted(trie.prompt_row.tolist()) == sorted(first_row.values())


@given(grouped_prompts())
@settings(max_examples=70)
@example(([], None))
@example(([()], None))
@example(([(), (A,), ()], [1, 1, 1]))
@example(([(A,) * 64, (A,) * 65, (A,) * 63 + (B,), (A,) * 64], None))
@example(([(A,) * 200, (A,) * 200, (A,) * 128], [0, 1, 0]))
def test_the_trie_is_that_of_a_dictionary_of_tokens(case: tuple[list[Tokens], list[int] | None]) -> None:
    trie, arena, keys = make(*case)
    check_preorder(trie)
    check_holds(trie, arena, keys)


@given(grouped_prompts())
@settings(max_examples=20)
def test_it_holds_as_many_tokens_as_there_are_distinct_prefixes(case: tuple[list[Tokens], list[int] | None]) -> None:
    trie, _, keys = make(*case)
    prefixes = {(group, tokens[: i + 1]) for group, tokens in keys for i in range(len(tokens))}
    assert trie.num_tokens == len(prefixes)


@given(grouped_prompts())
@settings(max_examples=20)
def test_prompts_are_sorted_by_group_then_tokens(case: tuple[list[Tokens], list[int] | None]) -> None:
    trie, _, keys = make(*case)
    in_order = [keys[row] for row in trie.prompt_row.tolist()]
    assert in_order == sorted({key for key in keys if key[1]})


@given(grouped_prompts(), st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_sum_over_paths_sums_from_the_root_down(case: tuple[list[Tokens], list[int] | None], random: object) -> None:
    trie, _, _ = make(*case)
    values = np.array([random.randint(-9, 9) for _ in range(trie.num_nodes)], np.int32)  # type: ignore[attr-defined]
    expected = [int(values[0] + values[trie.path(node)].sum()) for node in range(trie.num_nodes)]
    assert trie.sum_over_paths(values).tolist() == expected
    assert (trie.sum_over_paths(trie.lengths) == trie.end).all()


@given(grouped_prompts(), st.lists(st.integers(-2, 2), min_size=1, max_size=40))
@settings(max_examples=70)
def test_reordered_keeps_all_and_sorts_children_by_key(
    case: tuple[list[Tokens], list[int] | None], keys_of_nodes: list[int]
) -> None:
    trie, arena, keys = make(*case)
    child_key = np.resize(np.array(keys_of_nodes, np.float64), trie.num_nodes)
    in_order = trie.reordered(child_key)
    check_preorder(in_order)
    check_holds(in_order, arena, keys)

    prompt_at = {int(node): prompt for prompt, node in enumerate(trie.prompt_node)}
    nodes: list[int] = []
    prompts: list[int] = []

    def visit(node: int) -> None:
        nodes.append(node)
        if node in prompt_at:
            prompts.append(prompt_at[node])  # a prompt that ends at the node comes before those below it
        for child in sorted(np.flatnonzero(trie.parent == node).tolist(), key=lambda child: child_key[child]):
            visit(child)

    visit(0)
    assert in_order.prompt_row.tolist() == trie.prompt_row[prompts].tolist()
    assert in_order.end.tolist() == trie.end[nodes].tolist()
    assert [spelled(in_order, arena, i) for i in range(trie.num_nodes)] == [spelled(trie, arena, i) for i in nodes]


@given(grouped_prompts())
@settings(max_examples=15)
def test_reordered_by_equal_keys_changes_nothing(case: tuple[list[Tokens], list[int] | None]) -> None:
    trie, _, _ = make(*case)
    same = trie.reordered(np.zeros(trie.num_nodes))
    for name in PrefixTrie.__slots__:
        assert np.array_equal(getattr(same, name), getattr(trie, name)), name
        assert getattr(same, name).dtype == getattr(trie, name).dtype, name


def test_a_shared_header_is_one_node() -> None:
    trie = trie_of((1, 2, 3, 4), (1, 2, 3, 5, 6))
    assert trie.parent.tolist() == [-1, 0, 1, 1]
    assert trie.start.tolist() == [0, 0, 3, 3]
    assert trie.end.tolist() == [0, 3, 4, 5]
    assert trie.prompt_node.tolist() == [2, 3]


def test_a_prompt_that_is_a_prefix_of_another_ends_at_an_inner_node() -> None:
    trie = trie_of((1, 2, 3, 4), (1, 2))
    assert trie.parent.tolist() == [-1, 0, 1]
    assert trie.end.tolist() == [0, 2, 4]
    assert trie.row_prompt.tolist() == [1, 0]
    assert trie.prompt_node.tolist() == [1, 2]


def test_groups_share_nothing_even_if_all_is_equal() -> None:
    trie = trie_of((1, 2), (1, 2), (1, 2), group=[5, 3, 5])
    assert trie.parent.tolist() == [-1, 0, 0]
    assert trie.num_tokens == 4
    assert trie.row_prompt.tolist() == [1, 0, 1]


def test_rows_without_tokens_have_no_prompt() -> None:
    trie = trie_of((), (3,), ())
    assert trie.row_prompt.tolist() == [-1, 0, -1]


@pytest.mark.parametrize("num_rows", [0, 3])
def test_a_job_without_a_token_has_only_the_root(num_rows: int) -> None:
    trie = trie_of(*[()] * num_rows)
    assert (trie.num_nodes, trie.num_prompts, trie.num_tokens) == (1, 0, 0)
    assert trie.row_prompt.tolist() == [-1] * num_rows
    assert trie.path(0) == []
    assert trie.reordered(np.zeros(1)).num_nodes == 1


@pytest.mark.parametrize("shared", [0, 1, 63, 64, 65, 127, 128, 129, 191, 192])
@pytest.mark.parametrize("tail", [0, 1])
def test_the_common_length_is_right_around_every_block_of_comparison(shared: int, tail: int) -> None:
    left, right = (A,) * shared + (B,) * 3, (A,) * shared + (C,) * tail
    assert trie_of(left, right).num_tokens == shared + 3 + tail


def test_more_neighbours_than_are_compared_at_once() -> None:
    prompts = np.random.default_rng(0).integers(0, 2, (20_000, 14), np.int32)
    trie = build_trie(TokenArena.from_rows(list(prompts)))
    distinct = sum(len(np.unique(prompts[:, : length + 1], axis=0)) for length in range(14))
    assert trie.num_tokens == distinct


def test_a_deep_trie_needs_no_recursion() -> None:
    prompts = [(A,) * length for length in range(1, 3_000, 2)]
    trie = trie_of(*prompts)
    assert trie.depth.max() == len(prompts)
    assert trie.reordered(np.arange(trie.num_nodes, 0, -1.0)).prompt_row.tolist() == list(range(len(prompts)))


def test_intervals_of_no_sequences_are_only_the_root() -> None:
    nodes = intervals_from_lcp(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert (nodes.parent.tolist(), nodes.lo.tolist(), nodes.hi.tolist()) == ([-1], [0], [0])


def test_intervals_let_twins_share_one_node() -> None:
    nodes = intervals_from_lcp(np.array([3, 3, 3]), np.array([0, 3, 2]))
    assert list(zip(nodes.lo, nodes.hi, nodes.start, nodes.end, strict=True)) == [
        (0, 3, 0, 0),
        (0, 3, 0, 2),
        (0, 2, 2, 3),
        (2, 3, 2, 3),
    ]


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=9))
def test_intervals_are_the_sequences_around_each_prefix(lists: list[list[int]]) -> None:
    """Twins included: a node is a prefix that several share and go on from differently, or where one ends."""
    sequences = sorted(lists)
    common = [0] * len(sequences)
    for i in range(1, len(sequences)):
        pair = zip(sequences[i - 1], sequences[i], strict=False)
        common[i] = next((k for k, (a, b) in enumerate(pair) if a != b), min(map(len, sequences[i - 1 : i + 1])))
    below: dict[tuple[int, ...], list[int]] = {(): list(range(len(sequences)))}
    for i, sequence in enumerate(sequences):
        for end in range(1, len(sequence) + 1):
            below.setdefault(tuple(sequence[:end]), []).append(i)
    ends = {tuple(sequence) for sequence in sequences}
    kept = [p for p in below if not p or p in ends or all(len(below.get((*p, t), [])) < len(below[p]) for t in (0, 1))]
    nodes = intervals_from_lcp(np.array([len(s) for s in sequences], np.int64), np.array(common, np.int64))
    got = list(zip(nodes.lo.tolist(), nodes.hi.tolist(), nodes.end.tolist(), strict=True))
    assert got == sorted(
        ((below[p][0] if below[p] else 0, below[p][-1] + 1 if below[p] else 0, len(p)) for p in kept),
        key=lambda node: (node[0], node[2]),
    )
