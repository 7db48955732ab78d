"""Models that would run wrongly are refused by name; the tiny copy of the others keeps what attention depends on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from batchkv.errors import UserError
from batchkv.kv_layout import layer_specs
from batchkv.model_support import TINY_VOCAB_SIZE, TINY_WINDOW, check_supported, tiny_config, tiny_model
from tests.tiny_models import CONFIGS, FULL, SLIDING

DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tf.T5Config(), "encoder-decoder"),
        (tf.ViTConfig(), "no causal language model"),
        (tf.BertConfig(), "bidirectional"),
        (tf.FalconConfig(), "attention cannot be replaced"),
        (tf.BloomConfig(), "attention cannot be replaced"),
        (tf.MptConfig(), "attention cannot be replaced"),
        (tf.MambaConfig(), "attention cannot be replaced"),
        (tf.Llama4TextConfig(), "'chunked_attention' layers"),
        (tf.RecurrentGemmaConfig(), "'linear_attention' layers"),
        (tf.LlamaConfig(rope_parameters=DYNAMIC_ROPE), "'dynamic' RoPE"),
        (tf.Phi3Config(rope_parameters=LONG_ROPE), "'longrope' RoPE"),
        (
            tf.Gemma3TextConfig(rope_parameters={FULL: DYNAMIC_ROPE, SLIDING: {"rope_type": "default"}}),
            "'dynamic' RoPE",
        ),
        (tf.Gemma3TextConfig(use_bidirectional_attention=True), "bidirectional"),
        (tf.Gemma3nTextConfig(), "read the keys and values of others"),
        (tf.Gemma3Config(), "one part of several"),
        (tf.Phi4MultimodalConfig(), "one part of several"),
        (tf.DeepseekV3Config(), "multi-head latent attention"),
        (tf.DiffLlamaConfig(), "runs attention twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_refused_with_its_name_and_the_reason(config: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as raised:
        check_supported(config)
    assert f"model type {config.model_type!r}" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("config", [build() for build in CONFIGS.values()], ids=list(CONFIGS))
def test_the_families_are_supported(config: Any) -> None:
    check_supported(config)


@pytest.mark.parametrize("config", [tf.GPT2Config(), tf.GPTNeoXConfig(), tf.Qwen2MoeConfig(), tf.GraniteConfig()])
def test_older_and_odder_decoders_are_supported(config: Any) -> None:
    check_supported(config)


def test_the_class_of_a_live_model_counts_not_the_one_its_config_suggests() -> None:
    class Custom(tf.LlamaForCausalLM):  # type: ignore[no-untyped-call]
        _supports_attention_backend = False

    with pytest.raises(UserError, match="attention cannot be replaced"):
        check_supported(tf.LlamaConfig(), Custom)


def kinds_of_heads(config: Any) -> str:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return {1: "multi-query", heads: "multi-head"}.get(kv_heads, "grouped")


@pytest.mark.parametrize(("kv_heads", "kind"), [(1, "multi-query"), (4, "grouped"), (32, "multi-head")])
def test_tiny_keeps_how_heads_are_grouped(kv_heads: int, kind: str) -> None:
    tiny = tiny_config(tf.LlamaConfig(num_attention_heads=32, num_key_value_heads=kv_heads))
    assert kinds_of_heads(tiny) == kind


@pytest.mark.parametrize(("head_dim", "is_quotient"), [(128, True), (64, False)])
def test_tiny_keeps_a_head_dim_that_is_not_hidden_size_by_heads(head_dim: int, is_quotient: bool) -> None:
    tiny = tiny_config(tf.LlamaConfig(hidden_size=4096, num_attention_heads=32, head_dim=head_dim))
    assert (tiny.head_dim * tiny.num_attention_heads == tiny.hidden_size) == is_quotient


def test_tiny_has_a_layer_of_each_kind_and_short_windows() -> None:
    layer_types = ([SLIDING] * 5 + [FULL]) * 2
    config = tf.Gemma3TextConfig(num_hidden_layers=12, layer_types=layer_types, sliding_window=512)
    assert [spec.window for spec in layer_specs(tiny_config(config))] == [TINY_WINDOW, None]


def test_tiny_keeps_layer_types_even_if_all_layers_differ_otherwise() -> None:
    config = tf.LlamaConfig(num_hidden_layers=12)
    config.layer_types = [SLIDING] * 11 + [FULL]
    config.scale_per_layer = list(range(12))
    tiny = tiny_config(config)
    assert tiny.layer_types[-1] == FULL
    assert tiny.num_hidden_layers == len(tiny.layer_types) == len(tiny.scale_per_layer) < 12


def test_tiny_keeps_features() -> None:
    gemma = tiny_config(tf.Gemma2Config(attn_logit_softcapping=50.0, final_logit_softcapping=30.0))
    assert (gemma.attn_logit_softcapping, gemma.final_logit_softcapping) == (50.0, 30.0)
    phi = tf.PhiConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    assert tiny_config(phi).rope_parameters == phi.rope_parameters
    gpt_oss = tiny_config(tf.GptOssConfig(num_local_experts=32, num_experts_per_tok=4))
    assert (gpt_oss.num_local_experts, gpt_oss.num_experts_per_tok) == (4, 2)
    assert hasattr(tiny_model(gpt_oss).model.layers[0].self_attn, "sinks")
    assert tiny_config(tf.LlamaConfig(tie_word_embeddings=True)).tie_word_embeddings


def test_tiny_puts_special_tokens_inside_its_vocabulary() -> None:
    tiny = tiny_config(tf.LlamaConfig(pad_token_id=31000, bos_token_id=31001, eos_token_id=[31002, 31003]))
    assert tiny.vocab_size == TINY_VOCAB_SIZE
    assert (tiny.pad_token_id, tiny.bos_token_id, tiny.eos_token_id) == (0, 1, 2)


def test_the_config_that_is_shrunk_stays_as_it_is() -> None:
    config = tf.Gemma3TextConfig(num_hidden_layers=12)
    before = config.to_dict()
    tiny_config(config)
    assert config.to_dict() == before


def test_a_quantized_checkpoint_is_checked_without_quantization() -> None:
    config = tf.GptOssConfig.from_dict({"quantization_config": {"quant_method": "mxfp4"}})
    assert hasattr(config, "quantization_config")
    assert not hasattr(tiny_config(config), "quantization_config")


def logits_of(config: Any) -> torch.Tensor:
    """[T, V] of a tiny model on an input longer than its window."""
    tokens = torch.arange(40).unsqueeze(0)
    with torch.inference_mode():
        logits: torch.Tensor = tiny_model(config, seed=1)(tokens, use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "phi3", "gpt_oss"])
def test_a_wrong_window_shows_in_the_logits_of_a_tiny_model(family: str) -> None:
    right, wrong = tiny_config(CONFIGS[family]()), tiny_config(CONFIGS[family]())
    wrong.sliding_window += 1
    error = (logits_of(right) - logits_of(wrong)).abs()
    assert error[: right.sliding_window].max() < 1e-4
    assert error[right.sliding_window :].max() > 0.1 * logits_of(right).std()


def test_weights_follow_the_seed() -> None:
    first, same, other = (tiny_model(tiny_config(tf.LlamaConfig()), seed) for seed in (0, 0, 1))
    assert torch.equal(first.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.dtype == torch.float32
    assert not first.training


def test_a_class_that_cannot_be_built_small_is_a_user_error() -> None:
    config = tf.Lfm2MoeConfig(layer_types=None)
    with pytest.raises(UserError, match="'lfm2_moe' cannot be checked"):
        tiny_model(tiny_config(config))
