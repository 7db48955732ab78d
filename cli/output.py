"""What the verbs print for people."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from batchkv.cli.interruption import check

if TYPE_CHECKING:
    from batchkv.progress import OnStep


def say(text: str) -> None:
    """Prints to stdout; who closed it (`batchkv plan ... | head`) does not want the rest."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ProgressBar:
    """How far reading, tokenizing, planning and generating have come; silent when nobody watches."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._disable = quiet or not sys.stderr.isatty()
        self._doing = ""
        self._bar: Any = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def prepare(self, doing: str, done: int, total: int) -> None:
        """One line for each thing done before the first token, gone when the next begins."""
        check()
        if doing != self._doing:
            self._open(doing, total, unit=" rows", leave=False, bar_format=None if total else "{desc} ...")
        self._bar.total = total or None
        self._bar.update(done - self._bar.n)

    def start(self, num_sequences: int) -> OnStep:
        """Samples, tokens per second and time left."""
        tokens = 0
        bar = self._open("", num_sequences, unit=" samples")

        def advance(ended: int, generated: int) -> None:
            nonlocal tokens
            check()
            tokens += generated
            seconds = bar.format_dict["elapsed"] if not bar.disable else 0.0
            if seconds:
                bar.set_postfix_str(f"{tokens / seconds:,.0f} tokens/s", refresh=False)
            bar.update(ended)

        return advance

    def _open(self, doing: str, total: int, **options: Any) -> Any:
        from tqdm import tqdm

        self._close()
        self._doing = doing
        self._bar = tqdm(
            desc=doing or None,
            total=total or None,
            disable=self._disable,
            dynamic_ncols=True,
            **options,
        )
        return self._bar

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
