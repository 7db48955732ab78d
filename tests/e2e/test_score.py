"""Scoring as users meet it: continuations and choices against transformers' forward pass of each row alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkv.cli.main import main
from batchkv.engine import Engine, plan
from batchkv.errors import UserError
from batchkv.io.write import write_table
from batchkv.progress import Watch
from batchkv.run_folder import open_run_folder
from batchkv.sampling_params import SamplingParams
from batchkv.writer import summary_of
from tests.oracle import score_alone
from tests.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny, tiny_tokenizer

CONTEXT_LENGTH = 512  # of the tiny models
SCORE = SamplingParams(choice_mode="score")
STEM = "the king and the queen were walking in the garden and "


@cache
def engine(family: str = "llama") -> Engine:
    return Engine(FAMILIES[family](), tiny_tokenizer())


def ids_of(text: str, *, special: bool) -> list[int]:
    ids: list[int] = tiny_tokenizer()(text, add_special_tokens=special)["input_ids"]
    return ids


def close(found: Any, expected: Any) -> bool:
    return np.allclose(found, expected, rtol=0, atol=1e-4)


def check(row: dict[str, Any], context: Sequence[int], continuation: Sequence[int], family: str = "llama") -> None:
    """A result row is what the model's own forward pass gives."""
    logprobs, is_greedy = score_alone(engine(family).model, context, continuation)
    assert row["error"] is None
    assert row["token_ids"] == list(continuation)
    assert close(row["logprobs"], logprobs)
    assert row["is_greedy"] == bool(is_greedy.all())
    assert row["num_prompt_tokens"] == len(context)
    assert 0 <= row["num_cached_tokens"] <= len(context)
    assert row["num_generated_tokens"] == 0
    assert row["finish_reason"] == "length"


TEXTS = [(STEM + end, rest) for end in ("then", "there") for rest in ("you", "your", " ring", "young")] + [
    (STEM, "then you"),
    (STEM + "then", "you"),  # twice
    ("a", "b"),
]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_scores_of_texts_are_those_of_each_row_alone(family: str) -> None:
    table = pa.table({"prompt": [a for a, _ in TEXTS], "continuation": [b for _, b in TEXTS], "tag": range(len(TEXTS))})
    result = engine(family).score(table)
    assert result["tag"].to_pylist() == list(range(len(TEXTS)))
    for row, (context, continuation) in zip(result.to_pylist(), TEXTS, strict=True):
        check(row, ids_of(context, special=True), ids_of(continuation, special=False), family)
        assert row["text"] == continuation
    summary = summary_of(result.schema)
    assert summary["prefill_tokens"] == summary["planned_prefill_tokens"]
    assert summary["generated_tokens"] == 0
    assert sum(result["num_prompt_tokens"].to_pylist()) > 4 * summary["prefill_tokens"]


def test_scores_of_token_ids_without_a_tokenizer() -> None:
    random = np.random.default_rng(5)
    contexts = [random.integers(0, VOCAB_SIZE, 30).tolist() for _ in range(2)] * 3
    given = [random.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 5, 9, 5, 2, 1)]
    table = pa.table({"prompt_token_ids": contexts, "continuation": given})
    for row, *tokens in zip(Engine(engine().model).score(table).to_pylist(), contexts, given, strict=True):
        check(row, *tokens)
        assert row["text"] is None


def test_what_is_generated_greedily_is_greedy() -> None:
    prompts = pa.array([[7, 8, 9], [7, 8], [11]])
    generated = engine().run(pa.table({"prompt_token_ids": prompts}), SamplingParams(max_tokens=9, logprobs=True))
    scored = engine().score(pa.table({"prompt_token_ids": prompts, "continuation": generated["token_ids"]}))
    assert scored["is_greedy"].to_pylist() == [True] * 3
    for given, was in zip(scored["logprobs"].to_pylist(), generated["logprobs"].to_pylist(), strict=True):
        assert np.allclose(given, was, atol=1e-5)


@pytest.mark.filterwarnings("error")
def test_what_is_scored_may_fill_the_context_and_be_scored_one_token_behind_it() -> None:
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, CONTEXT_LENGTH + 2).tolist()
    cuts = [(1, 513), (500, 513), (512, 513), (511, 512), (500, 514), (513, 514)]
    table = pa.table(
        {"prompt_token_ids": [tokens[:a] for a, _ in cuts], "continuation": [tokens[a:b] for a, b in cuts]}
    )
    results = engine().score(table).to_pylist()
    for row, (a, b) in zip(results[:4], cuts, strict=False):
        check(row, tokens[:a], tokens[a:b])
    assert [row["error_code"] for row in results[4:]] == ["too_long"] * 2
    assert results[4]["error"].startswith("prompt and continuation have 514 tokens")


