"""What is done with each input, and what must not come of it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from batchkv import plan_job as plan_job_module
from batchkv.config import EngineConfig
from batchkv.errors import RowError, UserError
from batchkv.io.carried import conformed
from batchkv.io.read import open_jobs
from batchkv.io.write import write_tables
from batchkv.job import carried_columns
from batchkv.kv_layout import KVLayout, LayerSpec
from batchkv.preparation import ModelFacts
from batchkv.rows import Rows, take_in
from batchkv.sampling_params import SamplingParams
from tests.fuzz.seeds import MARK
from tests.tiny_models import VOCAB_SIZE, tiny_tokenizer

FACTS = ModelFacts(KVLayout((LayerSpec(1, 1, 1, 1, None),), 1), VOCAB_SIZE, 512)
Errors = dict[int, RowError]  # by row number
MAX_MESSAGE = 600  # characters, without the path
_RESULT_SUFFIXES = (".parquet", ".arrow", ".jsonl")
# Parameters, ids and names of columns are quoted, up to a limit; a mutation may have put any text there.
_MAY_QUOTE = re.compile(
    r"\b(n|max_tokens|temperature|top_p|top_k|min_p|seed|stop|stop_token_ids|ignore_eos|logprobs|choices|choice_mode|regex"
    r"|json_schema|parent_sample|sampling_params) (is|has|cannot)\b|names the id|wait for each other|which this one "
    r"depends on|column '|two columns named|the job has none of the columns|the role of message|content part of type"
)


class Target:
    """Plans a job and writes its carried columns, as `batchkv plan` and the end of `batchkv run` do."""

    def __init__(self) -> None:
        self._tokenizer = tiny_tokenizer()
        self._limits = FACTS.plan_limits(EngineConfig(), kv_bytes=1 << 16, device_type="cpu")

    def problems(self, path: Path) -> list[str]:
        """What is wrong with what happens; what is wrong with the input is not."""
        errors: Errors = {}
        messages: list[str] = []
        try:
            self.run(path, errors)
        except UserError as error:
            messages.append(str(error))
        except BaseException:
            return [traceback.format_exc()]
        messages += dict.fromkeys(error.message for error in errors.values())
        return [problem for message in messages for problem in _complaints(message, path)]

    def run(self, path: Path, errors: Errors) -> None:
        """What is wrong with single rows is added to `errors`.

        Raises:
            UserError: the whole job is bad.
        """
        source = open_jobs(path)
        taken: list[Rows] = []

        def recording_take_in(*arguments: Any, **options: Any) -> Rows:
            *before, reject, metrics = arguments

            def recording_reject(found: Mapping[int, RowError]) -> None:
                for row, error in found.items():
                    errors.setdefault(row, error)
                reject(found)

            taken.append(take_in(*before, recording_reject, metrics, **options))
            return taken[0]

        with patch.object(plan_job_module, "take_in", recording_take_in):
            plan = plan_job_module.plan_job(source, SamplingParams(), self._tokenizer, FACTS, self._limits)
        plan.explain()
        plan.to_json()
        carried = taken[0].carried
        blocks = (conformed(carried_columns(block), carried, block.num_rows, block.where) for block in source.blocks())
        suffix = _RESULT_SUFFIXES[path.stat().st_size % len(_RESULT_SUFFIXES)]
        out = path.with_name(f"out{suffix}")
        if carried.names:
            write_tables(blocks, carried, out, out.with_name("out.tmp"))


def _complaints(message: str, path: Path) -> list[str]:
    message = message.replace(str(path), "FILE")
    found = []
    if len(message) > MAX_MESSAGE:
        found.append(f"a message of {len(message)} characters: {message[:300]!r}")
    if not message.isprintable():
        found.append(f"a message that is not one printable line: {message[:300]!r}")
    if MARK in message and not _MAY_QUOTE.search(message):
        found.append(f"a message that quotes a row: {message[:300]!r}")
    return found
