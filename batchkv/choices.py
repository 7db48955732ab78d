"""Choices that are scored: each becomes a request of its own, and their row's answer is the likeliest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from batchkv.errors import RowError
from batchkv.sampling_params import RowParams, SamplingParams
from batchkv.scoring import SCORING, Scored
from batchkv.token_arena import TokenArena, TokenIds
from batchkv.tokenization import Tokenizer, continuation_ids
from batchkv.wave import Wave


class ChoiceTokens:
    """Token ids of choices; each list of choices is tokenized once."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, ...], list[TokenIds]] = {}

    def of(self, choices: tuple[str, ...]) -> list[TokenIds]:
        """int32 of each choice, as it stands behind a prompt."""
        if choices not in self._known:
            self._known[choices] = continuation_ids(choices, self._tokenizer)
        return self._known[choices]


def check_choices(params: RowParams, tokenizer: Tokenizer | None, vocab_size: int) -> dict[int, RowError]:
    """Rows, by number, whose choices cannot be scored."""
    tokens = ChoiceTokens(tokenizer)
    found = [_wrong_with_choices(one, tokens, tokenizer, vocab_size) for one in params.distinct]
    return {row: error for row, number in enumerate(params.index.tolist()) if (error := found[number]) is not None}


def _wrong_with_choices(
    params: SamplingParams, tokens: ChoiceTokens, tokenizer: Tokenizer | None, vocab_size: int
) -> RowError | None:
    if not params.scores_choices:
        return None
    if tokenizer is None:
        return RowError("bad_parameter", "choices are to be scored, but there is no tokenizer for them: name one")
    for number, ids in enumerate(tokens.of(params.choices)):
        if not len(ids):
            return RowError("bad_parameter", f"choice {number} has no tokens")
        if ids.max() >= vocab_size:
            message = f"choice {number} has the token id {ids.max()}, must be from 0 to {vocab_size - 1}"
            return RowError("bad_token_id", message)
    return None


def with_choices(wave: Wave, tokens: ChoiceTokens) -> Wave:
    """The wave with a request for each choice in place of those whose choices are scored."""
    scores = wave.params.column(lambda params: params.scores_choices, np.bool_)
    if not scores.any():
        return wave
    request: list[int] = []
    choice: list[int] = []
    prompts: list[TokenIds] = []
    forced: list[int] = []
    score_from: list[int] = []
    for i, is_scored in enumerate(scores.tolist()):
        prompt = wave.arena.row(i)
        for number, ids in enumerate(tokens.of(wave.params[i].choices)) if is_scored else ((-1, None),):
            request.append(i)
            choice.append(number)
            prompts.append(prompt if ids is None else np.concatenate([prompt, ids[:-1]]))
            forced.append(int(wave.scored.forced[i]) if ids is None else int(ids[-1]))
            score_from.append(int(wave.scored.score_from[i]) if ids is None else len(prompt))
    at = np.array(request)
    outputs = np.bincount(wave.output_request, minlength=wave.num_requests)[at]
    first = np.searchsorted(wave.output_request, at)
    params = RowParams.of(SCORING if number >= 0 else wave.params[i] for i, number in zip(request, choice, strict=True))
    return replace(
        wave,
        arena=TokenArena.from_rows(prompts),
        params=params,
        keys=wave.keys[at],
        scored=Scored(np.array(score_from), np.array(forced, np.int32)),
        group=wave.group[at],
        row=wave.row[at],
        choice=np.array(choice),
        output_request=np.repeat(np.arange(len(at)), outputs),
        output_sample=np.concatenate(
            [wave.output_sample[f : f + n] for f, n in zip(first.tolist(), outputs.tolist(), strict=True)]
        ),
    )
