"""Rows that wait for others: what they are given, what is computed for them, and what happens when it goes wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkv.cli.main import main
from batchkv.engine import Engine
from batchkv.progress import Watch
from batchkv.run_folder import open_run_folder
from batchkv.sampling_params import SamplingParams
from batchkv.writer import summary_of
from tests.oracle import generate_alone
from tests.tiny_models import EOS, FAMILIES, IM_END, save_tiny, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS_ID, IM_END_ID = TOKENIZER.convert_tokens_to_ids([EOS, IM_END])
NEW_TOKENS = 6
Row = dict[str, Any]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of("llama")


def engine_of(family: str, **config: Any) -> Engine:
    return Engine(FAMILIES[family](), TOKENIZER, **{"kv_memory": "64MiB", **config})


def with_config(engine: Engine, **config: Any) -> Engine:
    """The same model with other limits."""
    return Engine(engine.model, TOKENIZER, **{"kv_memory": "64MiB", **config})


def run(engine: Engine, rows: Sequence[Row], sampling: SamplingParams | None = None) -> tuple[pa.Table, dict[str, Any]]:
    results = engine.run(table_of(rows), sampling or SamplingParams(max_tokens=NEW_TOKENS))
    return results, summary_of(results.schema)


def table_of(rows: Sequence[Row]) -> pa.Table:
    """Messages as JSON, so that rows may have what others have not."""
    names = dict.fromkeys(name for row in rows for name in row)
    as_text = {name: [json.dumps(row[name]) if name in row else None for row in rows] for name in ("messages",)}
    return pa.table({name: as_text.get(name) or [row.get(name) for row in rows] for name in names})


def of_rows(results: pa.Table, column: str = "token_ids") -> dict[tuple[str, int], Any]:
    keys = zip(results["id"].to_pylist(), results["sample_index"].to_pylist(), strict=True)
    return dict(zip(keys, results[column].to_pylist(), strict=True))


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


SYSTEM = says("system", "you are the editor of the king")


def conversation(i: int, **columns: Any) -> list[Row]:
    """A draft, what is said of it, and another draft in the same conversation."""
    review = f'what is wrong in: {{{{ outputs["draft {i}"] }}}}'
    mend = f'mend it: {{{{ outputs["critique {i}"] }}}}'
    return [
        {"id": f"draft {i}", "messages": [SYSTEM, says("user", f"write of {i}")], **columns},
        {
            "id": f"critique {i}",
            "messages": [SYSTEM, says("user", review)],
            "depends_on": [f"draft {i}"],
            **columns,
        },
        {
            "id": f"revise {i}",
            "messages": [says("user", mend)],
            "parent": f"draft {i}",
            "depends_on": [f"critique {i}"],
            **columns,
        },
    ]


def conversations(count: int) -> list[Row]:
    """Every other one ends its replies as its template does."""
    return [row for i in range(count) for row in conversation(i, stop_token_ids=[IM_END_ID] if i % 2 else None)]


def chat_ids(*messages: dict[str, str]) -> list[int]:
    text = TOKENIZER.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    ids: list[int] = TOKENIZER.encode(str(text), add_special_tokens=False)
    return ids


def turn_ids(reply: Sequence[int], content: str, ends: Sequence[int] = ()) -> list[int]:
    """What stands behind a reply in the conversation of the tiny template."""
    end = "" if reply[-1] == IM_END_ID and IM_END_ID in ends else "<|im_end|>"
    text = f"{end}\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


def expected_prompts(rows: Sequence[Row], results: pa.Table) -> dict[str, list[int]]:
    """Prompts of `conversations`, from the texts and tokens of the results."""
    tokens, texts = of_rows(results), of_rows(results, "text")
    prompts: dict[str, list[int]] = {}
    for row in rows:
        kind, i = row["id"].split()
        content = row["messages"][-1]["content"]
        for before in ("draft", "critique"):
            content = content.replace(f'{{{{ outputs["{before} {i}"] }}}}', texts[f"{before} {i}", 0])
        if kind == "revise":
            reply = tokens[f"draft {i}", 0]
            before_it = [*prompts[f"draft {i}"], *reply]
            prompts[row["id"]] = before_it + turn_ids(reply, content, row["stop_token_ids"] or ())
        else:
            prompts[row["id"]] = chat_ids(SYSTEM, says("user", content))
    return prompts


class IdealCache:
    """All prefixes that ever went through the model, as a plain trie."""

    def __init__(self) -> None:
        self._root: dict[int, Any] = {}

    def take_in(self, token_ids: Iterable[int]) -> int:
        """How many tokens of a sequence are no continuation of what was seen."""
        node, new = self._root, 0
        for token in token_ids:
            if token not in node:
                node[token] = {}
                new += 1
            node = node[token]
        return new


def ideal_prefill(generations: Sequence[Sequence[tuple[list[int], list[list[int]]]]]) -> int:
    """Of generations of (prompt, samples): prompts of one are computed before anything that is generated in it."""
    cache, computed = IdealCache(), 0
    for generation in generations:
        computed += sum(cache.take_in(prompt) for prompt, _ in generation)
        for prompt, samples in generation:
            for sample in samples:
                cache.take_in([*prompt, *sample[:-1]])
    return computed


HUNDRED = conversations(100)


@pytest.fixture(scope="module")
def outcome(engine: Engine) -> tuple[pa.Table, dict[str, Any]]:
    return run(engine, HUNDRED)


class TestThreeGenerations:
    ROWS = HUNDRED

    def test_every_token_is_computed_once(self, outcome: tuple[pa.Table, dict[str, Any]]) -> None:
        results, summary = outcome
        prompts, tokens = expected_prompts(self.ROWS, results), of_rows(results)
        assert results["num_prompt_tokens"].to_pylist() == [len(prompts[row["id"]]) for row in self.ROWS]
        generations = [
            [(prompts[f"{kind} {i}"], [tokens[f"{kind} {i}", 0]]) for i in range(100)]
            for kind in ("draft", "critique", "revise")
        ]
        ideal = ideal_prefill(generations)
        assert summary["prefill_tokens"] == summary["planned_prefill_tokens"] == ideal
        assert summary["recomputed_tokens"] == 0
        computed = np.array(results["num_prompt_tokens"]) - np.array(results["num_cached_tokens"])
        assert computed.sum() == ideal
        assert ideal < 0.5 * summary["prompt_tokens"]

    def test_replies_stand_unchanged_in_the_next_prompt(
        self, engine: Engine, outcome: tuple[pa.Table, dict[str, Any]]
    ) -> None:
        results, _ = outcome
        prompts, tokens = expected_prompts(self.ROWS, results), of_rows(results)
        for row in self.ROWS[::7]:
            ends = [EOS_ID, *(row["stop_token_ids"] or [])]
            assert tokens[row["id"], 0] == generate_alone(engine.model, prompts[row["id"]], NEW_TOKENS, ends)
        # made from text again, some replies would be other tokens
        texts = of_rows(results, "text")
        assert any(TOKENIZER.encode(texts[key], add_special_tokens=False) != ids for key, ids in tokens.items())

    @pytest.mark.parametrize("seed", [1, 2])
    def test_the_order_of_the_file_does_not_matter(
        self, engine: Engine, outcome: tuple[pa.Table, dict[str, Any]], seed: int
    ) -> None:
        rows = list(self.ROWS)
        np.random.default_rng(seed).shuffle(rows)  # type: ignore[arg-type]
        results, summary = run(engine, rows)
        assert of_rows(results) == of_rows(outcome[0])
        assert summary["prefill_tokens"] == outcome[1]["prefill_tokens"]
        assert results["id"].to_pylist() == [row["id"] for row in rows]

    def test_without_sharing_all_is_computed(self, engine: Engine, outcome: tuple[pa.Table, dict[str, Any]]) -> None:
        results, summary = run(with_config(engine, no_prefix_sharing=True), self.ROWS[:60])
        whole = of_rows(outcome[0])
        assert all(whole[key] == ids for key, ids in of_rows(results).items())
        assert summary["prefill_tokens"] == summary["prompt_tokens"]
        assert set(results["num_cached_tokens"].to_pylist()) == {0}

    @pytest.mark.parametrize("config", [{"max_batch_rows": 1}, {"max_batch_tokens": 16, "max_batch_rows": 3}])
    def test_small_batches(
        self, engine: Engine, outcome: tuple[pa.Table, dict[str, Any]], config: dict[str, int]
    ) -> None:
        results, summary = run(with_config(engine, **config), self.ROWS[:60])
        whole = of_rows(outcome[0])
        assert all(whole[key] == ids for key, ids in of_rows(results).items())
        assert summary["recomputed_tokens"] == 0


def least_budget(engine: Engine, whole: pa.Table) -> int:
    """Bytes of KV of the longest row, alone, in layers that see all that is before them."""
    tokens = max(np.array(whole["num_prompt_tokens"]) + NEW_TOKENS - 1)
    return int(tokens) * engine.layout.bytes_per_token


MIXED = [
    *conversations(6),
    *conversation(100, n=2, temperature=0.9, stop_token_ids=[IM_END_ID]),
    *conversation(101, n=3, stop_token_ids=None),
    {"id": "alone", "messages": [SYSTEM, says("user", "write of 0")]},
]


def check_same_where_there_is_room(results: pa.Table, whole: pa.Table, *, all_fit: bool) -> None:
    tokens = of_rows(whole)
    assert all(ids is None or tokens[key] == ids for key, ids in of_rows(results).items())
    codes = set(results["error_code"].to_pylist())
    assert codes <= ({None} if all_fit else {None, "too_long", "dependency_failed"})
    assert None in codes


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
class TestTightMemory:
    """However little KV there is, every row has the same tokens, and what was predicted is what happened."""

    def test_down_to_what_a_single_row_needs(self, family: str) -> None:
        engine = engine_of(family)
        whole, _ = run(engine, MIXED)
        assert whole["error_code"].null_count == len(whole)
        least = least_budget(engine, whole)
        for share in (1.0, 1.15, 1.6, 3, 8):
            results, summary = run(with_config(engine, kv_memory=int(least * share), max_batch_rows=8), MIXED)
            check_same_where_there_is_room(results, whole, all_fit=family == "llama" or share > 1.5)
            assert summary["peak_kv_tokens"] <= summary["kv_budget_tokens"]
            assert summary["preempted_sequences"] == 0
            assert summary["prefill_tokens"] == summary["planned_prefill_tokens"]
            computed = np.array(results["num_prompt_tokens"]) - np.array(results["num_cached_tokens"])
            assert computed.sum() == summary["prefill_tokens"], share
        if family == "llama":
            short, _ = run(with_config(engine, kv_memory=least - 1), MIXED)
            check_same_where_there_is_room(short, whole, all_fit=False)
            assert "too_long" in short["error_code"].to_pylist()

    def test_without_sharing_and_shuffled(self, family: str) -> None:
        engine = engine_of(family)
        whole, _ = run(engine, MIXED)
        rows = list(MIXED)
        np.random.default_rng(3).shuffle(rows)  # type: ignore[arg-type]
        for config in ({"no_prefix_sharing": True}, {"max_batch_rows": 1}, {"max_batch_tokens": 8}):
            results, _ = run(with_config(engine, **config), rows)
            assert of_rows(results) == of_rows(whole), config

    def test_against_the_oracle(self, family: str) -> None:
        engine = engine_of(family)
        rows = conversations(3)
        results, _ = run(engine, rows)
        prompts = expected_prompts(rows, results)
        for row in rows:
            ends = [EOS_ID, *(row["stop_token_ids"] or [])]
            alone = generate_alone(engine.model, prompts[row["id"]], NEW_TOKENS, ends)
            assert of_rows(results)[row["id"], 0] == alone


class Stopped(BaseException):
    """The user's interrupt, or whatever ends a run."""


