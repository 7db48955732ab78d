"""Outputs in the texts of other rows: what Jinja gives, what hostile templates cannot do, no process left behind."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv import templates
from batchkv.errors import RowError
from batchkv.io.prompts import Message
from batchkv.template_process import TemplateProcess
from batchkv.template_worker import SANDBOX, Outputs
from batchkv.templates import TemplateRenderer, TemplateRow, prompt_texts, with_texts

SAMPLES: dict[str | int, list[str]] = {"a": ["ant", "asp"], "items": ["I"], 7: ["seven"], "x y": ["{{ raw }}"]}
SHORT = 1.0  # seconds, for templates that never end
ENDLESS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


@pytest.fixture
def renderer() -> Iterator[TemplateRenderer]:
    with TemplateRenderer(seconds_per_row=60) as renderer:
        yield renderer


def render(renderer: TemplateRenderer, *texts: str) -> list[Any]:
    return renderer.render([TemplateRow(text, SAMPLES) for text in texts])


def message(renderer: TemplateRenderer, text: str) -> str:
    [outcome] = render(renderer, text)
    assert isinstance(outcome, RowError), outcome
    assert outcome.code == "bad_template"
    return outcome.message


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ('<{{ outputs["a"] }}>', "<ant>"),
        ("{{outputs['x y']}}", "{{ raw }}"),  # an output is no template
        ('{{ outputs[7] }}{{ outputs["7"] }}', "sevenseven"),
        ('{{ outputs["items"] }}', "I"),
        ('{{ outputs["a"] | upper }}\n', "ANT\n"),
        ('{{ samples["a"] | join("+") }}', "ant+asp"),
        ("{{ samples[7][0] }}", "seven"),
        ("{% for id in outputs %}{{ id }},{% endfor %}", "a,items,7,x y,"),
        ('{{ outputs["zz"] | default("none") }}', "none"),
        ('{{ "a" in outputs }} {{ 7 in outputs }} {{ none in outputs }}', "True True False"),
        ("{% raw %}{{ x }}{% endraw %}{# nothing #}", "{{ x }}"),
        ("no template }} { %\r\n", "no template }} { %\r\n"),
    ],
)
def test_rendering(renderer: TemplateRenderer, template: str, text: str) -> None:
    assert render(renderer, template) == [text]


def test_plain_outputs_start_no_process(renderer: TemplateRenderer) -> None:
    assert render(renderer, '{{ outputs["a"] }}', "x", "{{ outputs[7] }}") == ["ant", "x", "seven"]
    assert renderer.pid is None


PIECES = st.sampled_from(
    ['{{ outputs["a"] }}', "{{outputs[7]}}", "{", "}", "{{", "}}", "{#", "#}", "\n", "\r\n", "-", " ", "'", "é", '"a"']
)


@given(st.lists(PIECES, max_size=8).map("".join))
def test_the_short_way_gives_what_jinja_gives(template: str) -> None:
    pieces = templates._pieces(template, {"a": ["ant"], "7": ["se\r\nven"]})
    if pieces is not None and any(tag in template for tag in ("{{", "{%", "{#")):
        outputs = Outputs({"a": "ant", "7": "se\r\nven"})
        assert "".join(pieces) == SANDBOX.from_string(template).render(outputs=outputs)


def test_a_conversation_is_rendered_wherever_it_has_text(renderer: TemplateRenderer) -> None:
    conversation: list[Message] = [
        {"role": "system", "content": '{{ outputs["a"] }}'},
        {"role": "user", "content": [{"type": "text", "text": "{{ 1 + 1 }}"}, {"type": "text", "text": "-"}]},
        {"role": "assistant", "tool_calls": [{"name": "{{ 1 }}"}]},
    ]
    texts = prompt_texts(conversation)
    assert texts == ['{{ outputs["a"] }}', "{{ 1 + 1 }}", "-"]
    expected = with_texts(conversation, ["ant", "2", "-"])
    assert renderer.render([TemplateRow(conversation, SAMPLES)]) == [expected]
    assert expected[2] is conversation[2]
    assert conversation[0]["content"] == '{{ outputs["a"] }}'


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ('{{ outputs["zz"] }}', "'zz' is undefined"),
        ("{{ samples[8] }}", "'8' is undefined"),
        ("{{ nothing }}", "'nothing' is undefined"),
        ('{{ outputs["keys"] }}', "'keys' is undefined"),
        ('{{ outputs[outputs["a"]] }}', "a computed name is undefined"),
        ('{{ outputs["a"].__class__ }}', "'__class__' is not allowed"),
        ('{{ ""|attr("__class__") }}', "is not allowed"),
        ('{{ "{0.__class__}".format("") }}', "is not allowed"),
        ("{{ outputs._values }}", "'_values' is not allowed"),
        ('{{ samples["a"].append("x") }}', "'append' is not allowed"),
        ("line\n{{ secret secret }}", "syntax error in line 2"),
        ("{{ 1 | nope }}", "No filter named 'nope'"),
        ("{{ 1 | random }}", "No filter named 'random'"),
        ('{{ outputs["a"] / 0 }}', "it fails with TypeError"),
        ('{% include "/etc/passwd" %}', "it fails with TypeError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "it fails with RecursionError"),
        ("{{" + "[" * 9999 + "]" * 9999 + "}}", "it fails with RecursionError"),
        ('{{ "\\ud800" }}', "half of a surrogate pair"),
    ],
)
def test_what_is_wrong_is_named_and_no_text_quoted(renderer: TemplateRenderer, template: str, says: str) -> None:
    found = message(renderer, template)
    assert says in found
    assert "ant" not in found
    assert "secret" not in found


@pytest.mark.parametrize(
    "template",
    [
        '{{ "x" * 10**10 }}',
        '{{ "x" | center(10**10) }}',
        '{{ "%9999999999d" | format(1) }}',
        '{{ "{:>9999999999}".format(1) }}',
        "{{ [[0] * 10**9] }}",
        '{% set ns = namespace(x="xx") %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}',
    ],
)
def test_memory_is_limited(renderer: TemplateRenderer, template: str) -> None:
    assert "too much memory" in message(renderer, template)
    assert render(renderer, "{{ 1 }}") == ["1"]


def test_what_goes_in_and_comes_out_is_limited() -> None:
    with TemplateRenderer(seconds_per_row=60, max_text=1000) as renderer:
        assert "more than 1000 characters" in message(renderer, "x" * 1001)
        assert "more than 1000 characters" in message(renderer, '{{ outputs["a"] }}' * 55 + "x" * 60)
        assert "too long" in message(renderer, "{% for i in range(999) %}xx{% endfor %}")
        assert "too long" in message(renderer, '{{ "x" * 1001 }}')
        assert render(renderer, '{{ "x" * 1000 }}') == ["x" * 1000]


def test_a_row_that_never_ends_costs_only_itself() -> None:
    with TemplateRenderer(seconds_per_row=SHORT) as renderer:
        outcomes = render(renderer, "{{ 1 }}", ENDLESS, "{{ 2 }}", "plain", ENDLESS, "{{ 3 }}")
    assert [outcomes[i] for i in (0, 2, 3, 5)] == ["1", "2", "plain", "3"]
    for i in (1, 4):
        assert outcomes[i] == RowError("bad_template", "the template cannot be rendered: it takes more than 1 seconds")


def test_after_some_failures_in_a_row_no_other_is_tried() -> None:
    with TemplateRenderer(seconds_per_row=SHORT, max_failures=2) as renderer:
        outcomes = render(renderer, ENDLESS, "{{ 1 }}", ENDLESS, ENDLESS, "{{ 2 }}", '{{ outputs["a"] }}')
        later = message(renderer, "{{ 1 }}")
    assert [isinstance(outcome, str) for outcome in outcomes] == [False, True, False, False, False, True]
    assert "takes more than" in outcomes[3].message  # what was rendered in between has the count begin anew
    assert "not tried" in outcomes[4].message
    assert "not tried" in later


def test_a_process_that_dies_is_replaced(renderer: TemplateRenderer) -> None:
    assert render(renderer, "{{ 1 }}") == ["1"]
    first = renderer.pid
    assert first is not None
    os.kill(first, 9)
    outcomes = render(renderer, "{{ 1 }}", "{{ 2 }}")
    assert isinstance(outcomes[0], RowError)  # nobody knows that it was not this row
    assert outcomes[1] == "2"
    assert renderer.pid != first


def test_many_rows_come_back_in_order(renderer: TemplateRenderer) -> None:
    rows = [TemplateRow("{{ outputs.values() | list }}", {number: [str(number)]}) for number in range(1000)]
    assert renderer.render(rows) == [f"['{number}']" for number in range(1000)]


def test_answers_larger_than_a_pipe(renderer: TemplateRenderer) -> None:
    text = "é" * 300_000
    rows = [TemplateRow("{{ outputs.values() | first }}", {"a": [text]})] * 8
    assert renderer.render(rows) == [text] * 8


def is_gone(pid: int) -> bool:
    """Neither running nor a zombie."""
    return not os.path.exists(f"/proc/{pid}") if sys.platform == "linux" else True


def test_the_process_ends_with_the_renderer() -> None:
    with TemplateRenderer() as renderer:
        render(renderer, "{{ 1 }}")
        pid = renderer.pid
        assert pid is not None
        assert not is_gone(pid) or sys.platform != "linux"
    assert is_gone(pid)


def test_the_process_ends_when_rendering_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int | None] = []

    def interrupted(process: TemplateProcess, seconds: float) -> Any:
        pids.append(process.pid)
        raise KeyboardInterrupt

    with TemplateRenderer() as renderer:
        render(renderer, "{{ 1 }}")
        monkeypatch.setattr(TemplateProcess, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            render(renderer, "{{ 1 }}")
        assert renderer.pid is None
    assert all(is_gone(pid) for pid in pids if pid is not None)


@pytest.mark.skipif(sys.platform != "linux", reason="waits for a process that is no child")
def test_the_process_ends_by_itself_when_its_parent_is_gone() -> None:
    code = (
        "import os; from batchkv.templates import *; r = TemplateRenderer();"
        "r.render([TemplateRow('{{ 1 }}', {})]); print(r.pid, flush=True); os._exit(1)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.read())
    parent.wait()
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        assert select.select([os.pidfd_open(worker)], [], [], 60)[0]


@pytest.mark.parametrize("answer", [None, [], {}, {"texts": ["a", "b"]}, {"texts": [1]}, {"texts": "a"}, {"error": 1}])
def test_answers_are_not_trusted(renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    render(renderer, "{{ 1 }}")
    monkeypatch.setattr(TemplateProcess, "receive", lambda process, seconds: answer)
    assert "cannot be rendered" in message(renderer, "{{ 1 }}")


def test_the_worker_imports_little_and_sees_no_secrets(renderer: TemplateRenderer) -> None:
    code = "import sys, batchkv.template_worker; sys.exit(bool({'torch', 'numpy', 'pyarrow'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)
    if sys.platform == "linux":
        render(renderer, "{{ 1 }}")
        with open(f"/proc/{renderer.pid}/environ", "rb") as file:
            names = {entry.split(b"=")[0] for entry in file.read().split(b"\0") if entry}
        allowed = {b"PATH", b"LD_LIBRARY_PATH", b"DYLD_LIBRARY_PATH", b"PYTHONPATH", b"PYTHONHASHSEED"}
        assert names <= allowed
