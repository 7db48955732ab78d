"""TRL's own `GRPOTrainer` with our rollouts: what it computes itself of them is what they say."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
trl = pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402

import batchkv  # noqa: E402
from batchkv.errors import UserError  # noqa: E402
from batchkv.model_support import tiny_model  # noqa: E402
from batchkv.rl.rollout_batch import RolloutBatch  # noqa: E402
from batchkv.rl.trl import trl_rollout  # noqa: E402
from tests.tiny_models import VOCAB_SIZE, tiny_tokenizer  # noqa: E402

TOLERANCE = 1e-5
SAMPLES, TOKENS = 4, 8
TEXTS = ["the king and", "the queen and you", "in the garden", "ring"]
CONVERSATIONS = [[{"role": "user", "content": text}] for text in TEXTS]


def policy(seed: int = 0) -> PreTrainedModel:
    """Without an end token in its config: only the tokenizer has one."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return tiny_model(config, seed=seed)


def score(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """Different for each sample of a group, so that every step changes the weights."""
    return [random.Random(str(completion)).random() for completion in completions]


@dataclass(slots=True)
class Call:
    """A call of the rollout function, and how the policy was before it and after it."""

    prompts: list[Any]
    batch: RolloutBatch
    before: dict[str, Any]
    after: dict[str, Any]
    weights: dict[str, torch.Tensor]


@dataclass(slots=True)
class Recorded:
    """What went on in a training.

    Attributes:
        calls: of the rollout function.
        errors: of each forward pass of the loss, the greatest difference between the trainer's log-probabilities and
            those of the rollout.
    """

    calls: list[Call] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def rollout_func(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        before, weights = state_of(trainer.model), copy_of(trainer.model)
        batch = trl_rollout(prompts, trainer)
        self.calls.append(Call(prompts, batch, before, state_of(trainer.model), weights))
        return batch.to_trl()


class Trainer(trl.GRPOTrainer):  # type: ignore[misc]
    """Compares every batch of its loss."""

    recorded: Recorded
    _in_loss: dict[str, Any] | None = None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self._in_loss = inputs
        loss = super()._compute_loss(model, inputs)
        self._in_loss = None
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **options)
        if self._in_loss is not None and self.model.training:
            given, mask = self._in_loss["sampling_per_token_logps"], self._in_loss["completion_mask"]
            assert mask.sum() > 0
            self.recorded.errors.append(((result[0].detach() - given) * mask).abs().max().item())
        return result


def state_of(model: Any) -> dict[str, Any]:
    return {
        "training": [module.training for module in model.modules()],
        "checkpointing": [getattr(module, "gradient_checkpointing", None) for module in model.modules()],
        "attention": model.config._attn_implementation,
        "use_cache": model.config.use_cache,
        "requires_grad": [one.requires_grad for one in model.parameters()],
        "grad": [one.grad is None for one in model.parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
    }


def copy_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.state_dict().items()}


def trainer_of(
    folder: Path,
    prompts: list[Any],
    *,
    model: Any = None,
    cls: type = Trainer,
    rollout_func: Callable[..., Any] | None = None,
    **options: Any,
) -> Any:
    recorded = Recorded()
    config = {
        "per_device_train_batch_size": len(prompts) * SAMPLES,
        "num_generations": SAMPLES,
        "max_completion_length": TOKENS,
        "learning_rate": 5e-3,
        "max_steps": 3,
        "bf16": False,
        "gradient_checkpointing": True,
    } | options
    trainer = cls(
        model=policy() if model is None else model,
        reward_funcs=score,
        args=trl.GRPOConfig(
            output_dir=str(folder), use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True, **config
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
        rollout_func=rollout_func or recorded.rollout_func,
    )
    trainer.recorded = recorded
    return trainer


def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def trained(folder: Path, prompts: list[Any], **options: Any) -> Recorded:
    trainer = trainer_of(folder, prompts, **options)
    trainer.train()
    recorded: Recorded = trainer.recorded
    return recorded


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Three steps at another temperature than 1, on texts."""
    return trained(tmp_path_factory.mktemp("warm"), TEXTS, temperature=0.7)


def test_the_trainer_computes_the_same_logprobs_at_every_step(warm: Recorded) -> None:
    assert len(warm.calls) == len(warm.errors) == 3
    assert max(warm.errors) < TOLERANCE
    assert all(call.batch.temperature == 0.7 for call in warm.calls)


def test_rollouts_follow_the_weights(warm: Recorded) -> None:
    """The weights of the step before would give log-probabilities that are far from these."""
    model = policy()
    for earlier, later in zip(warm.calls, warm.calls[1:], strict=False):
        assert own_error(model, earlier.weights, earlier.batch) < TOLERANCE
        assert own_error(model, earlier.weights, later.batch) > 1e-2
    assert [call.batch.table["weight_version"][0].as_py() for call in warm.calls] == [0, 1, 2]


def own_error(model: PreTrainedModel, weights: dict[str, torch.Tensor], batch: RolloutBatch) -> float:
    """The greatest difference between the log-probabilities of a rollout and those under some weights."""
    model.load_state_dict(weights)
    errors = []
    for prompt, tokens, logprobs in zip(
        batch.prompts.lists(), batch.completions.lists(), batch.logprobs.lists(), strict=True
    ):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits / batch.temperature, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        errors.append((own - torch.tensor(logprobs)).abs().max().item())
    return max(errors)


def test_one_completion_for_each_row_in_order(warm: Recorded) -> None:
    plain = tokenizer()
    for call in warm.calls:
        assert len(call.prompts) == len(call.batch) == len(TEXTS) * SAMPLES
        assert call.batch.prompts.lists() == plain(call.prompts)["input_ids"]
        lengths = call.batch.completions.lengths
        assert 1 <= lengths.min() <= lengths.max() <= TOKENS


def test_repeated_prompts_are_computed_once_and_sampled_apart(warm: Recorded) -> None:
    plain = tokenizer()
    tails = sum(len(ids) - 1 for ids in plain(TEXTS)["input_ids"])
    for call in warm.calls:
        # Distinct prompts share at least <bos>; none is computed for more than one of its rows.
        assert call.batch.summary["prefill_tokens"] <= tails + 1
        assert call.batch.summary["recomputed_tokens"] == 0
        samples = {tuple(ids) for ids in call.batch.completions.lists()}
        assert len(samples) >= len(call.batch) - 4  # samples that ended at once are alike
    assert warm.calls[0].batch.completions.lists() != warm.calls[1].batch.completions.lists()


def test_end_tokens_of_the_tokenizer_end_a_completion(warm: Recorded) -> None:
    eos = tokenizer().eos_token_id
    rows = [
        row for call in warm.calls for row in zip(call.batch.completions.lists(), call.batch.truncated, strict=True)
    ]
    assert all((ids[-1] == eos) == (not cut) and eos not in ids[:-1] for ids, cut in rows)
    assert all(len(ids) == TOKENS for ids, cut in rows if cut)
    assert {bool(cut) for _, cut in rows} == {False, True}


def test_the_policy_is_left_as_it_was(warm: Recorded) -> None:
    for call in warm.calls:
        assert call.before == call.after
        assert all(call.before["training"])
        assert True in call.before["checkpointing"]
        assert "batchkv" not in call.after["attention"]


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.8, "temperature": 1.3},
        {"top_k": 5, "min_p": 0.05},
        {"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": SAMPLES},
    ],
    ids=["top_p", "top_k-min_p", "two-iterations"],
)
def test_filters_and_schedules(tmp_path: Path, options: dict[str, Any]) -> None:
    """Log-probabilities are untruncated, as the trainer's. Of a second pass over the same samples only the first
    has the weights that made them.
    """
    recorded = trained(tmp_path, CONVERSATIONS, **options)
    assert recorded.errors[0] < TOLERANCE
    if "num_iterations" in options:
        assert len(recorded.calls) == 1
        assert recorded.errors[-1] > 1e-3
    else:
        assert max(recorded.errors) < TOLERANCE


def test_lora_policies(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    recorded = trained(tmp_path, TEXTS, model=peft.get_peft_model(policy(), config))
    assert len(recorded.errors) == 3
    assert max(recorded.errors) < TOLERANCE


def test_mixed_precision(tmp_path: Path) -> None:
    """As TRL trains by default: weights in float32, products in bfloat16."""
    recorded = trained(tmp_path, TEXTS, bf16=True, max_steps=2)
    assert max(recorded.errors) < 0.1


def test_given_directly_and_with_fields_of_the_config(tmp_path: Path) -> None:
    losses = []
    for function in (batchkv.trl_rollout_func, partial(batchkv.trl_rollout_func, max_batch_rows=3)):
        trainer = trainer_of(tmp_path, TEXTS, cls=trl.GRPOTrainer, rollout_func=function, max_steps=2)
        trainer.train()
        losses.append(copy_of(trainer.model))
    # The same samples, whatever the batches.
    assert all(torch.allclose(losses[0][name], losses[1][name], atol=1e-4) for name in losses[0])


class WithEvaluation(Trainer):
    """Evaluates on what it is trained on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(eval_dataset=options["train_dataset"], **options)


def test_evaluations_change_no_samples_of_the_training(tmp_path: Path, warm: Recorded) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": len(TEXTS) * SAMPLES}
    beside = trained(tmp_path, TEXTS, cls=WithEvaluation, temperature=0.7, max_steps=2, **evaluation)
    training = [call for call in beside.calls if all(call.before["training"])]
    assert len(beside.calls) > len(training) == 2
    for one, other in zip(training, warm.calls, strict=False):
        assert one.batch.completions.lists() == other.batch.completions.lists()


# --- calls that trainers do not make in one process ------------------------------------------------------------------


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer that has not begun."""
    trainer = trainer_of(tmp_path_factory.mktemp("idle"), TEXTS)
    trainer.model.train()
    return trainer


def completions(trainer: Any, prompts: list[Any]) -> list[list[int]]:
    result: list[list[int]] = batchkv.trl_rollout_func(prompts, trainer)["completion_ids"]
    return result


def first_call(trainer: Any, prompts: list[Any], *, step: int) -> list[list[int]]:
    """Completions of the first call in a step: there was another one before."""
    trainer.state.global_step = 1_000_000
    completions(trainer, [])
    trainer.state.global_step = step
    return completions(trainer, prompts)


def test_a_group_that_is_spread_over_processes_has_distinct_samples(idle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    group, found = [TEXTS[0]] * 3, []
    for rank in (0, 1, 0):
        monkeypatch.setattr(type(idle.accelerator), "process_index", rank)
        found.append(first_call(idle, group, step=7))
    assert found[0] == found[2]
    assert len({str(ids) for ids in found[0] + found[1]}) == 6


def test_every_step_and_every_call_in_it_has_other_samples(idle: Any) -> None:
    found = [first_call(idle, TEXTS, step=20), completions(idle, TEXTS), first_call(idle, TEXTS, step=21)]
    assert len({str(one) for one in found}) == 3
    assert first_call(idle, TEXTS, step=20) == found[0]


@pytest.mark.parametrize(("name", "value"), [("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0), ("temperature", 1e-4)])
def test_filters_of_the_config_are_kept(idle: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    """Each of these leaves only the likeliest token."""
    monkeypatch.setattr(idle.args, name, value)
    assert len({str(ids) for ids in completions(idle, [TEXTS[0]] * 8)}) == 1


def test_conversations_are_rendered_as_trl_renders_them(idle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "chat_template", "{{ messages[0]['content'] }}{{ mark }}")
    monkeypatch.setattr(idle, "chat_template_kwargs", {"mark": "!"})
    given = batchkv.trl_rollout_func(CONVERSATIONS, idle)["prompt_ids"]
    assert given == idle._tokenize_prompts(CONVERSATIONS)[0]
    assert tokenizer().decode(given[0]) == "the king and!"


def test_no_prompts_have_no_completions(idle: Any) -> None:
    assert batchkv.trl_rollout_func([], idle) == {"prompt_ids": [], "completion_ids": [], "logprobs": []}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("repetition_penalty", 1.2, "repetition_penalty 1.2 is not supported, must be 1.0"),
        ("generation_kwargs", {"num_beams": 2}, "generation_kwargs has num_beams, must be empty"),
        ("max_completion_length", None, "max_completion_length is None, must be a number"),
        ("temperature", 0.0, "temperature 0.0 must be above 0"),
    ],
)
def test_what_would_be_passed_over_is_refused(
    idle: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, message: str
) -> None:
    monkeypatch.setattr(idle.args, name, value)
    with pytest.raises(ValueError, match=message):
        completions(idle, TEXTS)


@pytest.mark.parametrize("option", ["oversample", "branching", "rows", "n", "max_tokens", "tokenizer"])
def test_what_is_the_trainers_cannot_be_set_beside_it(idle: Any, option: str) -> None:
    with pytest.raises(TypeError, match=f"'{option}' is the trainer's: trl_rollout_func takes environment, max_turns"):
        batchkv.trl_rollout_func(TEXTS, idle, **{option: None})


def test_turns_of_an_environment_are_masked(idle: Any) -> None:
    ends = list(range(len(idle.processing_class)))
    found = batchkv.trl_rollout_func(TEXTS, idle, environment=lambda turn: [5, 6], max_turns=2, stop_token_ids=ends)
    for ids, mask in zip(found["completion_ids"], found["env_mask"], strict=True):
        assert mask == [1, 0, 0, 1]
        assert ids[1:3] == [5, 6]


def test_images_are_refused(idle: Any) -> None:
    parts = [{"type": "text", "text": "the king"}, {"type": "image", "image": None}]
    with pytest.raises(UserError, match="prompt 1 has a part of type 'image', only text is supported"):
        completions(idle, [CONVERSATIONS[0], [{"role": "user", "content": parts}]])


def test_trainers_are_not_kept(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, TEXTS)
    completions(trainer, TEXTS)
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None
