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
from batchkv.records import Record
from batchkv.sampling_params import RowParams
from batchkv.sampling_record import SamplingRecord
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
        sampling: what the tokens were drawn from; None unless it was asked for.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish_reason: Literal["stop", "length"]
    stop_string: str | None = None
    is_greedy: npt.NDArray[np.bool_] | None = None
    sampling: SamplingRecord | None = None


class Writer:
    """Writes down the sequences of a wave as they end.

    Args:
        wave: what is executed.
        sequences: of its plan.
        cached: int64 [outputs], prompt tokens that are not computed for each output.
        job_params: of the job's rows, by row number.
        detokenize: decodes without special tokens, or gives None.
        record: where the records go.
        reject: where errors go, by row number.
    """

    def __init__(
        self,
        wave: Wave,
        sequences: SequenceTable,
        cached: Int64Array,
        job_params: RowParams,
        detokenize: Detokenize,
        record: Callable[[Sequence[Record]], None],
        reject: Callable[[Mapping[int, RowError]], None],
    ) -> None:
        self._wave, self._cached, self._job_params, self._detokenize = wave, cached, job_params, detokenize
        self._write_records, self._reject = record, reject
        self._scored_choices: dict[int, dict[int, tuple[int, Completion]]] = {}  # outputs by row and choice
        self._outputs = np.argsort(sequences.output_sequence, kind="stable")
        self._first = np.searchsorted(sequences.output_sequence[self._outputs], np.arange(len(sequences) + 1))

    def write(self, ended: Sequence[tuple[int, Completion | RowError]]) -> None:
        """Sequences and their completions, or what kept them from one."""
        good = [(sequence, completion) for sequence, completion in ended if isinstance(completion, Completion)]
        texts = self._detokenize([completion.token_ids for _, completion in good]) if good else []
        records: list[Record] = []
        for (sequence, completion), text in zip(good, texts, strict=True):
            for output in self._outputs_of(sequence):
                record = self._record(output, completion, text)
                records.extend([record] if record is not None else [])
        if records:
            self._write_records(records)
        self._reject(
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

    def _record(self, output: int, completion: Completion, text: str | None) -> Record | None:
        """Of an output; none as long as other choices of its row are missing."""
        request = int(self._wave.output_request[output])
        if self._wave.choice[request] >= 0:
            return self._record_of_choices(output, completion)
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
            num_prompt_tokens=self._prompt_tokens(request),
            num_cached_tokens=self._cached_tokens(output),
            num_generated_tokens=0 if completion.is_greedy is not None else len(completion.token_ids),
            is_greedy=None if completion.is_greedy is None else bool(completion.is_greedy.all()),
        )

    def _record_of_choices(self, output: int, completion: Completion) -> Record | None:
        """When all choices of a row have their scores: the likeliest one, the first of equals."""
        request = int(self._wave.output_request[output])
        row = int(self._wave.row[request])
        params = self._job_params[row]
        scored = self._scored_choices.setdefault(row, {})
        scored[int(self._wave.choice[request])] = (output, completion)
        if len(scored) < len(params.choices):
            return None
        del self._scored_choices[row]
        in_order = [scored[i] for i in range(len(scored))]
        totals = np.array([one.logprobs.sum(dtype=np.float64) for _, one in in_order])
        best = int(totals.argmax())
        return Record(
            row=row,
            sample=0,
            finish_reason="stop",
            text=params.choices[best],
            token_ids=in_order[best][1].token_ids,
            logprobs=in_order[best][1].logprobs if params.logprobs else None,
            num_prompt_tokens=self._prompt_tokens(request),
            num_cached_tokens=min(self._cached_tokens(place) for place, _ in in_order),  # one of them computes the rest
            choice_logprobs=totals.astype(np.float32),
        )

    def _prompt_tokens(self, request: int) -> int:
        """Without what is scored behind the prompt."""
        score_from = int(self._wave.scored.score_from[request])
        return score_from if score_from >= 0 else int(self._wave.arena.lengths[request])

    def _cached_tokens(self, output: int) -> int:
        """Prompt tokens not computed for an output: they are the first ones."""
        return min(int(self._cached[output]), self._prompt_tokens(int(self._wave.output_request[output])))


def with_summary(schema: pa.Schema, summary: Mapping[str, Any]) -> pa.Schema:
    """The schema of a result with the summary of its run in the metadata."""
    return schema.with_metadata({SUMMARY_KEY: json.dumps(summary).encode()})


def summary_of(schema: pa.Schema) -> dict[str, Any]:
    """The summary that `with_summary` put there."""
    summary: dict[str, Any] = json.loads(schema.metadata[SUMMARY_KEY])
    return summary
