"""OpenAI Batch files through the command line: every line of the answer is what the official client reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.test_cli import batchkv, model_dir  # noqa: F401  fixtures

chat = pytest.importorskip("openai.types.chat")
types = pytest.importorskip("openai.types")


def request(custom_id: str, url: str = "/v1/chat/completions", method: str = "POST", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": method, "url": url, "body": {"model": "asked", **body}}


HELLO = [{"role": "user", "content": "hello you"}]
REQUESTS = [
    request("chat", messages=HELLO, n=2, max_tokens=5, logprobs=True),
    request("cold", messages=HELLO, temperature=0, max_completion_tokens=3),
    request("text", "/v1/completions", prompt=["the king", "you and"], max_tokens=4, echo=True),
    request("ids", "/v1/completions", prompt=[5, 6, 7], max_tokens=4, temperature=0),
    request("greedy", messages=HELLO, n=10**9),
    request("nowhere", "/v1/embeddings", input="x"),
    request("long", "/v1/completions", prompt="x" * 600),
    request("choice", messages=HELLO, max_tokens=9, response_format={"type": "json_object"}),
]


def run(batchkv: Any, jobs: Path, out: Path) -> tuple[int, list[dict[str, Any]]]:  # noqa: F811
    code, _, _ = batchkv("run", jobs, "--out", out, "--quiet")
    return code, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture
def answers(batchkv: Any, tmp_path: Path) -> dict[str, dict[str, Any]]:  # noqa: F811
    jobs = tmp_path / "requests.jsonl"
    jobs.write_text("".join(json.dumps(line) + "\n" for line in REQUESTS))
    code, lines = run(batchkv, jobs, tmp_path / "responses.jsonl")
    assert code == 3
    assert [line["custom_id"] for line in lines] == [line["custom_id"] for line in REQUESTS]
    return {line["custom_id"]: line for line in lines}


def test_every_answer_is_of_the_client_s_types(answers: dict[str, dict[str, Any]]) -> None:
    for name in ("chat", "cold", "choice"):
        chat.ChatCompletion.model_validate(answers[name]["response"]["body"])
    for name in ("text", "ids"):
        types.Completion.model_validate(answers[name]["response"]["body"])


def test_samples_prompts_usage_and_reasons(answers: dict[str, dict[str, Any]]) -> None:
    body = answers["chat"]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in body["choices"]} <= {"length", "stop"}
    assert [len(choice["logprobs"]["content"]) for choice in body["choices"]] == [5, 5]
    assert body["usage"]["completion_tokens"] == 10
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 10
    text = answers["text"]["response"]["body"]
    assert [choice["text"][:8] for choice in text["choices"]] == [
        "the king",
        "you and" + text["choices"][1]["text"][7:8],
    ]
    json.loads(answers["choice"]["response"]["body"]["choices"][0]["message"]["content"] or "{}")


def test_errors_of_single_lines(answers: dict[str, dict[str, Any]]) -> None:
    assert answers["greedy"]["response"]["status_code"] == 400
    assert answers["greedy"]["response"]["body"]["error"]["param"] == "n"
    assert answers["nowhere"]["response"] is None
    assert answers["nowhere"]["error"]["code"] == "unsupported"
    assert answers["long"]["response"]["body"]["error"]["code"] == "too_long"
    assert all(answers[name]["error"] is None for name in ("chat", "cold", "text", "ids", "greedy", "long"))


def test_requests_in_parquet_give_the_same_answers(batchkv: Any, tmp_path: Path) -> None:  # noqa: F811
    plain = [request(str(i), messages=HELLO, max_tokens=i + 1, temperature=0) for i in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in plain))
    pq.write_table(pa.Table.from_pylist(plain), tmp_path / "b.parquet")
    bodies = []
    for jobs in ("a.jsonl", "b.parquet"):
        code, lines = run(batchkv, tmp_path / jobs, tmp_path / f"{jobs}.out.jsonl")
        assert code == 0
        bodies.append([line["response"]["body"]["choices"] for line in lines])
    assert bodies[0] == bodies[1]


def test_answers_in_another_format_are_refused_in_one_line(batchkv: Any, tmp_path: Path) -> None:  # noqa: F811
    jobs = tmp_path / "requests.jsonl"
    jobs.write_text(json.dumps(request("a", messages=HELLO)) + "\n")
    code, _, stderr = batchkv("run", jobs, "--out", tmp_path / "out.parquet")
    assert (code, stderr.count("\n")) == (2, 1)
    assert "name a .jsonl file" in stderr
