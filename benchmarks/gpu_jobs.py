"""Jobs of token ids, made from a seed: a shared header, questions about documents, and a rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa


@dataclass(frozen=True, slots=True)
class TokenJob:
    """Rows with the same sampling parameters. All samples run to `max_tokens`, whatever they generate.

    Attributes:
        n: samples of each row.
        temperature: 0 is greedy.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    max_tokens: int
    temperature: float

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def samples(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def table(self) -> pa.Table:
        """As batchkv takes it."""
        rows = len(self.prompts)
        return pa.table(
            {
                "prompt_token_ids": pa.array(self.prompts, pa.list_(pa.int32())),
                "n": [self.n] * rows,
                "max_tokens": [self.max_tokens] * rows,
                "temperature": [self.temperature] * rows,
                "ignore_eos": [True] * rows,
            }
        )

    def part(self, rows: int, max_tokens: int) -> TokenJob:
        """Its first rows, cut short: to warm up."""
        return replace(self, prompts=self.prompts[:rows], max_tokens=min(max_tokens, self.max_tokens))


@dataclass(frozen=True, slots=True)
class JobSizes:
    """Of all three jobs; lengths in tokens.

    Attributes:
        header, header_rows: one header, and the rows that it stands before.
        documents, document, questions: documents, their mean length, questions about each.
        rollout_prompts, rollout_prompt, rollout_samples: prompts, their length, samples of each.
        question: mean length of what a row has of its own.
        generated, rollout_generated: length of every sample.
    """

    header: int = 2048
    header_rows: int = 1000
    documents: int = 40
    document: int = 2000
    questions: int = 16
    rollout_prompts: int = 32
    rollout_prompt: int = 512
    rollout_samples: int = 16
    question: int = 80
    generated: int = 64
    rollout_generated: int = 512


SMOKE_SIZES = JobSizes(24, 5, 2, 16, 3, 2, 9, 3, question=4, generated=3, rollout_generated=4)


def make_jobs(vocab_size: int, sizes: JobSizes, seed: int = 0) -> list[TokenJob]:
    """The same for the same seed."""
    random = np.random.default_rng(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.integers(0, vocab_size, count).tolist())

    def about(mean: int) -> int:
        return int(random.integers(max(1, mean // 2), mean + mean // 2 + 1))

    header = tokens(sizes.header)
    labels = tuple(header + tokens(about(sizes.question)) for _ in range(sizes.header_rows))
    return [
        TokenJob("shared header", labels, 1, sizes.generated, 0.0),
        TokenJob("document questions", _questions(sizes, tokens, about), 1, sizes.generated, 0.0),
        TokenJob(
            "rollout",
            tuple(tokens(sizes.rollout_prompt) for _ in range(sizes.rollout_prompts)),
            sizes.rollout_samples,
            sizes.rollout_generated,
            1.0,
        ),
    ]


def _questions(
    sizes: JobSizes, tokens: Callable[[int], tuple[int, ...]], about: Callable[[int], int]
) -> tuple[tuple[int, ...], ...]:
    """Instructions, then a document, then a question: a tree of three levels."""
    instructions = tokens(sizes.document // 8)
    documents = [instructions + tokens(about(sizes.document)) for _ in range(sizes.documents)]
    return tuple(text + tokens(about(sizes.question)) for text in documents for _ in range(sizes.questions))
