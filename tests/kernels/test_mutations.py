"""The tests of attention fail when the code is wrong: each mutation breaks one thing, and one case must tell.

A mutated copy of a module is run on a case that passes with the module as it is. What a mutation replaces has to be
there exactly once, so that a changed kernel makes these tests fail rather than pass for nothing.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from batchkv.kernels import merge_states, reference, store_kv, torch_cpu, tree_attention, triton_attention, work_items
from batchkv.kernels.attention import AttentionBackend
from tests.kernels.test_attention import DEVICE, FP8, INT8, Case, Node, run

PLAIN = Case(
    nodes=(Node(-1, 37, 0), Node(0, 6, 0), Node(1, 3, 20), Node(1, 0, 1), Node(0, 9, 1)),
    page_size=4,
    window=None,
    group=3,
    num_kv_heads=2,
    head_dim=8,
    value_dim=20,
    softcap=None,
    sinks=False,
    dtype=torch.float32,
    seed=0,
)
ALONE = replace(PLAIN, nodes=(Node(-1, 30, 5),), sinks=True)
LONG = replace(PLAIN, nodes=(Node(-1, 150, 0), Node(0, 3, 90), Node(0, 9, 1)))
WINDOW = replace(PLAIN, window=7)
CAPPED = replace(PLAIN, softcap=2.0)
SINKS = replace(PLAIN, sinks=True)
numbers = itertools.count()

TRITON = [
    (tree_attention, "(distance >= 0)", "(distance >= -1)", PLAIN, None),
    (tree_attention, "is_visible & (distance < window)", "is_visible & (distance <= window)", WINDOW, None),
    (tree_attention, "input_precision=PRECISION) * scale", "input_precision=PRECISION) * scale * 1.01", PLAIN, None),
    (tree_attention, "score = softcap * (2 *", "score = softcap * (2.02 *", CAPPED, None),
    (tree_attention, "score = score * key_scale[None, :]", "score = score * 1.0", PLAIN, INT8),
    (tree_attention, "weight = weight * value_scale[None, :]", "weight = weight * 1.0", PLAIN, INT8),
    (tree_attention, "page_start - k_lo // PAGE_SIZE", "page_start", PLAIN, None),
    (tree_attention, "return out * kept[:, None] + weighted", "return out + weighted", LONG, None),
    (tree_attention, "total = tl.full([BLOCK_M], 1.0,", "total = tl.full([BLOCK_M], 0.0,", ALONE, None),
    (tree_attention, "(largest + tl.log2(tl.where(has_seen, total, 1.0))) * LN2", "largest * LN2", PLAIN, None),
    (tree_attention, "tl.exp2((lse - new_largest) * LOG2E)", "tl.exp2(lse - new_largest)", PLAIN, None),
    (tree_attention, "out = out * kept[:, None] + partial * weight", "out = out + partial * weight", PLAIN, None),
    (tree_attention, "total = tl.full([BLOCK_H], 1.0,", "total = tl.full([BLOCK_H], 0.0,", SINKS, None),
    (store_kv, "slot = tl.load(slots_ptr + token,", "slot = tl.load(slots_ptr + token // 2,", PLAIN, None),
    (store_kv, "(slot < num_slots) & is_element", "(slot < num_slots - 1) & is_element", PLAIN, None),
    (store_kv, "tl.max(tl.abs(x), 1), LARGEST)", "tl.max(tl.abs(x), 1), 126.0)", PLAIN, INT8),
    (store_kv, "0x7FFFF + ((bits >> 20) & 1)", "0", PLAIN, FP8),
]
PLANS = [
    (work_items, "np.minimum(k_hi, lowest + 1) - k_lo", "np.minimum(k_hi, lowest + 64) - k_lo", LONG),
    (work_items, "k_hi = np.minimum(k_hi, highest + 1)", "k_hi = np.minimum(k_hi, highest)", PLAIN),
    (work_items, "lowest - batch.window + 1)", "lowest - batch.window + 3)", WINDOW),
    (work_items, 'np.argsort(token, kind="stable")', "np.arange(len(token))", PLAIN),
    (work_items, "== q_hi - q_lo\n    counts", ">= 0\n    counts", PLAIN),
]
TORCH = [
    (torch_cpu, "distance < 0", "distance < -1", PLAIN, None),
    (torch_cpu, "(distance >= window)", "(distance > window)", WINDOW, None),
    (torch_cpu, ".float() * scale", ".float() * scale * 1.01", PLAIN, None),
    (reference, "(distance_QS >= 0)", "(distance_QS >= -1)", PLAIN, None),
    (reference, "softcap * torch.tanh(scores_HQS / softcap)", "torch.tanh(scores_HQS)", CAPPED, None),
]
MERGES = [
    (merge_states, "sum_TH = sum_TH * weight + torch.exp(sinks - largest)", "sum_TH = sum_TH * weight", SINKS),
    (merge_states, "out_PHD[states] * new_weight.unsqueeze(-1)", "out_PHD[states]", PLAIN),
]


def mutated(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """The module with one thing replaced; from a file, as Triton reads the source of a kernel."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(old) == 1, f"{module.__name__} has {source.count(old)} of {old!r}"
    name = f"{module.__name__.replace('.', '_')}_{next(numbers)}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    mutant = importlib.util.module_from_spec(spec)
    sys.modules[name] = mutant  # dataclasses look their module up
    spec.loader.exec_module(mutant)
    return mutant