def stopping_after(samples: int) -> Callable[[int], Callable[[int, int], None]]:
    def start(outputs: int) -> Callable[[int, int], None]:
        ended = 0

        def progress(now: int, generated: int) -> None:
            nonlocal ended
            ended += now
            if ended >= samples:
                raise Stopped

        return progress

    return start


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("share", [None, 1.2, 2.5])
def test_resumed_in_the_middle_of_a_conversation(tmp_path: Path, family: str, share: float | None) -> None:
    """The result is the same in all columns, wherever a run was stopped and however little memory there is."""
    engine = engine_of(family, max_batch_rows=4)
    jobs, out = tmp_path / "jobs.parquet", tmp_path / "out.parquet"
    pq.write_table(table_of(MIXED), jobs)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, logprobs=True)
    if share is not None:
        memory = int(least_budget(engine, engine.run(jobs, sampling)) * share)
        engine = with_config(engine, max_batch_rows=4, kv_memory=memory)
    whole = engine.run(jobs, sampling)
    for samples in (4, 8, 11):
        with pytest.raises(Stopped), open_run_folder(out, overwrite=False) as folder:
            engine.run_into(folder, jobs, sampling, watch=Watch(on_start=stopping_after(samples)))
        with open_run_folder(out, overwrite=False) as folder:
            summary = engine.run_into(folder, jobs, sampling)
        assert summary["resumed_samples"] >= samples
        results = pq.read_table(out)
        for name in results.column_names:
            if name != "logprobs":
                assert results[name].to_pylist() == whole[name].to_pylist(), (name, samples)
        for one, other in zip(results["logprobs"].to_pylist(), whole["logprobs"].to_pylist(), strict=True):
            assert np.allclose(one, other, atol=1e-5)
        out.unlink()