def test_a_job_without_continuations_cannot_be_scored() -> None:
    with pytest.raises(UserError, match="no column continuation"):
        engine().score(pa.table({"prompt": ["a"]}))
    with pytest.raises(UserError, match="columns of its own named is_greedy"):
        engine().score(pa.table({"prompt": ["a"], "continuation": ["b"], "is_greedy": [1]}))
    with pytest.raises(UserError, match="without a tokenizer"):
        Engine(engine().model).score(pa.table({"prompt_token_ids": [[5]], "continuation": ["b"]}))


def test_rows_that_cannot_be_scored_are_error_rows() -> None:
    rows = [
        {"prompt": "a", "continuation": "b"},
        {"prompt": "a", "continuation": None},
        {"prompt": "a", "continuation": ""},
        {"prompt": None, "continuation": "b"},
    ]
    result = engine().score(pa.Table.from_pylist(rows)).to_pylist()
    assert [row["error_code"] for row in result] == [None, "bad_parameter", "bad_parameter", "bad_prompt"]
    assert "no continuation to be scored" in result[1]["error"]
    assert result[0]["is_greedy"] is not None
    assert [row["is_greedy"] for row in result[1:]] == [None] * 3
    alone = engine().score(pa.Table.from_pylist(rows[1:]))
    assert "is_greedy" in alone.column_names


def test_continuations_that_are_no_tokens_are_error_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    nothing = Engine(engine().model, tokenizer)
    monkeypatch.setattr("batchkv.rows.continuation_ids", lambda texts, _: [np.zeros(0, np.int32)] * len(texts))
    table = pa.table({"prompt": ["a", "b"], "continuation": ["x", None]})
    result = nothing.run(table, SamplingParams(max_tokens=1))
    assert result["error"].to_pylist() == ["the continuation has no tokens", None]


@pytest.mark.parametrize("kind", ["continuation", "choices"])
def test_rows_go_on_from_a_row_that_was_scored(kind: str) -> None:
    """What was scored, or was the likeliest, stands in the place of what is generated."""
    context, given = ids_of(STEM, special=True), ids_of("you", special=False)
    scored = {"continuation": "you"} if kind == "continuation" else {"choices": ["you"], "choice_mode": "score"}
    rows: list[dict[str, Any]] = [
        {"id": "first", "prompt": STEM, **scored},
        {"id": "next", "prompt_token_ids": [40, 41], "parent": "first"},
        {"id": "same", "prompt_token_ids": [*context, *given, 40, 41]},
    ]
    _, after, same = engine().run(pa.Table.from_pylist(_filled(rows)), SamplingParams(max_tokens=5)).to_pylist()
    assert after["error"] is None
    assert after["token_ids"] == same["token_ids"]
    assert after["num_prompt_tokens"] == same["num_prompt_tokens"]


def _filled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


# --- choices

CHOICES = ["the", "then", "there", "you", "young", " ring"]
CHOICE_ROWS: list[dict[str, Any]] = [
    {"prompt": STEM, "choices": CHOICES},
    {"prompt": STEM, "choices": CHOICES[::-1]},
    {"prompt": STEM, "choices": ["the", "then"], "n": 3},
    {"prompt": "and", "choices": ["ing", "you", "or"], "logprobs": True},
    {"prompt": STEM, "choices": CHOICES},  # twice
    {"prompt": "and you", "choices": ["one"]},
    {"prompt": STEM + "the", "choices": ["n", "re"]},
]


def check_choices(row: dict[str, Any], prompt: str, choices: list[str], family: str = "llama") -> None:
    context = ids_of(prompt, special=True)
    scores = [score_alone(engine(family).model, context, ids_of(choice, special=False))[0] for choice in choices]
    totals = [score.sum() for score in scores]
    best = int(np.argmax(totals))
    assert row["error"] is None
    assert close(row["choice_logprobs"], totals)
    assert row["text"] == choices[best]
    assert row["token_ids"] == ids_of(choices[best], special=False)
    assert row["finish_reason"] == "stop"
    assert (row["sample_index"], row["num_generated_tokens"]) == (0, 0)
    assert row["num_prompt_tokens"] == len(context)
    assert row["logprobs"] is None or close(row["logprobs"], scores[best])


