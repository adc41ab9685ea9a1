"""The calls that a calibration measures, as cases of the table of ops, in the order in which they are needed.

Each size goes from the smallest to the largest that models have, in coarse steps of up to 16 and in fine ones of 4. A
fine point is measured only where the points around it do not agree whether mx is faster. A call is answered by a point
whose sizes are each within a factor of two of its own, or by the points around it, where they agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import mlx.core as mx

from .. import specs
from ..specs import Case, Op

# Of sizes of the coarse points; csrc/runtime/calibration.cpp has it as well.
_STEP = 16

# The type that is measured where half types agree, and the one that is then left out.
HALF, OTHER_HALF = "bfloat16", "float16"

# One in this many of the coarse cases of an op is timed in both half types.
_SAMPLED = 3


@dataclass(frozen=True)
class Item:
    """A call that may be measured.

    Attributes:
        op: The op.
        case: Its case.
        dtype: The name of its element type.
        fine: Whether it is measured only where the points around it do not agree.
        sampled: Whether it is timed in both half types, to see whether these agree.
    """

    op: Op
    case: Case
    dtype: str
    fine: bool = False
    sampled: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """Key of the row."""
        return self.op.name, self.case.name, self.dtype

    @property
    def name(self) -> str:
        return " ".join(self.key)

    @property
    def may_be_told(self) -> bool:
        """Whether its result may follow from other items."""
        return self.fine or (self.dtype == OTHER_HALF and not self.sampled)


# Rows of activations, as tokens of a prompt or of a batch, and their columns.
_ROWS = (1, 4, 16, 64, 256, 1024, 4096)
_COLUMNS = (64, 256, 1024, 4096, 16384)
_VOCABULARY = 131072  # no steps lead to it: models have either more or far less

# Rows, inner size and outputs of products with weights.
_PRODUCT_ROWS = (1, 4, 16)
_PROMPT_ROWS = (64, 256)  # on a CPU; a GPU's kernels take fewer, but on a Mac
_MAC_PROMPT_ROWS = (32, 64, 512, 2048)
_INNER = (1024, 4096, 16384)
_OUTPUTS = (128, 512, 2048, 8192, 32768, _VOCABULARY)

# Heads, how many of them share keys and values, and their widths.
_HEADS = 16
_RATIOS = (1, 4)
_WIDTHS = (64, 128, 256)
_KEYS = (64, 256, 1024, 4096, 16384, 65536)
_PROMPTS = (64, 256, 1024)

# Heads of queries and keys that norms take: the product of tokens and heads.
_HEAD_ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16384)

# Batches of a token, and tokens of one sequence, whose heads go into a cache, and the usual width of heads.
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

# Experts, and the matrix of one that widens: few large ones to many small ones, as mixtures have them. The
# narrowing matrix is its transpose.
_EXPERTS = ((8, 4096, 16384), (32, 1024, 1024), (32, 4096, 4096), (128, 2048, 1024), (128, 4096, 2048))
_CHOSEN = 4
_FEW_TOKENS = (1, 4, 16)
_SORTED_PAIRS = (64, 256, 1024)  # of a prompt's token and an expert, which mlx-lm sorts
_MAC_SORTED_PAIRS = (4096,)  # of 512 tokens and more
_MOST_EXPERTS = {"cpu": 2**26, "gpu": 2**30}  # their weights
_MOST_DENSE_EXPERTS = 2**29

# Experts of mixtures with a shared expert, where a token chooses more.
_EXPERTS_BESIDE_SHARED = ((32, 1024, 1024), (128, 2048, 1024), (128, 4096, 2048), (512, 2048, 512))
_CHOSEN_BESIDE_SHARED = 8

# Routers: experts, how many of them are chosen, and the kind of scores.
_ROUTERS = (
    *((8, 2, "softmax"), (32, 8, "softmax"), (128, 8, "softmax"), (512, 8, "softmax")),
    *((8, 2, "chosen"), (32, 8, "chosen"), (128, 8, "sigmoid"), (512, 8, "sigmoid")),
)
_ROUTED = (1, 4, 16, 64, 256, 1024)

# Recurrences: batch and heads of one token, with the rows and columns of a state; and the steps of prompts.
_STATES = tuple((batch, heads, rows, 128) for batch, heads in ((1, 16), (1, 64), (4, 64)) for rows in (64, 128))
_STEPS = (4, 16, 64, 256, 1024)

# Larger cases take longer than they are worth: elements of an op that moves them, and products of numbers.
_MOST_ELEMENTS = {"cpu": 2**23, "gpu": 2**27}
_MOST_WEIGHTS = {"cpu": 2**26, "gpu": 2**29}
_MOST_PRODUCTS = {"cpu": 2**28, "gpu": 2**34}
_MOST_PROMPT_PRODUCTS = 2**36

# Which size of a case counts its tokens, where it is not the first; and how many of them are few.
_TOKENS = {
    **dict.fromkeys(("scaled_dot_product_attention", "quantized_scaled_dot_product_attention", "rope_append"), 3),
    **dict.fromkeys(("gated_delta_update", "ssm_update"), 1),
}
_FEW = 16

# The sizes of an axis that are taken.
Thin = Callable[[Sequence[int]], Sequence[int]]


def _coarse(axis: Sequence[int]) -> Sequence[int]:
    """The first and the last size of an axis, and as few between them as steps of at most 16 need."""
    taken = [axis[0]]
    for size, further in zip(axis[1:], (*axis[2:], math.inf)):
        if further > _STEP * taken[-1]:
            taken.append(size)
    return taken


def _fine(axis: Sequence[int]) -> Sequence[int]:
    return axis


def _cases(shapes: Iterable[tuple[int, ...]], **options: Any) -> Iterator[Case]:
    return (Case("calibration", shape, options) for shape in shapes)


def _row_op(columns: Sequence[int], device: str, thin: Thin) -> Iterator[Case]:
    shapes = product(thin(_ROWS), thin(columns))
    return _cases(shape for shape in shapes if math.prod(shape) <= _MOST_ELEMENTS[device])


def _norm(device: str, thin: Thin) -> Iterator[Case]:
    return _row_op(_COLUMNS, device, thin)


def _softmax(device: str, thin: Thin) -> Iterator[Case]:
    return _row_op((*_COLUMNS, _VOCABULARY), device, thin)


def _matrices(rows: Sequence[int], device: str, thin: Thin) -> list[tuple[int, int, int]]:
    return [
        (m, k, n)
        for m, k, n in product(thin(rows), thin(_INNER), thin(_OUTPUTS))
        if k * n <= _MOST_WEIGHTS[device] and m * k * n <= _MOST_PRODUCTS[device]
    ]


def _products(device: str, thin: Thin) -> list[tuple[int, int, int]]:
    return _matrices(_PRODUCT_ROWS + (_PROMPT_ROWS if device == "cpu" else ()), device, thin)


def _is_mac(device: str) -> bool:
    return device == "gpu" and mx.metal.is_available()


def _prompts(device: str, thin: Thin) -> list[tuple[int, int, int]]:
    """Those for which a Mac's GPU has kernels; no other has."""
    shapes = product(_MAC_PROMPT_ROWS, thin(_INNER), thin(_OUTPUTS)) if _is_mac(device) else ()
    return [(m, k, n) for m, k, n in shapes if m * k * n <= _MOST_PROMPT_PRODUCTS]


