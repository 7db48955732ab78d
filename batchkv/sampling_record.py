"""What the tokens of a sample were really drawn from: for trainers that ask for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRecord:
    """What each token of one sample was drawn from.

    A token's log-probability here is that of softmax(logits / temperature) over the tokens that were kept: those that
    top_k, top_p and min_p left, of those that a constraint allowed. A trainer that masks its logits to the kept ids
    and scales by the temperature computes the same.

    Attributes:
        logprobs: float32 [generated]; where all tokens were kept they are the completion's; 0 for greedy samples.
        entropies: float32 [generated], in nats, of softmax(logits / temperature) (greedy samples: of the logits) over
            all of the vocabulary, before anything was removed.
        kept_ids: int32 [kept], token after token, ascending within each: a greedy token is the one kept.
        kept_counts: int32 [generated], how many of these each token has; 0 says that all of the vocabulary was kept.
    """

    logprobs: Float32Array
    entropies: Float32Array
    kept_ids: Int32Array
    kept_counts: Int32Array

    @classmethod
    def of_given(cls, count: int) -> SamplingRecord:
        """Of tokens that were not drawn: log-probabilities and entropies of 0, and no kept ids."""
        zeros = np.zeros(count, np.float32)
        return cls(zeros, zeros, np.empty(0, np.int32), np.zeros(count, np.int32))

    def __len__(self) -> int:
        return len(self.kept_counts)

    @property
    def kept_offsets(self) -> npt.NDArray[np.int64]:
        """int64 [generated + 1]: token i has `kept_ids[offsets[i] : offsets[i + 1]]`."""
        offsets = np.zeros(len(self.kept_counts) + 1, np.int64)
        np.cumsum(self.kept_counts, out=offsets[1:])
        return offsets

    def kept(self, token: int) -> Int32Array | None:
        """The ids that were kept where the sample's token number `token` was drawn; None for all of the vocabulary."""
        if self.kept_counts[token] == 0:
            return None
        end = int(self.kept_counts[: token + 1].sum())
        return self.kept_ids[end - int(self.kept_counts[token]) : end]

    def first(self, count: int) -> SamplingRecord:
        """Of the first tokens only."""
        counts = self.kept_counts[:count]
        return SamplingRecord(self.logprobs[:count], self.entropies[:count], self.kept_ids[: int(counts.sum())], counts)

    def then(self, other: SamplingRecord) -> SamplingRecord:
        """With those of tokens that follow behind it."""
        return SamplingRecord(
            np.concatenate([self.logprobs, other.logprobs]),
            np.concatenate([self.entropies, other.entropies]),
            np.concatenate([self.kept_ids, other.kept_ids]),
            np.concatenate([self.kept_counts, other.kept_counts]),
        )


class SamplingRecords:
    """Those of the sequences that are not finished, by sequence, in the order of their tokens."""

    def __init__(self) -> None:
        self._logprobs: dict[int, list[float]] = {}
        self._entropies: dict[int, list[float]] = {}
        self._kept: dict[int, list[Int32Array]] = {}

    def append(
        self,
        sequences: npt.NDArray[np.int64],
        at: npt.NDArray[np.int64],
        logprobs: Float32Array,
        entropies: Float32Array,
        kept_ids: Int32Array,
        kept_counts: npt.NDArray[np.int64],
    ) -> None:
        """One more token for `sequences[at]`, where one may be several times, from what was drawn for all of them.

        Args:
            sequences: int64 [B].
            at: int64, the rows that count, in the order of their tokens.
            logprobs, entropies, kept_ids, kept_counts: of all B rows, as in `sampler.SampledFrom`.
        """
        ends = np.cumsum(kept_counts)
        starts = ends - kept_counts
        columns = (sequences, logprobs, entropies, starts, ends)
        for sequence, logprob, entropy, start, end in zip(*(column[at].tolist() for column in columns), strict=True):
            self._logprobs.setdefault(sequence, []).append(logprob)
            self._entropies.setdefault(sequence, []).append(entropy)
            # a copy: a view would keep the ids of all rows of the step
            self._kept.setdefault(sequence, []).append(kept_ids[start:end].copy())

    def record(self, sequence: int) -> SamplingRecord:
        """Of all its tokens so far."""
        kept = self._kept.get(sequence, [])
        return SamplingRecord(
            np.array(self._logprobs.get(sequence, []), np.float32),
            np.array(self._entropies.get(sequence, []), np.float32),
            np.concatenate([np.empty(0, np.int32), *kept]),
            np.array([len(ids) for ids in kept], np.int32),
        )

    def drop(self, sequence: int) -> None:
        """It has ended, and its record has been taken elsewhere."""
        self._logprobs.pop(sequence, None)
        self._entropies.pop(sequence, None)
        self._kept.pop(sequence, None)
