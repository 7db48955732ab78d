"""Stop strings are found after the very token that completes them, as decoding the whole sample would show."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from batchkv.stopping import (
    Stops,
    StopStringMatcher,
    cut,
    end_token_ids,
    find_stop,
    resolve_stops,
    special_token_ids,
)

CORPUS = ["the end of the story, and then the end", "naïve café — 東京 😀😀 STOP\n\n### Human: stop", "aaaa    bbbb"]
SPECIAL = ["<|im_end|>", "<|pad|>"]
Decode = Callable[[list[int]], str]


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE: tokens of one byte up to some words, the way GPT-2, Llama 3 and Qwen decode."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=310, initial_alphabet=alphabet, special_tokens=SPECIAL)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Pieces with a space mark, and bytes for the rest, the way Llama 2 and Gemma decode."""
    pieces = ["▁", "▁the", "▁end", "e", "n", "d", ".", "▁▁▁", "END", "▁S", "T", "O", "P", "é", "\n"]
    vocabulary = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(vocabulary)}, merges=[], byte_fallback=True)
    )
    strip = decoders.Strip(" ", 1, 0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


TOKENIZERS = {"byte level": byte_level_tokenizer(), "byte fallback": byte_fallback_tokenizer()}


def array(token_ids: list[int]) -> np.ndarray:
    return np.array(token_ids, np.int32)


def first_hits(decode: Decode, token_ids: list[int], stops: list[str]) -> tuple[tuple[int, str] | None, ...]:
    """(tokens at the first hit, stop string) of the matcher and of the oracle, which decodes all every time."""
    matcher = StopStringMatcher(decode, stops)
    mine = oracle = None
    for length in range(1, len(token_ids) + 1):
        found = matcher.find(array(token_ids[:length]))
        plain = find_stop(decode(token_ids[:length]), stops)
        mine = mine or (found and (length, found))
        oracle = oracle or (plain and (length, plain[1]))
        if mine or oracle:
            break
    return mine, oracle


def byte_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each UTF-8 byte."""
    if tokenizer.token_to_id("<0x00>") is not None:
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [tokenizer.token_to_id(symbol) for word, _ in symbols for symbol in word]


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


# ---------------------------------------------------------------- stop strings

TEXTS = st.text(st.sampled_from("aend .STOP\né東😀"), max_size=12)


@st.composite
def samples(draw: st.DrawFn, tokenizer: Tokenizer) -> tuple[list[int], list[str]]:
    """Tokens of every kind, also cut characters, special tokens and ids that are none; and stop strings, most
    of them from anywhere in the text."""
    size = tokenizer.get_vocab_size()
    any_tokens = st.lists(st.integers(0, size + 2), max_size=8)
    special = st.lists(st.sampled_from([0, 1, size + 1]), max_size=12)
    whole = st.integers(0, size - 1).map(lambda token: [token])
    byte_runs = TEXTS.map(lambda text: byte_tokens(tokenizer, text))
    cut_runs = byte_runs.flatmap(lambda run: st.integers(0, 3).map(lambda lost: run[lost:]))
    segments = draw(st.lists(any_tokens | special | whole | byte_runs | cut_runs, min_size=1, max_size=8))
    token_ids = [token for segment in segments for token in segment]
    text = tokenizer.decode(token_ids)
    stops = [draw(TEXTS.filter(bool))]
    for _ in range(draw(st.integers(0, 2)) if text else 0):
        start = draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + draw(st.integers(1, 9))])
    return token_ids, draw(st.permutations(stops))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_finds_what_decoding_everything_finds(name: str, data: st.DataObject) -> None:
    token_ids, stops = data.draw(samples(TOKENIZERS[name]))
    mine, oracle = first_hits(TOKENIZERS[name].decode, token_ids, stops)
    assert mine == oracle


@pytest.mark.parametrize("stop", ["東京", "😀", "\n\n", " end", "é", "STOP", "d", "the end"])
def test_finds_a_stop_string_deep_in_a_run_of_bytes(tokenizer: Tokenizer, stop: str) -> None:
    """Of characters of three bytes, so that tails of most lengths start within one."""
    for filler in ("東" * 30, "😀" * 30, "x" * 30):
        token_ids = byte_tokens(tokenizer, "a" + filler.replace(stop, "") + stop + "abc")
        mine, oracle = first_hits(tokenizer.decode, token_ids, [stop])
        assert mine == oracle
        assert mine == (len(token_ids) - 3, stop)


def test_finds_a_stop_string_in_the_middle_of_a_token() -> None:
    tokenizer = TOKENIZERS["byte level"]
    tokenizer_ids = tokenizer.encode("then the story").ids
    assert any("tor" in tokenizer.id_to_token(token) for token in tokenizer_ids)
    mine, oracle = first_hits(tokenizer.decode, tokenizer_ids * 5, ["tor"])
    assert mine == oracle
    assert mine is not None


def test_finds_a_stop_string_across_skipped_tokens(tokenizer: Tokenizer) -> None:
    before, after = byte_tokens(tokenizer, "aaST"), byte_tokens(tokenizer, "OPaa")
    token_ids = before + [0, 1, tokenizer.get_vocab_size() + 7] * 20 + after
    mine, oracle = first_hits(tokenizer.decode, token_ids, ["STOP"])
    assert mine == oracle == (len(token_ids) - 2, "STOP")


@pytest.mark.parametrize("stop", [" ", " the", " the end"])
def test_a_leading_space_that_only_the_tail_loses_is_found(stop: str) -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    piece = tokenizer.token_to_id
    token_ids = [piece("e")] * 20 + [piece("▁the"), piece("▁end")]
    mine, oracle = first_hits(tokenizer.decode, token_ids, [stop])
    assert mine == oracle == (22 if "end" in stop else 21, stop)


def test_spaces_cleaned_up_before_punctuation_do_not_hide_a_stop_string() -> None:
    tokenizer = TOKENIZERS["byte level"]

    def decode(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids).replace(" .", ".").replace(" ,", ",")

    mine, oracle = first_hits(decode, byte_tokens(tokenizer, "xyz" * 10 + "a . , . end"), ["a.,."])
    assert mine == oracle == (37, "a.,.")


def test_a_leading_space_that_the_text_loses_is_not_found() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    token_ids = array([tokenizer.token_to_id("▁the")])
    assert StopStringMatcher(tokenizer.decode, [" the"]).find(token_ids) is None
    assert StopStringMatcher(tokenizer.decode, ["the"]).find(token_ids) == "the"


def test_a_hit_in_the_tail_alone_is_not_one() -> None:
    """A decoder that writes something else when it sees the whole sample."""

    def decode(token_ids: list[int]) -> str:
        return "x" * len(token_ids) if len(token_ids) > 10 else "STOP" + "x" * len(token_ids)

    assert StopStringMatcher(decode, ["STOP"]).find(array([5] * 30)) is None


def test_the_stop_string_that_comes_first_in_the_text_wins() -> None:
    tokenizer = TOKENIZERS["byte level"]
    token_ids = array(tokenizer.encode("then the end").ids)
    assert StopStringMatcher(tokenizer.decode, ["end", "n t", "the"]).find(token_ids) == "the"


def test_the_cost_of_a_token_does_not_grow_with_the_sample(tokenizer: Tokenizer) -> None:
    decoded: list[int] = []

    def decode(token_ids: list[int]) -> str:
        decoded.append(len(token_ids))
        return tokenizer.decode(token_ids)

    matcher = StopStringMatcher(decode, ["STOP", "### Human:"])
    for length in (50, 500, 5000):
        assert matcher.find(array(byte_tokens(tokenizer, "ab東" * length))) is None
    assert max(decoded) <= len("### Human:") + 4 + 3


def test_cut() -> None:
    assert cut("one two three", ["three", "two"]) == "one "
    assert cut("one", ["two"]) == "one"
    assert cut("one", []) == "one"
    assert cut("one", ["one"]) == ""


def test_find_stop_prefers_the_place_then_the_order() -> None:
    assert find_stop("abcabc", ["c", "bc"]) == (1, "bc")
    assert find_stop("abcabc", ["ab", "abc"]) == (0, "ab")
    assert find_stop("abcabc", ["abc", "ab"]) == (0, "abc")
    assert find_stop("abcabc", ["x"]) is None


# ---------------------------------------------------------------- end tokens and special tokens


@pytest.mark.parametrize(
    ("generation_config", "config", "tokenizer_eos", "expected"),
    [
        ([3, 5, 3], 7, 9, (3, 5)),
        (0, 7, 9, (0,)),
        (None, [7, 8], 9, (7, 8)),
        ([], 0, 9, (0,)),
        (None, None, 9, (9,)),
        (None, None, None, ()),
    ],
)
def test_end_tokens(
    generation_config: int | list[int] | None,
    config: int | list[int] | None,
    tokenizer_eos: int | None,
    expected: tuple[int, ...],
) -> None:
    assert end_token_ids(generation_config, config, tokenizer_eos) == expected


def test_stop_strings_that_are_special_tokens_become_ids() -> None:
    special = {"<|im_end|>": 2, "<|pad|>": 0}
    stops = resolve_stops(["\n", "<|im_end|>", " <|pad|>", "\n"], [9, 2, 9], special)
    assert stops == Stops(strings=("\n", " <|pad|>"), token_ids=(9, 2))


def test_special_tokens_of_a_tokenizer_are_those_that_decoding_skips() -> None:
    backend = Tokenizer.from_str(TOKENIZERS["byte level"].to_str())
    backend.add_tokens([AddedToken("<think>", special=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<bos>")
    special = special_token_ids(tokenizer)
    assert special == {"<|im_end|>": 0, "<|pad|>": 1, "<bos>": tokenizer.bos_token_id}
    for token_id in range(len(tokenizer)):
        skipped = tokenizer.decode([token_id], skip_special_tokens=True) == ""
        assert skipped == (token_id in special.values())
