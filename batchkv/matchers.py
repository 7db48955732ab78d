"""Constrained output while it is generated: which tokens each running sequence may have next.

Masks are computed in a thread of its own, from the time a step's tokens are known until the next one is sampled from:
the forward pass lies in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import numpy as np
import numpy.typing as npt

from batchkv.constraints import Constraint, Grammars, is_of_compiler
from batchkv.sampler import AllowedTokens
from batchkv.sampling_params import SamplingParams

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Matchers:
    """The matchers of a run's sequences: made when the first token is known, dropped when the sequence has ended.

    A sequence that is set aside keeps its own. For each step: `masks`, then `advance` with what was sampled, then
    `settle` with who ended.

    Args:
        grammars: of the constraints.
        params: of every sequence of the run.
    """

    def __init__(self, grammars: Grammars, params: Sequence[SamplingParams]) -> None:
        self._grammars = grammars
        self._constraints: list[Constraint] = []
        number: dict[SamplingParams, int] = {}
        for p in params:
            if p not in number:
                constraint = Constraint.of(p)
                number[p] = -1 if constraint is None else len(self._constraints)
                self._constraints.extend([constraint] if constraint is not None else [])
        # of each sequence, -1 where it has none, or has ended and needs it no more
        self._constraint = np.array([number[p] for p in params], np.int32)
        self._slot = np.full(len(params), -1, np.int32)
        self._free: list[int] = []
        self._matchers: list[llguidance.LLMatcher | None] = []  # by slot
        self._masks = np.zeros((0, grammars.words), np.int32)  # by slot
        self._failed: dict[int, str] = {}  # by slot
        self._computing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "masks")
        self._executor = llguidance.LLExecutor()

    def masks(self, sequences: Int64Array) -> AllowedTokens | None:
        """What the next tokens of sequences may be; None if all of them may have any.

        Waits for the masks that are being computed.
        """
        rows = np.flatnonzero(self._constraint[sequences] >= 0)
        if not len(rows):
            return None
        self._wait()
        limited = sequences[rows]
        bits = np.empty((len(rows), self._grammars.words), np.int32)
        has_begun = self._slot[limited] >= 0
        bits[has_begun] = self._masks[self._slot[limited[has_begun]]]
        for row in np.flatnonzero(~has_begun).tolist():
            bits[row] = self._grammars.compiled(self._constraints[self._constraint[limited[row]]]).first_mask
        return AllowedTokens(rows, bits)

    def advance(self, sequences: Int64Array, token_ids: npt.NDArray[np.int32]) -> BoolArray:
        """Takes the next token of each of `sequences` [N]; bool [N], whether the text is complete with it.

        Complete is a text that nothing can follow, or that an end token follows.
        """
        is_complete = np.zeros(len(sequences), bool)
        at = np.flatnonzero(self._constraint[sequences] >= 0)
        if len(at):
            self._wait()
            matchers = [self._matcher(sequence) for sequence in sequences[at].tolist()]
            for matcher, token in zip(matchers, token_ids[at].tolist(), strict=True):
                matcher.consume_token(token)
            is_complete[at] = [matcher.is_stopped() and not matcher.is_error() for matcher in matchers]
        return is_complete

    def settle(self, sequences: Int64Array, has_ended: BoolArray) -> None:
        """Drops those of `sequences` [N] that have ended (bool [N]), and begins to compute the masks of the others."""
        limited = self._constraint[sequences] >= 0
        for sequence in sequences[limited & has_ended].tolist():
            self._drop(sequence)
        going_on = self._slot[sequences[limited & ~has_ended]].tolist()
        if going_on:
            self._wait()
            self._computing = self._thread.submit(self._compute, going_on)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    def _wait(self) -> None:
        if self._computing is not None:
            self._computing.result()
            self._computing = None

    def _matcher(self, sequence: int) -> llguidance.LLMatcher:
        if self._slot[sequence] < 0:
            grammar = self._grammars.compiled(self._constraints[self._constraint[sequence]])
            slot = self._take_slot()
            self._slot[sequence], self._matchers[slot] = slot, grammar.matcher.deep_copy()
        matcher = self._matchers[self._slot[sequence]]
        if matcher is None:
            raise RuntimeError(f"sequence {sequence} has a slot without a matcher")
        return matcher

    def _take_slot(self) -> int:
        if not self._free:
            slots = len(self._matchers)
            more = max(8, slots)
            self._masks = np.pad(self._masks, ((0, more), (0, 0)))
            self._matchers.extend([None] * more)
            self._free.extend(range(slots, slots + more))
        return self._free.pop()

    def _drop(self, sequence: int) -> None:
        slot = int(self._slot[sequence])
        self._constraint[sequence] = self._slot[sequence] = -1
        if slot < 0:
            return  # not even a first token: its logits were no distribution
        if slot in self._failed:
            self._grammars.failures[sequence] = self._failed.pop(slot)
        self._matchers[slot] = None
        self._free.append(slot)

    def _compute(self, slots: list[int]) -> None:
        """The masks of slots; a matcher that meets a limit allows nothing, which ends its sequence."""
        work = [(matcher, slot) for slot in slots if (matcher := self._matchers[slot]) is not None]
        try:
            self._fill(work)
        except BaseException as error:
            if not is_of_compiler(error):
                raise
            self._fill_one_by_one(work)
        for matcher, slot in work:
            if matcher.is_error():
                self._fail(slot, matcher.get_error())

    def _fill(self, work: list[tuple[llguidance.LLMatcher, int]]) -> None:
        slots, words = self._masks.shape
        self._executor.unsafe_compute_mask_ptr(work, self._masks.ctypes.data, 4 * words, slots)

    def _fill_one_by_one(self, work: list[tuple[llguidance.LLMatcher, int]]) -> None:
        for matcher, slot in work:
            try:
                self._fill([(matcher, slot)])
            except BaseException as error:
                if not is_of_compiler(error):
                    raise
                self._fail(slot, f"the matcher fails with {type(error).__name__}")

    def _fail(self, slot: int, reason: str) -> None:
        self._failed[slot] = reason
        self._masks[slot] = 0
