"""lm-eval itself on small tasks of its own formats: the model `batchkv` gives what its model `hf` gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from batchkv.errors import UserError  # noqa: E402
from batchkv.lm_eval_model import BatchKV  # noqa: E402
from batchkv.writer import summary_of  # noqa: E402
from tests.tiny_models import FAMILIES, save_tiny, tiny_tokenizer  # noqa: E402

MAX_LENGTH = 512  # of the tiny models
SUM_ERROR = 2e-7  # relative: its model adds up log-probabilities in float32, which has no finer steps at -2,000
WORDS = ["the", "king", "and", "queen", "were", "walking", "in", "garden", "when", "you", "rang", "other", "ring", "on"]


def text(seed: int, words: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


def write_task(folder: Path, name: str, docs: list[dict[str, Any]], shots: list[dict[str, Any]], **task: Any) -> None:
    for split, rows in (("test", docs), ("train", shots)):
        (folder / f"{name}-{split}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {split: str(folder / f"{name}-{split}.json") for split in ("test", "train")}
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "fewshot_split": "train",
        "metadata": {"version": 1},
        **task,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(config))  # which is YAML


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    docs = [
        {
            "question": text(i, 9),
            "choices": [text(100 * i + j, 1 + j) for j in range(4)],
            "label": i % 4,
            "text": text(i, 60 * i),
        }
        for i in range(1, 9)
    ]
    write_task(
        folder,
        "tiny_choice",
        docs,
        docs[:2],
        output_type="multiple_choice",
        doc_to_text="Question: {{question}}\nAnswer:",
        doc_to_choice="{{choices}}",
        doc_to_target="{{label}}",
        num_fewshot=2,
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )
    write_task(
        folder,
        "tiny_generate",
        docs,
        docs[:2],
        output_type="generate_until",
        doc_to_text="Question: {{question}}\nAnswer: ",
        doc_to_target="{{choices[0]}}",
        generation_kwargs={"until": ["\n\n", "z", "é"], "max_gen_toks": 24, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
    )
    write_task(
        folder,
        "tiny_rolling",
        docs,
        docs[:2],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    )
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(FAMILIES["llama"](), tmp_path_factory.mktemp("model"))


@cache
def models(**options: Any) -> tuple[BatchKV, HFLM]:
    hf_options = {k: v for k, v in options.items() if k not in ("max_batch_rows",)}
    return (
        BatchKV(FAMILIES["llama"](), tiny_tokenizer(), **options),
        HFLM(FAMILIES["llama"](), tokenizer=tiny_tokenizer(), **hf_options),
    )


def evaluate(model: str, model_dir: Path, folder: Path, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model,
        model_args={"pretrained": str(model_dir), "dtype": "float32"},
        tasks=["tiny_choice", "tiny_generate", "tiny_rolling"],
        device="cpu",
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        **options,
    )
    return found


def numbers(answers: Any) -> list[Any]:
    """What a model gave for each request of a task, in order."""
    return [answer for sample in sorted(answers, key=lambda one: one["doc_id"]) for answer in sample["filtered_resps"]]


@pytest.mark.parametrize("chat", [False, True])
def test_tasks_have_the_results_of_lm_evals_own_model(model_dir: Path, tasks: Path, chat: bool) -> None:
    ours, theirs = (evaluate(name, model_dir, tasks, apply_chat_template=chat) for name in ("batchkv", "hf"))
    assert ours["results"]["tiny_choice"]["acc,none"] == theirs["results"]["tiny_choice"]["acc,none"]
    assert ours["results"]["tiny_choice"]["acc_norm,none"] == theirs["results"]["tiny_choice"]["acc_norm,none"]
    choices, their_choices = (numbers(found["samples"]["tiny_choice"]) for found in (ours, theirs))
    assert len(choices) == 8 * 4
    np.testing.assert_allclose([one[0] for one in choices], [one[0] for one in their_choices], rtol=0, atol=1e-4)
    assert [one[1] for one in choices] == [one[1] for one in their_choices]
    generated = numbers(ours["samples"]["tiny_generate"])
    assert generated == numbers(theirs["samples"]["tiny_generate"])
    assert len(set(generated)) > 1
    for metric in ("word_perplexity,none", "bits_per_byte,none"):
        assert ours["results"]["tiny_rolling"][metric] == pytest.approx(theirs["results"]["tiny_rolling"][metric], 1e-5)
    rolled, theirs_rolled = (numbers(found["samples"]["tiny_rolling"]) for found in (ours, theirs))
    np.testing.assert_allclose(np.array(rolled, float), np.array(theirs_rolled, float), rtol=SUM_ERROR, atol=1e-4)
    assert ours["config"]["batchkv"]


def test_lm_evals_command_line_with_the_model(model_dir: Path, tasks: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "batchkv.lm_eval_model", "--model", "batchkv", "--tasks", "tiny_choice"]
    command += ["--model_args", f"pretrained={model_dir},dtype=float32,kv_memory=64MiB", "--device", "cpu"]
    command += ["--include_path", str(tasks), "--output_path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = tmp_path.rglob("results*.json")
    accuracy = json.loads(found.read_text())["results"]["tiny_choice"]["acc,none"]
    assert accuracy == evaluate("batchkv", model_dir, tasks)["results"]["tiny_choice"]["acc,none"]


def test_the_entry_point_is_the_model() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((name, target),) = project["entry-points"]["lm_eval.models"].items()
    assert target == f"{BatchKV.__module__}:{BatchKV.__qualname__}"
    assert get_model(name) is BatchKV


def ask(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


PAIRS = [
    ("the king", " and you"),
    ("the king ", "and you"),
    ("the king  ", "then"),
    ("", "the king"),
    ("", "<bos>the king"),
    ("<bos>the king", "you"),
    (text(1, 400), " and the garden"),
    (text(2, 1), text(3, 100)),
    ("the king", " and you"),
]


@pytest.mark.parametrize("options", [{}, {"max_length": 40}, {"add_bos_token": False}, {"prefix_token_id": 9}])
def test_loglikelihood(options: dict[str, Any]) -> None:
    pairs = [pair for pair in PAIRS if "max_length" not in options or len(pair[1]) < 40]
    ours, theirs = (model.loglikelihood(ask("loglikelihood", *pairs)) for model in models(**options))
    np.testing.assert_allclose([one[0] for one in ours], [one[0] for one in theirs], rtol=SUM_ERROR, atol=1e-4)
    assert [one[1] for one in ours] == [one[1] for one in theirs]


@pytest.mark.parametrize("options", [{}, {"max_length": 40}, {"add_bos_token": False}])
@pytest.mark.parametrize("words", [[1, 90, 0, 300, 7]])
def test_loglikelihood_rolling(options: dict[str, Any], words: list[int]) -> None:
    texts = [(text(count, count),) for count in words]
    ours, theirs = (model.loglikelihood_rolling(ask("loglikelihood_rolling", *texts)) for model in models(**options))
    np.testing.assert_allclose(ours, theirs, rtol=SUM_ERROR, atol=1e-4)


def test_texts_are_generated_and_cut_as_by_lm_evals_own_model() -> None:
    ours, theirs = models()
    contexts = [text(seed, 3 + seed) for seed in range(4)] + ["<bos>" + text(9, 5), text(5, 300)]
    whole = [theirs.generate_until(ask("generate_until", (one, {"max_gen_toks": 30})))[0] for one in contexts]
    requests: list[tuple[str, dict[str, Any]]] = []
    for context, answer in zip(contexts, whole, strict=True):
        assert len(answer) > 8
        requests += [
            (context, {"max_gen_toks": 30}),
            (context, {"until": answer[4:6], "max_new_tokens": 30}),
            (context, {"until": [answer[6:9], answer[5:8]], "max_gen_toks": 30, "do_sample": False}),  # overlap
            (context, {"until": [answer[:2]], "max_gen_toks": 30, "temperature": 0.0}),
            (context, {"until": ["never"], "max_gen_toks": 3}),
        ]
    expected = [theirs.generate_until(ask("generate_until", one))[0] for one in requests]
    assert ours.generate_until(ask("generate_until", *requests)) == expected
    assert expected[0] == whole[0]
    assert ours.generate_until(ask("generate_until", (contexts[0], {"until": [""], "max_gen_toks": 30}))) == whole[:1]
    assert expected[1] == whole[0].split(whole[0][4:6])[0]


def test_requests_that_are_sampled_differ_and_come_again() -> None:
    model = models()[0]
    request = ("the king", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 20, "until": []})
    found = model.generate_until(ask("generate_until", *[request] * 4))
    assert len(set(found)) == 4
    assert model.generate_until(ask("generate_until", *[request] * 4)) == found
    greedy = ask("generate_until", ("the king", {"do_sample": False, "temperature": 1.0, "max_gen_toks": 20}))
    assert model.generate_until(greedy * 2) == model.generate_until(greedy) * 2


def test_all_requests_of_a_call_are_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models()[0]
    summaries: list[dict[str, Any]] = []

    def noting(do: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(job: Any) -> Any:
            result = do(job)
            summaries.append(summary_of(result.schema))
            return result

        return noted

    for name in ("score", "run"):
        monkeypatch.setattr(model.engine, name, noting(getattr(model.engine, name)))
    context = text(0, 40)
    model.loglikelihood(ask("loglikelihood", *((context, f" {word}") for word in WORDS)))
    model.generate_until(ask("generate_until", *((context + word, {"max_gen_toks": 2}) for word in WORDS)))
    model.loglikelihood_rolling(ask("loglikelihood_rolling", (text(1, 300),), (text(2, 300),)))
    assert [one["rows"] for one in summaries[:2]] == [len(WORDS)] * 2
    assert len(summaries) == 3
    assert summaries[0]["prefill_tokens"] < len(model.tok_encode(context)) + 10 * len(WORDS)


def test_what_cannot_be_asked() -> None:
    model = models()[0]
    with pytest.raises(UserError, match="arguments num_beams are not known"):
        model.generate_until(ask("generate_until", ("a", {"num_beams": 4})))
    with pytest.raises(UserError, match=f"max_gen_toks is 600, must be less than max_length, {MAX_LENGTH}"):
        model.generate_until(ask("generate_until", ("a", {"max_gen_toks": 600})))
    with pytest.raises(UserError, match="more tokens than max_length"):
        model.loglikelihood(ask("loglikelihood", ("a", "b" * 600)))
    with pytest.raises(UserError, match="request 0 of lm-eval: continuation must be"):
        model.loglikelihood(ask("loglikelihood", ("th", "e")))  # one token together: nothing is left to predict
    with pytest.raises(UserError, match="request 1 of lm-eval: temperature"):
        model.generate_until(ask("generate_until", ("a", {}), ("a", {"temperature": -1})))
    with pytest.raises(UserError, match="there is no tokenizer"):
        BatchKV(model.engine.model)
    assert model.loglikelihood([]) == model.generate_until([]) == model.loglikelihood_rolling([]) == []
