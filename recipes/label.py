"""Label the texts of a CSV file: `python -m batchkv.recipes.label --help`.

    CSV ─build_jobs→ jobs (one prompt per row) ─engine→ results ─label_results→ labels ─score→ accuracy

The parts are functions on polars frames, to be used and tested without the command line or a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jinja2
import jinja2.sandbox
import polars as pl
import typer

from batchkv.errors import UserError
from batchkv.recipes.output import check_output, whole_file

if TYPE_CHECKING:
    import pyarrow

UNKNOWN = "unknown"
"""The label of an answer that is none of the labels. It is never forced to one."""

ERROR = "error"
"""The column of the confusion table that counts rows without an answer."""

GENERIC_TEMPLATE = """\
Give each text exactly one of these labels: {{ labels | join(", ") }}.

Text: {{ text }}
Label:"""

TICKETS_TEMPLATE = """\
Support tickets of Tilthbox are sorted here. Tilthbox is a small indoor garden: a water tank with a pump, a \
lamp, six pods, and an app that sets the schedule. Customers buy the garden once and may join Pod Club, a paid \
plan that sends new pods by parcel.

Ticket: I was billed 49 dollars instead of 24.90, please refund the difference.
Category: billing

Ticket: Where is my parcel? Order 90012 was sent three weeks ago.
Category: shipping

Ticket: The app freezes on the harvest screen since the last update.
Category: bug

Ticket: I forgot my password and cannot log in.
Category: account

Ticket: It would be great if the lamp could be dimmed by voice.
Category: feature

Ticket: Can I pay the yearly plan by bank transfer?
Category: billing

Ticket: Please add a list of my plants to the app.
Category: feature

Ticket: The pump does not start any more.
Category: bug

Ticket: How do I change the email address of my profile?
Category: account

Ticket: Two pods were missing from the box that came today.
Category: shipping

