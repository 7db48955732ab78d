"""`batchkv plan`: what `run` would do, without loading weights."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from batchkv.cli import options
from batchkv.cli.output import ProgressBar, say
from batchkv.config import DEFAULT_KV_MEMORY, DEFAULT_MODEL


class Format(StrEnum):
    text = "text"
    json = "json"


def plan(
    jobs: options.Jobs,
    model: options.Model = DEFAULT_MODEL,
    tokenizer: options.Tokenizer = None,
    trust_remote_code: options.TrustRemoteCode = False,
    dtype: options.Dtype = "auto",
    kv_dtype: options.KvDtype = "auto",
    device: options.Device = "auto",
    kv_memory: options.KvMemory = DEFAULT_KV_MEMORY,
    max_batch_tokens: options.MaxBatchTokens = 0,
    max_batch_rows: options.MaxBatchRows = 256,
    no_prefix_sharing: options.NoPrefixSharing = False,
    n: options.N = options.DEFAULTS.n,
    max_tokens: options.MaxTokens = options.DEFAULTS.max_tokens,
    temperature: options.Temperature = options.DEFAULTS.temperature,
    choice_mode: options.ChoiceMode = options.DEFAULTS.choice_mode,
    limit: options.Limit = None,
    output_format: Annotated[Format, typer.Option("--format", help="text or json.")] = Format.text,
) -> None:
    """Show what `run` would do: shared prefixes, prefill, KV peak. Loads no weights."""
    sampling = options.sampling_params(n=n, max_tokens=max_tokens, temperature=temperature, choice_mode=choice_mode)
    import batchkv

    with ProgressBar() as bar:
        planned = batchkv.plan(
            options.job_paths(jobs),
            sampling,
            model=model,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            kv_memory=kv_memory,
            max_batch_tokens=max_batch_tokens,
            max_batch_rows=max_batch_rows,
            no_prefix_sharing=no_prefix_sharing,
            limit=limit,
            on_progress=bar.prepare,
        )
    say(json.dumps(planned.to_json(), indent=2) if output_format is Format.json else planned.explain())
