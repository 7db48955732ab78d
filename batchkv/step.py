"""One forward pass: a ragged batch of prompt chunks and decode tokens. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchkv.kv_cache import PageCopies

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What one group of layers has to attend to in one step. R rows, T tokens.

    A row is a run of new tokens at the end of one sequence: a chunk of a prompt or a single decode token, there is no
    difference. Rows stand in depth-first order of the prefix trie, so that rows which share pages stand side by side.

    Attributes:
        page_size: tokens per page; position `p` of a row lies in its page `p // page_size`.
        window: a query at position p sees keys at positions k with `0 <= p - k < window`; None sees all `k <= p`.
        page_table: int32 [R, pages], page ids; entries behind the window or past `kv_lens` are not to be read.
        kv_lens: int64 [R], keys of each row with this step's included: its queries are the last ones.
        cu_seqlens_q: int64 [R + 1], the tokens of row r are `[cu_seqlens_q[r], cu_seqlens_q[r + 1])`, at least one.
        slots: int64 [T], where the keys and values of this step's tokens are stored.
        copies: page copies to be made, one after the other, when those are stored.
    """

    page_size: int
    window: int | None
    page_table: npt.NDArray[np.int32]
    kv_lens: Int64Array
    cu_seqlens_q: Int64Array
    slots: Int64Array
    copies: tuple[PageCopies, ...] = ()

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens_q[-1])

    @property
    def first_query_positions(self) -> Int64Array:
        """int64 [R]: absolute position of each row's first query."""
        return self.kv_lens - np.diff(self.cu_seqlens_q)

    @property
    def query_positions(self) -> Int64Array:
        """int64 [T]: absolute position of each query."""
        shift = self.first_query_positions - self.cu_seqlens_q[:-1]
        return np.arange(self.num_tokens) + np.repeat(shift, np.diff(self.cu_seqlens_q))


@dataclass(frozen=True, slots=True)
class Drafted:
    """Tokens that are drafted in a step: a decode row is a sequence's newest token and what is drafted to follow it.

    Each of these tokens is sampled from, so a sequence has one place in `Step.sampled` for each, one after the other.
    What is sampled in a place counts if, in the place before, what was sampled counts and is what was drafted.

    Attributes:
        before: int64 [N], how many places of the same sequence are before each.
        token_ids: int64 [N], what is drafted to be sampled in each place, and stands behind it in the row; -1 in the
            last place of each sequence.
        matched: int64 [N], length of the suffix that it was found behind; 0 where nothing is drafted.
    """

    before: Int64Array
    token_ids: Int64Array
    matched: Int64Array

    @property
    def num_tokens(self) -> int:
        return int((self.token_ids >= 0).sum())

    @property
    def counts(self) -> Int64Array:
        """int64: places of each sequence."""
        return np.diff(np.flatnonzero(self.before == 0), append=len(self.before))

    @classmethod
    def of(cls, counts: Int64Array, token_ids: Int64Array, matched: Int64Array) -> Drafted:
        """For R sequences, of which each gets `counts[r]` of the tokens, in order."""
        places = counts + 1
        before = np.arange(places.sum()) - np.repeat(np.cumsum(places) - places, places)
        is_drafted = before < np.repeat(counts, places)
        drafted = cls(before, np.full(len(before), -1), np.zeros(len(before), np.int64))
        drafted.token_ids[is_drafted], drafted.matched[is_drafted] = token_ids, matched
        return drafted

    def padded(self, length: int) -> Drafted:
        """With more places, N in all, of sequences that have one each."""
        more = (0, length - len(self.before))
        return Drafted(
            np.pad(self.before, more), np.pad(self.token_ids, more, constant_values=-1), np.pad(self.matched, more)
        )


@dataclass(frozen=True, slots=True)
class Step:
    """What the model is given, and who wants its logits.

    Attributes:
        token_ids: int64 [T]; 0 where the id is still on its way from the step before.
        token_sources: int64 [T], which of the tokens sampled in the step before that one is; -1 where the id is known.
        positions: int64 [T], absolute.
        attention: one batch per group of layers.
        logits_tokens: int64 [L], the tokens of the step whose logits are wanted.
        sampled: int64 [N], sequences that get their next token from this step, or their next ones if it has drafts.
        sampled_logits: int64 [N], which of the L logits each of them samples from (all samples of a prompt from one).
        scored: int64 [M], entries of the `ScoreTable`: given tokens that get their log-probability from this step.
        scored_logits: int64 [M], which of the L logits each of them is scored with.
        scored_sequences: int64 [S], sequences that have all their scores with this step, and end.
        prefill_tokens: tokens that go through the model as prompt, recomputed ones included.
        recomputed_tokens: of these, tokens that went through it before and were given up under memory pressure.
        pages_held: int64 [groups], KV pages in use while the step runs.
        drafted: tokens that are drafted; None if there are none.
    """

    token_ids: Int64Array
    token_sources: Int64Array
    positions: Int64Array
    attention: tuple[AttentionBatch, ...]
    logits_tokens: Int64Array
    sampled: Int64Array
    sampled_logits: Int64Array
    scored: Int64Array
    scored_logits: Int64Array
    scored_sequences: Int64Array
    prefill_tokens: int
    recomputed_tokens: int
    pages_held: Int64Array
    drafted: Drafted | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)
