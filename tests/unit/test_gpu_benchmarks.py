"""The benchmarks for a GPU where there is none: tiny sizes on the CPU, and what they say of all that can go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_end_to_end, kernels, work_items
from benchmarks.attention_cases import Case, Inputs, Shape, largest_error, make_inputs, reference, standard_cases
from benchmarks.attention_peers import FLASH_PAGE, IMPLEMENTATIONS, NotComparedError, flash_pages, sdpa
from benchmarks.device_timing import Roof, Stopwatch
from benchmarks.gpu_jobs import SMOKE_SIZES, JobSizes, TokenJob, make_jobs
from benchmarks.kernels import Measurement, Setup

CPU = torch.device("cpu")
SHAPE = Shape(4, 2, 8, torch.float32, torch.float32)
MACHINE = {
    "gpu": "Card",
    "capability": "sm_90",
    "memory_gib": 80.0,
    "driver": "1.2",
    "torch": "2.13",
    "toolkit": "CUDA 13",
    "triton": "3.9",
    "python": "3.11",
    "compiler": "/usr/bin/gcc",
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Sizes are so small that a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def setup_of(*cases: Case) -> Setup:
    return Setup(cases, SHAPE, CPU, repeats=1, is_smoke=True)


def measure_with(prepare: Callable[[Inputs], Callable[[], torch.Tensor]], case: Case) -> Measurement:
    return kernels.measure("it", prepare, 0, case, setup_of(case), Stopwatch(CPU, 1, 16))


def test_script_refuses_without_a_gpu() -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    script = Path(gpu.__file__).with_name("gpu.sh")
    done = subprocess.run([script], cwd="/", env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu.sh: no GPU: torch ")
    assert "--smoke" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_script_says_which_interpreter_is_not_there() -> None:
    env = {**os.environ, "PYTHON": "no-such-python"}
    script = Path(gpu.__file__).with_name("gpu.sh")
    done = subprocess.run([script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no no-such-python" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled where there is a GPU")
def test_kernels_smoke(tmp_path: Path) -> None:
    table = tmp_path / "kernels.md"
    arguments = ["--smoke", "--one-process", "--only", "batchkv,SDPA", "--markdown", str(table)]
    assert kernels.main(arguments) == 0
    lines = table.read_text().splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith(("| decode", "| prefill"))]
    assert len(rows) == len(kernels.SMOKE_CASES)
    for row in rows:
        assert all(float(cell) > 0 for cell in (row[1], row[5], row[6]))
        assert row[7].endswith("x) ")


def test_end_to_end_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "jobs.md"
    assert gpu_end_to_end.main(["--smoke", "--rounds", "1", "--markdown", str(table)]) == 0
    text = table.read_text()
    assert text.strip() in capsys.readouterr().out
    for job in ("shared header", "document questions", "rollout"):
        assert f"### {job}" in text
    engines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| transformers")]
    assert [row[4].strip() for row in engines] == ["100.0%", "100.0%", ""]
    assert "1 of 3 rounds: no result" in text
    assert text.count("native") + text.count("torch |") == 6


def test_work_items_smoke(tmp_path: Path) -> None:
    table = tmp_path / "work.md"
    work_items.main(["--rows", "20", "--nodes", "8", "--steps", "18", "--markdown", str(table)])
    assert [line.split("|")[1].strip() for line in table.read_text().splitlines()[4:]] == [
        "extended",
        "planned anew",
        "packed",
    ]


@pytest.mark.parametrize("case", [Case(32, 3, 5), Case(0, 1, 7, 7), Case(16, 1, 20, 9), Case(16, 4, 6, 6)])
def test_keys_are_counted_as_they_are_seen(case: Case) -> None:
    inputs = make_inputs(case, SHAPE, CPU)
    assert case.seen_keys == int((inputs.batch.query_positions + 1).sum())
    assert case.live_keys == len(inputs.slots().unique())
    assert case.kv_bytes(SHAPE) == case.live_keys * 2 * 2 * 8 * 4


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_reference_agrees_with_plain_attention(kv_dtype: torch.dtype) -> None:
    case = Case(16, 2, 6, 3)
    inputs = make_inputs(case, replace(SHAPE, kv_dtype=kv_dtype), CPU)
    out_THD, slots_RL = reference(inputs), inputs.slots()
    for token in range(6):
        slots = slots_RL[token // 3, : 20 + token % 3]
        for head in range(4):
            key, value = (pool[slots, head // 2].double() for pool in (inputs.key_SKD, inputs.value_SKD))
            if inputs.key_scale_SK is not None and inputs.value_scale_SK is not None:
                key, value = (
                    vectors * scale[slots, head // 2, None]
                    for vectors, scale in ((key, inputs.key_scale_SK), (value, inputs.value_scale_SK))
                )
            weights = torch.softmax(key @ inputs.query_THD[token, head].double() * 8**-0.5, dim=0)
            torch.testing.assert_close(out_THD[token, head].double(), weights @ value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [Case(2 * FLASH_PAGE, 3, 5), Case(0, 2, FLASH_PAGE + 1, 4)])
def test_larger_pages_hold_the_same_keys(case: Case) -> None:
    inputs = make_inputs(case, SHAPE, CPU)
    slots, table = flash_pages(inputs)
    by_row = slots.view(-1, FLASH_PAGE)[table.long()].flatten(1)
    assert torch.equal(by_row[:, : case.prefix + case.own], inputs.slots())
    assert (table[:, : case.prefix // FLASH_PAGE] == table[0, : case.prefix // FLASH_PAGE]).all()


def test_larger_pages_have_to_fit() -> None:
    with pytest.raises(NotComparedError, match="prefix of 16"):
        flash_pages(make_inputs(Case(16, 2, 2), SHAPE, CPU))


def test_levels_of_a_cascade_are_those_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FlashInfer is told, against the rows' page tables."""
    told: dict[str, Any] = {}

    class Wrapper:
        def __init__(self, levels: int, workspace: torch.Tensor, layout: str) -> None:
            told["levels"] = levels

        def plan(self, *arguments: Any, **options: Any) -> None:
            told["arrays"], told["options"] = arguments[:4], options

    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(MultiLevelCascadeAttentionWrapper=Wrapper))
    inputs = make_inputs(Case(32, 3, 20, 2), SHAPE, CPU)
    IMPLEMENTATIONS["FlashInfer"](inputs)
    queries, ends, pages, last = ([level.tolist() for level in array] for array in told["arrays"])
    assert (told["levels"], queries) == (2, [[0, 6], [0, 2, 4, 6]])
    assert ends == [[0, 2], [0, 2, 4, 6]]
    assert pages == [inputs.batch.page_table[0, :2].tolist(), inputs.batch.page_table[:, 2:].ravel().tolist()]
    assert last == [[16], [4, 4, 4]]


