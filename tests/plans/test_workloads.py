"""Real workloads driven through the scheduler without a model: what is prefilled, and how much KV is held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from batchkv.job_plan import Plan
from batchkv.kv_layout import KVLayout, LayerSpec
from batchkv.planner import Limits, check_kv_budget, make_plan
from batchkv.scheduler import Scheduler
from batchkv.sequence import GeneratedTokens
from batchkv.step import Step
from batchkv.tokenization import tokenize
from batchkv.wave import Wave
from tests.conftest import WORKLOADS
from tests.jobs import read_job

# SmolLM2-135M in two bytes: 23,040 bytes per token
LAYOUT = KVLayout(tuple(LayerSpec(9, 3, 64, 64, None) for _ in range(30)), 2)
pytestmark = pytest.mark.skipif(not WORKLOADS.is_dir(), reason="job files that are not part of the project")


@dataclass(frozen=True)
class Scheduled:
    """A step, before its tokens are sampled."""

    plan: Plan
    step: Step
    generated: GeneratedTokens
    held_tokens: int


def steps_of(name: str, kv_tokens: int = 93_206) -> Iterator[Scheduled]:
    """Runs a workload to its end with every token sampled as 0."""
    job = read_job(WORKLOADS / f"{name}.parquet")
    arena, _ = tokenize(job.prompts, None)
    limits = Limits(kv_tokens * LAYOUT.bytes_per_token, 256, 512, context_length=8192)
    wave = Wave.of(arena, job.params)
    assert check_kv_budget(wave, LAYOUT, limits) == {}
    plan = make_plan(wave, LAYOUT, limits)
    generated = GeneratedTokens(len(plan.sequences))
    scheduler = Scheduler(plan, arena, LAYOUT, generated, max_batch_rows=256, max_batch_tokens=512)
    while not scheduler.is_done:
        step = scheduler.schedule()
        yield Scheduled(plan, step, generated, int(step.pages_held[0]) * plan.memory.page_size)
        zeros = np.zeros(len(step.sampled))
        generated.append(step.sampled, zeros.astype(np.int32), zeros.astype(np.float32))
        scheduler.update(step, generated.lengths[step.sampled] == plan.sequences.max_new_tokens[step.sampled])


@pytest.mark.parametrize("kv_tokens", [8192, 93_206])
@pytest.mark.parametrize(
    ("name", "trie_tokens"),
    [("label", 19_421), ("docqa", 22_521), ("tree", 8_147), ("flat", 16_365), ("rollout", 2_048)],
)
def test_every_trie_token_is_prefilled_once_within_the_budget(name: str, trie_tokens: int, kv_tokens: int) -> None:
    steps = list(steps_of(name, kv_tokens))
    plan = steps[0].plan
    assert sum(s.step.prefill_tokens for s in steps) == plan.prefill_tokens == trie_tokens
    assert sum(s.step.recomputed_tokens for s in steps) == 0
    assert max(s.held_tokens for s in steps) <= plan.memory.peak_tokens <= kv_tokens
