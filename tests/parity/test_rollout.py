"""Rollouts: the same samples in any company, prompts computed once, and the policy left as it was."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import batchkv
from batchkv import parity_probe
from batchkv.errors import UserError
from batchkv.model_support import tiny_model
from batchkv.rl.environment import Turn
from batchkv.rl.rollout_batch import RolloutBatch
from batchkv.rl.session import Session, rollout
from batchkv.rl.trajectory import Branch
from tests.tiny_models import CONFIGS, FAMILIES, VOCAB_SIZE, tiny_tokenizer

SMALL: dict[str, Any] = {"max_tokens": 12, "seed": 3}
Samples = dict[tuple[int, int], tuple[list[int], list[float]]]


def prompts(count: int = 5, length: int = 30) -> list[list[int]]:
    """The first half of each is the same."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(6, VOCAB_SIZE, (count, length))
    tokens[:, : length // 2] = tokens[0, : length // 2]
    return [row.tolist() for row in tokens]


def samples(batch: RolloutBatch) -> Samples:
    """Token ids and log-probabilities by global row and sample."""
    columns = (batch.table[name].to_pylist() for name in ("row", "sample_index", "token_ids", "logprobs"))
    return {(row, sample): (ids, logprobs) for row, sample, ids, logprobs in zip(*columns, strict=True)}


def assert_same(found: Samples, expected: Samples) -> None:
    assert found.keys() == expected.keys()
    for place, (ids, logprobs) in expected.items():
        assert found[place][0] == ids, place
        np.testing.assert_allclose(found[place][1], logprobs, atol=1e-5)


@torch.no_grad()
def own_logprobs(model: nn.Module, prompt: list[int], ids: list[int], temperature: float) -> np.ndarray[Any, Any]:
    """Of the tokens behind a prompt, by the model's own forward, one row at a time."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float() / temperature
    found: np.ndarray[Any, Any] = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
    return found


def assert_own_logprobs(model: PreTrainedModel, batch: RolloutBatch) -> None:
    """Where the tokens are the model's; elsewhere they are 0."""
    names = ("prompt_token_ids", "token_ids", "logprobs", "env_mask")
    for prompt, ids, logprobs, mask in zip(*(batch.table[name].to_pylist() for name in names), strict=True):
        expected = own_logprobs(model, prompt, ids, batch.temperature) * np.array(mask)
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


@pytest.fixture(scope="module")
def policy() -> PreTrainedModel:
    return FAMILIES["llama"]()


class TestSamples:
    @pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
    def test_logprobs_are_those_of_the_policy_itself(self, family: str) -> None:
        model = FAMILIES[family]()
        batch = rollout(model, prompts(3), n=4, temperature=0.7, **SMALL)
        assert_own_logprobs(model, batch)

    def test_filters_do_not_change_logprobs(self, policy: PreTrainedModel) -> None:
        batch = rollout(policy, prompts(3), n=4, temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, **SMALL)
        assert_own_logprobs(policy, batch)

    def test_each_prompt_is_computed_once_for_all_samples_that_are_all_different(self, policy: PreTrainedModel) -> None:
        batch = rollout(policy, prompts(4), n=16, **SMALL)
        assert batch.summary["prefill_tokens"] == 15 + 4 * 15
        for prompt in range(4):
            assert len({tuple(samples(batch)[prompt, sample][0]) for sample in range(16)}) == 16

    @pytest.mark.parametrize("family", ["llama", "gemma2"])
    def test_the_same_samples_at_any_batch_size_order_and_budget(self, family: str) -> None:
        model = FAMILIES[family]()
        asked = prompts(5)
        expected = samples(rollout(model, asked, n=6, **SMALL))
        order = [3, 0, 4, 2, 1]
        shuffled = rollout(model, [asked[i] for i in order], n=6, rows=order, **SMALL)
        assert_same(samples(shuffled), expected)
        assert_same(samples(rollout(model, asked, n=6, max_batch_rows=3, **SMALL)), expected)
        assert_same(samples(rollout(model, asked, n=6, max_batch_tokens=16, **SMALL)), expected)
        tokens = shuffled.summary["peak_kv_tokens"] // 3
        layout = batchkv.Engine(model).layout
        little = rollout(model, asked, n=6, kv_memory=tokens * layout.bytes_per_token, page_size=4, **SMALL)
        assert little.summary["peak_kv_tokens"] < shuffled.summary["peak_kv_tokens"]
        assert_same(samples(little), expected)
        assert_same(samples(rollout(model, asked, n=6, no_prefix_sharing=True, **SMALL)), expected)

    def test_other_steps_seeds_rows_and_samples_have_other_random_numbers(self, policy: PreTrainedModel) -> None:
        asked = [prompts(1)[0]] * 2
        found = [
            ids
            for options in ({"seed": 0}, {"seed": 1}, {"seed": 0, "step": 1})
            for ids, _ in samples(rollout(policy, asked, n=3, max_tokens=12, **options)).values()
        ]
        assert len({tuple(ids) for ids in found}) == 18

    def test_part_of_the_rows_has_the_samples_that_it_has_among_all(self, policy: PreTrainedModel) -> None:
        """As where prompts are split among workers."""
        asked = prompts(4)
        whole = samples(rollout(policy, asked, n=2, **SMALL))
        part = samples(rollout(policy, asked[2:], n=2, rows=[2, 3], **SMALL))
        assert_same(part, {place: sample for place, sample in whole.items() if place[0] >= 2})

    def test_end_tokens_are_kept_and_truncation_is_told(self, policy: PreTrainedModel) -> None:
        batch = rollout(policy, prompts(3), n=8, stop_token_ids=list(range(6, 14)), **SMALL)
        for ids, reason, truncated in zip(
            *(batch.table[name].to_pylist() for name in ("token_ids", "finish_reason", "truncated")), strict=True
        ):
            assert reason == ("stop" if 6 <= ids[-1] < 14 else "length")
            assert truncated == (reason == "length")
            assert ids
        assert set(batch.table["finish_reason"].to_pylist()) == {"stop", "length"}


def warped(logits_V: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    """Scores after the warpers of transformers, in the order of `generate`; -inf where they remove a token."""
    ids, scores = torch.empty(1, 0, dtype=torch.long), logits_V[None].float() / params.get("temperature", 1.0)
    for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in params:
            scores = warper(params[name])(ids, scores)
    return scores[0]


@torch.no_grad()
def assert_own_sampling(model: PreTrainedModel, batch: RolloutBatch, params: dict[str, Any]) -> None:
    """What was recorded is what the model's own logits and the warpers give, for each token on its own."""
    names = ("prompt_token_ids", "token_ids", "env_mask", "sampling_logprobs", "entropies", "kept_token_ids")
    for prompt, ids, mask, logprobs, entropies, kept in zip(
        *(batch.table[name].to_pylist() for name in names), strict=True
    ):
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        for i, (token, is_models) in enumerate(zip(ids, mask, strict=True)):
            if not is_models:
                assert (logprobs[i], entropies[i], kept[i]) == (0, 0, [])
                continue
            scores = warped(logits[i], params)
            left = scores.isfinite().nonzero()[:, 0].tolist()
            assert kept[i] == ([] if len(left) == VOCAB_SIZE else left)
            assert logprobs[i] == pytest.approx(float(scores.log_softmax(-1)[token]), abs=1e-4)
            whole = torch.distributions.Categorical(logits=logits[i] / params.get("temperature", 1.0))
            assert entropies[i] == pytest.approx(float(whole.entropy()), abs=1e-4)


class TestRecordedSampling:
    @pytest.mark.parametrize("family", ["llama", "gemma2"])
    @pytest.mark.parametrize(
        "params",
        [
            {"temperature": 0.7},
            {"temperature": 1.3, "top_k": 20, "top_p": 0.9017, "min_p": 0.0117},
            {"top_p": 0.5017},
        ],
        ids=str,
    )
    def test_it_is_what_the_policys_own_logits_and_transformers_give(self, family: str, params: dict[str, Any]) -> None:
        model = FAMILIES[family]()
        batch = rollout(model, prompts(3), n=2, record_sampling=True, **params, **SMALL)
        assert_own_sampling(model, batch, params)
        assert_own_logprobs(model, batch)

    def test_samples_are_the_same_without_and_have_no_columns(self, policy: PreTrainedModel) -> None:
        options: dict[str, Any] = {"n": 4, "top_p": 0.9017, **SMALL}
        plain, recorded = (rollout(policy, prompts(3), record_sampling=on, **options) for on in (False, True))
        names = {"sampling_logprobs", "entropies", "kept_token_ids"}
        assert set(recorded.table.column_names) - set(plain.table.column_names) == names
        assert recorded.table.drop_columns(list(names)).equals(plain.table)

    def test_greedy_samples_keep_their_tokens_alone(self, policy: PreTrainedModel) -> None:
        batch = rollout(policy, prompts(2), n=2, temperature=0.0, record_sampling=True, **SMALL)
        for ids, logprobs, kept in zip(
            *(batch.table[name].to_pylist() for name in ("token_ids", "sampling_logprobs", "kept_token_ids")),
            strict=True,
        ):
            assert logprobs == [0] * len(ids)
            assert kept == [[token] for token in ids]
        entropies = batch.entropies
        assert entropies is not None
        assert (entropies.values > 0.1).all()  # of the logits as they are

    def test_a_session_records_what_is_asked_for(self, policy: PreTrainedModel) -> None:
        with Session(policy) as session:
            for on in (True, False, True):
                batch = session.rollout(prompts(2), n=2, top_k=7, record_sampling=on, **SMALL)
                assert ("entropies" in batch.table.column_names) == on
                if on:
                    assert_own_sampling(policy, batch, {"top_k": 7})

    def test_no_prompts_are_an_empty_batch(self, policy: PreTrainedModel) -> None:
        batch = rollout(policy, [], record_sampling=True, **SMALL)
        assert batch.kept_token_ids is not None
        assert len(batch.kept_token_ids) == len(batch.to_slime(top_p=0.9)) == 0


class TestPrompts:
    def test_texts_messages_and_token_ids_are_read_as_in_jobs(self, policy: PreTrainedModel) -> None:
        tokenizer: Any = tiny_tokenizer()
        message = [{"role": "user", "content": "the thing"}]
        text, chat, ids = "the thing and you", tokenizer.apply_chat_template(message, tokenize=False), [7, 8, 9]
        batch = rollout(policy, [text, message, ids, torch.tensor(ids)], n=2, tokenizer=tokenizer, **SMALL)
        found = batch.table["prompt_token_ids"].to_pylist()[::2]
        assert found[0] == tokenizer(text)["input_ids"]
        assert tokenizer.decode(found[1]).startswith(chat)
        assert found[2] == found[3] == ids

    @pytest.mark.parametrize(
        ("asked", "says"),
        [
            ("a text", "prompts is one text"),
            ([[1, 2], []], "prompt 1: "),
            ([[1], [1, 500]], "prompt 1: .*500"),
            (["text"], "without a tokenizer"),
            ([1, 2], "prompt 0 is int"),
            ([None], "prompt 0 is NoneType"),
            ([{"role": "user", "content": "a"}], "prompt 0 is dict"),
            ([[1] * 600], "prompt 0: .*512"),
            (None, "prompts is a NoneType, must be a list"),
            (iter([[1, 2]]), "prompts is a .*iterator, must be a list"),
            ({0: [1, 2]}, "prompts is a dict, must be a list"),
            ([torch.ones(1, 3, dtype=torch.int64)], "prompt 0 is Tensor, .* of one dimension"),
        ],
    )
    def test_what_cannot_be_a_prompt_is_named(self, policy: PreTrainedModel, asked: Any, says: str) -> None:
        with pytest.raises(UserError, match=says):
            rollout(policy, asked, n=1, **SMALL)

    def test_no_prompts_are_an_empty_batch(self, policy: PreTrainedModel) -> None:
        assert len(rollout(policy, [], n=4, **SMALL)) == 0

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("n", 0),
            ("temperature", -1.0),
            ("top_p", 0.0),
            ("max_tokens", 0),
            ("max_turns", 0),
            ("oversample", -1),
            ("n", "4"),
            ("n", 1.5),
            ("n", True),
            ("step", 1.0),
            ("step", None),
            ("seed", "a"),
            ("temperature", "1"),
            ("rows", ["a"]),
            ("stop_token_ids", 5),
            ("stop_token_ids", "ab"),
            ("enough", 1),
            ("environment", "done"),
            ("earlier", []),
            ("step", -1),
            ("step", 1 << 63),
            ("seed", 1 << 64),
            ("rows", [1 << 63]),
        ],
    )
    def test_parameters_out_of_range_or_of_another_type_are_refused(
        self, policy: PreTrainedModel, name: str, value: Any
    ) -> None:
        with pytest.raises(ValueError, match=f"^{name} .*must be"):
            rollout(policy, prompts(1), **{**SMALL, name: value})

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("max_new_tokens", "rollout has no parameter 'max_new_tokens': is 'max_tokens' meant"),
            ("num_generations", "is 'n' meant"),
            ("temprature", "is 'temperature' meant"),
            ("xyz", "there are tokenizer, n, max_tokens, .*kv_memory"),
            ("kv_memry", "is 'kv_memory' meant"),
        ],
    )
    def test_parameters_of_another_name_are_refused_with_the_one_that_is_meant(
        self, policy: PreTrainedModel, name: str, says: str
    ) -> None:
        with pytest.raises(TypeError, match=says):
            rollout(policy, prompts(1), **{**SMALL, name: 4})

    def test_numbers_of_numpy_and_torch_are_numbers(self, policy: PreTrainedModel) -> None:
        expected = samples(rollout(policy, prompts(1), n=2, seed=3, max_tokens=12, stop_token_ids=[0, 9], rows=[4]))
        found = rollout(
            policy,
            prompts(1),
            n=np.int32(2),
            seed=np.int64(3),
            max_tokens=np.uint8(12),
            stop_token_ids=np.array([0, 9]),
            rows=torch.tensor([4]),
        )
        assert_same(samples(found), expected)
        assert_same(
            samples(rollout(policy, prompts(1), n=2, seed=-1, max_tokens=4)),
            samples(rollout(policy, prompts(1), n=2, seed=2**64 - 1, max_tokens=4)),
        )

    def test_two_prompts_cannot_have_one_row(self, policy: PreTrainedModel) -> None:
        with pytest.raises(UserError, match="prompts 0 and 2 are both row 5"):
            rollout(policy, prompts(3), n=2, rows=[5, 6, 5], **SMALL)

    def test_branches_are_taken_out_of_their_lists_and_batches(self, policy: PreTrainedModel) -> None:
        batch = rollout(policy, prompts(1), n=2, **SMALL)
        with pytest.raises(UserError, match=r"prompt 0 is a list of branches.*unpack it with \*"):
            rollout(policy, [batch.unfinished(length_ends=False)], n=1, **SMALL)
        with pytest.raises(UserError, match="prompts is a RolloutBatch"):
            rollout(policy, batch, n=1, **SMALL)  # type: ignore[arg-type]

    def test_a_branch_with_tokens_that_the_model_does_not_have_is_refused(self, policy: PreTrainedModel) -> None:
        sample = rollout(policy, prompts(1), n=1, **SMALL).trajectory(0)
        branch = Branch(replace(sample, token_ids=np.full(len(sample), 4000, np.int32)), (0,))
        with pytest.raises(UserError, match="prompt 0 goes on from token id 4000, the model has 128"):
            rollout(policy, [branch], n=1, **SMALL)