def test_what_is_wrong_is_not_timed() -> None:
    zeros = measure_with(lambda inputs: lambda: torch.zeros_like(inputs.query_THD), Case(16, 2, 3))
    assert (zeros.ms, zeros.note[:12]) == (None, "wrong: off b")
    nothing = measure_with(lambda inputs: lambda: inputs.query_THD * torch.nan, Case(16, 2, 3))
    assert (nothing.ms, nothing.note) == (None, "wrong: off by inf")


def test_failures_stand_in_the_table() -> None:
    def missing(_: Inputs) -> Any:
        import no_such_library  # noqa: F401

    def breaking(_: Inputs) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    def too_large(_: Inputs) -> Any:
        raise torch.cuda.OutOfMemoryError("out")

    case = Case(16, 2, 3)
    notes = [measure_with(prepare, case).note for prepare in (missing, breaking, too_large)]
    assert notes == [
        "not installed (no_such_library)",
        "failed: RuntimeError: CUDA error: an illegal memory access",
        "out of memory",
    ]
    setup = setup_of(case)
    own = Measurement("batchkv", 0, ms=2.0, host_ms=0.5, error=1e-3)
    peers = [replace(measure_with(sdpa, case), implementation="a", ms=3.0), Measurement("b", 0, note=notes[1])]
    text = kernels.report(setup, Roof(1e9, 1e12), [own, *peers], ["batchkv", "a", "b"])
    assert "| 3.000 (1.50x) | failed |" in text
    assert "- b: failed: RuntimeError: CUDA error: an illegal memory access (all cases)" in text


def test_a_process_that_dies_leaves_its_other_cases_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '{"benchmark": {"implementation": "it", "case": 0, "ms": 1.0, "host_ms": 1.0, "error": 0.1, "note": ""}}'
    code = f"print('chatter'); print('{answer}', flush=True); import os; os._exit(9)"
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: popen([sys.executable, "-c", code], **options))
    first, second = kernels.measure_in_process("it", setup_of(Case(16, 2, 3), Case(0, 1, 3, 3)), [])
    assert isinstance(first, Measurement)
    assert isinstance(second, Measurement)
    assert (first.ms, second.ms) == (1.0, None)
    assert second.note.startswith("failed: its process ended with 9")


def test_error_is_relative_to_the_size_of_a_result() -> None:
    expected = torch.full((2, 1, 4), 0.01)
    assert largest_error(expected, expected) == 0
    assert largest_error(expected * 1.5, expected) == pytest.approx(0.5)


