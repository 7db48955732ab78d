"""`mismatch`: what it finds in batches whose log-probabilities are known, and that it leaves the policy alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from batchkv.engine import Engine
from batchkv.errors import UserError
from batchkv.rl import mismatch as module
from batchkv.rl.batch_schema import SCHEMA
from batchkv.rl.mismatch import Mismatch, mismatch
from batchkv.rl.rollout_batch import RolloutBatch
from batchkv.sampling_params import SamplingParams
from tests.tiny_models import FAMILIES, VOCAB_SIZE

Row = dict[str, Any]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return FAMILIES["qwen3"]()


def logprobs_of(model: PreTrainedModel, row: Row, temperature: float = 1.0) -> list[float]:
    """By the bare model: float64 log-softmax of its logits over the whole row; 0 for tokens of an environment."""
    tokens = torch.tensor([[*row["prompt_token_ids"], *row["token_ids"]]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(row["prompt_token_ids"]) - 1 : -1].double() / temperature
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(row["token_ids"])[:, None])[:, 0]
    return (logprobs.numpy() * row["env_mask"]).tolist()


def rows_of(count: int = 6) -> list[Row]:
    """Prompts and samples of all lengths; the third one has a turn of an environment in it."""
    random = np.random.default_rng(7)
    rows = []
    for i in range(count):
        prompt, tokens = (random.integers(0, VOCAB_SIZE, n).tolist() for n in (3 + 2 * i, 1 + 3 * i))
        rows.append({"prompt_token_ids": prompt, "token_ids": tokens, "env_mask": [1] * len(tokens)})
    rows[2]["env_mask"][2:5] = [0, 0, 0]
    return rows


def batch_of(rows: list[Row], **fields: Any) -> RolloutBatch:
    others = {
        "prompt_index": 0,
        "sample_index": 0,
        "finish_reason": "length",
        "truncated": True,
        "seed": 0,
        "weight_version": 0,
        "num_cached_tokens": 0,
    }
    return RolloutBatch(pa.Table.from_pylist([others | row for row in rows], schema=SCHEMA), 0, **fields)


def scored(model: PreTrainedModel, temperature: float = 1.0) -> list[Row]:
    return [row | {"logprobs": logprobs_of(model, row, temperature)} for row in rows_of()]


def tokens_of_model(rows: list[Row]) -> int:
    return sum(sum(row["env_mask"]) for row in rows)


# ---------------------------------------------------------------- what it finds


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "gpt_oss"])
def test_logprobs_of_the_model_itself_match(family: str) -> None:
    model = FAMILIES[family]()
    rows = scored(model)
    found = mismatch(model, batch_of(rows))
    assert (found.rows, found.tokens) == (len(rows), tokens_of_model(rows))
    assert found.max_abs < 1e-5
    assert found.mean_abs <= found.max_abs
    assert 0 <= found.kl < 1e-10
    assert 1 <= found.mult_prob_error < 1 + 1e-5


@pytest.mark.parametrize(("row", "position"), [(0, 0), (2, 6), (5, 15), (3, 0)])
@pytest.mark.parametrize("shift", [-0.75, 0.25])
def test_one_logprob_that_is_off_is_found_where_it_is(
    model: PreTrainedModel, row: int, position: int, shift: float
) -> None:
    rows = scored(model)
    rows[row]["logprobs"][position] += shift
    found = mismatch(model, batch_of(rows))
    tokens = found.tokens
    assert (found.worst_row, found.worst_position) == (row, position)
    assert found.max_abs == pytest.approx(abs(shift), abs=1e-5)
    assert found.mean_abs == pytest.approx(abs(shift) / tokens, abs=1e-5)
    assert found.kl == pytest.approx((np.exp(-shift) - 1 + shift) / tokens, rel=1e-4)  # the trainer's minus ours
    assert found.mult_prob_error == pytest.approx(1 + (np.exp(abs(shift)) - 1) / tokens, abs=1e-5)


def test_formulas_over_many_differences(model: PreTrainedModel) -> None:
    rows, random = scored(model), np.random.default_rng(1)
    by_row = [random.normal(0, 0.3, len(row["token_ids"])) * row["env_mask"] for row in rows]
    for row, d in zip(rows, by_row, strict=True):
        row["logprobs"] = (np.array(row["logprobs"]) - d).tolist()
    found = mismatch(model, batch_of(rows))
    d = np.concatenate([d[np.array(row["env_mask"]) == 1] for row, d in zip(rows, by_row, strict=True)])
    assert found.tokens == len(d)
    assert found.mean_abs == pytest.approx(np.abs(d).mean(), abs=1e-5)
    assert found.max_abs == pytest.approx(np.abs(d).max(), abs=1e-5)
    assert found.kl == pytest.approx((np.exp(d) - 1 - d).mean(), abs=1e-5)
    assert found.mult_prob_error == pytest.approx(np.exp(np.abs(d)).mean(), abs=1e-5)
    assert abs(by_row[found.worst_row][found.worst_position]) == np.abs(d).max()


def test_tokens_of_an_environment_are_read_and_not_compared(model: PreTrainedModel) -> None:
    """Their log-probabilities of 0 would be far off; tokens behind them depend on them."""
    rows = [scored(model)[2]]
    found = mismatch(model, batch_of(rows))
    assert found.tokens == len(rows[0]["token_ids"]) - 3
    assert found.max_abs < 1e-5
    other = rows[0] | {"token_ids": [*rows[0]["token_ids"][:2], 1, 2, 3, *rows[0]["token_ids"][5:]]}
    changed = mismatch(model, batch_of([other]))
    assert changed.max_abs > 0.01
    assert changed.worst_position >= 5


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_logits_are_divided_by_the_temperature_of_the_rollout(model: PreTrainedModel, temperature: float) -> None:
    rows = scored(model, temperature)
    assert mismatch(model, batch_of(rows, temperature=temperature)).max_abs < 1e-5
    assert mismatch(model, batch_of(rows), temperature=temperature).max_abs < 1e-5
    assert mismatch(model, batch_of(rows)).max_abs > 0.1
    assert mismatch(model, batch_of(rows, temperature=temperature), temperature=1.0).max_abs > 0.1


def test_a_batch_of_the_engine_matches_until_the_weights_change() -> None:
    """The real way: sampled with shared prompts, then scored by the model's own attention."""
    model = FAMILIES["llama"]()
    prompts = [row["prompt_token_ids"] for row in rows_of(4)]
    sampling = SamplingParams(n=3, max_tokens=20, temperature=0.8, logprobs=True)
    results = Engine(model, kv_memory="64MiB").run(pa.table({"prompt_token_ids": prompts}), sampling).to_pylist()
    rows = [
        {
            "prompt_token_ids": prompts[int(result["id"])],
            "token_ids": result["token_ids"],
            "logprobs": result["logprobs"],
            "env_mask": [1] * len(result["token_ids"]),
        }
        for result in results
    ]
    batch = batch_of(rows, temperature=0.8)
    before = mismatch(model, batch)
    assert before.tokens == 12 * 20
    assert before.max_abs < 1e-4
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.1)
    after = mismatch(model, batch)
    assert after.max_abs > 0.01
    assert after.kl > 100 * before.kl


