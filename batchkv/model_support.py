"""Which models batchkv can run, and a tiny copy of any of them to check that on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from batchkv.errors import UserError
from batchkv.kv_layout import layer_specs

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

Objection = Callable[["PretrainedConfig", "type[PreTrainedModel] | None"], "str | None"]

# Sub-configs of models that are more than a language model.
PARTS = ("text_config", "text_encoder", "decoder", "vision_config", "audio_config")
# Model types whose attention modules are not what their configs suggest.
MISFITS = {
    "doge": "its attention mask depends on the values of all tokens",
    "nemotron": "its layers do not pass keyword arguments on to their attention",
    "diffllama": "each layer runs attention twice, with different values",
    "dory": "its layers run several times per token, each time with other keys and values",
    "hrm_text": "its layers run several times per token, each time with other keys and values",
    "jetmoe": "its keys and values are repeated for each expert of a token",
    "moshi": "its language model is one part of several",
}
# Their frequencies depend on the largest position in the batch, and a packed batch mixes rows of many lengths.
LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")


def check_supported(config: PretrainedConfig, model_class: type[PreTrainedModel] | None = None) -> None:
    """Refuse a model that batchkv would run wrongly, by what its config says.

    That it passes is necessary, not sufficient: the parity probe compares what the class really computes.

    Args:
        config: of the model.
        model_class: the class of a live model; by default the causal LM that transformers has for `config`.

    Raises:
        UserError: naming the model type and the reason.
    """
    model_class = model_class or _causal_lm_class(config)
    for objection in OBJECTIONS:
        if reason := objection(config, model_class):
            raise UserError(f"model type {config.model_type!r} is not supported: {reason}")
    layer_specs(config)


def _causal_lm_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class that `AutoModelForCausalLM` makes of `config`; None if there is none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    model_class: type[PreTrainedModel] | None = mapping.get(type(config), None)
    return model_class


def _not_a_decoder(config: PretrainedConfig, model_class: type[PreTrainedModel] | None) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder; use a decoder-only model"
    if model_class is None:
        return "transformers has no causal language model of this type"
    return None


def _not_text_only(config: PretrainedConfig, _: type[PreTrainedModel] | None) -> str | None:
    if any(name in PARTS for name in config.sub_configs):
        return "its language model is one part of several; use a text-only checkpoint of it"
    return None


def _no_attention_interface(_: PretrainedConfig, model_class: type[PreTrainedModel] | None) -> str | None:
    if not getattr(model_class, "_supports_attention_backend", False):
        return "its attention cannot be replaced (no AttentionInterface in transformers)"
    return None


def _not_causal(config: PretrainedConfig, _: type[PreTrainedModel] | None) -> str | None:
    # GPT-NeoX too says that it is no decoder, but does not mean it
    is_encoder = getattr(config, "is_decoder", True) is False and config.model_type != "gpt_neox"
    if is_encoder or getattr(config, "use_bidirectional_attention", False):
        return "its attention is bidirectional, so a prefix depends on what follows and cannot be shared"
    return None


def _misfit(config: PretrainedConfig, _: type[PreTrainedModel] | None) -> str | None:
    return MISFITS.get(config.model_type)


def _uneven_layers(config: PretrainedConfig, _: type[PreTrainedModel] | None) -> str | None:
    if getattr(config, "is_heterogeneous", False):
        return "its layers differ in more than their window"
    return None


def _shared_kv(config: PretrainedConfig, _: type[PreTrainedModel] | None) -> str | None:
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers read the keys and values of others"
    return None


def _latent_kv(config: PretrainedConfig, _: type[PreTrainedModel] | None) -> str | None:
    if getattr(config, "kv_lora_rank", None):
        return "its keys and values are compressed (multi-head latent attention)"
    if getattr(config, "v_head_dim", None):
        return "its values have another width than its keys"
    return None


def _length_dependent_rope(config: PretrainedConfig, _: type[PreTrainedModel] | None) -> str | None:
    for rope_type in _rope_types(config):
        if rope_type in LENGTH_DEPENDENT_ROPE:
            return f"its positions are encoded with {rope_type!r} RoPE, which depends on the longest row in a batch"
    return None


def _rope_types(config: PretrainedConfig) -> Iterator[str]:
    """The RoPE types of a config, which has one set of parameters or one for each layer type."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in [parameters, *per_layer_type]:
        yield rope.get("rope_type") or rope.get("type") or "default"


OBJECTIONS: tuple[Objection, ...] = (
    _not_a_decoder,
    _not_text_only,
    _no_attention_interface,
    _not_causal,
    _misfit,
    _uneven_layers,
    _shared_kv,
    _latent_kv,
    _length_dependent_rope,
)


TINY_VOCAB_SIZE = 128
TINY_WINDOW = 8
TINY_HEADS = 4
TINY_HEAD_DIM = 16
MAX_TINY_LAYERS = 6

