"""batchkv as a model of lm-eval, the evaluation harness: every kind of request of an evaluation is one job.

lm-eval knows the model `batchkv` once this module is imported. `python -m batchkv.lm_eval_model ARGUMENTS` is the
command `lm_eval ARGUMENTS` with it. Prompts, windows and the ends of texts are those of its model `hf`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from batchkv import __version__
from batchkv.config import DEFAULT_MODEL
from batchkv.engine import Engine
from batchkv.errors import UserError

Pair = tuple[list[int], list[int]]  # token ids: context, continuation

_DEFAULT_LENGTH = 2048  # of a model that knows no limit, as in lm-eval
_UNKNOWN_LENGTH = 10**9  # tokenizers without a limit give a number above
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is given
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")


@register_model("batchkv")
class BatchKV(TemplateLM):
    """A model on a batchkv engine.

    Args:
        pretrained: a directory, a `.gguf` file, a hub id, `smollm2`, or a live transformers module.
        tokenizer: a tokenizer or where one is; by default that of `pretrained`.
        max_length: most tokens of a context and what follows it; by default the model's limit.
        add_bos_token: whether texts get special tokens; by default as the tokenizer has it.
        prefix_token_id: stands before texts without a context; by default BOS, else EOS.
        chat_template_args: for the chat template.
        seed: of requests that are sampled.
        batch_size, max_batch_size: for other models; here batches follow from memory.
        config: fields of `EngineConfig`.

    Raises:
        UserError: the model cannot be loaded or is not supported; or there is no tokenizer.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel = DEFAULT_MODEL,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        *,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        seed: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **config: Any,
    ) -> None:
        super().__init__()
        self.engine = Engine(pretrained, tokenizer, **config)
        if self.engine.tokenizer is None:
            raise UserError("lm-eval asks in texts, but there is no tokenizer: give one with tokenizer=")
        self.tokenizer: Any = self.engine.tokenizer
        self.add_bos_token = add_bos_token
        self._device = self.engine.device
        self._max_length, self._prefix_token_id, self._seed = max_length, prefix_token_id, seed
        self._chat_template_args = dict(chat_template_args or {})

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What the first token of a text without a context follows."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """Most tokens that the model computes of one request."""
        known = (
            self._max_length,
            getattr(self.engine.model.config, "max_position_embeddings", None),
            self.tokenizer.model_max_length if self.tokenizer.model_max_length < _UNKNOWN_LENGTH else None,
        )
        return next((int(length) for length in known if length), _DEFAULT_LENGTH)

    @property
    def max_gen_toks(self) -> int:
        """Most tokens generated for a request that does not say."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        """Tells caches of requests apart."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text; without the system's messages if the template does not take them."""
        try:
            return self._render(chat_history, add_generation_prompt)
        except jinja2.exceptions.TemplateError:
            others = [message for message in chat_history if message["role"] != "system"]
            return self._render(others, add_generation_prompt)

    def _render(self, chat_history: list[dict[str, str]], add_generation_prompt: bool) -> str:
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._chat_template_args,
        )
        return str(text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Token ids; by default without special tokens where the text begins with the one that would come first."""
        return self._encode(string, self.tokenizer.decode([self.prefix_token_id]), add_special_tokens)

    def _encode(self, text: str, first: str | None, add_special_tokens: bool | None = None) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = False if first and text.startswith(first) else self.add_bos_token
        how = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        # Not verbose: the tokenizer would warn of its own length limit.
        return list(self.tokenizer.encode(text, verbose=False, **how))

    def get_model_info(self) -> dict[str, Any]:
        """For lm-eval's results."""
        return {
            "batchkv": __version__,
            "model_num_parameters": self.engine.model.num_parameters(),
            "model_dtype": str(self.engine.model.dtype),
        }

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        """The sum of log-probabilities of each continuation, and whether greedy decoding gives it."""
        answers = self._score([(context, continuation) for _, context, continuation in requests])
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, in windows that do not overlap in what they predict."""
        windows: list[Pair] = []
        ends: list[int] = []
        for request in requests:
            of_text = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows.extend(map(make_disjoint_window, of_text))
            ends.append(len(windows))
        of_windows = [logprob for logprob, _ in self._score(windows)]
        totals = [sum(of_windows[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, cut before the first of the strings that end it."""
        rows: list[dict[str, Any]] = []
        stops: list[list[str]] = []
        eos = self.tokenizer.decode([self.eot_token_id])
        for context, options in (request.args for request in requests):
            until = _until(options)
            row = {**_sampling(options, self.max_gen_toks, self._seed), "stop": [*dict.fromkeys([*until, eos])]}
            room = self.max_length - row["max_tokens"]
            if room < 1:
                raise UserError(f"max_gen_toks is {row['max_tokens']}, must be less than max_length, {self.max_length}")
            rows.append({"prompt_token_ids": self._encode(context, self.tokenizer.bos_token)[-room:], **row})
            stops.append(until)
        if not rows:
            return []
        names = dict.fromkeys(name for row in rows for name in row)
        found = self.engine.run(pa.table({name: [row.get(name) for row in rows] for name in names})).to_pylist()
        _check(found)
        texts = self.tokenizer.batch_decode([row["token_ids"] for row in found], skip_special_tokens=True)
        answers = [_cut(text, until) for text, until in zip(texts, stops, strict=True)]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """The continuation of each pair behind its context, which loses its beginning if both are too long."""
        if not pairs:
            return []
        room = [self.max_length + 1 - len(continuation) for _, continuation in pairs]  # the last token is not computed
        if min(room) < 1:
            raise UserError(f"a continuation has more tokens than max_length, {self.max_length}, allows")
        job = pa.table(
            {
                "prompt_token_ids": _lists([context[-n:] for (context, _), n in zip(pairs, room, strict=True)]),
                "continuation": _lists([continuation for _, continuation in pairs]),
            }
        )
        found = self.engine.score(job).select(["logprobs", "is_greedy", "error"]).to_pylist()
        _check(found)
        return [(float(np.sum(row["logprobs"])), bool(row["is_greedy"])) for row in found]


def _lists(rows: list[list[int]]) -> pa.Array:
    return pa.array(rows, pa.list_(pa.int32()))


def _check(rows: Sequence[Mapping[str, Any]]) -> None:
    """An evaluation without some of its answers would be none.

    Raises:
        UserError: names the first request that has an error.
    """
    for number, row in enumerate(rows):
        if row["error"] is not None:
            raise UserError(f"request {number} of lm-eval: {row['error']}")


def _until(options: Mapping[str, Any]) -> list[str]:
    until = options.get("until") or []
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]


def _sampling(options: Mapping[str, Any], max_tokens: int, seed: int) -> dict[str, Any]:
    """The columns of a job from lm-eval's generation arguments.

    Raises:
        UserError: there are arguments that batchkv does not know.
    """
    given = {name: value for name, value in options.items() if value is not None and name not in ("until", "do_sample")}
    limits = [given.pop(name) for name in _MAX_TOKENS if name in given]
    unknown = sorted(set(given) - set(_SAMPLING))
    if unknown:
        raise UserError(f"generation arguments {', '.join(unknown)} are not known: leave them out")
    do_sample = options.get("do_sample")
    temperature = float(given.get("temperature", 1.0 if do_sample else 0.0))
    return {
        "seed": seed,
        **given,
        "max_tokens": int(limits[0] if limits else max_tokens),
        "temperature": 0.0 if do_sample is False else temperature,
    }


def _cut(text: str, until: Sequence[str]) -> str:
    """One after the other, as lm-eval does it: of two that overlap, the first in the list counts."""
    for stop in until:
        text = text.split(stop)[0]
    return text


def main() -> None:
    """lm-eval's command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