def lineages(stop: str) -> list[Row]:
    """Parents of all kinds and their children, as texts."""
    chain = [{"id": f"chain {i}", "prompt": f"and {i}", "parent": f"chain {i - 1}" if i else None} for i in range(7)]
    twins = [{"id": f"twin {i}", "prompt": "the king of the twins", "n": i + 1} for i in range(2)]
    of_twins = [{"id": f"of twin {i}", "prompt": " says", "parent": f"twin {i % 2}"} for i in range(3)]
    samples = {"id": "samples", "prompt": "you and the other", "n": 3, "temperature": 0.9}
    of_samples = [
        {"id": f"of sample {i} {text}", "prompt": text, "parent": "samples", "parent_sample": i}
        for i in (2, 0, 1)
        for text in (" then", " then on", "?")
    ]
    stopped = {"id": "stopped", "prompt": "the ring", "stop": [stop]}
    of_stopped = [{"id": f"of stopped {i}", "prompt": " or not", "parent": "stopped"} for i in range(2)]
    short = {"id": "short", "prompt": "on", "max_tokens": 1}
    of_short = {"id": "of short", "prompt": " it goes", "parent": "short"}
    rows = [*chain, *twins, *of_twins, samples, *of_samples, stopped, *of_stopped, short, of_short]
    return rows[::-1]  # children before their parents


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_parents_of_all_kinds(family: str) -> None:
    engine = engine_of(family)
    first, _ = run(engine, [{"id": "stopped", "prompt": "the ring"}])
    stop = first["text"][0].as_py()[2:4]
    rows = {row["id"]: row for row in lineages(stop)}
    results, summary = run(engine, list(rows.values()))
    assert results["error_code"].null_count == len(results)
    assert summary["prefill_tokens"] == summary["planned_prefill_tokens"]
    tokens, cached = of_rows(results), of_rows(results, "num_cached_tokens")
    lengths = of_rows(results, "num_prompt_tokens")
    assert of_rows(results, "finish_reason")["stopped", 0] == "stop"
    assert stop not in of_rows(results, "text")["stopped", 0]

    def prompt(row: Row) -> list[int]:
        parent = row.get("parent")
        if parent is None:
            return [*TOKENIZER.encode(row["prompt"])]
        own = TOKENIZER.encode(row["prompt"], add_special_tokens=False)
        return [*prompt(rows[parent]), *tokens[parent, row.get("parent_sample", 0)], *own]

    for row in rows.values():
        assert lengths[row["id"], 0] == len(prompt(row))
        if row.get("parent") is not None:
            before = len(prompt(row)) - len(TOKENIZER.encode(row["prompt"], add_special_tokens=False))
            assert cached[row["id"], 0] >= before - 1, row  # all but the last token of the reply, which had not run
        if not row.get("temperature") and "stop" not in row:
            alone = generate_alone(engine.model, prompt(row), row.get("max_tokens", NEW_TOKENS), [EOS_ID])
            assert tokens[row["id"], 0] == alone, row
    if family == "llama":
        generations: list[list[tuple[list[int], list[list[int]]]]] = [[] for _ in range(7)]
        for name, row in rows.items():
            depth, above = 0, row
            while above.get("parent") is not None:
                depth, above = depth + 1, rows[above["parent"]]
            samples = [tokens[name, i] for i in range(row.get("n", 1))]
            generations[depth].append((prompt(row), samples))
        assert summary["prefill_tokens"] == ideal_prefill(generations)


