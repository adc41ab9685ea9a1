"""A row of the table of ops, its cases, and how its inputs are drawn."""

from __future__ import annotations

import abc
import concurrent.futures
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import mlx.core as mx
import numpy as np

from . import reference

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

# The distance from 1 to the next number of a type: one unit in the last place, relative. Whole numbers are right or
# wrong.
EPSILON = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7, mx.uint8: 0.0, mx.uint32: 0.0}

# Below these the steps between a type's numbers shrink no more.
SMALLEST_NORMAL = {mx.float32: 2.0**-126, mx.float16: 2.0**-14, mx.bfloat16: 2.0**-126, mx.uint8: 1.0, mx.uint32: 1.0}


@dataclass(frozen=True)
class Case:
    """One shape to run an op on.

    Attributes:
        label: The model or the purpose that the shape comes from.
        shape: Shape of the op's row-wise arguments.
        options: Keyword arguments that differ from the op's own.
        vjp: Run the gradients rather than the op.
        quick: Part of the benchmark's short form.
        gpu_only: Too large to be worth its time on a CPU.
        cpu_only: Of more rows than the op takes on a GPU.
        apple_only: Of more rows than the op takes on a GPU that is not Apple's.
        gpu: Whose GPUs the simulator stands for, where the case is for their kernels.
        left_to_mx: mx computes the result after a kernel has prepared it. In strict mode other kernels compute it.
    """

    label: str
    shape: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    vjp: bool = False
    quick: bool = False
    gpu_only: bool = False
    cpu_only: bool = False
    apple_only: bool = False
    gpu: Literal["apple", "nvidia"] = "apple"
    left_to_mx: bool = False

    @property
    def name(self) -> str:
        return " ".join(word for word in self.columns if word)

    @property
    def columns(self) -> tuple[str, str, str]:
        """The parts of the name: the label, the shape, and whatever else tells the case from others."""
        more = [f"{key}={value}" for key, value in self.options.items() if key != "precise"]
        more += ["vjp"] * self.vjp + ["nvidia"] * (self.gpu == "nvidia")
        return self.label, "x".join(map(str, self.shape)) or "scalar", " ".join(more)

    def runs_on(self, device: str) -> bool:
        if device != "gpu":
            return not self.gpu_only
        return not self.cpu_only and (not self.apple_only or mx.metal.is_available())


def cases_for_tests(*shapes: tuple[int, ...], vjp: bool = False, **options: Any) -> tuple[Case, ...]:
    """Cases of these shapes for tests alone."""
    return tuple(Case("test", shape, options, vjp=vjp) for shape in shapes)


def all_rows(*names: str) -> tuple[tuple[str, str], ...]:
    """Parameters of an op all of whose arrays are always there."""
    return tuple((name, "rows") for name in names)


@dataclass(frozen=True)
class Exact:
    """A result in float64, and the scales of its rounding.

    Attributes:
        value: The result.
        magnitude: The size of the terms of its sum, where these cancel.
        inner: How far it moves where the float32 numbers on the way to it are off by their own size. Exponentials
            of large numbers amplify the rounding of these numbers.
    """

    value: np.ndarray
    magnitude: np.ndarray | None = None
    inner: np.ndarray | None = None


def gated(gate: Exact, up: Exact, activation: str = "swiglu") -> Exact:
    """silu(gate) * up, or with GELU's approximation for silu, of sums that have magnitudes."""
    assert gate.magnitude is not None and up.magnitude is not None
    x = gate.value
    with np.errstate(over="ignore"):
        if activation == "geglu":
            y = x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2
        else:
            y = x / (1 + np.exp(-x))
    size = np.abs(y) * up.magnitude + (gate.magnitude + np.abs(y)) * np.abs(up.value)
    return Exact(y * up.value, size)


