"""Which models batchkv can run, and a tiny copy of any of them to check that on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


def check_supported(config: PretrainedConfig) -> None:
    """stub"""


def tiny_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random causal LM of `config` for comparing attention implementations: float32, CPU, eval, eager.

    The usual initialisation (std 0.02) makes scores near zero, so attention is uniform and logits are
    flat whatever the mask does: a wrong window would hardly show. Here each matrix keeps the scale of
    its input, so scores and logits spread over several units.
    """
    import torch
    from transformers import AutoModelForCausalLM

    auto_model: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto_model.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomize(name, parameter, generator)
    model.train(False)
    return model


def _randomize(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Draw `parameter` anew; the weights of norms are only shaken: their neutral value is 0 or 1."""
    import torch

    noise = torch.randn(parameter.shape, generator=generator)
    if "norm" in name:
        parameter.add_(0.1 * noise)
    elif parameter.dim() < 2:
        parameter.copy_(0.5 * noise)
    else:
        parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