def test_a_prompt_that_begins_as_an_earlier_one_goes_on_from_it(engine: Engine) -> None:
    """Though nobody continues that one, and whatever was generated after it."""
    rows: list[Row] = [
        {"id": "before", "prompt": "the king and you"},
        {"id": "other", "prompt": "on"},
        {"id": "longer", "prompt": "the king and you then", "depends_on": ["before", "other"]},
        {"id": "same", "prompt": "the king and you", "depends_on": ["before", "other"]},
    ]
    results, summary = run(engine, rows)
    before = len(TOKENIZER.encode("the king and you"))
    assert results["num_cached_tokens"].to_pylist()[2:] == [before, before - 1]  # the last one gives the logits again
    assert summary["prefill_tokens"] == summary["planned_prefill_tokens"]
    for row in rows:
        alone = generate_alone(engine.model, TOKENIZER.encode(row["prompt"]), NEW_TOKENS, [EOS_ID])
        assert of_rows(results)[row["id"], 0] == alone


def test_what_depends_on_failed_rows_fails_and_the_rest_runs(engine: Engine) -> None:
    uses_long = 'x{{ outputs["long"] }}'
    rows: list[Row] = [
        *conversations(2),
        {"id": "bad", "prompt": "x", "temperature": -1.0},
        {"id": "child", "prompt": "x", "parent": "bad"},
        {"id": "grandchild", "prompt": "x", "parent": "child"},
        {"id": "user", "prompt": 'x{{ outputs["grandchild"] }}', "depends_on": ["grandchild", "draft 0"]},
        {"id": "long", "prompt": "x" * 600, "parent": "draft 0"},  # known when its turn comes
        {"id": "uses long", "prompt": uses_long, "depends_on": ["draft 1", "long"]},
        {"id": "after that", "prompt": "x", "parent": "uses long"},
        {"id": "no such", "prompt": '{{ outputs["draft 0"][7].x.y }}', "depends_on": ["draft 0"]},
        {"id": "after no such", "prompt": "x", "parent": "no such"},
    ]
    results, summary = run(engine, rows)
    codes = {key[0]: code for key, code in of_rows(results, "error_code").items()}
    assert {key: code for key, code in codes.items() if code} == {
        "bad": "bad_parameter",
        "child": "dependency_failed",
        "grandchild": "dependency_failed",
        "user": "dependency_failed",
        "long": "too_long",
        "uses long": "dependency_failed",
        "after that": "dependency_failed",
        "no such": "bad_template",
        "after no such": "dependency_failed",
    }
    messages = {key[0]: text for key, text in of_rows(results, "error").items()}
    assert "bad" in messages["user"]
    assert "long" in messages["after that"]
    assert (summary["ok"], summary["errors"]) == (6, 9)
    alone, _ = run(engine, rows[:6])
    assert [of_rows(results)[key] for key in of_rows(alone)] == list(of_rows(alone).values())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tenants_share_nothing(family: str) -> None:
    engine = engine_of(family)
    one = conversation(0, stop_token_ids=None)

    def of_tenant(tenant: str | None) -> list[Row]:
        return [
            {
                **row,
                "id": f"{row['id']} {tenant}",
                "tenant": tenant,
                "parent": row.get("parent") and f"{row['parent']} {tenant}",
                "depends_on": [f"{name} {tenant}" for name in row.get("depends_on", [])] or None,
                "messages": json.loads(json.dumps(row["messages"]).replace(' 0\\"]', f' 0 {tenant}\\"]')),
            }
            for row in one
        ]

    results, summary = run(engine, [*of_tenant("red"), *of_tenant("blue"), *of_tenant(None)])
    _, alone = run(engine, one)
    assert results["error_code"].null_count == len(results)
    assert summary["prefill_tokens"] == 3 * alone["prefill_tokens"]
    cached = results["num_cached_tokens"].to_pylist()
    assert cached[:3] == cached[3:6] == cached[6:]
    assert cached[0] == 0
    tokens = results["token_ids"].to_pylist()
    assert tokens[:3] == tokens[3:6] == tokens[6:]


def test_plan_shows_the_generations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, jobs = save_tiny(FAMILIES["llama"](), tmp_path / "model"), tmp_path / "jobs.parquet"
    pq.write_table(table_of([*conversations(5), {"id": "bad", "prompt": "x", "parent": "nobody"}]), jobs)

    def plan(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["batchkv", "plan", str(jobs), "--model", str(model), *options])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        return capsys.readouterr().out

    assert "5, then 5, then 5 rows" in plan()
    planned = json.loads(plan("--format", "json"))
    assert (planned["generations"], planned["errors"]) == ([5, 5, 5], 1)
