"""Chat templates that never end, or give too much: the row fails, the job goes on, and nothing is raised later."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from batchkv.chat_template import MAX_TIMEOUTS, render_conversations
from batchkv.errors import RowError
from batchkv.io.prompts import Message
from batchkv.time_limit import TimeLimit, TookTooLongError
from tests.tiny_models import tiny_tokenizer

SHORT = 0.5  # seconds, for what never ends
# Never ends where a message says so.
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'hang' %}"
    "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


def render(*contents: str, **limits: Any) -> list[str | RowError]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    conversations: dict[int, list[Message]] = {
        row: [{"role": "user", "content": content}] for row, content in enumerate(contents)
    }
    texts, errors = render_conversations(conversations, tokenizer, **limits)
    assert not texts.keys() & errors.keys()
    return [texts[row] if row in texts else errors[row] for row in conversations]


def endless() -> None:
    while True:
        pass


def test_a_conversation_that_never_ends_costs_only_itself() -> None:
    outcomes = render("a", "hang", "b", seconds=SHORT)
    assert outcomes == ["a", RowError("bad_messages", "the chat template took more than 0.5 seconds"), "b"]


def test_after_some_that_never_end_no_other_is_tried() -> None:
    outcomes = render(*["hang"] * MAX_TIMEOUTS, "hang", "a", seconds=SHORT)
    assert ["took more than" in error.message for error in outcomes if isinstance(error, RowError)] == [
        *[True] * MAX_TIMEOUTS,
        False,
        False,
    ]
    assert "not tried" in str(outcomes[-1])


def test_the_text_is_limited() -> None:
    short, long = render("a" * 10, "a" * 11, max_text=10)
    assert short == "a" * 10
    assert isinstance(long, RowError)
    assert (long.code, "11 characters" in long.message) == ("too_long", True)


def test_the_limit_holds_in_any_thread() -> None:
    caught: list[bool] = []

    def work() -> None:
        try:
            with TimeLimit(0.01):
                endless()
        except TookTooLongError:
            caught.append(True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert caught == [True]


def test_it_is_raised_through_code_that_catches_errors() -> None:
    def stubborn() -> None:
        while True:
            with contextlib.suppress(Exception):
                endless()

    with pytest.raises(TookTooLongError), TimeLimit(0.01):
        stubborn()


def test_nothing_is_raised_once_the_block_has_ended() -> None:
    """Blocks that end about when their time is over: in each, or not at all."""
    raised = 0
    for number in range(400):
        try:
            with TimeLimit(0.0005):
                for _ in range(number * 40):
                    pass
        except TookTooLongError:
            raised += 1
        for _ in range(2000):  # where it would be raised late
            pass
    assert 0 <= raised <= 400


def test_a_block_in_time_raises_nothing() -> None:
    with TimeLimit(60):
        pass
    limit = TimeLimit(60)
    with limit:
        pass
    limit._fire()  # as a timer would that was about to fire when the block ended
    for _ in range(1000):
        pass