@pytest.mark.parametrize("outputs", [None, 1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_choices_have_the_scores_of_each_alone(
    family: str, outputs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if outputs is not None:
        monkeypatch.setattr("batchkv.waves.MAX_OUTPUTS", outputs)
    table = pa.Table.from_pylist(_filled(CHOICE_ROWS))
    result = engine(family).run(table, SCORE)
    assert result.num_rows == len(CHOICE_ROWS)  # n is nothing to them
    assert result["choice_logprobs"].type == pa.list_(pa.float32())
    for row, asked in zip(result.to_pylist(), CHOICE_ROWS, strict=True):
        check_choices(row, asked["prompt"], asked["choices"], family)
        assert (row["logprobs"] is not None) == bool(asked.get("logprobs"))
    summary = summary_of(result.schema)
    assert (summary["waves"] > 1) == (outputs is not None)
    assert summary["generated_tokens"] == 0
    assert (
        summary["prefill_tokens"]
        == summary["planned_prefill_tokens"]
        == engine(family).plan(table, SCORE).totals.prefill_tokens
    )
    if outputs is None:
        prompts, cached = (np.array(result[name]) for name in ("num_prompt_tokens", "num_cached_tokens"))
        distinct = {tuple(ids_of(row["prompt"], special=True)[: i + 1]) for row in CHOICE_ROWS for i in range(200)}
        # two tokens of the last prompt are computed as another row's choice
        assert len(distinct) - 2 <= sum(prompts - cached) <= len(distinct)
        assert cached[1] == prompts[1]  # as its twin above, or the other way round
        assert summary["prefill_tokens"] < 1.5 * len(distinct)


def test_the_likeliest_choice_is_the_first_of_equals_and_modes_can_be_mixed() -> None:
    rows = _filled(
        [
            {"prompt": "and", "choices": ["you", "or"], "choice_mode": "score"},
            {"prompt": "and", "choices": ["you", "or"], "choice_mode": "generate", "n": 2},
            {"prompt": "and", "choices": ["you", "or"], "choice_mode": None},
            {"prompt": "and", "max_tokens": 3},
            {"prompt": "and", "continuation": "you"},
            {"prompt": "and", "choices": ["you"], "choice_mode": "guess"},
        ]
    )
    result = engine().run(pa.Table.from_pylist(rows)).to_pylist()
    assert [row["sample_index"] for row in result] == [0, 0, 1, 0, 0, 0, 0]
    check_choices(result[0], "and", ["you", "or"])
    assert [row["choice_logprobs"] for row in result[1:]] == [None] * 6
    assert [row["num_generated_tokens"] > 0 for row in result] == [False, True, True, True, True, False, False]
    assert result[5]["is_greedy"] is not None
    check(result[5], ids_of("and", special=True), ids_of("you", special=False))
    assert result[6]["error"].startswith("choice_mode is 'guess'")


def test_choices_that_cannot_be_scored_are_error_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    prompts = [random.integers(0, VOCAB_SIZE, length).tolist() for length in (511, 510, 509, 4)]
    table = pa.table({"prompt_token_ids": prompts, "choices": [["then ", "a"]] * 4, "choice_mode": ["score"] * 4})
    result = engine().run(table).to_pylist()
    assert len(ids_of("then ", special=False)) == 3  # the last one may be behind the context
    assert [row["error_code"] for row in result] == ["too_long", None, None, None]
    without = Engine(engine().model).run(table).to_pylist()
    assert {row["error_code"] for row in without} == {"bad_parameter"}
    assert "no tokenizer" in without[0]["error"]
    monkeypatch.setattr("batchkv.choices.continuation_ids", lambda texts, _: [np.array([5]), np.array([VOCAB_SIZE])])
    assert engine().run(table)["error_code"].to_pylist() == ["bad_token_id"] * 4
    monkeypatch.setattr("batchkv.choices.continuation_ids", lambda texts, _: [np.array([5]), np.zeros(0, np.int32)])
    assert engine().run(table)["error"].to_pylist() == ["choice 1 has no tokens"] * 4


class Stopped(BaseException):
    """Whatever ends a run."""


@pytest.mark.parametrize("outputs", [1 << 16, 2])
def test_a_run_of_scores_that_is_stopped_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outputs: int
) -> None:
    monkeypatch.setattr("batchkv.waves.MAX_OUTPUTS", outputs)
    scored = [{"prompt": a, "continuation": b} for a, b in TEXTS[:5]]
    rows = _filled([*CHOICE_ROWS, *scored])
    write_table(pa.Table.from_pylist(rows), tmp_path / "jobs.parquet")
    small = Engine(engine().model, tiny_tokenizer(), max_batch_rows=2, max_batch_tokens=16)

    def stopping(outputs: int) -> Callable[[int, int], None]:
        left = [6]

        def progress(ended: int, generated: int) -> None:
            left[0] -= ended
            if left[0] <= 0:
                raise Stopped

        return progress

    out = tmp_path / "out.parquet"
    with pytest.raises(Stopped), open_run_folder(out, overwrite=False) as folder:
        small.run_into(folder, tmp_path / "jobs.parquet", SCORE, watch=Watch(on_start=stopping))
    with open_run_folder(out, overwrite=False) as folder:
        summary = small.run_into(folder, tmp_path / "jobs.parquet", SCORE)
    assert 0 < summary["resumed_samples"] < len(rows)
    found, whole = pq.read_table(out).to_pylist(), engine().run(pa.Table.from_pylist(rows), SCORE).to_pylist()
    for row, asked, expected in zip(found, rows, whole, strict=True):
        assert row["token_ids"] == expected["token_ids"]
        if asked["choices"]:
            check_choices(row, asked["prompt"], asked["choices"])
        else:
            check(row, ids_of(asked["prompt"], special=True), ids_of(asked["continuation"], special=False))


# --- the command line


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(FAMILIES["llama"](), tmp_path_factory.mktemp("model"))


@pytest.fixture
def batchkv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_dir: Path) -> Any:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["batchkv", *map(str, arguments), "--model", str(model_dir)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


def write_jobs(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in rows))
    else:
        write_table(pa.Table.from_pylist(_filled(rows)), path)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["text", "ids"])
