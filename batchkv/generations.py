"""Rows that wait for others, in the order in which they can run: batches of conversations, generation by generation.

A batch is rows that have nothing to do with those of any other batch. It is so small that the KV of all its
conversations can stay in the cache until they have ended. In a batch each generation is a wave: rows that wait for
nobody, then those that wait for these, and so on. In most jobs nobody waits, and a batch is a wave.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchkv.dependencies import Dependencies, dependency_failed
from batchkv.errors import RowError
from batchkv.io.prompts import Prompt, Prompts
from batchkv.records import Record
from batchkv.rows import PromptLimits, Rows
from batchkv.templates import TemplateRenderer, TemplateRow, TextPrompt
from batchkv.token_arena import TokenArena, TokenIds
from batchkv.tokenization import check_prompts, tokenize
from batchkv.turns import DecodingTokenizer, Turn, TurnTokenizer, end_token_of
from batchkv.waves import MAX_OUTPUTS, split

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows that depend on no others than those of the batch: int64 row numbers, ascending, of each generation."""

    generations: tuple[Int64Array, ...]


def batches(rows: Rows, budget_tokens: int) -> Iterator[Batch]:
    """All rows of a job that can run.

    Args:
        rows: of the job.
        budget_tokens: tokens of KV that there is room for; conversations of a batch take half of it, if they are not
            single ones that are larger.
    """
    parts = split(rows)
    dependencies = rows.dependencies
    if dependencies is None:
        for picked in parts:
            yield Batch((picked,))
        return
    members = np.flatnonzero(_can_run(rows, dependencies))
    if not len(members):
        return
    part = parts.of_row[
        dependencies.component[members]
    ]  # a component is named after its first row, which may itself wait
    orphans = part < 0
    part[orphans] = _parts_of_roots(members[orphans], dependencies, parts.of_row)
    order = np.lexsort((members, dependencies.component[members], part))
    for picked in _in_budget(rows, dependencies, members[order], budget_tokens // 2):
        generation = dependencies.generation[picked]
        yield Batch(tuple(np.sort(picked[generation == g]) for g in range(int(generation.max()) + 1)))


def _can_run(rows: Rows, dependencies: Dependencies) -> npt.NDArray[np.bool_]:
    can_run = rows.arena.lengths > 0
    can_run[list(dependencies.required)] = True
    return can_run


def _parts_of_roots(
    rows: Int64Array, dependencies: Dependencies, part_of: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """int32 [rows]: the part of the first row of each one's component that waits for nobody."""
    has_part = np.flatnonzero(part_of >= 0)
    components, first = np.unique(dependencies.component[has_part], return_index=True)
    found: npt.NDArray[np.int32] = part_of[has_part[first]][np.searchsorted(components, dependencies.component[rows])]
    return found


def _in_budget(rows: Rows, dependencies: Dependencies, ordered: Int64Array, kept_tokens: int) -> Iterator[Int64Array]:
    """Whole components, as many at a time as have not too many outputs, and not too much to keep."""
    is_kept = np.zeros(rows.num_rows, np.bool_)
    is_kept[list(dependencies.waiting)] = True
    new_tokens = rows.params.column(lambda params: params.max_tokens, np.int64)
    cost = np.where(is_kept, rows.arena.lengths + new_tokens, 0)[ordered]
    outputs = rows.outputs_of_rows()[ordered]
    starts = np.flatnonzero(np.diff(dependencies.component[ordered], prepend=-1))
    component_cost, component_outputs = np.add.reduceat(cost, starts), np.add.reduceat(outputs, starts)
    first, held, count = 0, 0, 0
    for start, its_cost, its_outputs in zip(
        starts.tolist(), component_cost.tolist(), component_outputs.tolist(), strict=True
    ):
        if start > first and (held + its_cost > kept_tokens or count + its_outputs > MAX_OUTPUTS):
            yield ordered[first:start]
            first, held, count = start, 0, 0
        held, count = held + its_cost, count + its_outputs
    yield ordered[first:]


@dataclass(frozen=True, slots=True, eq=False)
class _Output:
    """Of a sample that others wait for."""

    text: str | None
    token_ids: TokenIds
    is_stopped: bool


class LaterRows:
    """Builds the prompts of rows that waited for others, from what these gave. A context manager.

    Args:
        rows: of the job, with dependencies.
        dependencies: those.
        tokenizer: of the model.
        limits: what the model takes.
        end_token_ids: of the model.
    """

    def __init__(
        self,
        rows: Rows,
        dependencies: Dependencies,
        tokenizer: DecodingTokenizer | None,
        limits: PromptLimits,
        end_token_ids: Collection[int],
    ) -> None:
        self._rows, self._dependencies, self._limits = rows, dependencies, limits
        self._tokenizer, self._end_token_ids = tokenizer, frozenset(end_token_ids)
        self._outputs: dict[int, dict[int, _Output]] = {}  # by row and sample
        self._prompts: dict[int, TokenIds] = {}  # of rows that others continue
        self._failed: dict[int, int] = {}  # rows that cannot run, and the first one that failed before them
        self._renderer = TemplateRenderer()
        self._turns = None if tokenizer is None else TurnTokenizer(tokenizer)
        self._continued = frozenset(dependencies.parents.values())
        self._continued_samples = frozenset(
            (parent, dependencies.parent_samples[row]) for row, parent in dependencies.parents.items()
        )

    def __enter__(self) -> LaterRows:
        return self

    def __exit__(self, *exception: object) -> None:
        self._renderer.close()

    def note(self, records: Sequence[Record]) -> None:
        """Samples that have ended, or rows that have failed."""
        for record in records:
            if record.row not in self._dependencies.waiting:
                continue
            if record.error is not None or record.token_ids is None:
                self._failed.setdefault(record.row, record.row)
            else:
                output = _Output(record.text, record.token_ids, record.finish_reason == "stop")
                self._outputs.setdefault(record.row, {})[record.sample] = output

    def note_prompts(self, picked: Int64Array, arena: TokenArena) -> None:
        """The prompts of rows [len(picked)] that are about to run."""
        for i, row in enumerate(picked.tolist()):
            if row in self._continued:
                score_from = int(self._rows.score_from[row])  # the continuation is that row's output
                self._prompts[row] = arena.row(i)[: score_from if score_from >= 0 else None].copy()

    def needed(self, rows: Int64Array, samples: Int64Array) -> npt.NDArray[np.bool_]:
        """bool [outputs]: whether a row continues that sample of that row."""
        pairs = zip(rows.tolist(), samples.tolist(), strict=True)
        return np.array([pair in self._continued_samples for pair in pairs], np.bool_)

    def continued_output(self, row: int, sample: int) -> TokenIds | None:
        """The tokens of a sample that another row continues."""
        if (row, sample) not in self._continued_samples:
            return None
        found = self._outputs.get(row, {}).get(sample)
        return None if found is None else found.token_ids

    def prompts(self, picked: Int64Array) -> tuple[TokenArena, dict[int, RowError]]:
        """Token ids of rows that waited, none where a row has an error; and those errors, by row number."""
        errors: dict[int, RowError] = {}
        for row in picked.tolist():
            if (cause := self._cause_of_failure(row)) is not None:
                self._failed[row] = cause
                errors[row] = dependency_failed(self._rows.ids[cause].as_py() if self._rows.ids is not None else cause)
        waiting = [row for row in picked.tolist() if row not in errors]
        texts, bad = self._rendered(waiting)
        errors |= bad
        token_ids, bad = self._tokens({row: prompt for row, prompt in texts.items() if row not in errors})
        errors |= bad
        arena = TokenArena.from_rows([token_ids.get(row, _NO_TOKENS) for row in picked.tolist()])
        place = {row: i for i, row in enumerate(picked.tolist())}
        found = check_prompts(
            arena,
            vocab_size=self._limits.vocab_size,
            context_length=self._limits.context_length,
            errors={place[row] for row in errors},
        )
        errors |= {int(picked[i]): error for i, error in found.items()}
        self._failed |= {row: self._failed.get(row, row) for row in errors}
        return arena.with_rows_dropped([place[row] for row in errors]), errors

    def forget(self) -> None:
        """A batch is finished: nobody waits for its rows any more."""
        self._outputs.clear()
        self._prompts.clear()

    def _cause_of_failure(self, row: int) -> int | None:
        """The first row that failed, of those that this one waits for; a row without all its samples has failed."""
        for required in self._dependencies.required[row]:
            if required in self._failed:
                return self._failed[required]
            if len(self._outputs.get(required, ())) < self._rows.params[required].num_outputs:
                return required
        return None

    def _rendered(self, waiting: Sequence[int]) -> tuple[dict[int, Prompt], dict[int, RowError]]:
        """The prompts with the outputs of other rows in them."""
        prompts = {row: self._rows.deferred.get(row) for row in waiting}
        using = [row for row in waiting if row in self._dependencies.depends_on]
        errors: dict[int, RowError] = {}
        templates: list[TemplateRow] = []
        rendering: list[int] = []
        for row in using:
            prompt = prompts[row]
            samples = self._samples(row)
            if isinstance(prompt, np.ndarray):
                continue  # token ids have no place for a text: the row only waits
            if samples is None:
                errors[row] = _NO_TEXT
            else:
                rendering.append(row)
                templates.append(TemplateRow(prompt, samples))
        outcomes: list[TextPrompt | RowError] = self._renderer.render(templates)
        for row, outcome in zip(rendering, outcomes, strict=True):
            if isinstance(outcome, RowError):
                errors[row] = outcome
            else:
                prompts[row] = outcome
        return prompts, errors

    def _samples(self, row: int) -> Mapping[str | int, Sequence[str]] | None:
        """The texts that a row may use, by id; None if there is no tokenizer to make texts."""
        samples: dict[str | int, Sequence[str]] = {}
        for required in self._dependencies.depends_on[row]:
            texts = [output.text for _, output in sorted(self._outputs[required].items())]
            known = [text for text in texts if text is not None]
            if len(known) < len(texts) or self._rows.ids is None:
                return None
            samples[self._rows.ids[required].as_py()] = known
        return samples

    def _tokens(self, prompts: Mapping[int, Prompt]) -> tuple[dict[int, TokenIds], dict[int, RowError]]:
        turns = {row: prompt for row, prompt in prompts.items() if row in self._dependencies.parents}
        alone = {row: prompt for row, prompt in prompts.items() if row not in turns}
        token_ids, errors = self._tokens_of_prompts(alone)
        spliced, bad = self._tokens_of_turns(turns)
        return token_ids | spliced, errors | bad

    def _tokens_of_prompts(self, prompts: Mapping[int, Prompt]) -> tuple[dict[int, TokenIds], dict[int, RowError]]:
        if not prompts:
            return {}, {}
        rows = list(prompts)
        texts = [prompt if isinstance(prompt := prompts[row], str) else None for row in rows]
        arena, errors = tokenize(
            Prompts(
                texts=pa.chunked_array([pa.array(texts, pa.large_string())]),
                conversations={i: p for i, row in enumerate(rows) if isinstance(p := prompts[row], list)},
                token_ids=TokenArena.from_rows(
                    [p if isinstance(p := prompts[row], np.ndarray) else _NO_TOKENS for row in rows]
                ),
            ),
            self._tokenizer,
        )
        return {row: arena.row(i) for i, row in enumerate(rows)}, {rows[i]: error for i, error in errors.items()}

    def _tokens_of_turns(self, turns: Mapping[int, Prompt]) -> tuple[dict[int, TokenIds], dict[int, RowError]]:
        """The tokens of each one's parent, prompt and output, as they are, and then those of its own turn."""
        before: dict[int, TokenIds] = {}
        asked: list[Turn] = []
        for row, prompt in turns.items():
            parent, sample = self._dependencies.parents[row], self._dependencies.parent_samples[row]
            output = self._outputs[parent][sample]
            before[row] = np.concatenate([self._prompts[parent], output.token_ids])
            ends = self._end_token_ids | frozenset(self._rows.params[parent].stop_token_ids)
            asked.append(Turn(prompt, end_token_of(output.token_ids, ends) if output.is_stopped else None))
        token_ids: dict[int, TokenIds] = {}
        errors: dict[int, RowError] = {}
        for row, found in zip(turns, self._turn_ids(asked), strict=True):
            if isinstance(found, RowError):
                errors[row] = found
            else:
                token_ids[row] = np.concatenate([before[row], found])
        return token_ids, errors

    def _turn_ids(self, turns: Sequence[Turn]) -> Sequence[TokenIds | RowError]:
        if self._turns is not None:
            return self._turns.token_ids(turns)
        return [turn.prompt if isinstance(turn.prompt, np.ndarray) else _NO_TEXT for turn in turns]


_NO_TOKENS = np.zeros(0, np.int32)
_NO_TEXT = RowError("bad_prompt", "the row needs texts, but there is no tokenizer: name one with --tokenizer")
