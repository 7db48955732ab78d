"""Compiles the Triton kernels for GPUs that are not there, and tells what the compilers made of them.

    python -m batchkv.kernels.ahead_of_time --target sm_90

A variant is built by the functions that launch the kernels (`triton_attention`), from tensors without storage, and goes
through Triton's own just-in-time path with a driver that only names the target. So it is the variant that a run takes,
with the same constants and the same assumptions about alignment.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from batchkv.errors import UserError
from batchkv.kernels.device_work import DeviceWork, WorkSizes
from batchkv.kernels.launch import Launch
from batchkv.kernels.quantization import is_quantized
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
    precision_on,
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
    "sm_89": Target(GPUTarget("cuda", 89, 32), 99 * 1024),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * 1024),
    "sm_120": Target(GPUTarget("cuda", 120, 32), 99 * 1024),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
HEAD_DIMS = (64, 80, 96, 128, 256)
KV_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
GROUPS = (1, 3, 4, 8)
NO_FLAGS: tuple[str, ...] = ()
ALL_FLAGS = ("window", "softcap", "sinks")


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel as it is compiled.

    Attributes:
        kernel: attend_items, merge_states, store_kv or copy_pages.
        tile: of attend_items.
        kv_dtype: a key of `KV_DTYPES`; queries have it too, but bf16 with int8 and fp8.
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
    query_dtype = torch.bfloat16 if is_quantized(dtype) else dtype
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
    precision = precision_on(variant.target)
    plan = TritonWorkPlan((variant.tile,), heads_per_item(spec), spec.window, precision, _work())
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
        UserError: in this process Triton interprets, and compiles nothing.
    """
    _refuse_to_interpret()
    driver.set_active(_AbsentDevice(variant.target))
    try:
        compiled = launch_of(variant).compile()
    except Exception as error:  # of a compiler: any type, and many lines
        return Facts(error=_root_of(error))
    is_amd = TARGETS[variant.target].gpu.backend == "hip"
    return _amd_facts(compiled) if is_amd else _nvidia_facts(compiled)


def _root_of(error: BaseException) -> str:
    """The first of the errors that one led to another: Triton reports every level of inlining."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip()[:400]}"


def _refuse_to_interpret() -> None:
    if triton.knobs.runtime.interpret:
        raise UserError("TRITON_INTERPRET is set: Triton interprets kernels and cannot compile them; unset it")


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
    """Every head dim and tile with every KV dtype, without flags and with all; one flag at a time; group sizes."""
    yield from _small_kernels(target, ("bf16", "int8", "fp8"))
    for head_dim in HEAD_DIMS:
        yield from _attention_variants(target, head_dim, ("bf16",), (NO_FLAGS, ALL_FLAGS))
    for head_dim in (64, 128, 256):  # 80 and 96 are what 128 is, with masks
        yield from _attention_variants(target, head_dim, ("fp16",), (ALL_FLAGS,))
        yield from _attention_variants(target, head_dim, ("int8", "fp8"), (NO_FLAGS, ALL_FLAGS))
    yield from _attention_variants(target, 128, ("bf16",), [(flag,) for flag in ALL_FLAGS])
    for head_dim, group in product((64, 128), GROUPS):
        yield from _attention_variants(target, head_dim, ("bf16",), (ALL_FLAGS,), group)


def chosen_variants(target: str) -> Iterator[Variant]:
    """The few that stand for all."""
    yield from _small_kernels(target, ("bf16", "int8"))
    for head_dim in (64, 128, 256):
        yield from _attention_variants(target, head_dim, ("bf16",), (NO_FLAGS,))
    smallest, middle, largest = load_tiles(target).tiles(128)
    yield Variant(target, "attend_items", 80, middle, flags=ALL_FLAGS)
    yield Variant(target, "attend_items", 128, largest, flags=ALL_FLAGS)
    yield Variant(target, "attend_items", 64, load_tiles(target).tiles(64)[-1], group=3, flags=ALL_FLAGS)
    for kv_dtype, tile in (("int8", largest), ("fp8" if supports_fp8(target) else "int8", smallest)):
        yield Variant(target, "attend_items", 128, tile, kv_dtype)


def _small_kernels(target: str, kv_dtypes: Sequence[str]) -> Iterator[Variant]:
    yield Variant(target, "merge_states", 128, flags=("sinks",))
    yield Variant(target, "copy_pages", 128)
    for kv_dtype in _supported(target, kv_dtypes):
        yield Variant(target, "store_kv", 128, kv_dtype=kv_dtype)


def _attention_variants(
    target: str, head_dim: int, kv_dtypes: Sequence[str], flag_sets: Sequence[tuple[str, ...]], group: int = 4
) -> Iterator[Variant]:
    tiles = load_tiles(target).tiles(head_dim)
    for kv_dtype, flags, tile in product(_supported(target, kv_dtypes), flag_sets, tiles):
        yield Variant(target, "attend_items", head_dim, tile, kv_dtype, group, flags)


def _supported(target: str, kv_dtypes: Sequence[str]) -> list[str]:
    return [name for name in kv_dtypes if name != "fp8" or supports_fp8(target)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A variant and what became of it."""

    variant: Variant
    facts: Facts

    @property
    def problems(self) -> list[str]:
        """Why it should not be used; none if all is well."""
        limit = TARGETS[self.variant.target].shared_limit
        found = [self.facts.error] if self.facts.error else []
        if self.facts.spilled_bytes:
            found.append(f"spills {self.facts.spilled_bytes} bytes")
        if self.facts.shared_bytes > limit:
            found.append(f"needs {self.facts.shared_bytes} bytes of shared memory, and there are {limit}")
        return found


