"""A turn behind a generated reply: the same text as the chat template gives for the whole conversation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from batchkv import turns
from batchkv.errors import RowError
from batchkv.io.prompts import Message
from batchkv.tokenization import token_ids_of
from batchkv.turns import Turn, TurnTokenizer, end_token_of
from tests.tiny_models import EOS, IM_END, tiny_tokenizer

# With the end of a reply, as models that go with them generate it.
TEMPLATES: dict[str, tuple[str, str]] = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        IM_END,
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}<|im_start|>\n\n{{ m.content | trim }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_start|>\n\n{% endif %}",
        IM_END,
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}",
        IM_END,
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        EOS,
    ),
    "space before the end": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
        EOS,
    ),
}
QUESTION = {"role": "user", "content": "the thing?"}
TURN: list[Message] = [{"role": "user", "content": "and you, then\nagain?"}]


def tokenizer_of(template: str | None) -> Any:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return list(ids)


def id_of(tokenizer: Any, token: str) -> int:
    token_id: int = tokenizer.convert_tokens_to_ids(token)
    return token_id


def appended(tokenizer: Any, prompt: Any, end: int | None = None) -> list[int]:
    [ids] = TurnTokenizer(tokenizer).token_ids([Turn(prompt, end)])
    assert isinstance(ids, np.ndarray), ids
    assert ids.dtype == np.int32
    return list(map(int, ids))


def error_of(template: str | None, turn: list[Message]) -> RowError:
    [error] = TurnTokenizer(tokenizer_of(template)).token_ids([Turn(turn, None)])
    assert isinstance(error, RowError), error
    return error


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_conversation_reads_as_the_template_writes_it(name: str) -> None:
    template, end_text = TEMPLATES[name]
    tokenizer = tokenizer_of(template)
    end = id_of(tokenizer, end_text)
    prompt = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    # A reply that no tokenizer would give for its text.
    reply = [id_of(tokenizer, token) for token in ("t", "h", "e", " ", "in", "g")]
    parent = [*ids_of(tokenizer, prompt), *reply, end]
    whole = [QUESTION, {"role": "assistant", "content": "the ing"}, *TURN]
    expected = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    joined = parent + appended(tokenizer, TURN, end)
    assert joined[: len(parent)] == parent
    # What was generated stays, so a space that only the template puts before the end is not there.
    assert tokenizer.decode(joined) == expected.replace(f"the ing {end_text}", f"the ing{end_text}")
    assert joined[len(parent) - 1 :] == ids_of(tokenizer, expected)[-len(joined) + len(parent) - 1 :]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_reply_that_did_not_end_is_closed(name: str) -> None:
    template, end_text = TEMPLATES[name]
    tokenizer = tokenizer_of(template)
    end = id_of(tokenizer, end_text)
    unended = appended(tokenizer, TURN)
    assert next(token for token in unended if tokenizer.decode([token]).strip()) == end
    assert unended[unended.index(end) + 1 :] == appended(tokenizer, TURN, end)


def test_another_end_than_the_templates_does_not_close_the_reply() -> None:
    tokenizer = tokenizer_of(TEMPLATES["chatml"][0])
    assert appended(tokenizer, TURN, id_of(tokenizer, EOS)) == appended(tokenizer, TURN)


def test_a_stop_token_that_melts_into_what_follows() -> None:
    """The end is a token that is none any more when it is tokenized with what stands behind it."""
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}t{% endif %}{% endfor %}"
    tokenizer = tokenizer_of(template)
    turn: list[Message] = [{"role": "user", "content": "he ing"}]
    assert ids_of(tokenizer, "the ing")[0] == id_of(tokenizer, "the")
    assert appended(tokenizer, turn, id_of(tokenizer, "t")) == ids_of(tokenizer, "he ing")


def test_an_end_token_that_swallows_spaces_does_so_as_in_one_text() -> None:
    tokenizer = tokenizer_of(TEMPLATES["chatml"][0])
    backend = tokenizer.backend_tokenizer
    backend.add_special_tokens([AddedToken("<swallows>", rstrip=True, special=True)])
    tokenizer.chat_template = TEMPLATES["chatml"][0].replace("<|im_end|>", "<swallows>")
    end = id_of(tokenizer, "<swallows>")
    assert tokenizer.decode(appended(tokenizer, TURN, end)).startswith("<|im_start|>user")
    whole = ids_of(tokenizer, "x<swallows>\n<|im_start|>user")
    assert whole[2:] == appended(tokenizer, TURN, end)[: len(whole) - 2]


def test_text_and_token_ids_are_taken_as_they_are() -> None:
    tokenizer: Any = tiny_tokenizer()
    end = id_of(tokenizer, IM_END)
    assert appended(tokenizer, "the <|im_end|>", end) == ids_of(tokenizer, "the <|im_end|>")
    assert appended(tokenizer, np.array([5, 6], np.int32), end) == [5, 6]
    assert appended(tokenizer, "") == []
    [error] = TurnTokenizer(tokenizer).token_ids([Turn("\ud800", None)])
    assert isinstance(error, RowError)
    assert error.code == "bad_prompt"


@pytest.mark.parametrize(
    ("template", "turn", "says"),
    [
        (
            TEMPLATES["gemma"][0],
            [{"role": "assistant", "content": "x"}],
            "cannot follow a reply: .*roles must alternate",
        ),
        ("{{ messages[-1].content }}", TURN, "does not keep replies"),
        ("{% for m in messages %}{{ m.content * 2 }}{% endfor %}", TURN, "does not keep replies"),
        ("{% for m in messages %}{{ m.content[:4] }}{% endfor %}", TURN, "does not keep replies"),
        (
            "{% for m in messages | sort(attribute='role', reverse=true) %}{{ m.content }}{% endfor %}",
            TURN,
            "before the reply",
        ),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
            [{"role": "tool", "content": "42 degrees"}],
            "leaves it out",
        ),
        (None, TURN, "no chat template"),
    ],
)
def test_templates_that_allow_no_turn(template: str | None, turn: list[Message], says: str) -> None:
    error = error_of(template, turn)
    assert error.code == "bad_messages"
    assert re.search(says, error.message)


def test_texts_that_templates_write_in_another_way_are_kept() -> None:
    template = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    turn: list[Message] = [{"role": "tool", "content": [{"type": "text", "text": '"a"\nlonger'}]}]
    assert "longer" in tokenizer_of(template).decode(appended(tokenizer_of(template), turn))


def test_the_turn_may_hold_the_text_that_stands_for_the_reply() -> None:
    tokenizer = tokenizer_of(TEMPLATES["chatml"][0])
    text = tokenizer.decode(appended(tokenizer, [{"role": "user", "content": f"x{turns._REPLY}x"}]))
    assert text.startswith("<|im_end|>\n<|im_start|>user\nxreply")


def test_the_same_turn_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(TEMPLATES["chatml"][0])
    calls: list[str] = []
    apply = PreTrainedTokenizerFast.apply_chat_template

    def spy_apply(self: Any, conversation: Any, **options: Any) -> Any:
        calls.append("render")
        return apply(self, conversation, **options)

    def spy_ids(texts: list[str], *args: Any) -> list[list[int]]:
        calls.append(f"tokenize {len(texts)}")
        return token_ids_of(texts, *args)

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", spy_apply)
    monkeypatch.setattr("batchkv.turns.token_ids_of", spy_ids)
    maker = TurnTokenizer(tokenizer, max_cached=2)
    end = id_of(tokenizer, IM_END)
    first = maker.token_ids([Turn(TURN, end)] * 5 + [Turn(TURN, None), Turn("text", None)])
    assert calls == ["render", "tokenize 3"]
    assert [ids.tolist() for ids in first[:5] if isinstance(ids, np.ndarray)] == [appended(tokenizer, TURN, end)] * 5
    calls.clear()
    maker.token_ids([Turn("text", None), Turn(list(TURN), None)])
    assert calls == []
    maker.token_ids([Turn(TURN, end)])  # two others have been used since
    assert calls == ["tokenize 1"]


def test_what_was_used_last_is_kept() -> None:
    made: list[str] = []

    def make(keys: Sequence[str]) -> list[str]:
        made.extend(keys)
        return [key.upper() for key in keys]

    cache = turns._Cache(make, 2)
    assert cache.values(["a", "b", "a"]) == {"a": "A", "b": "B"}
    assert cache.values(["a", "c"]) == {"a": "A", "c": "C"}  # b goes
    assert cache.values(["a"]) == {"a": "A"}
    assert made == ["a", "b", "c"]
    assert cache.values(["b", "c", "d"]) == {"b": "B", "c": "C", "d": "D"}  # more than it keeps
    cache.values(["x" * (turns._MAX_CACHED_CHARACTERS + 1)] * 2)
    assert made[3:] == ["b", "d", "x" * (turns._MAX_CACHED_CHARACTERS + 1)]
    assert cache.values(["c", "d"]) == {"c": "C", "d": "D"}
    assert len(made) == 6


def test_what_ended_a_sample() -> None:
    assert end_token_of(np.array([5, 7], np.int32), {7, 8}) == 7
    assert end_token_of(np.array([7, 5], np.int32), (7, 8)) is None
    assert end_token_of(np.array([], np.int32), (7, 8)) is None
