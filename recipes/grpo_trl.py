"""GRPO with TRL, its rollouts by batchkv, on a CPU: `python -m batchkv.recipes.grpo_trl --help`.

A tiny model, made on the spot, learns to put letters in order, `dbca>` to `abcd`, in two parts:

    warm_up  supervised: the form of an answer, which is the letters of the word in any order, and an end
    train    GRPO: that they have to be in order is only said by the reward

What to take over into a training of one's own is one line: `rollout_func=batchkv.trl_rollout_func`.
"""

from __future__ import annotations

import csv
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchkv.errors import UserError
from batchkv.recipes.output import check_output, whole_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

ALPHABET = "abcdefghijklmnop"
ASK = ">"
"""What ends a word and asks for its letters in order."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is learned, and for how long.

    Attributes:
        letters: of each word.
        warm_up_steps, warm_up_batch: of the supervised part, and words in each.
        steps: of GRPO.
        prompts, samples: prompts in each of them, and samples of each prompt.
        learning_rate: of GRPO.
        report_every: steps; the curve has the mean reward of as many.
        seed: of all random numbers.
    """

    letters: int = 4
    warm_up_steps: int = 100
    warm_up_batch: int = 64
    steps: int = 250
    prompts: int = 16
    samples: int = 8
    learning_rate: float = 1e-3
    report_every: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.letters <= 40:
            raise UserError(f"letters {self.letters} must be from 2 to 40")


@dataclass(frozen=True, slots=True)
class Point:
    """Of the reward curve.

    Attributes:
        step: of the training, the last one that is in the mean.
        reward: mean over the samples of `report_every` steps.
        seconds: since the training began.
    """

    step: int
    reward: float
    seconds: float


@dataclass(slots=True)
class _Curve:
    """Points as they come, and who is told."""

    points: list[Point] = field(default_factory=list)
    started: float = field(default_factory=perf_counter)

    def add(self, step: int, reward: float) -> None:
        self.points.append(Point(step, reward, perf_counter() - self.started))
        typer.echo(_line(self.points[-1]))


DEFAULTS = Settings()


def words(settings: Settings, count: int, seed: int) -> list[str]:
    """Random words. Others for each seed."""
    numbers = random.Random(f"{settings.seed}/{seed}")
    return ["".join(numbers.choices(ALPHABET, k=settings.letters)) for _ in range(count)]


def in_order_reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """The share of letters that are where they belong; letters too many count as wrong. 1 is a right answer."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        wanted = sorted(prompt.removesuffix(ASK))
        right = sum(letter == place for letter, place in zip(completion, wanted, strict=False))
        rewards.append(right / max(len(wanted), len(completion)))
    return rewards


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each letter, one for the question, one for the end, and one to fill up with."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<eos>")
    tokens = [*special, ASK, *ALPHABET]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def make_policy(tokenizer: PreTrainedTokenizerFast, settings: Settings) -> PreTrainedModel:
    """A Llama of 2 layers and 80,000 weights, float32, which are random."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=True,
        )
    )


