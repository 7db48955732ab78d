"""Special tokens exactly once, conversations as the tokenizer itself renders them, bad rows as errors."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from batchkv.errors import RowError, UserError
from batchkv.job import Job
from batchkv.token_arena import TokenArena
from batchkv.tokenization import check_prompts, tokenize
from tests.jobs import read_job

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here\\nsecond line') }}{% endif %}"
    "{% if m.role == 'developer' %}{{ raise_exception('bad: ' + m.content) }}{% endif %}"
    "{% if m.role == 'system' %}{{ m.content + 1 }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOS, EOS = 0, 1


def make_tokenizer(*, adds: str = "<s> $A", template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte; `adds` says which special tokens go around a text."""
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=adds, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=16)
    fast.chat_template = template
    return fast


def job_of(**columns: list[Any]) -> Job:
    return read_job(pa.table(columns))


def test_a_prompt_gets_the_special_tokens_once() -> None:
    tokenizer = make_tokenizer(adds="<s> $A </s>")
    arena, errors = tokenize(job_of(prompt=["hi", "<s>hi", "<s><s>hi", ""]).prompts, tokenizer)
    hi = tokenizer("hi", add_special_tokens=False)["input_ids"]
    assert errors == {}
    assert [arena.row(i).tolist() for i in range(4)] == [
        [BOS, *hi, EOS],
        [BOS, *hi, EOS],
        [BOS, BOS, *hi, EOS],
        [BOS, EOS],
    ]
    assert (arena.tokens.dtype, arena.offsets.dtype) == (np.int32, np.int64)


def test_a_tokenizer_that_adds_no_bos_leaves_the_text_its_own() -> None:
    arena, _ = tokenize(job_of(prompt=["<s><s>a", "b"]).prompts, make_tokenizer(adds="$A"))
    assert arena.row(0)[:2].tolist() == [BOS, BOS]
    assert BOS not in arena.row(1)


def test_a_tokenizer_without_a_bos_works() -> None:
    tokenizer = make_tokenizer(adds="$A </s>")
    tokenizer.bos_token = None
    arena, _ = tokenize(job_of(prompt=["a"]).prompts, tokenizer)
    assert arena.row(0)[-1] == EOS


def test_messages_are_what_the_tokenizer_makes_of_them() -> None:
    tokenizer = make_tokenizer(adds="<s> $A </s>")
    conversation = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "<s>yes"}]
    arena, errors = tokenize(job_of(messages=[conversation]).prompts, tokenizer)
    expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert errors == {}
    assert arena.row(0).tolist() == expected
    assert expected.count(BOS) == 2


def test_token_ids_are_taken_as_they_are_without_a_tokenizer() -> None:
    arena, errors = tokenize(job_of(prompt_token_ids=[[5, 6], None, [7]]).prompts, None)
    assert errors == {}
    assert [arena.row(row).tolist() for row in range(3)] == [[5, 6], [], [7]]


def test_text_without_a_tokenizer_is_a_user_error() -> None:
    with pytest.raises(UserError, match="without a tokenizer only prompt_token_ids"):
        tokenize(job_of(prompt=["a"]).prompts, None)


def test_rows_with_errors_have_no_tokens() -> None:
    job = job_of(prompt=["a", "b", "c"], n=[1, 0, 1])
    arena, _ = tokenize(job.prompts, make_tokenizer())
    assert arena.lengths.tolist() == [2, 0, 2]


def test_identical_texts_are_encoded_once_and_others_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[str]] = []
    tokenizer = make_tokenizer()

    class Spy:
        chat_template, bos_token, bos_token_id = None, "<s>", BOS

        def __call__(self, texts: list[str], **options: Any) -> Any:
            batches.append(texts)
            return tokenizer(texts, **options)

        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            raise AssertionError

    monkeypatch.setattr("batchkv.tokenization.BATCH_TEXTS", 2)
    texts = ["a", "b", "a", "c", "a", "b"]
    arena, _ = tokenize(job_of(prompt=texts).prompts, Spy())
    assert batches == [[""], ["a", "b"], ["c"]]
    assert [tokenizer.decode(arena.row(i)[1:]) for i in range(6)] == texts


def test_options_that_a_tokenizer_file_brings_do_not_cut_or_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchkv.tokenization.BATCH_TEXTS", 2)
    texts = ["a", "b c a", "c b", "a b c a b c", "a a"]
    plain = make_tokenizer()
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding()
    arena, _ = tokenize(job_of(prompt=texts).prompts, tokenizer)
    assert [arena.row(i).tolist() for i in range(len(texts))] == plain(texts)["input_ids"]


def test_a_tokenizer_with_a_way_of_its_own_is_asked() -> None:
    class Reversed(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *args: Any, **options: Any) -> Any:
            return super()._encode_plus([one[::-1] for one in text], *args, **options)

    plain = make_tokenizer()
    tokenizer = Reversed(tokenizer_object=plain.backend_tokenizer, bos_token="<s>")
    arena, _ = tokenize(job_of(prompt=["a b"]).prompts, tokenizer)
    assert arena.row(0).tolist() == plain("b a")["input_ids"]


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("tool", "the chat template fails with TemplateError: no tools here"),
        ("developer", "the chat template fails with TemplateError"),
        ("system", "the chat template fails with TypeError"),
    ],
)
def test_a_template_that_fails_is_an_error_of_its_row(role: str, message: str) -> None:
    conversations = [[{"role": role, "content": "private"}], [{"role": "user", "content": "b"}]]
    arena, errors = tokenize(job_of(messages=conversations).prompts, make_tokenizer())
    assert errors == {0: RowError("bad_messages", message)}
    assert arena.lengths[0] == 0
    assert arena.lengths[1] > 0


