"""What is in the cache before a wave is found in its trie, token for token, and nothing else is."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchkv.carried import CachedNodes, cached_nodes
from batchkv.token_arena import TokenArena
from batchkv.trie import PrefixTrie, build_trie

Tokens = tuple[int, ...]
texts = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


def found_in(prompts: list[Tokens], kept: list[Tokens], *, windowed: bool = False) -> tuple[PrefixTrie, CachedNodes]:
    rows = [np.array(tokens, np.int32) for tokens in (*prompts, *kept)]
    trie = build_trie(TokenArena.from_rows(rows))
    has_sequence = np.zeros(trie.num_prompts, np.bool_)
    has_sequence[trie.row_prompt[: len(prompts)]] = True
    handles = 100 + np.arange(len(kept))
    kept_prompt = trie.row_prompt[len(prompts) :].astype(np.int64)
    return trie, cached_nodes(trie, kept_prompt, handles, has_sequence, windowed=windowed)


def prefixes(tokens: Tokens) -> set[Tokens]:
    return {tokens[: i + 1] for i in range(len(tokens))}


@given(st.lists(texts, min_size=1, max_size=6), st.lists(texts, max_size=5))
def test_what_is_prefilled_is_what_an_ideal_cache_would_need(prompts: list[Tokens], kept: list[Tokens]) -> None:
    trie, cached = found_in(prompts, kept)
    known = set().union(*map(prefixes, kept))
    wanted = set().union(*map(prefixes, prompts))
    again = {prompt for prompt in prompts if prompt in known}  # their last token gives the logits, which nobody kept
    assert cached.to_prefill(trie).sum() == len(wanted - known) + len(again)


@given(st.lists(texts, min_size=1, max_size=6), st.lists(texts, min_size=1, max_size=5), st.booleans())
def test_a_node_goes_on_from_a_sequence_that_has_its_tokens(
    prompts: list[Tokens], kept: list[Tokens], windowed: bool
) -> None:
    trie, cached = found_in(prompts, kept, windowed=windowed)
    arena = TokenArena.from_rows([np.array(tokens, np.int32) for tokens in (*prompts, *kept)])
    for node in np.flatnonzero(cached.handle >= 0).tolist():
        text = tuple(token for on_path in trie.path(node) for token in trie.node_tokens(arena, on_path).tolist())
        there = kept[int(cached.handle[node]) - 100]
        length = int(cached.cached_to[node])
        assert trie.start[node] < length <= trie.end[node]
        assert there[:length] == text[:length]
        assert not windowed or len(there) == length  # behind a window a shorter prefix has lost its pages


@given(st.lists(texts, min_size=1, max_size=6), st.lists(texts, max_size=5), st.booleans())
def test_every_prompt_has_all_it_needs_on_its_way_to_the_nearest_complete_node(
    prompts: list[Tokens], kept: list[Tokens], windowed: bool
) -> None:
    trie, cached = found_in(prompts, kept, windowed=windowed)
    complete = cached.is_complete(trie)
    for row in range(len(prompts)):
        path = trie.path(int(trie.prompt_node[trie.row_prompt[row]]))
        assert not complete[path[-1]]  # its logits are wanted
        for node in reversed(path):
            if complete[node]:
                break
            assert cached.is_needed[node]


def test_nothing_kept_is_nothing_found() -> None:
    trie, cached = found_in([(1, 2), (1, 3)], [])
    none = CachedNodes.none(trie)
    assert cached.cached_to.tolist() == none.cached_to.tolist()
    assert cached.is_needed.all()
    assert cached.to_prefill(trie).sum() == trie.num_tokens == 3