def tells(case: Case, backend: AttentionBackend[Any, Any], kv_dtype: torch.dtype | None = None) -> bool:
    """Whether the case finds something wrong."""
    return not run(case, backend, kv_dtype).is_close()


def triton() -> triton_attention.TritonAttention:
    return triton_attention.TritonAttention(DEVICE)


@pytest.mark.parametrize(("case", "kv_dtype"), sorted({(m[3], m[4]) for m in TRITON}, key=str))
def test_the_cases_find_nothing_wrong_with_the_kernels_as_they_are(case: Case, kv_dtype: torch.dtype | None) -> None:
    assert not tells(case, triton(), kv_dtype)


@pytest.mark.parametrize(("module", "old", "new", "case", "kv_dtype"), TRITON)
def test_a_broken_triton_kernel_is_found(
    module: ModuleType,
    old: str,
    new: str,
    case: Case,
    kv_dtype: torch.dtype | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant = mutated(module, old, new, tmp_path)
    for name in ("attend_items", "merge_states", "store_kv", "copy_pages"):
        if hasattr(mutant, name):
            monkeypatch.setattr(triton_attention, name, getattr(mutant, name))
    assert tells(case, triton(), kv_dtype)


@pytest.mark.parametrize(("module", "old", "new", "case"), PLANS)
def test_wrong_work_items_are_found(
    module: ModuleType, old: str, new: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_attention, "plan_work", mutated(module, old, new, tmp_path).plan_work)
    assert tells(case, triton())


@pytest.mark.parametrize(("module", "old", "new", "case", "kv_dtype"), TORCH)
def test_broken_torch_implementations_are_found(
    module: ModuleType, old: str, new: str, case: Case, kv_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    mutant = mutated(module, old, new, tmp_path)
    backend: Callable[[], Any] = mutant.TorchAttention if module is torch_cpu else mutant.ReferenceAttention
    assert not tells(case, torch_cpu.TorchAttention() if module is torch_cpu else reference.ReferenceAttention())
    assert tells(case, backend(), kv_dtype)


@pytest.mark.parametrize(("module", "old", "new", "case"), MERGES)
def test_a_broken_merge_of_the_torch_implementation_is_found(
    module: ModuleType, old: str, new: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_cpu, "KEYS_PER_TILE", 16)
    assert not tells(case, torch_cpu.TorchAttention())
    monkeypatch.setattr(torch_cpu, "merge_states", mutated(module, old, new, tmp_path).merge_states)
    assert tells(case, torch_cpu.TorchAttention())
