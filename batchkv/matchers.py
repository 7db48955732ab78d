"""Constrained output while it is generated: which tokens each running sequence may have next.

Masks are computed in a thread of its own, from the time a step's tokens are known until the next one is sampled from:
the forward pass lies in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import llguidance
import numpy as np
import numpy.typing as npt

from batchkv.constraints import Constraint, ConstraintError, Grammars, is_of_compiler
from batchkv.errors import RowError
from batchkv.sampling_batch import AllowedTokens
from batchkv.sampling_params import SamplingParams

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Running:
    """The matcher of a sequence, the tokens it has taken, and why it can take no more, if it met a limit."""

    constraint: Constraint
    matcher: llguidance.LLMatcher
    token_ids: list[int]
    failure: str | None = None


class Matchers:
    """The matchers of a run's sequences: made when the first token is known, dropped when the sequence has ended.

    A sequence that is set aside keeps its own. For each step: `masks`, then `advance` with what was sampled, then
    `settle` with who ended.

    Args:
        grammars: of the constraints.
        params: of every sequence of the run.

    Attributes:
        failures: what went wrong with sequences that have ended: a limit was met, or there was no token.
    """

    def __init__(self, grammars: Grammars, params: Sequence[SamplingParams]) -> None:
        self.failures: dict[int, RowError] = {}
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
        self._running: dict[int, _Running] = {}  # by slot
        self._masks = np.zeros((0, grammars.words), np.int32)  # by slot
        self._computing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "masks")
        self._executor = llguidance.LLExecutor()

    @property
    def is_constrained(self) -> BoolArray:
        """bool [sequences]: who has a constraint and has not ended."""
        return self._constraint >= 0

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
        return AllowedTokens(rows, bits & self._grammars.usable)

    def advance(self, sequences: Int64Array, token_ids: npt.NDArray[np.int32]) -> BoolArray:
        """Takes the next token of each of `sequences` [N]; bool [N], whether the text is complete with it.

        Complete is a text that nothing can follow, or that an end token follows.
        """
        is_complete = np.zeros(len(sequences), bool)
        at = np.flatnonzero(self._constraint[sequences] >= 0)
        if len(at):
            self._wait()
            pairs = zip(sequences[at].tolist(), token_ids[at].tolist(), strict=True)
            is_complete[at] = [self._take(sequence, token) for sequence, token in pairs]
        return is_complete

    def settle(self, sequences: Int64Array, has_ended: BoolArray) -> None:
        """Drops those of `sequences` [N] that have ended (bool [N]), and begins to compute the masks of the others."""
        limited = self._constraint[sequences] >= 0
        for sequence in sequences[limited & has_ended].tolist():
            self._drop(sequence)
        going_on = self._slot[sequences[limited & ~has_ended]].tolist()
        if going_on:  # they have just been advanced, so nothing else is being computed
            self._computing = self._thread.submit(self._compute, going_on)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    def _wait(self) -> None:
        if self._computing is not None:
            self._computing.result()
            self._computing = None

    def _take(self, sequence: int, token_id: int) -> bool:
        """Gives a sequence's matcher the next token; whether the text is complete with it."""
        if self._slot[sequence] < 0:
            constraint = self._constraints[self._constraint[sequence]]
            matcher = self._grammars.compiled(constraint).matcher.deep_copy()
            self._slot[sequence] = self._take_slot()
            self._running[int(self._slot[sequence])] = _Running(constraint, matcher, [])
        running = self._running[int(self._slot[sequence])]
        running.token_ids.append(token_id)
        running.matcher.consume_token(token_id)
        return bool(running.matcher.is_stopped() and not running.matcher.is_error())

    def _take_slot(self) -> int:
        if not self._free:
            slots = len(self._masks)
            more = max(8, slots)
            self._masks = np.pad(self._masks, ((0, more), (0, 0)))
            self._free.extend(range(slots, slots + more))
        return self._free.pop()

    def _drop(self, sequence: int) -> None:
        slot = int(self._slot[sequence])
        self._constraint[sequence] = self._slot[sequence] = -1
        if slot < 0:
            return  # not even a first token: its logits were no distribution
        failure = self._running.pop(slot).failure
        if failure is not None:
            self.failures[sequence] = RowError("bad_schema", failure)
        self._free.append(slot)

    def _compute(self, slots: list[int]) -> None:
        """The masks of slots; where a matcher meets a limit nothing is allowed, which ends its sequence."""
        try:
            self._fill(slots)
        except BaseException as error:  # of one of them, and says not of which
            if not is_of_compiler(error):
                raise
            for slot in slots:
                self._begin_again(slot)
        for slot in slots:
            if self._running[slot].failure is None and self._running[slot].matcher.is_error():
                self._begin_again(slot)

    def _fill(self, slots: list[int]) -> None:
        work = [(self._running[slot].matcher, slot) for slot in slots]
        rows, words = self._masks.shape
        self._executor.unsafe_compute_mask_ptr(work, self._masks.ctypes.data, 4 * words, rows)

    def _begin_again(self, slot: int) -> None:
        """Takes the sequence's tokens into a new matcher that shares nothing.

        Limits are of all that the matchers of a grammar found out together, but no sequence is to fail by others.
        """
        running = self._running[slot]
        try:
            running.matcher = self._grammars.compiled_anew(running.constraint).matcher.deep_copy()
            running.matcher.consume_tokens(running.token_ids)
            self._fill([slot])
            if running.matcher.is_error():
                running.failure = str(running.constraint.error(running.matcher.get_error()))
        except BaseException as error:
            if not isinstance(error, ConstraintError) and not is_of_compiler(error):
                raise
            running.failure = str(running.constraint.error(type(error).__name__))
        if running.failure is not None:
            self._masks[slot] = 0
