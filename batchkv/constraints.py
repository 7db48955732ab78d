"""Constrained output before it is generated: what a row's text must be, as a grammar over the model's tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import llguidance
import numpy as np
import numpy.typing as npt

from batchkv.errors import RowError
from batchkv.grammar_check import LIMITS, check_grammars
from batchkv.io.columns import one_line
from batchkv.json_schema import parse_schema
from batchkv.sampling_params import RowParams, SamplingParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_MAX_CHARACTERS = 1 << 20  # of a grammar
_SHOWN_CHARACTERS = 80  # of the compiler's words, which can quote the grammar
_PROBED_TOKENS = 4  # taken before a grammar is called good: some limits are met only then
_KEPT = 256  # compiled grammars at a time; a job can have one for each row
# JSON on one line, with a space or none after colon and comma. With any whitespace anywhere, which a compiler would
# allow, a small model fills its max_tokens with line breaks.
_JSON_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}


class ConstraintError(ValueError):
    """A constraint that cannot be executed; the message begins with its column."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text of a row must be.

    Attributes:
        column: `choices`, `regex` or `json_schema`.
        value: what stands there.
    """

    column: str
    value: str | tuple[str, ...]

    @classmethod
    def of(cls, params: SamplingParams) -> Constraint | None:
        """None if anything may be generated, or nothing is: choices that are scored."""
        if params.choices and params.choice_mode == "generate":
            return cls("choices", params.choices)
        if params.regex is not None:
            return cls("regex", params.regex)
        return None if params.json_schema is None else cls("json_schema", params.json_schema)

    def grammar(self) -> str:
        """The constraint in the language of the compiler.

        Raises:
            ConstraintError: it is no constraint, or too long.
        """
        if sum(map(len, self.value)) > _MAX_CHARACTERS:
            raise self.error(f"it has more than {_MAX_CHARACTERS} characters")
        try:
            "".join(self.value).encode()
        except UnicodeEncodeError:
            raise self.error("it holds half of a surrogate pair, which is no character") from None
        if isinstance(self.value, tuple):
            return llguidance.LLMatcher.grammar_from_regex("|".join(map(_literal, self.value)))
        if self.column == "regex":
            return llguidance.LLMatcher.grammar_from_regex(self.value)
        try:
            text = "{}" if parse_schema(self.value) is True else self.value
            return llguidance.LLMatcher.grammar_from_json_schema(text, defaults=_JSON_STYLE)
        except ValueError as error:
            raise self.error(str(error)) from None

    def error(self, reason: str) -> ConstraintError:
        """What a compiler or a matcher complains of, in few of its words."""
        return ConstraintError(f"{self.column} cannot be executed: {_shortened(reason)}")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled constraint.

    Attributes:
        matcher: at the beginning of a text; to be copied, not used.
        first_mask: int32 [words], the tokens a text can begin with.
    """

    matcher: llguidance.LLMatcher
    first_mask: npt.NDArray[np.int32]


class Grammars:
    """The grammars of a job. Each is compiled once as long as there are not very many.

    Args:
        tokenizer: of the model.
        vocab_size: of the model; the tokenizer's can be smaller or larger.
        end_token_ids: allowed where a text is complete; by default the tokenizer's.

    Raises:
        ValueError: the tokenizer's tokens are not known as bytes.

    Attributes:
        words: int32 words of a mask.
        usable: int32 [words], the tokens that any mask may allow: those of the model.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: tuple[int, ...] = ()
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"{type(tokenizer).__name__} is no fast tokenizer")
        from llguidance.hf import from_tokenizer  # brings transformers with it

        size = max(vocab_size, len(tokenizer))
        if not end_token_ids and tokenizer.eos_token_id is not None:
            end_token_ids = (tokenizer.eos_token_id,)
        ends = [token for token in end_token_ids if token < size]
        # Where nothing ends a text, the compiler still wants a token that does; it is never allowed.
        stand_in = [] if ends else [next(iter(tokenizer.all_special_ids), 0)]
        self.tokenizer = from_tokenizer(
            cast("PreTrainedTokenizerFast", tokenizer), n_vocab=size, eos_token=ends or stand_in
        )
        self.words = -(-size // 32)
        self._compiled: OrderedDict[Constraint, Grammar] = OrderedDict()
        self.usable = _bits(np.setdiff1d(np.arange(vocab_size), stand_in), self.words)

    def compiled(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint that `check_grammars` found nothing wrong with.

        Raises:
            ConstraintError: no text of the model's tokens meets it, or it meets a limit at once.
        """
        grammar = self._compiled.get(constraint)
        if grammar is None:
            return self.compiled_anew(constraint)
        self._compiled.move_to_end(constraint)
        return grammar

    def compiled_anew(self, constraint: Constraint) -> Grammar:
        """The same from the beginning: the matchers of a grammar share what they found out, up to a limit."""
        self._compiled.pop(constraint, None)
        grammar = self._compiled[constraint] = self._compile(constraint)
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return grammar

    def _compile(self, constraint: Constraint) -> Grammar:
        try:
            matcher = llguidance.LLMatcher(self.tokenizer, constraint.grammar(), log_level=0, limits=LIMITS)
            mask = self._mask(matcher)
            probe = matcher if matcher.is_error() else self._probed(matcher.deep_copy(), mask)
        except BaseException as error:
            if isinstance(error, ConstraintError) or not is_of_compiler(error):
                raise
            raise constraint.error(f"the compiler fails with {type(error).__name__}") from None
        if probe.is_error():
            raise constraint.error(probe.get_error())
        if not mask.any():
            raise constraint.error("no text of the model's tokens meets it")
        return Grammar(matcher, mask)

    def _mask(self, matcher: llguidance.LLMatcher) -> npt.NDArray[np.int32]:
        """int32 [words]: allowed tokens of the model's vocabulary."""
        words = np.frombuffer(matcher.compute_bitmask(), np.int32)[: self.words]
        return np.bitwise_and(words, self.usable)

    def _probed(self, matcher: llguidance.LLMatcher, mask: npt.NDArray[np.int32]) -> llguidance.LLMatcher:
        """The matcher, some tokens on."""
        for _ in range(_PROBED_TOKENS):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if matcher.is_stopped() or not len(allowed):
                break
            matcher.consume_token(int(allowed[-1]))
            mask = self._mask(matcher)
        return matcher