def _dense(device: str, thin: Thin) -> Iterator[Case]:
    yield from _cases([*_products(device, thin), *_prompts(device, thin)])


def _quantized(device: str, thin: Thin) -> Iterator[Case]:
    for bits in (4, 8):
        yield from _cases([*_products(device, thin), *_prompts(device, thin)], bits=bits)


def _swiglu(device: str, thin: Thin) -> Iterator[Case]:
    every = [*_matrices((1, 4), device, thin), *_prompts(device, thin)]
    shapes = [(m, k, n) for m, k, n in every if k <= n <= 8 * k]
    for bits in (4, 8):
        yield from _cases(shapes, bits=bits)


def _together(device: str, thin: Thin) -> Iterator[Case]:
    """Queries, keys and values of one token."""
    shapes = [(1, k, n, n // 4, n // 4) for _, k, n in _matrices((1,), device, thin) if k <= n <= 2 * k]
    for bits in (4, 8):
        yield from _cases(shapes, bits=bits)


def _gguf(device: str, thin: Thin) -> Iterator[Case]:
    for kind in ("q4_0", "q8_0"):
        yield from _cases([*_matrices(_PRODUCT_ROWS, device, thin), *_prompts(device, thin)], kind=kind)


def _decode(device: str, thin: Thin) -> Iterator[tuple[int, ...]]:
    for keys, width, ratio in product(thin(_KEYS), _WIDTHS, _RATIOS):
        shape = (1, _HEADS, _HEADS // ratio, 1, keys, width)
        if _HEADS // ratio * keys * width <= _MOST_ELEMENTS[device]:
            yield shape


def _attention(device: str, thin: Thin) -> Iterator[Case]:
    yield from _cases(_decode(device, thin))
    for tokens, width in product(thin(_PROMPTS), _WIDTHS):
        if _HEADS * tokens * tokens * width <= _MOST_PRODUCTS[device]:
            yield from _cases([(1, _HEADS, _HEADS // 4, tokens, tokens, width)], mask="causal")


def _packed_attention(device: str, thin: Thin) -> Iterator[Case]:
    for bits in (4, 8):
        yield from _cases(_decode(device, thin), bits=bits)


def _heads(device: str, thin: Thin) -> Iterator[Case]:
    shapes = product(thin(_HEAD_ROWS), thin(_WIDTHS))
    return _cases(shape for shape in shapes if math.prod(shape) <= _MOST_ELEMENTS[device])


def _elements(device: str, thin: Thin) -> Iterator[Case]:
    return _cases((1, size) for size in thin(_ELEMENTS) if size <= _MOST_ELEMENTS[device])


def _samplers(device: str, thin: Thin) -> Iterator[Case]:
    for options in _SAMPLERS:
        yield from _cases(product(thin(_BATCHES), _WORDS), **options)


def _appends(device: str, thin: Thin) -> Iterator[Case]:
    heads = (_HEADS, _HEADS // 4)
    widths = [_USUAL_WIDTH] if thin is _coarse else _WIDTHS
    shapes = [(batch, *heads, 1, width) for batch, width in product(thin(_BATCHES), widths)]
    shapes += [(1, *heads, tokens, _USUAL_WIDTH) for tokens in thin(_APPENDED)]
    for eps in (None, 1e-6):
        for shape in shapes:
            yield from _cases([shape], dims=shape[-1], offset=256, eps=eps)


def _mixtures(
    experts: Iterable[tuple[int, int, int]], most: int, device: str, thin: Thin, prompts: bool = True
) -> Iterator[Case]:
    for stack, columns, outputs in experts:
        if stack * columns * outputs > most:
            continue
        for tokens in thin(_FEW_TOKENS):
            yield from _cases([(tokens, _CHOSEN, stack, columns, outputs)])
        axis = (*_SORTED_PAIRS, *_MAC_SORTED_PAIRS) if _is_mac(device) else _SORTED_PAIRS
        for pairs in thin(axis) if prompts else ():
            if pairs * columns * outputs <= (_MOST_PROMPT_PRODUCTS if _is_mac(device) else _MOST_PRODUCTS[device]):
                yield from _cases([(pairs, 1, stack, columns, outputs)], sorted_indices=True)


def _transposed(experts: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [(stack, outputs, columns) for stack, columns, outputs in experts]


_ALL_EXPERTS = tuple(dict.fromkeys((*_EXPERTS, *_transposed(_EXPERTS))))


def _with_bits(cases: Iterable[Case]) -> Iterator[Case]:
    for case, bits in product(list(cases), (4, 8)):
        yield Case(case.label, case.shape, {**case.options, "bits": bits})


def _gather(device: str, thin: Thin) -> Iterator[Case]:
    return _with_bits(_mixtures(_ALL_EXPERTS, _MOST_EXPERTS[device], device, thin))


def _gather_swiglu(device: str, thin: Thin) -> Iterator[Case]:
    return _with_bits(_mixtures(_EXPERTS, _MOST_EXPERTS[device], device, thin))


def _gather_sum(device: str, thin: Thin) -> Iterator[Case]:
    return _with_bits(_mixtures(_transposed(_EXPERTS), _MOST_EXPERTS[device], device, thin, prompts=False))


def _shared_experts(device: str, thin: Thin) -> Iterator[Case]:
    """Of one token, with as many outputs as columns."""
    few = [experts for experts in _EXPERTS_BESIDE_SHARED if math.prod(experts) <= _MOST_EXPERTS[device]]
    return _with_bits(_cases(((1, _CHOSEN_BESIDE_SHARED, *experts) for experts in few), k=_CHOSEN_BESIDE_SHARED))


def _gather_dense(device: str, thin: Thin) -> Iterator[Case]:
    return _mixtures(_ALL_EXPERTS, min(_MOST_EXPERTS[device], _MOST_DENSE_EXPERTS), device, thin)


def _routers(device: str, thin: Thin) -> Iterator[Case]:
    for tokens, (experts, chosen, scores) in product(thin(_ROUTED), _ROUTERS):
        yield from _cases([(tokens, experts)], k=chosen, scores=scores)


def _recurrence(heads_of_key: Callable[[int], int], device: str, thin: Thin, **options: Any) -> Iterator[Case]:
    shapes = [(batch, 1, heads_of_key(heads), heads, rows, columns) for batch, heads, rows, columns in _STATES]
    shapes += [(1, steps, heads_of_key(64), 64, 128, 128) for steps in thin(_STEPS)]
    for shape in shapes:
        batch, steps, _, *state = shape
        if math.prod((batch, steps, *state)) <= _MOST_PRODUCTS[device]:
            yield from _cases([shape], **options)


def _gated_delta(device: str, thin: Thin) -> Iterator[Case]:
    yield from _recurrence(lambda heads: heads // 2, device, thin)
    yield from _recurrence(lambda heads: heads // 2, device, thin, per_column=True)


def _delta_tokens(device: str, thin: Thin) -> Iterator[Case]:
    """Of convolutions with four taps."""
    shapes = [(batch, 4, heads // 2, heads, rows, columns) for batch, heads, rows, columns in _STATES]
    yield from _cases([shape for shape in shapes if math.prod((shape[0], *shape[3:])) <= _MOST_PRODUCTS[device]])


def _space_tokens(device: str, thin: Thin) -> Iterator[Case]:
    """The same, whose heads share one group."""
    for case in _delta_tokens(device, thin):
        batch, taps, _, *state = case.shape
        yield from _cases([(batch, taps, 1, *state)])


def _short_convolutions(device: str, thin: Thin) -> Iterator[Case]:
    yield from _cases([(batch, 3, channels) for batch in thin(_BATCHES) for channels in (1024, 2048)])


def _state_space(device: str, thin: Thin) -> Iterator[Case]:
    return _recurrence(lambda heads: 1, device, thin)


_GRIDS: dict[str, Callable[[str, Thin], Iterator[Case]]] = {
    "rms_norm": _norm,
    "layer_norm": _norm,
    "add_rms_norm": _norm,
    "norm_add_norm": _norm,
    "softmax": _softmax,
    "gemv": _dense,
    "quantized_matmul": _quantized,
    "quantized_matmuls": _together,
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
    "mixture": _shared_experts,
    "route_top_k": _routers,
    "gated_delta_token": _delta_tokens,
    "short_conv_token": _short_convolutions,
    "ssm_token": _space_tokens,
    "gated_delta_update": _gated_delta,
    "ssm_update": _state_space,
}

# Ops that ask a calibration nothing by their own name: mx has no blocks of GGUF, the plan of an append of quantized
# heads and into blocks is always the same, kernels for masked blocks have no alternatives, matmul asks as gemv,
# cascade_attention and paged_attention as attention, and mx has many launches for the inputs of recurrences over a
# prompt.
ASK_NOTHING = frozenset(
    {
        *("block_quantize", "block_dequantize", "block_masked_mm", "quantized_embedding", "quantized_rope_append"),
        *("matmul", "cascade_attention", "paged_attention", "paged_append", "gated_delta_inputs"),
        *("ssm_inputs", "index_scores", "take_tokens"),
    }
)

# Ops that have kernels on GPUs alone, or on GPUs of Macs: elsewhere they are made of others, which ask.
ASK_ON_GPUS = frozenset({"mixture", "quantized_matmuls"})
ASK_ON_MACS = frozenset({"quantized_matmuls"})


def _asks(op: Op, device: str) -> bool:
    """Whether a calibration of a device here is asked for an op."""
    return not (
        op.name in ASK_NOTHING
        or (op.name in ASK_ON_GPUS and device == "cpu")
        or (op.name in ASK_ON_MACS and not mx.metal.is_available())
    )


def _usual(op: Op, device: str, quick: bool) -> Iterator[Case]:
    """The shapes of models that the benchmark times; gradients follow the op that they are of."""
    return (case for case in op.cases if not case.vjp and case.runs_on(device) and (case.quick or not quick))


def cases(op: Op, device: str, quick: bool = False) -> list[Case]:
    """The coarse cases of an op: a new op has the benchmark's cases, and the short form the benchmark's shortest."""
    if quick or op.name not in _GRIDS:
        return list(_usual(op, device, quick))
    return list(_GRIDS[op.name](device, _coarse))


def fine_cases(op: Op, device: str) -> list[Case]:
    """The cases between the coarse ones."""
    if op.name not in _GRIDS:
        return []
    coarse = {case.name for case in cases(op, device)}
    return [case for case in _GRIDS[op.name](device, _fine) if case.name not in coarse]


def _dtypes(op: Op, case: Case, device: str) -> list[str]:
    # Models with quantized weights, and mixtures, compute in half types on a GPU. mx has no other gather_mm on a CPU.
    dtypes = list(op.dtypes(case))
    if op.name == "gather_mm" and device == "cpu":
        return ["float32"]
    if op.name == "gemv" and device == "gpu" and case.shape[0] > 64:
        return [HALF]  # the only type whose longer prompts have kernels
    is_half = bool(op.arguments(case).keys() & {"bits", "kind"}) or op.name == "gather_mm"
    return [name for name in dtypes if name != "float32"] if is_half and device == "gpu" else dtypes


def _need(item: Item) -> tuple[bool, bool, bool, bool]:
    """Sorts items by how much models need them: half types first, and few tokens before prompts."""
    is_prompt = item.case.shape[_TOKENS.get(item.op.name, 0)] > _FEW
    return item.may_be_told, item.fine, item.dtype == "float32", is_prompt


def _distances(case: Case, other: Case) -> list[float] | None:
    """How far another case is in each size, in steps of two; none where it is of another kind or not a neighbour."""
    if case.options != other.options or len(case.shape) != len(other.shape):
        return None
    found = [math.log2(b / a) for a, b in zip(case.shape, other.shape)]
    return found if all(abs(distance) < math.log2(_STEP) for distance in found) else None


def agree(case: Case, measured: Iterable[tuple[Case, Hashable]]) -> bool:
    """Whether the cases around one, each with its finding, agree on that."""
    around = [(found, what) for other, what in measured if (found := _distances(case, other)) is not None]
    surrounded = all(min(sizes) <= 1 and max(sizes) >= -1 for sizes in zip(*(found for found, _ in around)))
    return bool(around) and surrounded and len({what for _, what in around}) == 1


def is_larger(case: Case, other: Case) -> bool:
    """Whether a case is another one in larger sizes."""
    same = case.options == other.options and len(case.shape) == len(other.shape)
    return same and all(a >= b for a, b in zip(case.shape, other.shape))


# An item takes two sets of inputs, and while they are drawn about as much again, some of it in another type.
_COPIES = 8


def _input_bytes(op: Op, case: Case, dtype: mx.Dtype) -> int:
    """Bytes of a case's inputs, of all experts, though a call reads the chosen ones alone."""
    itemsize = 4 if "bits" in op.arguments(case) else dtype.size  # of packed words
    return max(op.bytes_moved(case, dtype), itemsize * sum(math.prod(shape) for shape in op.shapes(case)))


def items(names: Iterable[str], device: str, quick: bool = False, memory: float = math.inf) -> list[Item]:
    """Items that a calibration measures, in order, without items that do not fit into the memory."""
    chosen = set(names)
    found = []
    for op in specs.OPS:
        if op.name not in chosen or not _asks(op, device):
            continue
        coarse = [(case, False, number % _SAMPLED == 0) for number, case in enumerate(cases(op, device, quick))]
        fine = [] if quick else [(case, True, False) for case in fine_cases(op, device)]
        found += [
            Item(op, case, dtype, is_fine, is_sampled)
            for case, is_fine, is_sampled in (*coarse, *fine)
            for dtype in _dtypes(op, case, device)
            if _COPIES * _input_bytes(op, case, specs.DTYPES[dtype]) <= memory
        ]
    return sorted(found, key=_need)
