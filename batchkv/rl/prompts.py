"""The prompts of a rollout, as token ids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from batchkv.errors import UserError
from batchkv.io.prompts import read_prompts
from batchkv.rl.rollout_batch import RolloutBatch
from batchkv.rl.trajectory import Branch, Trajectory
from batchkv.rows import PromptLimits
from batchkv.tokenization import Tokenizer, check_prompts, tokenize


def read_branches(
    prompts: Sequence[Any], n: int, rows: Sequence[int] | None, tokenizer: Tokenizer | None, limits: PromptLimits
) -> list[Branch]:
    """Where the samples of each prompt begin.

    Args:
        prompts: each a text, a list of messages, token ids, or a `Branch`, which has its own row and samples.
        n: samples of each of the others.
        rows: the global number of each prompt; by default its place, behind the highest row of the branches.
        tokenizer: makes texts and messages token ids, as in jobs.
        limits: what the model takes.

    Raises:
        UserError: a prompt cannot be run; names it.
    """
    _check_kinds(prompts)
    prompts = list(prompts)
    new = [i for i, prompt in enumerate(prompts) if not isinstance(prompt, Branch)]
    if rows is not None:
        _check_rows(rows, len(prompts), new)
    arena_rows = dict(zip(new, _token_ids([prompts[i] for i in new], new, tokenizer, limits), strict=True))
    taken = [prompt.trunk.row for prompt in prompts if isinstance(prompt, Branch)]
    first = max(taken, default=-1) + 1
    branches = []
    for i, prompt in enumerate(prompts):
        row = first + i if rows is None else int(rows[i])
        if isinstance(prompt, Branch):
            _check_trunk(prompt, i, limits)
            branches.append(prompt.of_prompt(i))
        else:
            branches.append(Branch(Trajectory.of_prompt(i, row, arena_rows[i]), tuple(range(n))))
    return _grouped(_distinct(branches))


def _check_kinds(prompts: Any) -> None:
    """Raises UserError if what was given is no list of prompts."""
    if isinstance(prompts, (str, bytes)):
        raise UserError("prompts is one text, must be a list of prompts: put it into brackets")
    if isinstance(prompts, RolloutBatch):
        raise UserError("prompts is a RolloutBatch, must be a list: take branches of it (unfinished, fork)")
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__getitem__") or not hasattr(prompts, "__len__"):
        raise UserError(f"prompts is a {type(prompts).__name__}, must be a list of prompts")
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, (list, tuple)) and any(isinstance(one, Branch) for one in prompt):
            raise UserError(f"prompt {i} is a list of branches, which are prompts themselves: unpack it with *")
        if not isinstance(prompt, (Branch, str)) and not _is_list(prompt):
            hint = ", of one dimension" if hasattr(prompt, "ndim") else ""
            kind = type(prompt).__name__
            raise UserError(f"prompt {i} is {kind}, must be a text, a list of messages or a list of token ids{hint}")


def _check_rows(rows: Sequence[int], count: int, new: list[int]) -> None:
    """Raises UserError if there are not as many as prompts, or two prompts would have the same random numbers."""
    if len(rows) != count:
        raise UserError(f"there are {len(rows)} rows for {count} prompts, must be as many")
    found: dict[int, int] = {}
    for i in new:
        if (row := int(rows[i])) in found:
            raise UserError(
                f"prompts {found[row]} and {i} are both row {row}: they would be sampled with the same random numbers; "
                "give each a row of its own"
            )
        found[row] = i


def _check_trunk(branch: Branch, index: int, limits: PromptLimits) -> None:
    """Raises UserError if the model does not have a token that the samples begin with, or no room for their prompt."""
    trunk = branch.trunk
    highest = int(trunk.all_token_ids.max())
    if highest >= limits.vocab_size:
        raise UserError(f"prompt {index} goes on from token id {highest}, the model has {limits.vocab_size}")
    if limits.context_length is not None and len(trunk.prompt_token_ids) >= limits.context_length:
        raise UserError(
            f"prompt {index} has {len(trunk.prompt_token_ids)} tokens, but the model's context of "
            f"{limits.context_length} must hold it and one generated token"
        )


def _distinct(branches: list[Branch]) -> list[Branch]:
    """Samples that go on from the same tokens of the same row have indices of their own, or they would be equal."""
    taken: defaultdict[tuple[int, int, bytes], set[int]] = defaultdict(set)
    distinct = []
    for branch in branches:
        trunk, samples = branch.trunk, branch.samples
        if len(trunk) or trunk.forked_from >= 0:
            mine = taken[trunk.row, trunk.forked_from, trunk.token_ids.tobytes()]
            if not mine.isdisjoint(samples):
                samples = tuple(range(max(mine) + 1, max(mine) + 1 + len(samples)))
            mine.update(samples)
        distinct.append(Branch(trunk, samples))
    return distinct


def _grouped(branches: list[Branch]) -> list[Branch]:
    """Samples of one row that go on are of one prompt, the first of them, but for those that are there once more. Forks
    of an earlier batch are on their own: their numbers are not those of the row's samples.
    """
    found: dict[tuple[int, bytes], tuple[int, set[int]]] = {}
    grouped = []
    for branch in branches:
        trunk = branch.trunk
        is_fork = trunk.finish_reason is None and trunk.forked_from >= 0
        key = trunk.row, trunk.prompt_token_ids.tobytes()
        prompt, samples = (trunk.prompt_index, set()) if is_fork else found.setdefault(key, (trunk.prompt_index, set()))
        if samples.isdisjoint(branch.samples):
            samples.update(branch.samples)
            branch = branch.of_prompt(prompt)
        grouped.append(branch)
    return grouped


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