def state_of(model: PreTrainedModel) -> list[Any]:
    return [
        [module.training for module in model.modules()],
        model.config._attn_implementation,
        getattr(model.config, "use_cache", None),
        [getattr(module, "gradient_checkpointing", None) for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        [parameter.data_ptr() for parameter in model.parameters()],
        torch.is_grad_enabled(),
        [(name, buffer.is_inference()) for name, buffer in model.named_buffers()],
    ]


class TestPolicy:
    def test_it_is_left_as_it_was_and_can_be_trained_on(self) -> None:
        model = FAMILIES["llama"]()
        model.gradient_checkpointing_enable()
        model.train()
        before = state_of(model)
        batch = rollout(model, prompts(2), n=2, **SMALL)
        assert state_of(model) == before
        ids = torch.tensor([batch.table["token_ids"][0].as_py()])
        model(ids, labels=ids).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_it_is_left_as_it_was_after_an_exception(self) -> None:
        model = FAMILIES["llama"]()
        model.gradient_checkpointing_enable()
        model.train()
        before = state_of(model)

        def broken(*_: Any) -> None:
            raise RuntimeError("in a layer")

        hook = model.get_output_embeddings().register_forward_hook(broken)
        with pytest.raises(RuntimeError, match="in a layer"):
            rollout(model, prompts(2), n=2, **SMALL)
        hook.remove()
        assert state_of(model) == before
        with pytest.raises(UserError):
            rollout(model, [[1] * 600], n=2, **SMALL)
        assert state_of(model) == before

    def test_updated_weights_are_those_of_the_next_call(self) -> None:
        model = FAMILIES["llama"]()
        first = rollout(model, prompts(2), n=2, **SMALL)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        second = rollout(model, prompts(2), n=2, **SMALL)
        assert samples(first) != samples(second)
        assert_own_logprobs(model, second)

    def test_data_parallel_wrappers_are_seen_through(self, policy: PreTrainedModel) -> None:
        expected = samples(rollout(policy, prompts(2), n=2, **SMALL))
        assert_same(samples(rollout(nn.DataParallel(policy), prompts(2), n=2, **SMALL)), expected)

    def test_compiled_policies_are_seen_through(self) -> None:
        model = FAMILIES["llama"]()
        expected = samples(rollout(model, prompts(2), n=2, **SMALL))
        assert_same(samples(rollout(torch.compile(model), prompts(2), n=2, **SMALL)), expected)
        model.compile()
        before = [module._compiled_call_impl for module in model.modules()]
        assert_same(samples(rollout(model, prompts(2), n=2, **SMALL)), expected)
        assert [module._compiled_call_impl for module in model.modules()] == before

    @pytest.mark.parametrize("part", ["lm_head", "model", "model.layers.0", "model.layers.1.mlp", "forward"])
    def test_compiled_parts_run_as_they_were_written(self, part: str) -> None:
        model = FAMILIES["llama"]()
        expected = samples(rollout(model, prompts(2), n=2, **SMALL))
        owner, _, name = part.rpartition(".")
        parent = model.get_submodule(owner)
        setattr(parent, name, torch.compile(getattr(parent, name), backend="eager"))
        assert_same(samples(rollout(model, prompts(2), n=2, **SMALL)), expected)

    def test_the_callers_autocast_is_not_for_the_comparison_of_attention(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parity_probe, "_passed", set())
        with torch.autocast("cpu", torch.bfloat16):
            assert len(rollout(FAMILIES["llama"](), prompts(2), n=2, **SMALL)) == 4

    @pytest.mark.parametrize("merged", [False, True])
    def test_lora_policies_run_with_their_adapters(self, merged: bool) -> None:
        peft = pytest.importorskip("peft")
        plain = samples(rollout(FAMILIES["llama"](), prompts(2), n=2, **SMALL))
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(FAMILIES["llama"](), config)
        if merged:
            model.merge_adapter()
        batch = rollout(model, prompts(2), n=2, **SMALL)
        assert samples(batch) != plain
        assert_own_logprobs(model, batch)
        with model.disable_adapter():
            assert_same(samples(rollout(model, prompts(2), n=2, **SMALL)), plain)

    def test_adapters_that_are_at_work_behind_some_tokens_only_are_refused(self) -> None:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], alora_invocation_tokens=[20, 21]
        )
        with pytest.raises(UserError, match="alora_invocation_tokens"):
            rollout(peft.get_peft_model(FAMILIES["llama"](), config), prompts(1), n=1, **SMALL)

    def test_mismatch_shows_what_a_wrapper_does_to_the_forward_pass(self) -> None:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(FAMILIES["llama"](), peft.LoraConfig(r=4, target_modules=["q_proj"]))
        batch = rollout(model, prompts(2), n=2, **SMALL)
        assert batchkv.mismatch(model, batch).max_abs < 1e-4
        plain = model.forward
        model.forward = torch.autocast("cpu", torch.bfloat16)(plain)  # as accelerate's mixed precision does
        assert batchkv.mismatch(model, batch).max_abs > 1e-3

    def test_random_numbers_and_defaults_of_the_process_stay_as_they_are(self) -> None:
        before = torch.get_rng_state()
        with torch.device("meta"):
            tiny_model(CONFIGS["llama"]())
        assert torch.equal(before, torch.get_rng_state())

    @pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
    def test_the_default_dtype_of_the_process_changes_nothing(self, policy: PreTrainedModel, kv_dtype: str) -> None:
        options = {"n": 2, "top_p": 0.9, "record_sampling": True, "kv_dtype": kv_dtype, **SMALL}
        expected = samples(rollout(policy, prompts(2), **options))
        torch.set_default_dtype(torch.bfloat16)
        try:
            found = samples(rollout(policy, prompts(2), **options))
        finally:
            torch.set_default_dtype(torch.float32)
        assert_same(found, expected)

    def test_the_default_device_of_the_process_changes_nothing(self, policy: PreTrainedModel) -> None:
        expected = samples(rollout(policy, prompts(2), n=2, **SMALL))
        with torch.device("meta"):
            found = samples(rollout(policy, prompts(2), n=2, **SMALL))
        assert_same(found, expected)

    def test_threads_wait_for_each_other(self) -> None:
        model = FAMILIES["gemma2"]()
        model.train()
        expected = samples(rollout(model, prompts(3), n=4, **SMALL))
        with ThreadPoolExecutor(3) as pool:
            batches = [pool.submit(rollout, model, prompts(3), n=4, **SMALL) for _ in range(6)]
        for batch in batches:
            assert_same(samples(batch.result()), expected)
        assert model.training
        model(torch.tensor([[1, 2]]))

    def test_what_is_no_model_is_refused(self) -> None:
        with pytest.raises(UserError, match="must be a transformers model"):
            rollout(nn.Linear(2, 2), prompts(1), n=1)
        with pytest.raises(UserError, match=r"the policy is the name 'smollm2', must be a model.*batchkv.Engine"):
            rollout("smollm2", prompts(1), n=1)  # type: ignore[arg-type]

    def test_weights_that_are_not_here_are_refused_with_the_fix(self) -> None:
        model = FAMILIES["llama"]()
        weight = next(model.parameters())
        weight.ds_id = 1  # type: ignore[attr-defined]
        weight.data = weight.data.new_empty(0)
        with pytest.raises(UserError, match="GatheredParameters"):
            rollout(model, prompts(1), n=1)
        with pytest.raises(UserError, match="meta device"):
            rollout(FAMILIES["llama"]().to("meta"), prompts(1), n=1)


