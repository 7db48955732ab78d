"""The oracle: what transformers generates for one row alone, greedy, fp32, with the model's own attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel


def generate_alone(
    model: PreTrainedModel,
    prompt: Sequence[int] | npt.NDArray[np.int32],
    max_tokens: int,
    end_token_ids: Sequence[int] = (),
) -> list[int]:
    """Generated token ids, the end token included."""
    input_ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(end_token_ids) or None,
            pad_token_id=0,
        )
    tokens: list[int] = output[0, input_ids.shape[1] :].tolist()
    return tokens


def score_alone(
    model: PreTrainedModel, context: Sequence[int], continuation: Sequence[int]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Log-probabilities of tokens behind others, and whether each is the likeliest."""
    tokens = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits[0, len(context) - 1 :].double()
    target = tokens[0, len(context) :]
    logprobs = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
    return logprobs.numpy(), (logits.argmax(-1) == target).numpy()