# Sizes under the names that configs give them; a config has some of them.
TINY_SIZES = {
    "vocab_size": TINY_VOCAB_SIZE,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "n_inner": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": TINY_WINDOW,
    "rotary_dim": TINY_HEAD_DIM // 2,
    "first_k_dense_replace": 1,
}


def tiny_config(config: PretrainedConfig) -> PretrainedConfig:
    """A small copy of a supported config that keeps every feature which attention can depend on.

    Kept: the class, one layer of each kind, grouped or single key/value heads, a head dim that is not
    hidden size / heads, RoPE parameters, soft-caps, sinks, norms, experts, tied embeddings. Windows are
    shortened to `TINY_WINDOW` tokens, so that short inputs reach beyond them.
    """
    tiny = copy.deepcopy(config)
    for name, value in (_tiny_layers(config) | _tiny_widths(config)).items():
        setattr(tiny, name, value)
    for name, size in TINY_SIZES.items():
        if isinstance(value := getattr(config, name, None), int) and value > size:
            setattr(tiny, name, size)
    for position, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        if getattr(config, name, None) is not None:
            setattr(tiny, name, position)
    if hasattr(tiny, "quantization_config"):
        del tiny.quantization_config
    return tiny


def _tiny_layers(config: PretrainedConfig) -> dict[str, Any]:
    """The number of layers, and what configs list layer by layer: one layer of each kind, two at least."""
    num_layers = config.num_hidden_layers
    per_layer = {
        name: value for name, value in config.to_dict().items() if isinstance(value, list) and len(value) == num_layers
    }
    kinds = [str([values[layer] for values in per_layer.values()]) for layer in range(num_layers)]
    layer_types = per_layer.get("layer_types", kinds)
    # every layer type before every other difference, as there may be as many of those as layers
    wanted = dict.fromkeys([*_first_of_each(layer_types), *_first_of_each(kinds)])
    chosen = sorted(list(wanted)[:MAX_TINY_LAYERS])
    if chosen == [0]:  # all alike
        chosen = list(range(min(2, num_layers)))
    lists = {name: [values[layer] for layer in chosen] for name, values in per_layer.items()}
    return {"num_hidden_layers": len(chosen), **lists}


def _first_of_each(values: list[str]) -> list[int]:
    """Where each distinct value first appears."""
    return sorted({values.index(value) for value in values})


def _tiny_widths(config: PretrainedConfig) -> dict[str, Any]:
    """Hidden size and heads."""
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    widths: dict[str, Any] = {
        "num_attention_heads": TINY_HEADS,
        "hidden_size": TINY_HEADS * TINY_HEAD_DIM,
    }
    if hasattr(config, "num_key_value_heads"):
        widths["num_key_value_heads"] = {1: 1, num_heads: TINY_HEADS}.get(num_kv_heads, TINY_HEADS // 2)
    if hasattr(config, "head_dim"):
        widths["head_dim"] = TINY_HEAD_DIM
    if head_dim * num_heads != config.hidden_size:
        widths["hidden_size"] = TINY_HEADS * TINY_HEAD_DIM * 3 // 4
    # both are a scale of attention scores, meant for the real head dim
    if getattr(config, "query_pre_attn_scalar", None):
        widths["query_pre_attn_scalar"] = TINY_HEAD_DIM
    if getattr(config, "attention_multiplier", None):
        widths["attention_multiplier"] = TINY_HEAD_DIM**-0.5
    return widths


def tiny_model(
    config: PretrainedConfig, seed: int = 0, model_class: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """A random causal LM of `config` for comparing attention implementations: float32, CPU, eval, eager.

    The usual initialisation (std 0.02) makes scores near zero, so attention is uniform and logits are
    flat whatever the mask does: a wrong window would hardly show. Here each matrix keeps the scale of
    its input, so scores and logits spread over several units.

    Args:
        config: from `tiny_config`.
        seed: the same seed gives the same weights.
        model_class: as for `check_supported`.

    Raises:
        UserError: if the class cannot be built of `config`.
    """
    import torch

    auto_class: Any = model_class or _causal_lm_class(config)
    try:
        # whatever the process has set: the draws of the caller, and the device of new tensors, stay as they are
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model: PreTrainedModel = auto_class._from_config(config, dtype=torch.float32, attn_implementation="eager")
    except Exception as error:  # a config that does not fit its class fails in any way
        raise UserError(
            f"model type {config.model_type!r} cannot be checked, as a small copy of it cannot be built "
            f"({type(error).__name__}: {error}): use a model of another type"
        ) from error
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomize(name, parameter, generator)
    model.train(False)
    return model


def _randomize(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Draw `parameter` anew; the weights of norms are only shaken: their neutral value is 0 or 1."""
    import torch

    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
    if "norm" in name:
        parameter.add_(0.1 * noise)
    elif parameter.dim() < 2:
        parameter.copy_(0.5 * noise)
    else:
        parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
