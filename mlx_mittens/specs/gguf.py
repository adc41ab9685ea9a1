"""GGUF blocks in NumPy: their sizes, and their weights in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

# Twice the floats of 4 bits.
FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float64)

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


@dataclass(frozen=True)
class Kind:
    """A kind of block.

    Attributes:
        weights: Of a block.
        bytes: Of a block.
        halves: Where the halves of a block begin, in bytes: its scale, and its minimum if it has one.
        step: Scales of about this size make weights of about one, where all other bytes are random.
        minimum: The same of the minimum.
        scales: Bytes at the start of a block that are scales, in kinds without halves.
        scale: Such a byte that makes weights of about one.
    """

    weights: int
    bytes: int
    halves: tuple[int, ...]
    step: float
    minimum: float = 0
    scales: int = 0
    scale: int = 0

    def row_bytes(self, columns: int) -> int:
        """Bytes of a number of weights."""
        return columns // self.weights * self.bytes


KINDS: Mapping[str, Kind] = {
    "q4_0": Kind(32, 18, (0,), 0.2),
    "q4_1": Kind(32, 20, (0, 2), 0.2, -1.5),
    "q5_0": Kind(32, 22, (0,), 0.1),
    "q5_1": Kind(32, 24, (0, 2), 0.1, -1.5),
    "q8_0": Kind(32, 34, (0,), 0.02),
    "q2_k": Kind(256, 84, (80, 82), 0.1, 0.15),
    "q3_k": Kind(256, 110, (108,), 0.03),
    "q4_k": Kind(256, 144, (0, 2), 0.004, 0.03),
    "q5_k": Kind(256, 176, (0, 2), 0.002, 0.03),
    "q6_k": Kind(256, 210, (208,), 0.001),
    "iq4_nl": Kind(32, 18, (0,), 0.015),
    "iq4_xs": Kind(256, 136, (0,), 0.001),
    "mxfp4": Kind(32, 17, (), 0.25, scales=1, scale=125),
    "nvfp4": Kind(64, 36, (), 0.25, scales=4, scale=40),
}


def weights(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Weights of blocks.

    Args:
        blocks: uint8 of shape [.., bytes of a row].
        kind: A key of `KINDS`.

    Returns:
        float64 of shape [.., columns].
    """
    each = KINDS[kind]
    block = blocks.reshape(-1, each.bytes)
    halves = [np.ascontiguousarray(block[:, at : at + 2]).view(np.float16).astype(np.float64) for at in each.halves]
    with np.errstate(invalid="ignore"):  # infinity times zero
        w = (_SMALL if kind in _SMALL else _LARGE)[kind](block, *halves)
    return w.reshape(*blocks.shape[:-1], blocks.shape[-1] // each.bytes * each.weights)


def _places(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Integers at `count` places of each byte, [n, bytes] -> [n, count, bytes]."""
    shifts = (bits * np.arange(count, dtype=np.uint8))[:, None]
    return (data[:, None, :] >> shifts & ((1 << bits) - 1)).astype(np.int64)


def _nibbles(data: np.ndarray) -> np.ndarray:
    """Of 32 columns: the lower halves of 16 bytes, then the upper ones."""
    return _places(data, 4, 2).reshape(len(data), 32)


def _fifths(data: np.ndarray) -> np.ndarray:
    return 16 * np.unpackbits(data, axis=-1, bitorder="little").astype(np.int64)


def _mx(b: np.ndarray) -> np.ndarray:
    return np.exp2(b[:, :1].astype(np.float64) - 128) * FP4_VALUES[_nibbles(b[:, 1:])]


# By kind: blocks [n, bytes] and their halves [n, 1] -> [n, 32].
_SMALL: Mapping[str, Callable[..., np.ndarray]] = {
    "q4_0": lambda b, d: d * (_nibbles(b[:, 2:]) - 8),
    "q4_1": lambda b, d, m: d * _nibbles(b[:, 4:]) + m,
    "q5_0": lambda b, d: d * (_nibbles(b[:, 6:]) + _fifths(b[:, 2:6]) - 16),
    "q5_1": lambda b, d, m: d * (_nibbles(b[:, 8:]) + _fifths(b[:, 4:8])) + m,
    "q8_0": lambda b, d: d * np.ascontiguousarray(b[:, 2:]).view(np.int8),
    "iq4_nl": lambda b, d: d * IQ4_VALUES[_nibbles(b[:, 2:])],
    "mxfp4": _mx,
}


def _groups_of_32(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of 6 bits, [n, 8]."""
    lower, upper = b[:, 4:12] & 63, b[:, 4:12] >> 6 << 4
    rest = b[:, 12:16]
    scales = np.concatenate([lower[:, :4], (rest & 15) | upper[:, :4]], -1)
    return scales.astype(np.int64), np.concatenate([lower[:, 4:], rest >> 4 | upper[:, 4:]], -1).astype(np.int64)


def _four_or_five(b: np.ndarray, d: np.ndarray, m: np.ndarray, fifth: bool) -> np.ndarray:
    scales, minima = _groups_of_32(b)
    data = b[:, 48 if fifth else 16 :].reshape(len(b) * 4, 32)
    v = _places(data, 4, 2).reshape(len(b), 8, 32)
    if fifth:
        v = v + 16 * _places(b[:, 16:48], 1, 8)
    return (d * scales)[:, :, None] * v - (m * minima)[:, :, None]


def _pairs(b: np.ndarray, first: int) -> np.ndarray:
    """2 bits of 256 columns, [n, 16 groups, 16]."""
    data = b[:, first : first + 64].reshape(len(b) * 2, 32)
    return _places(data, 2, 4).reshape(len(b), 16, 16)


def _two(b: np.ndarray, d: np.ndarray, m: np.ndarray) -> np.ndarray:
    scales, minima = d * (b[:, :16] & 15), m * (b[:, :16] >> 4)
    return scales[:, :, None] * _pairs(b, 16) - minima[:, :, None]


def _three(b: np.ndarray, d: np.ndarray) -> np.ndarray:
    lower = _places(b[:, 96:104], 4, 2).reshape(len(b), 16)
    upper = _places(b[:, 104:108], 2, 4).reshape(len(b), 16)
    thirds = _places(b[:, :32], 1, 8).reshape(len(b), 16, 16)
    return (d * (lower + 16 * upper - 32))[:, :, None] * (_pairs(b, 32) + 4 * thirds - 4)


def _six(b: np.ndarray, d: np.ndarray) -> np.ndarray:
    lower = _places(b[:, :128].reshape(len(b) * 2, 64), 4, 2).reshape(len(b), 16, 16)
    scales = d * np.ascontiguousarray(b[:, 192:208]).view(np.int8)
    return scales[:, :, None] * (lower + 16 * _pairs(b, 128) - 32)


def _values(b: np.ndarray, d: np.ndarray) -> np.ndarray:
    upper = _places(b[:, 2:4], 2, 4).transpose(0, 2, 1).reshape(len(b), 8)
    lower = _places(b[:, 4:8], 4, 2).transpose(0, 2, 1).reshape(len(b), 8)
    v = IQ4_VALUES[_places(b[:, 8:].reshape(len(b) * 8, 16), 4, 2)].reshape(len(b), 8, 32)
    return (d * (lower + 16 * upper - 32))[:, :, None] * v


def _nv(b: np.ndarray) -> np.ndarray:
    exponents, fractions = b[:, :4] >> 3 & 15, (b[:, :4] & 7).astype(np.float64)
    scales = np.where(exponents == 0, fractions / 8 * 2.0**-6, (1 + fractions / 8) * np.exp2(exponents - 7.0))
    scales = np.where(b[:, :4] == 0x7F, 0, scales / 2)
    return scales[:, :, None] * FP4_VALUES[_places(b[:, 4:].reshape(len(b) * 4, 8), 4, 2)].reshape(len(b), 4, 16)


# The same -> [n, groups, weights of a group].
_LARGE: Mapping[str, Callable[..., np.ndarray]] = {
    "q2_k": _two,
    "q3_k": _three,
    "q4_k": lambda b, d, m: _four_or_five(b, d, m, False),
    "q5_k": lambda b, d, m: _four_or_five(b, d, m, True),
    "q6_k": _six,
    "iq4_xs": _values,
    "nvfp4": _nv,
}
