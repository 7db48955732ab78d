"""The KV cache of a batch of conversations: what stays in it from one generation to the next.

What a row is said to have found in the cache must not depend on whether the job was interrupted in between. So there
are two lists: what is kept, and what an uninterrupted run would have kept by now, which is told from the tokens alone.
In a run that was not interrupted they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchkv.carried import Carried, Keep, KeptSequence
from batchkv.executor import Kept
from batchkv.job_plan import Plan
from batchkv.kv_cache import KVCache
from batchkv.kv_layout import KVLayout
from batchkv.memory_plan import shared_pool
from batchkv.model_runner import ModelRunner
from batchkv.planner import Limits, PlanOn, plan_on
from batchkv.preparation import PreparedWave, outputs_left, prepare_wave, without_too_long
from batchkv.token_arena import TokenIds
from batchkv.wave import Int64Array, Wave

NewRunner = Callable[[tuple[int, ...], int], ModelRunner]  # from pages of each group, and their size
IsNeeded = Callable[[Int64Array, Int64Array], npt.NDArray[np.bool_]]  # of outputs, from their rows and samples


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """A wave as an uninterrupted run has it: all of its outputs, and the plan."""

    wave: Wave
    plan: Plan


class ConversationKV:
    """The pool of a batch, all of the budget, and what is in it between waves.

    Args:
        layout: KV of the model.
        limits: memory and batch limits.
        new_runner: makes what holds the pages, when they are first needed.
    """

    def __init__(self, layout: KVLayout, limits: Limits, new_runner: NewRunner) -> None:
        self._layout, self._limits, self._new_runner = layout, limits, new_runner
        self._windowed = any(window is not None for window in layout.windows)
        self._pool = np.array(shared_pool(layout, limits.page_size, limits.kv_bytes))
        self.cache = KVCache(tuple(self._pool.tolist()), layout.windows, limits.page_size)
        self._runner: ModelRunner | None = None
        self._kept: list[KeptSequence] = []
        self._expected: list[KeptSequence] = []

    @property
    def runner(self) -> ModelRunner:
        """Holds the pages."""
        if self._runner is None:
            self._runner = self._new_runner(tuple(self._pool.tolist()), self._limits.page_size)
        return self._runner

    def release(self) -> None:
        """Lets go of everything."""
        self._forget()
        self._expected.clear()
        if self._runner is not None:
            self._runner.release()
            self._runner = None

    def prepare(
        self, whole: Wave, done: Int64Array, is_needed: IsNeeded, *, is_last: bool
    ) -> tuple[PreparedWave, Expected | None]:
        """Plans a wave on what is kept.

        Args:
            whole: all outputs of its rows.
            done: int64, ascending, those that are there already.
            is_needed: whether later rows go on from an output.
            is_last: no wave comes after it, so nothing need stay.

        Returns:
            The wave, and what an uninterrupted run would do; None if the wave has no room in the pool and must be run
            in a pool of its own.
        """
        whole, errors = without_too_long(whole, done, self._layout, self._limits)
        most = Keep.NOTHING if is_last else Keep.ALL
        expected = self._planned(self._expected_carried, whole, is_needed, most)
        if expected is None:
            self._forget()
            self._expected.clear()
            expected = self._planned(self._expected_carried, whole, is_needed, most)
        if expected is not None:
            left = outputs_left(whole, done)
            wave = whole.with_outputs(left)
            real = self._planned(self._carried, wave, is_needed, expected.keep)
            if real is None:
                self._forget()
                real = self._planned(self._carried, wave, is_needed, expected.keep)
            if real is not None:
                cached = expected.plan.cached_tokens()[left]
                return PreparedWave(wave, real.plan, real.arena, cached, errors), Expected(whole, expected.plan)
        self.release()
        alone = prepare_wave(whole, done, self._layout, self._limits)
        return replace(alone, errors=errors), None

    def keep(self, prepared: PreparedWave, kept: Sequence[Kept], is_needed: IsNeeded) -> None:
        """Takes over what a wave has left in the cache: of what nobody continues, only the prompt."""
        wave, sequences = prepared.wave, prepared.plan.sequences
        needed = np.zeros(len(sequences), np.bool_)
        needed[sequences.output_sequence[self._needed(wave, is_needed)]] = True
        prompts = _keys(self._kept)
        for one in kept:
            handle, group = one.handle, int(wave.group[sequences.row[one.sequence]])
            if needed[one.sequence]:
                self._kept.append(KeptSequence(handle, one.token_ids, group))
                continue
            if not self._windowed:
                tokens = one.token_ids[: wave.arena.lengths[sequences.row[one.sequence]]]
                if _is_new(prompts, group, tokens):
                    self._kept.append(KeptSequence(self.cache.fork(handle, len(tokens)), tokens, group))
            self.cache.free(handle)

    def expect(self, expected: Expected, outputs: Callable[[int, int], TokenIds | None]) -> None:
        """Notes what an uninterrupted run would keep of a wave.

        Args:
            expected: the whole of it.
            outputs: generated tokens of a row's sample that others continue; None of others.
        """
        whole, sequences, keeps = expected.wave, expected.plan.sequences, expected.plan.costs.keeps
        of_sequence = np.argsort(sequences.output_sequence, kind="stable")  # its outputs, one sequence after the other
        first = np.searchsorted(sequences.output_sequence[of_sequence], np.arange(len(sequences) + 1))
        prompts = _keys(self._expected)
        for sequence in np.flatnonzero(keeps).tolist():
            served = of_sequence[first[sequence] : first[sequence + 1]].tolist()
            request = int(whole.output_request[served[0]])
            generated = next(
                filter(lambda found: found is not None, (self._of(whole, o, outputs) for o in served)), None
            )
            if generated is None and self._windowed:
                continue
            prompt = whole.arena.row(request)
            tokens = prompt if generated is None else np.concatenate([prompt, generated])[:-1]
            group = int(whole.group[request])
            if generated is not None or _is_new(prompts, group, tokens):
                self._expected.append(KeptSequence(len(self._expected), tokens.copy(), group))

    def _of(self, whole: Wave, output: int, outputs: Callable[[int, int], TokenIds | None]) -> TokenIds | None:
        """The tokens of an output, if it is continued."""
        return outputs(int(whole.row[whole.output_request[output]]), int(whole.output_sample[output]))

    def _planned(self, carried: Callable[[], Carried], wave: Wave, is_needed: IsNeeded, most: Keep) -> PlanOn | None:
        """On what is kept; None if there is no room beside it."""
        return plan_on(carried(), wave, self._needed(wave, is_needed), self._layout, self._limits, most=most)

    def _carried(self) -> Carried:
        return Carried.of(self._kept, self.cache)

    def _expected_carried(self) -> Carried:
        return Carried.expected(self._expected, self._pool, self._limits.page_size)

    def _needed(self, wave: Wave, is_needed: IsNeeded) -> npt.NDArray[np.bool_]:
        return is_needed(wave.row[wave.output_request], wave.output_sample)

    def _forget(self) -> None:
        for one in self._kept:
            self.cache.free(one.handle)
        self._kept.clear()


def _keys(kept: Sequence[KeptSequence]) -> set[tuple[int, bytes]]:
    """What is kept, by its tokens: a prompt is kept once, however many samples it has."""
    return {(one.group, one.token_ids.tobytes()) for one in kept}


def _is_new(prompts: set[tuple[int, bytes]], group: int, tokens: TokenIds) -> bool:
    """Whether a prompt is not among those that are kept; it is, from now on."""
    key = (group, tokens.tobytes())
    is_new = key not in prompts
    prompts.add(key)
    return is_new
