"""How many tokens are drafted: those whose chance is worth what they cost, and fewer where drafts fail."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv.drafts import Drafts, References
from batchkv.sequence import GeneratedTokens
from batchkv.speculation import FIXED_TOKENS, MOST_DRAFTED, Speculation, worthwhile
from batchkv.step import Drafted

ROWS = st.lists(st.lists(st.floats(0, 1), min_size=6, max_size=6), min_size=1, max_size=6)


@given(ROWS, st.integers(1, 300), st.integers(1, 40))
def test_what_is_drafted_has_the_most_work_for_its_cost(rows: list[list[float]], work: int, budget: int) -> None:
    """No other number of tokens, the likeliest first, is better; and each row's tokens are its first ones."""
    chances = np.cumprod(np.array(rows), axis=1)
    counts = worthwhile(chances, work, budget)
    assert counts.sum() <= budget
    assert all((row[:count] > 0).all() for row, count in zip(chances, counts, strict=True))
    taken = np.concatenate([row[:count] for row, count in zip(chances, counts, strict=True)])
    ordered = np.sort(chances, axis=None)[::-1][:budget]
    np.testing.assert_array_equal(np.sort(taken)[::-1], ordered[: len(taken)])
    numbers = np.arange(len(ordered) + 1)
    work_by_cost = (work + np.append(0, np.cumsum(ordered))) / (work + FIXED_TOKENS + numbers)
    assert work_by_cost[len(taken)] >= work_by_cost.max() - 1e-9


def test_a_straggler_gets_long_drafts_and_wide_steps_only_what_is_nearly_certain() -> None:
    row = 0.95 ** np.arange(1, MOST_DRAFTED + 1)
    assert worthwhile(row[None], 1, 100)[0] > 20
    assert worthwhile(np.full((1, MOST_DRAFTED), 0.9), 1, 100).tolist() == [MOST_DRAFTED]
    wide = worthwhile(np.tile(row, (200, 1)), 200, 1_000)
    assert 0 < wide.max() <= 2
    assert worthwhile(np.tile(0.8 * row, (200, 1)), 200, 1_000).sum() == 0


def test_no_chance_no_draft() -> None:
    assert worthwhile(np.zeros((3, 4)), 1, 100).tolist() == [0, 0, 0]


class Rows:
    """Sequences that draft from one completion each, of different tokens."""

    def __init__(self, count: int, length: int = 100) -> None:
        self.completions = [np.arange(length) + 1_000 * i for i in range(count)]
        self.generated = GeneratedTokens(count)
        self.numbers = np.arange(count)
        drafts = Drafts(References(tuple((tokens,) for tokens in self.completions)), np.arange(count))
        self.speculation = Speculation(drafts, self.generated, np.ones(count, bool))
        self.append(np.array([tokens[0] for tokens in self.completions]))

    def append(self, tokens: np.ndarray) -> None:
        self.generated.append(self.numbers, tokens.astype(np.int32), np.zeros(len(tokens), np.float32))

    def propose(self, room: int = 100, budget: int = 1_000) -> Drafted | None:
        count = len(self.numbers)
        return self.speculation.propose(self.numbers, np.full(count, room), count, budget)

    def learn(self, drafted: Drafted, *, is_right: bool) -> None:
        """Of each sequence's first draft, or of all."""
        places = np.flatnonzero((drafted.token_ids >= 0) & (is_right | (drafted.before == 0)))
        sequences = np.repeat(self.numbers, drafted.counts)[places]
        self.speculation.learn(sequences, drafted.matched[places], np.full(len(places), is_right))


def test_drafts_are_what_followed() -> None:
    rows = Rows(3)
    drafted = rows.propose()
    assert drafted is not None
    for i, places in enumerate(np.split(np.arange(len(drafted.before)), np.cumsum(drafted.counts)[:-1])):
        assert drafted.before[places].tolist() == list(range(len(places)))
        assert drafted.token_ids[places].tolist() == [*rows.completions[i][1 : len(places)].tolist(), -1]
        assert drafted.matched[places].tolist() == [*np.minimum(np.arange(len(places) - 1) + 2, 8).tolist(), 0]


