"""Puts the outputs of rows into the texts of other rows: `{{ outputs["ID"] }}`, and all else that Jinja has.

A template may come from anyone, so it is rendered in a process of its own. That is ended when a row takes too long,
and dies when one takes too much memory; then another one goes on with the next row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

from batchkv.errors import RowError
from batchkv.io.prompts import Message
from batchkv.template_process import ProcessDiedError, TemplateProcess

TextPrompt: TypeAlias = "str | list[Message]"

MAX_TEXT = 16 << 20
SECONDS_PER_ROW = 5.0
MEMORY_BYTES = 512 << 20
MAX_FAILURES = 10

_BATCH_ROWS = 256  # sent at once
_BATCH_CHARACTERS = 1 << 20  # so that they take little of the process's memory
_MESSAGE_WIDTH = 200

_TAG = re.compile(r"\{[{%#]")
# All that most templates consist of. What has a backslash in it is left to Jinja.
_OUTPUT = re.compile(r"""\{\{\s*outputs\[\s*(?:"([^"\\\r\n]*)"|'([^'\\\r\n]*)'|(0|[1-9][0-9]*))\s*\]\s*\}\}""")
_NEWLINE = re.compile(r"\r\n?")


@dataclass(frozen=True, slots=True)
class TemplateRow:
    """A row whose text uses the outputs of others.

    Attributes:
        prompt: a text or a conversation; every text in it is a template.
        samples: the texts of all samples of each row that it depends on, by the id of that row.
    """

    prompt: TextPrompt
    samples: Mapping[str | int, Sequence[str]]


@dataclass(frozen=True, slots=True)
class _Request:
    """What the process is told of a row."""

    templates: list[str]
    samples: dict[str, list[str]]

    @classmethod
    def of(cls, row: TemplateRow) -> _Request:
        return cls(prompt_texts(row.prompt), {str(row_id): list(texts) for row_id, texts in row.samples.items()})

    @property
    def size(self) -> int:
        """Characters."""
        return sum(map(len, self.templates)) + sum(sum(map(len, texts)) for texts in self.samples.values())


_Outcome: TypeAlias = "list[str] | RowError"


class TemplateRenderer:
    """Renders prompts. A context manager: its process starts when it is first needed and ends with it.

    Args:
        seconds_per_row: how long a row may take.
        memory_bytes: how much memory the process may have.
        max_text: characters that may go into a row, and that may come out of it.
        max_failures: after so many rows, one after the other, that took too long or ended the process, no other is
            tried: it is no accident then, and a million of them would take weeks.
    """

    def __init__(
        self,
        *,
        seconds_per_row: float = SECONDS_PER_ROW,
        memory_bytes: int = MEMORY_BYTES,
        max_text: int = MAX_TEXT,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        self._seconds = seconds_per_row
        self._memory_bytes = memory_bytes
        self._max_text = max_text
        self._max_failures = max_failures
        self._failures = 0
        self._process: TemplateProcess | None = None

    def __enter__(self) -> TemplateRenderer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The id of its process, if there is one."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def render(self, rows: Sequence[TemplateRow]) -> list[TextPrompt | RowError]:
        """The prompt of each row with the outputs in it, or what is wrong with its templates (`bad_template`).

        A text without `{{`, `{%` and `{#` stays as it is; in others, line ends become `\\n` as always in Jinja.
        """
        requests = [_Request.of(row) for row in rows]
        outcomes = [self._without_jinja(request) for request in requests]
        waiting = [number for number, outcome in enumerate(outcomes) if outcome is None]
        for batch in _batches(waiting, requests):
            answers = self._render_batch([requests[number] for number in batch])
            for number, answer in zip(batch, answers, strict=True):
                outcomes[number] = answer
        return [_filled(row.prompt, outcome) for row, outcome in zip(rows, outcomes, strict=True)]

    def _without_jinja(self, request: _Request) -> _Outcome | None:
        """The texts, where it takes no Jinja to tell them; none where it does."""
        if request.size > self._max_text:
            return RowError("bad_template", f"texts and outputs together have more than {self._max_text} characters")
        pieces = [_pieces(template, request.samples) for template in request.templates]
        if None in pieces:
            return None
        if sum(len(piece) for text in pieces for piece in text or ()) > self._max_text:
            return RowError("bad_template", f"the text would have more than {self._max_text} characters")
        return ["".join(text or ()) for text in pieces]

    def _render_batch(self, requests: Sequence[_Request]) -> list[_Outcome]:
        outcomes: list[_Outcome] = []
        while len(outcomes) < len(requests):
            if self._failures >= self._max_failures:
                outcomes.append(_NOT_TRIED)
                continue
            try:
                self._attempt(requests[len(outcomes) :], outcomes)
            except BaseException:
                self.close()  # answers that nobody reads any more could be taken for those to the next batch
                raise
        return outcomes

    def _attempt(self, requests: Sequence[_Request], outcomes: list[_Outcome]) -> None:
        """Appends the outcomes of `requests`, up to the first that ends the process or has it ended."""
        if self._process is None:
            self._process = TemplateProcess(
                memory_bytes=self._memory_bytes, max_text=self._max_text, seconds_per_row=self._seconds
            )
        try:
            self._process.send([[request.templates, request.samples] for request in requests])
            for request in requests:
                outcomes.append(_outcome(self._process.receive(self._seconds), len(request.templates)))
                self._failures = 0
        except (TimeoutError, ProcessDiedError) as error:
            took_long = isinstance(error, TimeoutError)
            reason = f"it takes more than {self._seconds:g} seconds" if took_long else _DIED
            outcomes.append(RowError("bad_template", f"the template cannot be rendered: {reason}"))
            self._failures += 1
            self.close()


def prompt_texts(prompt: TextPrompt) -> list[str]:
    """The texts of a prompt that can be templates, in order: itself, or the contents and text parts of its messages."""
    texts: list[str] = []
    _map_texts(prompt, lambda text: texts.append(text) or text)  # type: ignore[func-returns-value]
    return texts


def with_texts(prompt: TextPrompt, texts: Sequence[str]) -> TextPrompt:
    """The prompt with other texts in the places of `prompt_texts`."""
    following = iter(texts)
    return _map_texts(prompt, lambda _: next(following))


def _map_texts(prompt: TextPrompt, change: Callable[[str], str]) -> TextPrompt:
    if isinstance(prompt, str):
        return change(prompt)
    return [
        {**message, "content": _map_content(message["content"], change)} if "content" in message else message
        for message in prompt
    ]


def _map_content(content: Any, change: Callable[[str], str]) -> Any:
    if isinstance(content, str):
        return change(content)
    if isinstance(content, list):
        return [{**part, "text": change(part["text"])} if "text" in part else part for part in content]
    return content


def _filled(prompt: TextPrompt, outcome: _Outcome | None) -> TextPrompt | RowError:
    if outcome is None or isinstance(outcome, RowError):
        return outcome or _NOT_TRIED
    return with_texts(prompt, outcome)


def _pieces(template: str, samples: Mapping[str, Sequence[str]]) -> list[str] | None:
    """What the text is joined from, if nothing but known outputs go into it: most templates, and no work for Jinja."""
    tag = _TAG.search(template)
    if tag is None:
        return [template]
    pieces: list[str] = []
    end = 0
    while tag is not None:
        output = _OUTPUT.match(template, tag.start())
        if output is None:
            return None
        row_id = next(group for group in output.groups() if group is not None)
        if row_id not in samples:
            return None
        pieces += [_NEWLINE.sub("\n", template[end : tag.start()]), samples[row_id][0]]
        end = output.end()
        tag = _TAG.search(template, end)
    return [*pieces, _NEWLINE.sub("\n", template[end:])]


def _batches(numbers: Sequence[int], requests: Sequence[_Request]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for number in numbers:
        if batch and (len(batch) == _BATCH_ROWS or size + requests[number].size > _BATCH_CHARACTERS):
            yield batch
            batch, size = [], 0
        batch.append(number)
        size += requests[number].size
    if batch:
        yield batch


def _outcome(answer: Any, num_texts: int) -> _Outcome:
    """An answer of the process, which is not to be trusted: a template may have taken it over."""
    texts = answer.get("texts") if isinstance(answer, dict) else None
    if isinstance(texts, list) and len(texts) == num_texts and all(isinstance(text, str) for text in texts):
        return texts if all(map(_is_unicode, texts)) else _NOT_UNICODE
    reason = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(reason, str):
        raise ProcessDiedError
    return RowError("bad_template", f"the template cannot be rendered: {reason[:_MESSAGE_WIDTH]}")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_DIED = "it takes too much memory or is nested too deeply"
_NOT_TRIED = RowError("bad_template", "the template was not tried: those before it, one after the other, took too long")
_NOT_UNICODE = RowError("bad_template", "the template gives half of a surrogate pair, which is no character")
