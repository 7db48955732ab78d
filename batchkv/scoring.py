"""Log-probabilities of given tokens: which rows want them, and where in the trie they arise.

A row that is scored is a context and its continuation. All its tokens but the last are its prompt in the trie, so that
contexts, and continuations that begin alike, are computed once; the last one takes the place of a generated token. The
logits at a position score the token behind it: within a node that is the node's own next token, at its end the first
token of each child and what was forced there.

    context "a b", continuations "c d e", "c d f", "c"     entry      0    1    2    3
                                                           node       1    2    2    2
       1 [0, 2)  a b     forced: c                         position   1    2    3    3
       └── 2 [2, 4)  c d     forced: e, f                  target     c    d    e    f
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchkv.intervals import count_up, minima
from batchkv.sampling_params import RowParams, SamplingParams
from batchkv.sequence import SequenceTable
from batchkv.token_arena import TokenArena
from batchkv.trie import PrefixTrie

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

SCORING = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=True)
"""The parameters of rows that are scored."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Which rows of an arena are scored rather than generated. The arena has all tokens of such a row but the last.

    Attributes:
        score_from: int64 [rows], index of the first token to score in the row's tokens, the last one included: at
            least 1, as nothing predicts the first token of all, and at most the row's length in the arena. -1 for a
            row that is generated.
        forced: int32 [rows], the last token; anything for a row that is generated.
    """

    score_from: Int64Array
    forced: Int32Array

    @classmethod
    def none(cls, num_rows: int) -> Scored:
        """All rows are generated."""
        return cls(np.full(num_rows, -1, np.int64), np.full(num_rows, -1, np.int32))

    @property
    def is_scored(self) -> npt.NDArray[np.bool_]:
        """bool [rows]"""
        return self.score_from >= 0

    @property
    def kinds(self) -> Int64Array:
        """int64 [rows]: equal for scored rows that have equal results after equal prompts."""
        return self.score_from << 32 | self.forced

    def take(self, rows: Int64Array) -> Scored:
        """Of `rows`, in that order."""
        return Scored(self.score_from[rows], self.forced[rows])

    def check(self, params: RowParams, arena: TokenArena) -> None:
        """Looks at all rows.

        Raises:
            ValueError: a row is scored from before its second or behind its last token, or with other parameters than
                `SCORING`.
        """
        rows = np.flatnonzero(self.is_scored)
        has_none = (self.score_from[rows] < 1) | (self.score_from[rows] > arena.lengths[rows])
        for row in rows[has_none][:1].tolist():
            raise ValueError(
                f"row {row}, with {arena.lengths[row] + 1} tokens, is scored from token {self.score_from[row]} on: "
                "must be one with a token before it"
            )
        is_scoring = params.column(lambda p: p.n == 1 and p.greedy and p.max_tokens == 1, np.bool_)
        for row in rows[~is_scoring[rows]][:1].tolist():
            raise ValueError(f"row {row} is scored, but its parameters are {params[row]}: give it {SCORING}")


def split_last_tokens(arena: TokenArena, score_from: Int64Array) -> tuple[TokenArena, Scored]:
    """From rows with all their tokens to the arena that is planned.

    Args:
        arena: contexts and continuations, or prompts of rows that are generated.
        score_from: int64 [rows], where the continuation begins in a row; -1 for a row that is generated.
    """
    is_scored = (score_from >= 0) & (arena.lengths > 0)
    if not is_scored.any():
        return arena, Scored.none(arena.num_rows)
    last = (arena.offsets[:-1] + arena.lengths - 1)[is_scored]
    forced = np.full(arena.num_rows, -1, np.int32)
    forced[is_scored] = arena.tokens[last]
    # taken out, not left as a gap: prompts are sorted by all that lies between their offsets
    taken_before = np.concatenate([[0], np.cumsum(is_scored)])
    prompts = TokenArena(np.delete(arena.tokens, last), arena.offsets - taken_before, arena.lengths - is_scored)
    return prompts, Scored(score_from, forced)


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTable:
    """The distinct (node, position, target) that someone wants, sorted by node and position: one entry for each.

    Attributes:
        first: int64 [nodes + 1], the entries of node i are `[first[i], first[i + 1])`.
        position: int32 [entries], the token whose logits score the target; absolute, and in the node.
        target: int32 [entries], the token that is scored.
        entry_above: int64 [nodes], the entry, at the parent's end, of a node's first token; -1 if nobody wants it.
        last_entry: int64 [sequences], the entry of the token forced after the prompt; -1 if the sequence is generated.
    """

    first: Int64Array
    position: Int32Array
    target: Int32Array
    entry_above: Int64Array
    last_entry: Int64Array

    def __len__(self) -> int:
        return len(self.target)

    def entries_in(self, node: int, start: int, stop: int) -> Int64Array:
        """int64: the entries of a node at the positions `[start, stop)`."""
        first, end = self.first[node : node + 2].tolist()
        lo, hi = np.searchsorted(self.position[first:end], [start, stop])
        return np.arange(first + lo, first + hi)

    def entries_of(self, sequence: int, trie: PrefixTrie, sequences: SequenceTable) -> Int64Array:
        """int64 [continuation]: the entry of each token of a sequence that is scored, in order."""
        score_from = int(sequences.score_from[sequence])
        entries = []
        for node in trie.path(int(trie.prompt_node[sequences.prompt[sequence]])):
            start, end = int(trie.start[node]), int(trie.end[node])
            if score_from <= start:
                entries.append(self.entry_above[node : node + 1])
            if score_from < end:
                entries.append(self.entries_in(node, max(start, score_from - 1), end - 1))
        return np.concatenate([*entries, self.last_entry[sequence : sequence + 1]])


def build_score_table(trie: PrefixTrie, sequences: SequenceTable, arena: TokenArena) -> ScoreTable:
    """All that the scored ones of `sequences` want. Array operations only.

    Args:
        trie: all prompts.
        sequences: in the order of `trie`.
        arena: the tokens of the prompts.
    """
    if not sequences.is_scored.any():
        return _nothing_scored(trie, sequences)
    wanted_from = _wanted_from(trie, sequences)
    # a target within its node is scored at the position before it; the last position has others
    inner_from = np.maximum(trie.start, wanted_from - 1)
    num_inner = (trie.end - 1 - inner_from).clip(0)
    ends = _ends(trie, sequences, arena, wanted_from)
    num_ends = np.bincount(ends.node, minlength=trie.num_nodes)
    first = np.concatenate([[0], np.cumsum(num_inner + num_ends)])
    end_entry = first[ends.node + 1] - np.cumsum(num_ends)[ends.node] + np.arange(len(ends.node))
    position, target = (np.empty(int(first[-1]), np.int32) for _ in range(2))
    position[end_entry], target[end_entry] = trie.end[ends.node] - 1, ends.target
    inner_entry, inner_position, inner_target = _inner(trie, arena, first, inner_from, num_inner)
    position[inner_entry], target[inner_entry] = inner_position, inner_target
    entry_above, last_entry = np.full(trie.num_nodes, -1, np.int64), np.full(len(sequences), -1, np.int64)
    entry_above[ends.children] = end_entry[ends.of_children]
    last_entry[ends.sequences] = end_entry[ends.of_sequences]
    return ScoreTable(first, position, target, entry_above, last_entry)


def _nothing_scored(trie: PrefixTrie, sequences: SequenceTable) -> ScoreTable:
    none = np.zeros(0, np.int32)
    above, last = (np.full(count, -1, np.int64) for count in (trie.num_nodes, len(sequences)))
    return ScoreTable(np.zeros(trie.num_nodes + 1, np.int64), none, none, above, last)


def _wanted_from(trie: PrefixTrie, sequences: SequenceTable) -> Int64Array:
    """int64 [nodes]: the first position from which on a sequence below or at the node wants its tokens scored."""
    never = np.int64(np.iinfo(np.int32).max)
    of_prompt = np.full(trie.num_prompts, never)
    scored = np.flatnonzero(sequences.is_scored)
    np.minimum.at(of_prompt, sequences.prompt[scored], sequences.score_from[scored])
    return np.minimum(minima(of_prompt, trie.prompt_lo, trie.prompt_hi), never)


@dataclass(frozen=True, slots=True)
class _Ends:
    """What is scored at the ends of nodes, sorted by node.

    Attributes:
        node, target: int64 [ends], distinct pairs.
        children, of_children: int64, nodes whose first token is scored, and which of the ends it is.
        sequences, of_sequences: int64, sequences that are scored, and which of the ends is their last token.
    """

    node: Int64Array
    target: Int64Array
    children: Int64Array
    of_children: Int64Array
    sequences: Int64Array
    of_sequences: Int64Array


def _ends(trie: PrefixTrie, sequences: SequenceTable, arena: TokenArena, wanted_from: Int64Array) -> _Ends:
    children = np.flatnonzero(wanted_from <= trie.start)
    scored = np.flatnonzero(sequences.is_scored)
    node = np.concatenate([trie.parent[children], trie.prompt_node[sequences.prompt[scored]]]).astype(np.int64)
    first_token = arena.tokens[_arena_start(trie, arena, children) + trie.start[children]]
    target = np.concatenate([first_token, sequences.forced_token[scored]])
    # a continuation can end where another one goes on with the same token
    pairs, which = np.unique(node << 32 | target, return_inverse=True)
    return _Ends(pairs >> 32, pairs & 0xFFFFFFFF, children, which[: len(children)], scored, which[len(children) :])


def _inner(
    trie: PrefixTrie, arena: TokenArena, first: Int64Array, inner_from: Int64Array, num_inner: Int64Array
) -> tuple[Int64Array, Int64Array, Int32Array]:
    """Entries, positions and targets of the tokens that lie in one node with the token before them."""
    nodes = np.flatnonzero(num_inner)
    counts = num_inner[nodes]
    nth = count_up(counts)
    position = nth + np.repeat(inner_from[nodes], counts)
    target = arena.tokens[position + 1 + np.repeat(_arena_start(trie, arena, nodes), counts)]
    return nth + np.repeat(first[nodes], counts), position, target


def _arena_start(trie: PrefixTrie, arena: TokenArena, nodes: Int64Array) -> Int64Array:
    """int64 [nodes]: where in the arena the position 0 of a prompt under each node is."""
    return arena.offsets[trie.prompt_row[trie.prompt_lo[nodes]]]


class Scores:
    """The scores of a run as they arrive, until the sequences that want them take them.

    Attributes:
        logprobs: float32 [entries]; NaN where there is none, or the logits were no distribution.
        is_greedy: bool [entries], whether the target is the likeliest token.
    """

    def __init__(self, num_entries: int) -> None:
        self.logprobs = np.full(num_entries, np.nan, np.float32)
        self.is_greedy = np.zeros(num_entries, bool)

    def store(self, entries: Int64Array, logprobs: npt.NDArray[np.float32], is_greedy: npt.NDArray[np.bool_]) -> None:
        """Those of `entries` (distinct), from a step."""
        self.logprobs[entries] = logprobs
        self.is_greedy[entries] = is_greedy
