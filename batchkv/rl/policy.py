"""A policy in training, as a model that can be run in place: what wraps it, and leaving it as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from batchkv.engine import Engine
from batchkv.errors import UserError
from batchkv.model_lock import alone_with

_GATHER = (
    "gather a full state dict into a module of its own (torch.distributed.checkpoint.state_dict.get_model_state_dict "
    "with full_state_dict=True), and run the rollout on that"
)
_WRAPPERS = ("module", "_orig_mod", "pretrained_model")  # of DataParallel and DDP, torch.compile, TRL's value heads


def engine_of(policy: nn.Module | Engine, tokenizer: Any, config: dict[str, Any]) -> Engine:
    """One for a policy, in place; what is an engine already has its tokenizer and config.

    Raises:
        UserError: the policy cannot be run in place.
    """
    return policy if isinstance(policy, Engine) else Engine(unwrap(policy), tokenizer, **config)


def unwrap(policy: nn.Module) -> PreTrainedModel:
    """The transformers model inside a policy: of DataParallel, DistributedDataParallel, `torch.compile` and PEFT.

    Nothing is copied. The layers of LoRA and its like lie in the model and stay there, merged or not. What
    `torch.compile` made is left aside: steps have ever new sizes.

    Raises:
        UserError: there is none inside, or its weights are not here: sharded, or on no device.
    """
    model: object = policy
    _check_not_fsdp(model)
    while not isinstance(model, PreTrainedModel):
        model = _inside(model)
    _check_parameters(model)
    return model


def whose_forward_trainers_call(policy: nn.Module) -> nn.Module:
    """The transformers model, or the PEFT model around it: what wraps these passes calls on, as it is, or is not needed
    where no gradients are.

    Raises:
        UserError: there is none inside.
    """
    model: object = policy
    while not isinstance(model, PreTrainedModel) and not is_peft(model):
        model = _inside(model)
    return cast("nn.Module", model)


def _inside(model: object) -> object:
    if is_peft(model):
        config = model.active_peft_config  # type: ignore[attr-defined]
        if config.is_prompt_learning:
            raise UserError(
                f"the policy has a PEFT adapter of kind {config.peft_type.value}, which puts virtual tokens before "
                "prompts: only adapters inside layers, such as LoRA, can be run in place"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise UserError(
                "the policy has an activated LoRA adapter (alora_invocation_tokens), which is at work only behind "
                "certain tokens: only adapters that are at work everywhere can be run in place"
            )
        return model.get_base_model()  # type: ignore[attr-defined]
    for name in _WRAPPERS:
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return inner
    if isinstance(model, str):
        raise UserError(
            f"the policy is the name {model!r}, must be a model: load it (AutoModelForCausalLM.from_pretrained), or "
            "take batchkv.Engine, which loads names"
        )
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    raise UserError(f"the policy is a {kind}, must be a transformers model or a wrapper of one: unwrap it")


def adapters_of(model: nn.Module) -> str:
    """Which of PEFT's adapters are at work in a model and how strongly: what no weight tells."""
    layers = [module for module in model.modules() if hasattr(module, "disable_adapters")]
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    return "; ".join(str([getattr(layer, name, None) for name in names]) for layer in layers)


def is_peft(model: object) -> bool:
    """Whether PEFT wraps a model. Where it was never imported, it does not."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _check_not_fsdp(model: object) -> None:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in modules):
        raise UserError(f"the policy's parameters are sharded (FSDP): {_GATHER}")


def _check_parameters(model: PreTrainedModel) -> None:
    """Raises UserError if the weights are somewhere else."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") and parameter.numel() == 0:
            raise UserError(
                f"the policy's parameter {name} is sharded (DeepSpeed ZeRO-3): run the rollout inside "
                "deepspeed.zero.GatheredParameters(policy.parameters()) with the engine's hooks taken off, as TRL's "
                "unwrap_model_for_generation does"
            )
        if hasattr(parameter, "full_tensor"):  # a DTensor
            raise UserError(f"the policy's parameter {name} is sharded (FSDP2): {_GATHER}")
        if parameter.device.type == "meta":
            raise UserError(f"the policy's parameter {name} is on the meta device: load the weights first")


@contextmanager
def left_as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Afterwards, also after an exception, a model is what it was but for what the engine itself restores (training
    mode and attention): no buffer that was made meanwhile would keep it from being trained. Other threads that come
    here wait.
    """
    with alone_with(model):
        try:
            yield
        finally:
            _make_trainable(model)


def _make_trainable(model: nn.Module) -> None:
    """Some rotary embeddings compute their frequencies anew for longer texts; tensors made in inference mode cannot
    take part in a backward pass.
    """
    for module in model.modules():
        buffers: dict[str, Any] = module._buffers
        for name, buffer in buffers.items():
            if isinstance(buffer, torch.Tensor) and buffer.is_inference():
                buffers[name] = buffer.clone()
