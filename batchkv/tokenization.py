"""From prompts to token ids: one flat arena for the whole job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import jinja2
import numpy as np

from batchkv.errors import RowError, UserError
from batchkv.job import Job, Message
from batchkv.token_arena import TokenArena, TokenIds

# Texts handed to the tokenizer at once: enough to keep its threads busy, few enough to keep memory flat.
BATCH_TEXTS = 1024
_NO_ERRORS: Mapping[int, RowError] = {}


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    chat_template: Any
    bos_token: Any
    bos_token_id: Any

    def __call__(self, text: Any, **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def tokenize(job: Job, tokenizer: Tokenizer | None) -> tuple[TokenArena, dict[int, RowError]]:
    """The token ids of every row, and the errors that tokenizing found, by row number.

    A `prompt` gets the special tokens that the tokenizer adds; a BOS that its text begins with is not added
    again. `messages` give what `apply_chat_template(..., add_generation_prompt=True)` gives.

    Raises:
        UserError: rows hold text, but there is no tokenizer.
    """
    prompts = {row: prompt for row, prompt in enumerate(job.prompts) if isinstance(prompt, str)}
    conversations = {row: prompt for row, prompt in enumerate(job.prompts) if isinstance(prompt, list)}
    rows = [prompt if isinstance(prompt, np.ndarray) else _NO_TOKENS for prompt in job.prompts]
    errors: dict[int, RowError] = {}
    if prompts or conversations:
        if tokenizer is None:
            raise UserError("without a tokenizer only prompt_token_ids can be run: name one with --tokenizer")
        rendered, errors = _render(conversations, tokenizer)
        for texts, add_special_tokens in ((prompts, True), (rendered, False)):
            encoded = _encode_distinct(texts.values(), tokenizer, add_special_tokens=add_special_tokens)
            for row, text in texts.items():
                tokens = encoded.get(text)
                if tokens is None:
                    errors[row] = _NOT_UNICODE
                else:
                    rows[row] = tokens
    return TokenArena.from_rows(rows), errors


def check_prompts(
    arena: TokenArena,
    job: Job,
    *,
    vocab_size: int,
    context_length: int | None,
    errors: Mapping[int, RowError] = _NO_ERRORS,
) -> dict[int, RowError]:
    """What the model cannot take, by row number: `empty_prompt`, `bad_token_id` and `too_long`.

    A prompt must leave room for one generated token. Rows that have an error already, in `job` or in
    `errors`, are not looked at.
    """
    found: dict[int, RowError] = {}
    lengths = arena.lengths
    for row in np.flatnonzero(lengths == 0).tolist():
        found[row] = RowError("empty_prompt", "the prompt has no tokens")
    if context_length is not None:
        for row in np.flatnonzero(lengths >= context_length).tolist():
            found[row] = RowError(
                "too_long",
                f"the prompt has {lengths[row]} tokens, but the model's context of {context_length} "
                f"must hold it and one generated token",
            )
    positions = np.flatnonzero((arena.tokens < 0) | (arena.tokens >= vocab_size))
    rows, first = np.unique(np.searchsorted(arena.offsets, positions, side="right") - 1, return_index=True)
    for row, token in zip(rows.tolist(), arena.tokens[positions[first]].tolist(), strict=True):
        message = f"the prompt holds the token id {token}, must be from 0 to {vocab_size - 1}"
        found[row] = RowError("bad_token_id", message)
    return {row: error for row, error in sorted(found.items()) if row not in job.errors and row not in errors}


def _render(
    conversations: Mapping[int, list[Message]], tokenizer: Tokenizer
) -> tuple[dict[int, str], dict[int, RowError]]:
    rendered: dict[int, str] = {}
    errors: dict[int, RowError] = {}
    has_template = bool(getattr(tokenizer, "chat_template", None))
    for row, messages in conversations.items():
        outcome = _render_one(messages, tokenizer) if has_template else _NO_TEMPLATE
        if isinstance(outcome, RowError):
            errors[row] = outcome
        else:
            rendered[row] = outcome
    return rendered, errors


def _render_one(messages: list[Message], tokenizer: Tokenizer) -> str | RowError:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program of its own and can fail in any way
        return RowError("bad_messages", f"the chat template fails with {_reason(error, messages)}")


def _reason(error: Exception, messages: list[Message]) -> str:
    """The first line of what a template complains of, unless that quotes a message."""
    kind = type(error).__name__
    if not isinstance(error, jinja2.TemplateError):
        return kind
    line = next(iter(str(error).splitlines()), "")[:200]
    contents = (str(message.get("content") or "").strip() for message in messages)
    quotes = any(content and (content in line or line in content) for content in contents)
    return kind if quotes or not line else f"{kind}: {line}"


def _encode_distinct(texts: Iterable[str], tokenizer: Tokenizer, *, add_special_tokens: bool) -> dict[str, TokenIds]:
    """Token ids by text, each text encoded once; those that are no valid Unicode are missing."""
    distinct = [text for text in dict.fromkeys(texts) if _is_unicode(text)]
    adds_bos = add_special_tokens and distinct and _adds_bos(tokenizer)
    encoded: dict[str, TokenIds] = {}
    for start in range(0, len(distinct), BATCH_TEXTS):
        batch = distinct[start : start + BATCH_TEXTS]
        for text, ids in zip(batch, _encode(batch, tokenizer, add_special_tokens), strict=True):
            tokens = np.array(ids, dtype=np.int32)
            encoded[text] = _without_second_bos(text, tokens, tokenizer) if adds_bos else tokens
    return encoded


def _encode(texts: list[str], tokenizer: Tokenizer, add_special_tokens: bool) -> list[list[int]]:
    # Not verbose: the tokenizer would warn of its own length limit, which is not the model's.
    encoding = tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    ids: list[list[int]] = encoding["input_ids"]
    return ids


def _adds_bos(tokenizer: Tokenizer) -> bool:
    if tokenizer.bos_token_id is None:
        return False
    return _encode([""], tokenizer, True)[0][:1] == [tokenizer.bos_token_id]


def _without_second_bos(text: str, tokens: TokenIds, tokenizer: Tokenizer) -> TokenIds:
    """Drops the BOS that the tokenizer adds before one that the text begins with."""
    starts_with_bos = text.startswith(tokenizer.bos_token)
    return tokens[1:] if starts_with_bos and (tokens[:2] == tokenizer.bos_token_id).all() else tokens


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_NO_TOKENS: TokenIds = np.empty(0, dtype=np.int32)
_NOT_UNICODE = RowError("bad_prompt", "the text holds half of a surrogate pair, which is no character")
_NO_TEMPLATE = RowError(
    "bad_messages",
    "the tokenizer has no chat template: use prompt or prompt_token_ids, or a tokenizer that has one",
)
