"""KV that stays in the cache from one wave to the next: of conversations that go on, and of prefixes met again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from batchkv.kv_cache import KVCache
from batchkv.token_arena import TokenArena
from batchkv.trie import PrefixTrie, build_trie

Int64Array = npt.NDArray[np.int64]


class Keep(IntEnum):
    """Which sequences of a wave stay in the cache for the waves after it."""

    NOTHING = 0
    NEEDED = 1  # those that later rows continue
    ALL = 2


@dataclass(frozen=True, slots=True, eq=False)
class KeptSequence:
    """A sequence that has ended and whose KV is still there.

    Attributes:
        handle: in the cache; any number for one that is only expected there.
        token_ids: int32 [tokens], all tokens that have KV: the prompt and what was generated, mostly without the last.
        group: requests of other groups must not see it.
    """

    handle: int
    token_ids: npt.NDArray[np.int32]
    group: int


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """What a wave finds in the cache. K kept sequences, G groups of layers.

    Attributes:
        arena: K rows, the tokens that have KV.
        handles, group: int64 [K], as in `KeptSequence`.
        free_pages, held_pages: int64 [G], pages of the pool that nobody holds, and that these sequences hold.
        page_size: tokens per page.
    """

    arena: TokenArena
    handles: Int64Array
    group: Int64Array
    free_pages: Int64Array
    held_pages: Int64Array
    page_size: int

    @classmethod
    def of(cls, kept: Sequence[KeptSequence], cache: KVCache) -> Carried:
        """All that is kept in a cache between two waves."""
        return cls._of(kept, cache.num_free, cache.num_held, cache.page_size)

    @classmethod
    def expected(cls, kept: Sequence[KeptSequence], pool_pages: Int64Array, page_size: int) -> Carried:
        """The same from the tokens alone: whatever is shared is held once, from the last whole page on by each."""
        arena = TokenArena.from_rows([one.token_ids for one in kept])
        trie = build_trie(arena, np.array([one.group for one in kept], np.int64))
        held = np.full(len(pool_pages), int((-(-trie.end // page_size) - trie.start // page_size)[1:].sum()))
        return cls._of(kept, np.maximum(pool_pages - held, 0), held, page_size)

    @classmethod
    def _of(cls, kept: Sequence[KeptSequence], free: Int64Array, held: Int64Array, page_size: int) -> Carried:
        return cls(
            arena=TokenArena.from_rows([one.token_ids for one in kept]),
            handles=np.array([one.handle for one in kept], np.int64),
            group=np.array([one.group for one in kept], np.int64),
            free_pages=free,
            held_pages=held,
            page_size=page_size,
        )


@dataclass(frozen=True, slots=True, eq=False)
class CachedNodes:
    """Which tokens of a trie have KV before anything is run.

    Attributes:
        cached_to: int64 [nodes], positions `[start, cached_to)` have it.
        handle: int64 [nodes], a sequence in the cache that begins with the prefix up to there; -1 where there is none.
        is_needed: bool [nodes], whether a sequence below has to have the node computed or forked: no node between the
            two is there entirely.
    """

    cached_to: Int64Array
    handle: Int64Array
    is_needed: npt.NDArray[np.bool_]

    @classmethod
    def none(cls, trie: PrefixTrie) -> CachedNodes:
        """Nothing has KV yet."""
        return cls(
            trie.start.astype(np.int64), np.full(trie.num_nodes, -1, np.int64), np.ones(trie.num_nodes, np.bool_)
        )

    def is_complete(self, trie: PrefixTrie) -> npt.NDArray[np.bool_]:
        """bool [nodes]: nothing of the node is left to prefill."""
        complete: npt.NDArray[np.bool_] = (self.handle >= 0) & (self.cached_to == trie.end)
        return complete

    def to_prefill(self, trie: PrefixTrie) -> Int64Array:
        """int64 [nodes]: tokens of each node that go through the model."""
        return np.where(self.is_needed, trie.end - self.cached_to, 0)


def cached_nodes(
    trie: PrefixTrie,
    kept_prompt: Int64Array,
    handles: Int64Array,
    has_sequence: npt.NDArray[np.bool_],
    *,
    windowed: bool,
) -> CachedNodes:
    """Finds the kept sequences in the trie of a wave.

    Args:
        trie: of requests and kept sequences together.
        kept_prompt: int64 [K], which of the prompts each kept sequence is.
        handles: int64 [K], in the cache.
        has_sequence: bool [prompts], whether something is generated or scored after a prompt.
        windowed: layers see only part of what is before them, and so the KV of a prefix is there for its end alone.
    """
    if not len(handles):
        return CachedNodes.none(trie)
    order = np.argsort(kept_prompt, kind="stable")
    prompts, handles = kept_prompt[order], handles[order]
    first = np.searchsorted(prompts, trie.prompt_lo)
    is_below = (first < len(prompts)) & (np.append(prompts, trie.num_prompts)[first] < trie.prompt_hi)
    if windowed:  # a prompt that ends at a node is the first below it
        is_below &= trie.prompt_node[np.append(prompts, 0)[first]] == np.arange(trie.num_nodes)
    is_below[0] = False
    cached_to = np.where(is_below, trie.end, trie.start).astype(np.int64)
    # Of a prompt that goes no further than what is there, the last token is run again: its logits are not kept.
    ends = trie.prompt_node[np.flatnonzero(has_sequence)]
    ends = ends[is_below[ends]]
    cached_to[ends] = trie.start[ends] if windowed else trie.end[ends] - 1
    handle = np.where(is_below & (cached_to > trie.start), np.append(handles, -1)[first], -1)
    cached_to[handle < 0] = trie.start[handle < 0]
    return CachedNodes(cached_to, handle, _needed(trie, (handle >= 0) & (cached_to == trie.end), has_sequence))


def _needed(
    trie: PrefixTrie, is_complete: npt.NDArray[np.bool_], has_sequence: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """bool [nodes]: this one is not complete, and a sequence below finds no complete node between itself and it."""
    wants = np.zeros(trie.num_nodes, np.bool_)
    wants[trie.prompt_node[np.flatnonzero(has_sequence)]] = True
    wants &= ~is_complete
    parent = trie.parent
    for node in range(trie.num_nodes - 1, 0, -1):  # children before their parents
        if wants[node] and not is_complete[parent[node]]:
            wants[parent[node]] = True
    return wants
