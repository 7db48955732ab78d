"""Suffixes of what was generated before are found again, as by looking through all of it token by token."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv.drafts import END, LONGEST_SUFFIX, START, Drafts, References, SuffixIndex

Tokens = tuple[int, ...]
Lists = tuple[tuple[Tokens, ...], ...]

# few different tokens, so that suffixes occur often and are followed by several
COMPLETION = st.lists(st.integers(0, 2), max_size=14).map(tuple)
REFERENCES = st.lists(st.lists(COMPLETION, max_size=4).map(tuple), max_size=3).map(tuple)


def index_of(references: Lists) -> SuffixIndex:
    return SuffixIndex([[np.array(tokens, np.int32) for tokens in some] for some in references])


def suffixes_of(outputs: list[Tokens]) -> npt.NDArray[np.int64]:
    """As `find` takes them; behind `START` anything may stand."""
    whole = [(*(7 for _ in range(LONGEST_SUFFIX)), START, *output)[::-1][:LONGEST_SUFFIX] for output in outputs]
    return np.array(whole, np.int64).reshape(len(outputs), LONGEST_SUFFIX)


def followers(some: tuple[Tokens, ...], suffix: Tokens) -> list[Tokens]:
    """All there is behind each place where the suffix occurs, if that is not the end; in the order of places."""
    found = []
    for tokens in some:
        text = (START, *tokens)
        ends = range(len(suffix), len(text))
        found += [text[end:] for end in ends if text[end - len(suffix) : end] == suffix]
    return found


def most_common(some: tuple[Tokens, ...], suffix: Tokens) -> int:
    """What follows most often; of equals, what stands first."""
    return Counter(rest[0] for rest in followers(some, suffix)).most_common(1)[0][0]


def longest_suffix(some: tuple[Tokens, ...], output: Tokens) -> Tokens:
    text = (START, *output)
    suffixes = (text[-n:] for n in range(min(len(text), LONGEST_SUFFIX), 0, -1))
    return next((suffix for suffix in suffixes if followers(some, suffix)), ())


@given(REFERENCES, st.data())
def test_the_longest_suffix_and_what_follows_it_most_often(references: Lists, data: st.DataObject) -> None:
    beginnings = [tokens[:n] for some in references for tokens in some for n in range(len(tokens) + 1)]
    output = st.one_of(COMPLETION, st.sampled_from(beginnings or [()]))
    outputs = data.draw(st.lists(output.filter(len), min_size=1, max_size=5))
    lists = data.draw(st.lists(st.integers(-1, len(references) - 1), min_size=len(outputs), max_size=len(outputs)))
    index = index_of(references)
    found, matched = index.find(np.array(lists), suffixes_of(outputs))
    for which, tokens, position, length in zip(lists, outputs, found.tolist(), matched.tolist(), strict=True):
        some = references[which] if which >= 0 else ()
        suffix = longest_suffix(some, tokens)
        assert length == len(suffix)
        if not suffix:
            assert position == -1
        else:
            assert index.follow(np.array([position]), 1)[0, 0] == most_common(some, suffix)


@given(COMPLETION.filter(len), st.integers(1, 14))
def test_a_single_completion_is_followed_to_its_end(tokens: Tokens, most: int) -> None:
    """Where its last suffixes are not found twice."""
    tokens = tuple(token + 3 * i for i, token in enumerate(tokens))
    index = index_of(((tokens,),))
    found, matched = index.find(np.zeros(1, np.int64), suffixes_of([tokens[:1]]))
    if len(tokens) == 1:
        assert matched.tolist() == [0]  # it ends there: nothing follows
        return
    assert matched.tolist() == [2]  # the token, and that it is the first
    followed = index.follow(found, most)[0].tolist()
    assert followed == [*tokens[1 : most + 1], *[END] * (most + 1 - len(tokens))]


def test_long_suffixes_are_followed_by_what_followed_them_most_often() -> None:
    """Behind a suffix of full length a draft goes on where most completions do, not where it was found."""
    body = tuple(range(10, 10 + LONGEST_SUFFIX))
    rare, common = (1, *body, 91, 92), (2, *body, 81, 82)
    index = index_of(((rare, common, common),))
    found, matched = index.find(np.zeros(1, np.int64), suffixes_of([(1,)]))
    assert matched.tolist() == [2]
    assert index.follow(found, LONGEST_SUFFIX + 2)[0].tolist() == [*body, 81, 82]


def test_lists_are_apart() -> None:
    index = index_of((((1, 2, 3),), ((1, 2, 4),), ()))
    lists = np.array([0, 1, 2, -1])
    found, matched = index.find(lists, suffixes_of([(1, 2)] * 4))
    assert matched.tolist() == [3, 3, 0, 0]
    assert index.follow(found[:2], 1)[:, 0].tolist() == [3, 4]


def test_completions_do_not_run_into_each_other() -> None:
    index = index_of((((1, 2), (3, 4)),))
    _, matched = index.find(np.zeros(2, np.int64), suffixes_of([(1, 2), (5, 3)]))
    assert matched.tolist() == [0, 1]


def test_nothing_at_all() -> None:
    for references in ((), ((),), (((),),)):
        found, matched = index_of(references).find(np.full(2, len(references) - 1), suffixes_of([(1,), (2, 3)]))
        assert found.tolist() == [-1, -1]
        assert matched.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("references", "of_sequence", "complaint"),
    [
        ((((3, -100),),), [0], "token id -100"),
        ((((3,),),), [0, 1], "sequence 1 has list 1 of 1"),
        ((((3,),),), [-2], "sequence 0 has list -2"),
    ],
)
def test_what_makes_no_sense_is_refused(references: Lists, of_sequence: list[int], complaint: str) -> None:
    arrays = tuple(tuple(np.array(tokens) for tokens in some) for some in references)
    with pytest.raises(ValueError, match=complaint):
        Drafts(References(arrays), np.array(of_sequence))


def test_the_highest_token() -> None:
    assert References(((np.array([3, 9]), np.zeros(0, np.int32)), ())).highest_token == 9
    assert References(()).highest_token == -1
