"""From runs taken in turn to the table of one job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.markdown import markdown_table
from benchmarks.protocol import Failure, Outcome, Tokens

if TYPE_CHECKING:
    import polars as pl

ENOUGH_RATIOS = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """A run of batchkv and the peer's run right after it."""

    batchkv: Outcome
    peer: Outcome

    @property
    def ratio(self) -> float:
        """How many times as long the peer took."""
        return self.peer.run_s / self.batchkv.run_s

    @property
    def ratio_with_load(self) -> float:
        return self.peer.total_s / self.batchkv.total_s

    @property
    def floor_share(self) -> float | None:
        """The share of the peer's time that the floor would have taken."""
        return None if self.batchkv.floor_s is None else self.batchkv.floor_s / self.peer.run_s


@dataclass(frozen=True, slots=True)
class Series:
    """All runs of one peer on one job.

    Attributes:
        name: of the peer.
        pairs: in the order they were taken.
        failure: why there are no more of them.
    """

    name: str
    pairs: tuple[Pair, ...] = field(default=())
    failure: Failure | None = None


def same_share(tokens: Tokens, others: Tokens, greedy: Sequence[bool]) -> float | None:
    """The share of greedy samples whose tokens are all equal; None if no sample is greedy."""
    places = [place for place, is_greedy in enumerate(greedy) if is_greedy]
    if not places:
        return None
    return sum(tokens[place] == others[place] for place in places) / len(places)


def comparison_table(series: Sequence[Series], greedy: Sequence[bool]) -> pl.DataFrame:
    """One row for each peer, as texts."""
    import polars as pl  # not everything that counts ratios needs it

    return pl.DataFrame([_row(peer, greedy) for peer in series])


def _row(series: Series, greedy: Sequence[bool]) -> dict[str, str]:
    pairs = series.pairs
    peers = [pair.peer for pair in pairs]
    shares = [pair.floor_share for pair in pairs if pair.floor_share is not None]
    same = same_share(peers[-1].token_ids, pairs[-1].batchkv.token_ids, greedy) if pairs else None
    return {
        "engine": series.name,
        "run, s": _middle([peer.run_s for peer in peers], "{:.2f}"),
        "tokens/s": _middle([peer.generated_tokens / peer.run_s for peer in peers], "{:,.1f}"),
        "run / batchkv": _with_range([pair.ratio for pair in pairs]),
        "load, s": _middle([peer.load_s for peer in peers], "{:.1f}"),
        "with load / batchkv": _with_range([pair.ratio_with_load for pair in pairs]),
        "floor": _middle(shares, "{:.0%}"),
        "same greedy": "" if same is None else f"{same:.1%}",
        "version": peers[-1].version if pairs else "",
        "note": "; ".join(filter(None, _notes(series))),
    }


def _notes(series: Series) -> list[str]:
    failure = series.failure.reason if series.failure else ""
    note = series.pairs[-1].peer.note if series.pairs else ""
    return [_few(series.pairs), failure, note]


def _few(pairs: Sequence[Pair]) -> str:
    """A warning where the median says little."""
    if len(pairs) >= ENOUGH_RATIOS or not pairs:
        return ""
    return f"{len(pairs)} {'ratio' if len(pairs) == 1 else 'ratios'} only: no result"


def _middle(values: Sequence[float], form: str) -> str:
    return form.format(median(values)) if values else ""


def _with_range(ratios: Sequence[float]) -> str:
    """The median, and the range where there is one."""
    if not ratios:
        return ""
    spread = f" ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{median(ratios):.2f}{spread}"


def markdown(table: pl.DataFrame) -> str:
    """A table of texts as Markdown."""
    return markdown_table(table.columns, table.rows())