class ConstraintChecks:
    """Checks of a job's constraints, each distinct one once, whatever the number of rows and blocks that have it.

    Args:
        tokenizer, vocab_size, end_token_ids: of the model, as for `Grammars`.

    Attributes:
        grammars: of what was checked; None as long as no row needs one.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, end_token_ids: tuple[int, ...]
    ) -> None:
        self.grammars: Grammars | None = None
        self._tokenizer, self._vocab_size, self._end_token_ids = tokenizer, vocab_size, end_token_ids
        self._complaints: dict[Constraint, str | None] = {}

    def check(self, params: RowParams, errors: Mapping[int, RowError]) -> dict[int, RowError]:
        """What is wrong with the constraints of rows (`bad_schema`); rows that have an error are not looked at."""
        constraints = [Constraint.of(distinct) for distinct in params.distinct]
        has_constraint = np.array([constraint is not None for constraint in constraints], bool)[params.index]
        has_constraint[list(errors)] = False
        rows = np.flatnonzero(has_constraint)
        wanted = dict.fromkeys(c for i in np.unique(params.index[rows]).tolist() if (c := constraints[i]) is not None)
        self._look_at([constraint for constraint in wanted if constraint not in self._complaints])
        bad: dict[int, RowError] = {}
        for row, i in zip(rows.tolist(), params.index[rows].tolist(), strict=True):
            constraint = constraints[i]
            complaint = self._complaints[constraint] if constraint is not None else None
            if complaint is not None:
                bad[row] = RowError("bad_schema", complaint)
        return bad

    def _look_at(self, constraints: list[Constraint]) -> None:
        """Finds out what is wrong with each of them."""
        if not constraints:
            return
        try:
            if self._tokenizer is None:
                raise ValueError("there is no tokenizer")
            self.grammars = self.grammars or Grammars(self._tokenizer, self._vocab_size, self._end_token_ids)
        except ValueError as error:
            reason = f"{_shortened(str(error))}: constrained output needs a fast tokenizer, name one with --tokenizer"
            self._complaints.update({one: f"{one.column} is set, but {reason}" for one in constraints})
            return
        self._complaints.update(_complaints(constraints, self.grammars))


def _complaints(constraints: list[Constraint], grammars: Grammars) -> dict[Constraint, str | None]:
    """What is wrong with each constraint; None with those that can be executed."""
    found: dict[Constraint, str | None] = dict.fromkeys(constraints)
    texts: dict[Constraint, str] = {}
    for constraint in constraints:
        try:
            texts[constraint] = constraint.grammar()
        except ConstraintError as error:
            found[constraint] = str(error)
    for constraint, complaint in zip(texts, check_grammars(texts.values()), strict=True):
        try:
            if complaint is not None:
                raise constraint.error(complaint)
            grammars.compiled(constraint)
        except ConstraintError as error:
            found[constraint] = str(error)
    return found


def is_of_compiler(error: BaseException) -> bool:
    """Whether the compiler or a matcher gave up: its panics are no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _literal(text: str) -> str:
    """A regular expression that matches the text and nothing else."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _shortened(reason: str) -> str:
    """The line of a compiler's message that says what is wrong; it can quote the grammar, so not much of it."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["no reason is given"]
    if lines[0] == "NoExtensionBias":
        return "no text meets it"
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return one_line(told, _SHOWN_CHARACTERS)


def _bits(tokens: npt.NDArray[np.int64], words: int) -> npt.NDArray[np.int32]:
    """int32 [words] of which the bits of the given tokens are set."""
    bits = np.zeros(32 * words, np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
