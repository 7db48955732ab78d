"""The Triton kernels compiled for GPUs that need not be there: registers, shared memory, instructions.

Triton cannot compile where it interprets, as it may in the process of these tests, so each target is compiled by the
command in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from batchkv.errors import UserError
from batchkv.kernels import triton_attention
from batchkv.kernels.tiles import load_tiles
from batchkv.kernels.triton_attention import TritonAttention
from batchkv.kv_layout import LayerSpec

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
SPEC = LayerSpec(num_heads=8, num_kv_heads=2, key_dim=64, value_dim=64, window=None)

Outcome = dict[str, Any]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "batchkv.kernels.ahead_of_time", *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@cache
def compiled(target: str) -> list[Outcome]:
    """The chosen variants of a target, compiled once for all tests."""
    done = command("--target", target, "--jobs", str(min(2, os.cpu_count() or 1)), "--format", "json")
    assert done.stdout, done.stderr
    outcomes: list[Outcome] = json.loads(done.stdout)
    return outcomes


def attention(target: str) -> list[Outcome]:
    return [outcome for outcome in compiled(target) if outcome["variant"]["kernel"] == "attend_items"]


@pytest.mark.compile
@pytest.mark.parametrize("target", TARGETS)
def test_variants_of_every_kind_compile_and_fit_registers_and_shared_memory(target: str) -> None:
    """Not a register is spilled on sm_80 and sm_90, and hardly any elsewhere."""
    outcomes = compiled(target)
    assert {outcome["variant"]["kernel"] for outcome in outcomes} == {
        "attend_items",
        "merge_states",
        "store_kv",
        "copy_pages",
    }
    most_spilled = 0 if target in ("sm_80", "sm_90") else 16
    for outcome in outcomes:
        is_spill_alone = [problem.split()[0] for problem in outcome["problems"]] == ["spills"]
        assert not outcome["problems"] or is_spill_alone, outcome
        assert outcome["facts"]["spilled_bytes"] <= most_spilled, outcome
        assert outcome["facts"]["registers"] > 0


@pytest.mark.compile
@pytest.mark.parametrize(
    ("target", "few_rows", "many_rows"),
    [
        ("sm_80", "mma.sync", "mma.sync"),
        ("sm_90", "mma.sync", "wgmma"),
        ("sm_100", "mma.sync", "tcgen05.mma"),
        ("gfx942", "mfma", "mfma"),
    ],
)
def test_tiles_of_64_rows_and_more_use_the_matrix_unit_of_the_generation(
    target: str, few_rows: str, many_rows: str
) -> None:
    for outcome in attention(target):
        rows = outcome["variant"]["tile"]["block_m"]
        assert outcome["facts"]["matrix"] == [few_rows if rows < 64 else many_rows], outcome


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_keys_and_values_are_copied_to_shared_memory_while_others_are_multiplied(target: str) -> None:
    assert [outcome for outcome in attention(target) if not outcome["facts"]["async_copies"]] == []


@pytest.mark.compile
def test_tiles_of_sm_80_fit_the_smaller_shared_memory_of_those_that_use_them_too() -> None:
    """sm_86 and sm_89 have 99 KiB; so has sm_120."""
    assert max(outcome["facts"]["shared_bytes"] for outcome in attention("sm_80")) <= 99 * 1024
    assert load_tiles("sm_89").by_head_dim == load_tiles("sm_80").by_head_dim == load_tiles("sm_120").by_head_dim


@pytest.mark.compile
@pytest.mark.parametrize(
    ("target", "head_dim", "tile", "problem"),
    [("sm_90", 128, "128x64x4x3", "spills "), ("sm_80", 256, "16x128x8x5", "bytes of shared memory")],
)
def test_a_tile_that_is_too_large_is_found_out(target: str, head_dim: int, tile: str, problem: str) -> None:
    done = command(
        *("--target", target, "--head-dim", str(head_dim), "--kv-dtype", "bf16", "--tile", tile),
        *("--format", "json"),
    )
    (outcome,) = json.loads(done.stdout)
    assert done.returncode == 1
    (found,) = outcome["problems"]
    assert problem in found


def test_it_refuses_to_run_where_triton_interprets() -> None:
    done = command("--target", "sm_90", TRITON_INTERPRET="1")
    assert done.returncode == 1
    assert done.stderr.startswith("TRITON_INTERPRET is set")


@pytest.mark.parametrize("target", ["sm_80", "sm_86"])
def test_fp8_is_refused_on_gpus_that_have_none(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "target_of", lambda device: target)
    backend = TritonAttention(torch.device("cpu"))
    with pytest.raises(UserError, match=rf"{target}.*int8"):
        backend.allocate(2, 16, SPEC, torch.float8_e4m3fn, torch.device("cpu"))
    assert backend.allocate(2, 16, SPEC, torch.int8, torch.device("cpu")).key_scale_SK is not None
