"""The mark of a model is the same wherever it is computed, and another for any change of its results."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from batchkv.fingerprint import model_fingerprint, tokenizer_fingerprint
from tests.tiny_models import FAMILIES, tiny_tokenizer


@pytest.fixture
def model() -> PreTrainedModel:
    return FAMILIES["llama"]()


def test_the_same_model_has_the_same_mark_whatever_the_number_of_threads(model: PreTrainedModel) -> None:
    threads = torch.get_num_threads()
    try:
        marks = set()
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            marks.add(model_fingerprint(model))
    finally:
        torch.set_num_threads(threads)
    assert marks == {model_fingerprint(FAMILIES["llama"]())}


@pytest.mark.parametrize("elements", [0, 1, 3, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_each_element_of_a_tensor_of_any_size_counts(model: PreTrainedModel, elements: int, dtype: torch.dtype) -> None:
    odd = torch.zeros(elements + 1, dtype=dtype)[1:]  # its memory begins at no word
    model.register_buffer("more", odd)
    marks = {model_fingerprint(model)}
    for place in {0, elements // 2, elements - 1} if elements else ():
        odd[place] = 1
        marks.add(model_fingerprint(model))
    assert len(marks) == 1 + len({0, elements // 2, elements - 1} if elements else ())


def test_what_changes_no_result_changes_no_mark(model: PreTrainedModel) -> None:
    before = model_fingerprint(model)
    model.config.use_cache = not model.config.use_cache
    assert model_fingerprint(model) == before


def test_what_a_module_keeps_besides_its_tensors_is_no_hindrance(model: PreTrainedModel) -> None:
    class WithState(torch.nn.Identity):
        def get_extra_state(self) -> dict[str, int]:
            return {"scale": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    model.add_module("more", WithState())
    assert model_fingerprint(model)


def test_a_tensor_that_lies_otherwise_in_memory_is_the_same(model: PreTrainedModel) -> None:
    before = model_fingerprint(model)
    weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    assert model_fingerprint(model) == before


def last_bit(weight: torch.Tensor) -> None:
    flat = weight.view(torch.int32).flatten()
    flat[len(flat) // 3] ^= 1


def two_exchanged(weight: torch.Tensor) -> None:
    weight[[0, 1]] = weight[[1, 0]]


def other_sign_of_zero(weight: torch.Tensor) -> None:
    weight[0, 0] = -0.0


def not_finite(weight: torch.Tensor) -> None:
    weight[0, 0] = float("nan")


def two_that_cancel(weight: torch.Tensor) -> None:
    flat = weight.view(torch.int32).flatten()
    flat[len(flat) // 3] += 5
    flat[len(flat) // 2] -= 5


@pytest.mark.parametrize("change", [last_bit, two_exchanged, two_that_cancel, other_sign_of_zero, not_finite])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_small_change_of_a_weight_is_seen(
    model: PreTrainedModel, name: str, change: Callable[[torch.Tensor], None]
) -> None:
    weight = model.get_parameter(name).data
    weight[0, 0] = 0.0
    before = model_fingerprint(model)
    change(weight)
    assert model_fingerprint(model) != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_is_another_model(model: PreTrainedModel, dtype: torch.dtype) -> None:
    assert model_fingerprint(FAMILIES["llama"]().to(dtype)) != model_fingerprint(model)


@pytest.mark.parametrize(("name", "value"), [("rms_norm_eps", 1e-5), ("max_position_embeddings", 513)])
def test_a_change_of_the_config_is_seen(model: PreTrainedModel, name: str, value: Any) -> None:
    before = model_fingerprint(model)
    assert getattr(model.config, name) != value
    setattr(model.config, name, value)
    assert model_fingerprint(model) != before


def test_a_tokenizer_has_the_mark_of_its_rules() -> None:
    assert tokenizer_fingerprint(tiny_tokenizer()) == tokenizer_fingerprint(tiny_tokenizer())
    assert tokenizer_fingerprint(None) == "none"


def test_using_a_tokenizer_does_not_change_its_mark() -> None:
    tokenizer = tiny_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["the king", "and"], add_special_tokens=True)
    tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert tokenizer_fingerprint(tokenizer) == before


def test_a_changed_template_vocabulary_or_rule_is_seen() -> None:
    changed = [tiny_tokenizer() for _ in range(4)]
    changed[1].chat_template += " "
    changed[2].add_tokens(["kingdom"])
    rules = json.loads(changed[3].backend_tokenizer.to_str())
    rules["model"]["merges"] = rules["model"]["merges"][::-1]
    changed[3].backend_tokenizer.model = type(changed[3].backend_tokenizer).from_str(json.dumps(rules)).model
    assert len(set(map(tokenizer_fingerprint, changed))) == 4
