"""Options that several verbs have: they are the fields of `EngineConfig` and `SamplingParams`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from batchkv.config import EngineConfig
from batchkv.errors import UserError
from batchkv.sampling_params import SamplingParams

_JOB, _MODEL, _MEMORY, _SAMPLING = (
    "Job",
    "Model",
    "Memory and batches",
    "Sampling (a column of the job file beats these)",
)


def _option(text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


Jobs = Annotated[
    list[str],
    typer.Argument(help="Job files or a glob: .parquet, .arrow, .feather, .ipc, .jsonl, .ndjson.", show_default=False),
]
Model = Annotated[str, _option("A directory, a .gguf file, a hub id or smollm2.", _MODEL)]
Tokenizer = Annotated[str | None, _option("Where the tokenizer is, if not with the model.", _MODEL)]
TrustRemoteCode = Annotated[
    bool, _option("Run code that comes with the model: it can do what you can do.", _MODEL, "--trust-remote-code")
]
Dtype = Annotated[str, _option("auto, float32, bfloat16 or float16.", _MODEL)]
KvDtype = Annotated[str, _option("Of the KV cache: auto is the model's; int8 or fp8 need less memory.", _MODEL)]
Device = Annotated[str, _option("auto, cpu or cuda[:N].", _MODEL)]
Attention = Annotated[str, _option("Kernels: auto, native or torch (CPU), triton (GPU).", _MODEL)]
KvMemory = Annotated[
    str, _option("Most KV cache: 2GiB, 512MiB or a fraction of the device's free memory (0.8).", _MEMORY)
]
MaxBatchTokens = Annotated[int, _option("Most tokens in a forward pass; 0 suits the device.", _MEMORY)]
MaxBatchRows = Annotated[int, _option("Most sequences in flight.", _MEMORY)]
NoPrefixSharing = Annotated[
    bool, _option("Prefill every row on its own: the baseline.", _MEMORY, "--no-prefix-sharing")
]
Deterministic = Annotated[
    bool, _option("Insist on the same bits for a row whatever runs with it.", _MEMORY, "--deterministic")
]
Limit = Annotated[int | None, typer.Option(min=0, help="Only the first N rows.", rich_help_panel=_JOB)]
N = Annotated[int, _option("Samples per row.", _SAMPLING, "--n")]
MaxTokens = Annotated[int, _option("Most tokens generated per sample.", _SAMPLING)]
Temperature = Annotated[float, _option("0 is greedy.", _SAMPLING)]
TopP = Annotated[float, _option("Keep the likeliest tokens with this mass.", _SAMPLING)]
TopK = Annotated[int, _option("Keep the k likeliest tokens; 0 keeps all.", _SAMPLING)]
MinP = Annotated[float, _option("Drop tokens below this share of the likeliest one.", _SAMPLING)]
Seed = Annotated[int, _option("Samples depend on seed, row id, sample and position only.", _SAMPLING)]
Stop = Annotated[list[str] | None, _option("A string that ends the text; repeatable.", _SAMPLING)]
Logprobs = Annotated[bool, _option("Return log-probabilities of the sampled tokens.", _SAMPLING, "--logprobs")]
ChoiceMode = Annotated[
    str, _option("How one of a row's choices is found: generate, or score compares their log-probabilities.", _SAMPLING)
]

DEFAULTS = SamplingParams()


def sampling_params(**flags: Any) -> SamplingParams:
    """Sampling parameters from flags.

    Raises:
        UserError: a flag is out of range.
    """
    try:
        return SamplingParams(**flags)
    except ValueError as error:
        raise UserError(f"--{str(error).replace('_', '-', 1)}") from None


def engine_config(**flags: Any) -> EngineConfig:
    """How a job is executed, from flags.

    Raises:
        UserError: a flag is out of range.
    """
    return EngineConfig(**flags)


def job_paths(jobs: list[str]) -> str | list[str]:
    """One path or glob as it is, several as a list."""
    return jobs[0] if len(jobs) == 1 else jobs