def test_run_scores_rows_with_a_continuation_among_others(batchkv: Any, tmp_path: Path, ending: str, kind: str) -> None:
    def given(text: str) -> object:
        return text if kind == "text" else ids_of(text, special=False)

    rows: list[dict[str, Any]] = [
        {"id": str(i), "prompt": a, "continuation": given(b)} for i, (a, b) in enumerate(TEXTS)
    ]
    rows.insert(1, {"id": "generated", "prompt": STEM, "max_tokens": 4})
    rows.insert(3, {"id": "chat", "messages": [{"role": "user", "content": "hello"}], "continuation": given("you")})
    jobs, out = write_jobs(tmp_path / f"jobs.{ending}", rows), tmp_path / "out.parquet"
    assert batchkv("run", jobs, "--out", out, "--n", 2)[0] == 0
    result = pq.read_table(out).to_pylist()
    assert [row["id"] for row in result] == [
        "0",
        "generated",
        "generated",
        "1",
        "chat",
        *map(str, range(2, len(TEXTS))),
    ]
    for row in result:
        if row["id"] == "generated":
            assert (row["is_greedy"], row["logprobs"], row["num_generated_tokens"]) == (None, None, 4)
        elif row["id"] == "chat":
            chat = tiny_tokenizer().apply_chat_template(rows[3]["messages"], add_generation_prompt=True)["input_ids"]
            check(row, chat, ids_of("you", special=False))
        else:
            context, continuation = TEXTS[int(row["id"])]
            check(row, ids_of(context, special=True), ids_of(continuation, special=False))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_continuations_that_are_wrong_are_error_rows(batchkv: Any, tmp_path: Path, ending: str) -> None:
    text = [
        {"id": "empty", "prompt": "x", "continuation": ""},
        {"id": "long", "prompt": "x" * 300, "continuation": "y" * 300},
        {"id": "good", "prompt": "x", "continuation": "y"},
        {"id": "waits", "prompt": "x", "continuation": "y", "parent": "good"},
    ]
    ids = [
        {"id": "none", "prompt": "x", "continuation": []},
        {"id": "outside", "prompt": "x", "continuation": [5, VOCAB_SIZE]},
        {"id": "last", "prompt_token_ids": [5], "continuation": [VOCAB_SIZE - 1]},
    ]
    codes = {}
    for name, rows in (("text", text), ("ids", ids)):
        jobs, out = write_jobs(tmp_path / f"{name}.{ending}", rows), tmp_path / f"{name}-out.jsonl"
        code, _, err = batchkv("run", jobs, "--out", out)
        assert code == 3
        assert "rows have errors" in err
        codes |= {row["id"]: row["error_code"] for row in map(json.loads, out.read_text().splitlines())}
    assert codes == {
        "empty": "bad_parameter",
        "long": "too_long",
        "good": None,
        "waits": "bad_parameter",
        "none": "bad_parameter",
        "outside": "bad_token_id",
        "last": None,
    }


def test_choices_from_the_command_line(batchkv: Any, tmp_path: Path, model_dir: Path) -> None:
    jobs, out = write_jobs(tmp_path / "jobs.jsonl", CHOICE_ROWS), tmp_path / "out.jsonl"
    assert batchkv("run", jobs, "--out", out, "--choice-mode", "score")[0] == 0
    for line, asked in zip(out.read_text().splitlines(), CHOICE_ROWS, strict=True):
        check_choices(json.loads(line), asked["prompt"], asked["choices"])
    code, planned, _ = batchkv("plan", jobs, "--choice-mode", "score", "--format", "json")
    assert code == 0
    assert json.loads(planned)["prefill_tokens"] == plan(jobs, SCORE, model=str(model_dir)).totals.prefill_tokens
    _, generated, _ = batchkv("plan", jobs, "--format", "json")
    assert json.loads(generated)["prefill_tokens"] < json.loads(planned)["prefill_tokens"]
    code, _, err = batchkv("run", jobs, "--out", out, "--overwrite", "--choice-mode", "guess")
    assert (code, err.count("\n")) == (2, 1)
    assert "--choice-mode is 'guess'" in err
