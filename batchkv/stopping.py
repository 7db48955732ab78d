"""When a sample ends: the model's end tokens, the stop tokens and the stop strings of a row.

Text is the decoding of a sample's own tokens without special tokens. Checking token ids and lengths is left to
the scheduler, which does it for a whole batch at once; only rows with stop strings come here for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens decoded ahead of those that a stop string can span: some decoders strip the leading space of what they
# get, and where spaces before punctuation are cleaned up, a stop string can span a few tokens more.
_CONTEXT_TOKENS = 4
# What decoders write for bytes that are no whole character (U+FFFD), and the most bytes of a character.
_REPLACEMENT = "\ufffd"
_CHARACTER_BYTES = 4


def end_token_ids(
    generation_config_eos: int | Sequence[int] | None,
    config_eos: int | Sequence[int] | None,
    tokenizer_eos: int | None,
) -> tuple[int, ...]:
    """All end tokens of the generation config, else of the model's config, else the tokenizer's; may be none.

    Chat models list several, and the tokenizer knows only one of them.
    """
    for eos in (generation_config_eos, config_eos, tokenizer_eos):
        ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        if ids:
            return tuple(dict.fromkeys(ids))
    return ()


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a sample besides the model's end tokens: strings found in its text, and token ids."""

    strings: tuple[str, ...]
    token_ids: tuple[int, ...]


def resolve_stops(strings: Sequence[str], token_ids: Sequence[int], special_token_ids: Mapping[str, int]) -> Stops:
    """Turns stop strings that are exactly a special token into its id: decoding would skip it.

    Args:
        strings: `SamplingParams.stop`.
        token_ids: `SamplingParams.stop_token_ids`.
        special_token_ids: text and id of the special tokens, from `special_token_ids`.
    """
    special = [special_token_ids[stop] for stop in strings if stop in special_token_ids]
    return Stops(
        strings=tuple(stop for stop in dict.fromkeys(strings) if stop not in special_token_ids),
        token_ids=tuple(dict.fromkeys((*token_ids, *special))),
    )


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Text and id of every token that decoding without special tokens skips."""
    added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string starts in the text, and which it is (of two at one place, the earlier listed)."""
    found = ((text.find(stop), stop) for stop in stops)
    return min((hit for hit in found if hit[0] >= 0), key=itemgetter(0), default=None)


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before its first stop string; all of it where there is none."""
    hit = find_stop(text, stops)
    return text if hit is None else text[: hit[0]]


class StopStringMatcher:
    """Finds stop strings in samples that grow token by token; one serves all samples with the same stops.

    Only a tail of a sample is decoded for each token, so the cost of a token does not grow with the sample. A
    hit there is confirmed on the whole text, because a tail may be decoded differently.

    Args:
        decode: text of token ids without special tokens, as it is written to the results.
        stops: the stop strings, none of them empty.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        # A token with text has at least one byte, so no stop string spans more tokens than it has bytes.
        longest = max((len(stop.encode("utf-8", "surrogatepass")) for stop in stops), default=0)
        self._tail_tokens = longest + _CONTEXT_TOKENS
        self._has_text: dict[int, bool] = {}

    def find(self, token_ids: npt.NDArray[np.integer]) -> str | None:
        """The stop string that comes first in the text of a sample, if there is one.

        To be called after every token: it looks for what the last token completes.

        Args:
            token_ids: int [tokens], all that the sample has so far.
        """
        if find_stop(self._tail(token_ids), self._stops) is None:
            return None
        hit = find_stop(self._decode(token_ids.tolist()), self._stops)
        return None if hit is None else hit[1]

    def _tail(self, token_ids: npt.NDArray[np.integer]) -> str:
        """Text of the last tokens, starting at a whole character.

        Decoders with byte fallback give up a whole run of byte tokens if one character in it is cut in two.
        """
        start = self._tail_start(token_ids)
        text = ""
        for first in range(start, max(start - _CHARACTER_BYTES, -1), -1):
            text = self._decode(token_ids[first:].tolist())
            if not text.startswith(_REPLACEMENT):
                break
        return text

    def _tail_start(self, token_ids: npt.NDArray[np.integer]) -> int:
        """Index from which there are `_tail_tokens` tokens with text; 0 if there are fewer."""
        missing = self._tail_tokens
        for index in range(len(token_ids) - 1, -1, -1):
            missing -= self._shows(int(token_ids[index]))
            if not missing:
                return index
        return 0

    def _shows(self, token_id: int) -> bool:
        """Whether a token has text: special tokens and ids past the tokenizer's vocabulary have none."""
        if token_id not in self._has_text:
            self._has_text[token_id] = bool(self._decode([token_id]))
        return self._has_text[token_id]
