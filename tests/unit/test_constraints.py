"""What is generated under a constraint meets it; what cannot be executed is an error of its row, and costs little."""

from __future__ import annotations

import json
import re
import resource
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any

import llguidance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from batchkv import constraints, matchers
from batchkv.constraints import Constraint, ConstraintChecks, ConstraintError, Grammars
from batchkv.engine import Engine
from batchkv.grammar_check import check_grammars
from batchkv.json_schema import parse_schema
from batchkv.matchers import Matchers
from batchkv.sampling_params import RowParams, SamplingParams
from tests.jobs import read_job
from tests.tiny_models import EOS, FAMILIES, VOCAB_SIZE, tiny_tokenizer

Row = dict[str, Any]
JOB = pa.schema(
    [
        ("id", pa.int64()),
        ("prompt", pa.string()),
        ("choices", pa.list_(pa.string())),
        ("regex", pa.string()),
        ("json_schema", pa.string()),
    ]
)
EOS_ID = int(tiny_tokenizer().convert_tokens_to_ids(EOS))


@cache
def model() -> PreTrainedModel:
    return FAMILIES["llama"]()


@cache
def engine() -> Engine:
    return Engine(model(), tiny_tokenizer())


def run(rows: list[Row], sampling: SamplingParams, *, overlap: bool = False) -> list[Row]:
    table = pa.Table.from_pylist([{"id": i, "prompt": f"row {i}"} | row for i, row in enumerate(rows)], schema=JOB)
    engine()._overlap = overlap
    return engine().run(table, sampling).to_pylist()


def tokens(text: str) -> list[int]:
    """One for each character."""
    return [int(tiny_tokenizer().convert_tokens_to_ids(character)) for character in text]


def ids(bits: np.ndarray) -> set[int]:
    """The tokens that a mask, int32 [words], allows."""
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def grammars() -> Grammars:
    return Grammars(tiny_tokenizer(), VOCAB_SIZE)


# ---------------------------------------------------------------- what is generated

# ASCII: others that begin with the same byte cannot be told apart by tokens that are whole characters
CHARACTERS = st.sampled_from([c for c in tiny_tokenizer().get_vocab() if len(c) == 1 and c.isascii()])
TEXTS = st.text(CHARACTERS, min_size=1, max_size=6)
CLASSES = st.sampled_from(["[a-z]", r"\d", "th", "É", "[^0-9]", r"\.", "(in|on|e)", " "])
REPEATS = st.sampled_from(["", "?", "{1,3}", "{2}"])
REGEXES = st.lists(st.tuples(CLASSES, REPEATS).map("".join), min_size=1, max_size=4).map("".join)
VALUES = st.recursive(
    st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.just({"type": "integer", "minimum": -20, "maximum": 300}),
        st.lists(TEXTS, min_size=1, max_size=3, unique=True).map(lambda texts: {"enum": texts}),
        st.just({"type": "string", "maxLength": 4}),
    ),
    lambda inner: st.one_of(
        inner.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2}),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=3,
)
ROWS = st.one_of(
    st.lists(TEXTS, min_size=1, max_size=4, unique=True).map(lambda texts: {"choices": texts}),
    REGEXES.map(lambda regex: {"regex": regex}),
    VALUES.map(lambda schema: {"json_schema": json.dumps(schema)}),
)