def compile_all(variants: Sequence[Variant], jobs: int) -> Iterator[Outcome]:
    """Each of them in turn, by so many processes at once."""
    if jobs == 1:
        yield from (Outcome(variant, compile_variant(variant)) for variant in variants)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        yield from map(Outcome, variants, pool.map(compile_variant, variants))


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown, a row for each variant."""
    header = ("target", "kernel", "head dim", "tile", "KV", "group", "flags")
    facts = ("registers", "spilled B", "shared B", "matrix", "copies")
    return _markdown([*header, *facts, "problems"], [_row(outcome) for outcome in outcomes])


def _row(outcome: Outcome) -> list[str]:
    variant, facts = outcome.variant, outcome.facts
    return [
        variant.target,
        variant.kernel,
        str(variant.head_dim),
        _tile_name(variant.tile),
        variant.kv_dtype,
        str(variant.group),
        ", ".join(variant.flags),
        str(facts.registers),
        str(facts.spilled_bytes),
        str(facts.shared_bytes),
        ", ".join(facts.matrix),
        str(facts.async_copies),
        "; ".join(" ".join(problem.split()) for problem in outcome.problems),
    ]


def summary(outcomes: Sequence[Outcome]) -> str:
    """Markdown, a row for each tile: the most registers and KiB of shared memory of its variants, by KV dtype."""
    kv_dtypes = [name for name in KV_DTYPES if any(outcome.variant.kv_dtype == name for outcome in outcomes)]
    by_tile: dict[tuple[str, int, str], list[Outcome]] = {}
    for outcome in outcomes:
        variant = outcome.variant
        if variant.kernel == "attend_items":
            key = (variant.target, variant.head_dim, _tile_name(variant.tile))
            by_tile.setdefault(key, []).append(outcome)
    rows = [
        [
            target,
            str(head_dim),
            tile,
            *(_most([o.facts for o in of_tile if o.variant.kv_dtype == name]) for name in kv_dtypes),
            ", ".join(sorted({name for o in of_tile for name in o.facts.matrix})),
            str(min(o.facts.async_copies for o in of_tile)),
            str(max(o.facts.spilled_bytes for o in of_tile)),
            str(len(of_tile)),
        ]
        for (target, head_dim, tile), of_tile in by_tile.items()
    ]
    return _markdown(
        ["target", "head dim", "tile", *kv_dtypes, "matrix", "copies, least", "spilled B, most", "variants"], rows
    )


def _most(facts: Sequence[Facts]) -> str:
    if not facts:
        return ""
    return f"{max(f.registers for f in facts)} / {max(f.shared_bytes for f in facts) / 1024:.0f}"


def _tile_name(tile: Tile | None) -> str:
    return f"{tile.block_m}x{tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages" if tile else ""


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _parse_tile(text: str) -> Tile:
    block_m, block_n, num_warps, num_stages = (int(number) for number in text.split("x"))
    return Tile(block_m, block_n, num_warps, num_stages, keys_per_item=512)


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="batchkv.kernels.ahead_of_time", description=__doc__.split("\n")[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--head-dim", nargs="+", type=int, choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--kv-dtype", nargs="+", choices=KV_DTYPES, default=list(KV_DTYPES))
    parser.add_argument("--all", action="store_true", help="the full matrix: hundreds of variants, seconds each")
    parser.add_argument("--tile", type=_parse_tile, help="ROWSxKEYSxWARPSxSTAGES in place of those in use")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--format", choices=("table", "summary", "json"), default="table")
    return parser.parse_args(arguments)


def _selected(options: argparse.Namespace) -> list[Variant]:
    variants: list[Variant] = []
    for target in options.target:
        if options.tile:
            tried = product(options.head_dim, _supported(target, options.kv_dtype))
            variants += [Variant(target, "attend_items", dim, options.tile, kv, flags=ALL_FLAGS) for dim, kv in tried]
        else:
            variants += all_variants(target) if options.all else chosen_variants(target)
    return [v for v in dict.fromkeys(variants) if v.head_dim in options.head_dim and v.kv_dtype in options.kv_dtype]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles what is asked for and prints it. 1 if any of it should not be used."""
    options = _parse_arguments(arguments)
    variants = _selected(options)
    outcomes = []
    for outcome in compile_all(variants, options.jobs):
        outcomes.append(outcome)
        print(f"{len(outcomes)}/{len(variants)} {outcome.variant} {outcome.problems}", file=sys.stderr)
    if options.format == "json":
        print(json.dumps([{**asdict(outcome), "problems": outcome.problems} for outcome in outcomes]))
    else:
        print(table(outcomes) if options.format == "table" else summary(outcomes))
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
