"""OpenAI Batch files: every line has its response, in order, and the official client's types read it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import openai.types
import openai.types.chat
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchkv.errors import RowError
from batchkv.io.columns import is_batch, to_cells
from batchkv.io.openai_batch import Requests, read_requests, response_lines
from batchkv.io.parameters import read_parameters
from batchkv.io.prompts import read_prompts
from batchkv.io.read import JobTable
from batchkv.io.token_texts import TokenTexts
from batchkv.records import Record, as_batch
from batchkv.results import in_order
from batchkv.sampling_params import SamplingParams
from batchkv.stopping import cut
from batchkv.writer import Completion

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SECRET = "sesame-open"
END = 256  # id of the end token


def byte_tokenizer() -> Any:
    """Byte-level: token b is a byte, 256 the end token, 257 a word with the space before it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = {chr(b): b for b in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}
    byte_of |= dict(zip((c for c in alphabet if c not in byte_of), _unprintable(), strict=True))
    vocab = {char: byte_of[char] for char in alphabet} | {"<|end|>": END, "Ġyes": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False, special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def _unprintable() -> list[int]:
    return [*range(0x21), *range(0x7F, 0xA1), 0xAD]


TOKENIZER = byte_tokenizer()


def line(custom_id: Any = "a", url: Any = CHAT, method: Any = "POST", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": method, "url": url, "body": {"model": "m", **body}}


def chat(custom_id: Any = "a", **body: Any) -> dict[str, Any]:
    return line(custom_id, CHAT, **{"messages": HELLO, **body})


def completion(custom_id: Any = "a", **body: Any) -> dict[str, Any]:
    return line(custom_id, COMPLETIONS, **{"prompt": "Hello", **body})


def read(*lines: Mapping[str, Any], first_line: int = 1, taken: Sequence[str] = ()) -> Requests:
    """Lines as JSON lines files have them: columns of Python values."""
    names = dict.fromkeys(name for one in lines for name in one)
    table = JobTable({name: [one.get(name) for one in lines] for name in names}, len(lines), {})
    return read_requests(table, first_line, taken=taken)


def rows(requests: Requests) -> list[dict[str, Any]]:
    """The rows of a block without null cells."""
    columns = {name: to_cells(column) for name, column in requests.rows.columns.items()}
    cells = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return [{name: cell for name, cell in row.items() if cell is not None} for row in cells]


def only_row(request: Mapping[str, Any]) -> dict[str, Any]:
    requests = read(request)
    assert requests.lines[0].error is None, requests.lines[0].error
    [row] = rows(requests)
    return row


Sample = Callable[[int], Completion]


def says(text: str, *, end: bool = True, logprob: float = -0.5) -> Completion:
    ids = [*text.encode(), *([END] if end else [])]
    return Completion(np.array(ids, np.int32), np.full(len(ids), logprob, np.float32), "stop" if end else "length")


def detokenize(samples: list[Any]) -> list[str]:
    return [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in samples]


def answers(
    requests: Requests,
    sample: Sample = lambda slot: says(f"s{slot}"),
    errors: Mapping[int, RowError] | None = None,
    tokenizer: Any = TOKENIZER,
    first_cached: int = 0,
) -> list[dict[str, Any]]:
    """The response lines to what an engine that says `sample` of each slot would give."""
    table = requests.rows
    _, prompt_errors = read_prompts(table.columns, table.num_rows)
    params, param_errors = read_parameters(table.columns, SamplingParams(), table.num_rows)
    assert prompt_errors.keys() | param_errors.keys() <= table.errors.keys(), "a good line has good rows"
    params.index[list(table.errors)] = 0
    errors = {**table.errors, **(errors or {})}
    records: list[Record] = []
    slots = iter(range(1 << 30))
    for row in range(table.num_rows):
        if row in errors:
            records.append(Record.of_error(row, errors[row]))
            next(slots)
            continue
        for index in range(params[row].n):
            completion = sample(next(slots))
            [text] = detokenize([completion.token_ids])
            records.append(
                Record(
                    row,
                    index,
                    completion.finish_reason,
                    text if completion.stop_string is None else cut(text, params[row].stop),
                    completion.token_ids,
                    completion.logprobs if params[row].logprobs else None,
                    num_prompt_tokens=10,
                    num_cached_tokens=10 if index else first_cached,  # the first sample has the prompt computed
                    num_generated_tokens=len(completion.token_ids),
                )
            )
    [results] = in_order([as_batch(records)], table.num_rows, None)
    results = results.rename_columns(["sample_index" if name == "sample" else name for name in results.column_names])
    written = list(response_lines(requests, results, created=7, run_id="run", tokenizer=tokenizer))
    assert all(len(one.splitlines()) == 1 for one in written)
    return [json.loads(one) for one in written]


def checked(response: dict[str, Any]) -> dict[str, Any]:
    """The response line, once it is seen to be what the API gives."""
    assert response.keys() == {"id", "custom_id", "response", "error"}
    assert (response["response"] is None) != (response["error"] is None)
    if response["error"] is not None:
        assert response["error"].keys() == {"code", "message"}
        return response
    inner = response["response"]
    assert inner.keys() == {"status_code", "request_id", "body"}
    body = json.dumps(inner["body"])
    if inner["status_code"] != 200:
        openai.types.shared.ErrorObject.model_validate_json(json.dumps(inner["body"]["error"]), strict=True)
    elif inner["body"]["object"] == "chat.completion":
        openai.types.chat.ChatCompletion.model_validate_json(body, strict=True)
    else:
        openai.types.Completion.model_validate_json(body, strict=True)
    return response


class TestLines:
    def test_a_batch_is_told_by_its_columns(self) -> None:
        assert is_batch(["custom_id", "method", "url", "body"])
        assert not is_batch(["custom_id", "body", "prompt"])
        assert not is_batch({"id": 1, "messages": 2}.keys())

    def test_a_line_is_a_row_and_a_list_of_prompts_several(self) -> None:
        requests = read(
            chat("a"),
            completion("b", prompt=["x", "y"]),
            completion("c", prompt=[1, 2]),
            completion("d", prompt=[[3], [4]]),
        )
        assert [one.num_rows for one in requests.lines] == [1, 2, 1, 2]
        prompts = [(r["id"], r.get("messages") or r.get("prompt") or r.get("prompt_token_ids")) for r in rows(requests)]
        assert prompts == [
            ("a", HELLO), ("b#0", "x"), ("b#1", "y"), ("c", [1, 2]), ("d#0", [3]), ("d#1", [4]),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("request_line", "code", "param"),
        [
            (chat(None), "bad_id", "custom_id"),
            (chat(5), "bad_id", "custom_id"),
            (line("a", "/v1/embeddings"), "unsupported", "url"),
            (line("a", None), "unsupported", "url"),
            (line("a", [{}]), "unsupported", "url"),
            (line("a", CHAT, "GET"), "unsupported", "method"),
            (line("a", CHAT, None), "unsupported", "method"),
        ],
    )
    def test_what_never_became_a_request_has_no_response(
        self, request_line: dict[str, Any], code: str, param: str
    ) -> None:
        requests = read(request_line)
        error = requests.lines[0].error
        assert error is not None
        assert (error.code, error.param, error.status) == (code, param, None)
        [response] = answers(requests)
        assert checked(response)["error"]["code"] == code

    def test_a_line_that_is_no_json_has_no_response(self) -> None:
        table = JobTable(
            {name: [None] for name in ("custom_id", "method", "url", "body")}, 1, {0: RowError("bad_json", "line 1")}
        )
        [response] = answers(read_requests(table, 1))
        assert checked(response)["error"] == {"code": "bad_json", "message": "line 1"}
        assert response["custom_id"] is None

    @pytest.mark.parametrize(
        "body", [None, 3, [], "no json", '"text"', '{"a":' * 2000, '{"messages": "\\ud800"}', b"\xff"]
    )
    def test_a_body_that_is_no_object_is_refused_with_its_name(self, body: Any) -> None:
        requests = read({**chat(), "body": body})
        error = requests.lines[0].error
        assert error is not None
        assert (error.param, error.status) == ("body", 400)
        assert checked(answers(requests)[0])["response"]["status_code"] == 400

    def test_a_custom_id_counts_once_whether_its_first_line_is_good_or_bad(self) -> None:
        requests = read(chat("a"), chat("a"), chat("b", n=0), chat("b"), chat("c"), taken=["c"], first_line=10)
        codes = [one.error and one.error.code for one in requests.lines]
        assert codes == [None, "duplicate_id", "bad_parameter", "duplicate_id", "duplicate_id"]
        assert [row.get("id") for row in rows(requests)] == ["a", None, None, None, None]
        assert [checked(one)["custom_id"] for one in answers(requests)] == ["a", "a", "b", "b", "c"]
        assert "line 11" in answers(requests)[1]["response"]["body"]["error"]["message"]

    def test_missing_columns_are_missing_cells(self) -> None:
        requests = read_requests(JobTable({"custom_id": ["a"], "body": [{}]}, 1, {}), 1)
        assert requests.lines[0].error is not None
        assert requests.lines[0].error.param == "url"


class TestArrow:
    LINES = (
        chat("a", temperature=0.5, stop=["\n"], response_format={"type": "text"}),
        chat("b", seed=3, messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"}]),
    )

    def columns(self, body: pa.Array) -> JobTable:
        names = ("custom_id", "method", "url")
        table = pa.table({**{name: [one[name] for one in self.LINES] for name in names}, "body": body})
        return JobTable(dict(zip(table.column_names, table.columns, strict=True)), 2, {})

    def test_a_struct_and_json_text_are_read_like_json_lines(self) -> None:
        expected = rows(read(*self.LINES))
        bodies = [one["body"] for one in self.LINES]
        texts = [json.dumps(body) for body in bodies]
        for body in (
            pa.array(bodies),
            pa.array(texts),
            pa.array(texts).dictionary_encode(),
            pa.array(texts, pa.binary()),
        ):
            assert rows(read_requests(self.columns(body), 1)) == expected

    def test_an_empty_map_is_no_bias(self) -> None:
        dtype = pa.struct([("prompt", pa.string()), ("logit_bias", pa.map_(pa.string(), pa.int64()))])
        body = pa.array([{"prompt": "a", "logit_bias": []}, {"prompt": "a", "logit_bias": [("5", 1)]}], dtype)
        table = self.columns(body)
        found = read_requests(JobTable({**table.columns, "url": [COMPLETIONS] * 2}, 2, {}), 1)
        assert [one.error and one.error.param for one in found.lines] == [None, "logit_bias"]


# One sample.
RESULT = pa.table(
    {
        "sample_index": [0], "text": ["x"], "token_ids": [[5]], "finish_reason": ["stop"], "num_prompt_tokens": [3],
        "logprobs": pa.nulls(1, pa.list_(pa.float32())), "num_cached_tokens": [0], "num_generated_tokens": [1],
        "error_code": pa.nulls(1, pa.string()), "error": pa.nulls(1, pa.string()),
    }
)  # fmt: skip
REFUSED = {
    "stream": True, "frequency_penalty": 0.5, "presence_penalty": -1, "logit_bias": {"5": 1}, "repetition_penalty": 1.1,
    "no_such_field": SECRET, "temperature": -1, "top_p": 0, "top_k": -2, "min_p": 2, "n": 10**30, "max_tokens": 0,
    "seed": 2**64, "model": 3, "ignore_eos": 1, "guided_json": 3,
}  # fmt: skip
REFUSED_IN_CHAT = {
    "tools": [{"type": "function", "function": {"name": SECRET}}], "tool_choice": "required",
    "functions": [{"name": SECRET}], "top_logprobs": 2, "audio": {"voice": SECRET}, "modalities": ["text", "audio"],
    "logprobs": 1, "messages": SECRET, "web_search_options": {}, "reasoning_effort": "high",
}  # fmt: skip
REFUSED_IN_COMPLETIONS = {
    "best_of": 2, "suffix": SECRET, "logprobs": 1, "echo": "yes", "prompt": [], "max_completion_tokens": 3,
}  # fmt: skip


class TestParameters:
    def test_the_defaults_are_those_of_the_api(self) -> None:
        assert only_row(chat()) == {"id": "a", "messages": HELLO, "temperature": 1.0}
        assert only_row(completion()) == {"id": "a", "prompt": "Hello", "temperature": 1.0, "max_tokens": 16}

    def test_every_parameter_has_its_column(self) -> None:
        common = {
            "n": 3, "temperature": 0.0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": -4, "stop": ["x", "y"],
            "stop_token_ids": [5], "ignore_eos": True,
        }  # fmt: skip
        assert only_row(chat(**common, max_tokens=9, logprobs=True)) == {
            "id": "a", "messages": HELLO, **common, "max_tokens": 9, "logprobs": True,
        }  # fmt: skip
        assert only_row(completion(**common, max_tokens=9, logprobs=0, echo=False)) == {
            "id": "a", "prompt": "Hello", **common, "max_tokens": 9, "logprobs": True,
        }  # fmt: skip

    def test_other_ways_to_say_it(self) -> None:
        assert only_row(chat(stop="x"))["stop"] == ["x"]
        assert only_row(chat(max_completion_tokens=4))["max_tokens"] == 4
        assert only_row(chat(max_completion_tokens=4, max_tokens=4))["max_tokens"] == 4
        assert only_row(chat(n=2.0))["n"] == 2
        assert only_row(completion(best_of=2, n=2))["n"] == 2
        assert only_row(completion(best_of=1))["id"] == "a"
        assert only_row(chat(logprobs=False))["logprobs"] is False
        assert only_row(completion(max_tokens=None)) == only_row(completion())

    @pytest.mark.parametrize(
        ("body", "column", "cell"),
        [
            ({"guided_choice": ["a", "b"]}, "choices", ["a", "b"]),
            ({"guided_regex": "a+"}, "regex", "a+"),
            ({"guided_json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
            ({"guided_json": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
            ({"structured_outputs": {"choice": ["a"]}}, "choices", ["a"]),
            ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
            ({"structured_outputs": {"json": {"type": "array"}}}, "json_schema", '{"type": "array"}'),
            ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
            ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
            (
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": {}, "strict": True},
                    }
                },
                "json_schema",
                "{}",
            ),
        ],
    )
    def test_constraints(self, body: dict[str, Any], column: str, cell: object) -> None:
        for request in (chat(**body), completion(**body)):
            assert only_row(request)[column] == cell
            assert read(request).lines[0].constrained_by == next(iter(body))

    def test_fields_that_ask_for_nothing_are_as_if_left_out(self) -> None:
        nothing = {
            "stream": False, "tools": [], "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0.0,
            "user": "u", "metadata": {"a": "b"}, "modalities": ["text"], "response_format": {"type": "text"},
            "seed": None, "top_logprobs": 0, "suffix": None,
        }  # fmt: skip
        assert only_row(chat(**nothing)) == only_row(chat())
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert only_row(chat(tools=tools, tool_choice="none")) == only_row(chat())

    @pytest.mark.parametrize(
        ("request_line", "param"),
        [
            *((chat(**{name: value}), name) for name, value in {**REFUSED, **REFUSED_IN_CHAT}.items()),
            *((completion(**{name: value}), name) for name, value in {**REFUSED, **REFUSED_IN_COMPLETIONS}.items()),
            (chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": SECRET}]}]), "messages"),
            (chat(messages=[]), "messages"),
            (chat(messages=[{"role": "assistant", "content": "x", "audio": {"id": SECRET}}]), "messages"),
            (line(), "messages"),
            (line(url=COMPLETIONS), "prompt"),
            (completion(prompt=["a", 3]), "prompt"),
            (completion(prompt=[1, SECRET]), "prompt"),
            (completion(prompt={"a": SECRET}), "prompt"),
            (completion(prompt=[[1], [2**40]]), "prompt"),
            (completion(echo=True, logprobs=0), "echo"),
            (chat(max_tokens=3, max_completion_tokens=4), "max_completion_tokens"),
            (chat(temperature=float("nan")), "temperature"),
            (chat(temperature=10**400), "temperature"),
            (chat(temperature=True), "temperature"),
            (chat(max_tokens="5"), "max_tokens"),
            (chat(stop_token_ids=[1, -1]), "stop_token_ids.1"),
            (chat(stop=[SECRET, ""]), "stop.1"),
            (chat(response_format={"type": SECRET}), "response_format.type"),
            (chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
            (chat(response_format={"type": "json_schema", "json_schema": {}}), "response_format.json_schema.schema"),
            (chat(guided_json={"a": float("nan")}), "guided_json"),
            (chat(structured_outputs={"grammar": SECRET}), "structured_outputs.grammar"),
            (chat(guided_regex="a", guided_choice=["a"]), "guided_regex"),
            (chat(**{f"{SECRET} key": 1}), "?"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_done_is_an_error_that_names_the_field(
        self, request_line: dict[str, Any], param: str
    ) -> None:
        requests = read(request_line)
        error = requests.lines[0].error
        assert error is not None
        assert (error.param, error.status) == (param, 400)
        assert requests.rows.errors == {0: RowError(error.code, error.message)}
        assert rows(requests) == [{}]
        response = checked(answers(requests)[0])["response"]
        assert response["status_code"] == 400
        assert response["body"]["error"] == {
            "message": error.message, "type": "invalid_request_error", "param": param, "code": error.code,
        }  # fmt: skip
        assert SECRET not in json.dumps(response)

    def test_one_bad_prompt_of_several_makes_the_line_bad(self) -> None:
        requests = read(completion("a", prompt=["x", [], "y"]), completion("b"))
        assert [one.num_rows for one in requests.lines] == [1, 1]
        assert [one["response"]["status_code"] for one in answers(requests)] == [400, 200]

    def test_bodies_typed_by_the_client_are_read(self) -> None:
        asked = ChatParams(
            model="m", messages=[{"role": "user", "content": "x"}], n=2, max_completion_tokens=5, logprobs=True
        )
        assert only_row({**chat(), "body": asked}) == {
            "id": "a", "messages": [{"role": "user", "content": "x"}], "n": 2, "temperature": 1.0, "max_tokens": 5,
            "logprobs": True,
        }  # fmt: skip
        written = CompletionParams(
            model="m", prompt=["x", "y"], echo=True, best_of=1, frequency_penalty=0, logit_bias={}, stop=None,
            suffix=None, user="u",
        )  # fmt: skip
        requests = read({**completion(), "body": written})
        assert (requests.lines[0].error, requests.lines[0].echo, requests.lines[0].num_rows) == (None, True, 2)


class TestResponses:
    def test_a_chat_line(self) -> None:
        requests = read(chat("é", n=2, logprobs=True, model="my-model"), first_line=3)
        [found] = answers(requests, lambda slot: says(["ü", "no"][slot], end=slot == 0), first_cached=4)
        half = {"token": "�", "logprob": -0.5, "top_logprobs": []}
        assert checked(found) == {
            "id": "batch_req_f8978417004bf1007893e92e",
            "custom_id": "é",
            "response": {
                "status_code": 200,
                "request_id": "req_024f9ce762bf00a51f116416",
                "body": {
                    "id": "chatcmpl-079a9443abe6626a0dae1e7c",
                    "object": "chat.completion",
                    "created": 7,
                    "model": "my-model",
                    "choices": [
                        {
                            "index": 0,
                            "message": {"role": "assistant", "content": "ü", "refusal": None},
                            "logprobs": {
                                "content": [
                                    {**half, "bytes": [0xC3]},
                                    {**half, "bytes": [0xBC]},
                                    {**half, "token": "<|end|>", "bytes": list(b"<|end|>")},
                                ],
                                "refusal": None,
                            },
                            "finish_reason": "stop",
                        },
                        {
                            "index": 1,
                            "message": {"role": "assistant", "content": "no", "refusal": None},
                            "logprobs": {
                                "content": [
                                    {**half, "token": "n", "bytes": [110]},
                                    {**half, "token": "o", "bytes": [111]},
                                ],
                                "refusal": None,
                            },
                            "finish_reason": "length",
                        },
                    ],
                    "usage": {
                        "prompt_tokens": 10,
                        "completion_tokens": 5,
                        "total_tokens": 15,
                        "prompt_tokens_details": {"cached_tokens": 4},
                    },
                },
            },
            "error": None,
        }

    def test_a_completions_line(self) -> None:
        requests = read(completion("c", prompt=["p", "q"], logprobs=0), first_line=4)
        [found] = answers(requests, lambda slot: says(["üa", "b"][slot], end=slot == 0))
        assert checked(found) == {
            "id": "batch_req_a82fe0a1f851281043d7a768",
            "custom_id": "c",
            "response": {
                "status_code": 200,
                "request_id": "req_a7082517dfb1ee754d51ea5c",
                "body": {
                    "id": "cmpl-64ca012375d289f295591393",
                    "object": "text_completion",
                    "created": 7,
                    "model": "m",
                    "choices": [
                        {
                            "index": 0,
                            "text": "üa",
                            "logprobs": {
                                "tokens": ["�", "�", "a", "<|end|>"],
                                "token_logprobs": [-0.5] * 4,
                                "top_logprobs": [{"�": -0.5}, {"�": -0.5}, {"a": -0.5}, {"<|end|>": -0.5}],
                                "text_offset": [0, 0, 1, 2],
                            },
                            "finish_reason": "stop",
                        },
                        {
                            "index": 1,
                            "text": "b",
                            "logprobs": {
                                "tokens": ["b"],
                                "token_logprobs": [-0.5],
                                "top_logprobs": [{"b": -0.5}],
                                "text_offset": [0],
                            },
                            "finish_reason": "length",
                        },
                    ],
                    "usage": {
                        "prompt_tokens": 20,
                        "completion_tokens": 5,
                        "total_tokens": 25,
                        "prompt_tokens_details": {"cached_tokens": 0},
                    },
                },
            },
            "error": None,
        }

    def test_echo_puts_each_prompt_before_its_texts(self) -> None:
        requests = read(completion(prompt=["x:", [121, 58]], n=2, echo=True))
        [found] = answers(requests)
        texts = [choice["text"] for choice in checked(found)["response"]["body"]["choices"]]
        assert texts == ["x:s0", "x:s1", "y:s2", "y:s3"]

    def test_what_the_engine_finds_wrong_with_a_row_is_the_error_of_its_line(self) -> None:
        schema = {"response_format": {"type": "json_object"}}
        requests = read(completion("a", prompt=["x", "y"], n=2), chat("b"), chat("c", **schema), chat("d"))
        errors = {
            1: RowError("too_long", "12 tokens"),
            2: RowError("bad_logits", "NaN"),
            3: RowError("unsupported", "column json_schema is set"),
        }
        found = [checked(one)["response"] for one in answers(requests, errors=errors)]
        assert [one["status_code"] for one in found] == [400, 500, 400, 200]
        assert [one["body"]["error"] for one in found[:3]] == [
            {"message": "prompt 1: 12 tokens", "type": "invalid_request_error", "param": "prompt", "code": "too_long"},
            {"message": "NaN", "type": "server_error", "param": None, "code": "bad_logits"},
            {
                "message": "column json_schema is set",
                "type": "invalid_request_error",
                "param": "response_format",
                "code": "unsupported",
            },
        ]

    def test_ids_are_a_function_of_the_run_and_the_number_of_the_line(self) -> None:
        both = answers(read(chat("a"), chat("b"), first_line=8))
        [later] = answers(read(chat("b"), first_line=9))
        ids = [(one["id"], one["response"]["request_id"], one["response"]["body"]["id"]) for one in (*both, later)]
        assert ids[1] == ids[2]
        assert len({*ids[0], *ids[1]}) == 6

    def test_without_a_tokenizer_tokens_are_numbers(self) -> None:
        requests = read(completion(prompt=[5, 6], logprobs=0, max_tokens=1))
        [found] = answers(requests, lambda slot: says("a", end=False), tokenizer=None)
        logprobs = checked(found)["response"]["body"]["choices"][0]["logprobs"]
        assert (logprobs["tokens"], logprobs["text_offset"]) == (["token_id:97"], [0])

    def test_a_logprob_that_json_cannot_hold(self) -> None:
        [found] = answers(read(chat(logprobs=True)), lambda slot: says("a", logprob=-np.inf))
        assert checked(found)["response"]["body"]["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0

    def test_line_ends_in_texts_are_escaped(self) -> None:
        text = "a\u2028b\u2029c\x85d\ne\x0bf"
        [found] = answers(read(chat()), lambda slot: says(text))
        assert found["response"]["body"]["choices"][0]["message"]["content"] == text

    def test_a_request_without_a_model_names_the_one_that_ran(self) -> None:
        requests = read({**chat(), "body": {"messages": HELLO}})
        text = next(response_lines(requests, RESULT, created=0, run_id="", tokenizer=None, served_model="served"))
        assert json.loads(text)["response"]["body"]["model"] == "served"

    def test_results_of_other_rows_are_refused(self) -> None:
        with pytest.raises(ValueError, match="1 rows of the 2"):
            next(response_lines(read(chat("a"), chat("b")), RESULT, created=0, run_id="", tokenizer=None))


class TestTokenTexts:
    def test_a_byte_level_vocabulary(self) -> None:
        texts = TokenTexts(TOKENIZER)
        assert texts.token(257) == (" yes", b" yes")
        assert texts.token(0xE2) == ("�", b"\xe2")
        assert texts.token(END) == ("<|end|>", b"<|end|>")
        assert texts.offsets([*" ü".encode(), 257, END], 3) == [0, 1, 1, 2, 3]

    def test_a_vocabulary_with_a_mark_for_spaces_and_bytes_by_number(self) -> None:
        vocab = {"<unk>": 0, "▁the": 1, "é": 2, "<0xC3>": 3, "▁": 4}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))
        assert [texts.token(i) for i in (1, 2, 3, 4)] == [
            (" the", b" the"), ("é", "é".encode()), ("�", b"\xc3"), (" ", b" "),
        ]  # fmt: skip

    def test_a_token_beyond_the_vocabulary_is_empty(self) -> None:
        assert TokenTexts(TOKENIZER).token(5000)[0] == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    "model", "messages", "prompt", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", "echo", "best_of", "response_format", "guided_json",
    "structured_outputs", "tools", "tool_choice", "stream",
)  # fmt: skip
GOOD_OR_NOT = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(FIELDS, JSON),
        "messages": st.just(HELLO) | JSON,
        "prompt": st.text(max_size=5) | st.lists(st.text(max_size=3) | st.lists(st.integers(-1, 9), max_size=3)) | JSON,
        "n": st.integers(0, 3),
        "temperature": st.floats(),
    },
)
LINES = st.fixed_dictionaries(
    {
        "custom_id": st.sampled_from("abcdef") | JSON,
        "method": st.just("POST") | JSON,
        "url": st.sampled_from((CHAT, COMPLETIONS)) | JSON,
        "body": GOOD_OR_NOT | GOOD_OR_NOT.map(json.dumps) | JSON,
    }
)


@settings(deadline=None, max_examples=150)
@given(st.lists(LINES, max_size=6))
def test_any_lines_give_as_many_responses_in_their_order(lines: list[dict[str, Any]]) -> None:
    requests = read(*lines)
    assert sum(one.num_rows for one in requests.lines) == requests.rows.num_rows
    given_ids = [one["custom_id"] if isinstance(one["custom_id"], str) else None for one in lines]
    assert [one.custom_id for one in requests.lines] == given_ids
    found = answers(requests)
    assert [checked(one)["custom_id"] for one in found] == given_ids


@settings(deadline=None, max_examples=150)
@given(st.sampled_from((CHAT, COMPLETIONS)), GOOD_OR_NOT)
def test_any_body_gives_rows_that_can_be_run_or_an_error(url: str, body: dict[str, Any]) -> None:
    requests = read({"custom_id": "a", "method": "POST", "url": url, "body": body})
    error = requests.lines[0].error
    assert (error is None) == (not requests.rows.errors)
    [found] = answers(requests)  # which asserts that nothing else is wrong with the rows
    assert checked(found)["response"]["status_code"] == (200 if error is None else 400)
