"""Renders templates that may be hostile, in a process of its own: run as `python -m batchkv.template_worker`.

The parent process ends it when a row takes too long; memory and output are limited here. It imports nothing but
Jinja2 and the standard library, and holds nothing worth stealing: the texts of a batch come in, texts go out.

A frame, in either direction, is the length of what follows, 4 bytes big-endian, and JSON in UTF-8. A frame in is a
batch, `[[templates, samples], ...]` with the texts of all samples by row id; each row is answered by a frame, in
order: `{"texts": [...]}`, or `{"error": why}`. The first frame out, `{}`, says that it is ready.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import IO, Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, Undefined, UndefinedError, nodes
from jinja2.exceptions import SecurityError, TemplateAssertionError
from jinja2.sandbox import ImmutableSandboxedEnvironment

if sys.platform != "win32":  # there only the time and the output are limited
    import resource

HEADER_BYTES = 4
MAX_NAME = 80  # characters of a name in a message
_MAX_CACHED_TEMPLATE = 1 << 14  # characters; longer ones are compiled anew


class TooLongError(Exception):
    """The rendered texts are longer than allowed."""


class Outputs(Mapping[str, Any]):
    """What the name `outputs` or `samples` of a template is: values by row id, a number or its text."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getitem__(self, row_id: object) -> Any:
        return self._values[_as_text(row_id)]

    def __contains__(self, row_id: object) -> bool:
        return isinstance(row_id, (str, int)) and _as_text(row_id) in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _as_text(row_id: object) -> str:
    return row_id if isinstance(row_id, str) else str(row_id)


class _NamedUndefined(StrictUndefined):
    """Its error says the name and nothing else: what Jinja says could quote a text."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        return str(self._undefined_name)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja without what is random, and with errors that hold names alone."""

    def __init__(self) -> None:
        super().__init__(undefined=_NamedUndefined, keep_trailing_newline=True, autoescape=False)
        self.globals.pop("lipsum")
        self.filters.pop("random")

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Rows may have any id, so `outputs["items"]` is never a method of `outputs`."""
        if isinstance(obj, Outputs):
            return obj[argument] if argument in obj else self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        return self.undefined(obj=obj, name=attribute, exc=SecurityError)


SANDBOX = Sandbox()


def render_texts(templates: Sequence[str], samples: Mapping[str, Sequence[str]], max_characters: int) -> list[str]:
    """The texts of the templates of a row, which may be `max_characters` long together.

    Raises:
        TooLongError: they are longer.
        Exception: the template fails, in any way.
    """
    variables = {
        "outputs": Outputs({row_id: texts[0] for row_id, texts in samples.items()}),
        "samples": Outputs(samples),
    }
    rendered = []
    left = max_characters
    for source in templates:
        pieces = []
        for piece in _compiled(source).generate(variables):
            left -= len(piece)
            if left < 0:
                raise TooLongError
            pieces.append(piece)
        rendered.append("".join(pieces))
    return rendered


def _compiled(source: str) -> Template:
    return _cached(source) if len(source) <= _MAX_CACHED_TEMPLATE else SANDBOX.from_string(source)


@lru_cache(maxsize=512)
def _cached(source: str) -> Template:
    return SANDBOX.from_string(source)


def explain(error: Exception, templates: Sequence[str]) -> str:
    """What is wrong with a template, naming what it names but quoting neither it nor a value."""
    if isinstance(error, TooLongError):
        return "the rendered text is too long"
    if isinstance(error, TemplateAssertionError):
        return f"line {error.lineno}: {str(error)[:MAX_NAME]}"  # the name of an unknown filter or test
    if isinstance(error, TemplateSyntaxError):
        return f"syntax error in line {error.lineno}"
    if isinstance(error, (UndefinedError, SecurityError)):
        name = str(error)
        shown = f"{name[:MAX_NAME]!r} " if name in _names(templates) else ""
        if isinstance(error, SecurityError):
            return f"{shown or 'a computed name '}is not allowed in a template"
        return f"{shown or 'a computed name '}is undefined: outputs and samples hold the rows in depends_on"
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    return f"it fails with {type(error).__name__}"


def _names(templates: Sequence[str]) -> set[str]:
    """All that templates name: variables, attributes, and constants in brackets."""
    names: set[str] = set()
    for source in templates:
        with contextlib.suppress(Exception):
            for node in SANDBOX.parse(source).find_all((nodes.Name, nodes.Getattr, nodes.Getitem)):
                if isinstance(node, nodes.Name):
                    names.add(node.name)
                elif isinstance(node, nodes.Getattr):
                    names.add(node.attr)
                elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
                    names.add(str(node.arg.value))
    return names


def answer(row: tuple[Sequence[str], Mapping[str, Sequence[str]]], max_characters: int) -> bytes:
    """The answer to a row of a batch."""
    templates, samples = row
    try:
        return encoded({"texts": render_texts(templates, samples, max_characters)})
    except Exception as error:  # a template is a program of its own and can fail in any way
        return encoded({"error": explain(error, templates)})


def encoded(value: object) -> bytes:
    """`value` as a frame."""
    body = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def decoded(body: bytes) -> Any:
    """What is in a frame, without its header."""
    return json.loads(body.decode("utf-8", "surrogatepass"))


def _serve(source: IO[bytes], sink: IO[bytes], max_characters: int, seconds: float) -> None:
    sink.write(encoded({}))
    sink.flush()
    while header := source.read(HEADER_BYTES):
        for row in decoded(source.read(int.from_bytes(header, "big"))):
            _limit_cpu(seconds)
            sink.write(answer(row, max_characters))
            sink.flush()


def _limit_memory(max_bytes: int) -> None:
    if sys.platform != "win32":
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu(seconds: float) -> None:
    """Ends this process when the next row takes so long and the parent is not there any more to end it."""
    if sys.platform != "win32":
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime + seconds) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main() -> None:
    """Serves batches on the standard streams until they are closed. Arguments: bytes of memory, characters, seconds."""
    max_bytes, max_characters, seconds = sys.argv[1:]
    _limit_memory(int(max_bytes))
    with contextlib.suppress(BrokenPipeError):
        _serve(sys.stdin.buffer, sys.stdout.buffer, int(max_characters), float(seconds))


if __name__ == "__main__":
    main()
