"""The labelling recipe without a model: prompts, reading of answers, scores, and its errors."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from batchkv.errors import UserError
from batchkv.recipes import label as recipe

LABELS = ("billing", "bug", "account")


def texts(**columns: list[str | None]) -> pl.DataFrame:
    return pl.DataFrame({"text": ["first", "second"], "category": ["bug", "Billing"]} | columns)


def results(answers: list[str | None], gold: list[str | None]) -> pl.DataFrame:
    """What the engine gives back; no answer stands for an error row."""
    failed = [answer is None for answer in answers]
    return pl.DataFrame(
        {
            "id": list(range(len(answers))),
            "text": answers,
            "error_code": ["too_long" if bad else None for bad in failed],
            "error": ["9000 tokens" if bad else None for bad in failed],
            "input": [f"input {i}" for i in range(len(answers))],
            "gold": pl.Series(gold, dtype=pl.String),
        },
        schema_overrides={"text": pl.String, "error_code": pl.String, "error": pl.String},
    )


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (" billing", "billing"),
        ("Billing.", "billing"),
        (" **BUG**: the app", "bug"),
        ('"account" because', "account"),
        ("bug\nTicket:", "bug"),
        ("bug - the pump", "bug"),
        ("bugs", "unknown"),
        ("bug-free", "unknown"),
        ("it is a bug", "unknown"),
        ("bi", "unknown"),
        ("", "unknown"),
    ],
)
def test_label_is_read_from_the_start_of_an_answer(answer: str, expected: str) -> None:
    assert recipe.parse_label(answer, LABELS) == expected


def test_longest_label_wins_and_white_space_is_folded() -> None:
    assert recipe.parse_label(" Very   high risk", ("very", "very high")) == "very high"
    assert recipe.parse_label(" C++ code", ("c", "c++")) == "c++"


def test_list_of_labels() -> None:
    assert recipe.parse_labels(" billing, bug ,account,") == LABELS


@pytest.mark.parametrize("text", ["", "bug", "bug,Bug", "bug,unknown", "bug,error"])
def test_useless_lists_of_labels_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--labels"):
        recipe.parse_labels(text)


def test_jobs_have_prompts_parameters_and_gold() -> None:
    jobs = recipe.build_jobs(
        texts(), text_column="text", template="{{ labels|join('/') }}: {{ text }}\nLabel:\n", labels=LABELS,
        label_column="category", max_tokens=4,
    )  # fmt: skip
    assert jobs["prompt"].to_list() == [f"billing/bug/account: {t}\nLabel:" for t in ("first", "second")]
    assert jobs["id"].to_list() == [0, 1]
    assert jobs["max_tokens"].to_list() == [4, 4]
    assert jobs["stop"].to_list() == [["\n"], ["\n"]]
    assert jobs["gold"].to_list() == ["bug", "billing"]


def test_other_columns_are_for_the_template_and_ids() -> None:
    frame = texts(title=["A", "B"], key=["x", "y"])
    jobs = recipe.build_jobs(
        frame, text_column="text", template="{{ title }}: {{ text }}", labels=LABELS, id_column="key"
    )
    assert jobs["prompt"].to_list() == ["A: first", "B: second"]
    assert jobs["id"].to_list() == ["x", "y"]
    assert jobs["gold"].null_count() == 2


def test_a_row_without_text_has_no_prompt() -> None:
    frame = pl.DataFrame({"text": ["fine", None, "  "]})
    jobs = recipe.build_jobs(frame, text_column="text", template="{{ text }}", labels=LABELS)
    assert jobs["prompt"].to_list() == ["fine", None, None]


def test_braces_in_a_text_are_not_a_template() -> None:
    frame = pl.DataFrame({"text": ["{{ labels }} {% raw %}"]})
    jobs = recipe.build_jobs(frame, text_column="text", template="> {{ text }}", labels=LABELS)
    assert jobs["prompt"].to_list() == ["> {{ labels }} {% raw %}"]


def test_built_in_templates_end_where_the_label_begins() -> None:
    for template in recipe.TEMPLATES.values():
        jobs = recipe.build_jobs(texts(), text_column="text", template=template, labels=LABELS)
        assert all(prompt.endswith(":") and "first" not in prompt for prompt in jobs["prompt"][1:])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ txt }}", "'txt' is undefined; it may use text, labels"),
        ("{{ category }}", "'category' is undefined"),  # gold labels are kept out of prompts
        ("{{ text.__class__.__mro__ }}", "unsafe"),
        ("{{ text / 2 }}", "cannot be rendered"),
        ("a\n{% if %}", "line 2"),
    ],
)
def test_wrong_templates_are_the_users_errors(template: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        recipe.build_jobs(texts(), text_column="text", template=template, labels=LABELS, label_column="category")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("column", ["text_column", "label_column", "id_column"])
def test_a_missing_column_is_named(column: str) -> None:
    arguments = {"text_column": "text", column: "nope"}
    with pytest.raises(UserError, match="no column 'nope'; the columns are text, category"):
        recipe.build_jobs(texts(), template="{{ text }}", labels=LABELS, **arguments)


def test_results_become_labels() -> None:
    labelled = recipe.label_results(results([" Bug", "maybe", None], ["bug", "bug", None]), LABELS)
    assert labelled.columns == ["id", "text", "label", "gold", "output", "error"]
    assert labelled["text"].to_list() == ["input 0", "input 1", "input 2"]
    assert labelled["label"].to_list() == ["bug", "unknown", None]
    assert labelled["error"].to_list() == [None, None, "too_long: 9000 tokens"]


def test_score_counts_unknown_and_errors_as_wrong() -> None:
    answers = [" bug", " bug", " billing", "?", None, " account"]
    gold = ["bug", "billing", "billing", "bug", "bug", None]
    result = recipe.score(recipe.label_results(results(answers, gold), LABELS), LABELS)
    assert (result.rows, result.correct, result.unknown, result.errors) == (5, 2, 1, 1)
    assert result.accuracy == pytest.approx(0.4)
    assert result.confusion.columns[1:] == [*LABELS, "unknown", "error"]
    assert result.confusion.rows() == [
        ("billing", 1, 1, 0, 0, 0),
        ("bug", 0, 1, 0, 1, 1),
        ("account", 0, 0, 0, 0, 0),
    ]
    assert "accuracy 0.400 (2 of 5" in recipe.describe(result)


def test_a_gold_label_that_is_none_of_the_labels_is_shown() -> None:
    result = recipe.score(recipe.label_results(results([" bug", "other"], ["other", "bug"]), LABELS), LABELS)
    assert result.correct == 0
    assert result.confusion.rows()[-1] == ("other", 0, 1, 0, 0, 0)


def test_nothing_to_score() -> None:
    assert recipe.score(recipe.label_results(results([" bug"], [None]), LABELS), LABELS).accuracy == 0


@pytest.mark.parametrize("name", ["labels.csv", "labels.parquet"])
def test_labels_are_written_as_the_ending_says(tmp_path: Path, name: str) -> None:
    labelled = recipe.label_results(results([" bug"], ["bug"]), LABELS)
    recipe.write_labels(labelled, tmp_path / name)
    read = pl.read_csv if name.endswith(".csv") else pl.read_parquet
    assert read(tmp_path / name)["label"].to_list() == ["bug"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(recipe.app, list(arguments))
    return result.exit_code, result.stderr


def test_mistakes_end_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    csv = tmp_path / "in.csv"
    texts().write_csv(csv)
    good = ["--csv", str(csv), "--text-column", "text", "--labels", "bug,billing"]
    cases = [
        ([*good, "--out", str(tmp_path / "out.txt")], ".csv or .parquet"),
        ([*good, "--out", str(tmp_path / "no" / "out.csv")], "does not exist"),
        ([*good, "--out", str(csv)], "--overwrite"),
        ([*good, "--out", str(tmp_path / "o.csv"), "--template", "no.txt"], "--template 'no.txt'"),
        ([*good, "--out", str(tmp_path / "o.csv"), "--label-column", "gold"], "no column 'gold'"),
        ([*good, "--out", str(tmp_path / "o.csv"), "--csv", "no.csv"], "--csv 'no.csv'"),
    ]
    for arguments, message in cases:
        code, stderr = run(*arguments)
        assert code == 2, arguments
        assert message in stderr
        assert stderr.count("\n") == 1


def test_the_command_writes_labels_and_tells_of_row_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_first_row_only(jobs: pl.DataFrame, model: str, device: str) -> pl.DataFrame:
        return results([" bug", None], jobs["gold"].to_list())

    monkeypatch.setattr(recipe, "_run", answer_first_row_only)
    csv, out = tmp_path / "in.csv", tmp_path / "out.csv"
    texts().write_csv(csv)
    code, _ = run(
        "--csv", str(csv), "--text-column", "text", "--labels", "bug,billing", "--label-column", "category",
        "--out", str(out),
    )  # fmt: skip
    assert code == 3
    assert pl.read_csv(out)["label"].to_list() == ["bug", None]
