"""Which tokens go through the model next: chunks of trie nodes to prefill and sequences to decode, one token budget.

The trie is walked depth-first with a window of sequences in flight. Every step decodes all running sequences and fills
up with the next nodes' prefill. Sequences start in execution order, as long as the pages of everything alive fit.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchkv.job_plan import Plan
from batchkv.kv_cache import Appended, KVCache, in_few_rounds
from batchkv.kv_layout import KVLayout
from batchkv.residency import Residency
from batchkv.scoring import ScoreTable, build_score_table
from batchkv.sequence import GeneratedTokens
from batchkv.speculation import Speculation
from batchkv.step import AttentionBatch, Drafted, Step
from batchkv.token_arena import TokenArena

Int64Array = npt.NDArray[np.int64]

_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class NodePrefill:
    """The tokens of a trie node, still to be prefilled."""

    node: int


@dataclass(frozen=True, slots=True)
class SequencePrefill:
    """What a preempted sequence had generated, to be prefilled again."""

    sequence: int


Prefill = NodePrefill | SequencePrefill


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a step in the making: decode rows, or one chunk.

    Attributes:
        order: int64 [rows], place in depth-first order.
        handles, counts: int64 [rows], sequences in the cache and their new tokens.
        token_ids, token_sources: int64 [tokens], row by row, as in `Step`.
        appended: where the tokens go.
        sampled, sampled_token: int64 [N], who samples from which of these tokens.
        scored, scored_token: int64 [entries], entries of the score table, and which of these tokens each is scored at.
        scored_sequences: int64 [sequences], who has all scores with these rows.
        completes: the prefill that the chunk is the last one of.
        drafted: of decode rows with more tokens than one.
    """

    order: Int64Array
    handles: Int64Array
    counts: Int64Array
    token_ids: Int64Array
    token_sources: Int64Array
    appended: Appended
    sampled: Int64Array
    sampled_token: Int64Array
    scored: Int64Array
    scored_token: Int64Array
    scored_sequences: Int64Array
    completes: Prefill | None = None
    drafted: Drafted | None = None

    @property
    def settled_handles(self) -> Int64Array:
        """Those of which no token will be taken back."""
        return self.handles if self.drafted is None else self.handles[self.counts == 1]


