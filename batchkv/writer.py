"""From sequences that have ended to records: which outputs they are, and their text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchkv.errors import RowError
from batchkv.ledger import Ledger
from batchkv.records import Record
from batchkv.sequence import SequenceTable
from batchkv.stopping import cut
from batchkv.wave import Wave

SUMMARY_KEY = b"batchkv.summary"

Int64Array = npt.NDArray[np.int64]
Detokenize = Callable[[list[npt.NDArray[np.int32]]], list[str] | list[None]]


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One generated sample, or a continuation that was scored. Rows that are exact duplicates may share the object.

    Attributes:
        token_ids: int32 [generated], the end token included; those given, where they were scored.
        logprobs: float32 [generated], of these tokens.
        finish_reason: `stop` at an end token or stop string, `length` at `max_tokens`, at the context's end or at the
            end of what was given.
        stop_string: the stop string that ended it, if one did.
        is_greedy: bool [generated], whether greedy decoding would have taken the given token after those before it;
            None where nothing was given.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish_reason: Literal["stop", "length"]
    stop_string: str | None = None
    is_greedy: npt.NDArray[np.bool_] | None = None


class Writer:
    """Writes down the sequences of a wave as they end.

    Args:
        wave: what is executed.
        sequences: of its plan.
        cached: int64 [outputs], prompt tokens that are not computed for each output.
        detokenize: decodes without special tokens, or gives None.
        ledger: where the records go.
    """

    def __init__(
        self, wave: Wave, sequences: SequenceTable, cached: Int64Array, detokenize: Detokenize, ledger: Ledger
    ) -> None:
        self._wave, self._cached, self._detokenize, self._ledger = wave, cached, detokenize, ledger
        self._outputs = np.argsort(sequences.output_sequence, kind="stable")
        self._first = np.searchsorted(sequences.output_sequence[self._outputs], np.arange(len(sequences) + 1))

    def write(self, ended: Sequence[tuple[int, Completion | RowError]]) -> None:
        """Sequences and their completions, or what kept them from one."""
        good = [(sequence, completion) for sequence, completion in ended if isinstance(completion, Completion)]
        texts = self._detokenize([completion.token_ids for _, completion in good]) if good else []
        records: list[Record] = []
        for (sequence, completion), text in zip(good, texts, strict=True):
            records.extend(self._record(output, completion, text) for output in self._outputs_of(sequence))
        self._ledger.append(records)
        self._ledger.reject(
            {
                self._row(output): error
                for sequence, error in ended
                if isinstance(error, RowError)
                for output in self._outputs_of(sequence)
            }
        )

    def _outputs_of(self, sequence: int) -> list[int]:
        outputs: list[int] = self._outputs[self._first[sequence] : self._first[sequence + 1]].tolist()
        return outputs

    def _row(self, output: int) -> int:
        return int(self._wave.row[self._wave.output_request[output]])

    def _record(self, output: int, completion: Completion, text: str | None) -> Record:
        request = int(self._wave.output_request[output])
        params = self._wave.params[request]
        if text is not None and completion.stop_string is not None:
            text = cut(text, params.stop)
        return Record(
            row=int(self._wave.row[request]),
            sample=int(self._wave.output_sample[output]),
            finish_reason=completion.finish_reason,
            text=text,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs if params.logprobs else None,
            num_prompt_tokens=int(self._wave.arena.lengths[request]),
            num_cached_tokens=int(self._cached[output]),
            num_generated_tokens=len(completion.token_ids),
        )


def with_summary(schema: pa.Schema, summary: Mapping[str, Any]) -> pa.Schema:
    """The schema of a result with the summary of its run in the metadata."""
    return schema.with_metadata({SUMMARY_KEY: json.dumps(summary).encode()})


def summary_of(schema: pa.Schema) -> dict[str, Any]:
    """The summary that `with_summary` put there."""
    summary: dict[str, Any] = json.loads(schema.metadata[SUMMARY_KEY])
    return summary
