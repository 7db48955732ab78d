"""The recipe that keeps the best samples: rewards, the choice, its errors, and a run on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

import batchkv
from batchkv.errors import UserError
from batchkv.recipes import best_of_n as recipe
from tests.tiny_models import FAMILIES, save_tiny, tiny_tokenizer

PROMPTS = ["the king and", "ring"]
MESSAGES = [[{"role": "user", "content": text}] for text in PROMPTS]


def count_of_e(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    return [recipe.text_of(completion).count("e") for completion in completions]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so it is 41. No, 1,042.50 dollars.", "1042.50"),
        ("-3", "-3"),
        ("The  Answer\n", "the answer"),
        ("", ""),
    ],
)
def test_answers_are_the_last_number_or_all_of_the_text(text: str, answer: str) -> None:
    assert recipe.answer_of(text) == answer


def test_majority_counts_answers_of_the_same_prompt() -> None:
    prompts = ["a", "a", "a", "b"]
    assert recipe.majority(prompts, ["it is 4", "4", "5", "4"]) == [2 / 3, 2 / 3, 1 / 3, 1.0]
    messages = [[{"role": "assistant", "content": text}] for text in ("4", "5")]
    assert recipe.majority([MESSAGES[0]] * 2, messages) == [0.5, 0.5]


def test_likelihood_is_by_token() -> None:
    assert recipe.likelihood(logprobs=[[-1.0, -3.0], [-2.0]]) == [-2.0, -2.0]


def test_the_best_of_each_prompt_and_the_first_of_equals() -> None:
    best = recipe.best_of([0, 0, 0, 1, 1], [0, 1, 2, 0, 1], list("abcde"), [1.0, 3.0, 3.0, 0.0, -1.0])
    assert best["text"].to_list() == ["b", "d"]
    assert best["sample_index"].to_list() == [1, 0]
    assert best["reward"].to_list() == [3.0, 0.0]
    assert best["mean_reward"].to_list() == pytest.approx([7 / 3, -0.5])


@pytest.mark.parametrize("prompts", [PROMPTS, MESSAGES], ids=["texts", "messages"])
def test_what_a_reward_gets(prompts: list[Any]) -> None:
    seen: dict[str, Any] = {}

    def reward(**given: Any) -> list[float]:
        seen.update(given)
        return count_of_e(**given)

    best = recipe.best_of_n(
        FAMILIES["llama"](), prompts, reward, 3, tokenizer=tiny_tokenizer(), columns={"gold": ["x", "y"]}, max_tokens=6
    )
    assert seen.keys() == {"prompts", "completions", "logprobs", "gold"}
    assert seen["prompts"] == [prompts[0]] * 3 + [prompts[1]] * 3
    assert seen["gold"] == ["x"] * 3 + ["y"] * 3
    assert [len(row) for row in seen["logprobs"]] == [6] * 6
    assert isinstance(seen["completions"][0], str if prompts is PROMPTS else list)
    texts = [recipe.text_of(completion) for completion in seen["completions"]]
    for place, row in enumerate(best.iter_rows(named=True)):
        group = texts[3 * place : 3 * place + 3]
        assert row["text"] == group[row["sample_index"]] == max(group, key=lambda text: text.count("e"))


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0], "returned 1 values for 4 samples"),
        ([1.0, None, 1.0, 1.0], "returned None for sample 1"),
        ([1.0, 1.0, 1.0, float("nan")], "returned nan for sample 3"),
    ],
)
def test_rewards_must_be_numbers(rewards: list[Any], message: str) -> None:
    engine = batchkv.Engine(FAMILIES["llama"](), tiny_tokenizer())
    with pytest.raises(UserError, match=message):
        recipe.best_of_n(engine, PROMPTS, lambda **_: rewards, 2, max_tokens=2)


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(UserError, match="give the policy's tokenizer"):
        recipe.best_of_n(FAMILIES["llama"](), [[1, 2]], count_of_e, 2, max_tokens=2)


def test_rewards_are_loaded_from_files_and_modules(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def short(completions, **_):\n    return [-len(one) for one in completions]\nnumber = 3\n")
    assert recipe.load_reward(f"{file}:short")(completions=["abc"]) == [-3]
    assert recipe.load_reward("batchkv.recipes.best_of_n:majority") is recipe.majority
    assert recipe.load_reward("likelihood") is recipe.likelihood
    for name, message in [
        ("best", "is not likelihood or majority, nor"),
        (f"{file}:long", "cannot be loaded: AttributeError"),
        (f"{tmp_path / 'none.py'}:f", "cannot be loaded: FileNotFoundError"),
        ("no_such_module:f", "cannot be loaded: ModuleNotFoundError"),
        (f"{file}:number", "is not a function"),
    ]:
        with pytest.raises(UserError, match=message):
            recipe.load_reward(name)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"]}, "must be one column of prompt and messages"),
        ({"prompt": ["a"], "messages": ["[]"]}, "must be one column of prompt and messages"),
        ({"prompt": ["a"], "reward": [1]}, "has a column 'reward'"),
        ({"prompt": ["a", None]}, "row 1 has no prompt"),
        ({"prompt": []}, "has no rows"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, columns: dict[str, list[Any]], message: str) -> None:
    pl.DataFrame(columns).write_parquet(tmp_path / "prompts.parquet")
    with pytest.raises(UserError, match=message):
        recipe.read_prompts(tmp_path / "prompts.parquet")


def test_prompt_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, message in [("prompts.txt", "must end in"), ("none.csv", "cannot be read")]:
        with pytest.raises(UserError, match=message):
            recipe.read_prompts(tmp_path / name)


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_command_line(tmp_path: Path, ending: str) -> None:
    model = save_tiny(FAMILIES["llama"](), tmp_path / "model")
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / f"best.{ending}"
    prompts.write_text("".join(json.dumps({"messages": one, "gold": "x"}) + "\n" for one in MESSAGES))
    arguments = ["--prompts", str(prompts), "--out", str(out), "--model", str(model), "--n", "3", "--max-tokens", "4"]
    result = CliRunner().invoke(recipe.app, arguments)
    assert result.exit_code == 0, result.output
    assert "2 prompts; mean reward of a sample -" in result.output
    best = pl.read_parquet(out) if ending == "parquet" else pl.read_ndjson(out)
    assert best.columns == ["messages", "gold", "text", "reward", "sample_index", "mean_reward"]
    assert best["gold"].to_list() == ["x", "x"]
    assert (best["reward"] >= best["mean_reward"]).all()

    again = CliRunner().invoke(recipe.app, arguments)
    assert again.exit_code == 2
    assert "exists; add --overwrite to replace it" in again.output
    bad = CliRunner().invoke(recipe.app, [*arguments, "--overwrite", "--temperature", "-1"])
    assert bad.exit_code == 2
    assert "temperature" in bad.output
