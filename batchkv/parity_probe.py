"""Does a model's architecture give the same logits through our attention as through its own? Tried before a job runs.

A tiny random model of the same class is run over a small trie, in chunks and forks, with windows shorter than the
prompts. What the class does with its attention arguments (windows, caps, sinks, scales) is the same at any size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from batchkv.errors import UserError
from batchkv.kernels.selection import select_attention
from batchkv.kv_layout import KVLayout, layer_specs
from batchkv.linear_layers import pack_linears
from batchkv.model_runner import ModelRunner, paged_attention_of
from batchkv.model_support import tiny_config, tiny_model
from batchkv.planner import Limits, make_plan
from batchkv.sampling_params import SamplingParams
from batchkv.scheduler import Scheduler
from batchkv.sequence import GeneratedTokens
from batchkv.token_arena import TokenArena
from batchkv.wave import Wave

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LIMITS = Limits(kv_bytes=1 << 24, max_batch_rows=8, max_batch_tokens=9, page_size=4)
_NEW_TOKENS = 3
_TOLERANCE = 1e-3  # of the logits' standard deviation; a wrong mask is off by more than 0.1 of it

# What has passed: class, tiny config, whether packed. A trainer makes an engine of the same model for every rollout.
_passed: set[tuple[type[PreTrainedModel] | None, str, bool]] = set()


def check_parity(
    config: PretrainedConfig, model_class: type[PreTrainedModel] | None = None, *, packed: bool = False
) -> None:
    """Compares our attention with the eager one on a tiny model of the class, once in a process.

    Args:
        config: of the model that is to run.
        model_class: its class, if not that of the config.
        packed: whether its linear layers are packed.

    Raises:
        UserError: they differ, so that results would be wrong; or the class cannot be tried.
    """
    tiny = tiny_config(config)
    tried = (model_class, tiny.to_json_string(), packed)
    if tried in _passed:
        return
    plain, model = (tiny_model(tiny, model_class=model_class) for _ in range(2))
    if packed:
        pack_linears(model)
    try:
        with torch.device("cpu"), torch.autocast("cpu", enabled=False):  # whatever the caller has set for other models
            error = _largest_difference(model, plain)
    except Exception as cause:  # whatever its code does when it is called as no one else calls it
        raise UserError(
            f"model type {config.model_type!r} is not supported: a tiny model of its class does not run with paged "
            f"attention ({type(cause).__name__}: {str(cause).splitlines()[0][:160] if str(cause) else ''})"
        ) from cause
    if not error < _TOLERANCE:
        raise UserError(
            f"model type {config.model_type!r} is not supported: on a tiny model of its class paged attention and the "
            f"model's own differ by {error:.2g} standard deviations of the logits"
        )
    _passed.add(tried)


def _largest_difference(model: PreTrainedModel, plain: PreTrainedModel) -> float:
    """Of the logits, in their standard deviations."""
    ours, tokens = _run(model, _prompts(model.config.vocab_size))
    theirs = [_eager(plain, sequence) for sequence in tokens]
    scale = torch.cat(theirs).std()
    differences = torch.stack([(a - b).abs().max() for a, b in zip(ours, theirs, strict=True)])
    return float(differences.max() / scale)  # NaN if any is


def _prompts(vocab_size: int) -> list[npt.NDArray[np.int32]]:
    """A root shared by all, a fork in the middle of a page, a prompt that is a prefix of another."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, 80).astype(np.int32)
    header, left, right = tokens[:22], tokens[22:29], tokens[29:40]
    return [np.r_[header, left], np.r_[header, right], np.r_[header, left, tokens[40:45]], tokens[45:60]]


def _run(
    model: PreTrainedModel, prompts: list[npt.NDArray[np.int32]]
) -> tuple[list[torch.Tensor], list[npt.NDArray[np.int32]]]:
    """Greedy generation through our attention: per prompt the logits [new, V] and all tokens."""
    arena = TokenArena.from_rows(prompts)
    wave = Wave.of(arena, [SamplingParams(max_tokens=_NEW_TOKENS)] * len(prompts))
    layout = KVLayout(layer_specs(model.config), model.dtype.itemsize)
    plan = make_plan(wave, layout, _LIMITS)
    backend, memory = select_attention(model.dtype), plan.memory
    runner = ModelRunner(model, layout, model.dtype, backend, memory.pool_pages, memory.page_size)
    generated = GeneratedTokens(len(plan.sequences))
    scheduler = Scheduler(
        plan,
        arena,
        layout,
        generated,
        max_batch_rows=_LIMITS.max_batch_rows,
        max_batch_tokens=_LIMITS.max_batch_tokens,
    )
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    with paged_attention_of(model):
        while not scheduler.is_done:
            step = scheduler.schedule()
            logits_NV = runner.forward(runner.prepare(step))[torch.from_numpy(step.sampled_logits)]
            generated.append(
                step.sampled,
                logits_NV.argmax(dim=1).numpy().astype(np.int32),
                np.zeros(len(step.sampled), np.float32),
            )
            for sequence, row_V in zip(step.sampled.tolist(), logits_NV, strict=True):
                logits[sequence].append(row_V)
            scheduler.update(step, generated.lengths[step.sampled] == _NEW_TOKENS)
    order = plan.sequences.output_sequence.tolist()
    tokens = [np.r_[prompt, generated.tokens(s)] for prompt, s in zip(prompts, order, strict=True)]
    return [torch.stack(logits[sequence]) for sequence in order], tokens


def _eager(model: PreTrainedModel, tokens: npt.NDArray[np.int32]) -> torch.Tensor:
    """Logits [new, V] from which the last tokens of a sequence were chosen, by the model's own attention."""
    with torch.inference_mode():
        output = model(torch.from_numpy(tokens[:-1].astype(np.int64)).unsqueeze(0), use_cache=False)
    logits: torch.Tensor = output.logits[0, -_NEW_TOKENS:]
    return logits
