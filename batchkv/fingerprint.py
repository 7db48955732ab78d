"""Short marks of models and tokenizers, to tell whether they are still the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WORD = 8  # bytes
_COLUMNS = 1024


def model_fingerprint(model: PreTrainedModel) -> str:
    """Of config and weights, as they are in memory. Buffers that are not saved with the weights are left out: some
    rotary embeddings change theirs with the length of a text.

    Of each tensor the sums of its bits, as integers of 64 bits, over the rows and the columns of a table of them, so
    that it depends neither on threads nor on their order. It takes about as long as reading the weights twice.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("use_cache", None)  # trainers switch it; it changes nothing
    digest.update(json.dumps(config, sort_keys=True).encode())
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not isinstance(tensor, torch.Tensor):
                continue  # what a module keeps besides (`get_extra_state`)
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            for part in _sums(tensor.detach()):
                digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()


def _sums(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Sums of words over columns and rows, and what fills no row as it is: integers."""
    flat = tensor.contiguous().flatten()
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()  # a view into a larger tensor, which words cannot be read from
    rows = flat.numel() * flat.element_size() // (_WORD * _COLUMNS)
    whole = rows * _WORD * _COLUMNS // flat.element_size()
    words = flat[:whole].view(torch.int64).view(rows, _COLUMNS)
    yield words.sum(0)
    yield words.sum(1)
    yield flat[whole:].view(torch.uint8)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Of its vocabulary, its rules and its chat template."""
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    template = json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True)
    return hashlib.blake2b(f"{rules}\0{template}".encode(), digest_size=16).hexdigest()
