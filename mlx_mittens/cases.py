"""The one table of ops: tests, benchmark, doctor and the README's table all read these rows.

A row names an op, its mx twin, its float64 reference, how its inputs look, the shapes it is tested on and the shapes of
real models it is timed on. A new op is one row here.
"""

from __future__ import annotations

import abc
import concurrent.futures
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from . import ops, reference

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

# The distance from 1 to the next number of a type: one unit in the last place, relative. Bytes are right or wrong.
EPSILON = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7, mx.uint8: 0.0}

# Below these the steps between a type's numbers shrink no more.
SMALLEST_NORMAL = {mx.float32: 2.0**-126, mx.float16: 2.0**-14, mx.bfloat16: 2.0**-126, mx.uint8: 1.0}

# From here on a value rounds to infinity.
_OVERFLOW = {
    mx.float32: 2.0**128 - 2.0**103,
    mx.float16: 2.0**16 - 2.0**4,
    mx.bfloat16: 2.0**128 - 2.0**119,
    mx.uint8: math.inf,
}


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
        gpu: Whose GPUs the simulator stands for, where the case is for their kernels.
    """

    label: str
    shape: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    vjp: bool = False
    quick: bool = False
    gpu_only: bool = False
    cpu_only: bool = False
    gpu: Literal["apple", "nvidia"] = "apple"

    @property
    def name(self) -> str:
        words = [self.label, "x".join(map(str, self.shape)) or "scalar"]
        words += [f"{key}={value}" for key, value in self.options.items() if key != "precise"]
        return " ".join(words + ["vjp"] * self.vjp + ["nvidia"] * (self.gpu == "nvidia"))

    def runs_on(self, device: str) -> bool:
        return not (self.cpu_only if device == "gpu" else self.gpu_only)


@dataclass(frozen=True)
class Exact:
    """A result in float64, and what its rounding is to be measured by.

    Attributes:
        value: The result.
        magnitude: How large the terms are that it sums up, where these cancel.
        inner: How far it moves where the float32 numbers on the way to it are off by their own size: what exponentials
            of large numbers make of the rounding of these.
    """

    value: np.ndarray
    magnitude: np.ndarray | None = None
    inner: np.ndarray | None = None


@dataclass(frozen=True)
class Spread:
    """How row-wise inputs are drawn: normal, with a mean of its own for each row, and outliers.

    Attributes:
        deviation: Standard deviation.
        offset: Largest mean of a row.
        outlier: How many times larger than drawn one element in 512 is.
    """

    deviation: float = 1.0
    offset: float = 1.0
    outlier: float = 20.0


@dataclass(frozen=True, kw_only=True)
class Op(abc.ABC):
    """One row of the table. Its class says what its cases' shapes mean.

    Attributes:
        name: Name in ``mlx_mittens``.
        parameters: Array arguments in order, each with what it holds: ``rows`` (what is always there), ``weight`` or
            ``bias`` (one value a column), ``mask`` or ``sinks``.
        outputs: How many arrays the op returns.
        ours: The op.
        twin: mx's op, or the mx expression for it, called with the same arguments.
        twin_text: The twin as a user writes it.
        summary: What it computes, for the README.
        options: Keyword arguments of every call.
        units: Units in the last place of float32 that rounding alone explains.
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

    @abc.abstractmethod
    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        """The least a case has to move: every input read once, every result written once."""

    @abc.abstractmethod
    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        """What a case gives in float64: outputs, or the gradients of the arguments that are there."""