Ticket: {{ text }}
Category:"""

TEMPLATES: Mapping[str, str] = {"generic": GENERIC_TEMPLATE, "tickets": TICKETS_TEMPLATE}


@dataclass(frozen=True, slots=True)
class Score:
    """How the labels compare with the gold labels, over the rows that have one.

    Attributes:
        rows: rows with a gold label.
        correct: rows whose label is the gold label.
        unknown: rows whose answer was none of the labels; they count as wrong.
        errors: rows without an answer; they count as wrong.
        confusion: one row per gold label, one column per given label, the cells are numbers of rows.
    """

    rows: int
    correct: int
    unknown: int
    errors: int
    confusion: pl.DataFrame

    @property
    def accuracy(self) -> float:
        """The share of correct rows; 0 where there are none."""
        return self.correct / self.rows if self.rows else 0.0


def parse_labels(text: str) -> tuple[str, ...]:
    """The labels of a comma-separated list, in its order.

    Raises:
        UserError: if there are fewer than two, one comes twice, or one is a word of the results.
    """
    labels = tuple(label.strip() for label in text.split(",") if label.strip())
    if len(labels) < 2:
        raise UserError(f"--labels {text!r} must name at least two labels, separated by commas")
    names = [_normalized(label) for label in labels]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--labels names {name!r} twice")
        if name in (UNKNOWN, ERROR):
            raise UserError(f"--labels may not contain {name!r}: it marks rows that got none of the labels")
    return labels


def parse_label(text: str, labels: Sequence[str]) -> str:
    """The label that an answer begins with, as whole words, the longest if there are several; else `unknown`.

    Letter case, white space and marks before the label do not matter: ` **Billing**, because` is `billing`.
    """
    answer = _normalized(text)
    for label in sorted(labels, key=len, reverse=True):
        if re.match(rf"\W*{re.escape(_normalized(label))}(?!\w|-\w)", answer):
            return label
    return UNKNOWN


def build_jobs(
    frame: pl.DataFrame,
    *,
    text_column: str,
    template: str,
    labels: Sequence[str],
    label_column: str | None = None,
    id_column: str | None = None,
    max_tokens: int = 8,
    stop: Sequence[str] = ("\n",),
) -> pl.DataFrame:
    """One job row per row of `frame`: `id`, `prompt`, `max_tokens`, `stop`; carried are `input` and `gold`.

    The template sees `text`, `labels` and the row's columns, except `label_column`: gold labels never reach a
    prompt. A row without text gets a null prompt, which the engine answers with an error row.

    Raises:
        UserError: if a column is missing or the template cannot be rendered.
    """
    for column in (text_column, label_column, id_column):
        _require_column(frame, column)
    prompts = _render_prompts(frame.drop(label_column or []), text_column, template, labels)
    gold = frame[label_column].to_list() if label_column else [None] * frame.height
    ids = frame[id_column] if id_column else pl.int_range(frame.height, eager=True)
    return pl.DataFrame(
        {
            "id": ids,
            "prompt": pl.Series(prompts, dtype=pl.String),
            "max_tokens": pl.repeat(max_tokens, frame.height, dtype=pl.Int64, eager=True),
            "stop": pl.Series([list(stop)] * frame.height, dtype=pl.List(pl.String)),
            "input": frame[text_column],
            "gold": pl.Series([_canonical(cell, labels) for cell in gold], dtype=pl.String),
        }
    )


def label_results(results: pl.DataFrame, labels: Sequence[str]) -> pl.DataFrame:
    """`id`, `text` (the input), `label`, `gold`, `output` (the raw answer) and `error` of each result row.

    A row with an error has no label.
    """
    given = [
        None if code is not None else parse_label(text or "", labels)
        for code, text in zip(results["error_code"], results["text"], strict=True)
    ]
    return results.select(
        "id",
        pl.col("input").alias("text"),
        pl.Series("label", given, dtype=pl.String),
        "gold",
        pl.col("text").alias("output"),
        pl.concat_str("error_code", "error", separator=": ").alias("error"),
    )


def score(frame: pl.DataFrame, labels: Sequence[str]) -> Score:
    """Compare `label` with `gold`; a gold label outside `labels` has a row of its own, never a match."""
    judged = frame.filter(pl.col("gold").is_not_null()).with_columns(pl.col("label").fill_null(ERROR))
    return Score(
        rows=judged.height,
        correct=judged.filter(pl.col("label") == pl.col("gold")).height,
        unknown=judged.filter(pl.col("label") == UNKNOWN).height,
        errors=judged.filter(pl.col("label") == ERROR).height,
        confusion=_confusion(judged, labels),
    )


def read_template(name: str) -> str:
    """The text of a built-in template or of a template file.

    Raises:
        UserError: if `name` is neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        built_in = " or ".join(TEMPLATES)
        raise UserError(f"--template {name!r} is not {built_in}, nor a text file: {error}") from None


def read_texts(path: Path) -> pl.DataFrame:
    """A CSV file with all cells as text; empty cells are null.

    Raises:
        UserError: if the file cannot be read.
    """
    try:
        return pl.read_csv(path, infer_schema=False)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(f"--csv {str(path)!r} cannot be read as CSV: {_first_line(error)}") from None


def write_labels(frame: pl.DataFrame, path: Path) -> None:
    """Write CSV or Parquet, told by the ending; the file appears complete or not at all."""
    with whole_file(path) as part:
        if path.suffix == ".csv":
            frame.write_csv(part)
        else:
            frame.write_parquet(part)


def describe(result: Score) -> str:
    """Accuracy and confusion table as text."""
    lines = f"accuracy {result.accuracy:.3f} ({result.correct} of {result.rows} rows with a gold label)"
    if result.unknown or result.errors:
        lines += f", {result.unknown} unknown, {result.errors} errors"
    with pl.Config(tbl_rows=-1, tbl_cols=-1, tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True):
        return f"{lines}\nrows: gold label, columns: given label\n{result.confusion}"


def _normalized(text: str) -> str:
    return " ".join(text.casefold().split())


def _canonical(gold: object, labels: Sequence[str]) -> str | None:
    """The label that `gold` spells, however it is written; another value is kept as it is."""
    if gold is None:
        return None
    same = (label for label in labels if _normalized(label) == _normalized(str(gold)))
    return next(same, str(gold))


