"""A conversion is done once, kept whole or not at all, and made again when it cannot be read."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from batchkv.errors import UserError
from batchkv.gguf_cache import cache_folder, load_converted


class Text:
    """Stands for a config, a tokenizer or a model."""

    def __init__(self, text: str) -> None:
        self.text = text

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        Path(save_directory, "text").write_text(self.text)


class Converter:
    """Reads the `GGUF file` and counts how often."""

    def __init__(self, gguf_path: Path, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.gguf_path = gguf_path
        self.meanwhile = meanwhile
        self.calls = 0

    def __call__(self) -> Text:
        self.calls += 1
        self.meanwhile()
        return Text(self.gguf_path.read_text().upper())


def load(folder: Path) -> str:
    return (folder / "text").read_text()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_text("weights")
    return path


def entry_of(cache: Path) -> Path:
    (entry,) = cache.glob("*/model")
    return entry


def unfinished(cache: Path) -> list[Path]:
    return list(cache.glob("*/.*"))


def test_converted_once(cache: Path, gguf: Path) -> None:
    convert = Converter(gguf)
    for _ in range(2):
        assert load_converted(gguf, "model", convert=convert, load=load) == "WEIGHTS"
    assert convert.calls == 1
    assert not unfinished(cache)


def test_each_part_is_an_entry_of_its_own(cache: Path, gguf: Path) -> None:
    load_converted(gguf, "config", convert=Converter(gguf), load=load)
    assert load_converted(gguf, "model", convert=lambda: Text("other"), load=load) == "other"


def test_a_file_with_other_bytes_is_another_entry(cache: Path, gguf: Path) -> None:
    load_converted(gguf, "model", convert=Converter(gguf), load=load)
    gguf.write_text("Weights")
    os.utime(gguf, ns=(0, 0))
    convert = Converter(gguf)
    load_converted(gguf, "model", convert=convert, load=load)
    assert convert.calls == 1


def test_a_copy_of_the_file_is_the_same_entry(cache: Path, gguf: Path, tmp_path: Path) -> None:
    load_converted(gguf, "model", convert=Converter(gguf), load=load)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(gguf.read_bytes())
    convert = Converter(copy)
    assert load_converted(copy, "model", convert=convert, load=load) == "WEIGHTS"
    assert convert.calls == 0


def test_another_transformers_converts_again(cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_converted(gguf, "model", convert=Converter(gguf), load=load)
    monkeypatch.setattr("transformers.__version__", "99.0")
    convert = Converter(gguf)
    load_converted(gguf, "model", convert=convert, load=load)
    assert convert.calls == 1


def test_an_entry_that_cannot_be_read_is_made_again(cache: Path, gguf: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_converted(gguf, "model", convert=Converter(gguf), load=load)
    (entry_of(cache) / "text").rename(entry_of(cache) / "renamed")
    convert = Converter(gguf)
    assert load_converted(gguf, "model", convert=convert, load=load) == "WEIGHTS"
    assert convert.calls == 1
    assert "is made again" in caplog.text


def test_a_user_error_while_loading_is_not_the_fault_of_the_entry(cache: Path, gguf: Path) -> None:
    load_converted(gguf, "model", convert=Converter(gguf), load=load)

    def too_large(folder: Path) -> str:
        raise UserError("too large")

    convert = Converter(gguf)
    with pytest.raises(UserError, match="too large"):
        load_converted(gguf, "model", convert=convert, load=too_large)
    assert convert.calls == 0
    assert entry_of(cache).is_dir()


def test_of_two_racing_processes_the_first_entry_stays(cache: Path, gguf: Path) -> None:
    def other_process() -> None:
        load_converted(gguf, "model", convert=lambda: Text("theirs"), load=load)

    assert load_converted(gguf, "model", convert=Converter(gguf, other_process), load=load) == "theirs"
    assert not unfinished(cache)


def test_a_failed_conversion_leaves_nothing_behind(cache: Path, gguf: Path) -> None:
    def fail() -> Text:
        raise RuntimeError("damaged")

    with pytest.raises(RuntimeError, match="damaged"):
        load_converted(gguf, "model", convert=fail, load=load)
    assert not list(cache.glob("*/*"))


def test_a_full_disk_leaves_nothing_behind(cache: Path, gguf: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Large(Text):
        def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
            super().save_pretrained(save_directory)
            raise OSError(errno.ENOSPC, "No space left on device")

    assert load_converted(gguf, "model", convert=lambda: Large("half"), load=load) is None
    assert not list(cache.glob("*/*"))
    assert not unfinished(cache)
    assert "No space left on device" in caplog.text


def test_a_cache_that_cannot_be_written_is_said_before_converting(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BATCHKV_CACHE", str(gguf))  # a file, so no folder can be made in it
    convert = Converter(gguf)
    with caplog.at_level(logging.WARNING):
        assert load_converted(gguf, "model", convert=convert, load=load) is None
    assert convert.calls == 0
    assert "set BATCHKV_CACHE" in caplog.text


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"BATCHKV_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/batchkv"),
        ({"HOME": "/c"}, "/c/.cache/batchkv"),
    ],
)
def test_where_the_cache_is(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATCHKV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)