@dataclass(frozen=True, kw_only=True)
class RowOp(Op):
    """An op that works along rows; its outputs are all of the case's shape, and so are its ``rows`` arguments.

    Attributes:
        reference: The op in float64.
        reference_vjp: Its gradients in float64; takes the arguments, then the cotangents.
        inputs: How the row-wise inputs spread.
        rounds_first: Whether it works on a sum that was rounded to the inputs' type, so that each term of a weight's
            gradient is off by a unit of that type and not of float32.
        from_output: Whether the gradient starts from the op's output, which was rounded to its type.
    """

    reference: Callable[..., Any]
    reference_vjp: Callable[..., Any]
    inputs: Spread = Spread()
    rounds_first: bool = False
    from_output: bool = False

    def checks(self) -> Iterator[Case]:
        """The shapes to test, each for the op and for its gradients."""
        for case in self.tests:
            if not case.vjp:
                yield case
            yield replace(case, vjp=True)

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        return [case.shape if kind == "rows" else case.shape[-1:] for _, kind in self.parameters]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array]:
        """Draws fresh array arguments, with outliers and rows of different size."""
        spread = self.inputs
        if self.arguments(case).get("axis", -1) != -1:
            spread = replace(spread, offset=0.0)  # or one row would outweigh all that it is normalized with
        kinds = [kind for _, kind in self.parameters]
        return [_draw(rng, kind, shape, spread, dtype) for kind, shape in zip(kinds, self.shapes(case))]

    def cotangents(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array]:
        return [_draw(rng, "rows", case.shape, Spread(), dtype) for _ in range(self.outputs if case.vjp else 0)]

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        inputs = sum(math.prod(shape) for shape in self.shapes(case))
        outputs = self.outputs * math.prod(case.shape)
        return dtype.size * (2 * inputs + outputs if case.vjp else inputs + outputs)

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        narrow = [None if a is None else np.array(a.astype(mx.float32)) for a in (*arrays, *cotangents)]
        options = self.arguments(case)
        if not case.vjp:
            return [Exact(a) for a in _by_rows(self.reference, case, narrow, options)]
        values = _by_rows(self.reference_vjp, case, narrow, options)
        if self.from_output:
            options["smallest"] = SMALLEST_NORMAL[arrays[0].dtype]
        magnitudes = _by_rows(self.reference_vjp, case, narrow, {**options, "magnitude": True})
        return [
            Exact(a, b) if a.shape == case.shape or self.rounds_first else Exact(a, inner=b)
            for a, b in zip(values, magnitudes)
        ]


def widen(a: mx.array | None) -> np.ndarray | None:
    """An array's values in float64."""
    return None if a is None else np.array(a.astype(mx.float32)).astype(np.float64)


def dequantized(words: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int) -> np.ndarray:
    """What `mx.quantize` packed, in float64."""
    return reference.dequantize(np.array(words), widen(scales), widen(biases), group_size, bits)


