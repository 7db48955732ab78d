"""How a job is executed: the fields of `EngineConfig` are the flags of `batchkv run`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from batchkv.errors import UserError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVDtype = Literal["auto", "int8", "fp8"]
Attention = Literal["auto", "native", "torch", "triton"]

DEFAULT_MODEL = "smollm2"
DEFAULT_KV_MEMORY = "2GiB"

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*((?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,2})?)\s*([a-z]*)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Execution options. None of them changes a row's tokens (up to the rounding of `dtype` and `kv_dtype`).

    Attributes:
        model: a directory, a `.gguf` file, a hub id or the alias `smollm2`.
        tokenizer: where the tokenizer comes from, if not from `model`.
        dtype: of weights and activations. `auto` is the checkpoint's, but float32 on a CPU without bf16 instructions.
        kv_dtype: of keys and values in the cache. `auto` is that of the model; `int8` and `fp8` (e4m3) take a byte an
            element and a scale for each vector, and round more.
        device: `auto`, `cpu` or `cuda[:N]`.
        attention: `auto` is the fastest that there is for the device; `triton` is for GPUs (and Triton's interpreter),
            `native` and `torch` for CPUs.
        kv_memory: most bytes of KV cache: `2GiB`, `512MiB`, a byte count, or a fraction (0, 1] of what is
            free on the device.
        max_batch_tokens: most tokens in one forward pass; 0 picks 512 on a CPU and 8192 on a GPU.
        max_batch_rows: most rows in flight at once.
        page_size: tokens per KV page.
        no_prefix_sharing: prefill every row on its own (the baseline).
        trust_remote_code: let transformers run code that comes with the model or its tokenizer. Whoever wrote it can do
            what you can do.
        deterministic: insist that a row's results do not depend, bit for bit, on what else is computed with it.
    """

    model: str = DEFAULT_MODEL
    tokenizer: str | None = None
    dtype: Dtype = "auto"
    kv_dtype: KVDtype = "auto"
    device: str = "auto"
    attention: Attention = "auto"
    kv_memory: str | int | float = DEFAULT_KV_MEMORY
    max_batch_tokens: int = 0
    max_batch_rows: int = 256
    page_size: int = 16
    no_prefix_sharing: bool = False
    trust_remote_code: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Dtype):
            raise UserError(f"--dtype {self.dtype!r} is not one of {', '.join(get_args(Dtype))}")
        if self.kv_dtype not in get_args(KVDtype):
            raise UserError(f"--kv-dtype {self.kv_dtype!r} is not one of {', '.join(get_args(KVDtype))}")
        if self.attention not in get_args(Attention):
            raise UserError(f"--attention {self.attention!r} is not one of {', '.join(get_args(Attention))}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise UserError(f"--device {self.device!r} is not auto, cpu, cuda or cuda:N")
        if self.max_batch_tokens < 0:
            raise UserError(f"--max-batch-tokens {self.max_batch_tokens} must be at least 1")
        if self.max_batch_rows < 1:
            raise UserError(f"--max-batch-rows {self.max_batch_rows} must be at least 1")
        if self.page_size < 1:
            raise UserError(f"page_size {self.page_size} must be at least 1")
        parse_memory_size(self.kv_memory, free_bytes=1 << 40)

    def batch_tokens(self, device_type: str) -> int:
        """Tokens per forward pass on `device_type`; larger steps gain nothing on a CPU."""
        return self.max_batch_tokens or (512 if device_type == "cpu" else 8192)


def parse_memory_size(size: str | int | float, *, free_bytes: int) -> int:
    """Bytes of `size`: `2GiB`, `512MiB`, `1e9`-style plain bytes, or a fraction in (0, 1] of `free_bytes`.

    Raises:
        UserError: if `size` is not of these forms or is not positive.
    """
    match = _SIZE.fullmatch(str(size))
    unit = match.group(2).lower() if match else ""
    number = float(match.group(1)) if match else math.nan
    if unit not in _UNITS or not math.isfinite(number):
        raise UserError(f"--kv-memory {size!r} is no size: use 2GiB, 512MiB or a fraction such as 0.8")
    is_fraction = not unit and number <= 1
    if not unit and not is_fraction and number % 1:
        raise UserError(f"--kv-memory {size!r} is neither a fraction up to 1 nor whole bytes: name a unit, as in 2GiB")
    size_in_bytes = int(number * (free_bytes if is_fraction else _UNITS[unit]))
    if size_in_bytes <= 0:
        raise UserError(f"--kv-memory {size!r} must be more than nothing: use 2GiB, 512MiB or a fraction such as 0.8")
    return size_in_bytes