def test_the_template_is_applied_to_a_batch_at_once_and_to_each_only_if_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = make_tokenizer()
    applied: list[Any] = []
    apply = PreTrainedTokenizerFast.apply_chat_template

    def spy(self: Any, conversation: Any, **options: Any) -> Any:
        applied.append(conversation)
        return apply(self, conversation, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", spy)
    monkeypatch.setattr("batchkv.tokenization.BATCH_TEXTS", 2)
    monkeypatch.setattr("batchkv.chat_template._BATCH_CONVERSATIONS", 2)
    conversations = [[{"role": role, "content": role}] for role in ("user", "assistant", "user", "tool")]
    arena, errors = tokenize(job_of(messages=conversations).prompts, tokenizer)
    assert applied == [conversations[:2], conversations[2:], *conversations[2:]]
    assert errors.keys() == {3}
    assert tokenizer.decode(arena.row(0)) == "<s><user>user<assistant>"
    assert arena.row(0).tolist() == arena.row(2).tolist()


def test_without_a_chat_template_only_messages_fail() -> None:
    job = job_of(messages=[[{"role": "user", "content": "a"}], None], prompt=[None, "b"])
    arena, errors = tokenize(job.prompts, make_tokenizer(template=None))
    assert errors.keys() == {0}
    assert errors[0].code == "bad_messages"
    assert "no chat template" in errors[0].message
    assert arena.lengths.tolist() == [0, 2]


def test_half_a_surrogate_pair_is_an_error_of_its_row() -> None:
    text = '[{"role": "user", "content": "private \\ud800"}]'
    arena, errors = tokenize(job_of(messages=[text, None], prompt=[None, "b"]).prompts, make_tokenizer())
    assert {row: error.code for row, error in errors.items()} == {0: "bad_prompt"}
    assert "private" not in errors[0].message
    assert arena.lengths.tolist() == [0, 2]


def test_the_length_limit_of_the_tokenizer_is_not_warned_about(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    arena, _ = tokenize(job_of(prompt=["long " * 100]).prompts, make_tokenizer())
    assert arena.lengths.tolist() == [501]
    assert "longer than" not in caplog.text


class TestChecks:
    ARENA = TokenArena.from_rows([np.array(row, dtype=np.int32) for row in ([1, 2], [], [3, 99, 98], [4])])

    def check(self, job: Job, **options: Any) -> dict[int, str]:
        found = check_prompts(
            self.ARENA, **{"vocab_size": 100, "context_length": None, "errors": job.errors, **options}
        )
        return {row: f"{error.code}: {error.message}" for row, error in found.items()}

    def test_a_prompt_without_tokens_is_empty(self) -> None:
        assert self.check(job_of(prompt=["x"] * 4)) == {1: "empty_prompt: the prompt has no tokens"}

    def test_a_prompt_must_leave_room_for_one_token(self) -> None:
        job = job_of(prompt=["x"] * 4)
        assert 2 not in self.check(job, context_length=4)
        too_long = self.check(job, context_length=3)
        assert too_long.keys() == {1, 2}
        assert "too_long: the prompt has 3 tokens, but the model's context of 3" in too_long[2]

    def test_an_id_outside_the_vocabulary_is_named(self) -> None:
        bad = self.check(job_of(prompt=["x"] * 4), vocab_size=4)
        assert bad == {
            1: "empty_prompt: the prompt has no tokens",
            2: "bad_token_id: the prompt holds the token id 99, must be from 0 to 3",
            3: "bad_token_id: the prompt holds the token id 4, must be from 0 to 3",
        }

    def test_rows_with_an_error_are_left_alone(self) -> None:
        job = job_of(prompt=["x"] * 4, n=[1, 1, 0, 1])
        known = {1: RowError("bad_messages", "known")}
        assert self.check(job, vocab_size=1, context_length=1, errors={**known, **job.errors}).keys() == {0, 3}

    def test_dropped_rows_lose_their_tokens_and_no_others(self) -> None:
        arena = self.ARENA.with_rows_dropped([2, 1])
        assert [arena.row(row).tolist() for row in range(4)] == [[1, 2], [], [], [4]]
        assert arena.lengths.tolist() == [2, 0, 0, 1]
        assert arena.num_rows == 4
        assert arena.tokens is self.ARENA.tokens  # nothing is copied
        assert self.ARENA.with_rows_dropped([]).lengths.tolist() == self.ARENA.lengths.tolist()


def test_a_job_without_rows_has_an_empty_arena() -> None:
    arena, errors = tokenize(job_of().prompts, None)
    assert (arena.num_rows, arena.tokens.tolist(), arena.tokens.dtype, errors) == (0, [], np.int32, {})
    assert check_prompts(arena, vocab_size=1, context_length=1) == {}
