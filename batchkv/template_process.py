"""The process that renders templates, seen from outside: batches to it, answers from it, its end."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from typing import Any

from batchkv.template_worker import HEADER_BYTES, decoded, encoded

_START_SECONDS = 60.0
_READ_BYTES = 1 << 16
_MAX_FRAME = 1 << 27
# Nothing else of the environment, which may hold secrets, is the worker's business.
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


class ProcessDiedError(Exception):
    """The process is not there any more, or says what it never should."""


class TemplateProcess:
    """A running `template_worker`. To be closed in any case.

    Args:
        memory_bytes: how much it may have.
        max_text: characters that a row may give.
        seconds_per_row: after how much more time of the processor than this it ends by itself.

    Raises:
        RuntimeError: it does not start.
    """

    def __init__(self, *, memory_bytes: int, max_text: int, seconds_per_row: float) -> None:
        arguments = [str(memory_bytes), str(max_text), str(seconds_per_row)]
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        # It sees the packages that this process sees, but nothing that lies in the working directory; and sets
        # have the same order in every run.
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "batchkv.template_worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the other
        )
        self._received = bytearray()
        try:
            for stream in (self._process.stdin, self._process.stdout):
                os.set_blocking(_number(stream), False)
            self.receive(_START_SECONDS)
        except (ProcessDiedError, TimeoutError):
            self.close()
            raise RuntimeError("the process that renders templates does not start") from None
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, batch: object) -> None:
        """Sends a batch. All answers to the one before must have been received.

        Raises:
            ProcessDiedError: it is gone.
            TimeoutError: it does not read.
        """
        frame = memoryview(encoded(batch))
        deadline = time.monotonic() + _START_SECONDS
        stream = _number(self._process.stdin)
        while frame:
            try:
                frame = frame[os.write(stream, frame) :]
            except BlockingIOError:
                _wait(stream, selectors.EVENT_WRITE, deadline)
            except OSError:
                raise ProcessDiedError from None

    def receive(self, seconds: float) -> Any:
        """The next answer.

        Raises:
            ProcessDiedError: it is gone.
            TimeoutError: there is no answer after `seconds`.
        """
        deadline = time.monotonic() + seconds
        self._fill(HEADER_BYTES, deadline)
        length = int.from_bytes(self._received[:HEADER_BYTES], "big")
        if length > _MAX_FRAME:
            raise ProcessDiedError
        self._fill(HEADER_BYTES + length, deadline)
        body = bytes(self._received[HEADER_BYTES : HEADER_BYTES + length])
        del self._received[: HEADER_BYTES + length]
        try:
            return decoded(body)
        except (ValueError, RecursionError):
            raise ProcessDiedError from None

    def close(self) -> None:
        """Ends it, whatever it does, and waits for its end."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _fill(self, length: int, deadline: float) -> None:
        """Reads until there are `length` bytes."""
        stream = _number(self._process.stdout)
        while len(self._received) < length:
            try:
                read = os.read(stream, _READ_BYTES)
            except BlockingIOError:
                _wait(stream, selectors.EVENT_READ, deadline)
                continue
            if not read:
                raise ProcessDiedError
            self._received += read


def _number(stream: Any) -> int:
    number: int = stream.fileno()
    return number


def _wait(stream: int, event: int, deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, event)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
