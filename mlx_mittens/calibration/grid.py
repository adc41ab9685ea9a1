"""The shapes that a calibration measures, as cases of the table of ops.

A measurement answers calls no size of which is more than twice or less than half of its own. So each size goes in steps
of four, from the smallest to the largest that models have, and a call between two points is answered by the nearer one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import mlx.core as mx

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

# Heads of queries and keys that norms take: the product of tokens and heads.
_HEAD_ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16384)

# Batches of a token, and tokens of one sequence, whose heads go into a cache: their widths, and that of prompts.
_BATCHES = (1, 4, 16)
_APPENDED = (4, 16, 64, 256, 1024, 4096)
_USUAL_WIDTH = 128

# Words that tokens are drawn from, and how: as servers and mlx-lm do by default, and as models' cards advise.
_WORDS = (32768, _VOCABULARY)
_SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
)

# Elements that an op changes one by one.
_ELEMENTS = tuple(4**i for i in range(5, 14))

# Experts, and the matrix of one that widens: few large ones to many small ones, as mixtures have them. What narrows
# again is its transpose.
_EXPERTS = ((8, 4096, 16384), (32, 1024, 1024), (32, 4096, 4096), (128, 2048, 1024), (128, 4096, 2048))
_CHOSEN = 4
_FEW_TOKENS = (1, 4, 16)
_SORTED_PAIRS = (64, 256, 1024)  # of a prompt's token and an expert, which mlx-lm sorts
_MOST_EXPERTS = {"cpu": 2**26, "gpu": 2**30}  # their weights
_MOST_DENSE_EXPERTS = 2**29

# Routers: experts, how many of them are chosen, and by what scores.
_ROUTERS = (
    *((8, 2, "softmax"), (32, 8, "softmax"), (128, 8, "softmax"), (512, 8, "softmax")),
    *((8, 2, "chosen"), (32, 8, "chosen"), (128, 8, "sigmoid"), (512, 8, "sigmoid")),
)
_ROUTED = (1, 4, 16, 64, 256, 1024)

# Recurrences: batch and heads of one token, with the rows and columns of a state; and the steps of prompts.
_STATES = tuple((batch, heads, rows, 128) for batch, heads in ((1, 16), (1, 64), (4, 64)) for rows in (64, 128))
_STEPS = (4, 16, 64, 256, 1024)

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


def _heads(device: str) -> Iterator[Case]:
    return _cases(shape for shape in product(_HEAD_ROWS, _WIDTHS) if math.prod(shape) <= _MOST_ELEMENTS[device])


def _elements(device: str) -> Iterator[Case]:
    return _cases((1, size) for size in _ELEMENTS if size <= _MOST_ELEMENTS[device])


def _samplers(device: str) -> Iterator[Case]:
    for options in _SAMPLERS:
        yield from _cases(product(_BATCHES, _WORDS), **options)


def _appends(device: str) -> Iterator[Case]:
    heads = (_HEADS, _HEADS // 4)
    shapes = [(batch, *heads, 1, width) for batch, width in product(_BATCHES, _WIDTHS)]
    shapes += [(1, *heads, tokens, _USUAL_WIDTH) for tokens in _APPENDED]
    for eps in (None, 1e-6):
        for shape in shapes:
            yield from _cases([shape], dims=shape[-1], offset=256, eps=eps)


def _mixtures(experts: Iterable[tuple[int, int, int]], most: int, device: str, prompts: bool) -> Iterator[Case]:
    for stack, columns, outputs in experts:
        if stack * columns * outputs > most:
            continue
        for tokens in _FEW_TOKENS:
            yield from _cases([(tokens, _CHOSEN, stack, columns, outputs)])
        for pairs in _SORTED_PAIRS if prompts else ():
            if pairs * columns * outputs <= _MOST_PRODUCTS[device]:
                yield from _cases([(pairs, 1, stack, columns, outputs)], sorted_indices=True)


def _transposed(experts: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [(stack, outputs, columns) for stack, columns, outputs in experts]


_ALL_EXPERTS = tuple(dict.fromkeys((*_EXPERTS, *_transposed(_EXPERTS))))


def _with_bits(cases: Iterable[Case]) -> Iterator[Case]:
    for case, bits in product(list(cases), (4, 8)):
        yield Case(case.label, case.shape, {**case.options, "bits": bits})


def _gather(device: str) -> Iterator[Case]:
    return _with_bits(_mixtures(_ALL_EXPERTS, _MOST_EXPERTS[device], device, True))


def _gather_swiglu(device: str) -> Iterator[Case]:
    return _with_bits(_mixtures(_EXPERTS, _MOST_EXPERTS[device], device, True))


def _gather_sum(device: str) -> Iterator[Case]:
    return _with_bits(_mixtures(_transposed(_EXPERTS), _MOST_EXPERTS[device], device, False))


def _gather_dense(device: str) -> Iterator[Case]:
    return _mixtures(_ALL_EXPERTS, min(_MOST_EXPERTS[device], _MOST_DENSE_EXPERTS), device, True)


def _routers(device: str) -> Iterator[Case]:
    for tokens, (experts, chosen, scores) in product(_ROUTED, _ROUTERS):
        yield from _cases([(tokens, experts)], k=chosen, scores=scores)


def _recurrence(heads_of_key: Callable[[int], int], device: str, **options: Any) -> Iterator[Case]:
    shapes = [(batch, 1, heads_of_key(heads), heads, rows, columns) for batch, heads, rows, columns in _STATES]
    shapes += [(1, steps, heads_of_key(64), 64, 128, 128) for steps in _STEPS]
    for shape in shapes:
        batch, steps, _, *state = shape
        if math.prod((batch, steps, *state)) <= _MOST_PRODUCTS[device]:
            yield from _cases([shape], **options)


def _gated_delta(device: str) -> Iterator[Case]:
    yield from _recurrence(lambda heads: heads // 2, device)
    yield from _recurrence(lambda heads: heads // 2, device, per_column=True)


def _state_space(device: str) -> Iterator[Case]:
    return _recurrence(lambda heads: 1, device)


def _linear_attention(device: str) -> Iterator[Case]:
    return _recurrence(lambda heads: heads, device)


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
    "qk_norm": _heads,
    "softcap": _elements,
    "sample": _samplers,
    "rope_append": _appends,
    "gather_qmm": _gather,
    "gather_mm": _gather_dense,
    "gather_swiglu": _gather_swiglu,
    "gather_sum": _gather_sum,
    "route_top_k": _routers,
    "gated_delta_update": _gated_delta,
    "ssm_update": _state_space,
    "linear_attention": _linear_attention,
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
    # Models with quantized weights, and mixtures, compute in half types on a GPU.
    dtypes = op.dtypes(case)
    is_half = bool(op.arguments(case).keys() & {"bits", "kind"}) or op.name == "gather_mm"
    return [name for name in dtypes if name != "float32"] if is_half and device == "gpu" else dtypes


def is_larger(case: Case, other: Case) -> bool:
    """Whether a case is another one in larger sizes."""
    same = case.options == other.options and len(case.shape) == len(other.shape)
    return same and all(a >= b for a, b in zip(case.shape, other.shape))


# An item takes two sets of inputs, and while they are drawn about as much again, some of it in another type.
_COPIES = 8


def _input_bytes(op: Op, case: Case, dtype: mx.Dtype) -> int:
    """What the inputs of a case take: of experts all, though a call reads those chosen alone."""
    itemsize = 4 if "bits" in op.arguments(case) else dtype.size  # of packed words
    return max(op.bytes_moved(case, dtype), itemsize * sum(math.prod(shape) for shape in op.shapes(case)))


def items(names: Iterable[str], device: str, quick: bool = False, memory: float = math.inf) -> list[Item]:
    """What a calibration measures, in order, as far as so many bytes of memory hold it."""
    chosen = set(names)
    return [
        (op, case, dtype)
        for op in specs.OPS
        if op.name in chosen
        for case in cases(op, device, quick)
        for dtype in _dtypes(op, case, device)
        if _COPIES * _input_bytes(op, case, specs.DTYPES[dtype]) <= memory
    ]