class Scheduler:
    """Turns a plan into steps: `schedule` one, then `update` with the sequences that ended, until `is_done`.

    A step may be scheduled before the tokens of the one before it are known. What can be told without them happens at
    once: who starts, and who ends by length. Who ended by a token is told by `update`, and may have one more row by
    then, whose result nobody takes.

    A step with drafts is different: what follows depends on its tokens, which must be known before the next one.

    Args:
        plan: what to run.
        arena: the prompts.
        layout: KV of the model.
        generated: the tokens, which the caller appends between `schedule` and `update` of the step that sampled them.
        scores: what is scored in the plan; built here if it is not given.
        max_batch_rows: most sequences in flight.
        max_batch_tokens: most tokens in a step.
        cache: what the plan goes on from; by default a new one.
        speculation: drafts tokens; by default there are no drafts.
    """

    def __init__(
        self,
        plan: Plan,
        arena: TokenArena,
        layout: KVLayout,
        generated: GeneratedTokens,
        scores: ScoreTable | None = None,
        *,
        max_batch_rows: int,
        max_batch_tokens: int,
        cache: KVCache | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.preempted_sequences = 0
        self._speculation = speculation
        self._plan, self._arena, self._generated = plan, arena, generated
        self._scores = build_score_table(plan.trie, plan.sequences, arena) if scores is None else scores
        self._is_scored = plan.sequences.is_scored
        self._windows = layout.windows
        self._max_batch_rows, self._max_batch_tokens = max_batch_rows, max_batch_tokens
        self._residency = Residency(plan, layout.windows, cache)
        self._cache = self._residency.cache
        self._first_sequence = np.searchsorted(plan.sequences.prompt, np.arange(plan.trie.num_prompts + 1))
        self._prompt_of_node = np.full(plan.trie.num_nodes, -1, np.int64)
        self._prompt_of_node[plan.trie.prompt_node] = np.arange(plan.trie.num_prompts)
        self._next = 0  # every sequence before it was admitted or has ended
        self._preempted: list[int] = []  # a heap of sequences to be admitted before `_next`
        self._has_ended = np.zeros(len(plan.sequences), bool)
        self._num_unfinished = len(plan.sequences)
        self._running = np.zeros(0, np.int64)  # sequences being decoded, in execution order
        self._waiting: dict[int, list[int]] = {}  # node -> admitted sequences that wait for its prefill
        self._prefills: deque[Prefill] = deque()
        self._prefilled_to = plan.trie.start.astype(np.int64)  # of each node, ever
        self._drawn = np.zeros(len(plan.sequences), np.int32)  # tokens sampled by the steps so far, known or not yet
        self._place = np.full(len(plan.sequences), -1, np.int64)  # in `sampled` of the last step that has the sequence

    @property
    def is_done(self) -> bool:
        """Whether there is no further step; tokens of the last one may still be on their way."""
        return self._num_unfinished == 0

    def close(self) -> dict[int, int]:
        """When it is done: the handles of the sequences that stay in the cache, by sequence. Nothing else stays."""
        self._residency.release_nodes()
        return self._residency.kept

    def awaits(self, step: Step) -> bool:
        """Whether the next step can, or had better, be scheduled only when the tokens of the last one are known."""
        if self._speculation is None:
            return False
        return step.drafted is not None or self._speculation.is_worth_waiting(self._running)

    def schedule(self) -> Step:
        """The next step, to be run after all those before it. `update` must have been called for all but the last, and
        for that too if it has drafts.
        """
        self._make_room()
        self._admit()
        parts = self._decode_rows()
        num_decoded = sum(len(part.token_ids) for part in parts)
        prefilled = recomputed = 0
        while self._prefills and (budget := self._max_batch_tokens - num_decoded - prefilled) > 0:
            chunk = self._prefill_chunk(self._prefills[0], budget)
            if chunk is None:
                break
            parts.append(chunk)
            prefilled += len(chunk.token_ids)
            recomputed += self._count_recomputed(self._prefills[0], len(chunk.token_ids))
            if chunk.completes is not None:
                self._prefills.popleft()
        if not parts:
            raise RuntimeError("nothing can be scheduled although sequences are unfinished")
        step = self._assemble(parts, prefilled, recomputed)
        self._advance(step, parts)
        return step

    def update(self, step: Step, ended: npt.NDArray[np.bool_]) -> None:
        """Takes note of the sequences of `step.sampled` that ended with the tokens they got.

        Those that have all the tokens they may have are known to have ended before.

        Args:
            ended: bool [N], true in one of a sequence's places at most.
        """
        if step.drafted is not None:
            self._take_back(step.sampled[(step.drafted.before == 0) & (step.drafted.token_ids >= 0)])
        ending = step.sampled[ended]
        ending = ending[~self._has_ended[ending]]
        self._has_ended[ending] = True
        was_running = np.isin(ending, self._running)
        self._leave(ending, self._generated.lengths)
        if not was_running.all():  # set aside since, and may be back already, waiting for prefills
            self._prefills = deque(prefill for prefill in self._prefills if self._is_wanted(prefill))

    def _advance(self, step: Step, parts: list[_Rows]) -> None:
        """What follows from a step whatever its tokens are: who ends by length, and who starts that waited for it."""
        self._cache.trim(np.concatenate([part.settled_handles for part in parts]))
        self._drawn[step.sampled] += 1  # one for each sequence, whatever is drafted
        self._place[step.sampled] = np.arange(len(step.sampled))
        full = step.sampled[self._drawn[step.sampled] >= self._plan.sequences.max_new_tokens[step.sampled]]
        full = np.concatenate([full, step.scored_sequences])
        self._has_ended[full] = True
        for prefill in (part.completes for part in parts):
            if isinstance(prefill, SequencePrefill):
                self._run(prefill.sequence)
            elif prefill is not None:
                for sequence in self._waiting.pop(prefill.node, []):
                    if not self._has_ended[sequence]:
                        self._start(sequence)
        self._leave(full, self._drawn)

    def _take_back(self, drafted: Int64Array) -> None:
        """Of what sequences with drafts had in the last step, the KV of those tokens stays that they were given."""
        self._drawn[drafted] = self._generated.lengths[drafted]
        self._residency.take_back(drafted, self._drawn[drafted].astype(np.int64))

    def _leave(self, ended: Int64Array, num_generated: npt.NDArray[np.int32]) -> None:
        """Frees all that only sequences that have ended needed. num_generated: int32 [sequences]."""
        self._running = self._running[~self._has_ended[self._running]]
        for sequence in ended.tolist():
            self._residency.finish(sequence, int(num_generated[sequence]))
        self._num_unfinished -= len(ended)

    # -- admission

    def _admit(self) -> None:
        while self._residency.num_in_flight < self._max_batch_rows:
            sequence = self._peek()
            if sequence is None:
                return
            num_generated = int(self._drawn[sequence])
            if not self._residency.fits(sequence, num_generated):
                # nodes that preempted sequences left behind must not keep the only one out
                if self._residency.num_in_flight or not self._drop_idle_nodes(keep_above=sequence):
                    return
                continue
            self._pop(sequence)
            self._prefills.extend(NodePrefill(n) for n in self._residency.admit(sequence, num_generated))
            node = self._residency.node_of(sequence)
            if self._residency.is_prefilled(node):
                self._start(sequence)
            else:
                self._waiting.setdefault(node, []).append(sequence)

    def _peek(self) -> int | None:
        """The first sequence in execution order that is neither in flight nor has ended."""
        while self._preempted and self._has_ended[self._preempted[0]]:  # with the first token, by a sibling's prefill
            heapq.heappop(self._preempted)
        if self._preempted:
            return self._preempted[0]
        while self._next < len(self._has_ended) and self._has_ended[self._next]:
            self._next += 1
        return self._next if self._next < len(self._has_ended) else None

    def _pop(self, sequence: int) -> None:
        if self._preempted:
            heapq.heappop(self._preempted)
        else:
            self._next = sequence + 1

    def _start(self, sequence: int) -> None:
        """The sequence's prompt is prefilled and its first token is sampled."""
        self._residency.begin_sequence(sequence)
        if self._drawn[sequence] > 1:
            self._prefills.appendleft(SequencePrefill(sequence))
        else:
            self._run(sequence)

    def _run(self, sequence: int) -> None:
        self._running = np.insert(self._running, np.searchsorted(self._running, sequence), sequence)

    def _make_room(self) -> None:
        """Preempts, youngest first, where sequences have grown beyond what was expected of them."""
        self._residency.grow(self._running)
        while self._residency.is_overcommitted:
            if self._residency.num_in_flight > 1:
                self._preempt(self._residency.youngest())
                continue
            if not self._drop_idle_nodes():
                raise RuntimeError("one sequence does not fit a KV pool that was made for it")

    def _drop_idle_nodes(self, *, keep_above: int | None = None) -> bool:
        """Whether there were any."""
        dropped = {NodePrefill(node) for node in self._residency.drop_idle_nodes(keep_above=keep_above)}
        self._prefills = deque(prefill for prefill in self._prefills if prefill not in dropped)
        return bool(dropped)

    def _preempt(self, sequence: int) -> None:
        self._residency.withdraw(sequence)
        self._running = self._running[self._running != sequence]
        waiting = self._waiting.get(self._residency.node_of(sequence), [])
        if sequence in waiting:
            waiting.remove(sequence)
        if SequencePrefill(sequence) in self._prefills:
            self._prefills.remove(SequencePrefill(sequence))
        heapq.heappush(self._preempted, sequence)
        self.preempted_sequences += 1

    def _is_wanted(self, prefill: Prefill) -> bool:
        if isinstance(prefill, SequencePrefill):
            return not self._has_ended[prefill.sequence]
        return self._residency.is_resident(prefill.node)

    # -- rows

    def _decode_rows(self) -> list[_Rows]:
        """The newest token of each running sequence, the oldest first if there are more than a step holds; and what is
        drafted to follow it.
        """
        sequences = self._running[: self._max_batch_tokens]
        if len(sequences) == 0:
            return []
        is_known = self._generated.lengths[sequences] == self._drawn[sequences]
        handles, counts, sampled = self._residency.handles(sequences), np.ones(len(sequences), np.int64), sequences
        token_ids = np.where(is_known, self._generated.last_token[sequences], 0).astype(np.int64)
        token_sources = np.where(is_known, -1, self._place[sequences])
        drafted = self._draft(sequences, is_known)
        if drafted is not None:
            counts = drafted.counts
            sampled, token_ids, token_sources = (np.repeat(a, counts) for a in (sequences, token_ids, token_sources))
            token_ids[drafted.before > 0] = drafted.token_ids[drafted.token_ids >= 0]
        return [
            _Rows(
                order=2 * sequences + 1,
                handles=handles,
                counts=counts,
                token_ids=token_ids,
                token_sources=token_sources,
                appended=self._cache.append(handles, counts),
                sampled=sampled,
                sampled_token=np.arange(len(sampled)),
                scored=_NOTHING,
                scored_token=_NOTHING,
                scored_sequences=_NOTHING,
                drafted=drafted,
            )
        ]

    def _draft(self, sequences: Int64Array, is_known: npt.NDArray[np.bool_]) -> Drafted | None:
        """What may follow the newest tokens of running sequences, where these tokens are known; None if nothing may."""
        if self._speculation is None:
            return None
        left = self._plan.sequences.max_new_tokens[sequences] - self._drawn[sequences]
        room = np.where(is_known, np.minimum(left, self._residency.room(sequences)) - 1, 0)
        work = self._work()
        return self._speculation.propose(sequences, room, work, self._max_batch_tokens - work)

    def _work(self) -> int:
        """Tokens of the next step without drafts, or a few more than that."""
        work = len(self._running)
        for prefill in self._prefills:
            if work >= self._max_batch_tokens:
                break
            if isinstance(prefill, NodePrefill):
                work += int(self._plan.trie.end[prefill.node] - self._plan.trie.start[prefill.node])
            else:
                work += int(self._drawn[prefill.sequence]) - 1
        return min(work, self._max_batch_tokens)

    def _prefill_chunk(self, prefill: Prefill, budget: int) -> _Rows | None:
        """The next tokens of a prefill; None if its pages have to wait for others to leave a window."""
        if isinstance(prefill, NodePrefill):
            handle = self._residency.begin_node(prefill.node)
            start = int(self._plan.trie.start[prefill.node])
            token_ids = self._plan.trie.node_tokens(self._arena, prefill.node)
            order = 2 * int(self._plan.costs.first_sequence[prefill.node])
        else:
            handle = int(self._residency.handles(np.array([prefill.sequence]))[0])
            start = int(self._plan.trie.end[self._residency.node_of(prefill.sequence)])
            token_ids = self._generated.tokens(prefill.sequence)[: self._drawn[prefill.sequence] - 1]
            order = 2 * prefill.sequence + 1
        handles = np.array([handle])
        rest = token_ids[int(self._cache.lengths(handles)[0]) - start :]
        count = min(len(rest), budget, self._cache.room(handle))
        if count <= 0:
            return None
        counts = np.array([count])
        is_last = count == len(rest)
        ready = self._ready(prefill) if is_last else _NOTHING
        sampled = ready[~self._is_scored[ready]]
        scored, scored_token = self._scored_in(prefill, start + len(token_ids) - len(rest), count)
        return _Rows(
            order=np.array([order]),
            handles=handles,
            counts=counts,
            token_ids=rest[:count].astype(np.int64),
            token_sources=np.full(count, -1),
            appended=self._cache.append(handles, counts),
            sampled=sampled,
            sampled_token=np.full_like(sampled, count - 1),
            scored=scored,
            scored_token=scored_token,
            scored_sequences=ready[self._is_scored[ready]],
            completes=prefill if is_last else None,
        )

    def _scored_in(self, prefill: Prefill, start: int, count: int) -> tuple[Int64Array, Int64Array]:
        """What is scored at the `count` tokens from `start` on, and which of them each is scored at.

        Nothing is scored again when a node is prefilled again.
        """
        if isinstance(prefill, SequencePrefill) or len(self._scores) == 0:
            return _NOTHING, _NOTHING
        scored_to = int(self._prefilled_to[prefill.node])
        entries = self._scores.entries_in(prefill.node, max(start, scored_to), start + count)
        return entries, self._scores.position[entries].astype(np.int64) - start

    def _ready(self, prefill: Prefill) -> Int64Array:
        """Sequences that get their first token, or the last of their scores, when this prefill is complete."""
        prompt = int(self._prompt_of_node[prefill.node]) if isinstance(prefill, NodePrefill) else -1
        if prompt < 0:
            return _NOTHING
        sequences = np.arange(self._first_sequence[prompt], self._first_sequence[prompt + 1])
        wants: npt.NDArray[np.bool_] = (self._drawn[sequences] == 0) & ~self._has_ended[sequences]
        return sequences[wants]

    def _count_recomputed(self, prefill: Prefill, count: int) -> int:
        """How many of the `count` tokens just scheduled went through the model before."""
        if isinstance(prefill, SequencePrefill):
            return count
        handle = np.array([self._residency.begin_node(prefill.node)])
        now = int(self._cache.lengths(handle)[0])
        before = int(self._prefilled_to[prefill.node])
        self._prefilled_to[prefill.node] = max(before, now)
        return max(0, min(before, now) - (now - count))

    # -- steps

    def _assemble(self, parts: list[_Rows], prefill_tokens: int, recomputed_tokens: int) -> Step:
        """Puts the rows into depth-first order; of equal places, parents stand before their children in `parts`."""
        order = np.argsort(np.concatenate([part.order for part in parts]), kind="stable")
        handles = np.concatenate([part.handles for part in parts])[order]
        counts = np.concatenate([part.counts for part in parts])
        cu_seqlens = np.concatenate([[0], np.cumsum(counts[order])])
        old_start = np.cumsum(counts) - counts
        token = np.repeat(old_start[order] - cu_seqlens[:-1], counts[order]) + np.arange(cu_seqlens[-1])
        attention = tuple(
            self._attention_batch(group, parts, handles, cu_seqlens, token) for group in range(len(self._windows))
        )
        lengths = [len(part.token_ids) for part in parts]
        sampled_token = _joined([part.sampled_token for part in parts], lengths)
        scored_token = _joined([part.scored_token for part in parts], lengths)
        wanted = _inverse(token)[np.concatenate([sampled_token, scored_token])]
        logits_tokens, logits = np.unique(wanted, return_inverse=True)
        sampled, drafted = np.concatenate([part.sampled for part in parts]), parts[0].drafted  # decode rows come first
        return Step(
            token_ids=np.concatenate([part.token_ids for part in parts])[token],
            token_sources=np.concatenate([part.token_sources for part in parts])[token],
            positions=attention[0].query_positions,
            attention=attention,
            logits_tokens=logits_tokens,
            sampled=sampled,
            sampled_logits=logits[: len(sampled_token)],
            scored=np.concatenate([part.scored for part in parts]),
            scored_logits=logits[len(sampled_token) :],
            scored_sequences=np.concatenate([part.scored_sequences for part in parts]),
            prefill_tokens=prefill_tokens,
            recomputed_tokens=recomputed_tokens,
            pages_held=self._cache.num_held,
            drafted=drafted.padded(len(sampled)) if drafted else None,
        )

    def _attention_batch(
        self, group: int, parts: list[_Rows], handles: Int64Array, cu_seqlens: Int64Array, token: Int64Array
    ) -> AttentionBatch:
        return AttentionBatch(
            page_size=self._cache.page_size,
            window=self._windows[group],
            page_table=self._cache.page_table(group, handles),
            kv_lens=self._cache.lengths(handles),
            cu_seqlens_q=cu_seqlens,
            slots=np.concatenate([part.appended.slots[group] for part in parts])[token],
            copies=in_few_rounds([part.appended.copies[group] for part in parts]),
        )


def _inverse(order: Int64Array) -> Int64Array:
    """int64: where each of the numbers 0, 1, ... stands in `order`."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse


def _joined(indices: list[Int64Array], lengths: list[int]) -> Int64Array:
    """Indices into several arrays of these lengths, as indices into those arrays one after the other."""
    before = np.cumsum([0, *lengths[:-1]])
    return np.concatenate([part + n for part, n in zip(indices, before, strict=True)])
