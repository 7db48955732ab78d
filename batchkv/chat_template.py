"""From conversations to texts, as the tokenizer's chat template says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jinja2

from batchkv.errors import RowError
from batchkv.io.prompts import Message
from batchkv.time_limit import TimeLimit, TookTooLongError

SECONDS = 5.0  # for a conversation, and for a batch of them
MAX_TEXT = 16 << 20  # characters of a conversation's text
MAX_TIMEOUTS = 3

# Rendered at once: takes half the time. Few enough that a batch takes the time of one only if something is wrong.
_BATCH_CONVERSATIONS = 256


class ChatTokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def render_conversations(
    conversations: Mapping[int, list[Message]],
    tokenizer: ChatTokenizer,
    *,
    seconds: float = SECONDS,
    max_text: int = MAX_TEXT,
) -> tuple[dict[int, str], dict[int, RowError]]:
    """The text of each conversation, and what is wrong with those that have none, by row number.

    Args:
        conversations: by row number.
        tokenizer: has the chat template.
        seconds: how long a conversation may take. After `MAX_TIMEOUTS` of them, one after the other, that took
            longer, the rest is not tried: there may be millions.
        max_text: characters that its text may have.
    """
    if not getattr(tokenizer, "chat_template", None):
        return {}, dict.fromkeys(conversations, _NO_TEMPLATE)
    renderer = _Renderer(tokenizer, seconds)
    rendered: dict[int, str] = {}
    errors: dict[int, RowError] = {}
    waiting = list(conversations)
    for start in range(0, len(waiting), _BATCH_CONVERSATIONS):
        rows = waiting[start : start + _BATCH_CONVERSATIONS]
        outcomes = renderer.render([conversations[row] for row in rows])
        for row, outcome in zip(rows, outcomes, strict=True):
            checked = _checked(outcome, max_text)
            if isinstance(checked, RowError):
                errors[row] = checked
            else:
                rendered[row] = checked
    return rendered, errors


class _Renderer:
    """Counts the conversations that took too long, one after the other."""

    def __init__(self, tokenizer: ChatTokenizer, seconds: float) -> None:
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._timeouts = 0

    def render(self, conversations: Sequence[list[Message]]) -> list[str | RowError]:
        """All at once; one by one if one of them fails or all take too long."""
        if not self._timeouts and len(conversations) > 1:
            try:
                with TimeLimit(self._seconds):
                    return list(self._apply(conversations))
            except (Exception, TookTooLongError):  # a template is a program of its own and can fail in any way
                pass
        return [self._render_one(messages) for messages in conversations]

    def _render_one(self, messages: list[Message]) -> str | RowError:
        if self._timeouts >= MAX_TIMEOUTS:
            return _NOT_TRIED
        try:
            with TimeLimit(self._seconds):
                text = str(self._apply(messages))
        except TookTooLongError:
            self._timeouts += 1
            return RowError("bad_messages", f"the chat template took more than {self._seconds:g} seconds")
        except Exception as error:
            self._timeouts = 0
            return RowError("bad_messages", f"the chat template fails with {_reason(error, messages)}")
        self._timeouts = 0
        return text

    def _apply(self, conversation: Any) -> Any:
        return self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)


def is_unicode(text: str) -> bool:
    """Whether the text holds no half of a surrogate pair, which tokenizers do not take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked(outcome: str | RowError, max_text: int) -> str | RowError:
    if isinstance(outcome, RowError):
        return outcome
    if len(outcome) > max_text:
        return RowError(
            "too_long", f"the chat template gives {len(outcome)} characters, no more than {max_text} are taken"
        )
    return outcome if is_unicode(outcome) else NOT_UNICODE


def _reason(error: Exception, messages: list[Message]) -> str:
    """The first line of what a template complains of, unless that quotes a message."""
    kind = type(error).__name__
    if not isinstance(error, jinja2.TemplateError):
        return kind
    line = next(iter(str(error).splitlines()), "")[:200]
    contents = (str(message.get("content") or "").strip() for message in messages)
    quotes = any(content and (content in line or line in content) for content in contents)
    return kind if quotes or not line else f"{kind}: {line}"


NOT_UNICODE = RowError("bad_prompt", "the text holds half of a surrogate pair, which is no character")
_NO_TEMPLATE = RowError(
    "bad_messages",
    "the tokenizer has no chat template: use prompt or prompt_token_ids, or a tokenizer that has one",
)
_NOT_TRIED = RowError("bad_messages", "the chat template was not tried: it took too long for the rows before")
