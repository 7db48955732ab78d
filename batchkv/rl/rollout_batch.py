"""`RolloutBatch`: the samples of a rollout as an Arrow table, and the ways out of it to trainers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchkv.rl import exports
from batchkv.rl.batch_schema import by_token, check_batch
from batchkv.rl.ragged import Ragged
from batchkv.rl.token_tree import TokenTree
from batchkv.rl.trajectory import Branch, Trajectory, trajectory_of
from batchkv.token_arena import TokenArena

if TYPE_CHECKING:
    from torch import nn

    from batchkv.engine import Engine


@dataclass(frozen=True, slots=True, repr=False)
class RolloutBatch:
    """One row for each sample.

    | column | what |
    |---|---|
    | `prompt_index`, `sample_index` | which prompt of the call, the first of its `row`; which of its samples |
    | `prompt_token_ids` | the prompt |
    | `token_ids` | what came after it: tokens of the model, its end token included, and of an environment |
    | `logprobs` | of `token_ids`, under softmax(logits / temperature); 0 for tokens of an environment |
    | `finish_reason`, `truncated` | `stop`, `length` or `abort` (others were enough); whether the sample was cut off |
    | `env_mask` | 1 for tokens of the model, 0 for those of an environment |
    | `seed` | of the random numbers |
    | `weight_version` | of the weights that made the tokens |
    | `num_cached_tokens` | prompt tokens that were not computed for this sample |
    | `row` (optional) | the global number of the prompt, which the random numbers are of |
    | `token_versions` (optional) | of the weights when each of `token_ids` came, where a sample saw an update |
    | `forked_from`, `forked_at` (optional) | the sample whose first tokens were taken over, how many; -1 if none |
    | `sampling_logprobs` (optional) | of `token_ids`, over the tokens that filters left there; 0 where greedy |
    | `entropies` (optional) | at the places of `token_ids`, of softmax(logits / temperature) before filters, in nats |
    | `kept_token_ids` (optional) | for each of `token_ids` those that filters left, ascending; none of them: all were |

    The last three are there where sampling was recorded (`batchkv.rollout`). Tokens of an environment have log-
    probabilities and entropies of 0, and no kept ids.

    Attributes:
        table: the samples, with the columns of `batch_schema.SCHEMA`; it may have more.
        pad_token_id: what padded token ids are filled up with. It may be an end token: masks never come from it.
        temperature: what logits were divided by before `logprobs` were taken; 1 where samples are greedy.
        summary: what the rollout cost, with the names of a job's summary.

    Raises:
        ValueError: if a column is missing or of another type, a row's lists do not fit together, or the temperature
            is not above 0.
    """

    table: pa.Table
    pad_token_id: int
    temperature: float = 1.0
    summary: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.pad_token_id < 0:
            raise ValueError(f"pad_token_id {self.pad_token_id} must be at least 0")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature {self.temperature} must be above 0; logprobs of greedy samples are at 1")
        check_batch(self)

    @classmethod
    def concat(cls, batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """Samples of several rollouts, those of one `row` as one prompt: what was finished, and what went on later.

        Rows are numbered anew (`prompt_index`) in the order in which they come, samples of a row are in theirs. Columns
        that not all have are left out, and so are summaries. Prompts of several calls need rows of their own, so give
        them (`rollout(..., rows=)`). Forks of an earlier batch have numbers that samples of their row have, too, and
        cannot be joined with these.

        Raises:
            ValueError: there are no batches, they were not drawn at one temperature, a batch has no column `row`, two
                have the same sample of a row, or a row has two prompts.
        """
        if not batches:
            raise ValueError("there are no batches, must be at least one")
        temperatures = {batch.temperature for batch in batches}
        if len(temperatures) > 1:
            raise ValueError(f"the batches have temperatures {sorted(temperatures)}, must be one")
        names = [name for name in batches[0].table.column_names if all(name in b.table.column_names for b in batches)]
        if "row" not in names:
            raise ValueError("a batch has no column row, which tells the prompts of several rollouts apart")
        table = pa.concat_tables([batch.table.select(names) for batch in batches])
        rows, samples = (np.asarray(table[name].to_numpy()) for name in ("row", "sample_index"))
        _, first, which = np.unique(rows, return_index=True, return_inverse=True)
        number = np.argsort(np.argsort(first))[which].astype(np.int32)
        order = np.lexsort((samples, number))
        is_twice = (np.diff(number[order]) == 0) & (np.diff(samples[order]) == 0)
        if is_twice.any():
            at = order[np.argmax(is_twice)]
            raise ValueError(
                f"sample {samples[at]} of row {rows[at]} is there twice: leave one of them out, or give the prompts of "
                "each call rows of their own (rows=)"
            )
        _check_prompts(table, rows)
        table = table.set_column(names.index("prompt_index"), "prompt_index", pa.array(number)).take(order)
        return cls(table, batches[0].pad_token_id, batches[0].temperature)

    def __repr__(self) -> str:
        prompts = pc.count_distinct(self.table["prompt_index"]).as_py()
        tokens = len(self.completions.values)
        return f"RolloutBatch({len(self):,} samples of {prompts:,} prompts, {tokens:,} tokens behind them)"

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def prompts(self) -> Ragged:
        """Token ids of the prompts: int32."""
        return Ragged.of(self.table["prompt_token_ids"])

    @property
    def completions(self) -> Ragged:
        """Token ids after the prompts: int32."""
        return Ragged.of(self.table["token_ids"])

    @property
    def token_arena(self) -> TokenArena:
        """Prompt and completion of each row."""
        whole = self.prompts.then(self.completions)
        return TokenArena(whole.values.astype(np.int32), whole.offsets, whole.lengths)

    @property
    def logprobs(self) -> Ragged:
        """Of the tokens of `completions`: float32."""
        return Ragged.of(self.table["logprobs"])

    @property
    def env_mask(self) -> Ragged:
        """1 for the tokens of `completions` that the model made: int8."""
        return Ragged.of(self.table["env_mask"])

    @property
    def token_versions(self) -> Ragged:
        """Of the weights when each token of `completions` came: int64."""
        if "token_versions" in self.table.column_names:
            return Ragged.of(self.table["token_versions"])
        completions = self.completions
        versions = np.asarray(self.table["weight_version"].to_numpy())
        return Ragged(versions[completions.owners], completions.offsets)

    @property
    def entropies(self) -> Ragged | None:
        """At the tokens of `completions`: float32; None where they were not recorded."""
        return self._optional("entropies")

    @property
    def sampling_logprobs(self) -> Ragged | None:
        """Of the tokens of `completions`, under what they were drawn from: float32; None where it was not recorded."""
        return self._optional("sampling_logprobs")

    @property
    def kept_token_ids(self) -> Ragged | None:
        """A list for each token of `completions`, of all rows one behind the other: int32; None if not recorded."""
        if "kept_token_ids" not in self.table.column_names:
            return None
        return Ragged.of(by_token(self.table["kept_token_ids"]))

    def _optional(self, name: str) -> Ragged | None:
        return Ragged.of(self.table[name]) if name in self.table.column_names else None

    @property
    def truncated(self) -> npt.NDArray[np.bool_]:
        """Which samples were cut off: bool [rows]."""
        return np.asarray(self.table["truncated"].to_numpy(), dtype=np.bool_)

    def trajectory(self, row: int) -> Trajectory:
        """A row of the batch. It must be of a rollout: tables from elsewhere lack columns.

        Raises:
            ValueError: there is no such row.
        """
        if not 0 <= row < len(self):
            raise ValueError(f"sample {row} must be a row of the batch, from 0 to {len(self) - 1}")
        return trajectory_of(self.table, row)

    def fork(self, sample: int, at_token: int, n: int) -> Branch:
        """New samples that have the first tokens of one in common, to stand among the prompts of a rollout.

        Args:
            sample: row of the batch.
            at_token: the token behind the prompt that is drawn anew, one of the model's.
            n: how many.

        Raises:
            ValueError: there is no such sample or token, it is not the model's, or there are no samples to draw.
        """
        if n < 1:
            raise ValueError(f"n {n} must be at least 1")
        return self.trajectory(sample).fork(at_token, range(n))

    def unfinished(self, *, length_ends: bool = True) -> list[Branch]:
        """The samples that are not done, to stand among the prompts of a later rollout: they go on where they were, and
        keep their logprobs and the weight versions of their tokens.

        Args:
            length_ends: whether those that ended by `length` are done. If not, `max_tokens` is what one call adds to a
                sample; one that fills the context then comes back as it is.
        """
        cut = [self.trajectory(row) for row in np.flatnonzero(~self._is_done(length_ends)).tolist()]
        return [Branch(trajectory, (trajectory.sample_index,)) for trajectory in cut]

    def finished(self, *, length_ends: bool = True, most: int | None = None) -> RolloutBatch:
        """The samples that `unfinished` leaves out.

        Args:
            length_ends: as of `unfinished`.
            most: so many of each prompt, those with the lowest indices; by default all.
        """
        is_in = self._is_done(length_ends)
        if most is not None:
            prompts = np.asarray(self.table["prompt_index"].to_numpy())
            order = np.lexsort((self.table["sample_index"].to_numpy(), prompts))
            order = order[is_in[order]]
            first = np.searchsorted(prompts[order], prompts[order])  # of the same prompt
            is_in = np.zeros_like(is_in)
            is_in[order[np.arange(len(order)) - first < most]] = True
        return replace(self, table=self.table.filter(pa.array(is_in)))

    def _is_done(self, length_ends: bool) -> npt.NDArray[np.bool_]:
        reasons = self.table["finish_reason"].to_numpy()
        return np.asarray((reasons == "stop") | (length_ends & (reasons == "length")), np.bool_)

    def completions_by_prompt(self) -> dict[bytes, list[npt.NDArray[np.int32]]]:
        """Token ids after each distinct prompt, by the bytes of its int32 token ids."""
        found: dict[bytes, list[npt.NDArray[np.int32]]] = {}
        prompts, completions = self.prompts, self.completions
        for row in range(len(self)):
            found.setdefault(prompts.row(row).tobytes(), []).append(completions.row(row))
        return found

    def score(self, policy: nn.Module | Engine, **config: Any) -> Ragged:
        """Log-probabilities of the tokens under another model, each prompt computed once.

        Args:
            policy: the model, in place, as of `batchkv.rollout`. That of a PEFT policy without its adapter is scored
                inside `with policy.disable_adapter():`.
            config: fields of `EngineConfig`, for a module.

        Returns:
            float32, a list for each row, as long as its `token_ids`, under softmax(logits / `temperature`); 0 where
            `env_mask` is 0. `.padded(0.0)` is a matrix of them as wide as the completions of `to_padded`.

        Raises:
            UserError: the model cannot be run in place, a row is too long for it, or it gives no probabilities.
        """
        from batchkv.rl.scoring import score

        return score(policy, self, **config)

    def tree(self) -> TokenTree:
        """The trie of all samples, for training over it."""
        return TokenTree.of(self)

    to_padded = exports.to_padded
    to_trl = exports.to_trl
    to_verl = exports.to_verl
    to_openrlhf = exports.to_openrlhf
    to_openrlhf_experience = exports.to_openrlhf_experience
    to_nemo_rl = exports.to_nemo_rl
    to_slime = exports.to_slime
    to_areal = exports.to_areal


def _check_prompts(table: pa.Table, rows: npt.NDArray[np.int64]) -> None:
    """Raises ValueError if one row has two prompts."""
    prompts, of_row = Ragged.of(table["prompt_token_ids"]), dict[int, bytes]()
    for place, row in enumerate(rows.tolist()):
        prompt = prompts.row(place).tobytes()
        if of_row.setdefault(row, prompt) != prompt:
            raise ValueError(f"row {row} has two prompts: give the prompts of each call rows of their own (rows=)")
