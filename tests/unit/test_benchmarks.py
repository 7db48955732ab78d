"""The pure parts of the benchmark harness: protocol, ratios, tables. No model, no timing."""

from __future__ import annotations

import importlib.util
import io
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest

from batchkv.errors import UserError
from benchmarks.comparison import Pair, Series, comparison_table, markdown, same_share
from benchmarks.model_files import ModelFiles
from benchmarks.offline import Engines, Job, parse_peers, take_turns
from benchmarks.peer import BATCHKV, PEERS, SCRIPTS, Peer, PeerProcess
from benchmarks.protocol import Failure, Limits, Outcome, parse_failure, parse_outcome, request_line
from benchmarks.results_file import with_section

OUTCOME = Outcome("engine 1", load_s=1.0, run_s=2.0, prompt_tokens=9, generated_tokens=4, token_ids=((1, 2), (3, 4)))
OWN = replace(OUTCOME, version="batchkv 1", load_s=3.0, run_s=1.0, floor_s=0.5)


@pytest.fixture(scope="module")
def peer_side() -> ModuleType:
    """The module that the scripts share, loaded as they load it: by itself."""
    spec = importlib.util.spec_from_file_location("peer_protocol", SCRIPTS / "peer_protocol.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer_protocol"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_arguments_mean_the_same_on_both_sides(peer_side: ModuleType) -> None:
    limits = Limits("bfloat16", kv_tokens=64, max_rows=8, threads=2)
    task = peer_side.parse_task(limits.arguments(Path("a model")))
    assert task == peer_side.Task(Path("a model"), "bfloat16", kv_tokens=64, max_rows=8, threads=2)


def test_every_line_asks_for_a_run(peer_side: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = request_line(Path("/a b.parquet"), 4) + request_line(Path("/c.parquet"), None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert list(peer_side.asked_jobs()) == [
        peer_side.Job(Path("/a b.parquet"), 4),
        peer_side.Job(Path("/c.parquet"), None),
    ]


def test_answer_is_read_back_from_between_what_engines_print(
    peer_side: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    print('INFO half a line {"version": 1}', end="")
    peer_side.answer(peer_side.Answer("engine 1", 1.0, 2.0, 9, 4, [[1, 2], [3, 4]]))
    print('{"bye": true}')
    lines = capsys.readouterr().out.splitlines()
    assert [outcome for line in lines if (outcome := parse_outcome(line))] == [OUTCOME]


@pytest.mark.parametrize("line", ["", "nothing", "{not json", '{"run_s": 1}', "[1]"])
def test_no_answer(line: str) -> None:
    assert parse_outcome(line) is None


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("Traceback\nModuleNotFoundError: No module named 'vllm'\n", "not installed: No module named 'vllm'"),
        ("Traceback\nValueError: too long\n\nINFO bye\n", "failed: ValueError: too long"),
        ("Traceback\ntorch.OutOfMemoryError: no room\n", "failed: torch.OutOfMemoryError: no room"),
        ("Killed\n", "failed: Killed"),
        ("", "failed: exit code -9 and no word"),
    ],
)
def test_last_error_line(stderr: str, reason: str) -> None:
    assert parse_failure(stderr, -9) == Failure(reason)


def test_rows_are_read_with_the_defaults_of_the_format(peer_side: ModuleType, tmp_path: Path) -> None:
    job = tmp_path / "job.parquet"
    columns = {"prompt_token_ids": [[1], [2, 3], [4]], "n": [2, None, 1], "temperature": [1.0, 0.0, None]}
    pl.DataFrame(columns).write_parquet(job)
    rows = peer_side.read_rows(peer_side.Job(job, 2))
    assert [(row.prompt, row.params.n, row.params.max_tokens) for row in rows] == [([1], 2, 256), ([2, 3], 1, 256)]
    assert [row.params.greedy for row in peer_side.read_rows(peer_side.Job(job))] == [False, True, True]
    assert Job.read(job, None) == Job(job, None, 3, (False, False, True, True))


def test_parameters_that_peers_are_not_given_are_refused(peer_side: ModuleType, tmp_path: Path) -> None:
    job = tmp_path / "job.parquet"
    pl.DataFrame({"prompt_token_ids": [[1]], "stop": ["x"]}).write_parquet(job)
    with pytest.raises(ValueError, match="'stop' is not passed on"):
        peer_side.read_rows(peer_side.Job(job))


def test_missing_samples_are_an_error(peer_side: ModuleType) -> None:
    rows = [peer_side.Row([1], peer_side.Params(n=2))]
    for samples in ([[[1]]], [[[1], []]]):
        with pytest.raises(RuntimeError, match="row 0 has 1 samples instead of 2"):
            peer_side.measure(0.0, rows, lambda _, samples=samples: samples, distribution="pytest")


def test_same_share_counts_greedy_samples_only() -> None:
    assert same_share(((1,), (2,), (3,)), ((1,), (9,), (9,)), [True, True, False]) == 0.5
    assert same_share(((1,),), ((2,),), [False]) is None


def test_table_of_medians() -> None:
    runs = [replace(OUTCOME, run_s=seconds, note="so") for seconds in (2.0, 4.0, 3.0)]
    series = [
        Series("batchkv", (Pair(OWN, OWN),) * 3),
        Series("peer", tuple(Pair(OWN, run) for run in runs)),
        Series("late", (Pair(OWN, runs[0]),), Failure("failed: Killed")),
        Series("none", failure=Failure("not installed: a|b")),
    ]
    table = comparison_table(series, [True, True])
    own, peer, late, none = table.to_dicts()
    assert own["run / batchkv"] == "1.00 (1.00–1.00)"
    assert own["floor"] == "50%"
    assert peer["run, s"] == "3.00"
    assert peer["tokens/s"] == "1.3"
    assert peer["run / batchkv"] == "3.00 (2.00–4.00)"
    assert peer["with load / batchkv"] == "1.00 (0.75–1.25)"
    assert peer["floor"] == "17%"
    assert peer["same greedy"] == "100.0%"
    assert peer["note"] == "so"
    assert late["note"] == "1 ratio only: no result; failed: Killed; so"
    assert none["run / batchkv"] == ""
    assert none["note"] == "not installed: a|b"
    lines = markdown(table).splitlines()
    assert len(lines) == 6
    assert "not installed: a\\|b" in lines[-1]


def test_peers_take_turns_with_batchkv_and_failures_are_not_repeated() -> None:
    order = []
    good, bad = PEERS["vllm"], PEERS["max"]

    def run(peer: Peer) -> Outcome | Failure:
        order.append(peer.name)
        return Failure("failed: x") if peer is bad else OWN if peer is BATCHKV else OUTCOME

    own, first, second = take_turns([good, bad], {}, 2, run)
    assert order == ["batchkv", "vllm", "batchkv", "max", "batchkv", "vllm"]
    assert [len(series.pairs) for series in (own, first, second)] == [3, 2, 0]
    assert second.failure == Failure("failed: x")


def test_batchkv_is_run_alone_where_no_peer_is_installed() -> None:
    missing = {"vllm": Failure("not installed: x")}
    own, peer = take_turns([PEERS["vllm"]], missing, 2, lambda _: OWN)
    assert [len(own.pairs), len(peer.pairs)] == [2, 0]
    assert peer.failure == missing["vllm"]


def test_a_failing_batchkv_ends_it() -> None:
    with pytest.raises(UserError, match="batchkv itself failed: x"):
        list(take_turns([PEERS["vllm"]], {}, 1, lambda _: Failure("failed: x")))


def test_peers_are_named() -> None:
    assert parse_peers("all") == list(PEERS.values())
    assert [peer.name for peer in parse_peers("vllm,max")] == ["vllm", "max"]
    with pytest.raises(UserError, match="not one of all, transformers"):
        parse_peers("vlm")


def test_peer_without_an_environment(tmp_path: Path) -> None:
    assert PEERS["vllm"].python(tmp_path) is None
    missing = PEERS["vllm"].missing(ModelFiles(tmp_path, None), tmp_path)
    assert missing == Failure("not installed: there is no vllm/bin/python in --environments")
    assert PEERS["transformers"].missing(ModelFiles(tmp_path, None), tmp_path) is None
    assert PEERS["transformers"].python(tmp_path) == Path(sys.executable)
    assert all((SCRIPTS / peer.script).is_file() for peer in (BATCHKV, *PEERS.values()))


SCRIPT = """
import json, sys
loaded = sys.argv[sys.argv.index("--dtype") + 1]
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    if asked["limit"] == 0:
        sys.exit("ValueError: no rows")
    if asked["limit"] == 9:
        sys.stdin.read()  # for ever
    print("INFO working")
    print(json.dumps(dict(version=loaded, load_s=1.0, run_s=number, prompt_tokens=1, generated_tokens=1,
                          token_ids=[[1]], note="", floor_s=None)), flush=True)
"""


def test_a_process_answers_run_after_run_until_it_fails_or_is_late() -> None:
    process = PeerProcess([sys.executable, "-c", SCRIPT, "--dtype", "x"])
    job = Path("job.parquet")
    outcomes = [process.run(job, None, 60) for _ in range(2)]
    assert [outcome.run_s for outcome in outcomes if isinstance(outcome, Outcome)] == [0, 1]
    assert process.run(job, 9, 0.5) == Failure("failed: no answer within 0.5 s")
    failing = PeerProcess([sys.executable, "-c", SCRIPT, "--dtype", "x"])
    assert failing.run(job, 0, 60) == Failure("failed: ValueError: no rows")


def test_engines_stay_loaded_only_if_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setattr("benchmarks.peer.SCRIPTS", tmp_path)
    peer = Peer("own", "script.py", "own", needs_own=False, dtype="float32")
    files, limits = ModelFiles(tmp_path, None), Limits("bfloat16", kv_tokens=64, max_rows=8, threads=2)

    def numbers(peer: Peer, *, stay_loaded: bool) -> list[float]:
        with Engines(limits, files, tmp_path, stay_loaded=stay_loaded) as engines:
            outcomes = [engines.run(Path("job.parquet"), None, 60, peer) for _ in range(2)]
        assert all(isinstance(outcome, Outcome) and outcome.version == "float32" for outcome in outcomes)
        return [outcome.run_s for outcome in outcomes if isinstance(outcome, Outcome)]

    assert numbers(peer, stay_loaded=True) == [0, 1]
    assert numbers(peer, stay_loaded=False) == [0, 0]
    assert numbers(replace(peer, runs_once=True), stay_loaded=True) == [0, 0]


def test_sections_are_replaced_by_heading() -> None:
    once = with_section("", "a", "one")
    twice = with_section(with_section(once, "b", "two"), "a", "three")
    assert once.startswith("# Results\n")
    assert once.endswith("## a\n\none\n")
    assert twice.split("## ")[1:] == ["b\n\ntwo\n\n", "a\n\nthree\n"]


def test_scripts_import_nothing_of_batchkv() -> None:
    for script in SCRIPTS.glob("*.py"):
        imports = "import batchkv" in script.read_text() or "from batchkv" in script.read_text()
        assert imports == (script.name == BATCHKV.script), script.name


def test_answer_has_the_fields_of_an_outcome(peer_side: ModuleType) -> None:
    names = [field.name for field in fields(peer_side.Answer)]
    assert names == [field.name for field in fields(Outcome)]
