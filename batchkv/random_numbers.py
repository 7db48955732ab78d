"""Counter-based random numbers: a pure function of (seed, row id, sample index, position).

There is no generator state, so the numbers do not depend on the order in which tokens are sampled, on the
batch they are sampled in, or on the number of workers.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

# SplitMix64: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014;
# the multipliers are D. Stafford's variant 13 of the 64-bit finalizer.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_SAMPLES = np.uint64(0x5851F42D4C957F2D)  # keeps samples apart from positions, which are mixed as well
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def row_key(seed: int, row_id: str | int) -> int:
    """The 64-bit key of a row, from which those of its samples come.

    The id 1 and the id "1" have the same key: an id column has one type, so they never meet in a job, and
    a job saved again with its ids as strings keeps its samples.

    Args:
        seed: in [-2^63, 2^64).
        row_id: the row's id in the job.

    Raises:
        OverflowError: the seed is outside its range.
    """
    # A field of fixed width, then the id: no two pairs share an encoding. JSON can hold lone surrogates.
    encoded = seed.to_bytes(9, "little", signed=True) + str(row_id).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8, person=b"batchkv.row").digest(), "little")


def stream_keys(row_keys: npt.NDArray[np.uint64], samples: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """The key of each sample's stream of random numbers.

    Args:
        row_keys: uint64 [B], from `row_key`.
        samples: integer [B], index of the sample within its row, 0 or more.
    """
    # Mixed on both sides of the sum: neighbours among samples, and rows whose keys are neighbours, are unrelated.
    return _mix(_mix(row_keys) ^ _mix(samples.astype(np.uint64) + _SAMPLES))


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One uniform number for each (key, position).

    Args:
        keys: uint64 [B], from `stream_keys`.
        positions: int64 [B], index of the token within its sample.

    Returns:
        float64 [B], odd multiples of 2^-53 in (0, 1): never 0 and never 1.
    """
    # The key is mixed before the position is added: keys that differ by a multiple of _GAMMA would otherwise
    # give one stream, shifted.
    bits = _mix(_mix(keys) + positions.astype(np.uint64) * _GAMMA)
    # 52 bits and a half: with 53 the greatest value would round to 1.
    numbers: npt.NDArray[np.float64] = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return numbers


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A step of SplitMix64 from each state: a bijection where every input bit reaches every output bit."""
    mixed: npt.NDArray[np.uint64] = words + _GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MULTIPLIER_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MULTIPLIER_2
    mixed ^= mixed >> np.uint64(31)
    return mixed