@dataclass(frozen=True, kw_only=True)
class Op(abc.ABC):
    """One row of the table. Its class defines the meaning of its cases' shapes.

    Attributes:
        name: Name in ``mlx_mittens``.
        parameters: Array arguments in order, each with its kind: ``rows`` (always there), ``weight`` or
            ``bias`` (one value a column), ``mask`` or ``sinks``.
        outputs: How many arrays the op returns.
        ours: The op.
        twin: mx's op, or the mx expression for it, called with the same arguments.
        twin_text: The twin in the README, as Markdown.
        summary: A description for the README.
        options: Keyword arguments of every call.
        units: Units in the last place of float32 that rounding alone explains.
        frozen: Parameters without gradients in cases of gradients: quantized weights, which are not trained.
        tests: Shapes that tests and doctor run.
        cases: Shapes that the benchmark times.
    """

    name: str
    parameters: tuple[tuple[str, str], ...]
    outputs: int = 1
    ours: Callable[..., Any]
    twin: Callable[..., Any]
    twin_text: str
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)
    units: int = 4
    frozen: tuple[str, ...] = ()
    tests: tuple[Case, ...]
    cases: tuple[Case, ...]

    def checks(self) -> Iterator[Case]:
        """The shapes to test; gradients only where they are in the table and not tested beside it."""
        yield from self.tests

    def dtypes(self, case: Case) -> Iterable[str]:
        """The element types that a case is run in, by name."""
        return DTYPES

    def link(self, case: Case) -> int:
        """Which argument a result of a case stands in for in the next call, where one follows another.

        It is the first result, or that which an argument is that calls update.
        """
        return 0

    def updated(self, case: Case) -> Mapping[int, int]:
        """The arguments that a call updates in place if nobody else needs them, and which result each is then."""
        return {}

    def trained(self, arrays: Sequence[mx.array | None]) -> list[int]:
        """Indices of the arguments that a case of gradients differentiates by: present and not frozen."""
        return [
            i
            for i, ((name, _), array) in enumerate(zip(self.parameters, arrays, strict=True))
            if array is not None and name not in self.frozen
        ]

    def arguments(self, case: Case) -> dict[str, Any]:
        """Keyword arguments of a case's call."""
        return {**self.options, **case.options}

    @abc.abstractmethod
    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        """Shape of each array argument in a case."""

    @abc.abstractmethod
    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        """Draws fresh array arguments, with outliers."""

    def cotangents(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array]:
        """Draws a cotangent for each output of a case of gradients, and none for another."""
        if case.vjp:
            raise NotImplementedError(f"{self.name} has no gradients in the table")
        return []

    def compared(self, case: Case, results: Sequence[mx.array]) -> list[mx.array]:
        """Results of a case as they are compared with float64: packed integers are dequantized."""
        return list(results)

    @abc.abstractmethod
    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        """The least a case has to move: every input read once, every result written once."""

    @abc.abstractmethod
    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        """Results of a case in float64: outputs, or the gradients by the arguments that are there."""


class ModelOp(Op):
    """An op whose cases for GPUs alone are there for their shapes: in the type that models have."""

    def dtypes(self, case: Case) -> Iterable[str]:
        return ("bfloat16",) if case.gpu_only else DTYPES


# Modes of small floats, with their bits and group sizes.
FLOAT_MODES = (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16))


def mode_of(options: Mapping[str, Any]) -> str:
    """The mode of a call's quantized weights."""
    return str(options.get("mode", "affine"))


def weight_bytes(options: Mapping[str, Any], dtype: mx.Dtype) -> float:
    """Bytes of a quantized weight, with its share of scales and biases."""
    scale = 2 * dtype.size if mode_of(options) == "affine" else 1
    return float(options["bits"] / 8 + scale / options["group_size"])


@overload
def widen(a: mx.array) -> np.ndarray: ...
@overload
def widen(a: mx.array | None) -> np.ndarray | None: ...
def widen(a: mx.array | None) -> np.ndarray | None:
    """An array's values in float64."""
    return None if a is None else np.array(a.astype(mx.float32)).astype(np.float64)


