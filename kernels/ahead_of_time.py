"""Compiles the Triton kernels for GPUs that are not there, and tells what the compilers made of them.

    python -m batchkv.kernels.ahead_of_time --target sm_90

A variant is built by the functions that launch the kernels (`triton_attention`), from tensors without storage, and goes
through Triton's own just-in-time path with a driver that only names the target. So it is the variant that a run takes,
with the same constants and the same assumptions about alignment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from batchkv.kernels.device_work import DeviceWork, WorkSizes
from batchkv.kernels.launch import Launch
from batchkv.kernels.tiles import Tile, load_tiles
from batchkv.kernels.triton_attention import (
    States,
    TritonKV,
    TritonWorkPlan,
    attention_launch,
    copy_launch,
    empty_pages,
    heads_per_item,
    merge_launch,
    store_launch,
    supports_fp8,
)
from batchkv.kv_layout import LayerSpec

_META = torch.device("meta")
_KV_HEADS, _PAGE_SIZE, _WINDOW, _SOFTCAP, _TOKENS = 8, 16, 4096, 50.0, 64


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU to compile for.

    Attributes:
        gpu: what Triton calls it.
        shared_limit: bytes of shared memory that one program may have.
    """

    gpu: GPUTarget
    shared_limit: int


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
HEAD_DIMS = (64, 80, 96, 128, 256)
KV_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
GROUPS = (1, 3, 4, 8)
NO_FLAGS: tuple[str, ...] = ()
ALL_FLAGS = ("window", "softcap", "sinks")


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel as it is compiled.

    Attributes:
        kernel: attend_items, merge_states, store_kv or copy_pages.
        tile: of attend_items.
        kv_dtype: a key of `KV_DTYPES`; queries are fp16 with fp16, else bf16.
        group: query heads per KV head.
        flags: of `ALL_FLAGS`.
    """

    target: str
    kernel: str
    head_dim: int
    tile: Tile | None = None
    kv_dtype: str = "bf16"
    group: int = 4
    flags: tuple[str, ...] = NO_FLAGS


@dataclass(frozen=True, slots=True)
class Facts:
    """What a compiler made of a variant.

    Attributes:
        registers: of a thread.
        spilled_bytes: memory that a thread has for what its registers do not hold.
        shared_bytes: shared memory (LDS) of a program.
        matrix: the instructions that multiply matrices.
        async_copies: copies from global to shared memory that go on while the program computes, of 16 bytes a thread.
        error: why there is nothing else: the compiler's words.
    """

    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    matrix: tuple[str, ...] = ()
    async_copies: int = 0
    error: str = ""


def launch_of(variant: Variant) -> Launch:
    """What a run would launch, with tensors that have no storage."""
    dtype = KV_DTYPES[variant.kv_dtype]
    query_dtype = torch.float16 if variant.kv_dtype == "fp16" else torch.bfloat16
    window = _WINDOW if "window" in variant.flags else None
    spec = LayerSpec(_KV_HEADS * variant.group, _KV_HEADS, variant.head_dim, variant.head_dim, window)
    kv = empty_pages(4, _PAGE_SIZE, spec, dtype, _META)
    if variant.kernel == "copy_pages":
        return copy_launch(kv.key_SKD, _PAGE_SIZE, _work(), 0)
    # heads lie side by side in memory, as a model's projections leave them
    heads = spec.num_kv_heads if variant.kernel == "store_kv" else spec.num_heads
    tokens_HTD = torch.empty(_TOKENS, heads, variant.head_dim, dtype=query_dtype, device=_META).transpose(0, 1)
    if variant.kernel == "store_kv":
        return store_launch(kv.key_SKD, kv.key_scale_SK, tokens_HTD, _work())
    return _attention(variant, spec, kv, tokens_HTD)


def _attention(variant: Variant, spec: LayerSpec, kv: TritonKV, query_HTD: torch.Tensor) -> Launch:
    out_THD = torch.empty(_TOKENS, spec.num_heads, spec.value_dim, dtype=query_HTD.dtype, device=_META)
    states = States(
        torch.empty(_TOKENS, spec.num_heads, spec.value_dim, dtype=torch.float32, device=_META),
        torch.empty(_TOKENS, spec.num_heads, dtype=torch.float32, device=_META),
    )
    sinks_H = torch.empty(spec.num_heads, dtype=query_HTD.dtype, device=_META) if "sinks" in variant.flags else None
    if variant.kernel == "merge_states":
        return merge_launch(_work(), states, out_THD, sinks_H)
    if variant.tile is None:
        raise ValueError(f"{variant} needs a tile")
    plan = TritonWorkPlan((variant.tile,), heads_per_item(spec), spec.window, _work())
    softcap = _SOFTCAP if "softcap" in variant.flags else None
    return attention_launch(kv, plan, 0, query_HTD, out_THD, states, 0.125, softcap, sinks_H)


def _work() -> DeviceWork:
    sizes = WorkSizes(items=(1,), pages=1, tokens=_TOKENS, merged_tokens=1, states=1, copies=1, copy_rounds=1)
    return DeviceWork.allocate(sizes, _META)


class _AbsentDevice:
    """A driver that names a target and cannot run anything: all that Triton asks of it to compile a launch."""

    def __init__(self, target: str) -> None:
        self._target = target

    def get_current_device(self) -> str:
        return self._target  # Triton keeps the variants of each device apart

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self._target].gpu


def compile_variant(variant: Variant) -> Facts:
    """Compiles it, or takes it from Triton's cache.

    Raises:
        RuntimeError: in this process Triton interprets, and compiles nothing.
    """
    _refuse_to_interpret()
    driver.set_active(_AbsentDevice(variant.target))
    try:
        compiled = launch_of(variant).compile()
    except Exception as error:  # of a compiler: any type, and many lines
        return Facts(error=f"{type(error).__name__}: {str(error).strip()[-400:]}")
    is_amd = TARGETS[variant.target].gpu.backend == "hip"
    return _amd_facts(compiled) if is_amd else _nvidia_facts(compiled)


def _refuse_to_interpret() -> None:
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: Triton interprets kernels and cannot compile them; unset it")


def _nvidia_facts(compiled: Any) -> Facts:
    ptx: str = compiled.asm["ptx"]
    usage = _resource_usage(compiled.asm["cubin"])
    # registers that do not suffice are kept in the stack frame, which the kernels need for nothing else
    registers, stack = (int(re.search(rf"{field}:(\d+)", usage)[1]) for field in ("REG", "STACK"))  # type: ignore[index]
    names = ("wgmma", "tcgen05.mma", "mma.sync")
    return Facts(
        registers=registers,
        spilled_bytes=stack,
        shared_bytes=compiled.metadata.shared,
        matrix=tuple(name for name in names if re.search(rf"^\s*(@\S+ )?{re.escape(name)}\b", ptx, re.MULTILINE)),
        async_copies=len(re.findall(r"cp\.async\.cg\.shared\.global[^;]*\], 0x10", ptx)),
    )


def _resource_usage(cubin: bytes) -> str:
    """The line of `cuobjdump`, which Triton's package carries."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _amd_facts(compiled: Any) -> Facts:
    assembly: str = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        return max(int(value) for value in re.findall(rf"\.{name}:\s*(\d+)", assembly))

    return Facts(
        registers=field("vgpr_count"),  # accumulation registers included
        spilled_bytes=4 * field("vgpr_spill_count"),
        shared_bytes=compiled.metadata.shared,
        matrix=("mfma",) if "v_mfma" in assembly else (),
        async_copies=len(re.findall(r"(?:global|buffer)_load_\S+ .*\blds\b", assembly)),
    )