@pytest.mark.parametrize(("room", "budget"), [(2, 1_000), (100, 5), (0, 1_000), (100, 0)])
def test_limits(room: int, budget: int) -> None:
    drafted = Rows(3).propose(room, budget)
    if not min(room, budget):
        assert drafted is None
        return
    assert drafted is not None
    assert (drafted.counts <= room + 1).all()
    assert 0 < drafted.num_tokens <= budget


def test_the_last_token_of_a_completion_is_not_drafted() -> None:
    drafted = Rows(1, length=4).propose()
    assert drafted is not None
    assert drafted.token_ids.tolist() == [1, 2, -1]
    assert Rows(1, length=2).propose() is None


def test_there_is_nothing_to_draft_from() -> None:
    rows = Rows(2)
    for references in ((), ((),), ((np.zeros(0, np.int32),),)):
        drafts = Drafts(References(references), np.full(2, len(references) - 1))
        speculation = Speculation(drafts, rows.generated, np.ones(2, bool))
        assert speculation.propose(rows.numbers, np.full(2, 9), 2, 9) is None


def test_who_may_have_none_and_who_has_no_list() -> None:
    rows = Rows(3)
    drafts = Drafts(References(tuple((tokens,) for tokens in rows.completions)), np.array([0, 1, -1]))
    speculation = Speculation(drafts, rows.generated, np.array([True, False, True]))
    drafted = speculation.propose(rows.numbers, np.full(3, 100), 3, 1_000)
    assert drafted is not None
    assert drafted.counts[0] > 1
    assert drafted.counts[1:].tolist() == [1, 1]


@pytest.mark.parametrize("count", [1, 8, 64])
def test_what_fails_is_given_up_and_tried_again_rarely(count: int) -> None:
    rows, drafted_in, tokens = Rows(count), [], 0
    for step in range(1_000):
        if (drafted := rows.propose()) is not None:
            drafted_in.append(step)
            tokens += drafted.num_tokens
            rows.learn(drafted, is_right=False)
    assert drafted_in[0] == 0
    assert drafted_in[-1] > 500
    assert tokens < 0.02 * 1_000 * (count + FIXED_TOKENS)  # of the cost


def test_what_succeeds_goes_on() -> None:
    rows = Rows(64)
    for _ in range(50):
        drafted = rows.propose()
        assert drafted is not None
        rows.learn(drafted, is_right=True)
    assert drafted is not None
    assert drafted.num_tokens > 64 * 8


def test_one_sequence_that_fails_does_not_take_drafts_from_others() -> None:
    rows = Rows(2)
    for _ in range(20):
        drafted = rows.propose()
        assert drafted is not None
        places = np.flatnonzero(drafted.token_ids >= 0)
        sequences = np.repeat(rows.numbers, drafted.counts)[places]
        rows.speculation.learn(sequences, drafted.matched[places], sequences == 0)
    assert drafted.counts[0] > 3 * drafted.counts[1]


def test_the_host_waits_while_drafts_give_something() -> None:
    rows = Rows(64)
    for _ in range(20):
        assert rows.speculation.is_worth_waiting(rows.numbers)
        drafted = rows.propose()
        assert drafted is not None
        rows.learn(drafted, is_right=True)
    waits = []
    for _ in range(1_000):
        waits.append(rows.speculation.is_worth_waiting(rows.numbers))
        drafted = rows.propose(100 if waits[-1] else 0)  # the newest tokens are not known
        if drafted is not None:
            rows.learn(drafted, is_right=False)
    assert waits[0]
    assert sum(waits[500:]) < 20  # rarely, to see whether it has become otherwise
    assert any(waits[500:])


def test_nobody_waits_for_sequences_without_drafts() -> None:
    rows = Rows(2)
    drafts = Drafts(References(tuple((tokens,) for tokens in rows.completions)), np.array([0, -1]))
    speculation = Speculation(drafts, rows.generated, np.ones(2, bool))
    assert speculation.is_worth_waiting(np.array([0, 1]))
    assert not speculation.is_worth_waiting(np.array([1]))
