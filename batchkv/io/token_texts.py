"""The text of single tokens, and their bytes."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any, Protocol


class Decoder(Protocol):
    """What is needed of a transformers tokenizer."""

    @property
    def all_special_ids(self) -> Any: ...

    def decode(self, token_ids: Any, **options: Any) -> Any: ...

    def convert_ids_to_tokens(self, ids: Any) -> Any: ...


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes: printable ones as they are, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + k): b for k, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The text of single tokens, and their bytes where they are known: a token can be half a character."""

    def __init__(self, tokenizer: Decoder | None) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids) if tokenizer is not None else frozenset()
        self._found: dict[int, tuple[str, bytes | None]] = {}

    def text_of(self, token_ids: list[int]) -> str:
        """The text of several tokens, special ones included."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))

    def token(self, token_id: int) -> tuple[str, bytes | None]:
        """Text and bytes of a token."""
        found = self._found.get(token_id)
        if found is None:
            found = self._found[token_id] = self._decode(token_id)
        return found

    def offsets(self, token_ids: Sequence[int], length: int) -> list[int]:
        """The character of a text of `length` characters at which each of its tokens begins."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        offsets: list[int] = []
        position = 0
        for token_id in token_ids:
            offsets.append(min(position, length))
            if token_id not in self._special:  # those are not in the text
                text, raw = self.token(token_id)
                position += len(text if raw is None else decoder.decode(raw))
        return offsets

    def _decode(self, token_id: int) -> tuple[str, bytes | None]:
        if self._tokenizer is None:
            return f"token_id:{token_id}", None
        text = self.text_of([token_id])
        raw = _token_bytes(str(self._tokenizer.convert_ids_to_tokens(token_id) or ""), text)
        return text if raw is None else raw.decode("utf-8", "replace"), raw


def _token_bytes(piece: str, text: str) -> bytes | None:
    """The bytes of a token that the vocabulary writes as `piece` and that alone decodes to `text`, if they are known.

    How a vocabulary writes bytes is a convention of its kind; which kind it is shows in that the bytes give the text.
    """
    byte = _BYTE_TOKEN.fullmatch(piece)
    if byte:
        return bytes.fromhex(byte[1])
    if piece and all(char in _BYTE_OF for char in piece):
        raw = bytes(_BYTE_OF[char] for char in piece)
        if raw.decode("utf-8", "replace") == text:
            return raw
    spaced = piece.replace("▁", " ")
    if spaced != piece and spaced.strip() == text.strip():  # decoders drop the space before a text's first word
        return spaced.encode()
    return None if "\ufffd" in text else text.encode()
