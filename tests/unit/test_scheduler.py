"""A plan is carried out to the letter: every token goes through the model with exactly its own prefix before it.

No model is needed. What a step would store is stored in a shadow of the pages, as the number of the token's *event*;
an event knows the event before it, read back through the page table. What a token has seen is the *text* of its event:
all tokens from the first of the prompt up to it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchkv.drafts import Drafts, References
from batchkv.job_plan import Plan
from batchkv.kernels.shared_segments import find_shared_segments
from batchkv.kv_layout import KVLayout, LayerSpec
from batchkv.memory_plan import LEAST_SLACK_PAGES, page_costs
from batchkv.planner import Limits, check_kv_budget, list_sequences, make_plan
from batchkv.sampling_params import SamplingParams
from batchkv.scheduler import Scheduler
from batchkv.scoring import SCORING, Scored, build_score_table
from batchkv.sequence import GeneratedTokens
from batchkv.speculation import Speculation
from batchkv.step import AttentionBatch, Step
from batchkv.token_arena import TokenArena
from batchkv.trie import build_trie
from batchkv.wave import Wave

Text = tuple[int, ...]

FIRST_GENERATED = 1_000  # prompt tokens are below, generated ones above: those of each sequence are its own
MOST_NEW_TOKENS = 1_000


def layout_of(*windows: int | None) -> KVLayout:
    return KVLayout(tuple(LayerSpec(1, 1, 1, 1, window) for window in windows), element_bytes=1)


LAYOUTS = {
    "full": layout_of(None),
    "windowed": layout_of(5),
    "hybrid": layout_of(3, None, 3, 9),
    "tiny window": layout_of(None, 2),
}


@dataclass(frozen=True)
class Case:
    """A job and its limits.

    A row that is scored has its first scored position and its last token in `scored`; its parameters are `SCORING`.
    Sample `s` of row `r` ends with `ends_at[r][s % len]` tokens at the latest; if (r, s) is in `fails`, the last of
    them cannot be sampled.

    Drafts have every generated token, but others in place of those of these numbers; without a set there are no drafts.
    """

    prompts: tuple[Text, ...]
    params: tuple[SamplingParams, ...]
    layout: KVLayout
    extra_bytes: int  # beyond what the largest row takes alone
    max_batch_rows: int
    max_batch_tokens: int
    page_size: int = 4
    share_prefixes: bool = True
    ends_at: tuple[tuple[int, ...], ...] = ()
    fails: frozenset[tuple[int, int]] = frozenset()
    scored: tuple[tuple[int, int] | None, ...] = ()
    wrong_drafts: frozenset[int] | None = None

    @cached_property
    def arena(self) -> TokenArena:
        return TokenArena.from_rows([np.array(prompt, np.int32) for prompt in self.prompts])

    @cached_property
    def wave(self) -> Wave:
        rows = [row or (-1, -1) for row in self.scored or [None] * len(self.prompts)]
        score_from, forced = np.array(rows, np.int64).reshape(-1, 2).T
        return Wave.of(self.arena, self.params, Scored(score_from, forced.astype(np.int32)))

    @cached_property
    def prefixes(self) -> set[Text]:
        return {prompt[: i + 1] for prompt in self.prompts for i in range(len(prompt))}

    def limits(self, kv_bytes: int) -> Limits:
        return Limits(
            kv_bytes,
            self.max_batch_rows,
            self.max_batch_tokens,
            self.page_size,
            share_prefixes=self.share_prefixes,
        )

    @cached_property
    def kv_bytes(self) -> int:
        """What the largest row takes in every group of layers when nothing else runs, unshared, and more."""
        trie = build_trie(self.arena, np.arange(len(self.prompts)))
        new_tokens = np.array([params.max_tokens for params in self.params])
        peak = page_costs(trie, list_sequences(self.wave, trie, new_tokens), self.layout, page_size=1).peak(1)
        slack = [0 if window is None else LEAST_SLACK_PAGES for window in self.layout.windows]
        return int((peak + slack) @ self.layout.group_bytes_per_token) + self.extra_bytes

    def plan(self) -> Plan:
        limits = self.limits(self.kv_bytes)
        assert not check_kv_budget(self.wave, self.layout, limits)
        return make_plan(self.wave, self.layout, limits)


class Shadow:
    """What lies in the pages of each group: numbers of events. Equal texts have equal numbers, too."""

    def __init__(self, num_pages: tuple[int, ...], page_size: int) -> None:
        self.page_size = page_size
        self.slots = [np.full(n * page_size, -1, np.int64) for n in num_pages]
        self.text_of_event: list[int] = []
        self.texts: list[Text] = [()]
        self._number: dict[tuple[int, int], int] = {}  # (text, next token) -> text
        self._prefixes = [np.zeros(0, np.int64)]  # of each text, from one token up to itself

    def run(self, step: Step) -> list[Text]:
        """Stores and copies as a backend does, then looks at what is seen. Returns the text of each token."""
        first = len(self.text_of_event)
        for slots, batch in zip(self.slots, step.attention, strict=True):
            slots[batch.slots] = np.arange(first, first + step.num_tokens)
            pages = slots.reshape(-1, self.page_size)
            for copies in batch.copies:
                before = pages[copies.src].copy()
                for i, n in enumerate(copies.num_slots.tolist()):
                    pages[copies.dst[i], :n] = before[i, :n]
        for row, (lo, hi) in enumerate(pairwise(step.attention[0].cu_seqlens_q.tolist())):
            position = int(step.positions[lo])
            text = self._text_before(step, row, position)
            assert len(self.texts[text]) == position
            for token in step.token_ids[lo:hi].tolist():
                text = self._next_text(text, token)
                self.text_of_event.append(text)
        text_of_event = np.array(self.text_of_event)
        for group in range(len(self.slots)):
            self._check_visible(group, step, text_of_event)
        return [self.texts[text] for text in self.text_of_event[first:]]

    def _text_before(self, step: Step, row: int, position: int) -> int:
        """Rows stand in depth-first order: what comes before this row in the trie has its text by now."""
        if position == 0:
            return 0
        events = {int(self._events(g, batch, row, position - 1)[0]) for g, batch in enumerate(step.attention)}
        assert len(events) == 1  # all groups of layers have the same token there
        return self.text_of_event[events.pop()]

    def _next_text(self, text: int, token: int) -> int:
        number = self._number.setdefault((text, token), len(self.texts))
        if number == len(self.texts):
            self.texts.append((*self.texts[text], token))
            self._prefixes.append(np.append(self._prefixes[text], number))
        return number

    def _events(self, group: int, batch: AttentionBatch, row: int, first: int) -> npt.NDArray[np.int64]:
        """Events at the positions `[first, length)` of a row, its tokens of this step included."""
        page, offset = np.divmod(np.arange(first, int(batch.kv_lens[row])), self.page_size)
        return self.slots[group][batch.page_table[row, page].astype(np.int64) * self.page_size + offset]

    def _check_visible(self, group: int, step: Step, text_of_event: npt.NDArray[np.int64]) -> None:
        """Every key that a query sees is that of the query's own text."""
        batch = step.attention[group]
        ends = batch.cu_seqlens_q[1:] + len(text_of_event) - step.num_tokens
        for row, end in enumerate(ends.tolist()):
            first = 0 if batch.window is None else max(0, int(batch.first_query_positions[row]) - batch.window + 1)
            seen = text_of_event[self._events(group, batch, row, first)]
            assert np.array_equal(seen, self._prefixes[text_of_event[end - 1]][first:])
        assert (step.positions == batch.query_positions).all()


