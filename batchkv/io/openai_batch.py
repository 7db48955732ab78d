"""OpenAI Batch files: request lines to rows of a job, result rows to response lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa

from batchkv.errors import RowError
from batchkv.io.columns import PROMPT_COLUMNS, REQUEST_COLUMNS, Column, decoded, kind_of, to_cells
from batchkv.io.openai_bodies import CHAT, ENDPOINTS, Asked, BadBodyError, Endpoint, LineError, read_body
from batchkv.io.prompts import read_prompts
from batchkv.io.read import JobTable, parse_line
from batchkv.io.token_texts import Decoder, TokenTexts

__all__ = ["Decoder", "Line", "LineError", "Requests", "read_requests", "response_lines"]

_Json: TypeAlias = dict[str, Any]
# A line, and what it asks unless it is bad.
_Found: TypeAlias = "tuple[Line, Asked | None]"

# What a sample's log-probability is at least, as in the API: JSON has no infinity.
_LEAST_LOGPROB = -9999.0
# Line ends to `str.splitlines`, with which many read JSON lines. `json.dumps` escapes the others.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


@dataclass(frozen=True, slots=True)
class Line:
    """What the response to one request line needs to know of it.

    Attributes:
        custom_id: None if it is missing or no string.
        endpoint: None if the line names none that is known.
        model: as the request names it.
        num_rows: of `Requests.rows`; a bad line has one.
        echo: the prompt stands before the text.
        constrained_by: the field that constrains the output, if one does.
        error: what is wrong with a bad line.
    """

    custom_id: str | None
    endpoint: Endpoint | None = None
    model: str | None = None
    num_rows: int = 1
    echo: bool = False
    constrained_by: str | None = None
    error: LineError | None = None


@dataclass(frozen=True, slots=True)
class Requests:
    """A block of request lines.

    Attributes:
        rows: the same block in the columns of the job format, a row for each prompt.
        lines: in the order of the block; their rows follow each other in `rows`.
        first_line: number of the first of them in the job.
    """

    rows: JobTable
    lines: tuple[Line, ...]
    first_line: int


def read_requests(table: JobTable, first_line: int, *, taken: Container[str] = frozenset()) -> Requests:
    """Request lines as rows of a job.

    A row's id is the `custom_id` of its line, or `custom_id#k` for the k-th of several rows. The row of a bad
    line is null in every column.

    Args:
        table: the lines; a body is an object, a struct or the text of an object.
        first_line: number of the first of them in the job.
        taken: every `custom_id` of the lines before.
    """
    columns = [_cells(table, name) for name in REQUEST_COLUMNS]
    found: list[_Found] = []
    seen: set[str] = set()
    for row, cells in enumerate(zip(*columns, strict=True)):
        if row in table.errors:
            error = table.errors[row]
            found.append((Line(None, error=LineError(error.code, error.message, status=None)), None))
            continue
        line, asked = _read_line(first_line + row, *cells)
        custom_id = line.custom_id
        if line.error is None and custom_id is not None and (custom_id in seen or custom_id in taken):
            message = f"the custom_id of line {first_line + row} is that of a line before"
            line, asked = _bad(line, LineError("duplicate_id", message, "custom_id")), None
        if custom_id is not None:
            seen.add(custom_id)
        found.append((line, asked))
    checked = _with_prompts_checked(found)
    return Requests(_job_rows(checked), tuple(line for line, _ in checked), first_line)


def _cells(table: JobTable, name: str) -> list[Any]:
    """A column of the lines as Python values, without the nulls with which Arrow pads structs."""
    if name not in table.columns:
        return [None] * table.num_rows
    column = table.columns[name]
    cells = to_cells(decoded(column))
    padded = name == "body" and not isinstance(column, list)
    return [_without_nulls(cell) for cell in cells] if padded else cells


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _read_line(number: int, custom_id: object, method: object, url: object, body: object) -> _Found:
    if not isinstance(custom_id, str):
        kind = "missing" if custom_id is None else f"{kind_of(custom_id)}, must be a string"
        error = LineError("bad_id", f"the custom_id of line {number} is {kind}", "custom_id", None)
        return Line(None, error=error), None
    endpoint = next((known for known in ENDPOINTS if url == known), None)
    if endpoint is None:
        message = f"the url of line {number} is not supported, must be {' or '.join(ENDPOINTS)}"
        return Line(custom_id, error=LineError("unsupported", message, "url", None)), None
    if method != "POST":
        error = LineError("unsupported", f"the method of line {number} is not POST", "method", None)
        return Line(custom_id, endpoint, error=error), None
    try:
        asked = read_body(endpoint, _object(body))
    except BadBodyError as bad:
        return Line(custom_id, endpoint, error=bad.error), None
    line = Line(custom_id, endpoint, asked.model, len(asked.prompts), asked.echo, asked.constrained_by)
    return line, asked


def _object(body: object) -> Mapping[str, Any]:
    if isinstance(body, dict):
        return body
    if body is None:
        raise BadBodyError("bad_prompt", "body is missing", "body")
    if not isinstance(body, (str, bytes)):
        raise BadBodyError("bad_json", f"body is {kind_of(body)}, must be an object", "body")
    try:
        return parse_line(body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise BadBodyError("bad_json", f"body is a string that is no JSON object: {error}", "body") from None


def _bad(line: Line, error: LineError) -> Line:
    """The same line, but bad."""
    return Line(line.custom_id, line.endpoint, line.model, error=error)


def _with_prompts_checked(found: Sequence[_Found]) -> list[_Found]:
    """Lines with a bad prompt become bad lines, so that their other prompts are not run for nothing."""
    owners = [index for index, (_, asked) in enumerate(found) if asked for _ in asked.prompts]
    prompts = [prompt for _, asked in found if asked for prompt in asked.prompts]
    _, errors = read_prompts(_prompt_columns(prompts), len(prompts))
    checked = list(found)
    for row, error in sorted(errors.items(), reverse=True):  # of a line with several, the first is what it reports
        line, _ = found[owners[row]]
        checked[owners[row]] = _bad(line, LineError(error.code, error.message, _prompt_param(line))), None
    return checked


def _prompt_param(line: Line) -> str:
    return "messages" if line.endpoint == CHAT else "prompt"


def _prompt_columns(prompts: Sequence[tuple[str, Any] | None]) -> dict[str, Column]:
    return {
        name: [prompt[1] if prompt is not None and prompt[0] == name else None for prompt in prompts]
        for name in PROMPT_COLUMNS
    }


def _job_rows(found: Sequence[_Found]) -> JobTable:
    ids: list[str | None] = []
    prompts: list[tuple[str, Any] | None] = []
    cells: list[Mapping[str, Any]] = []
    errors: dict[int, RowError] = {}
    for line, asked in found:
        if line.error is not None:
            errors[len(ids)] = RowError(line.error.code, line.error.message)
        ids += _row_ids(line)
        prompts += [None] if asked is None else asked.prompts
        cells += [{} if asked is None else asked.cells] * line.num_rows
    names = dict.fromkeys(name for row in cells for name, cell in row.items() if cell is not None)
    settings: dict[str, Column] = {name: [row.get(name) for row in cells] for name in names}
    return JobTable({"id": ids, **_prompt_columns(prompts), **settings}, len(ids), errors)


def _row_ids(line: Line) -> list[str | None]:
    if line.error is not None:
        return [None]
    if line.num_rows == 1:
        return [line.custom_id]
    return [f"{line.custom_id}#{k}" for k in range(line.num_rows)]


def response_lines(
    requests: Requests,
    results: pa.Table,
    *,
    created: int,
    run_id: str,
    tokenizer: Decoder | None,
    served_model: str = "",
) -> Iterator[str]:
    """The response to each request line, in order, as JSON without a line end.

    Args:
        requests: the block of lines.
        results: the result rows of `requests.rows` and no others, in order.
        created: seconds since 1970.
        run_id: ids of responses are a function of it and of the number of the line.
        tokenizer: shows the tokens of log-probabilities, and echoed token ids.
        served_model: named in the response to a request that names no model.

    Raises:
        ValueError: `results` does not hold the rows of `requests.rows`.
    """
    starts = np.flatnonzero(results.column("sample_index").to_numpy() == 0)  # of each row
    if len(starts) != requests.rows.num_rows:
        raise ValueError(f"the result has {len(starts)} rows of the {requests.rows.num_rows} that were asked")
    bounds = [*starts.tolist(), results.num_rows]
    writer = _Writer(requests, _Results(results), TokenTexts(tokenizer), created, run_id, served_model)
    row = 0
    for index, line in enumerate(requests.lines):
        slots = [range(bounds[r], bounds[r + 1]) for r in range(row, row + line.num_rows)]
        text = json.dumps(writer.response(index, row, slots), ensure_ascii=False, allow_nan=False)
        yield text.translate(_LINE_ENDS)
        row += line.num_rows


class _Results:
    """The columns of the result that responses need; lists stay in Arrow until they are."""

    def __init__(self, table: pa.Table) -> None:
        plain = ("text", "finish_reason", "num_prompt_tokens", "num_cached_tokens", "num_generated_tokens")
        self._cells = {name: table.column(name).to_pylist() for name in (*plain, "error_code", "error")}
        self._token_ids = table.column("token_ids")
        self._logprobs = table.column("logprobs")

    def cell(self, name: str, slot: int) -> Any:
        return self._cells[name][slot]

    def tokens(self, slot: int) -> tuple[list[int], list[float]] | None:
        """Token ids and log-probabilities of a sample, if it was asked for these."""
        logprobs = self._logprobs[slot].as_py()
        if logprobs is None:
            return None
        return self._token_ids[slot].as_py(), [max(logprob, _LEAST_LOGPROB) for logprob in logprobs]


@dataclass(frozen=True, slots=True)
class _Writer:
    requests: Requests
    results: _Results
    tokens: TokenTexts
    created: int
    run_id: str
    served_model: str

    def response(self, index: int, first_row: int, slots: Sequence[range]) -> _Json:
        """The response to the line at `index` of the block, whose rows have these slots of the result."""
        line = self.requests.lines[index]
        number = self.requests.first_line + index
        error = line.error or self._found_later(line, slots)
        never_was = error is not None and error.status is None
        body = self._body(line, number, first_row, slots) if error is None else _error_body(error)
        status = 200 if error is None else error.status
        return {
            "id": self._id("batch_req_", number),
            "custom_id": line.custom_id,
            "response": None
            if never_was
            else {"status_code": status, "request_id": self._id("req_", number), "body": body},
            "error": {"code": error.code, "message": error.message} if error is not None and never_was else None,
        }

    def _id(self, prefix: str, number: int) -> str:
        return prefix + hashlib.blake2b(f"{prefix}{self.run_id}:{number}".encode(), digest_size=12).hexdigest()

    def _found_later(self, line: Line, slots: Sequence[range]) -> LineError | None:
        """The first error of the line's rows that the engine found."""
        for k, of_row in enumerate(slots):
            code = self.results.cell("error_code", of_row[0])
            if code is not None:
                where = f"prompt {k}: " if len(slots) > 1 else ""
                message = f"{where}{self.results.cell('error', of_row[0])}"
                return LineError(code, message, _param_of(code, line), 500 if code == "bad_logits" else 400)
        return None

    def _body(self, line: Line, number: int, first_row: int, slots: Sequence[range]) -> _Json:
        is_chat = line.endpoint == CHAT
        choices: list[_Json] = []
        for row, of_row in enumerate(slots, start=first_row):
            before = self._prompt_text(row) if line.echo else ""
            for slot in of_row:
                own = self._chat_choice(slot) if is_chat else self._completion_choice(slot, before)
                choices.append(
                    {"index": len(choices), **own, "finish_reason": self.results.cell("finish_reason", slot)}
                )
        return {
            "id": self._id("chatcmpl-" if is_chat else "cmpl-", number),
            "object": "chat.completion" if is_chat else "text_completion",
            "created": self.created,
            "model": self.served_model if line.model is None else line.model,
            "choices": choices,
            "usage": self._usage(slots),
        }

    def _prompt_text(self, row: int) -> str:
        columns = self.requests.rows.columns
        text, token_ids = columns["prompt"][row], columns["prompt_token_ids"][row]
        return cast(str, text) if text is not None else self.tokens.text_of(cast("list[int]", token_ids))

    def _chat_choice(self, slot: int) -> _Json:
        content = self.results.cell("text", slot)
        found = self.results.tokens(slot)
        logprobs = None
        if found is not None:
            shown = [
                {"token": text, "logprob": logprob, "bytes": None if raw is None else list(raw), "top_logprobs": []}
                for (text, raw), logprob in zip(map(self.tokens.token, found[0]), found[1], strict=True)
            ]
            logprobs = {"content": shown, "refusal": None}
        return {"message": {"role": "assistant", "content": content, "refusal": None}, "logprobs": logprobs}

    def _completion_choice(self, slot: int, before: str) -> _Json:
        text = self.results.cell("text", slot) or ""
        found = self.results.tokens(slot)
        logprobs = None
        if found is not None:
            texts = [self.tokens.token(token)[0] for token in found[0]]
            logprobs = {
                "tokens": texts,
                "token_logprobs": found[1],
                "top_logprobs": [{shown: logprob} for shown, logprob in zip(texts, found[1], strict=True)],
                "text_offset": self.tokens.offsets(found[0], len(text)),
            }
        return {"text": before + text, "logprobs": logprobs}

    def _usage(self, slots: Sequence[range]) -> _Json:
        """A prompt counts once for all its samples, and is cached as far as it was computed for none of them."""
        prompt = cached = generated = 0
        for of_row in slots:
            length = self.results.cell("num_prompt_tokens", of_row[0])
            computed = sum(length - self.results.cell("num_cached_tokens", slot) for slot in of_row)
            prompt += length
            cached += max(0, length - computed)
            generated += sum(self.results.cell("num_generated_tokens", slot) for slot in of_row)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _error_body(error: LineError) -> _Json:
    kind = "server_error" if error.status == 500 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _param_of(code: str, line: Line) -> str | None:
    """The field of the request that an error of its row is about."""
    if code in ("too_long", "empty_prompt", "bad_token_id", "bad_prompt", "bad_messages"):
        return _prompt_param(line)
    if code in ("bad_schema", "unsupported"):
        return line.constrained_by
    return "custom_id" if code == "duplicate_id" else None
