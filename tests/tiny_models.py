"""Tiny random causal LMs of many families, and a tokenizer for them, so that tests need no downloads.

Every model is float32, on the CPU, in eval mode with eager attention, has `VOCAB_SIZE` tokens, grouped
queries, and no end token, so that greedy generation always runs to its length limit. Windows (`WINDOW`
tokens) are shorter than the prompts that tests use (about 40 tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from batchkv.model_support import tiny_model

VOCAB_SIZE = 128
WINDOW = 12
SEED = 8  # greedy outputs of every family are varied, not one token over and over
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
PAD, BOS, EOS, UNK, IM_START, IM_END = SPECIAL_TOKENS = (
    "<pad>",
    "<bos>",
    "<eos>",
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Merges make some words longer than a character, so that joining two texts can change their tokens.
MERGES = ("t h", "th e", "i n", "in g", "e r", "a n", "an d", "o n", "r e", "o u", "y ou", "e n", "o r")


def _shape(**overrides: Any) -> dict[str, Any]:
    """Keyword arguments that every tiny config shares."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    return shape | overrides


def _layers(*layer_types: str) -> dict[str, Any]:
    return {"num_hidden_layers": len(layer_types), "layer_types": list(layer_types), "sliding_window": WINDOW}


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_shape(tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2Config(**_shape(hidden_size=64)),
    "qwen3": lambda: Qwen3Config(**_shape()),
    "mistral": lambda: MistralConfig(**_shape(sliding_window=WINDOW)),
    "gemma2": lambda: Gemma2Config(
        **_shape(query_pre_attn_scalar=24, attn_logit_softcapping=5.0, final_logit_softcapping=8.0)
        | _layers(SLIDING, FULL, SLIDING, FULL)
    ),
    "gemma3": lambda: Gemma3TextConfig(**_shape(query_pre_attn_scalar=24) | _layers(SLIDING, SLIDING, FULL, SLIDING)),
    "phi3": lambda: Phi3Config(**_shape(hidden_size=64, sliding_window=WINDOW)),
    "olmo2": lambda: Olmo2Config(**_shape(hidden_size=64)),
    "gpt_oss": lambda: GptOssConfig(
        **_shape(num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN)
        | _layers(SLIDING, FULL, SLIDING, FULL)
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_shape(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
    ),
}


def _family(name: str) -> Callable[[], PreTrainedModel]:
    return lambda: tiny_model(CONFIGS[name](), seed=SEED)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {name: _family(name) for name in CONFIGS}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Printable ASCII by character, a few merged words, Latin letters to fill up: exactly `VOCAB_SIZE` ids.

    Like many real tokenizers it puts a `<bos>` before a text, and its chat template writes one too.
    """
    characters = ["\t", "\n", *map(chr, range(32, 127))]
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*SPECIAL_TOKENS, *characters, *merged]
    tokens += [chr(0xC0 + i) for i in range(VOCAB_SIZE - len(tokens))]
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split() for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token=UNK))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])])
    # of tokens that are text as it stands; by the first of the two, grammars know it
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tiny(model: PreTrainedModel, directory: Path) -> Path:
    """Write `model` (safetensors) and the tiny tokenizer to `directory`, for `--model DIRECTORY`."""
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory
