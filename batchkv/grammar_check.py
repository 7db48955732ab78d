"""Tries out grammars in a process of its own, where a hostile one can take neither the time nor the memory of a run.

The compiler has limits, but not everywhere: whether patterns can be met together is decided without one. Run as a
script it is the process: one grammar a line goes in, as JSON, and what is wrong with it comes out, null if nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Timer
from typing import IO

import llguidance

_CPU_SECONDS = 2  # for one grammar; of the processor, so that a busy machine refuses nothing more
_SECONDS = 20.0  # for one grammar, of the clock
_BYTES = 768 << 20  # address space of the process

LIMITS = llguidance.LLParserLimits(
    max_grammar_size=100_000,
    max_lexer_states=100_000,  # some 30 MB; all texts of a grammar share them
    verbose_errors=False,  # they would quote the grammar
)


def check_grammars(grammars: Iterable[str]) -> Iterator[str | None]:
    """What is wrong with each grammar, in the compiler's words; None if it can be compiled within the limits."""
    process: subprocess.Popen[str] | None = None
    try:
        for grammar in grammars:
            process = process or _start()
            answer = _ask(process, grammar)
            if answer is None:  # the process is gone
                _end(process)
                process = None
            yield _TOO_COMPLEX if answer is None else json.loads(answer)
    finally:
        if process is not None:
            _end(process)


_TOO_COMPLEX = "it is too complex: compiling it takes too much time or memory"


def _start() -> subprocess.Popen[str]:
    # -P: the folder of this file is no place to import from, its modules are those of a package
    command = [sys.executable, "-P", str(Path(__file__))]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
    )


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _ask(process: subprocess.Popen[str], grammar: str) -> str | None:
    """The answer, a line of JSON; None if the process has ended instead."""
    requests, answers = process.stdin, process.stdout
    if requests is None or answers is None:
        raise RuntimeError("the process was started without pipes")
    timer = Timer(_SECONDS, process.kill)
    timer.start()
    try:
        requests.write(json.dumps(grammar) + "\n")
        requests.flush()
        return answers.readline() or None
    except BrokenPipeError:
        return None
    finally:
        timer.cancel()


def _answer(requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        _allow_more_time()
        try:
            is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(json.loads(line), limits=LIMITS)
            message = messages[0] if is_error else None
        except Exception as error:
            message = f"the compiler fails with {type(error).__name__}"
        answers.write(json.dumps(message) + "\n")
        answers.flush()


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _allow_more_time() -> None:
    """Ends this process, by a signal, when the next grammar takes more than its time."""
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + _CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    _limit_memory()
    _answer(sys.stdin, sys.stdout)
