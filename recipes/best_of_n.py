"""Sample every prompt several times and keep the best: `python -m batchkv.recipes.best_of_n --help`.

    prompts ─rollout→ n completions of each ─reward→ a number for each ─best_of→ the best one of each prompt

A reward is a function as TRL takes it, so that what selects here can train there:
`reward(prompts=..., completions=..., **columns) -> list of float`, with an element for each sample.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import polars as pl
import typer

from batchkv.errors import UserError
from batchkv.recipes.output import check_output, whole_file

if TYPE_CHECKING:
    from torch import nn

    from batchkv import Engine, RolloutBatch

Reward = Callable[..., Sequence[float]]

PROMPT_COLUMNS = ("prompt", "messages")
RESULT_COLUMNS = ("text", "reward", "sample_index", "mean_reward")
ENDINGS = (".parquet", ".jsonl")


def likelihood(logprobs: Sequence[Sequence[float]], **_: Any) -> list[float]:
    """The mean log-probability of a sample's tokens."""
    return [sum(row) / len(row) for row in logprobs]


def majority(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """The share of a prompt's samples that have the same answer: the last number in it, else all of its text."""
    asked = [repr(prompt) for prompt in prompts]
    answers = [(prompt, answer_of(text_of(completion))) for prompt, completion in zip(asked, completions, strict=True)]
    samples, same = Counter(asked), Counter(answers)
    return [same[prompt, answer] / samples[prompt] for prompt, answer in answers]


REWARDS: Mapping[str, Reward] = {"likelihood": likelihood, "majority": majority}


def answer_of(text: str) -> str:
    """The last number in a text, without commas in it; else the text, whatever its spaces and capitals."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].replace(",", "") if numbers else " ".join(text.casefold().split())


def text_of(completion: Any) -> str:
    """The text of a completion, which for conversations is a list of one message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def best_of_n(
    policy: nn.Module | Engine,
    prompts: Sequence[Any],
    reward: Reward,
    n: int = 8,
    *,
    tokenizer: Any = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    **options: Any,
) -> pl.DataFrame:
    """The sample of each prompt that a reward likes best; the first one of several.

    Args:
        policy: an engine, or a live module.
        prompts: texts, or conversations as lists of messages.
        reward: is called once with `prompts` and `completions`, which are texts, or lists of one message where prompts
            are conversations; `logprobs`, of the tokens; and each of `columns`. All have an element for each sample.
        n: samples of each prompt.
        tokenizer: of a live module. An engine has one.
        columns: what else is known of each prompt, such as its right answer.
        options: as of `batchkv.rollout`: `max_tokens`, `temperature`, `seed`, ...

    Returns:
        A row for each prompt: `prompt_index`, `text`, `reward`, `sample_index`, `mean_reward` (of all its samples).

    Raises:
        UserError: a prompt cannot be run, or the reward does not return a number for each sample.
    """
    import batchkv  # the engine brings torch, which `--help` need not wait for

    batch = batchkv.rollout(policy, prompts, n, tokenizer=tokenizer, **options)
    texts = _texts(batch, getattr(policy, "tokenizer", None) if tokenizer is None else tokenizer)
    owners: list[int] = batch.table["prompt_index"].to_pylist()
    repeated = {name: [values[i] for i in owners] for name, values in (columns or {}).items()}
    completions = [
        text if isinstance(prompts[i], str) else [{"role": "assistant", "content": text}]
        for i, text in zip(owners, texts, strict=True)
    ]
    rewards = reward(
        prompts=[prompts[i] for i in owners], completions=completions, logprobs=batch.logprobs.lists(), **repeated
    )
    return best_of(owners, batch.table["sample_index"].to_pylist(), texts, _checked(rewards, len(owners)))


def best_of(
    owners: Sequence[int], samples: Sequence[int], texts: Sequence[str], rewards: Sequence[float]
) -> pl.DataFrame:
    """Of samples in the order of their prompts, the best one of each prompt, as `best_of_n` returns it."""
    frame = pl.DataFrame({"prompt_index": owners, "text": texts, "reward": rewards, "sample_index": samples})
    with_mean = frame.with_columns(pl.col("reward").mean().over("prompt_index").alias("mean_reward"))
    ordered = with_mean.sort(["prompt_index", "reward", "sample_index"], descending=[False, True, False])
    return ordered.unique("prompt_index", keep="first", maintain_order=True)


def _texts(batch: RolloutBatch, tokenizer: Any) -> list[str]:
    if tokenizer is None:
        raise UserError("rewards need texts: give the policy's tokenizer")
    texts: list[str] = tokenizer.batch_decode(batch.completions.lists(), skip_special_tokens=True)
    return texts


def _checked(rewards: Sequence[float], count: int) -> list[float]:
    """Raises UserError if it is not a number for each sample."""
    if len(rewards) != count:
        raise UserError(f"the reward function returned {len(rewards)} values for {count} samples")
    for place, value in enumerate(rewards):
        if value is None or not math.isfinite(value):
            raise UserError(f"the reward function returned {value} for sample {place}, must be a finite number")
    return [float(value) for value in rewards]


def read_prompts(path: Path) -> pl.DataFrame:
    """A Parquet, JSON lines or CSV file, told by its ending, with a column `prompt` or `messages`.

    Raises:
        UserError: it cannot be read, has neither or both columns, a column of the results, or no prompt in a row or
            at all.
    """
    readers: dict[str, Callable[[Path], pl.DataFrame]] = {
        ".parquet": pl.read_parquet,
        ".jsonl": pl.read_ndjson,
        ".csv": pl.read_csv,
    }
    if path.suffix not in readers:
        raise UserError(f"--prompts {str(path)!r} must end in {', '.join(readers)}")
    try:
        frame = readers[path.suffix](path)
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"--prompts {str(path)!r} cannot be read: {reason}") from None
    column = _prompt_column(frame)
    if not frame.height:
        raise UserError(f"--prompts {str(path)!r} has no rows")
    for name in (*RESULT_COLUMNS, "prompts", "completions", "logprobs"):
        if name in frame.columns:
            raise UserError(f"--prompts has a column {name!r}, which is the name of a result: rename it")
    if missing := frame[column].is_null().arg_true().to_list():
        raise UserError(f"row {missing[0]} has no {column}")
    return frame