def test_standard_cases_are_those_of_the_readme() -> None:
    names = [case.name for case in standard_cases([256, 16384], [16, 1024], 64)]
    assert names == [
        "decode, 16 rows x 64 under 256",
        "decode, 1,024 rows x 64 under 256",
        "decode, 16 rows x 64 under 16k",
        "decode, 1,024 rows x 64 under 16k",
        "prefill, 2,048 at 0",
        "prefill, 2,048 at 8k",
        "prefill, 64 leaves x 32 under 4k",
    ]


def test_jobs_are_the_same_for_the_same_seed() -> None:
    assert make_jobs(100, SMOKE_SIZES) == make_jobs(100, SMOKE_SIZES)
    header, questions, rollout = make_jobs(128_256, JobSizes())
    assert (len(header.prompts), len(questions.prompts), rollout.samples) == (1000, 640, 512)
    assert len({prompt[:2048] for prompt in header.prompts}) == 1
    assert len({prompt[:1000] for prompt in questions.prompts}) == 40


def test_engines_take_turns_and_one_that_fails_is_left_out() -> None:
    job = make_jobs(100, SMOKE_SIZES)[0]
    order: list[str] = []

    def good(part: TokenJob) -> gpu_end_to_end.Outcome:
        order.append("good")
        return gpu_end_to_end.Outcome(1.0, ((1,) * part.max_tokens,) * part.samples)

    def short(part: TokenJob) -> gpu_end_to_end.Outcome:
        order.append("short")
        return gpu_end_to_end.Outcome(1.0, ((1,),) * (part.samples if part.max_tokens == 1 else 0))

    first, second = gpu_end_to_end.take_turns({"batchkv": short, "other": good}, job, 2)
    assert order == ["short", "good", "good", "good"]
    assert (first.outcomes, first.failure[:20]) == ([], "failed: RuntimeError")
    assert len(second.outcomes) == 2
    report = gpu_end_to_end.job_report(job, [first, second])
    assert "| other | 1.00 | 15 |  |" in report  # no ratio to what was not measured


def part(name: str, code: str, needs: tuple[str, ...] = (), timeout_s: float = 60) -> gpu.Part:
    return gpu.Part(name.capitalize(), name, ("-S", "-c", code), needs, timeout_s, gpu.plain_outcome)


def test_what_a_part_does_does_not_stop_the_others(tmp_path: Path) -> None:
    logs = tmp_path / gpu.LOGS
    logs.mkdir()
    parts = [
        part("bad", "print('no'); raise SystemExit(3)"),
        part("lacking", "", needs=("sys", "no_such_module")),
        part("slow", "import time; time.sleep(60)", timeout_s=0.5),
        part("good", f"open({str(logs / 'good.md')!r}, 'w').write('| a |')"),
    ]
    assert gpu.run_parts(parts, MACHINE, tmp_path, dict(os.environ), is_smoke=False) == 1
    text = (tmp_path / "GPU.md").read_text()
    for line in (
        "| GPU | Card, sm_90, 80.0 GiB |",
        "| driver | 1.2 |",
        "| Bad | failed with 3, see the log |",
        "| Lacking | left out: no_such_module not installed |",
        "| Slow | ended after ",
        "| Good | done |",
        "## Good\n\n| a |",
    ):
        assert line in text
    assert (logs / "bad.log").read_text().splitlines()[-1] == "no"
    assert gpu.run_parts(parts[3:], MACHINE, tmp_path, dict(os.environ), is_smoke=False) == 0


def test_counts_of_the_tests_are_read_from_their_report(tmp_path: Path) -> None:
    suites = '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>'
    (tmp_path / "tests.xml").write_text(suites)
    assert gpu.test_outcome(1, tmp_path) == "5 passed, 2 failed, 2 skipped"
    assert gpu.test_outcome(2, tmp_path / "none") == "failed with 2, see the log"


def test_checkout_is_imported_without_an_installation() -> None:
    code = (
        "import batchkv.io, batchkv.kernels, benchmarks;"
        "print(batchkv.__file__, *batchkv.kernels.__path__, benchmarks.__file__, sep='\\n')"
    )
    with gpu.import_folder() as folder:
        env = gpu.environment(folder)
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=gpu.ROOT, env=env, capture_output=True, text=True, check=True
        )
        paths = [Path(line) for line in done.stdout.splitlines()]
        assert paths[:2] == [folder / "batchkv" / "__init__.py", folder / "batchkv" / "kernels"]
        assert [path.resolve() for path in paths] == [
            gpu.ROOT / "batchkv" / "__init__.py",
            gpu.ROOT / "kernels",
            gpu.ROOT / "benchmarks" / "__init__.py",
        ]
        assert "TRITON_INTERPRET" not in env
