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
class _Chunk:
    """The next tokens of a prefill.

    Attributes:
        prefill: whose.
        order: place in depth-first order.
        handle: sequence in the cache that they are appended to.
        start: absolute position of the first.
        token_ids: int32 [tokens], at least one.
        is_last: whether the prefill is complete with them.
    """

    prefill: Prefill
    order: int
    handle: int
    start: int
    token_ids: npt.NDArray[np.int32]
    is_last: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a step in the making: decode rows, or chunks of which none follows from another.

    Attributes:
        order: int64 [rows], place in depth-first order.
        handles, counts: int64 [rows], sequences in the cache and their new tokens.
        token_ids, token_sources: int64 [tokens], row by row, as in `Step`.
        appended: where the tokens go.
        sampled, sampled_token: int64 [N], who samples from which of these tokens.
        scored, scored_token: int64 [entries], entries of the score table, and which of these tokens each is scored at.
        scored_sequences: int64 [sequences], who has all scores with these rows.
        completes: prefills that have their last chunk with these rows.
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
    completes: tuple[Prefill, ...] = ()
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
        self._has_windows = any(window is not None for window in layout.windows)
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
        chunks = self._fill_up(parts, self._max_batch_tokens - num_decoded)
        if not parts:
            raise RuntimeError("nothing can be scheduled although sequences are unfinished")
        prefilled = sum(len(chunk.token_ids) for chunk in chunks)
        recomputed = sum(self._note_prefilled(chunk) for chunk in chunks)
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
        running: list[int] = []
        for prefill in (prefill for part in parts for prefill in part.completes):
            if isinstance(prefill, SequencePrefill):
                running.append(prefill.sequence)
            else:
                waiting = [s for s in self._waiting.pop(prefill.node, []) if not self._has_ended[s]]
                running.extend(filter(self._start, waiting))
        self._run(running)
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
        running: list[int] = []
        while self._residency.num_in_flight < self._max_batch_rows:
            sequence = self._peek()
            if sequence is None:
                break
            nodes = self._residency.admit(sequence, int(self._drawn[sequence]))
            if nodes is None:
                # nodes that preempted sequences left behind must not keep the only one out
                if self._residency.num_in_flight or not self._drop_idle_nodes(keep_above=sequence):
                    break
                continue
            self._pop(sequence)
            self._prefills.extend(NodePrefill(n) for n in nodes)
            node = self._residency.node_of(sequence)
            if not self._residency.is_prefilled(node):
                self._waiting.setdefault(node, []).append(sequence)
            elif self._start(sequence):
                running.append(sequence)
        self._run(running)

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

    def _start(self, sequence: int) -> bool:
        """Forks the node of a sequence whose prompt is prefilled and first token sampled; whether it can decode now. If
        it was set aside, its own tokens are prefilled before that.
        """
        self._residency.begin_sequence(sequence)
        needs_prefill = bool(self._drawn[sequence] > 1)
        if needs_prefill:
            self._prefills.appendleft(SequencePrefill(sequence))
        return not needs_prefill

    def _run(self, sequences: list[int]) -> None:
        self._running = np.sort(np.concatenate([self._running, np.array(sequences, np.int64)]))

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

    def _fill_up(self, parts: list[_Rows], budget: int) -> list[_Chunk]:
        """Adds chunks of the next prefills, `budget` tokens at most; which they are."""
        chunks: list[_Chunk] = []
        pending: dict[Prefill, _Chunk] = {}  # of `chunks`, those that have no room in the cache yet
        while self._prefills and budget > 0:
            if pending and self._follows(self._prefills[0], pending):
                parts.append(self._prefill_rows(list(pending.values())))
                pending = {}
            chunk = self._next_chunk(self._prefills[0], budget)
            if chunk is None:
                break
            chunks.append(chunk)
            pending[chunk.prefill] = chunk
            budget -= len(chunk.token_ids)
            if chunk.is_last:
                self._prefills.popleft()
        if pending:
            parts.append(self._prefill_rows(list(pending.values())))
        return chunks

    def _follows(self, prefill: Prefill, pending: dict[Prefill, _Chunk]) -> bool:
        """Whether a prefill can go on only when these chunks are in the cache: it forks what they complete, or may need
        the pages that they leave.
        """
        if self._has_windows:
            return True
        return isinstance(prefill, NodePrefill) and NodePrefill(int(self._plan.trie.parent[prefill.node])) in pending

    def _next_chunk(self, prefill: Prefill, budget: int) -> _Chunk | None:
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
        stored = self._cache.length(handle)
        rest = token_ids[stored - start :]
        count = min(len(rest), budget)
        if self._has_windows:  # elsewhere all pages that a prefill takes are committed since its sequence was admitted
            count = min(count, self._cache.room(handle))
        if count <= 0:
            return None
        return _Chunk(prefill, order, handle, stored, rest[:count], is_last=count == len(rest))

    def _prefill_rows(self, chunks: list[_Chunk]) -> _Rows:
        """Chunks of which none follows from another, with room for them in the cache."""
        handles = np.array([chunk.handle for chunk in chunks])
        counts = np.array([len(chunk.token_ids) for chunk in chunks])
        ends = np.cumsum(counts)
        ready, completed_by = self._ready(chunks)
        is_scored = self._is_scored[ready]
        scored, scored_token = self._scored_in(chunks, ends - counts)
        return _Rows(
            order=np.array([chunk.order for chunk in chunks]),
            handles=handles,
            counts=counts,
            token_ids=np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int64),
            token_sources=np.full(ends[-1], -1),
            appended=self._cache.append(handles, counts),
            sampled=ready[~is_scored],
            sampled_token=ends[completed_by[~is_scored]] - 1,
            scored=scored,
            scored_token=scored_token,
            scored_sequences=ready[is_scored],
            completes=tuple(chunk.prefill for chunk in chunks if chunk.is_last),
        )

    def _scored_in(self, chunks: list[_Chunk], first_token: Int64Array) -> tuple[Int64Array, Int64Array]:
        """What is scored at the tokens of chunks, and which of all of them each is scored at.

        Nothing is scored again when a node is prefilled again.

        Args:
            first_token: int64 [chunks], where each begins among all tokens.
        """
        if len(self._scores) == 0:
            return _NOTHING, _NOTHING
        entries, tokens = [_NOTHING], [_NOTHING]
        for chunk, first in zip(chunks, first_token.tolist(), strict=True):
            if isinstance(chunk.prefill, NodePrefill):
                node = chunk.prefill.node
                found = self._scores.entries_in(node, max(chunk.start, int(self._prefilled_to[node])), chunk.end)
                entries.append(found)
                tokens.append(self._scores.position[found].astype(np.int64) - chunk.start + first)
        return np.concatenate(entries), np.concatenate(tokens)

    def _ready(self, chunks: list[_Chunk]) -> tuple[Int64Array, Int64Array]:
        """Sequences that get their first token, or the last of their scores, with these chunks; and which of the chunks
        completes the prompt of each.
        """
        prompts = np.array([self._completed_prompt(chunk) for chunk in chunks])
        at = np.flatnonzero(prompts >= 0)
        first, end = self._first_sequence[prompts[at]], self._first_sequence[prompts[at] + 1]
        completed_by = np.repeat(at, end - first)
        sequences = np.arange(len(completed_by)) + np.repeat(end - np.cumsum(end - first), end - first)
        wants = (self._drawn[sequences] == 0) & ~self._has_ended[sequences]
        return sequences[wants], completed_by[wants]

    def _completed_prompt(self, chunk: _Chunk) -> int:
        """The prompt that ends with this chunk; -1 if there is none."""
        if not chunk.is_last or isinstance(chunk.prefill, SequencePrefill):
            return -1
        return int(self._prompt_of_node[chunk.prefill.node])

    def _note_prefilled(self, chunk: _Chunk) -> int:
        """Notes how far its node is prefilled; how many of its tokens went through the model before."""
        if isinstance(chunk.prefill, SequencePrefill):
            return len(chunk.token_ids)
        before = int(self._prefilled_to[chunk.prefill.node])
        self._prefilled_to[chunk.prefill.node] = max(before, chunk.end)
        return max(0, min(before, chunk.end) - chunk.start)

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
