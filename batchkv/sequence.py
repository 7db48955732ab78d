"""What is generated or scored: one sequence per distinct (prompt, sample), in execution order; its tokens so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SequenceTable:
    """All sequences of a wave, numbered in execution order (depth-first over the trie).

    Requests that must give the same tokens (greedy, same prompt, same parameters) are one sequence, fanned out to their
    outputs. A sequence that is scored has a prompt up to the last but one of the tokens given, and that last one in
    place of a generated one.

    Attributes:
        prompt: int32 [sequences], the prompt in the trie; never decreases.
        row: int32 [sequences], the (first) request it is generated for.
        sample: int32 [sequences], which of the request's samples.
        max_new_tokens: int32 [sequences], generated tokens at most: `max_tokens`, or what the context leaves; 1 for
            one that is scored.
        score_from: int32 [sequences], the position of the first token that is scored; -1 for one that is generated.
        forced_token: int32 [sequences], what follows the prompt of one that is scored; -1 for one that is generated.
        output_sequence: int32 [outputs], the sequence of each output of the wave.
    """

    prompt: Int32Array
    row: Int32Array
    sample: Int32Array
    max_new_tokens: Int32Array
    score_from: Int32Array
    forced_token: Int32Array
    output_sequence: Int32Array

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def is_scored(self) -> npt.NDArray[np.bool_]:
        """bool [sequences]"""
        return self.score_from >= 0


class GeneratedTokens:
    """Tokens of the sequences that have some but are not finished, in a pool of slots that are used again."""

    def __init__(self, num_sequences: int) -> None:
        self.lengths = np.zeros(num_sequences, np.int32)
        self.last_token = np.zeros(num_sequences, np.int32)
        self._slot = np.full(num_sequences, -1, np.int32)
        self._tokens = np.zeros((8, 8), np.int32)
        self._logprobs = np.zeros((8, 8), np.float32)
        self._free = list(range(8))

    def append(
        self, sequences: npt.NDArray[np.int64], token_ids: Int32Array, logprobs: npt.NDArray[np.float32]
    ) -> None:
        """One more token for each of `sequences` (distinct)."""
        for sequence in sequences[self._slot[sequences] < 0].tolist():
            self._slot[sequence] = self._take_slot()
        at = self.lengths[sequences]
        self._widen(int(at.max(initial=0)) + 1)
        slots = self._slot[sequences]
        self._tokens[slots, at] = token_ids
        self._logprobs[slots, at] = logprobs
        self.last_token[sequences] = token_ids
        self.lengths[sequences] += 1

    def tokens(self, sequence: int) -> Int32Array:
        """int32 [length]: a view."""
        return self._tokens[self._slot[sequence], : self.lengths[sequence]]

    def logprobs(self, sequence: int) -> npt.NDArray[np.float32]:
        """float32 [length]: a view."""
        return self._logprobs[self._slot[sequence], : self.lengths[sequence]]

    def newest(self, sequences: npt.NDArray[np.int64], count: int, before_first: int) -> npt.NDArray[np.int64]:
        """int64 [R, count]: the last tokens of sequences that have some, the newest first; `before_first` where there
        are no more.
        """
        at = self.lengths[sequences][:, None] - 1 - np.arange(count)
        tokens = self._tokens[self._slot[sequences][:, None], np.maximum(at, 0)]
        return np.where(at >= 0, tokens, before_first).astype(np.int64)

    def drop(self, sequence: int) -> None:
        """Its tokens have been taken elsewhere, if it has any; the slot is free again."""
        if self._slot[sequence] >= 0:
            self._free.append(int(self._slot[sequence]))
            self._slot[sequence] = -1

    def _take_slot(self) -> int:
        if not self._free:
            slots = len(self._tokens)
            self._tokens = np.pad(self._tokens, ((0, slots), (0, 0)))
            self._logprobs = np.pad(self._logprobs, ((0, slots), (0, 0)))
            self._free.extend(range(slots, 2 * slots))
        return self._free.pop()

    def _widen(self, width: int) -> None:
        more = width - self._tokens.shape[1]
        if more > 0:
            more = max(more, self._tokens.shape[1])
            self._tokens = np.pad(self._tokens, ((0, 0), (0, more)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, more)))