@dataclass
class Run:
    """What was counted."""

    plan: Plan
    preempted: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    decoded_tokens: int = 0
    wasted_rows: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    most_in_flight: int = 0
    texts: Counter[Text] = field(default_factory=Counter)

    def count(self, step: Step, texts: list[Text]) -> None:
        self.steps += 1
        self.prefill_tokens += step.prefill_tokens
        self.recomputed_tokens += step.recomputed_tokens
        self.decoded_tokens += step.num_tokens - step.prefill_tokens
        self.draft_tokens += step.drafted.num_tokens if step.drafted else 0
        self.texts.update(texts)
        assert self.steps < 5_000


class Driver:
    """Runs a case to its end and checks every step.

    With `overlap` a step is run only when the next one has been scheduled: what a device does may be as late as that.
    """

    def __init__(self, case: Case, *, overlap: bool) -> None:
        self.case, self.overlap, self.plan = case, overlap, case.plan()
        num_sequences = len(self.plan.sequences)
        self.generated = GeneratedTokens(num_sequences)
        self.table = build_score_table(self.plan.trie, self.plan.sequences, case.arena)
        self.scored: dict[int, Text] = {}  # the text before each entry that has been scored
        self.speculation = self._speculation()
        self.scheduler = Scheduler(
            self.plan,
            case.arena,
            case.layout,
            self.generated,
            self.table,
            max_batch_rows=case.max_batch_rows,
            max_batch_tokens=case.max_batch_tokens,
            speculation=self.speculation,
        )
        self.shadow = Shadow(self.plan.memory.pool_pages, self.plan.memory.page_size)
        self.outputs: list[list[int]] = [[] for _ in range(num_sequences)]
        self.ended_in = np.full(num_sequences, -1)  # number of the step, once ended
        self.drawn = np.zeros(0, np.int64)  # tokens that the last step run has sampled
        self.run = Run(self.plan)

    def drive(self) -> Run:
        launched: Step | None = None
        while not self.scheduler.is_done:
            step = self.scheduler.schedule()
            self._check_scheduled(step)
            if launched is not None:
                self._finish(launched)
            launched = step
            if not self.overlap or self.scheduler.awaits(step):
                self._finish(launched)
                launched = None
        if launched is not None:
            self._finish(launched)
        assert (self.ended_in >= 0).all()
        assert len(self.scored) == len(self.table)
        assert not self.scheduler._cache.num_held.any()
        assert self.scheduler._cache.num_sequences == 1  # the empty root
        self.run.preempted = self.scheduler.preempted_sequences
        _check_totals(self.case, self.run)
        return self.run

    def _check_scheduled(self, step: Step) -> None:
        self.scheduler._cache.check_integrity()
        assert self.scheduler._residency.num_in_flight <= self.case.max_batch_rows
        places = list(zip(step.sampled.tolist(), _before(step).tolist(), strict=True))
        assert len(set(places)) == len(places)
        assert all(not before or (sequence, before - 1) in places for sequence, before in places)
        assert self.overlap or (step.token_sources < 0).all()
        self.run.most_in_flight = max(self.run.most_in_flight, self.scheduler._residency.num_in_flight)

    def _finish(self, step: Step) -> None:
        """Runs a step, samples from it and tells the scheduler."""
        is_late = step.token_sources >= 0
        step.token_ids[is_late] = self.drawn[step.token_sources[is_late]]
        texts = self.shadow.run(step)
        _check_limits(self.case, self.plan, step, texts)
        sampled_text = [texts[i] for i in step.logits_tokens[step.sampled_logits].tolist()]
        ends = np.zeros(len(step.sampled), bool)
        self.drawn = np.zeros(len(step.sampled), np.int64)
        for i, (sequence, text) in enumerate(zip(step.sampled.tolist(), sampled_text, strict=True)):
            if _before(step)[i] == 0 or (self._is_right(step, i - 1) and not ends[i - 1]):
                self.drawn[i], ends[i] = self._sample(sequence, text)
                self.run.accepted_tokens += int(_before(step)[i] > 0)
        self._score(step, texts)
        self.scheduler.update(step, ends)
        self.scheduler._cache.check_integrity()
        self.run.count(step, texts)

    def _speculation(self) -> Speculation | None:
        wrong = self.case.wrong_drafts
        if wrong is None:
            return None
        outputs = [
            [_token(sequence, i if i not in wrong else MOST_NEW_TOKENS - 1) for i in range(12)]
            for sequence in range(len(self.plan.sequences))
        ]
        drafts = Drafts(References(tuple((np.array(tokens),) for tokens in outputs)), np.arange(len(outputs)))
        return Speculation(drafts, self.generated, ~self.plan.sequences.is_scored)

    def _is_right(self, step: Step, place: int) -> bool:
        """Whether what was sampled in a place counts, and is what was drafted; places that do not count have 0."""
        if step.drafted is None or step.drafted.token_ids[place] < 0 or not self.drawn[place]:
            return False
        is_right = bool(step.drafted.token_ids[place] == self.drawn[place])
        sequences, matched = step.sampled[[place]], step.drafted.matched[[place]]
        assert self.speculation is not None
        self.speculation.learn(sequences, matched, np.array([is_right]))
        return is_right

    def _score(self, step: Step, texts: list[Text]) -> None:
        """Every entry is scored once, and all of a sequence before it ends."""
        for entry, logits in zip(step.scored.tolist(), step.scored_logits.tolist(), strict=True):
            assert entry not in self.scored
            self.scored[entry] = texts[step.logits_tokens[logits]]
        for sequence in step.scored_sequences.tolist():
            row = int(self.plan.sequences.row[sequence])
            assert self.case.scored[row] is not None
            assert self.ended_in[sequence] < 0
            self.ended_in[sequence] = self.run.steps
            score_from, forced = self.case.scored[row] or (0, 0)
            tokens = (*self.case.prompts[row], forced)
            entries = self.table.entries_of(sequence, self.plan.trie, self.plan.sequences)
            assert tuple(self.table.target[entries].tolist()) == tokens[score_from:]
            seen = [self.scored[entry] for entry in entries.tolist()]
            assert seen == [tokens[:i] for i in range(score_from, len(tokens))]

    def _sample(self, sequence: int, text: Text) -> tuple[int, bool]:
        """The token that is sampled after a text, and whether its sequence ends with it."""
        assert not self.plan.sequences.is_scored[sequence]
        output = self.outputs[sequence]
        token = _token(sequence, len(output))
        seen = (*self.case.prompts[self.plan.sequences.row[sequence]], *output)
        if self.ended_in[sequence] >= 0:  # a token of it may be there that nobody took
            assert self.overlap
            assert self.ended_in[sequence] == self.run.steps - 1
            assert text[: len(seen)] == seen
            self.run.wasted_rows += 1
            return token, False
        assert text == seen  # what the model saw is all there is, in order
        last, fails = _last(self.case, self.plan, sequence)
        ends = len(output) + 1 == last
        if not (fails and ends):
            output.append(token)
            self.generated.append(np.array([sequence]), np.array([token], np.int32), np.zeros(1, np.float32))
        if ends:
            self.generated.drop(sequence)
            self.ended_in[sequence] = self.run.steps
        return token, ends


