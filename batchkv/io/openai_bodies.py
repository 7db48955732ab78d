"""What the body of an OpenAI Batch request asks, in the columns of the job format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from batchkv.errors import RowErrorCode
from batchkv.io.columns import kind_of
from batchkv.sampling_params import MAX_INT32, MAX_SAMPLES

Endpoint: TypeAlias = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Endpoint = "/v1/chat/completions"
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)

# Of the API, but without influence on what is generated.
_IGNORED = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    )
)
# What is not executed, and the values that ask for nothing: many clients write every field with its default.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "bad_words": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({}, []),  # Arrow has an empty map as an empty list
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
# Columns that a body's fields of the same name fill.
_PARAMETERS = (
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
_ANY_OBJECT = '{"type":"object"}'
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a line has no completion. Like that of a `RowError`, its message never quotes the row's text.

    Attributes:
        code: that of the row which stands for the line.
        message: what is wrong.
        param: the field it is about, if it is about one.
        status: of the response; None if the line never became a request, which has no response.
    """

    code: RowErrorCode
    message: str
    param: str | None = None
    status: int | None = 400


class BadBodyError(ValueError):
    """A body that cannot be executed."""

    def __init__(self, code: RowErrorCode, message: str, param: str | None) -> None:
        super().__init__(message)
        self.error = LineError(code, message, param)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks.

    Attributes:
        model: as the body names it.
        prompts: of each row its prompt column and the cell in it.
        cells: what all rows have in the other columns, by column.
        echo: the prompt stands before the text.
        constrained_by: the field that constrains the output, if one does.
    """

    model: str | None
    prompts: tuple[tuple[str, Any], ...]
    cells: Mapping[str, Any] = field(default_factory=dict)
    echo: bool = False
    constrained_by: str | None = None


def read_body(endpoint: Endpoint, body: Mapping[str, Any]) -> Asked:
    """What `body` asks of `endpoint`. Prompts are told apart, but what is in them is not checked.

    Raises:
        BadBodyError: a field is missing, wrong, or asks for what is not supported.
    """
    given = _without_neutral(body)
    try:
        return (
            _chat(_Chat.model_validate(given)) if endpoint == CHAT else _completion(_Completion.model_validate(given))
        )
    except ValidationError as error:
        raise _first_wrong(error.errors(include_url=False, include_input=False)[0]) from None
    except RecursionError:
        raise BadBodyError("bad_json", "the body is nested too deeply", "body") from None


def _without_neutral(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that matter; those that are null or ask for nothing do not."""
    given = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
    for choice, tools in (("tool_choice", "tools"), ("function_call", "functions")):
        if given.get(choice) == "none":
            given.pop(tools, None)
    for name in _NEUTRAL.keys() & given.keys():
        if given[name] in _NEUTRAL[name]:
            del given[name]
    refused = next((name for name in body if name in _NEUTRAL and name in given), None)
    if refused is not None:
        only = " or ".join(json.dumps(value) for value in _NEUTRAL[refused])
        but = f" with any other value than {only}" if only else ""
        raise BadBodyError("unsupported", f"{refused} is not supported{but}: leave it out", refused)
    return given


def _first_wrong(error: ErrorDetails) -> BadBodyError:
    # Keys are text of the row, too, unless they look like the names of fields.
    path = [str(key) if isinstance(key, int) or _FIELD_NAME.fullmatch(key) else "?" for key in error["loc"]]
    param = ".".join(path) or None
    if error["type"] == "extra_forbidden":
        return BadBodyError("unsupported", f"the field {param} is not supported: leave it out", param)
    if error["type"] == "missing":
        code: RowErrorCode = "bad_prompt" if len(path) == 1 else "bad_parameter"
        return BadBodyError(code, f"{param} is missing", param)
    reason = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    return BadBodyError("bad_parameter", f"{param} {reason.replace('Input should be', 'must be')}", param)