def dequantized(
    words: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int, mode: str = "affine"
) -> np.ndarray:
    """The numbers that `mx.quantize` packed, in float64."""
    wide = widen(scales) if mode == "affine" else np.array(scales)
    return reference.dequantize(np.array(words), wide, widen(biases), group_size, bits, mode)


def on_all_cores(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Maps a function over items on all cores; NumPy lets other threads run while it computes."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, items))


def add_outliers(rng: np.random.Generator, a: np.ndarray, times: float = 20.0) -> None:
    """Multiplies one element in 512, in place."""
    if a.size:
        a.reshape(-1)[rng.integers(0, a.size, max(1, a.size // 512))] *= np.float32(times)


def draw_packed(
    rng: np.random.Generator,
    name: str,
    shape: tuple[int, ...],
    bits: int,
    dtype: mx.Dtype,
    scale: float = 1.0,
    mode: str = "affine",
) -> mx.array:
    """Words, scales or biases, as their name ends, of quantized weights that spread about zero by the scale."""
    if not name.endswith(("scales", "biases")):
        if mode == "mxfp8":
            sizes = rng.integers(0, 0x7F, (*shape[:-1], shape[-1] * 4), dtype=np.uint8)  # but 0x7F, which is no number
            return mx.array((sizes | rng.integers(0, 2, sizes.shape, dtype=np.uint8) << 7).view(np.uint32))
        return mx.array(rng.integers(0, 2**32, shape, dtype=np.uint32))
    if mode != "affine":  # powers of two, or floats with three bits after the exponent
        one, octave = (56, 8) if mode == "nvfp4" else (127, 1)
        middle = one + round(octave * np.log2(scale))
        return mx.array(np.maximum(rng.integers(middle - 12, middle + 1, shape), 0).astype(np.uint8))
    step = rng.uniform(0.5, 1.5, shape).astype(np.float32) * np.float32(scale * 4 / 2**bits)
    return mx.array(step if name.endswith("scales") else step * np.float32(-(2 ** (bits - 1)))).astype(dtype)


def call(function: Callable[..., Any], arrays: Sequence[mx.array | None], options: Mapping[str, Any]) -> list[mx.array]:
    """Calls an op, ours or a twin, and returns its outputs as a list."""
    result = function(*arrays, **options)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def gradients(
    function: Callable[..., Any],
    arrays: Sequence[mx.array | None],
    cotangents: Sequence[mx.array],
    options: Mapping[str, Any],
    by: Sequence[int] | None = None,
) -> list[mx.array]:
    """Gradients of an op with respect to some arguments, by default to each array that is there."""
    there = [i for i, a in enumerate(arrays) if a is not None] if by is None else by

    def of_primals(*primals):
        filled = list(arrays)
        for i, primal in zip(there, primals):
            filled[i] = primal
        return call(function, filled, options)

    primals = [a for i in there if (a := arrays[i]) is not None]
    return mx.vjp(of_primals, primals, list(cotangents))[1]


def run(
    op: Op,
    function: Callable[..., Any],
    case: Case,
    arrays: Sequence[mx.array | None],
    cotangents: Sequence[mx.array] = (),
) -> list[mx.array]:
    """Builds a case's results: the op's outputs, or its gradients. Evaluates nothing."""
    if case.vjp:
        return gradients(function, arrays, cotangents, op.arguments(case), op.trained(arrays))
    return call(function, arrays, op.arguments(case))


# From this number of elements on, work is cut into blocks of rows that fit the caches and shared among the cores.
BLOCKWISE = 2**20
_BLOCK = 2**18


def in_blocks(function: Callable[[slice], Any], rows: int, columns: int) -> list[Any]:
    step = max(1, _BLOCK // columns)
    return on_all_cores(function, (slice(start, start + step) for start in range(0, rows, step)))