def all_variants(target: str) -> Iterator[Variant]:
    """Every kernel, head dim, tile and KV dtype; flags one at a time and together; group sizes."""
    yield from _small_kernels(target, HEAD_DIMS)
    for head_dim in HEAD_DIMS:
        is_padded = head_dim in (80, 96)  # compiled as 128 is, with masks
        flag_sets = (NO_FLAGS, ALL_FLAGS) if is_padded else (NO_FLAGS, *((flag,) for flag in ALL_FLAGS), ALL_FLAGS)
        yield from _attention_variants(target, head_dim, ["bf16"], flag_sets)
        yield from _attention_variants(target, head_dim, ["fp16", "int8", "fp8"], (NO_FLAGS, ALL_FLAGS))
        for group in () if is_padded else (n for n in GROUPS if n != 4):
            yield from _attention_variants(target, head_dim, ["bf16"], (ALL_FLAGS,), group)


def chosen_variants(target: str) -> Iterator[Variant]:
    """The few that stand for all: they take about a minute a target."""
    yield from _small_kernels(target, (128,))
    for head_dim in (64, 128, 256):
        yield from _attention_variants(target, head_dim, ["bf16"], (NO_FLAGS,))
    smallest, middle, largest = load_tiles(target).tiles(128)
    yield Variant(target, "attend_items", 80, middle, flags=ALL_FLAGS)
    yield Variant(target, "attend_items", 128, largest, flags=ALL_FLAGS)
    for kv_dtype, tile in product(_supported(target, ["int8", "fp8"]), (smallest, largest)):
        yield Variant(target, "attend_items", 128, tile, kv_dtype)


def _small_kernels(target: str, head_dims: Sequence[int]) -> Iterator[Variant]:
    for head_dim in head_dims:
        yield Variant(target, "merge_states", head_dim, flags=("sinks",))
        yield Variant(target, "copy_pages", head_dim)
        for kv_dtype in _supported(target, ["bf16", "int8", "fp8"]):
            yield Variant(target, "store_kv", head_dim, kv_dtype=kv_dtype)


def _attention_variants(
    target: str, head_dim: int, kv_dtypes: Sequence[str], flag_sets: Sequence[tuple[str, ...]], group: int = 4
) -> Iterator[Variant]:
    tiles = load_tiles(target).tiles(head_dim)
    for kv_dtype, flags, tile in product(_supported(target, kv_dtypes), flag_sets, dict.fromkeys(tiles)):
        yield Variant(target, "attend_items", head_dim, tile, kv_dtype, group, flags)


def _supported(target: str, kv_dtypes: Sequence[str]) -> list[str]:
    return [name for name in kv_dtypes if name != "fp8" or supports_fp8(target)]


def compile_all(variants: Sequence[Variant], jobs: int) -> list[Facts]:
    """The facts of each, by so many processes at once."""
    if jobs == 1:
        return [compile_variant(variant) for variant in variants]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_variant, variants))