def _of_few_rows(logits: torch.Tensor, dim: int) -> torch.Tensor:
    assert len(logits) <= 3
    return torch.logsumexp(logits, dim)


def test_long_rows_are_scored_in_parts(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(scored(model))
    monkeypatch.setattr(module, "_CHUNK_BYTES", 3 * 4 * VOCAB_SIZE)
    monkeypatch.setattr(torch.Tensor, "logsumexp", _of_few_rows)
    found = mismatch(model, batch)
    assert found.tokens == tokens_of_model(rows_of())
    assert found.max_abs < 1e-5


def test_a_model_that_is_not_a_number_is_told(model: PreTrainedModel) -> None:
    broken = FAMILIES["qwen3"]()
    with torch.no_grad():
        broken.get_output_embeddings().weight[5] = torch.nan
    found = mismatch(broken, batch_of(scored(model)))
    assert np.isnan(found.max_abs)
    assert np.isnan(found.kl)
    assert (found.worst_row, found.worst_position) == (0, 0)
    assert found.to_json()["kl"] is None
    json.dumps(found.to_json(), allow_nan=False)


# ---------------------------------------------------------------- which rows


def test_rows_can_be_chosen(model: PreTrainedModel) -> None:
    rows = scored(model)
    rows[4]["logprobs"][1] += 1
    found = mismatch(model, batch_of(rows), rows=[3, 4])
    assert (found.rows, found.tokens) == (2, tokens_of_model(rows[3:5]))
    assert (found.worst_row, found.worst_position) == (4, 1)
    assert mismatch(model, batch_of(rows), rows=np.array([0, 3])).max_abs < 1e-5


def test_at_most_so_many_rows_are_scored_evenly_over_the_batch(model: PreTrainedModel) -> None:
    batch = batch_of(scored(model))
    assert mismatch(model, batch, max_rows=2).rows == 2
    assert mismatch(model, batch, max_rows=None).rows == len(batch)
    assert mismatch(model, batch, max_rows=1, rows=[0, 1, 2]).rows == 3
    assert module._chosen(6, None, 2) == [1, 4]
    assert module._chosen(100, None, 4) == [12, 37, 62, 87]
    assert module._chosen(3, None, 100) == [0, 1, 2]
    assert len(set(module._chosen(1000, None, 32))) == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": [1, 6]}, "row 6 is not in the batch, which has 6 rows"),
        ({"rows": [-1]}, "row -1 is not in the batch"),
        ({"rows": []}, "no token in 0 rows is the model's"),
        ({"max_rows": 0}, "max_rows 0 must be at least 1"),
        ({"temperature": 0.0}, r"temperature 0.0 must be above 0"),
        ({"temperature": float("nan")}, "temperature nan must be above 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(model: PreTrainedModel, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mismatch(model, batch_of(scored(model)), **arguments)


def test_rows_without_a_token_of_the_model_are_no_comparison(model: PreTrainedModel) -> None:
    of_environment = rows_of()[1] | {"env_mask": [0] * 4, "logprobs": [0.0] * 4}
    empty = {"prompt_token_ids": [3, 4], "token_ids": [], "env_mask": [], "logprobs": []}
    with pytest.raises(ValueError, match="no token in 2 rows is the model's"):
        mismatch(model, batch_of([of_environment, empty]))
    found = mismatch(model, batch_of([of_environment, empty, scored(model)[1]]))
    assert (found.rows, found.tokens) == (3, 4)
    nothing = {"prompt_token_ids": [], "token_ids": [1], "env_mask": [1], "logprobs": [-1.0]}
    with pytest.raises(ValueError, match="row 0: its prompt is empty"):
        mismatch(model, batch_of([nothing]))


# ---------------------------------------------------------------- the policy is left alone


# The newest transformers have other names for checkpoints of gradients, the oldest that are supported only these.
renamed = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


@pytest.fixture
def in_training() -> PreTrainedModel:
    """In training, but for its first layer, with dropout, a cache and checkpoints of gradients."""
    model = FAMILIES["llama"]()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.gradient_checkpointing_enable()
    model.config.use_cache = True
    model.train()
    model.model.layers[0].eval()
    return model


def state(model: PreTrainedModel) -> tuple[Any, ...]:
    return (
        [module.training for module in model.modules()],
        model.config.to_dict(),
        model.is_gradient_checkpointing,
        [(name, parameter.requires_grad, parameter.grad) for name, parameter in model.named_parameters()],
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
    )


@renamed
def test_a_policy_in_training_is_scored_in_evaluation_mode_and_left_as_it_was(in_training: PreTrainedModel) -> None:
    rows = scored(FAMILIES["llama"]())
    before = state(in_training)
    found = mismatch(in_training, batch_of(rows))
    assert found.max_abs < 1e-5
    assert state(in_training) == before
    logits = in_training(torch.tensor([[1, 2, 3]])).logits
    logits.sum().backward()  # nothing that it left is in the way of training


@renamed
def test_a_policy_is_left_as_it_was_after_an_exception(in_training: PreTrainedModel) -> None:
    batch = batch_of(scored(FAMILIES["llama"]()))
    before = state(in_training)
    calls = []

    def fail(*_: Any) -> None:
        calls.append([module.training for module in in_training.modules()])
        if len(calls) == 2:
            raise RuntimeError("in the second row")

    hook = in_training.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the second row"):
        mismatch(in_training, batch)
    hook.remove()
    assert not any(calls[1])
    assert state(in_training) == before


class Wrapper(nn.Module):
    """As DataParallel and DDP wrap a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


def test_a_wrapped_policy_is_scored(model: PreTrainedModel) -> None:
    batch = batch_of(scored(model))
    assert mismatch(Wrapper(model), batch) == mismatch(model, batch)
    with pytest.raises(UserError, match="must be a transformers model or a wrapper of one"):
        mismatch(nn.Linear(2, 2), batch)


def test_no_logits_are_computed_for_prompts(model: PreTrainedModel) -> None:
    batch = batch_of(scored(model))
    shapes: list[torch.Size] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _, args, __: shapes.append(args[0].shape))
    mismatch(model, batch)
    hook.remove()
    assert [shape[1] for shape in shapes] == [length + 1 for length in batch.completions.lengths.tolist()]


# ---------------------------------------------------------------- how it is told


def test_it_is_one_line_and_json() -> None:
    found = Mismatch(
        rows=32,
        tokens=12_345,
        mean_abs=1.25e-4,
        max_abs=0.03125,
        kl=2.5e-8,
        mult_prob_error=1.000125,
        worst_row=7,
        worst_position=41,
    )
    assert str(found) == (
        "mismatch over 12,345 tokens of 32 rows: |Δlogp| mean 1.25e-04, max 3.12e-02 (row 7, token 41); "
        "KL 2.50e-08; multiplicative error 1.000125"
    )
    fields = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert Mismatch(**fields) == found
