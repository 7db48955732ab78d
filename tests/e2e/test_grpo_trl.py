"""The recipe that trains with TRL, with few steps: what it rewards and writes, and that the reward goes up."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
pytest.importorskip("trl")

from batchkv.errors import UserError
from batchkv.recipes import grpo_trl as recipe

FEW = recipe.Settings(letters=2, warm_up_steps=60, steps=25, report_every=5)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("abc", 1.0), ("acb", 1 / 3), ("ab", 2 / 3), ("abcc", 3 / 4), ("", 0.0), ("cba", 1 / 3), ("bca", 0.0)],
)
def test_rewards_count_letters_that_are_in_place(completion: str, reward: float) -> None:
    assert recipe.in_order_reward(["cab>"], [completion], completion_ids=[[1]]) == [pytest.approx(reward)]


def test_words_are_others_for_each_seed() -> None:
    assert recipe.words(FEW, 5, seed=1) == recipe.words(FEW, 5, seed=1) != recipe.words(FEW, 5, seed=2)
    assert recipe.words(FEW, 5, seed=1) != recipe.words(replace(FEW, seed=1), 5, seed=1)
    assert {len(word) for word in recipe.words(FEW, 5, seed=1)} == {2}


def test_the_reward_goes_up() -> None:
    tokenizer = recipe.make_tokenizer()
    model = recipe.make_policy(tokenizer, FEW)
    recipe.warm_up(model, tokenizer, FEW)
    points = recipe.train(model, tokenizer, FEW)
    assert [point.step for point in points] == [5, 10, 15, 20, 25]
    assert points[-1].reward > points[0].reward + 0.06


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "DEFAULTS", FEW)
    monkeypatch.delenv("TRL_EXPERIMENTAL_SILENCE", raising=False)
    out = tmp_path / "rewards.csv"
    arguments = ["--out", str(out), "--steps", "5", "--letters", "2"]
    result = CliRunner().invoke(recipe.app, arguments)
    assert result.exit_code == 0, result.output
    assert "right answers to new words: " in result.output
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["5"]
    assert 0 < float(rows[0]["reward"]) < 1
    assert CliRunner().invoke(recipe.app, arguments).exit_code == 2  # it exists
    assert "TRL_EXPERIMENTAL_SILENCE" not in os.environ


def test_words_have_at_least_two_letters() -> None:
    with pytest.raises(UserError, match="letters 1 must be from 2 to 40"):
        recipe.Settings(letters=1)
