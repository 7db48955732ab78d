"""Every output of a sequence gets its record when the sequence ends, with its text cut where it must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from batchkv.errors import RowError
from batchkv.ledger import Ledger
from batchkv.records import SCHEMA, Record, RecordsInMemory, as_batch
from batchkv.sampling_params import SamplingParams
from batchkv.sequence import SequenceTable
from batchkv.token_arena import TokenArena
from batchkv.wave import Wave
from batchkv.writer import Completion, Writer, summary_of, with_summary


def detokenize(samples: list[npt.NDArray[np.int32]]) -> list[str]:
    return ["".join(map(chr, sample)) for sample in samples]


BAD_LOGITS = RowError("bad_logits", "not finite")


def completion(text: str, *, finish: Any = "length", stop_string: str | None = None) -> Completion:
    token_ids = np.array([ord(c) for c in text], dtype=np.int32)
    return Completion(token_ids, -np.arange(len(text), dtype=np.float32), finish, stop_string)


class Written:
    """A wave of rows with `params`, whose outputs belong to `sequences` (by default each to its own)."""

    def __init__(
        self, *params: SamplingParams, sequences: Sequence[int] | None = None, rows: Sequence[int] | None = None
    ) -> None:
        wave = Wave.of(TokenArena.from_rows([np.ones(10 + i, np.int32) for i in range(len(params))]), list(params))
        if rows is not None:
            wave.row[:] = rows
        of_output = np.arange(wave.num_outputs) if sequences is None else np.array(sequences)
        first = [int(np.argmax(of_output == sequence)) for sequence in range(int(of_output.max()) + 1)]
        table = SequenceTable(
            row=wave.output_request[first],
            sample=wave.output_sample[first],
            prompt=wave.output_request[first],
            max_new_tokens=np.full(len(first), 100),
            score_from=np.full(len(first), -1),
            forced_token=np.full(len(first), -1),
            output_sequence=of_output,
        )
        self.decoded: list[int] = []
        self.records = RecordsInMemory()
        self.ledger = Ledger(self.records)
        self.writer = Writer(
            wave,
            table,
            np.arange(wave.num_outputs),
            wave.params,
            self._detokenize,
            self.ledger.append,
            self.ledger.reject,
        )

    def _detokenize(self, samples: list[npt.NDArray[np.int32]]) -> list[str]:
        self.decoded.append(len(samples))
        return detokenize(samples)

    def write(self, ended: Mapping[int, Completion | RowError]) -> None:
        self.writer.write(list(ended.items()))

    @property
    def found(self) -> list[dict[str, Any]]:
        return pa.Table.from_batches(self.records.batches(), SCHEMA).to_pylist()


def test_a_record_has_all_that_is_known_of_its_sample() -> None:
    written = Written(SamplingParams(logprobs=True, n=2), SamplingParams(), rows=[5, 8])
    written.write({1: completion("xy"), 2: completion("z", finish="stop")})
    assert written.found == [
        {
            "row": 5,
            "sample": 1,
            "text": "xy",
            "token_ids": [120, 121],
            "finish_reason": "length",
            "logprobs": [0.0, -1.0],
            "num_prompt_tokens": 10,
            "num_cached_tokens": 1,
            "num_generated_tokens": 2,
            "error_code": None,
            "error": None,
            "is_greedy": None,
            "choice_logprobs": None,
        },
        {
            "row": 8,
            "sample": 0,
            "text": "z",
            "token_ids": [122],
            "finish_reason": "stop",
            "logprobs": None,
            "num_prompt_tokens": 11,
            "num_cached_tokens": 2,
            "num_generated_tokens": 1,
            "error_code": None,
            "error": None,
            "is_greedy": None,
            "choice_logprobs": None,
        },
    ]
    assert (written.ledger.num_samples, written.ledger.num_errors) == (2, 0)


def test_outputs_of_one_sequence_are_decoded_once_and_all_that_ended_in_one_call() -> None:
    written = Written(*[SamplingParams()] * 4, sequences=[0, 1, 0, 2])
    written.write({0: completion("x"), 1: completion("y")})
    assert written.decoded == [2]
    assert [(record["row"], record["text"]) for record in written.found] == [(0, "x"), (2, "x"), (1, "y")]
    written.write({2: completion("z")})
    assert [(record["row"], record["text"]) for record in written.found][3:] == [(3, "z")]


def test_text_is_cut_before_the_first_stop_string_if_one_ended_the_sample() -> None:
    written = Written(SamplingParams(n=4, stop=("END", "D", "<eos>")))
    written.write(
        {
            0: completion("a END", finish="stop", stop_string="END"),
            1: completion("a END", finish="length"),
            2: completion("a", finish="stop", stop_string="<eos>"),
            3: completion("xD END", finish="stop", stop_string="END"),
        }
    )
    assert [record["text"] for record in written.found] == ["a ", "a END", "a", "x"]
    assert [record["num_generated_tokens"] for record in written.found] == [5, 5, 1, 6]


def test_rows_that_share_a_sequence_are_cut_and_given_logprobs_as_they_ask() -> None:
    params = [SamplingParams(stop=("b",)), SamplingParams(stop=("c",), logprobs=True)]
    written = Written(*params, sequences=[0, 0])
    written.write({0: completion("abc", finish="stop", stop_string="b")})
    assert [(record["text"], record["logprobs"]) for record in written.found] == [
        ("a", None),
        ("ab", [0.0, -1.0, -2.0]),
    ]


def test_without_a_tokenizer_there_is_no_text() -> None:
    wave = Wave.of(TokenArena.from_rows([np.ones(3, np.int32)]), [SamplingParams()])
    records, zero = RecordsInMemory(), np.zeros(1, np.int64)
    table = SequenceTable(zero, zero, zero, zero, zero - 1, zero - 1, zero)
    ledger = Ledger(records)
    writer = Writer(wave, table, zero, wave.params, lambda samples: [None] * len(samples), ledger.append, ledger.reject)
    writer.write([(0, completion("x"))])
    (batch,) = records.batches()
    assert (batch["text"].to_pylist(), batch["token_ids"].to_pylist()) == ([None], [[120]])


def test_a_sequence_without_a_distribution_is_the_error_of_all_its_rows_once() -> None:
    written = Written(SamplingParams(n=2), SamplingParams(), SamplingParams(), sequences=[0, 1, 0, 2])
    written.write({0: BAD_LOGITS, 2: completion("x")})
    written.write({1: BAD_LOGITS})
    found = [(record["row"], record["finish_reason"], record["error_code"]) for record in written.found]
    assert found == [(2, "length", None), (0, "error", "bad_logits"), (1, "error", "bad_logits")]
    assert written.found[1]["error"] == "not finite"
    assert (written.ledger.num_samples, written.ledger.num_errors) == (1, 2)


class TestRecords:
    def test_no_records_are_an_empty_batch(self) -> None:
        assert as_batch([]).schema == SCHEMA
        assert len(as_batch([])) == 0

    def test_nothing_and_empty_are_kept_apart(self) -> None:
        empty = Record(0, 0, "length", "", np.zeros(0, np.int32), np.zeros(0, np.float32))
        batch = as_batch([empty, Record.of_error(1, RowError("too_long", "by 1"))])
        assert batch["token_ids"].to_pylist() == batch["logprobs"].to_pylist() == [[], None]
        assert batch["text"].to_pylist() == ["", None]
        assert batch["error_code"].to_pylist() == [None, "too_long"]
        assert batch["finish_reason"].to_pylist() == ["length", "error"]

    @pytest.mark.parametrize("count", [0, 1, 255, 256, 600])
    def test_many_small_batches_are_joined_and_none_is_lost(self, count: int) -> None:
        records = RecordsInMemory()
        for row in range(count):
            records.append([Record.of_error(row, RowError("too_long", "by 1"))])
        batches = list(records.batches())
        assert [row for batch in batches for row in batch["row"].to_pylist()] == list(range(count))
        assert len(batches) <= 256 + 2


class TestLedger:
    def test_samples_of_rows_with_an_error_do_not_count(self) -> None:
        records = RecordsInMemory()
        ledger = Ledger(records)
        ledger.reject({7: RowError("too_long", "by 1")})
        ledger.append([Record(row, 0, "stop") for row in (0, 0, 7, 100)])
        ledger.append([])
        ledger.reject({0: RowError("bad_logits", ""), 7: RowError("bad_logits", "")})
        assert (ledger.num_errors, ledger.num_samples) == (2, 1)
        assert [ledger.has_failed(row) for row in (0, 7, 99, 100, 10**9)] == [True, True, False, False, False]
        assert sum(map(len, records.batches())) == 1 + 4 + 1  # row 7 keeps its first error

    def test_what_an_earlier_run_has_done_counts_too(self) -> None:
        ledger = Ledger(RecordsInMemory(), np.array([5, 6, 9]), np.array([2, 2, 4]))
        assert ledger.num_samples == 3
        ledger.append([Record(9, 0, "stop")])
        ledger.reject({2: RowError("bad_logits", "")})
        assert (ledger.num_samples, ledger.num_errors) == (2, 1)


def test_the_summary_is_in_the_metadata() -> None:
    summary = {"rows": 1, "prefill_s": 0.5}
    schema = with_summary(pa.schema({"x": pa.int64()}), summary)
    assert summary_of(schema) == summary
    assert schema.names == ["x"]