def _require_column(frame: pl.DataFrame, column: str | None) -> None:
    if column is not None and column not in frame.columns:
        raise UserError(f"there is no column {column!r}; the columns are {', '.join(frame.columns)}")


def _render_prompts(frame: pl.DataFrame, text_column: str, template: str, labels: Sequence[str]) -> list[str | None]:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the template is wrong in line {error.lineno}: {error.message}") from None
    return [_render(compiled, row, row[text_column], labels) for row in frame.iter_rows(named=True)]


def _render(template: jinja2.Template, row: Mapping[str, Any], text: str | None, labels: Sequence[str]) -> str | None:
    if text is None or not text.strip():
        return None
    try:
        return template.render({**row, "text": text, "labels": list(labels)})
    except Exception as error:  # a template is the user's program: whatever it raises is a mistake in it
        known = ", ".join(dict.fromkeys(["text", "labels", *row]))
        reason = _first_line(error)
        raise UserError(f"the template cannot be rendered: {reason}; it may use {known}") from None


def _confusion(judged: pl.DataFrame, labels: Sequence[str]) -> pl.DataFrame:
    counts = judged.group_by("gold", "label").len()
    other = sorted(set(judged["gold"]) - set(labels))
    cells = {(gold, label): rows for gold, label, rows in counts.iter_rows()}
    columns = [*labels, UNKNOWN, ERROR]
    data = {label: [cells.get((gold, label), 0) for gold in [*labels, *other]] for label in columns}
    return pl.DataFrame({"gold \\ label": [*labels, *other], **data})


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _run(jobs: pl.DataFrame, model: str, device: str) -> pl.DataFrame:
    import batchkv  # the engine brings torch, which `--help` need not wait for

    table: pyarrow.Table = batchkv.Engine(model, device=device).run(jobs)
    results = pl.from_arrow(table)
    assert isinstance(results, pl.DataFrame)
    return results


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def label(
    csv: Annotated[Path, typer.Option(help="The CSV file with one text per row.")],
    text_column: Annotated[str, typer.Option(help="Its column with the texts.")],
    labels: Annotated[str, typer.Option(help="The labels to choose from, separated by commas.")],
    out: Annotated[Path, typer.Option(help="Where the labels go: a .csv or .parquet file.")],
    template: Annotated[
        str, typer.Option(help="A Jinja2 file that makes the prompt of {{ text }}, or: generic, tickets.")
    ] = "generic",
    label_column: Annotated[str | None, typer.Option(help="The column with gold labels, to score.")] = None,
    id_column: Annotated[str | None, typer.Option(help="The column with ids; else the row number.")] = None,
    model: Annotated[str, typer.Option(help="A folder, a .gguf file, a hub id, or smollm2.")] = "smollm2",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:N].")] = "auto",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
) -> None:
    """Label the texts of a CSV file with a language model, and score them if there are gold labels."""
    try:
        names = parse_labels(labels)
        check_output(out, (".csv", ".parquet"), overwrite)
        jobs = build_jobs(
            read_texts(csv)[:limit],
            text_column=text_column,
            template=read_template(template),
            labels=names,
            label_column=label_column,
            id_column=id_column,
            max_tokens=max_tokens,
        )
        labelled = label_results(_run(jobs, model, device), names)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    write_labels(labelled, out)
    _report(labelled, names, out, scored=label_column is not None)


def _report(labelled: pl.DataFrame, labels: Sequence[str], out: Path, *, scored: bool) -> None:
    """Say what came out; exit with 3 if some rows have errors, as `batchkv run` does."""
    if scored:
        typer.echo(describe(score(labelled, labels)))
    errors = labelled["error"].count()
    typer.echo(f"{labelled.height} rows, {errors} errors, in {out}")
    if errors:
        raise typer.Exit(3)


def main() -> None:
    """The command line."""
    app(prog_name="python -m batchkv.recipes.label")


if __name__ == "__main__":
    main()