def on_all_cores(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """What a function gives for each item; NumPy lets other threads run while it computes."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, items))


def add_outliers(rng: np.random.Generator, a: np.ndarray, times: float = 20.0) -> None:
    """Makes one element in 512 so many times larger, in place."""
    if a.size:
        a.reshape(-1)[rng.integers(0, a.size, max(1, a.size // 512))] *= np.float32(times)


def draw_packed(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], bits: int, dtype: mx.Dtype, scale: float = 1.0
) -> mx.array:
    """Words, scales or biases, as their name ends, of affine weights that spread about zero by the scale."""
    if not name.endswith(("scales", "biases")):
        return mx.array(rng.integers(0, 2**32, shape, dtype=np.uint32))
    step = rng.uniform(0.5, 1.5, shape).astype(np.float32) * np.float32(scale * 4 / 2**bits)
    return mx.array(step if name.endswith("scales") else step * np.float32(-(2 ** (bits - 1)))).astype(dtype)


def _draw(rng: np.random.Generator, kind: str, shape: tuple[int, ...], spread: Spread, dtype: mx.Dtype) -> mx.array:
    a = rng.standard_normal(shape, dtype=np.float32)
    if kind == "weight":
        a = 1 + a / 4
    elif kind == "rows" and a.size:
        a = np.asarray(a * np.float32(spread.deviation))
        add_outliers(rng, a, spread.outlier)
        a += rng.uniform(-spread.offset, spread.offset, size=(*shape[:-1], 1) if shape else ()).astype(np.float32)
    return mx.array(a).astype(dtype)


def _tests(*shapes: tuple[int, ...], **more: Any) -> tuple[Case, ...]:
    return tuple(Case("test", shape, **more) for shape in shapes)


# Rows on both sides of every threshold of the kernels (csrc/ops/row_plan.h), for each kernel rows that fill packs and
# rows that do not, tails of every length, one column. Small enough for the simulator, where tests/test_variants.py
# demands that they reach every variant.
_NORM_TESTS = _tests(
    (1, 1), (3, 7), (5, 33), (2, 3, 64), (1, 8, 4, 128), (2, 200), (9, 255), (3, 480), (7, 500), (65, 300), (65, 600),
    (65, 601), (2, 1024), (3, 1025), (66, 1032), (1, 2048), (2, 2881), (1, 4100), (2, 6001), (1, 8200), (9, 10007),
    (9, 17001), (2, 33000), (1, 90001), (1100, 24), (513, 261), (513, 264), (513, 520),
)  # fmt: skip
# More rows than threadgroups that sum up a weight's gradient, and than simdgroups.
_NORM_TESTS += _tests((130, 1030), (2085, 5), vjp=True)

_NORM_CASES = (
    Case("Llama-3.2-1B decode", (1, 2048), quick=True),
    Case("Llama-3.2-1B prompt", (512, 2048)),
    Case("Llama-3.1-8B decode", (1, 4096)),
    Case("Llama-3.1-8B prompt", (512, 4096), quick=True),
    Case("Qwen3-0.6B prompt", (512, 1024)),
    Case("Gemma 3 1B prompt", (512, 1152)),
    Case("gpt-oss 20B prompt", (512, 2880)),
)

_LARGE_CASES = (Case("large", (4096, 4096)), Case("large", (16384, 8192), gpu_only=True))


def _add_then_rms_norm(x, residual, weight, eps, *, stream=None):
    total = mx.add(x, residual, stream=stream)
    return mx.fast.rms_norm(total, weight, eps, stream=stream), total


# Those that work along rows.
ROW_OPS: tuple[RowOp, ...] = (
    RowOp(
        name="rms_norm",
        parameters=(("x", "rows"), ("weight", "weight")),
        ours=ops.rms_norm,
        twin=mx.fast.rms_norm,
        twin_text="mx.fast.rms_norm(x, weight, eps)",
        reference=reference.rms_norm,
        reference_vjp=reference.rms_norm_vjp,
        summary="root mean square norm of the last axis",
        options={"eps": 1e-5},
        tests=_NORM_TESTS,
        cases=_NORM_CASES
        + (
            Case("Qwen3-0.6B q norm", (1, 16, 512, 128)),
            Case("Qwen3-0.6B k norm, decode", (1, 8, 1, 128)),
        )
        + _LARGE_CASES
        + (
            Case("Llama-3.1-8B prompt", (512, 4096), vjp=True, quick=True),
            Case("Qwen3-0.6B prompt", (512, 1024), vjp=True),
        ),
    ),
    RowOp(
        name="layer_norm",
        parameters=(("x", "rows"), ("weight", "weight"), ("bias", "bias")),
        ours=ops.layer_norm,
        twin=mx.fast.layer_norm,
        twin_text="mx.fast.layer_norm(x, weight, bias, eps)",
        reference=reference.layer_norm,
        reference_vjp=reference.layer_norm_vjp,
        summary="layer norm of the last axis",
        options={"eps": 1e-5},
        tests=_NORM_TESTS + _tests((65, 4109), (66, 4104)),  # long rows, of which a thread holds eight packs
        cases=(
            Case("GPT-2 decode", (1, 768), quick=True),
            Case("GPT-2 prompt", (1024, 768), quick=True),
            Case("BERT-large", (512, 1024)),
            Case("Whisper large encoder", (1500, 1280)),
        )
        + _LARGE_CASES
        + (Case("GPT-2 prompt", (1024, 768), vjp=True, quick=True),),
    ),
    RowOp(
        name="softmax",
        parameters=(("a", "rows"),),
        ours=ops.softmax,
        twin=mx.softmax,
        twin_text="mx.softmax(a, axis, precise=True)",
        reference=lambda a, axis=None, precise=True: reference.softmax(a, axis),
        reference_vjp=lambda a, dy, axis=None, precise=True, **more: reference.softmax_vjp(a, dy, axis, **more),
        from_output=True,
        summary="softmax over any axis or axes",
        options={"axis": -1, "precise": True},
        # Far from zero, so that the largest value must be taken off, but with no row that a single element fills.
        inputs=Spread(deviation=1.5, offset=80.0, outlier=3.0),
        tests=_NORM_TESTS
        + _tests((4, 6, 10), options={"axis": 0})
        + _tests((4, 6, 10), options={"axis": (0, 2)})
        + _tests((4, 6, 10), options={"axis": None}),
        cases=(
            Case("Llama-3.1-8B scores, decode", (1, 32, 1, 4096)),
            Case("Qwen3-0.6B scores, prompt", (1, 16, 512, 512), quick=True),
            Case("gpt-oss 20B router", (512, 32)),
            Case("Llama-3 vocabulary", (1, 128256), quick=True),
            Case("Qwen3 vocabulary", (1, 151936)),
            Case("Qwen3 vocabulary, batch", (8, 151936)),
            Case("large", (8, 131072)),
            Case("large", (512, 4096), quick=True),
        )
        + _LARGE_CASES
        + (Case("Qwen3-0.6B scores, prompt", (1, 16, 512, 512), vjp=True, quick=True),),
    ),
    RowOp(
        name="add_rms_norm",
        parameters=(("x", "rows"), ("residual", "rows"), ("weight", "weight")),
        outputs=2,
        ours=ops.add_rms_norm,
        twin=_add_then_rms_norm,
        twin_text="s = x + residual; mx.fast.rms_norm(s, weight, eps), s",
        reference=reference.add_rms_norm,
        reference_vjp=reference.add_rms_norm_vjp,
        rounds_first=True,
        summary="residual and its norm in one kernel",
        options={"eps": 1e-5},
        tests=_NORM_TESTS,
        cases=_NORM_CASES + _LARGE_CASES + (Case("Llama-3.1-8B prompt", (512, 4096), vjp=True, quick=True),),
    ),
)


from .attention_cases import ATTENTION_OPS  # noqa: E402  (it needs what stands above)
from .matrix_cases import MATRIX_OPS  # noqa: E402
from .rope_cases import ROPE_OPS  # noqa: E402

OPS: tuple[Op, ...] = ROW_OPS + MATRIX_OPS + ATTENTION_OPS + ROPE_OPS


def get(name: str) -> Op:
    """Returns the row of an op.

    Raises:
        KeyError: No op has that name; the message lists those there are.
    """
    for op in OPS:
        if op.name == name:
            return op
    raise KeyError(f"no op is called {name!r}; the ops are {', '.join(op.name for op in OPS)}")


def call(function: Callable[..., Any], arrays: Sequence[mx.array | None], options: Mapping[str, Any]) -> list[mx.array]:
    """Calls an op, ours or a twin, and returns its outputs as a list."""
    result = function(*arrays, **options)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def gradients(
    function: Callable[..., Any],
    arrays: Sequence[mx.array | None],
    cotangents: Sequence[mx.array],
    options: Mapping[str, Any],
) -> list[mx.array]:
    """Gradients of an op with respect to each array argument that is there."""
    there = [i for i, a in enumerate(arrays) if a is not None]

    def of_primals(*primals):
        filled = list(arrays)
        for i, primal in zip(there, primals):
            filled[i] = primal
        return call(function, filled, options)

    return mx.vjp(of_primals, [arrays[i] for i in there], list(cotangents))[1]


def run(
    op: Op,
    function: Callable[..., Any],
    case: Case,
    arrays: Sequence[mx.array | None],
    cotangents: Sequence[mx.array] = (),
) -> list[mx.array]:
    """Builds what a case asks for: the op's outputs, or its gradients. Evaluates nothing."""
    if case.vjp:
        return gradients(function, arrays, cotangents, op.arguments(case))
    return call(function, arrays, op.arguments(case))


def _by_rows(
    function: Callable[..., Any], case: Case, arrays: Sequence[np.ndarray | None], options: Mapping[str, Any]
) -> list[np.ndarray]:
    """Evaluates a reference, large cases in blocks: rows do not know of each other, and blocks share the cores."""

    def evaluate(block: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        with np.errstate(invalid="ignore"):  # NaN from infinities is an answer like any other
            result = function(*(None if a is None else a.astype(np.float64) for a in block), **options)
        return [a for a in (result if isinstance(result, (tuple, list)) else [result]) if a is not None]

    if math.prod(case.shape) < _BLOCKWISE or options.get("axis", -1) != -1:
        return evaluate(arrays)
    columns = case.shape[-1]
    rows = math.prod(case.shape[:-1])
    flat = [a if a is None or a.shape != case.shape else a.reshape(rows, columns) for a in arrays]
    parts = _in_blocks(
        lambda block: evaluate([a if a is None or a.ndim == 1 else a[block] for a in flat]), rows, columns
    )
    return [
        sum(part) if part[0].ndim == 1 else np.concatenate(part).reshape(case.shape)
        for part in zip(*parts, strict=True)
    ]


# From so many elements on, work is cut into blocks of rows that fit the caches and shared among the cores.
_BLOCKWISE = 2**20
_BLOCK = 2**18


def _in_blocks(function: Callable[[slice], Any], rows: int, columns: int) -> list[Any]:
    step = max(1, _BLOCK // columns)
    return on_all_cores(function, (slice(start, start + step) for start in range(0, rows, step)))


def error(actual: mx.array, exact: Exact) -> float:
    """Largest relative error of a result.

    Each element's distance from the exact value is taken relative to the largest of that value, the root mean square of
    its row, the terms it sums up (beside which a value that happens to cancel cannot be more exact) and the smallest
    normal number of its type; to which comes what the rounding of inner float32 numbers moves it by.

    Returns:
        float: The error; infinity where the shape differs, or a NaN or an infinity stands in the wrong place.
    """
    if tuple(actual.shape) != exact.value.shape:
        return math.inf
    if exact.value.size == 0:
        return 0.0
    columns = exact.value.shape[-1] if exact.value.ndim else 1
    result = np.array(actual.astype(mx.float32)).reshape(-1, columns)
    value = exact.value.reshape(-1, columns)
    magnitude = None if exact.magnitude is None else exact.magnitude.reshape(-1, columns)
    inner = None if exact.inner is None else exact.inner.reshape(-1, columns)

    def of_rows(block: slice) -> float:
        magnitudes = [None if a is None else a[block] for a in (magnitude, inner)]
        return _error(result[block], value[block], *magnitudes, actual.dtype)

    return max(_in_blocks(of_rows, *value.shape)) if value.size >= _BLOCKWISE else of_rows(slice(None))


def _error(
    result: np.ndarray, value: np.ndarray, magnitude: np.ndarray | None, inner: np.ndarray | None, dtype: mx.Dtype
) -> float:
    result, value = result.astype(np.float64), _overflow(value, dtype)
    finite = np.isfinite(value)
    if not finite.all():
        if not np.array_equal(result[~finite], value[~finite], equal_nan=True):
            return math.inf
        result, value = np.where(finite, result, 0), np.where(finite, value, 0)
    if not np.isfinite(result).all():
        return math.inf
    size = np.sqrt(np.mean(value * value, axis=-1, keepdims=True))
    scale = np.maximum(np.maximum(np.abs(value), size), SMALLEST_NORMAL[dtype])
    if magnitude is not None:
        scale = np.maximum(scale, np.nan_to_num(magnitude))
    if inner is not None:
        scale = scale + np.nan_to_num(inner) * (EPSILON[mx.float32] / EPSILON[dtype])
    return float(np.max(np.abs(result - value) / scale))


def _overflow(a: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Values that a type cannot hold become infinities, as they do in it."""
    return np.where(np.abs(a) >= _OVERFLOW[dtype], np.copysign(np.inf, a), a)


def tolerance(dtype: mx.Dtype, twin_error: float, vjp: bool = False, float32_units: int = 4) -> float:
    """The error we allow ourselves: twice what the twin makes, or what rounding alone explains.

    That is one unit in the last place of a 16-bit type, two for gradients, which start from rounded values. In float32
    every step rounds to the result's own type, so the twin is at times right by luck: four units, or what the op's row
    in the table says, and four times that for gradients.
    """
    units = float32_units if dtype == mx.float32 else 1
    if vjp:
        units *= 4 if dtype == mx.float32 else 2
    return max(units * EPSILON[dtype], 2 * twin_error if math.isfinite(twin_error) else 0)


@dataclass(frozen=True)
class Check:
    """How far a case's results are from float64, the worst of its outputs."""

    error: float
    twin_error: float
    passed: bool
    detail: str = ""


def check(
    op: Op,
    case: Case,
    arrays: Sequence[mx.array | None],
    cotangents: Sequence[mx.array] = (),
    twin_device: mx.Device | None = None,
) -> Check:
    """Runs a case, ours and mx's (on another device, if one is given), and compares both with float64."""
    ours = run(op, op.ours, case, arrays, cotangents)
    mx.eval(ours)
    with mx.stream(twin_device or mx.default_device()):
        twin = run(op, op.twin, case, arrays, cotangents)
        mx.eval(twin)
    return compare(op, case, ours, twin, op.exact(case, arrays, cotangents), arrays)


def compare(
    op: Op,
    case: Case,
    ours: Sequence[mx.array],
    twin: Sequence[mx.array],
    exact: Sequence[Exact],
    arrays: Sequence[mx.array | None],
) -> Check:
    """Compares results with the exact ones and says which element is worst where they do not pass."""
    names = _result_names(op, case, arrays)
    errors, twin_errors, details = [], [], []
    for name, a, b, c in zip(names, ours, twin, exact, strict=True):
        errors.append(error(a, c))
        twin_errors.append(error(b, c))
        if a.dtype != b.dtype:
            errors[-1] = math.inf
            details.append(f"{name} is {a.dtype}, mx gives {b.dtype}")
        elif not errors[-1] <= tolerance(a.dtype, twin_errors[-1], case.vjp, op.units):
            details.append(f"{name}: error {errors[-1]:.2e}, mx {twin_errors[-1]:.2e}; {_worst(a, c.value)}")
    return Check(max(errors), max(twin_errors), not details, "; ".join(details))


def _result_names(op: Op, case: Case, arrays: Sequence[mx.array | None]) -> list[str]:
    if case.vjp:
        return [f"gradient of {name}" for (name, _), a in zip(op.parameters, arrays) if a is not None]
    return [f"output {i}" if op.outputs > 1 else "output" for i in range(op.outputs)]


def _worst(actual: mx.array, exact: np.ndarray) -> str:
    if tuple(actual.shape) != exact.shape:
        return f"shape {tuple(actual.shape)}, expected {exact.shape}"
    result, exact = widen(actual), _overflow(exact, actual.dtype)
    with np.errstate(invalid="ignore"):
        distance = np.abs(result - exact)
    wrong = np.isfinite(result) != np.isfinite(exact)
    distance = np.where(wrong, np.inf, np.nan_to_num(distance, nan=0.0, posinf=0.0))
    where = np.unravel_index(int(np.argmax(distance)), distance.shape)
    return f"worst at {tuple(map(int, where))}: {result[where]:.9g}, expected {exact[where]:.9g}"


def markdown() -> str:
    """The README's table of ops."""
    lines = ["| op | its mx twin | what it does |", "|---|---|---|"]
    for op in OPS:
        names = [name for name, _ in op.parameters] + [key for key in op.options if key != "precise"]
        signature = ", ".join(dict.fromkeys(names))
        lines.append(f"| `mm.{op.name}({signature})` | `{op.twin_text}` | {op.summary} |")
    return "\n".join(lines)
