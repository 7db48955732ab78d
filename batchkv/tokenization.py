"""From prompts to token ids: one flat arena for the whole job."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchkv.chat_template import render_conversations
from batchkv.errors import RowError, UserError
from batchkv.io.prompts import Prompts
from batchkv.token_arena import TokenArena, TokenIds, joined

# Texts handed to the tokenizer at once: enough to keep its threads busy, few enough to keep what it returns in cache.
BATCH_TEXTS = 1024

# A text of many more characters than a model has context for is not tokenized as a whole, which for 10 MB can take 20
# seconds and a gigabyte: a part is, and if that has twice the tokens that fit, what follows cannot help.
_PROBED_CHARACTERS = 1 << 16
_CHARACTERS_PER_TOKEN = 16


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    chat_template: Any
    bos_token: Any
    bos_token_id: Any

    def __call__(self, text: Any, **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def tokenize(
    prompts: Prompts, tokenizer: Tokenizer | None, context_length: int | None = None
) -> tuple[TokenArena, dict[int, RowError]]:
    """The token ids of every row, and the errors that tokenizing found, by row number.

    Texts that are far too long for `context_length` are an error and not tokenized.

    A `prompt` gets the special tokens that the tokenizer adds; a BOS that its text begins with is not added
    again. `messages` give what `apply_chat_template(..., add_generation_prompt=True)` gives.

    Raises:
        UserError: rows hold text, but there is no tokenizer.
    """
    if prompts.texts.null_count == len(prompts) and not prompts.conversations:
        return prompts.token_ids, {}
    if tokenizer is None:
        raise UserError("without a tokenizer only prompt_token_ids can be run: name one (--tokenizer, tokenizer=)")
    rendered, errors = render_conversations(prompts.conversations, tokenizer)
    arenas: list[TokenArena] = []
    source = np.full(len(prompts), -1, np.int64)  # where each row is in `arenas`, one after the other
    for rows, texts, add_special_tokens in (
        (np.arange(len(prompts)), prompts.texts.combine_chunks(), True),
        (np.fromiter(rendered, np.int64), pa.array(rendered.values(), pa.large_string()), False),
    ):
        overlong = _far_too_long(texts, tokenizer, context_length)
        errors |= dict.fromkeys(rows[overlong].tolist(), _overlong(context_length))
        distinct = pc.if_else(pa.array(overlong), pa.scalar(None, texts.type), texts).dictionary_encode()
        codes = distinct.indices.fill_null(-1).to_numpy()
        source[rows[codes >= 0]] = codes[codes >= 0] + sum(arena.num_rows for arena in arenas)
        arenas.append(_encode(distinct.dictionary, tokenizer, add_special_tokens=add_special_tokens))
    has_ids = prompts.token_ids.lengths > 0
    if has_ids.any():
        source[has_ids] = np.flatnonzero(has_ids) + sum(arena.num_rows for arena in arenas)
        arenas.append(prompts.token_ids)
    return joined(arenas).take(source), errors


def _far_too_long(
    texts: pa.LargeStringArray, tokenizer: Tokenizer, context_length: int | None
) -> npt.NDArray[np.bool_]:
    """Which texts have many times the tokens of the context: bool [texts]."""
    found = np.zeros(len(texts), np.bool_)
    if context_length is None:
        return found
    characters = max(_PROBED_CHARACTERS, _CHARACTERS_PER_TOKEN * context_length)
    lengths = pc.binary_length(texts).fill_null(0).to_numpy(zero_copy_only=False)  # in bytes: no fewer
    for i in np.flatnonzero(lengths > characters).tolist():
        beginning: str = pc.utf8_slice_codeunits(texts[i], 0, characters).as_py()
        found[i] = len(token_ids_of([beginning], tokenizer, False)[0]) >= 2 * context_length
    return found


def _overlong(context_length: int | None) -> RowError:
    return RowError(
        "too_long",
        f"the prompt has at least twice the tokens of the model's context of {context_length}, which must hold it and "
        "one generated token",
    )


def check_prompts(
    arena: TokenArena,
    *,
    vocab_size: int,
    context_length: int | None,
    is_scored: npt.NDArray[np.bool_] | None = None,
    errors: Container[int] = (),
) -> dict[int, RowError]:
    """What the model cannot take, by row number: `empty_prompt`, `bad_token_id` and `too_long`.

    A prompt must leave room for one generated token. Of a row that is scored (bool [rows], none by default), which has
    its continuation behind the prompt, the last token is not computed and may be behind the context. Rows that are in
    `errors` already are not looked at.
    """
    found: dict[int, RowError] = {}
    lengths = arena.lengths
    scored = np.zeros(len(lengths), np.bool_) if is_scored is None else is_scored
    for row in np.flatnonzero(lengths == 0).tolist():
        found[row] = RowError("empty_prompt", "the prompt has no tokens")
    if context_length is not None:
        for row in np.flatnonzero(lengths >= np.where(scored, context_length + 2, context_length)).tolist():
            found[row] = RowError(
                "too_long",
                f"prompt and continuation have {lengths[row]} tokens, but the model's context of {context_length} "
                "must hold all but the last"
                if scored[row]
                else f"the prompt has {lengths[row]} tokens, but the model's context of {context_length} "
                "must hold it and one generated token",
            )
    for row, token in zip(*(column.tolist() for column in arena.tokens_outside(vocab_size)), strict=True):
        message = f"the prompt holds the token id {token}, must be from 0 to {vocab_size - 1}"
        found[row] = RowError("bad_token_id", message)
    return {row: error for row, error in sorted(found.items()) if row not in errors}


def _encode(texts: pa.LargeStringArray, tokenizer: Tokenizer, *, add_special_tokens: bool) -> TokenArena:
    """The token ids of each text."""
    if len(texts) == 0:
        return TokenArena.from_rows([])
    adds_bos = add_special_tokens and _adds_bos(tokenizer)
    tokens: list[TokenIds] = []
    lengths: list[npt.NDArray[np.int64]] = []
    for start in range(0, len(texts), BATCH_TEXTS):
        ids = token_ids_of(texts.slice(start, BATCH_TEXTS).to_pylist(), tokenizer, add_special_tokens)
        lengths.append(np.fromiter(map(len, ids), np.int64, len(ids)))
        tokens.append(np.fromiter(chain.from_iterable(ids), np.int32, int(lengths[-1].sum())))
    arena = TokenArena.from_lengths(np.concatenate(tokens), np.concatenate(lengths))
    return _without_second_bos(texts, arena, tokenizer) if adds_bos else arena


def continuation_ids(continuations: Sequence[str | TokenIds], tokenizer: Tokenizer | None) -> list[TokenIds]:
    """Of texts that follow a prompt, and so begin with no special token; token ids as they are.

    Raises:
        UserError: there are texts, but no tokenizer.
    """
    texts = list(dict.fromkeys(one for one in continuations if isinstance(one, str)))
    if texts and tokenizer is None:
        raise UserError("without a tokenizer only token ids can be run: name one (--tokenizer, tokenizer=)")
    ids_of: dict[str, TokenIds] = {}
    for start in range(0, len(texts), BATCH_TEXTS):
        part = texts[start : start + BATCH_TEXTS]
        if tokenizer is not None:
            ids_of |= zip(part, (np.array(ids, np.int32) for ids in token_ids_of(part, tokenizer, False)), strict=True)
    return [ids_of[one] if isinstance(one, str) else one for one in continuations]


def token_ids_of(texts: list[str], tokenizer: Tokenizer, add_special_tokens: bool) -> list[list[int]]:
    """The token ids of each text; no more than `BATCH_TEXTS` are meant to be handed over at once."""
    backend = _backend(tokenizer)
    if backend is not None:
        _set_options(backend, tokenizer)
        return [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
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


def _backend(tokenizer: Tokenizer) -> Any | None:
    """The tokenizer in Rust that `tokenizer` hands every text to as it is; None if there is none, or its class has a
    way of its own. (What transformers makes of the results for others takes it a third as long as tokenizing.)
    """
    from transformers import PreTrainedTokenizerFast

    own, plain = type(tokenizer), PreTrainedTokenizerFast
    ways = ("__call__", "_encode_plus", "_convert_encoding", "set_truncation_and_padding")
    is_plain = all(getattr(own, way, None) is getattr(plain, way) for way in ways)
    return tokenizer.backend_tokenizer if isinstance(tokenizer, plain) and is_plain else None


def _set_options(backend: Any, tokenizer: Any) -> None:
    """As transformers does for texts that are neither cut nor padded; others may use the tokenizer meanwhile. (What is
    as it should be is not touched: that fails while another thread encodes.)"""
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        backend.encode_special_tokens = tokenizer.split_special_tokens


def _adds_bos(tokenizer: Tokenizer) -> bool:
    if tokenizer.bos_token_id is None:
        return False
    return token_ids_of([""], tokenizer, True)[0][:1] == [tokenizer.bos_token_id]


def _without_second_bos(texts: pa.LargeStringArray, arena: TokenArena, tokenizer: Tokenizer) -> TokenArena:
    """Drops the BOS that the tokenizer adds before one that a text begins with."""
    bos = tokenizer.bos_token_id
    starts_with_bos = pc.starts_with(texts, pattern=tokenizer.bos_token).to_numpy(zero_copy_only=False)
    first = arena.offsets[:-1][starts_with_bos & (arena.lengths > 1)]
    twice = first[(arena.tokens[first] == bos) & (arena.tokens[first + 1] == bos)]
    lengths = arena.lengths.copy()
    lengths[np.searchsorted(arena.offsets, twice, side="right") - 1] -= 1
    return TokenArena.from_lengths(np.delete(arena.tokens, twice), lengths)
