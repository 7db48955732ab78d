"""The prompts of a rollout, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from batchkv.errors import UserError
from batchkv.io.prompts import read_prompts
from batchkv.rl.trajectory import Branch, Trajectory
from batchkv.rows import PromptLimits
from batchkv.tokenization import Tokenizer, check_prompts, tokenize


def read_branches(
    prompts: Sequence[Any], n: int, rows: Sequence[int] | None, tokenizer: Tokenizer | None, limits: PromptLimits
) -> list[Branch]:
    """Where the samples of each prompt begin.

    Args:
        prompts: each a text, a list of messages, token ids, or a `Branch`, which has its own number of samples.
        n: samples of each of the others.
        rows: the global number of each prompt; by default its place, behind the highest row of the branches.
        tokenizer: makes texts and messages token ids, as in jobs.
        limits: what the model takes.

    Raises:
        UserError: a prompt cannot be run; names it.
    """
    if isinstance(prompts, (str, bytes)):
        raise UserError("prompts is one text, must be a list of prompts: put it into brackets")
    if rows is not None and len(rows) != len(prompts):
        raise UserError(f"there are {len(rows)} rows for {len(prompts)} prompts, must be as many")
    new = [i for i, prompt in enumerate(prompts) if not isinstance(prompt, Branch)]
    for i in new:
        if not _is_list(prompts[i]) and not isinstance(prompts[i], str):
            kind = type(prompts[i]).__name__
            raise UserError(f"prompt {i} is {kind}, must be a text, a list of messages or a list of token ids")
    arena_rows = dict(zip(new, _token_ids([prompts[i] for i in new], new, tokenizer, limits), strict=True))
    taken = [prompt.trunk.row for prompt in prompts if isinstance(prompt, Branch)]
    first = max(taken, default=-1) + 1
    branches = []
    for i, prompt in enumerate(prompts):
        row = first + i if rows is None else int(rows[i])
        if isinstance(prompt, Branch):
            branches.append(prompt.of_prompt(i))
        else:
            branches.append(Branch(Trajectory.of_prompt(i, row, arena_rows[i]), tuple(range(n))))
    return _distinct(branches)


def _distinct(branches: list[Branch]) -> list[Branch]:
    """Samples that go on from the same tokens of the same row have indices of their own, or they would be equal."""
    next_index: dict[tuple[int, int, bytes], int] = {}
    distinct = []
    for branch in branches:
        trunk = branch.trunk
        key = trunk.row, trunk.forked_from, trunk.token_ids.tobytes()
        first = next_index.get(key, 0)
        samples = branch.samples if min(branch.samples) >= first else tuple(range(first, first + len(branch.samples)))
        if len(trunk) or trunk.forked_from >= 0:
            next_index[key] = max(first, max(samples) + 1)
        distinct.append(Branch(trunk, samples))
    return distinct


def _token_ids(
    prompts: list[Any], names: list[int], tokenizer: Tokenizer | None, limits: PromptLimits
) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    kinds = [_column_of(prompt) for prompt in prompts]
    columns = {
        name: [prompt if kind == name else None for prompt, kind in zip(prompts, kinds, strict=True)]
        for name in dict.fromkeys(kinds)
    }
    read, errors = read_prompts({name: [_plain(cell) for cell in cells] for name, cells in columns.items()}, len(names))
    arena, found = tokenize(read, tokenizer, limits.context_length)
    errors |= found
    errors |= check_prompts(
        arena, vocab_size=limits.vocab_size, context_length=limits.context_length, errors=set(errors)
    )
    for row, error in sorted(errors.items()):
        raise UserError(f"prompt {names[row]}: {error.message}")
    return [arena.row(row) for row in range(arena.num_rows)]


def _is_list(prompt: Any) -> bool:
    """Lists, arrays and tensors of one dimension."""
    return isinstance(prompt, (list, tuple)) or getattr(prompt, "ndim", 0) == 1


def _column_of(prompt: Any) -> str:
    """In which column of a job such a prompt stands."""
    if isinstance(prompt, str):
        return "prompt"
    if len(prompt) and isinstance(prompt[0], dict):
        return "messages"
    return "prompt_token_ids"


def _plain(cell: Any) -> Any:
    """Arrays and tensors as lists."""
    return cell.tolist() if hasattr(cell, "tolist") else cell
