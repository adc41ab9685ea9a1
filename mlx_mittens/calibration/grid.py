"""The shapes that a calibration measures, as cases of the table of ops.

A measurement answers calls no size of which is more than twice or less than half of its own. So each size goes in steps
of four, from the smallest to the largest that models have, and a call between two points is answered by the nearer one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from .. import specs
from ..specs import Case, Op

Item = tuple[Op, Case, str]  # the string names an element type

# Rows of activations, as tokens of a prompt or of a batch, and their columns.
_ROWS = (1, 4, 16, 64, 256, 1024, 4096)
_COLUMNS = (64, 256, 1024, 4096, 16384)
_VOCABULARY = 131072  # no steps lead to it: models have either more or far less

# Rows, inner size and outputs of products with weights.
_PRODUCT_ROWS = (1, 4, 16)
_PROMPT_ROWS = (64, 256)  # on a CPU alone: a GPU's kernels take fewer
_INNER = (1024, 4096, 16384)
_OUTPUTS = (256, 1024, 4096, 16384, _VOCABULARY)

# Heads, of which so many share keys and values, and their widths.
_HEADS = 16
_RATIOS = (1, 4)
_WIDTHS = (64, 128, 256)
_KEYS = (64, 256, 1024, 4096, 16384, 65536)
_PROMPTS = (64, 256, 1024)

# Larger cases take longer than what they say is worth: elements of an op that moves them, and products of numbers.
_MOST_ELEMENTS = {"cpu": 2**23, "gpu": 2**27}
_MOST_WEIGHTS = {"cpu": 2**26, "gpu": 2**29}
_MOST_PRODUCTS = {"cpu": 2**28, "gpu": 2**34}


def _cases(shapes: Iterable[tuple[int, ...]], **options: Any) -> Iterator[Case]:
    return (Case("calibration", shape, options) for shape in shapes)


def _row_op(columns: Sequence[int], device: str) -> Iterator[Case]:
    return _cases(shape for shape in product(_ROWS, columns) if math.prod(shape) <= _MOST_ELEMENTS[device])


def _norm(device: str) -> Iterator[Case]:
    return _row_op(_COLUMNS, device)


def _softmax(device: str) -> Iterator[Case]:
    return _row_op((*_COLUMNS, _VOCABULARY), device)


def _matrices(rows: Iterable[int], device: str) -> list[tuple[int, int, int]]:
    return [
        (m, k, n)
        for m, k, n in product(rows, _INNER, _OUTPUTS)
        if k * n <= _MOST_WEIGHTS[device] and m * k * n <= _MOST_PRODUCTS[device]
    ]


def _products(device: str) -> list[tuple[int, int, int]]:
    return _matrices(_PRODUCT_ROWS + (_PROMPT_ROWS if device == "cpu" else ()), device)


def _dense(device: str) -> Iterator[Case]:
    yield from _cases(_products(device))


def _quantized(device: str) -> Iterator[Case]:
    for bits in (4, 8):
        yield from _cases(_products(device), bits=bits)


def _swiglu(device: str) -> Iterator[Case]:
    shapes = [(m, k, n) for m, k, n in _matrices((1, 4), device) if k <= n <= 4 * k]
    for bits in (4, 8):
        yield from _cases(shapes, bits=bits)


def _gguf(device: str) -> Iterator[Case]:
    for kind in ("q4_0", "q8_0"):
        yield from _cases(_matrices(_PRODUCT_ROWS, device), kind=kind)


def _decode(device: str) -> Iterator[tuple[int, ...]]:
    for keys, width, ratio in product(_KEYS, _WIDTHS, _RATIOS):
        shape = (1, _HEADS, _HEADS // ratio, 1, keys, width)
        if _HEADS // ratio * keys * width <= _MOST_ELEMENTS[device]:
            yield shape


def _attention(device: str) -> Iterator[Case]:
    yield from _cases(_decode(device))
    for tokens, width in product(_PROMPTS, _WIDTHS):
        if _HEADS * tokens * tokens * width <= _MOST_PRODUCTS[device]:
            yield from _cases([(1, _HEADS, _HEADS // 4, tokens, tokens, width)], mask="causal")


def _packed_attention(device: str) -> Iterator[Case]:
    for bits in (4, 8):
        yield from _cases(_decode(device), bits=bits)


_GRIDS: dict[str, Callable[[str], Iterator[Case]]] = {
    "rms_norm": _norm,
    "layer_norm": _norm,
    "add_rms_norm": _norm,
    "norm_add_norm": _norm,
    "softmax": _softmax,
    "gemv": _dense,
    "quantized_matmul": _quantized,
    "quantized_swiglu": _swiglu,
    "block_matmul": _gguf,
    "scaled_dot_product_attention": _attention,
    "quantized_scaled_dot_product_attention": _packed_attention,
}


def _usual(op: Op, device: str, quick: bool) -> Iterator[Case]:
    """The shapes of models that the benchmark times; gradients follow the op that they are of."""
    return (case for case in op.cases if not case.vjp and case.runs_on(device) and (case.quick or not quick))


def cases(op: Op, device: str, quick: bool = False) -> list[Case]:
    """The cases of an op: of a new one those of the benchmark; in the short form the benchmark's shortest."""
    if quick or op.name not in _GRIDS:
        return list(_usual(op, device, quick))
    return list(_GRIDS[op.name](device))


def _dtypes(op: Op, case: Case, device: str) -> Iterable[str]:
    # Models with quantized weights compute in half types on a GPU.
    dtypes = op.dtypes(case)
    is_quantized = bool(op.arguments(case).keys() & {"bits", "kind"})
    return [name for name in dtypes if name != "float32"] if is_quantized and device == "gpu" else dtypes


def is_larger(case: Case, other: Case) -> bool:
    """Whether a case is another one in larger sizes."""
    same = case.options == other.options and len(case.shape) == len(other.shape)
    return same and all(a >= b for a, b in zip(case.shape, other.shape))


# An item takes two sets of inputs, and while they are drawn about as much again, some of it in another type.
_COPIES = 8


def items(names: Iterable[str], device: str, quick: bool = False, memory: float = math.inf) -> list[Item]:
    """What a calibration measures, in order, as far as so many bytes of memory hold it."""
    chosen = set(names)
    return [
        (op, case, dtype)
        for op in specs.OPS
        if op.name in chosen
        for case in cases(op, device, quick)
        for dtype in _dtypes(op, case, device)
        if _COPIES * op.bytes_moved(case, specs.DTYPES[dtype]) <= memory
    ]