def _token(sequence: int, number: int) -> int:
    return FIRST_GENERATED + MOST_NEW_TOKENS * sequence + number


def _before(step: Step) -> npt.NDArray[np.int64]:
    """int64 [N]: places of the same sequence before each."""
    return np.zeros(len(step.sampled), np.int64) if step.drafted is None else step.drafted.before


def drive(case: Case, *, overlap: bool) -> Run:
    return Driver(case, overlap=overlap).drive()


in_both_modes = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


def _last(case: Case, plan: Plan, sequence: int) -> tuple[int, bool]:
    """How many tokens a sequence is to generate, and whether the last of them fails."""
    row, sample = int(plan.sequences.row[sequence]), int(plan.sequences.sample[sequence])
    most = int(plan.sequences.max_new_tokens[sequence])
    ends_at = case.ends_at[row] if case.ends_at else (most,)
    return min(most, ends_at[sample % len(ends_at)]), (row, sample) in case.fails


def _check_limits(case: Case, plan: Plan, step: Step, texts: list[Text]) -> None:
    assert 0 < step.num_tokens <= case.max_batch_tokens
    assert sum(text[-1] < FIRST_GENERATED for text in texts) <= step.prefill_tokens
    decoding = {text[-1] // MOST_NEW_TOKENS for text in texts if text[-1] >= FIRST_GENERATED}
    assert len(decoding) <= case.max_batch_rows
    held = step.pages_held
    page_bytes = np.array(case.layout.group_bytes_per_token) * plan.memory.page_size
    assert (held <= np.array(plan.memory.pool_pages)).all()
    assert held @ page_bytes // case.layout.bytes_per_token <= plan.memory.peak_tokens  # both in whole tokens
    assert np.array(plan.memory.pool_pages) @ page_bytes <= case.kv_bytes
    if _shares(case, plan) and case.layout.windows[0] is None:
        _check_order(step.attention[0], texts)


def _check_order(batch: AttentionBatch, texts: list[Text]) -> None:
    """Rows that share pages stand side by side: as many segments are found as the trie of full pages has nodes."""
    size = batch.page_size
    rows: list[tuple[object, ...]] = []
    for row, end in enumerate(batch.cu_seqlens_q[1:].tolist()):
        text = texts[end - 1]
        full = [text[: i + size] for i in range(0, len(text) - size + 1, size)]
        rows.append((*full, *([row] if len(text) % size else [])))  # a partly filled page is the row's own
    nexts: dict[tuple[object, ...], set[object]] = {}
    for pages in rows:
        for i, page in enumerate(pages):
            nexts.setdefault(pages[:i], set()).add(page)
    nodes = set(rows) | {prefix for prefix, following in nexts.items() if prefix and len(following) > 1}
    assert len(find_shared_segments(batch)) == len(nodes)


def _shares(case: Case, plan: Plan) -> bool:
    """Whether the plan shares all there is to share (a budget can be too small for pages of sharers)."""
    return case.share_prefixes and plan.prefill_tokens == len(case.prefixes)


def _check_totals(case: Case, run: Run) -> None:
    """What was planned is what was computed, and everything computed twice was counted as such."""
    assert run.prefill_tokens == run.plan.prefill_tokens + run.recomputed_tokens
    assert sum(run.texts.values()) == run.prefill_tokens + run.decoded_tokens
    if not run.plan.memory.is_tight:
        assert run.preempted == run.recomputed_tokens == 0
    if _shares(case, run.plan):
        assert case.prefixes <= set(run.texts)
        assert sum(run.texts.values()) - len(run.texts) == run.recomputed_tokens
    else:
        assert run.plan.prefill_tokens == sum(map(len, case.prompts))


WRONG_DRAFTS = st.one_of(st.none(), st.frozensets(st.integers(1, 8), max_size=4))
PARAMS = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 2, 5]),
    max_tokens=st.integers(1, 8),
    temperature=st.sampled_from([0.0, 1.0]),
)


