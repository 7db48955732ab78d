"""The stream is fixed, spread evenly, and unrelated between neighbouring keys and positions."""

from __future__ import annotations

import numpy as np
import pytest

from batchkv.random_numbers import row_key, stream_keys, uniforms

N = 1 << 17
# 5-sigma limit of the correlation of N independent pairs.
MAX_CORRELATION = 5 / np.sqrt(N)


def grid(keys: int, positions: int) -> np.ndarray:
    """uniforms of the keys of samples 0.. at positions 0.., [keys, positions]."""
    key = stream_keys(np.full(keys, row_key(0, 0), np.uint64), np.arange(keys))
    return uniforms(np.repeat(key, positions), np.tile(np.arange(positions), keys)).reshape(keys, positions)


def stream_key(seed: int, row_id: str | int, sample: int) -> int:
    return int(stream_keys(np.array([row_key(seed, row_id)], np.uint64), np.array([sample]))[0])


def chi_square_per_freedom(numbers: np.ndarray, bins: int = 256) -> float:
    """Is 1 +- 0.09 (standard deviation) for uniform numbers in 256 bins."""
    counts = np.bincount((numbers * bins).astype(np.int64).ravel(), minlength=bins)
    expected = numbers.size / bins
    return float(((counts - expected) ** 2 / expected).sum() / (bins - 1))


def test_streams_are_the_same_in_every_version() -> None:
    assert stream_key(0, 0, 0) == 0x0E19AD7D11984A12
    assert stream_key(-1, "é", 3) == 0xFCAB0A8F4AD3BDFB
    numbers = uniforms(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 7, 2**40]))
    assert numbers.tolist() == [0.6524484863740322, 0.2469652021453378, 0.5440041384053077]


def test_each_field_of_the_key_counts() -> None:
    triples = [
        (seed, row, sample) for seed in (-1, 0, 1, 2**64 - 1) for row in ("", "0", "1", "10", 11) for sample in (0, 1)
    ]
    assert stream_key(-(2**63), 0, 0) != stream_key(2**63, 0, 0)
    assert len({stream_key(*triple) for triple in triples}) == len(triples)


def test_ids_are_the_same_as_numbers_and_as_strings() -> None:
    assert stream_key(5, 12, 0) == stream_key(5, "12", 0)


def test_any_string_is_an_id() -> None:
    assert stream_key(0, "\ud800", 0) != stream_key(0, "?", 0)


def test_out_of_range_is_an_error() -> None:
    with pytest.raises(OverflowError):
        row_key(2**72, 0)


def test_extremes_stay_inside_the_open_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchkv.random_numbers._mix", lambda words: words)
    for bits in (0, 2**64 - 1):
        number = uniforms(np.array([bits], np.uint64), np.array([0]))[0]
        assert 0 < number < 1


def test_numbers_do_not_depend_on_the_batch() -> None:
    key = np.arange(50, dtype=np.uint64)
    together = uniforms(key, np.arange(50))
    alone = [uniforms(key[i : i + 1], np.array([i]))[0] for i in range(50)]
    assert together.tolist() == alone


def test_even_along_positions_along_keys_and_over_plain_counters() -> None:
    along_positions, along_keys = grid(1, N), grid(N // 8, 8)[:, 3]
    counters = uniforms(np.arange(N, dtype=np.uint64), np.zeros(N, np.int64))
    for numbers in (along_positions, along_keys, counters):
        assert chi_square_per_freedom(numbers) == pytest.approx(1, abs=0.45)
        low_bits = (numbers * 2**30) % 1
        assert chi_square_per_freedom(low_bits) == pytest.approx(1, abs=0.45)


def test_neighbours_are_uncorrelated() -> None:
    numbers = grid(N // 8, 9)
    pairs = {
        "positions": (numbers[:, :-1], numbers[:, 1:]),
        "keys": (numbers[:-1, :8], numbers[1:, :8]),
        "diagonal": (numbers[:-1, :8], numbers[1:, 1:]),
    }
    for name, (left, right) in pairs.items():
        correlation = np.corrcoef(left.ravel(), right.ravel())[0, 1]
        assert abs(correlation) < MAX_CORRELATION, name


def test_pairs_of_neighbours_fill_the_square() -> None:
    numbers = grid(1, 2 * N)[0].reshape(N, 2)
    cells = (np.floor(numbers[:, 0] * 16) + numbers[:, 1]) / 16
    assert chi_square_per_freedom(cells) == pytest.approx(1, abs=0.45)


def test_keys_a_step_of_the_counter_apart_do_not_give_one_stream_shifted() -> None:
    gamma = np.uint64(0x9E3779B97F4A7C15)
    positions = np.arange(100)
    first = uniforms(np.full(100, 1, np.uint64), positions)
    second = uniforms(np.full(100, 1, np.uint64) + gamma, positions)
    assert not np.isin(first, second).any()
