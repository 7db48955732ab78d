"""What can be wrong: with the whole job (`UserError`) or with one row of it (`RowError`)."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

RowErrorCode = Literal[
    "bad_id",  # null or of another type than the column
    "duplicate_id",  # an earlier row has the same id
    "bad_json",  # a line of a JSON lines file that is no JSON object
    "bad_prompt",  # none or several of prompt, messages, prompt_token_ids; or one of the wrong type
    "bad_messages",  # a conversation the chat template cannot render
    "bad_token_id",  # a prompt token id outside the vocabulary
    "empty_prompt",  # no tokens at all
    "bad_parameter",  # a sampling parameter out of range or of the wrong type
    "bad_schema",  # choices, regex or json_schema that cannot be compiled, or grew too complex for it while running
    "too_long",  # longer than the model's context or than the KV budget
    "missing_dependency",  # of a row or a sample that the job does not have, or of the row itself
    "dependency_cycle",  # rows that wait for each other in a circle
    "dependency_failed",  # a row that this one depends on, itself or through others, has an error
    "bad_template",  # a text that other rows' outputs go into and that cannot be rendered
    "bad_logits",  # the model gave no distribution to sample from (NaN or infinite logits)
    "unsupported",  # a column of the job format that this version does not execute
]


class Interrupted(SystemExit):
    """The user or the system wants the process to end."""


class UserError(ValueError):
    """The command, the job file or the model is unusable: one line saying what, where and how to mend it."""


def is_disk_full(error: OSError) -> bool:
    """Whether there is no room for what was to be written: on the disk, or in the user's share of it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def cannot_go_on(path: Path, error: OSError) -> UserError:
    """A file of a run cannot be written; the run can be gone on with."""
    return UserError(
        f"{path} cannot be written: {error.strerror or error}: what is finished is kept; "
        "free some space and give the same command again"
    )


@dataclass(frozen=True, slots=True)
class RowError:
    """Why one row has no answer. The rest of the job runs.

    `message` never quotes the row's text (it may be private); it names the column, the value of a
    parameter, and the limit that was broken.
    """

    code: RowErrorCode
    message: str


def first_of(errors: Mapping[int, RowError]) -> str | None:
    """The error of the first row (by number, from 0) that has one, for people."""
    if not errors:
        return None
    row = min(errors)
    return f"row {row}: {errors[row].code}: {errors[row].message}"