def warm_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, settings: Settings) -> None:
    """Shows the model answers of the right form, whose letters are in a random order."""
    import torch

    numbers = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for step in range(settings.warm_up_steps):
        texts = [
            word + ASK + "".join(numbers.sample(word, k=len(word))) + str(tokenizer.eos_token)
            for word in words(settings, settings.warm_up_batch, seed=step)
        ]
        input_ids = torch.tensor(tokenizer(texts)["input_ids"])
        labels = input_ids.clone()
        labels[:, : settings.letters + 1] = -100  # the question is random
        model(input_ids=input_ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, settings: Settings) -> list[Point]:
    """GRPO with TRL. The model is another one afterwards.

    Raises:
        UserError: TRL is not installed.
    """
    curve = _Curve()
    with _quiet_trl() as trl, tempfile.TemporaryDirectory() as folder:
        from datasets import Dataset
        from transformers import PrinterCallback

        import batchkv

        prompts = [word + ASK for word in words(settings, settings.steps * settings.prompts, seed=-1)]
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=in_order_reward,
            args=_config(trl, settings, folder),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            rollout_func=batchkv.trl_rollout_func,
            callbacks=[_reporter(curve)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return curve.points


def _config(trl: Any, settings: Settings, folder: str) -> Any:
    return trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=settings.prompts * settings.samples,
        num_generations=settings.samples,
        max_completion_length=settings.letters + 2,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        max_steps=settings.steps,
        logging_steps=settings.report_every,
        seed=settings.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # the model is tiny: memory is not short
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


@contextmanager
def _quiet_trl() -> Iterator[Any]:
    """TRL, without its warning that rollout functions are new."""
    try:
        import trl
    except ImportError as error:
        raise UserError(f"this recipe trains with TRL, which cannot be imported ({error}): pip install trl") from None
    before = os.environ.get("TRL_EXPERIMENTAL_SILENCE")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    try:
        yield trl
    finally:
        if before is None:
            del os.environ["TRL_EXPERIMENTAL_SILENCE"]
        else:
            os.environ["TRL_EXPERIMENTAL_SILENCE"] = before


def _reporter(curve: _Curve) -> Any:
    """A callback that adds what the trainer logs to the curve."""
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "reward" in logs:
                curve.add(state.global_step, float(logs["reward"]))

    return Reporter()


def share_of_right_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, settings: Settings, count: int = 200
) -> float:
    """Of greedy answers to words that were not trained on."""
    import batchkv

    prompts = [word + ASK for word in words(settings, count, seed=-2)]
    batch = batchkv.rollout(model, prompts, n=1, tokenizer=tokenizer, max_tokens=settings.letters + 2, temperature=0.0)
    answers = tokenizer.batch_decode(batch.completions.lists(), skip_special_tokens=True)
    return sum(reward == 1.0 for reward in in_order_reward(prompts, answers)) / count


def write_curve(points: Sequence[Point], path: Path) -> None:
    """As CSV; the file appears complete or not at all."""
    with whole_file(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "reward", "seconds"])
        rows.writerows([point.step, f"{point.reward:.4f}", f"{point.seconds:.1f}"] for point in points)


def plot_curve(points: Sequence[Point], path: Path) -> bool:
    """As a picture, if matplotlib is installed; says whether it is."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    axes.plot([point.step for point in points], [point.reward for point in points])
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="GRPO: letters in order")
    figure.savefig(path)
    return True


def _line(point: Point) -> str:
    """A point as a line of a plot."""
    return f"step {point.step:4}  reward {point.reward:.3f}  {point.seconds:5.0f} s  {'█' * round(40 * point.reward)}"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def grpo(
    out: Annotated[Path, typer.Option(help="Where the reward curve goes: a .csv file, and a .png beside it.")] = Path(
        "grpo_rewards.csv"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Steps of GRPO.")] = DEFAULTS.steps,
    letters: Annotated[int, typer.Option(min=2, max=40, help="Letters of each word.")] = DEFAULTS.letters,
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = DEFAULTS.seed,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
) -> None:
    """Teach a tiny model to put letters in order with GRPO, in a few minutes on a CPU."""
    try:
        check_output(out, (".csv",), overwrite)
        settings = replace(DEFAULTS, steps=steps, letters=letters, seed=seed)
        with _quiet_trl():  # before the warm-up, if it is not there
            pass
        _teach(settings, out)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _teach(settings: Settings, out: Path) -> None:
    tokenizer = make_tokenizer()
    model = make_policy(tokenizer, settings)
    warm_up(model, tokenizer, settings)
    before = share_of_right_answers(model, tokenizer, settings)
    points = train(model, tokenizer, settings)
    after = share_of_right_answers(model, tokenizer, settings)
    write_curve(points, out)
    picture = out.with_suffix(".png")
    plotted = f" and {picture}" if plot_curve(points, picture) else " (matplotlib is not installed: no picture)"
    typer.echo(f"right answers to new words: {before:.0%} before, {after:.0%} after; rewards in {out}{plotted}")


def main() -> None:
    """The command line."""
    app(prog_name="python -m batchkv.recipes.grpo_trl")


if __name__ == "__main__":
    main()
