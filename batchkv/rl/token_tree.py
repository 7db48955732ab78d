"""The trie of a finished rollout, for training over it: what samples have in common stands there once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from batchkv.rl.ragged import Ragged
from batchkv.trie import build_trie

if TYPE_CHECKING:
    from batchkv.rl.rollout_batch import RolloutBatch

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """N nodes with T tokens, depth first: a node comes before those that follow it, and right after one of them or
    after the node that it follows. Samples of several prompts are several trees.

    Attributes:
        token_ids: int32 [T], node after node.
        offsets: int64 [N + 1], node i has `token_ids[offsets[i] : offsets[i + 1]]`.
        parent: int32 [N], the node that each follows; -1 where a tree begins.
        start: int32 [N], position of a node's first token in the sequences that it is in.
        leaf: int32 [rows], the node in which each row of the batch ends. Rows may end within others.
        is_models: bool [T], tokens of the model; the others are of prompts and environments.
        logprobs: float32 [T], of the model's tokens; 0 for others.
    """

    token_ids: npt.NDArray[np.int32]
    offsets: Int64Array
    parent: npt.NDArray[np.int32]
    start: npt.NDArray[np.int32]
    leaf: npt.NDArray[np.int32]
    is_models: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]

    @classmethod
    def of(cls, batch: RolloutBatch) -> TokenTree:
        """Of all samples of a batch. A token in the same place after the same ones is one, whoever drew it."""
        prompts, arena = batch.prompts, batch.token_arena
        trie = build_trie(arena)
        lengths = trie.lengths[1:].astype(np.int64)  # the root has no tokens
        first_row = trie.prompt_row[trie.prompt_lo[1:]]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        at = np.arange(offsets[-1]) + np.repeat(arena.offsets[first_row] + trie.start[1:] - offsets[:-1], lengths)

        def behind_prompts(values: Ragged) -> npt.NDArray[Any]:
            return np.asarray(prompts.filled_with(0, values.values.dtype).then(values).values[at])

        return cls(
            token_ids=arena.tokens[at],
            offsets=offsets,
            parent=np.where(trie.parent[1:] > 0, trie.parent[1:] - 1, -1).astype(np.int32),
            start=trie.start[1:],
            leaf=(trie.prompt_node[trie.row_prompt] - 1).astype(np.int32),
            is_models=behind_prompts(batch.env_mask) == 1,
            logprobs=behind_prompts(batch.logprobs).astype(np.float32),
        )

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    def path(self, node: int) -> list[int]:
        """The nodes from where its tree begins down to `node`: joined, they are a sequence."""
        nodes = [node]
        while (node := int(self.parent[node])) >= 0:
            nodes.append(node)
        return nodes[::-1]

    def sequence(self, row: int) -> npt.NDArray[np.int32]:
        """int32: prompt and completion of a row of the batch."""
        return np.concatenate(
            [self.token_ids[self.offsets[i] : self.offsets[i + 1]] for i in self.path(int(self.leaf[row]))]
        )