def meets(value: Any, schema: Row) -> bool:
    """A validator for the schemas above."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "array":
        return isinstance(value, list) and 1 <= len(value) <= 2 and all(meets(v, schema["items"]) for v in value)
    if kind == "object":
        parts = schema["properties"]
        return (
            isinstance(value, dict) and value.keys() == parts.keys() and all(meets(value[k], parts[k]) for k in parts)
        )
    if kind == "string":
        return isinstance(value, str) and len(value) <= 4
    if kind == "integer":
        return type(value) is int and -20 <= value <= 300
    return value is None if kind == "null" else isinstance(value, bool)


def is_met(text: str, row: Row) -> bool:
    if "choices" in row:
        return text in row["choices"]
    if "regex" in row:
        return re.fullmatch(row["regex"], text) is not None
    return meets(json.loads(text), json.loads(row["json_schema"]))


@settings(max_examples=12)
@given(
    rows=st.lists(ROWS, min_size=4, max_size=10), temperature=st.sampled_from([0.0, 1.0, 3.0]), overlap=st.booleans()
)
def test_every_text_meets_its_constraint(rows: list[Row], temperature: float, overlap: bool) -> None:
    sampling = SamplingParams(max_tokens=60, temperature=temperature, n=2, top_p=0.98)
    for result in run(rows, sampling, overlap=overlap):
        assert result["error"] is None
        if result["finish_reason"] == "stop":  # only numbers can go on with zeros
            assert is_met(result["text"], rows[result["id"]]), (result["text"], rows[result["id"]])
        else:
            assert "json_schema" in rows[result["id"]]


def test_a_text_that_nothing_can_follow_ends_without_an_end_token() -> None:
    (result,) = run([{"choices": ["abc"]}], SamplingParams(max_tokens=20))
    assert (result["text"], result["finish_reason"]) == ("abc", "stop")
    assert result["token_ids"] == tokens("abc")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_text_that_could_go_on_ends_by_an_end_token(overlap: bool) -> None:
    results = run([{"regex": "[a-z]+"}], SamplingParams(max_tokens=400, temperature=1.0, n=20), overlap=overlap)
    stopped = [result for result in results if result["finish_reason"] == "stop"]
    assert len(stopped) > 10
    for result in stopped:
        assert result["token_ids"][-1] == EOS_ID
        assert EOS_ID not in result["token_ids"][:-1]
        assert re.fullmatch("[a-z]+", result["text"])


def test_end_tokens_of_the_model_are_allowed_where_a_text_is_complete() -> None:
    masks = Grammars(tiny_tokenizer(), VOCAB_SIZE, (17, 99)).compiled(Constraint("regex", "a?")).first_mask
    assert ids(masks) == {17, 99, *tokens("a")}


def test_where_nothing_ends_a_text_no_token_of_the_vocabulary_stands_for_the_end() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    assert ids(Grammars(tokenizer, VOCAB_SIZE).compiled(Constraint("regex", "a?")).first_mask) == set(tokens("a"))
    held = Matchers(Grammars(tokenizer, VOCAB_SIZE), [SamplingParams(regex="ab?")])
    step(held, {0: "a"})
    assert allowed_of(held, 0) == {0: set(tokens("b"))}
    held.close()
    with pytest.raises(ConstraintError, match="no text of the model's tokens meets it"):
        Grammars(tokenizer, VOCAB_SIZE).compiled(Constraint("regex", ""))


@pytest.mark.parametrize("vocab_size", [100, 128, 129, 200])
def test_the_model_can_have_another_vocabulary_than_the_tokenizer(vocab_size: int) -> None:
    allowed = ids(Grammars(tiny_tokenizer(), vocab_size).compiled(Constraint("regex", "(?s).")).first_mask)
    shown = {i for token, i in tiny_tokenizer().get_vocab().items() if len(token) == 1 and i < vocab_size}
    assert allowed == shown


def test_rows_without_a_constraint_are_what_they_are_alone() -> None:
    free: list[Row] = [{"id": i, "prompt": f"free {i}"} for i in range(6)]
    limited: list[Row] = [{"id": 10 + i, "prompt": "limited", "regex": "[ab]{3}c*"} for i in range(6)]
    for sampling in (SamplingParams(max_tokens=8, logprobs=True), SamplingParams(max_tokens=8, temperature=1.0, n=2)):
        expected = run(free, sampling)
        mixed = [row for pair in zip(free, limited, strict=True) for row in pair]
        got = [row for row in run(mixed, sampling) if row["id"] < 10]
        assert [row["token_ids"] for row in got] == [row["token_ids"] for row in expected]


def test_greedy_twins_are_those_with_the_same_constraint() -> None:
    different: list[Row] = [{}, {"choices": ["a"]}, {"choices": ["b"]}, {"regex": "b"}, {}]
    rows = [{"id": i, "prompt": "p"} | row for i, row in enumerate(different)]
    results = run(rows, SamplingParams(max_tokens=1))
    assert [result["text"] for result in results[1:4]] == ["a", "b", "b"]
    assert results[0]["text"] == results[4]["text"] not in ("a", "b")
    plan = engine().plan(pa.Table.from_pylist(rows, schema=JOB), SamplingParams(max_tokens=1))
    assert plan.totals.sequences == 4


# ---------------------------------------------------------------- matchers


def running(*params: SamplingParams) -> Matchers:
    return Matchers(grammars(), params)


def allowed_of(held: Matchers, *sequences: int) -> dict[int, set[int]]:
    allowed = held.masks(np.array(sequences))
    assert allowed is not None
    return {sequences[row]: ids(bits) for row, bits in zip(allowed.rows, allowed.bits, strict=True)}


def step(held: Matchers, text: dict[int, str], ended: tuple[int, ...] = ()) -> dict[int, bool]:
    sequences = np.array(list(text))
    is_complete = held.advance(sequences, np.array([tokens(c)[0] for c in text.values()], np.int32))
    held.settle(sequences, is_complete | np.isin(sequences, ended))
    return dict(zip(text, is_complete.tolist(), strict=True))


def test_matchers_follow_their_sequences() -> None:
    choice = SamplingParams(choices=("ab", "ac"))
    held = running(choice, SamplingParams(), SamplingParams(regex="x{2}"), choice)
    assert held.masks(np.array([1])) is None
    assert allowed_of(held, 2, 1, 0) == {2: set(tokens("x")), 0: set(tokens("a"))}
    assert step(held, {0: "a", 1: "q", 2: "x"}) == {0: False, 1: False, 2: False}
    assert allowed_of(held, 0, 3, 2) == {0: set(tokens("bc")), 3: set(tokens("a")), 2: set(tokens("x"))}
    # 2 is set aside for two steps, and its matcher and mask are there when it comes back
    assert step(held, {0: "c"}) == {0: True}
    assert step(held, {3: "a"}) == {3: False}
    assert allowed_of(held, 0, 2, 3) == {2: set(tokens("x")), 3: set(tokens("bc"))}  # 0 has ended
    assert step(held, {2: "x", 3: "b"}) == {2: True, 3: True}
    assert not held._running
    held.close()


def test_slots_are_used_again() -> None:
    held = running(*[SamplingParams(regex="a+")] * 40)
    for sequence in range(40):
        step(held, {sequence: "a"})
        step(held, {sequence: "a"}, ended=(sequence,))
    assert len(held._masks) == 8
    held.close()


def test_equal_constraints_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Constraint] = []
    compile_one = Grammars._compile

    def counted(self: Grammars, constraint: Constraint) -> Any:
        compiled.append(constraint)
        return compile_one(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", counted)
    run([{"regex": "a[bc]{4}"}] * 9 + [{"choices": ["x"]}] * 9, SamplingParams(max_tokens=9, temperature=1.0, n=2))
    assert compiled == [Constraint("regex", "a[bc]{4}"), Constraint("choices", ("x",))]


EVER_MORE_STATES = "b{8}([a-z ]*)[aeiou]([a-z ]){40}"  # after some tokens


def limited_states(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=count, verbose_errors=False)
    monkeypatch.setattr(constraints, "LIMITS", limits)


def beginnings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots whose matchers begin again."""
    begun: list[int] = []
    begin_again = Matchers._begin_again

    def noted(self: Matchers, slot: int) -> None:
        begun.append(slot)
        begin_again(self, slot)

    monkeypatch.setattr(Matchers, "_begin_again", noted)
    return begun


