"""Drafts change no token, no log-probability and no count of prompt tokens; where they are right they save steps.

Jobs are run a second time with what they gave the first time, or would have given with another seed, or with noise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from torch import nn

from batchkv.drafts import Drafts, References
from batchkv.engine import Engine
from batchkv.errors import RowError
from batchkv.executor import Kept, OnEnded, RunOptions
from batchkv.kernels.native_attention import is_covered
from batchkv.kv_cache import KVCache
from batchkv.metrics import RunMetrics
from batchkv.model_runner import ModelRunner
from batchkv.preparation import PreparedWave
from batchkv.sampling_params import SamplingParams
from batchkv.token_arena import TokenArena
from batchkv.wave import Wave
from batchkv.writer import Completion, summary_of
from tests.parity.test_constrained import jobs as constrained_jobs
from tests.parity.test_overlap import END_TOKENS, jobs, model_of
from tests.tiny_models import FAMILIES, VOCAB_SIZE, tiny_tokenizer

GREEDY = SamplingParams(max_tokens=24, logprobs=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.7, n=3, logprobs=True)

in_both_modes = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


@dataclass
class Recall:
    """An `Engine.execute` that keeps completions by their prompts, and drafts from those it has when it is told to."""

    completions: defaultdict[bytes, list[npt.NDArray[np.int32]]] = field(default_factory=lambda: defaultdict(list))
    drafts: bool = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        execute = Engine.execute

        def executed(
            engine: Engine,
            prepared: PreparedWave,
            runner: ModelRunner,
            cache: KVCache | None,
            on_ended: OnEnded,
            *rest: Any,
        ) -> list[Kept]:
            if not self.drafts:
                return execute(engine, prepared, runner, cache, self._noting(prepared, on_ended), *rest)
            wave = prepared.wave
            known = [self.completions[wave.arena.row(i).tobytes()] for i in range(wave.num_requests)]
            drafts = Drafts.of_requests(known, prepared.plan.sequences)
            return execute(engine, prepared, runner, cache, on_ended, *rest, RunOptions(drafts=drafts))

        monkeypatch.setattr(Engine, "execute", executed)

    def _noting(self, prepared: PreparedWave, on_ended: OnEnded) -> OnEnded:
        def noted(ended: Sequence[tuple[int, Completion | RowError]]) -> None:
            for sequence, completion in ended:
                if isinstance(completion, Completion):
                    prompt = prepared.wave.arena.row(int(prepared.plan.sequences.row[sequence]))
                    self.completions[prompt.tobytes()].append(completion.token_ids)
            on_ended(ended)

        return noted

    def make_noise(self) -> None:
        """Random tokens in place of all completions."""
        random = np.random.default_rng(1)
        for some in self.completions.values():
            some[:] = [random.integers(0, VOCAB_SIZE, 200).astype(np.int32) for _ in some]


@pytest.fixture
def recall(monkeypatch: pytest.MonkeyPatch, checked_steps: None) -> Recall:
    """It is in place; and the KV cache is checked after every step."""
    recall = Recall()
    recall.install(monkeypatch)
    return recall


def engine_of(family: str, *, overlap: bool, **config: Any) -> Engine:
    engine = Engine(model_of(family), tiny_tokenizer(), **config)
    engine._overlap = overlap
    return engine


def again(engine: Engine, table: pa.Table, sampling: SamplingParams, recall: Recall) -> tuple[dict[str, Any], ...]:
    """Runs a job as it is and then with drafts, and compares; the summaries of both.

    What the first run gives is drafted, but for what is there already.
    """
    recall.drafts = False
    kept = {prompt: list(some) for prompt, some in recall.completions.items()}
    plain = engine.run(table, sampling)
    if kept:
        recall.completions.clear()
        recall.completions.update(kept)
    recall.drafts = True
    drafted = engine.run(table, sampling)
    assert plain.drop(["logprobs"]).to_pylist() == drafted.drop(["logprobs"]).to_pylist()
    np.testing.assert_allclose(_logprobs(plain), _logprobs(drafted), rtol=0, atol=1e-5)
    summaries = summary_of(plain.schema), summary_of(drafted.schema)
    assert "draft_tokens" not in summaries[0]
    for summary in summaries:
        assert summary["prefill_tokens"] == summary["planned_prefill_tokens"] + summary["recomputed_tokens"]
        assert summary["peak_kv_tokens"] <= summary["planned_peak_kv_tokens"]
    assert summaries[0]["generated_tokens"] == summaries[1]["generated_tokens"]
    assert summaries[1]["accepted_tokens"] <= summaries[1]["draft_tokens"]
    return summaries


def _logprobs(results: pa.Table) -> npt.NDArray[np.float64]:
    return np.array(results["logprobs"].combine_chunks().flatten().to_pylist())


@in_both_modes
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_what_is_repeated_takes_fewer_steps(
    family: str, sampling: SamplingParams, overlap: bool, recall: Recall
) -> None:
    plain, drafted = again(engine_of(family, overlap=overlap), jobs(), sampling, recall)
    assert drafted["accepted_tokens"] > plain["generated_tokens"] / 4
    assert drafted["steps"] < 0.8 * plain["steps"]
    assert drafted["accepted_tokens"] > 0.9 * drafted["draft_tokens"]


@in_both_modes
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "limits",
    [{"max_batch_tokens": 11, "max_batch_rows": 7, "page_size": 4}, {"max_batch_rows": 2, "page_size": 1}],
    ids=str,
)
def test_small_steps_and_pages(family: str, limits: dict[str, int], overlap: bool, recall: Recall) -> None:
    _, drafted = again(engine_of(family, overlap=overlap, **limits), jobs(12), SAMPLED, recall)
    assert drafted["accepted_tokens"] > 0


@in_both_modes
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_drafts_that_are_right_in_part(family: str, overlap: bool, recall: Recall) -> None:
    """What came of the same prompts with another seed: samples begin alike and part."""
    engine, sampling = engine_of(family, overlap=overlap, page_size=4), replace(SAMPLED, temperature=0.2)
    engine.run(jobs(), replace(sampling, seed=1))
    _, drafted = again(engine, jobs(), sampling, recall)
    assert 0.1 * drafted["draft_tokens"] < drafted["accepted_tokens"] < 0.9 * drafted["draft_tokens"]


@in_both_modes
def test_noise_is_given_up(overlap: bool, recall: Recall) -> None:
    engine, sampling = engine_of("llama", overlap=overlap), SamplingParams(max_tokens=200, ignore_eos=True)
    sampling = replace(sampling, temperature=0.7, n=4, logprobs=True)
    engine.run(jobs(4), sampling)
    recall.make_noise()
    plain, drafted = again(engine, jobs(4), sampling, recall)
    assert drafted["accepted_tokens"] < 0.1 * drafted["draft_tokens"]
    assert 0 < drafted["draft_tokens"] < 0.1 * plain["generated_tokens"]


@in_both_modes
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_preemption_under_a_tight_budget(family: str, overlap: bool, recall: Recall) -> None:
    """The samples of a first row end at once, so that more are let in than fit to their ends; these run on."""
    table = pa.table(
        {
            "prompt_token_ids": pa.concat_arrays(
                [pa.array([[3]], pa.list_(pa.int32())), jobs(10)["prompt_token_ids"].combine_chunks()]
            ),
            "n": [40] + 10 * [2],
            "stop_token_ids": [list(range(VOCAB_SIZE))] + 10 * [[]],
            "ignore_eos": [False] + [i % 3 > 0 for i in range(10)],
        }
    )
    kv_memory = 170 * Engine(model_of(family)).layout.bytes_per_token
    engine = engine_of(family, overlap=overlap, kv_memory=kv_memory, page_size=4)
    sampling = SamplingParams(max_tokens=30, temperature=1.0, logprobs=True)
    _, drafted = again(engine, table, sampling, recall)
    assert drafted["preempted_sequences"] > 0
    assert drafted["accepted_tokens"] > 0


@in_both_modes
def test_stop_strings(overlap: bool, recall: Recall) -> None:
    """Drafts go on behind them: they come from a run without."""
    engine, sampling = engine_of("llama", overlap=overlap), replace(SAMPLED, ignore_eos=True)
    engine.run(jobs(), sampling)
    _, drafted = again(engine, jobs(), replace(sampling, stop=("e", "th", "1")), recall)
    assert drafted["accepted_tokens"] > 0


@in_both_modes
def test_end_tokens_within_drafts(overlap: bool, recall: Recall) -> None:
    engine = engine_of("gemma2", overlap=overlap, page_size=4)
    engine.run(jobs(), replace(SAMPLED, ignore_eos=True))
    _, drafted = again(engine, jobs(), SAMPLED, recall)
    assert drafted["accepted_tokens"] > 0


@in_both_modes
def test_a_token_that_cannot_be_sampled_ends_its_row_behind_accepted_ones(overlap: bool, recall: Recall) -> None:
    model = FAMILIES["llama"]()
    bad_tokens = torch.tensor(END_TOKENS)

    def spoil(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        last_tokens = kwargs["input_ids"][0, kwargs["logits_to_keep"]]
        output.logits[0, torch.isin(last_tokens, bad_tokens)] = torch.nan

    engine = Engine(model, tiny_tokenizer())
    engine._overlap = overlap
    sampling = SamplingParams(max_tokens=12, temperature=0.7, n=2, logprobs=True)
    engine.run(jobs(), sampling)
    model.register_forward_hook(spoil, with_kwargs=True)
    plain = engine.run(jobs(), sampling)
    codes = plain["error_code"].to_pylist()
    assert 0 < codes.count("bad_logits") < len(codes)
    _, drafted = again(engine, jobs(), sampling, recall)
    assert drafted["accepted_tokens"] > 0


@in_both_modes
def test_constrained_and_scored_rows_have_no_drafts(overlap: bool, recall: Recall) -> None:
    table = constrained_jobs(20)
    engine, sampling = engine_of("llama", overlap=overlap), replace(SAMPLED, n=2)
    _, mixed = again(engine, table, sampling, recall)
    assert mixed["accepted_tokens"] > 0
    constrained = table.filter(np.arange(20) % 5 != 2)
    assert again(engine, constrained, sampling, recall)[1]["draft_tokens"] == 0
    recall.drafts = True
    scored = engine.score(jobs(8).append_column("continuation", [["the answer"] * 8]))
    assert summary_of(scored.schema)["draft_tokens"] == 0


@in_both_modes
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_conversations_go_on_from_kv_that_drafts_have_left(family: str, overlap: bool, recall: Recall) -> None:
    """Samples that others continue end within drafts: these go on behind the end tokens."""
    rows = [
        {"id": str(i), "prompt": "the answer to " + "and you " * (i % 3) + str(i), "parent": None} for i in range(6)
    ]
    rows += [{"id": f"{i} again", "prompt": "and then", "parent": str(i)} for i in range(6)]
    engine = engine_of(family, overlap=overlap, page_size=4, kv_memory="1MiB")
    alone = pa.Table.from_pylist([{"prompt": row["prompt"]} for row in rows[:6]])
    engine.run(alone, replace(SAMPLED, n=1, ignore_eos=True, temperature=0.0))
    plain, drafted = again(engine, pa.Table.from_pylist(rows), replace(GREEDY, max_tokens=20), recall)
    assert drafted["accepted_tokens"] > 0
    # where a step is ahead, an extra row leaves the KV of an end token, which the next turn need not compute
    extra = 6 if overlap else 0
    assert 0 < plain["cached_tokens"] - extra <= drafted["cached_tokens"] <= plain["cached_tokens"]


@pytest.mark.skipif(not is_covered(torch.float32), reason="the native kernel was not built")
def test_the_same_bits_where_rows_do_not_depend_on_others(recall: Recall) -> None:
    engine = engine_of("llama", overlap=False, deterministic=True)
    plain = engine.run(jobs(), SAMPLED)
    recall.drafts = True
    drafted = engine.run(jobs(), SAMPLED)
    assert summary_of(drafted.schema)["accepted_tokens"] > 0
    assert (_logprobs(plain) == _logprobs(drafted)).all()


def test_drafts_of_other_sequences_or_tokens_are_refused() -> None:
    engine = engine_of("llama", overlap=False)
    for drafts, complaint in [
        (Drafts(References(()), np.full(3, -1)), "3 sequences, the plan has 2"),
        (
            Drafts(References(((np.array([VOCAB_SIZE]),),)), np.zeros(2, np.int64)),
            f"token id {VOCAB_SIZE} in a reference",
        ),
    ]:
        with pytest.raises(ValueError, match=complaint):
            _execute(engine, [[1, 2], [3]], drafts)


def _execute(engine: Engine, prompts: list[list[int]], drafts: Drafts) -> None:
    from batchkv.preparation import prepare_wave

    arena = TokenArena.from_rows([np.array(prompt, np.int32) for prompt in prompts])
    wave = Wave.of(arena, [SamplingParams(max_tokens=2)] * len(prompts))
    prepared = prepare_wave(wave, np.zeros(0, np.int64), engine.layout, engine.limits())
    runner = engine.new_runner(prepared.plan.memory.pool_pages, prepared.plan.memory.page_size)
    engine.execute(prepared, runner, None, lambda ended: None, RunMetrics(), options=RunOptions(drafts=drafts))