class TestSession:
    def test_kv_of_prompts_stays_from_call_to_call(self, policy: PreTrainedModel) -> None:
        expected = samples(rollout(policy, prompts(3), n=4, **SMALL))
        with Session(policy) as session:
            first = session.rollout(prompts(3), n=4, **SMALL)
            again = session.rollout(prompts(3), n=4, **SMALL)
        assert_same(samples(first), expected)
        assert_same(samples(again), expected)
        assert first.summary["prefill_tokens"] == 15 + 3 * 15
        assert again.summary["prefill_tokens"] == 3  # the last token of each prompt, for its logits

    def test_a_forgotten_refresh_is_caught(self) -> None:
        model = FAMILIES["llama"]()
        with Session(model) as session:
            session.rollout(prompts(2), n=2, **SMALL)
            for parameter in model.parameters():
                parameter.data += 1e-4  # a write that `Tensor._version` does not see
            with pytest.raises(UserError, match=r"session.refresh\(\)"):
                session.rollout(prompts(2), n=2, **SMALL)
            session.refresh()
            batch = session.rollout(prompts(2), n=2, **SMALL)
        assert_own_logprobs(model, batch)
        assert set(batch.table["weight_version"].to_pylist()) == {1}

    def test_one_weight_that_changed_is_seen(self) -> None:
        model = FAMILIES["llama"]()
        with Session(model) as session:
            session.rollout(prompts(1), n=1, **SMALL)
            list(model.parameters())[-1].data.view(-1)[-1] += 1e-3
            with pytest.raises(UserError, match=r"session.refresh\(\)"):
                session.rollout(prompts(1), n=1, **SMALL)

    def test_prompts_are_kept_once(self, policy: PreTrainedModel) -> None:
        with Session(policy) as session:
            for step in range(3):
                session.rollout(prompts(3), n=4, step=step, max_tokens=2)
                assert session._kv is not None
                assert [len(session._kv._kept), len(session._kv._expected)] == [3, 3]

    def test_adapters_that_are_switched_are_seen(self) -> None:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(FAMILIES["llama"](), config)
        with Session(model) as session:
            session.rollout(prompts(1), n=1, **SMALL)
            with model.disable_adapter(), pytest.raises(UserError, match=r"session.refresh\(\)"):
                session.rollout(prompts(1), n=1, **SMALL)

    def test_mismatch_shows_stale_kv(self) -> None:
        model = FAMILIES["llama"]()
        with Session(model) as session:
            session.rollout(prompts(2), n=2, **SMALL)
            for parameter in model.parameters():
                parameter.data *= 1.05
            session._fingerprint = None  # nobody looks
            stale = session.rollout(prompts(2), n=2, **SMALL)
        assert batchkv.mismatch(model, stale).max_abs > 1e-2
        assert batchkv.mismatch(model, rollout(model, prompts(2), n=2, **SMALL)).max_abs < 1e-4

    def test_after_an_exception_nothing_is_left(self, policy: PreTrainedModel) -> None:
        with Session(policy) as session:
            session.rollout(prompts(2), n=2, **SMALL)
            with pytest.raises(UserError):
                session.rollout([[1] * 600], n=2, **SMALL)
            assert_same(
                samples(session.rollout(prompts(2), n=2, **SMALL)), samples(rollout(policy, prompts(2), n=2, **SMALL))
            )

    def test_a_closed_one_samples_no_more(self, policy: PreTrainedModel) -> None:
        with Session(policy) as session:
            session.rollout(prompts(1), n=1, **SMALL)
        for use in (lambda: session.rollout(prompts(1), n=1, **SMALL), session.refresh):
            with pytest.raises(UserError, match="the session is closed"):
                use()
        assert session._kv is None

    def test_threads_take_turns_in_one_session(self) -> None:
        model = FAMILIES["llama"]()
        talk: dict[str, Any] = {"environment": lambda turn: [7], "max_turns": 2, "stop_token_ids": list(range(60))}
        expected = samples(rollout(model, prompts(2), n=2, **talk, **SMALL))
        with Session(model) as session, ThreadPoolExecutor(3) as pool:
            batches = [pool.submit(session.rollout, prompts(2), n=2, **talk, **SMALL) for _ in range(6)]
            for batch in batches:
                assert_same(samples(batch.result()), expected)

    def test_a_comparison_waits_for_a_rollout_in_another_thread(self) -> None:
        model = FAMILIES["llama"]()
        batch = rollout(model, prompts(2), n=2, **SMALL)
        model.train()
        compared: list[Future[Any]] = []

        def environment(turn: Turn) -> None:
            if not compared:
                compared.append(pool.submit(batchkv.mismatch, model, batch))

        with ThreadPoolExecutor(1) as pool:
            rollout(model, prompts(2), n=2, environment=environment, stop_token_ids=list(range(60)), **SMALL)
            assert compared[0].result().max_abs < 1e-4
        assert model.training

    def test_refresh_looks_at_the_module_anew(self) -> None:
        model = FAMILIES["llama"]().to(torch.bfloat16)
        with Session(model) as session:
            session.rollout(prompts(1), n=1, **SMALL)
            model.float()
            model.resize_token_embeddings(200)
            session.refresh()
            batch = session.rollout([[150, 199, 7]], n=2, **SMALL)
        assert_own_logprobs(model, batch)

    def test_conversations_do_not_pile_up(self, policy: PreTrainedModel) -> None:
        with Session(policy) as session:
            session.rollout(prompts(2), n=2, environment=lambda turn: [7], max_turns=2, stop_token_ids=[50], **SMALL)
            assert session._kv is None

    def test_what_belongs_to_the_session_is_not_asked_of_a_rollout(self, policy: PreTrainedModel) -> None:
        with pytest.raises(TypeError, match="Session has no parameter 'max_tokens'"):
            Session(policy, max_tokens=4)
        with (
            Session(policy) as session,
            pytest.raises(TypeError, match=r"Session.rollout has no parameter 'kv_memory'"),
        ):
            session.rollout(prompts(1), kv_memory="1GiB")

    def test_an_engine_is_a_policy_too(self, policy: PreTrainedModel) -> None:
        engine = batchkv.Engine(policy)
        assert_same(
            samples(rollout(engine, prompts(2), n=2, **SMALL)), samples(rollout(policy, prompts(2), n=2, **SMALL))
        )
        with pytest.raises(UserError, match="engine"):
            rollout(engine, prompts(2), n=2, max_batch_rows=4)


def test_at_learning_rate_0_mismatch_stays_flat_over_50_steps() -> None:
    model = FAMILIES["llama"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    worst = []
    with Session(model) as session:
        for step in range(50):
            batch = session.rollout(prompts(2, 12), n=2, max_tokens=4, step=step)
            model.train()
            ids = torch.tensor(batch.completions.lists())
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            worst.append(batchkv.mismatch(model, batch, max_rows=2).max_abs)
    assert max(worst) < 1e-4


def test_processes_of_data_parallel_are_seen_through_and_shards_refused(tmp_path: Path) -> None:
    """There is one process, but what wraps the policy is real."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = FAMILIES["llama"]()
        expected = samples(rollout(model, prompts(2), n=2, **SMALL))
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert_same(samples(rollout(wrapped, prompts(2), n=2, **SMALL)), expected)
        sharded = FAMILIES["llama"]()
        torch.distributed.fsdp.fully_shard(sharded, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
        with pytest.raises(UserError, match=r"FSDP2.*full state dict"):
            rollout(sharded, prompts(2), n=2, **SMALL)
    finally:
        torch.distributed.destroy_process_group()