def test_a_limit_met_while_running_is_an_error_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    limited_states(monkeypatch, 50)
    begun = beginnings(monkeypatch)
    rows: list[Row] = [{"regex": "b{3}"}, {"regex": EVER_MORE_STATES}, {}]
    for overlap in (False, True):
        results = run(rows, SamplingParams(max_tokens=40, temperature=1.0), overlap=overlap)
        assert [result["error_code"] for result in results] == [None, "bad_schema", None]
        assert "too many states" in results[1]["error"]
        assert results[0]["text"] == "bbb"
    assert begun  # it was compiled


def test_a_sequence_does_not_fail_by_what_others_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All matchers of a grammar share its states, and the limit of these."""
    limited_states(monkeypatch, 60)
    sampling = SamplingParams(max_tokens=20, temperature=3.0)
    begun = beginnings(monkeypatch)
    rows: list[Row] = [{"regex": "([a-m]{9}|[c-z]{9}|[a-p]{4}[x-z]{5}|[h-z]{5}[a-d]{4})e{4}"} for _ in range(60)]
    results = run(rows, sampling)
    assert begun
    assert {result["error_code"] for result in results} == {None}
    assert all(is_met(result["text"], rows[0]) for result in results)


def test_a_panic_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    fill = Matchers._fill

    def panicking(self: Matchers, slots: list[int]) -> None:
        if any(self._running[slot].constraint == Constraint("regex", "b{3}") for slot in slots):
            raise PanicException
        fill(self, slots)

    monkeypatch.setattr(matchers.Matchers, "_fill", panicking)
    results = run([{"regex": "a{3}"}, {"regex": "b{3}"}], SamplingParams(max_tokens=9))
    assert [(result["text"], result["error_code"]) for result in results] == [("aaa", None), (None, "bad_schema")]


# ---------------------------------------------------------------- what cannot be executed

DEEP = 10_000
HOSTILE: dict[str, tuple[Row, str]] = {
    "no regex": ({"regex": "(a"}, "unclosed group"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-around"),
    "never": ({"regex": r"[^\s\S]"}, "no text meets it"),
    "repeats": ({"regex": "((a{100}){100}){100}"}, ""),
    "long regex": ({"regex": "a?" * 300_000}, ""),
    "megabytes": ({"regex": "a" * 3_000_000}, "more than 1048576 characters"),
    "deep regex": ({"regex": "(" * DEEP + "a" + ")" * DEEP}, ""),
    "surrogate": ({"choices": ["\ud800"]}, "surrogate"),
    "no JSON": ({"json_schema": "{"}, "it is no JSON"),
    "injection": ({"json_schema": '{}}, {"regex": "a"'}, "it is no JSON"),
    "a number": ({"json_schema": "3"}, "it is no object"),
    "false": ({"json_schema": "false"}, "nothing meets it"),
    "unknown type": ({"json_schema": '{"type": "secret"}'}, "type"),
    "unsupported": ({"json_schema": '{"not": {"type": "string"}}'}, "not"),
    "remote": ({"json_schema": '{"$ref": "http://localhost:1/x.json"}'}, ""),
    "deep": ({"json_schema": '{"items":' * DEEP + "{}" + "}" * DEEP}, "nested deeper than 100 levels"),
    "less deep": ({"json_schema": '{"items":' * 120 + "{}" + "}" * 120}, "nested deeper than 100 levels"),
    "long": ({"json_schema": json.dumps({"enum": ["x" * 9] * 100_000})}, "characters"),
    "endless": (
        {"json_schema": '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'},
        "endless",
    ),
    "exponential": (
        {
            "json_schema": json.dumps(
                {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(60)]}
            )
        },
        "too complex",
    ),
    "properties": (
        {"json_schema": json.dumps({"properties": {f"p{i}": {"pattern": f"^(a|b){{{i}}}c$"} for i in range(5000)}})},
        "",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_errors_of_their_rows_and_cost_little(name: str) -> None:
    row, says = HOSTILE[name]
    if name == "surrogate":  # Arrow has no such strings, arguments can
        params = RowParams.of([SamplingParams(choices=tuple(row["choices"]))])
        errors = ConstraintChecks(tiny_tokenizer(), VOCAB_SIZE, ()).check(params, {})
        assert says in errors[0].message
        return
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = process_time()
    bad, good = run([row, {"regex": "b{3}"}], SamplingParams(max_tokens=4))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = process_time() - started + after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert seconds < 5 + 1  # the start of a process, the model
    # KiB of the largest child there ever was, of any test; a child begins as large as what it is forked from
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after.ru_maxrss <= max(before.ru_maxrss, own, 1 << 20)
    assert bad["error_code"] == "bad_schema"
    assert says in bad["error"]
    assert len(bad["error"]) < 160
    assert good["text"] == "bbb"


def test_a_process_that_ends_takes_no_other_grammar_with_it() -> None:
    good = llguidance.LLMatcher.grammar_from_regex("a")
    bad = llguidance.LLMatcher.grammar_from_json_schema(HOSTILE["exponential"][0]["json_schema"])
    answers = list(check_grammars([good, bad, good, llguidance.LLMatcher.grammar_from_regex("(")]))
    assert [answer is None for answer in answers] == [True, False, True, False]


LIST: Row = {"type": "object", "properties": {"next": {"$ref": "#"}}}
TREE: Row = {
    "$defs": {
        "tree": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        "node": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "minItems": 2},
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    ("schema", "has_end"),
    [
        (True, True),
        ({}, True),
        (LIST, True),
        (LIST | {"required": ["next"]}, False),
        (LIST | {"required": ["other"]}, True),
        (TREE, True),
        (TREE | {"$defs": TREE["$defs"] | {"tree": {"$ref": "#/$defs/node"}}}, False),
        ({"$ref": "#"}, False),
        ({"allOf": [{"type": "string"}, {"$ref": "#"}]}, False),
        ({"anyOf": [{"type": "string"}, {"$ref": "#"}]}, True),
        ({"anyOf": [{"$ref": "#"}]}, False),
        ({"type": "array", "prefixItems": [True, {"$ref": "#"}], "minItems": 1}, True),
        ({"type": "array", "prefixItems": [True, {"$ref": "#"}], "minItems": 2}, False),
        ({"$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}, "$ref": "#/$defs/a~1b"}, False),
        ({"$ref": "#/nowhere"}, True),  # the compiler says what it is
    ],
)
def test_endless_schemas_are_found(schema: Any, has_end: bool) -> None:
    if has_end:
        assert parse_schema(json.dumps(schema)) == schema
    else:
        with pytest.raises(ValueError, match="endless"):
            parse_schema(json.dumps(schema))


def test_without_a_fast_tokenizer_nothing_is_constrained() -> None:
    table = pa.table({"prompt_token_ids": [[5, 6], [5, 6]], "regex": ["a", None]})
    results = Engine(model()).run(table, SamplingParams(max_tokens=2)).to_pylist()
    assert [result["error_code"] for result in results] == ["bad_schema", None]
    assert results[0]["error"].startswith("regex is set, but there is no tokenizer: ")

    class SlowTokenizer:
        is_fast = False

    params = RowParams.of([SamplingParams(choices=("a",))])
    checks = ConstraintChecks(SlowTokenizer(), VOCAB_SIZE, ())  # type: ignore[arg-type]
    found, errors = checks.grammars, checks.check(params, {})
    assert found is None
    assert "SlowTokenizer is no fast tokenizer" in errors[0].message


def test_choices_that_are_scored_are_not_generated_under_a_constraint() -> None:
    scored = SamplingParams(choices=("a", "b"), choice_mode="score")
    checks = ConstraintChecks(None, VOCAB_SIZE, ())
    assert checks.check(RowParams.of([scored]), {}) == {}
    assert checks.grammars is None


# ---------------------------------------------------------------- parameters and columns


def test_a_row_has_one_constraint_at_most() -> None:
    with pytest.raises(ValueError, match="choices and json_schema are given together"):
        SamplingParams(choices=("a",), json_schema="{}")
    for wrong in (("a", "a"), ("",)):
        with pytest.raises(ValueError, match="must be distinct strings with text"):
            SamplingParams(choices=wrong)
    with pytest.raises(ValueError, match="choice_mode is 'guess'"):
        SamplingParams(choices=("a",), choice_mode="guess")  # type: ignore[arg-type]


def test_columns_beat_the_default_whatever_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "job.jsonl"
    schema = {"type": "null", "properties": {"a": {"const": None}, "b": {}}}
    rows: list[Row] = [
        {},
        {"choices": ["x", "y"]},
        {"json_schema": schema},
        {"json_schema": json.dumps(schema)},
        {"sampling_params": {"regex": "b"}},
    ]
    path.write_text("".join(json.dumps({"prompt": "a"} | row) + "\n" for row in rows))
    default = SamplingParams(regex="a")
    job = read_job(path, default)
    assert not job.errors
    free = replace(default, regex=None)
    text = json.dumps(schema)
    assert list(job.params) == [
        default,
        replace(free, choices=("x", "y")),
        replace(free, json_schema=text),
        replace(free, json_schema=text),
        replace(free, regex="b"),
    ]


def test_a_schema_in_a_struct_is_without_what_arrow_fills_in() -> None:
    rows = [{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}, {"enum": ["x"]}]
    table = pa.table({"prompt": ["a", "b"], "json_schema": rows})
    assert [json.loads(params.json_schema or "") for params in read_job(table, SamplingParams()).params] == rows


@pytest.mark.parametrize(
    "cell",
    [
        {"choices": []},
        {"choices": "red"},
        {"choices": ["red", "red"]},
        {"choices": ["red", ""]},
        {"choices": [1]},
        {"regex": 5},
        {"regex": ["a"]},
        {"json_schema": ["a"]},
        {"json_schema": 3},
        {"choices": ["red"], "regex": "a"},
    ],
    ids=str,
)
def test_cells_of_another_kind_are_errors_of_their_rows(cell: Row, tmp_path: Path) -> None:
    path = tmp_path / "job.jsonl"
    path.write_text(json.dumps({"prompt": "a"} | cell) + "\n" + json.dumps({"prompt": "b"}) + "\n")
    errors = read_job(path, SamplingParams()).errors
    assert {row: error.code for row, error in errors.items()} == {0: "bad_parameter"}
    assert all(name in errors[0].message for name in cell)


def test_a_text_that_the_tokens_cannot_write_is_an_error_of_its_row() -> None:
    """No token has the character, which shows only when the text comes to it."""
    first, later = run([{"regex": "é"}, {"regex": "abcdefgh[ij]é"}], SamplingParams(max_tokens=20))
    assert first["error_code"] == later["error_code"] == "bad_schema"