def _whole(value: object) -> object:
    """3.0 is 3: JSON has one kind of number, and data frames make floats of integers that have nulls."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _only_sampled(value: int) -> int:
    if value:
        raise ValueError("must be 0: the log-probabilities of sampled tokens are returned, but no alternatives")
    return value


_Whole: TypeAlias = Annotated[int, BeforeValidator(_whole)]
_Tokens: TypeAlias = Annotated[_Whole, Field(ge=1, le=MAX_INT32)]
_Text: TypeAlias = Annotated[str, Field(min_length=1)]


class _Object(BaseModel):
    # Strict: the API takes no "1" for 1. Pydantic's messages would quote what they refuse.
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


class _JsonSchema(_Object):
    definition: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(_Object):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _StructuredOutputs(_Object):
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    regex: str | None = None
    definition: Any = Field(default=None, alias="json")
    json_object: bool | None = None


class _Body(_Object):
    """What both endpoints take; null fields have been left out."""

    model: str | None = None
    n: Annotated[_Whole, Field(ge=1, le=MAX_SAMPLES)] | None = None
    max_tokens: _Tokens | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0  # the API's default, not that of a job
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[_Whole, Field(ge=-1, le=MAX_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[_Whole, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[_Text], BeforeValidator(_as_list)] | None = None
    stop_token_ids: list[Annotated[_Whole, Field(ge=0, le=MAX_INT32)]] | None = None
    ignore_eos: bool | None = None
    response_format: _ResponseFormat | None = None
    structured_outputs: _StructuredOutputs | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_regex: str | None = None
    guided_json: Any = None


class _Chat(_Body):
    messages: list[Any]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None


class _Completion(_Body):
    prompt: Any
    max_tokens: _Tokens | None = 16  # the API's default
    logprobs: Annotated[_Whole, Field(ge=0), AfterValidator(_only_sampled)] | None = None
    echo: bool = False
    best_of: _Whole | None = None


def _chat(body: _Chat) -> Asked:
    for number, message in enumerate(body.messages):
        if isinstance(message, dict) and message.get("audio") is not None:
            raise BadBodyError("unsupported", f"the audio of message {number} is not supported", "messages")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        message = "max_completion_tokens and max_tokens differ: give only one of them"
        raise BadBodyError("bad_parameter", message, "max_completion_tokens")
    cells, constrained_by = _cells(body)
    cells.update(max_tokens=next(iter(limits), None), logprobs=body.logprobs)
    return Asked(body.model, (("messages", body.messages),), cells, constrained_by=constrained_by)


def _completion(body: _Completion) -> Asked:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadBodyError("unsupported", "best_of is not supported unless it is n: leave it out", "best_of")
    if body.echo and body.logprobs is not None:
        raise BadBodyError("unsupported", "echo is not supported with logprobs: a prompt has none", "echo")
    cells, constrained_by = _cells(body)
    cells["logprobs"] = None if body.logprobs is None else True
    return Asked(body.model, _prompts(body.prompt), cells, body.echo, constrained_by)


def _prompts(prompt: object) -> tuple[tuple[str, Any], ...]:
    """A text or a list of token ids, or a list of those."""
    if not isinstance(prompt, list) or (prompt and not isinstance(prompt[0], (str, list))):
        return (_prompt(prompt),)
    if not prompt:
        raise BadBodyError("empty_prompt", "prompt is an empty list", "prompt")
    return tuple(_prompt(item) for item in prompt)


def _prompt(prompt: object) -> tuple[str, Any]:
    if isinstance(prompt, str):
        return "prompt", prompt
    if isinstance(prompt, list):
        return "prompt_token_ids", prompt
    kind = "null" if prompt is None else kind_of(prompt)
    raise BadBodyError("bad_prompt", f"prompt is {kind}, must be a string, token ids, or a list of those", "prompt")


def _cells(body: _Body) -> tuple[dict[str, Any], str | None]:
    """The parameters by column, and the field that constrains the output."""
    cells = {name: getattr(body, name) for name in _PARAMETERS}
    constraints = _constraints(body)
    if len(constraints) > 1:
        names = " and ".join(dict.fromkeys(name for name, _, _ in constraints))
        raise BadBodyError("bad_parameter", f"{names} constrain the output twice: give only one", constraints[1][0])
    cells.update((column, cell) for _, column, cell in constraints)
    return cells, constraints[0][0] if constraints else None


def _constraints(body: _Body) -> list[tuple[str, str, Any]]:
    """Field, column and cell of each constraint that is given."""
    structured = body.structured_outputs or _StructuredOutputs()
    found: list[tuple[str, str, Any]] = [
        ("guided_choice", "choices", body.guided_choice),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_json", "json_schema", _schema("guided_json", body.guided_json)),
        ("structured_outputs", "choices", structured.choice),
        ("structured_outputs", "regex", structured.regex),
        ("structured_outputs", "json_schema", _schema("structured_outputs", structured.definition)),
        ("structured_outputs", "json_schema", _ANY_OBJECT if structured.json_object else None),
        ("response_format", "json_schema", _response_schema(body.response_format)),
    ]
    return [constraint for constraint in found if constraint[2] is not None]


def _response_schema(response_format: _ResponseFormat | None) -> str | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return _ANY_OBJECT
    if response_format.json_schema is None:
        raise BadBodyError("bad_parameter", "response_format.json_schema is missing", "response_format.json_schema")
    return _schema("response_format", response_format.json_schema.definition)


def _schema(param: str, schema: object) -> str | None:
    """A JSON schema as text, which it may be already."""
    if schema is None or isinstance(schema, str):
        return schema
    if not isinstance(schema, dict):
        raise BadBodyError("bad_parameter", f"{param} is {kind_of(schema)}, must be a JSON schema", param)
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise BadBodyError("bad_parameter", f"{param} holds what JSON cannot", param) from None
