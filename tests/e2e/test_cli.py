"""The command line as users meet it: files in, files out, exit codes, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.feather
import pytest

from batchkv.cli.main import main
from batchkv.run_folder import open_run_folder
from tests.tiny_models import FAMILIES, save_tiny


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(FAMILIES["llama"](), tmp_path_factory.mktemp("model"))


@pytest.fixture
def batchkv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_dir: Path) -> Any:
    """Runs the console script in this process; (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        model = [] if "--model" in arguments or "--help" in arguments else ["--model", str(model_dir)]
        monkeypatch.setattr(sys, "argv", ["batchkv", *map(str, arguments), *model])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def write_jobs(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GOOD = [
    {"id": "a", "prompt": "the king and", "topic": 1},
    {"id": "b", "prompt": "the king and you", "topic": 2},
    {"id": "c", "messages": [{"role": "user", "content": "hello"}], "topic": None},
]


def test_run_writes_one_row_per_sample_in_job_order_with_carried_columns(batchkv: Any, tmp_path: Path) -> None:
    jobs = write_jobs(tmp_path / "jobs.jsonl", *GOOD)
    out, summary = tmp_path / "results.parquet", tmp_path / "summary.json"
    code, stdout, _ = batchkv(
        "run", jobs, "--out", out, "--n", 2, "--temperature", 1, "--max-tokens", 4, "--logprobs", "--summary", summary
    )
    assert code == 0
    assert "3 of 3 rows ok" in stdout
    results = pl.read_parquet(out)
    assert results.columns == [
        "id",
        "sample_index",
        "text",
        "token_ids",
        "finish_reason",
        "logprobs",
        "num_prompt_tokens",
        "num_cached_tokens",
        "num_generated_tokens",
        "error_code",
        "error",
        "topic",
    ]
    assert results["id"].to_list() == ["a", "a", "b", "b", "c", "c"]
    assert results["sample_index"].to_list() == [0, 1, 0, 1, 0, 1]
    assert results["topic"].to_list() == [1, 1, 2, 2, None, None]
    assert results["logprobs"].list.len().to_list() == results["num_generated_tokens"].to_list()
    totals = json.loads(summary.read_text())
    assert totals["prefill_tokens"] == totals["planned_prefill_tokens"]
    assert totals["recomputed_tokens"] == 0
    computed = results["num_prompt_tokens"] - results["num_cached_tokens"]
    assert computed.sum() == totals["prefill_tokens"]


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl"])
def test_results_are_the_same_in_every_format(batchkv: Any, tmp_path: Path, ending: str) -> None:
    jobs = write_jobs(tmp_path / "jobs.jsonl", *GOOD)
    out = tmp_path / f"results.{ending}"
    assert batchkv("run", jobs, "--out", out, "--max-tokens", 4)[0] == 0
    readers = {"parquet": pl.read_parquet, "arrow": pl.read_ipc, "jsonl": pl.read_ndjson}
    results = readers[ending](out)
    assert results["id"].to_list() == ["a", "b", "c"]
    assert results["num_generated_tokens"].to_list() == [4, 4, 4]


def test_bad_rows_become_error_rows_and_the_others_run(batchkv: Any, tmp_path: Path) -> None:
    jobs = write_jobs(
        tmp_path / "jobs.jsonl",
        *GOOD[:2],
        {"id": "a", "prompt": "twice"},
        {"id": "two", "prompt": "x", "messages": [{"role": "user", "content": "x"}]},
        {"id": "cold", "prompt": "x", "temperature": -1},
        {"id": "none", "prompt": "x", "n": 0},
        {"id": "p", "prompt": "x", "top_p": 0},
        {"id": "role", "messages": [{"role": "wizard", "content": "x"}]},
        {"id": "range", "prompt_token_ids": [5, 100000]},
        {"id": "empty", "prompt_token_ids": []},
        {"id": "long", "prompt": "x" * 600},
        {"id": "orphan", "prompt": "x", "parent": "nobody"},
        {"id": "schema", "prompt": "x", "json_schema": {"type": "nothing"}},
    )
    out = tmp_path / "results.parquet"
    code, _, stderr = batchkv("run", jobs, "--out", out, "--max-tokens", 4)
    assert code == 3
    assert "11 of 13 rows have errors" in stderr
    assert "the first: row 2: duplicate_id: " in stderr
    results = pl.read_parquet(out)
    assert len(results) == 13
    codes = dict(zip(results["id"].to_list()[2:], results["error_code"].to_list()[2:], strict=True))
    assert codes == {
        "a": "duplicate_id",
        "two": "bad_prompt",
        "cold": "bad_parameter",
        "none": "bad_parameter",
        "p": "bad_parameter",
        "role": "bad_messages",
        "range": "bad_token_id",
        "empty": "empty_prompt",
        "long": "too_long",
        "orphan": "missing_dependency",
        "schema": "bad_schema",
    }
    assert results.filter(pl.col("error").is_null())["id"].to_list() == ["a", "b"]
    assert batchkv("run", jobs, "--out", out, "--overwrite", "--allow-row-errors", "--max-tokens", 4)[0] == 0


def test_a_row_too_long_for_the_kv_budget_is_an_error_row_that_says_what_it_needs(batchkv: Any, tmp_path: Path) -> None:
    jobs = write_jobs(tmp_path / "jobs.jsonl", GOOD[0], {"id": "long", "prompt": "x" * 400})
    out = tmp_path / "results.parquet"
    code, _, _ = batchkv("run", jobs, "--out", out, "--max-tokens", 4, "--kv-memory", "64KiB")
    assert code == 3
    errors = pl.read_parquet(out)["error"].to_list()
    assert errors[0] is None
    assert "--kv-memory" in errors[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "missing.parquet", "--out", "results.parquet"], "missing.parquet"),
        (["run", "jobs.jsonl", "--out", "results.csv"], ".csv"),
        (["run", "jobs.jsonl", "--out", "nowhere/results.parquet"], "nowhere"),
        (["run", "jobs.jsonl", "--out", "results.parquet", "--top-p", "0"], "top-p"),
        (["run", "jobs.jsonl", "--out", "results.parquet", "--kv-memory", "lots"], "lots"),
        (["run", "jobs.jsonl", "--out", "results.parquet", "--kv-memory", "900TiB"], "more than the"),
        (["run", "jobs.jsonl", "--out", "results.parquet", "--model", "./no-such-model"], "no-such-model"),
        (["run", "jobs.jsonl", "--out", "results.parquet", "--dtype", "int3"], "int3"),
        (["run", "jobs.jsonl", "--out", "results.parquet", "--device", "cuda"], "cuda"),
        (["run", "empty.parquet", "--out", "results.parquet"], "empty.parquet"),
        (["plan", "missing.parquet"], "missing.parquet"),
    ],
)
def test_unusable_input_is_one_line_and_exit_code_2(
    batchkv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jobs(Path("jobs.jsonl"), *GOOD)
    Path("empty.parquet").write_bytes(b"PAR1 is not all of it")
    code, _, stderr = batchkv(*arguments)
    assert code == 2
    assert says in stderr
    assert stderr.startswith("batchkv: ")
    assert len(stderr.strip().splitlines()) == 1
    assert not Path("results.parquet").exists()


def test_results_that_are_there_are_not_overwritten_unless_asked(batchkv: Any, tmp_path: Path) -> None:
    jobs, out = write_jobs(tmp_path / "jobs.jsonl", *GOOD), tmp_path / "results.parquet"
    out.write_text("precious")
    code, _, stderr = batchkv("run", jobs, "--out", out, "--max-tokens", 2)
    assert code == 2
    assert "--overwrite" in stderr
    assert out.read_text() == "precious"
    assert batchkv("run", jobs, "--out", out, "--max-tokens", 2, "--overwrite")[0] == 0
    assert len(pl.read_parquet(out)) == 3


def test_an_empty_job_gives_an_empty_result(batchkv: Any, tmp_path: Path) -> None:
    jobs, out = tmp_path / "jobs.arrow", tmp_path / "results.parquet"
    pyarrow.feather.write_feather(pa.table({"prompt": pa.array([], pa.string())}), str(jobs))
    assert batchkv("run", jobs, "--out", out)[0] == 0
    assert len(pl.read_parquet(out)) == 0


def test_plan_predicts_what_run_then_does(batchkv: Any, tmp_path: Path) -> None:
    jobs, out = write_jobs(tmp_path / "jobs.jsonl", *GOOD), tmp_path / "results.parquet"
    code, stdout, _ = batchkv("plan", jobs, "--max-tokens", 4, "--format", "json")
    planned = json.loads(stdout)
    assert code == 0
    assert batchkv("run", jobs, "--out", out, "--max-tokens", 4, "--summary", tmp_path / "s.json")[0] == 0
    done = json.loads((tmp_path / "s.json").read_text())
    assert done["prefill_tokens"] == planned["prefill_tokens"]
    assert done["peak_kv_tokens"] <= planned["peak_kv_tokens"]
    code, stdout, _ = batchkv("plan", jobs, "--max-tokens", 4)
    assert code == 0
    assert "3 rows" in stdout


def test_quantized_kv_takes_less_memory_in_plan_and_run(batchkv: Any, tmp_path: Path) -> None:
    jobs, out, summary = write_jobs(tmp_path / "jobs.jsonl", *GOOD), tmp_path / "out.parquet", tmp_path / "s.json"
    bytes_per_token = {}
    for kv_dtype in ("auto", "int8", "fp8"):
        options = ("--kv-dtype", kv_dtype, "--max-tokens", 4)
        planned = json.loads(batchkv("plan", jobs, *options, "--format", "json")[1])
        assert batchkv("run", jobs, "--out", out, "--overwrite", "--summary", summary, *options)[0] == 0
        done = json.loads(summary.read_text())
        for name in ("kv_bytes_per_token", "kv_budget_tokens"):
            assert done[name] == planned[name]
        bytes_per_token[done["kv_dtype"]] = done["kv_bytes_per_token"]
    heads = 2 * 2 * 2  # layers, KV heads, keys and values
    assert bytes_per_token == {"float32": heads * 64, "int8": heads * 20, "float8_e4m3fn": heads * 20}


def test_limit_runs_only_the_first_rows(batchkv: Any, tmp_path: Path) -> None:
    jobs, out = write_jobs(tmp_path / "jobs.jsonl", *GOOD), tmp_path / "results.parquet"
    assert batchkv("run", jobs, "--out", out, "--limit", 2, "--max-tokens", 2)[0] == 0
    assert pl.read_parquet(out)["id"].to_list() == ["a", "b"]


def test_stop_strings_cut_the_text_and_keep_the_tokens(batchkv: Any, tmp_path: Path) -> None:
    jobs, out = write_jobs(tmp_path / "jobs.jsonl", *GOOD[:2]), tmp_path / "results.parquet"
    assert batchkv("run", jobs, "--out", out, "--max-tokens", 24)[0] == 0
    whole = pl.read_parquet(out)["text"].to_list()
    stop = whole[0][5:7]
    assert batchkv("run", jobs, "--out", out, "--max-tokens", 24, "--stop", stop, "--overwrite")[0] == 0
    results = pl.read_parquet(out)
    assert results["text"][0] == whole[0][: whole[0].index(stop)]
    assert results["finish_reason"][0] == "stop"
    assert results["num_generated_tokens"][0] < 24
    assert results["text"][1] == whole[1].split(stop)[0]


def test_help_needs_no_torch() -> None:
    code = "import sys, batchkv.cli.main; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_log_tells_what_happens_and_no_row_s_text(batchkv: Any, tmp_path: Path) -> None:
    secret = "the secret of the king"
    jobs = write_jobs(tmp_path / "jobs.jsonl", {"id": "a", "prompt": secret}, {"id": "b", "prompt": secret, "n": 0})
    log = tmp_path / "log.jsonl"
    assert batchkv("run", jobs, "--out", tmp_path / "out.parquet", "--max-tokens", 3, "--log", log)[0] == 3
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["event"] for event in events] == ["started", "read", "wave", "publishing", "finished"]
    assert (events[1]["rows"], events[1]["errors"], events[-1]["samples"]) == (2, 1, 1)
    assert "secret" not in log.read_text()


def test_two_runs_do_not_write_one_result(batchkv: Any, tmp_path: Path) -> None:
    jobs, out = write_jobs(tmp_path / "jobs.jsonl", *GOOD), tmp_path / "out.parquet"
    with open_run_folder(out, overwrite=False):
        code, _, stderr = batchkv("run", jobs, "--out", out)
    assert code == 2
    assert "another run is writing" in stderr
    assert batchkv("run", jobs, "--out", out, "--max-tokens", 2)[0] == 0
    assert not out.with_name("out.parquet.parts").exists()
