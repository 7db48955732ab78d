"""Short marks of models and tokenizers, to tell whether they are still the same."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SAMPLED = 1024  # elements of each tensor whose places matter, too
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def model_fingerprint(model: PreTrainedModel) -> str:
    """Of config and weights, as they are in memory.

    Of each tensor the sum of all bit patterns, as integers, so that it depends neither on threads nor on their order,
    and some elements by their place. It takes about as long as reading the weights once.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(model.config.to_json_string(use_diff=False).encode())
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
            step = max(1, len(bits) // _SAMPLED)
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {int(bits.sum(dtype=torch.int64))}".encode())
            digest.update(bits[::step].cpu().numpy().tobytes())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Of its vocabulary, its rules and its chat template."""
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    template = json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True)
    return hashlib.blake2b(f"{rules}\0{template}".encode(), digest_size=16).hexdigest()
