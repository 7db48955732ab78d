"""llama.cpp through llama-cpp-python's low-level batch interface, driven from here.

Sequences run in windows, in the order of their prompts. The prompts of a window are one batch in which a token that
several sequences share stands once, with the ids of all of them; what a window shares with the one before it is kept by
a copy of the sequence. Both cost no KV. Then all sequences of the window decode together, to their ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from peer_protocol import Params, Row, Samples, Task, parse_task, serve

STARTED = perf_counter()

import llama_cpp  # noqa: E402

SEQUENCES = 64  # most in flight; its share of the KV is read by every one of them
UBATCH = 512
SEED = 0


@dataclass(slots=True)
class Sequence:
    """One sample.

    Attributes:
        row: number of its row.
        prompt: of the row.
        params: of the row.
        shared: leading tokens that are also those of the sequence before it.
        tokens: generated so far.
    """

    row: int
    prompt: list[int]
    params: Params
    shared: int = 0
    tokens: list[int] = field(default_factory=list)

    def has_ended(self, end_token: int) -> bool:
        ends = not self.params.ignore_eos and self.tokens[-1] == end_token
        return ends or len(self.tokens) == self.params.max_tokens


def common_length(a: list[int], b: list[int]) -> int:
    differs = (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differs, min(len(a), len(b)))


def in_order(rows: list[Row]) -> list[Sequence]:
    """All samples, equal prompts side by side."""
    numbers = sorted(range(len(rows)), key=lambda number: rows[number].prompt)
    sequences = [
        Sequence(number, rows[number].prompt, rows[number].params)
        for number in numbers
        for _ in range(rows[number].params.n)
    ]
    for before, sequence in itertools.pairwise(sequences):
        sequence.shared = common_length(before.prompt, sequence.prompt)
    return sequences


def windows(sequences: list[Sequence], size: int, kv_tokens: int) -> Iterator[list[Sequence]]:
    """Runs of sequences that fit into the KV to their ends.

    Raises:
        ValueError: one does not fit alone.
    """
    window: list[Sequence] = []
    held = 0
    for sequence in sequences:
        whole = len(sequence.prompt) + sequence.params.max_tokens
        if whole > kv_tokens:
            raise ValueError(f"row {sequence.row} needs {whole} KV tokens, there are {kv_tokens}")
        needed = whole - sequence.shared
        if window and (len(window) == size or held + needed > kv_tokens):
            yield window
            window, held = [], 0
        held += needed if window else whole
        window.append(sequence)
    if window:
        yield window


class Driver:
    """A model, a context, and the one batch that is filled again and again."""

    def __init__(self, task: Task) -> None:
        llama_cpp.llama_backend_init()
        self.size = min(task.max_rows, SEQUENCES)
        self._kept = self.size  # the id of the sequence that keeps what two windows share
        model = llama_cpp.llama_model_load_from_file(str(task.model).encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise OSError(f"{task.model} cannot be loaded")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = task.kv_tokens
        params.n_ubatch = UBATCH
        params.n_seq_max = self.size + 1
        params.n_threads = params.n_threads_batch = task.threads
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise MemoryError(f"no context of {task.kv_tokens} tokens for {params.n_seq_max} sequences")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(task.kv_tokens, 0, params.n_seq_max)
        self._samplers: dict[Params, Any] = {}
        self.end_token = llama_cpp.llama_vocab_eos(llama_cpp.llama_model_get_vocab(model))

    def forget(self) -> None:
        """Drops all KV, and the samplers with how far they are in their random numbers."""
        llama_cpp.llama_memory_clear(self._memory, False)
        while self._samplers:
            llama_cpp.llama_sampler_free(self._samplers.popitem()[1])

    def run(self, window: list[Sequence], before: list[Sequence]) -> None:
        """Generates for a window; `before` is the one before it, whose KV is still there."""
        self._prefill(window, self._keep(window, before))
        active = [number for number, sequence in enumerate(window) if not sequence.has_ended(self.end_token)]
        while active:
            for number in active:
                sequence = window[number]
                position = len(sequence.prompt) + len(sequence.tokens) - 1
                self._add(sequence.tokens[-1], position, [number], wanted=True)
            self._decode()
            for place, number in enumerate(active):
                self._sample(window[number], place)
            active = [number for number in active if not window[number].has_ended(self.end_token)]

    def _keep(self, window: list[Sequence], before: list[Sequence]) -> list[int]:
        """Clears the KV but for the prompt tokens that both windows have; how many that are for each sequence."""
        most = min(len(sequence.prompt) for sequence in window) - 1  # the last token's logits are wanted
        last = before[-1].prompt if before else []
        kept = [min(common_length(last, sequence.prompt), most) for sequence in window]
        if before:
            llama_cpp.llama_memory_seq_cp(self._memory, len(before) - 1, self._kept, 0, max(kept))
        for number in range(len(before)):
            llama_cpp.llama_memory_seq_rm(self._memory, number, -1, -1)
        for number, length in enumerate(kept):
            if length:
                llama_cpp.llama_memory_seq_cp(self._memory, self._kept, number, 0, length)
        llama_cpp.llama_memory_seq_rm(self._memory, self._kept, -1, -1)
        return kept

    def _prefill(self, window: list[Sequence], kept: list[int]) -> None:
        """The prompts as one batch in depth-first order, and the first token of every sequence."""
        place: dict[int, int] = {}
        for number, sequence in enumerate(window):
            first = max(sequence.shared if number else 0, kept[number])
            alike = list(shared_with_next(window, number, first))
            for position in range(first, len(sequence.prompt)):
                sharing = sum(length > position for length in alike)
                wanted = position == len(sequence.prompt) - 1
                ids = list(range(number, number + sharing))
                added = self._add(sequence.prompt[position], position, ids, wanted=wanted)
                if wanted:
                    place |= {n: added for n in ids if len(window[n].prompt) == position + 1}
        self._decode()
        for number, sequence in enumerate(window):
            self._sample(sequence, place[number])

    def _add(self, token: int, position: int, ids: list[int], *, wanted: bool) -> int:
        """Puts a token of the sequences `ids` into the batch; its place there."""
        place: int = self._batch.n_tokens
        self._batch.token[place] = token
        self._batch.pos[place] = position
        self._batch.n_seq_id[place] = len(ids)
        for at, number in enumerate(ids):
            self._batch.seq_id[place][at] = number
        self._batch.logits[place] = wanted
        self._batch.n_tokens += 1
        return place

    def _decode(self) -> None:
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode of {self._batch.n_tokens} tokens returned {code}")
        self._batch.n_tokens = 0

    def _sample(self, sequence: Sequence, place: int) -> None:
        sampler = self._samplers.get(sequence.params)
        if sampler is None:
            sampler = self._samplers[sequence.params] = sampler_chain(sequence.params)
        sequence.tokens.append(llama_cpp.llama_sampler_sample(sampler, self._context, place))


def shared_with_next(window: list[Sequence], number: int, least: int) -> Iterator[int]:
    """Lengths of the prefix that a sequence shares with itself, the next one, the one after it ..., above `least`."""
    length = len(window[number].prompt)
    for sequence in itertools.islice(window, number, None):
        length = length if sequence is window[number] else min(length, sequence.shared)
        if length <= least:
            return
        yield length


def sampler_chain(params: Params) -> Any:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    if params.greedy:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        return chain
    if params.top_k:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_k(params.top_k))
    if params.top_p < 1:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_p(params.top_p, 1))
    if params.min_p:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_min_p(params.min_p, 1))
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(params.temperature))
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(SEED))
    return chain


def run(driver: Driver, task: Task, rows: list[Row]) -> Samples:
    before: list[Sequence] = []
    samples: Samples = [[] for _ in rows]
    for window in windows(in_order(rows), driver.size, task.kv_tokens):
        driver.run(window, before)
        before = window
        for sequence in window:
            samples[sequence.row].append(sequence.tokens)
    return samples


def main() -> None:
    task = parse_task()
    driver = Driver(task)
    note = f"weights as in {task.model.name}, KV in float16, {driver.size} sequences, driven from Python"
    serve(STARTED, partial(run, driver, task), distribution="llama-cpp-python", note=note, forget=driver.forget)


if __name__ == "__main__":
    main()