def _prompt_column(frame: pl.DataFrame) -> str:
    found = [name for name in PROMPT_COLUMNS if name in frame.columns]
    if len(found) != 1:
        raise UserError(f"there must be one column of {' and '.join(PROMPT_COLUMNS)}; there are {frame.columns}")
    return found[0]


def prompts_of(frame: pl.DataFrame) -> list[Any]:
    """Texts or conversations; these may be JSON texts."""
    column = _prompt_column(frame)
    cells = frame[column].to_list()
    if column == "prompt":
        return [str(cell) for cell in cells]
    return [json.loads(cell) if isinstance(cell, str) else cell for cell in cells]


def load_reward(name: str) -> Reward:
    """A built-in reward, or a function that is named with its module or its file.

    Args:
        name: `likelihood`, `majority`, `MODULE:FUNCTION` or `FILE.py:FUNCTION`.

    Raises:
        UserError: there is none.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, colon, function = name.rpartition(":")
    if not colon:
        raise UserError(f"--reward {name!r} is not {' or '.join(REWARDS)}, nor MODULE:FUNCTION or FILE.py:FUNCTION")
    try:
        found = getattr(_module(module), function)
    except Exception as error:  # whatever the user's module raises
        raise UserError(f"--reward {name!r} cannot be loaded: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise UserError(f"--reward {name!r} is not a function")
    reward: Reward = found
    return reward


def _module(name: str) -> Any:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def describe(best: pl.DataFrame, n: int) -> str:
    """What the choice has gained."""
    single, chosen = fmean(best["mean_reward"]), fmean(best["reward"])
    return f"{best.height} prompts; mean reward of a sample {single:.4f}, of the best of {n} {chosen:.4f}"


def write_best(frame: pl.DataFrame, path: Path) -> None:
    """As Parquet or JSON lines, told by the ending."""
    with whole_file(path) as part:
        if path.suffix == ".parquet":
            frame.write_parquet(part)
        else:
            frame.write_ndjson(part)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def best(
    prompts: Annotated[Path, typer.Option(help="A .parquet, .jsonl or .csv file with a column prompt or messages.")],
    out: Annotated[Path, typer.Option(help="Where the best samples go: a .parquet or .jsonl file.")],
    reward: Annotated[
        str, typer.Option(help="likelihood, majority, or a function: MODULE:FUNCTION or FILE.py:FUNCTION.")
    ] = "likelihood",
    n: Annotated[int, typer.Option(min=1, help="Samples of each prompt.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a sample.")] = 256,
    temperature: Annotated[float, typer.Option(help="Of the samples.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Of the samples.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    model: Annotated[str, typer.Option(help="A folder, a .gguf file, a hub id, or smollm2.")] = "smollm2",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:N].")] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
) -> None:
    """Sample every prompt several times and keep the sample with the highest reward."""
    try:
        check_output(out, ENDINGS, overwrite)
        function, frame = load_reward(reward), read_prompts(prompts)[:limit]
        options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        found = _run(frame, function, n, model, device, options)
    except ValueError as error:  # sampling parameters, too
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    write_best(pl.concat([frame, found.select(RESULT_COLUMNS)], how="horizontal"), out)
    typer.echo(f"{describe(found, n)}; in {out}")


def _run(
    frame: pl.DataFrame, reward: Reward, n: int, model: str, device: str, options: Mapping[str, Any]
) -> pl.DataFrame:
    import batchkv

    columns = {name: frame[name].to_list() for name in frame.columns if name not in PROMPT_COLUMNS}
    engine = batchkv.Engine(model, device=device)
    return best_of_n(engine, prompts_of(frame), reward, n, columns=columns, **options)


def main() -> None:
    """The command line."""
    app(prog_name="python -m batchkv.recipes.best_of_n")


if __name__ == "__main__":
    main()
