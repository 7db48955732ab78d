"""Rollouts for TRL: `GRPOTrainer(..., rollout_func=batchkv.trl_rollout_func)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from batchkv.errors import UserError
from batchkv.random_numbers import row_key
from batchkv.rl.asked import ASKED, OF_ENGINES, check_names
from batchkv.rl.rollout_batch import RolloutBatch
from batchkv.rl.session import rollout

_OPTIONS = ("environment", "max_turns", "stop_token_ids", "record_sampling")
_TRAINERS = tuple(name for name in ("tokenizer", *ASKED) if name not in _OPTIONS)

_CALLS: WeakKeyDictionary[Any, tuple[int, dict[str, int]]] = WeakKeyDictionary()
"""For each trainer the step of its last call, and how many calls there were in it, by mode."""


def trl_rollout_func(prompts: Sequence[Any], trainer: Any, **options: Any) -> dict[str, Any]:
    """What TRL's `GRPOTrainer` takes as `rollout_func` (1.16): completions by the model in training, in place.

    For options: `functools.partial(batchkv.trl_rollout_func, kv_memory="4GiB")`.

    Args:
        prompts, trainer, options: as of `trl_rollout`.

    Returns:
        `prompt_ids`, `completion_ids`, `logprobs`: lists for each incoming prompt, in their order, end tokens kept.

    Raises:
        UserError: as of `trl_rollout`.
    """
    return trl_rollout(prompts, trainer, **options).to_trl()


def trl_rollout(prompts: Sequence[Any], trainer: Any, **options: Any) -> RolloutBatch:
    """One sample for each prompt that a trainer of TRL hands over: it repeats them before.

    Prompts that are the same are computed once. They may be spread over several processes, whose samples are others.

    Random numbers are a function of the trainer's seed, its process, the training step, and how many calls there were
    before in that step; those of an evaluation are others, so that it changes nothing for the training.

    Args:
        prompts: texts, or conversations as lists of messages; token ids are made of them as TRL makes them.
        trainer: its `model` is the policy, its `args` say how it is sampled.
        options: of `batchkv.rollout`: `environment`, `max_turns`, `stop_token_ids`, `record_sampling`, and fields of
            `EngineConfig`. All else is the trainer's: a sample for each prompt, sampled as `GRPOConfig` says.

    Raises:
        UserError: the trainer wants what is not done here, and what to set instead; or as of `batchkv.rollout`.
        TypeError: there is no such option.
    """
    for name in options:
        if name in _TRAINERS:
            raise TypeError(f"{name!r} is the trainer's: trl_rollout_func takes {', '.join(_OPTIONS)}")
    check_names(options, (*_OPTIONS, *OF_ENGINES), "trl_rollout_func")
    _check(trainer)
    args = trainer.args
    return rollout(
        trainer.model,
        _token_ids(prompts, trainer),
        n=1,
        tokenizer=trainer.processing_class,
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p or 0.0,
        seed=_seed(trainer),
        step=trainer.state.global_step,
        **options,
    )


def _check(trainer: Any) -> None:
    """Raises UserError if the trainer's config asks for what would be passed over."""
    args = trainer.args
    if args.repetition_penalty != 1.0:
        raise UserError(f"repetition_penalty {args.repetition_penalty} is not supported, must be 1.0")
    if args.generation_kwargs:
        names = ", ".join(args.generation_kwargs)
        raise UserError(
            f"generation_kwargs has {names}, must be empty: set the fields of GRPOConfig (temperature, top_p, top_k, "
            "min_p, max_completion_length)"
        )
    if not args.temperature > 0:
        raise UserError(f"temperature {args.temperature} must be above 0: the trainer divides logits by it")
    if args.max_completion_length is None:
        raise UserError("max_completion_length is None, must be a number of tokens")
    if getattr(trainer, "environment_factories", None) is not None:
        raise UserError("environment_factory cannot be used with this rollout_func: leave one of them out")


def _token_ids(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Of each prompt, as TRL makes them where it generates itself."""
    if not prompts or isinstance(prompts[0], str):
        ids = trainer.processing_class(text=list(prompts))["input_ids"] if prompts else []
    else:
        _check_only_text(prompts)
        ids = trainer.processing_class.apply_chat_template(
            conversation=list(prompts),
            tools=trainer.tools or None,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )["input_ids"]
    return [list(row) for row in ids]


def _check_only_text(conversations: Sequence[Any]) -> None:
    for row, messages in enumerate(conversations):
        for message in messages:
            parts = message["content"] if isinstance(message.get("content"), list) else []
            for part in parts:
                if part.get("type") != "text":
                    raise UserError(f"prompt {row} has a part of type {part.get('type')!r}, only text is supported")


def _seed(trainer: Any) -> int:
    """Of this call and this process."""
    mode = "train" if trainer.model.training else "eval"
    return row_key(trainer.args.seed, f"{mode}/{_call_number(trainer, mode)}/{trainer.accelerator.process_index}")


def _call_number(trainer: Any, mode: str) -> int:
    """How many calls there were before in this step, in this mode."""
    step = trainer.state.global_step
    then, counts = _CALLS.get(trainer, (step, {}))
    number = counts.get(mode, 0) if then == step else 0
    _CALLS[trainer] = step, (counts if then == step else {}) | {mode: number + 1}
    return number
