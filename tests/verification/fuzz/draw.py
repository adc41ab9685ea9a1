"""Draws the parts of a case: sizes, element types, numbers, and arrays that hold them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from verification.fuzz import views

Choice = TypeVar("Choice")

FLOATS = (mx.float32, mx.float16, mx.bfloat16)

# Both sides of every width of vectors, simdgroups, packs and blocks.
SIZES = np.array(
    [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 97, 127, 128, 129, 160, 191,
     192, 255, 256, 257, 320, 500, 511, 512, 513, 640, 768, 1000, 1023, 1024, 1025, 1536, 2047, 2048, 2049, 3000, 4095,
     4096, 4097]
)  # fmt: skip
SMALL = 40
SPECIAL = (np.inf, -np.inf, np.nan, 6e4, -6e4, 1e-7, 1e-40, 0.0, -0.0, 3e38, 1e20)
KINDS = ("normal",) * 5 + ("large", "small", "constant", "integers", "special")


def type_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def promoted(*dtypes: mx.Dtype) -> mx.Dtype:
    """The type of a result: the arguments', or float32 where they differ."""
    return dtypes[0] if len(set(dtypes)) == 1 else mx.float32


def float32(value: float) -> float:
    """The float32 number that an op makes of a scalar, so that float64 starts from the same."""
    return float(np.float32(value))


@dataclass
class Draw:
    """The random choices of one case.

    Attributes:
        rng: Their source.
        gpu: Whose GPUs the simulator stands for, or None where native code runs.
        index: The number of the case, for choices that all cases together have to cover.
        layouts: How each drawn array lies in memory, for the case's description.
    """

    rng: np.random.Generator
    gpu: str | None = None
    index: int = 0
    layouts: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, subject: str, gpu: str | None, seed: int, index: int) -> Draw:
        return cls(np.random.default_rng([seed, index, zlib.crc32(subject.encode())]), gpu, index)

    def limit(self, native: int, simulated: int) -> int:
        """A bound of sizes: the simulator is a thousand times slower."""
        return simulated if self.gpu else native

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def integer(self, low: int, high: int) -> int:
        """Between low and high, both included."""
        return int(self.rng.integers(low, high + 1))

    def pick(self, choices: Sequence[Choice], weights: Sequence[float] | None = None) -> Choice:
        share = None if weights is None else np.asarray(weights) / np.sum(weights)
        return choices[int(self.rng.choice(len(choices), p=share))]

    def size(self, most: int, zero: float = 0.02, small: float = 0.6) -> int:
        """A length of an axis, often small or beside a power of two."""
        if self.chance(zero):
            return 0
        fitting = SIZES[SIZES <= (min(most, SMALL) if self.chance(small) else most)]
        if self.chance(0.15):
            return self.integer(1, most)
        return int(self.rng.choice(fitting))

    def dtype(self) -> mx.Dtype:
        return self.pick(FLOATS, (0.4, 0.35, 0.25))

    def dtype_like(self, dtype: mx.Dtype) -> mx.Dtype:
        """The type of another argument of the same call: mostly the same."""
        return dtype if self.chance(0.85) else self.pick(FLOATS)

    def kind(self, kinds: Sequence[str] = KINDS) -> str:
        return self.pick(kinds)

    def numbers(self, shape: Sequence[int], kind: str = "normal") -> np.ndarray:
        """Numbers of a kind, in float64."""
        rng = self.rng
        if kind == "constant":
            return np.full(shape, self.pick((0.0, 1.0, -2.5, 100.0)))
        if kind == "integers":
            return np.asarray(rng.integers(-4, 5, shape), dtype=np.float64)
        values = np.asarray(rng.standard_normal(shape), dtype=np.float64)
        if kind == "large":
            values *= 10.0 ** rng.integers(1, 4)
        elif kind == "small":
            values *= 10.0 ** -rng.integers(1, 5)
        elif kind == "special" and values.size:
            for _ in range(self.integer(1, 2)):
                values.reshape(-1)[rng.integers(0, values.size)] = self.pick(SPECIAL)
        return values

    def array(self, values: np.ndarray, dtype: mx.Dtype, view: float = 0.65) -> mx.array:
        """An array of such numbers, with the probability `view` as a view of a larger or reordered one.

        A broadcast view repeats some of the numbers in place of the others.
        """
        array, layout = views.lay_out(self.rng, np.asarray(values), dtype, view)
        self.layouts.append(layout)
        return array

    def normal(self, shape: Sequence[int], dtype: mx.Dtype, view: float = 0.65) -> mx.array:
        return self.array(self.numbers(shape), dtype, view)


def describe(arrays: Sequence[mx.array], draw: Draw, **choices: Any) -> str:
    """One line that describes the draw."""
    shapes = " ".join(f"{type_name(a.dtype)}{list(a.shape)}" for a in arrays)
    options = " ".join(f"{name}={value}" for name, value in choices.items())
    return f"{shapes} {options} ({', '.join(draw.layouts)})"