@st.composite
def prompt_lists(draw: st.DrawFn, most: int) -> tuple[Text, ...]:
    """Prompts most of which go on from somewhere inside an earlier one."""
    prompts: list[Text] = []
    for _ in range(draw(st.integers(1, most))):
        earlier = draw(st.sampled_from([(), *prompts]))
        kept = draw(st.one_of(st.just(len(earlier)), st.integers(0, len(earlier))))
        tail = draw(st.lists(st.integers(0, 2), min_size=0 if kept else 1, max_size=12))
        prompts.append((*earlier[:kept], *tail))
    return tuple(prompts)


@st.composite
def scored_lists(draw: st.DrawFn, prompts: tuple[Text, ...]) -> tuple[tuple[int, int] | None, ...]:
    """Some rows are scored, from anywhere."""
    some = st.sampled_from([False, True]) if draw(st.booleans()) else st.just(False)
    return tuple((draw(st.integers(1, len(p))), draw(st.integers(0, 2))) if draw(some) else None for p in prompts)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Samples, twins, prefixes of others, early ends, every kind of limit."""
    prompts = draw(prompt_lists(10))
    ends_at = st.lists(st.integers(1, 8), min_size=1, max_size=5).map(tuple)
    scored = draw(scored_lists(prompts))
    return Case(
        prompts=prompts,
        params=tuple(SCORING if row else draw(PARAMS) for row in scored),
        layout=LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))],
        extra_bytes=draw(st.sampled_from([0, 3, 10, 40, 100, 300, 10_000])),
        max_batch_rows=draw(st.integers(1, 12)),
        max_batch_tokens=draw(st.one_of(st.integers(1, 8), st.integers(9, 64))),
        page_size=draw(st.sampled_from([1, 2, 3, 4, 8])),
        share_prefixes=draw(st.sampled_from([True, True, True, False])),
        ends_at=tuple(draw(ends_at) for _ in prompts),
        fails=frozenset(draw(st.sets(st.tuples(st.integers(0, 10), st.integers(0, 2)), max_size=2))),
        scored=scored,
        wrong_drafts=draw(WRONG_DRAFTS),
    )


@in_both_modes
@given(cases())
@example(  # the peak is no whole number of tokens: a token takes two bytes, one in each group
    Case(
        prompts=((0,), (0,), (0,), (0, 0, 0, 0)),
        params=(SamplingParams(max_tokens=1),) * 4,
        layout=LAYOUTS["tiny window"],
        extra_bytes=0,
        max_batch_rows=1,
        max_batch_tokens=2,
        page_size=1,
        ends_at=((1,),) * 4,
    )
)
@settings(max_examples=60)
def test_every_sequence_sees_exactly_its_tokens_and_every_trie_token_is_computed_once(
    overlap: bool, case: Case
) -> None:
    run = drive(case, overlap=overlap)
    assert run.preempted == run.recomputed_tokens == 0  # too few end for a guess at how long the others get


@in_both_modes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_that_are_right_save_steps(layout: str, overlap: bool) -> None:
    plain = Case(
        prompts=((1, 2, 3), (1, 2)),
        params=(SamplingParams(n=2, max_tokens=12, temperature=1.0),) * 2,
        layout=LAYOUTS[layout],
        extra_bytes=1_000,
        max_batch_rows=8,
        max_batch_tokens=64,
    )
    drafted = drive(replace(plain, wrong_drafts=frozenset()), overlap=overlap)
    assert 0 < drafted.accepted_tokens <= drafted.draft_tokens
    # the wrong token and the one behind it are not drafted right, and the sequences need three steps at least
    half = drive(replace(plain, wrong_drafts=frozenset({6})), overlap=overlap)
    assert 0 < half.accepted_tokens < half.draft_tokens
    assert drafted.steps < half.steps < drive(plain, overlap=overlap).steps


@st.composite
def surprises(draw: st.DrawFn) -> Case:
    """So many samples of a first row end at once that all rows are expected to be short; then they are not."""
    prompts = draw(prompt_lists(7))
    several = [draw(st.sampled_from([1, 1, 2, 3])) for _ in prompts]
    crowd = SamplingParams(n=40, max_tokens=10, temperature=1.0)
    scored = draw(scored_lists(prompts))
    long = [SamplingParams(n=n, max_tokens=draw(st.integers(6, 12)), temperature=1.0) for n in several]
    return Case(
        prompts=((9,), *prompts),
        params=(crowd, *(SCORING if row else params for row, params in zip(scored, long, strict=True))),
        layout=LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))],
        extra_bytes=draw(st.integers(0, 150)),
        max_batch_rows=draw(st.integers(2, 12)),
        max_batch_tokens=draw(st.integers(1, 40)),
        page_size=draw(st.sampled_from([1, 2, 3, 4])),
        ends_at=((1,), *[(12, draw(st.integers(1, 12))) for _ in prompts]),
        scored=(None, *scored),
        wrong_drafts=draw(WRONG_DRAFTS),
    )


@in_both_modes
@given(surprises())
@settings(max_examples=60)
def test_nothing_is_lost_when_sequences_outgrow_what_was_expected(overlap: bool, case: Case) -> None:
    drive(case, overlap=overlap)


def surprise(
    *rows: tuple[str, int, int, tuple[int, ...]],
    layout: str,
    extra_bytes: int,
    rows_at_once: int,
    max_batch_tokens: int,
) -> Case:
    """After the crowd, rows of (prompt, n, max_tokens, ends_at)."""
    return Case(
        prompts=((9,), *(tuple(map(int, prompt)) for prompt, _, _, _ in rows)),
        params=tuple(
            SamplingParams(n=n, max_tokens=most, temperature=1.0) for n, most in [(40, 8), *(row[1:3] for row in rows)]
        ),
        layout=LAYOUTS[layout],
        extra_bytes=extra_bytes,
        max_batch_rows=rows_at_once,
        max_batch_tokens=max_batch_tokens,
        page_size=1,
        ends_at=((1,), *(ends_at for _, _, _, ends_at in rows)),
    )


@in_both_modes
def test_a_preempted_sequence_that_ends_with_a_siblings_prefill_does_not_come_back(overlap: bool) -> None:
    case = surprise(
        ("1", 2, 8, (8,)),
        ("222", 2, 8, (8,)),
        ("3", 1, 8, (1,)),
        ("4", 1, 8, (1,)),
        layout="full",
        extra_bytes=16,
        rows_at_once=8,
        max_batch_tokens=4,
    )
    assert drive(case, overlap=overlap).preempted > 0


@in_both_modes
@pytest.mark.parametrize("max_batch_tokens", [9, 12])
def test_a_sequence_that_comes_back_before_it_is_known_to_have_ended(max_batch_tokens: int, overlap: bool) -> None:
    """In overlap mode a step sets it aside, drops its node, lets it in again and prefills some or all of the node.

    Then its end token arrives. Nothing is left to be prefilled, and no first token is sampled twice.
    """
    case = surprise(
        ("111", 2, 6, (2,)),
        ("2", 1, 9, (1,)),
        ("33333", 2, 4, (1,)),
        ("4444444444", 1, 5, (1,)),
        layout="full",
        extra_bytes=13,
        rows_at_once=6,
        max_batch_tokens=max_batch_tokens,
    )
    crowd = replace(case.params[0], max_tokens=10)
    run = drive(replace(case, params=(crowd, *case.params[1:])), overlap=overlap)
    assert run.preempted > 0


@in_both_modes
def test_who_ends_by_a_token_has_one_row_too_many_in_overlap_and_who_ends_by_length_none(overlap: bool) -> None:
    rows = [("1", 1, 8, (3,)), ("2", 1, 8, (8,)), ("3", 1, 1, (1,)), ("4", 3, 5, (1, 4, 5))]
    case = surprise(*rows, layout="full", extra_bytes=10_000, rows_at_once=16, max_batch_tokens=64)
    case = replace(case, prompts=case.prompts[1:], params=case.params[1:], ends_at=case.ends_at[1:])
    run = drive(case, overlap=overlap)
    assert run.wasted_rows == (3 if overlap else 0)
    assert run.decoded_tokens == 2 + 7 + 0 + 0 + 3 + 4 + run.wasted_rows
    assert run.steps == 8


@in_both_modes
def test_nodes_that_preempted_sequences_left_behind_do_not_keep_the_last_one_out(overlap: bool) -> None:
    case = surprise(
        ("22", 1, 6, (12,)),
        ("22102011112122", 2, 6, (12, 1)),
        ("020002101102", 1, 6, (12,)),
        ("022000222210", 2, 6, (12, 1)),
        ("02000210110222", 2, 6, (12, 1)),
        ("020002101102", 1, 8, (12,)),
        layout="full",
        extra_bytes=7,
        rows_at_once=6,
        max_batch_tokens=9,
    )
    assert drive(case, overlap=overlap).preempted > 0


@in_both_modes
def test_a_node_that_starts_in_the_step_that_ends_its_parent_holds_nothing_behind_the_window(overlap: bool) -> None:
    case = surprise(
        ("0010", 1, 12, (12,)),
        ("0010000001121001", 1, 7, (12,)),
        ("00100000011210012", 1, 9, (12,)),
        ("00100000011210011", 3, 9, (12, 5)),
        ("00100000011210012102110", 1, 9, (12,)),
        ("00100000011210010222121", 1, 12, (12,)),
        layout="hybrid",
        extra_bytes=30,
        rows_at_once=3,
        max_batch_tokens=7,
    )
    assert drive(case, overlap=overlap).preempted > 0


@in_both_modes
@pytest.mark.parametrize(
    ("layout", "extra_bytes", "page_size"), [("full", 90, 4), ("hybrid", 200, 2), ("windowed", 80, 3)]
)
def test_preempted_sequences_are_computed_again_and_that_is_counted(
    layout: str, extra_bytes: int, page_size: int, overlap: bool
) -> None:
    """Forty sequences end after a token or two, and then come some that take all they may have."""
    headers = ["12345678", "8765", "33333333333"]
    short = [(f"71{i // 10}{i % 10}", 1, 20, (1 + i % 2,)) for i in range(40)]
    long = [(headers[i % 3] + str(i) * (i % 4), 3 if i % 5 == 0 else 1, 20, (20,)) for i in range(1, 12)]
    case = surprise(*short, *long, layout=layout, extra_bytes=extra_bytes, rows_at_once=16, max_batch_tokens=32)
    run = drive(replace(case, page_size=page_size), overlap=overlap)
    assert run.preempted > 0
    assert run.recomputed_tokens > 0
    assert run.most_in_flight > run.plan.memory.window_rows  # what the guess was for


@in_both_modes
def test_without_early_ends_nothing_is_preempted_however_tight_the_budget(overlap: bool) -> None:
    rows = [("1" * (1 + i % 5) + "2" * (i % 3), 1 + i % 2, 1 + i % 9, (9,)) for i in range(50)]
    case = surprise(*rows, layout="hybrid", extra_bytes=40, rows_at_once=16, max_batch_tokens=16)
    run = drive(replace(case, ends_at=()), overlap=overlap)
    assert run.preempted == run.recomputed_tokens == 0


@in_both_modes
def test_with_memory_to_spare_nothing_is_preempted_though_a_straggler_runs_on(overlap: bool) -> None:
    """Forty rows end early, and then come rows under a long header, while the first row goes on and on."""
    straggler = ("9", 1, 60, (60,))
    early = [(f"1{i // 10}{i % 10}", 1, 10, (1,)) for i in range(40)]
    under_header = [("2" * 100 + f"{i // 10}{i % 10}", 1, 8, (8,)) for i in range(10)]
    case = surprise(
        straggler, *early, *under_header, layout="full", extra_bytes=100_000, rows_at_once=8, max_batch_tokens=32
    )
    case = replace(case, prompts=case.prompts[1:], params=case.params[1:], ends_at=case.ends_at[1:])
    assert drive(case, overlap=overlap).preempted == 0


@in_both_modes
def test_decode_and_prefill_share_a_step(overlap: bool) -> None:
    rows = [(str(i) * 6, 1, 8, (8,)) for i in range(8)]
    case = surprise(*rows, layout="full", extra_bytes=10_000, rows_at_once=4, max_batch_tokens=8)
    run = drive(replace(case, prompts=case.prompts[1:], params=case.params[1:], ends_at=()), overlap=overlap)
    assert run.prefill_tokens == 48
    assert run.steps < 6 + 8 * 8 / 4 + 6  # far fewer than one after the other


@in_both_modes
@pytest.mark.parametrize("max_batch_tokens", [7, 64])
def test_scores_follow_their_tokens_when_chunks_are_put_in_order(
    max_batch_tokens: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that share nothing may be prefilled in any order, and stand in that of the trie nevertheless."""
    admit = Scheduler._admit

    def admit_and_turn_round(self: Scheduler) -> None:
        admit(self)
        self._prefills.reverse()

    monkeypatch.setattr(Scheduler, "_admit", admit_and_turn_round)
    prompts = tuple((i,) * (i + 3) for i in range(6))
    scored = tuple((i + 1, 9) if i % 3 else None for i in range(6))
    params = tuple(SCORING if row else SamplingParams(max_tokens=3) for row in scored)
    run = drive(Case(prompts, params, LAYOUTS["full"], 1_000, 6, max_batch_tokens, scored=scored), overlap=overlap)
    assert run.prefill_tokens == sum(map(len, prompts))


@in_both_modes
def test_a_job_without_rows_that_can_run_is_done_at_once(overlap: bool) -> None:
    case = Case((), (), LAYOUTS["full"], 100, 4, 4)
    assert drive(case, overlap=overlap).steps == 0
