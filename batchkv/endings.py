"""Which of the sequences that just got a token have ended, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from batchkv.sampling_params import SamplingParams
from batchkv.sequence import GeneratedTokens
from batchkv.stopping import StopStringMatcher, resolve_stops, special_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Ending(IntEnum):
    NONE = 0
    STOP = 1  # an end token, a stop token or a stop string; or a constrained text is complete
    LENGTH = 2  # max_tokens, or the end of the context
    INVALID = 3  # the model's logits were no distribution


class Endings:
    """Decides for every sequence of a run. End tokens and lengths are checked for a whole batch at once.

    Args:
        params: of every sequence.
        max_new_tokens: int32 [sequences].
        end_token_ids: the model's end tokens.
        tokenizer: decodes for stop strings; without one there is no text to find them in.
        unwanted: bool [sequences], who is to end with the next token, `LENGTH`; may be written to at any time.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        max_new_tokens: npt.NDArray[np.int32],
        end_token_ids: Iterable[int],
        tokenizer: PreTrainedTokenizerBase | None,
        unwanted: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self._unwanted = unwanted
        self._max_new_tokens = max_new_tokens
        self._end_token_ids = np.array(sorted(end_token_ids), np.int64)
        self._ignore_eos = np.array([p.ignore_eos for p in params], bool)
        self._stop_token_ids: dict[int, frozenset[int]] = {}
        self._matchers: dict[int, StopStringMatcher] = {}
        self._found: dict[int, str] = {}
        matcher_of: dict[tuple[str, ...], StopStringMatcher] = {}
        special = special_token_ids(tokenizer) if tokenizer is not None else {}

        def decode(token_ids: list[int]) -> str:
            return str(tokenizer.decode(token_ids, skip_special_tokens=True)) if tokenizer is not None else ""

        for sequence, p in enumerate(params):
            if not p.stop and not p.stop_token_ids:
                continue
            stops = resolve_stops(p.stop, p.stop_token_ids, special)
            self._stop_token_ids[sequence] = frozenset(stops.token_ids)
            if stops.strings and tokenizer is not None:
                if stops.strings not in matcher_of:
                    matcher_of[stops.strings] = StopStringMatcher(decode, stops.strings)
                self._matchers[sequence] = matcher_of[stops.strings]
        self._has_own_stops = np.zeros(len(params), bool)
        self._has_own_stops[list(self._stop_token_ids)] = True

    def check(
        self,
        sequences: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int32],
        generated: GeneratedTokens,
        is_complete: npt.NDArray[np.bool_] | None = None,
    ) -> npt.NDArray[np.int8]:
        """int8 [N] of `Ending`, after `token_ids` [N] were appended to `sequences` [N].

        `is_complete`, bool [N], says whose text is constrained and can have no more tokens.
        """
        stopped = np.isin(token_ids, self._end_token_ids) & ~self._ignore_eos[sequences]
        if is_complete is not None:
            stopped |= is_complete
        for i in np.flatnonzero(self._has_own_stops[sequences] & ~stopped).tolist():
            stopped[i] = self._stops_by_itself(int(sequences[i]), int(token_ids[i]), generated)
        is_full = generated.lengths[sequences] >= self._max_new_tokens[sequences]
        if self._unwanted is not None:
            is_full |= self._unwanted[sequences]
        return np.where(stopped, Ending.STOP, np.where(is_full, Ending.LENGTH, Ending.NONE)).astype(np.int8)

    def stop_string(self, sequence: int) -> str | None:
        """The stop string that ended a sequence, if one did."""
        return self._found.get(sequence)

    def _stops_by_itself(self, sequence: int, token_id: int, generated: GeneratedTokens) -> bool:
        if token_id in self._stop_token_ids[sequence]:
            return True
        matcher = self._matchers.get(sequence)
        found = matcher.find(generated.tokens(sequence)) if matcher else None
        if found is not None:
            self._found[sequence] = found
        return found is not None
