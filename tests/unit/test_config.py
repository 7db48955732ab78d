"""Flags that make no sense are refused in one line, sizes mean what people write."""

from __future__ import annotations

from typing import Any

import pytest

from batchkv.config import EngineConfig, parse_memory_size
from batchkv.errors import UserError

FREE = 1000 << 20


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        (" 1.5KiB ", 1536),
        ("1TiB", 1 << 40),
        ("3kB", 3_000),
        ("2MB", 2_000_000),
        ("2gb", 2 * 10**9),
        ("1TB", 10**12),
        ("100B", 100),
        ("1048576", 1 << 20),
        (1 << 20, 1 << 20),
        ("2", 2),
        (2.5e9, 2_500_000_000),
        ("1e9", 10**9),
        ("2E+3", 2_000),
        (1e16, 10**16),
        ("1.5e1KiB", 15 << 10),
        (".5GiB", 1 << 29),
    ],
)
def test_sizes_are_bytes(size: str | int | float, expected: int) -> None:
    assert parse_memory_size(size, free_bytes=FREE) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [("0.8", 800 << 20), (0.5, 500 << 20), (".25", 250 << 20), ("1", FREE), (1, FREE), (1.0, FREE), (1e-5, 10485)],
)
def test_numbers_up_to_one_are_shares_of_the_free_memory(size: str | int | float, expected: int) -> None:
    assert parse_memory_size(size, free_bytes=FREE) == expected


@pytest.mark.parametrize(
    "size",
    ["", "GiB", "much", "2 GiB or so", "2XB", "-1", "-1GiB", "1,5GiB", "2G iB", "nan", "inf", "1e999", "9" * 400],
)
def test_what_is_no_size_is_named(size: str) -> None:
    with pytest.raises(UserError, match="is no size: use 2GiB, 512MiB or a fraction") as error:
        parse_memory_size(size, free_bytes=FREE)
    assert repr(size) in str(error.value)


@pytest.mark.parametrize("size", ["1.5", 1.5, "2.000001"])
def test_a_fraction_above_one_is_refused(size: str | float) -> None:
    with pytest.raises(UserError, match="neither a fraction up to 1 nor whole bytes"):
        parse_memory_size(size, free_bytes=FREE)


@pytest.mark.parametrize("size", ["0", "0.0", 0, 0.0, "0GiB", "0.1B"])
def test_a_size_of_nothing_is_refused(size: str | int | float) -> None:
    with pytest.raises(UserError, match="must be more than nothing"):
        parse_memory_size(size, free_bytes=FREE)


def test_the_defaults_are_those_of_the_command_line() -> None:
    config = EngineConfig()
    assert (config.model, config.tokenizer, config.dtype, config.device) == ("smollm2", None, "auto", "auto")
    assert parse_memory_size(config.kv_memory, free_bytes=1) == 2 << 30
    assert not config.no_prefix_sharing


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", "float8", "--dtype 'float8' is not one of auto, float32, bfloat16, float16"),
        ("kv_dtype", "int4", "--kv-dtype 'int4' is not one of auto, int8, fp8"),
        ("device", "gpu", "--device 'gpu' is not auto, cpu, cuda or cuda:N"),
        ("device", "cuda:", "--device 'cuda:' is not"),
        ("device", "cuda:0x", "--device 'cuda:0x' is not"),
        ("max_batch_tokens", -1, "--max-batch-tokens -1 must be at least 1"),
        ("max_batch_rows", 0, "--max-batch-rows 0 must be at least 1"),
        ("page_size", 0, "page_size 0 must be at least 1"),
        ("kv_memory", "lots", "--kv-memory 'lots' is no size"),
    ],
)
def test_a_bad_option_is_named_with_its_value(field: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        EngineConfig(**{field: value})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_devices_that_are_fine(device: str) -> None:
    assert EngineConfig(device=device).device == device


def test_a_step_holds_more_tokens_on_a_gpu_unless_told() -> None:
    assert EngineConfig().batch_tokens("cuda") > EngineConfig().batch_tokens("cpu") > 0
    assert EngineConfig(max_batch_tokens=7).batch_tokens("cuda") == 7
    assert EngineConfig(max_batch_tokens=7).batch_tokens("cpu") == 7
