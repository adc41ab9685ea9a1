"""Rows of the table of ops for the norms and softmax: ops that work along rows.

A case has the shape of the op's row-wise arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ..ops import norm
from ..promotion import result_type
from . import reference
from .op import BLOCKWISE, SMALLEST_NORMAL, Case, Exact, Op, add_outliers, in_blocks


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

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
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
            options["smallest"] = next(SMALLEST_NORMAL[a.dtype] for a in arrays if a is not None)
        magnitudes = _by_rows(self.reference_vjp, case, narrow, {**options, "magnitude": True})
        return [
            Exact(a, b) if a.shape == case.shape or self.rounds_first else Exact(a, inner=b)
            for a, b in zip(values, magnitudes)
        ]


def _draw(rng: np.random.Generator, kind: str, shape: tuple[int, ...], spread: Spread, dtype: mx.Dtype) -> mx.array:
    a: np.ndarray = rng.standard_normal(shape, dtype=np.float32)
    if kind == "weight":
        a = 1 + a / 4
    elif kind == "rows" and a.size:
        a = np.asarray(a * np.float32(spread.deviation))
        add_outliers(rng, a, spread.outlier)
        a += rng.uniform(-spread.offset, spread.offset, size=(*shape[:-1], 1) if shape else ()).astype(np.float32)
    return mx.array(a).astype(dtype)


def _tests(*shapes: tuple[int, ...], **more: Any) -> tuple[Case, ...]:
    return tuple(Case("test", shape, **more) for shape in shapes)


# Rows on both sides of every threshold of the kernels (csrc/ops/norm/plan.h). For each kernel: rows that fill packs
# and rows that do not, tails of every length, one column. Small enough for the simulator, where
# tests/verification/test_levels.py demands that they reach every variant.
_NORM_TESTS = _tests(
    (1, 1), (3, 7), (5, 33), (2, 3, 64), (1, 8, 4, 128), (2, 200), (9, 255), (3, 480), (7, 500), (65, 300), (65, 600),
    (65, 601), (2, 1024), (3, 1025), (66, 1032), (1, 2048), (2, 2881), (1, 4100), (2, 6001), (1, 8200), (9, 10007),
    (9, 17001), (2, 66000), (1, 90001), (1100, 24), (513, 261), (513, 264), (513, 520),
)  # fmt: skip
# More rows than threadgroups that sum up a weight's gradient, and than simdgroups.
_NORM_TESTS += _tests((130, 1030), (2085, 5), vjp=True)

# One shape for each schedule of a norm whose sum is clipped.
_CLIPPED = ((3, 64), (2, 120), (2, 250), (7, 500), (2, 1000), (513, 520), (1, 4200), (1, 8200), (1, 16500))

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


def _rms_norm(x, weight, eps, *, weight_offset=0.0, stream=None):
    scale = mx.add(weight_offset, weight, stream=stream) if weight_offset else weight
    return mx.fast.rms_norm(x, scale, eps, stream=stream)


def _add_then_rms_norm(x, residual, weight, eps, *, weight_offset=0.0, stream=None):
    total = mx.add(x, residual, stream=stream)
    return _rms_norm(total, weight, eps, weight_offset=weight_offset, stream=stream), total


def _norm_then_add_then_norm(
    x, residual, weight, next_weight, eps, *, weight_offset=0.0, next_weight_offset=0.0, clip_sum=False, stream=None
):
    normed = _rms_norm(x, weight, eps, weight_offset=weight_offset, stream=stream)
    if clip_sum and result_type(residual.dtype, normed.dtype) == mx.float16:
        largest = mx.finfo(mx.float16).max
        total = residual.astype(mx.float32) + normed.astype(mx.float32)
        total = mx.clip(total, -largest, largest, stream=stream).astype(mx.float16)
        return _rms_norm(total, next_weight, eps, weight_offset=next_weight_offset, stream=stream), total
    return _add_then_rms_norm(residual, normed, next_weight, eps, weight_offset=next_weight_offset, stream=stream)


def _two_rms_norms(queries, keys, query_weight, key_weight, eps, *, weight_offset=0.0, stream=None):
    return (
        _rms_norm(queries, query_weight, eps, weight_offset=weight_offset, stream=stream),
        _rms_norm(keys, key_weight, eps, weight_offset=weight_offset, stream=stream),
    )


def _softcap(logits, cap, *, stream=None):
    return mx.multiply(mx.tanh(mx.divide(logits, cap, stream=stream), stream=stream), cap, stream=stream)


# Gemma's norms, whose scale is 1 + weight.
_GEMMA = {"weight_offset": 1.0}


# Ops that work along rows.
ROW_OPS: tuple[RowOp, ...] = (
    RowOp(
        name="rms_norm",
        parameters=(("x", "rows"), ("weight", "weight")),
        ours=norm.rms_norm,
        twin=_rms_norm,
        twin_text="`mx.fast.rms_norm`",
        reference=reference.rms_norm,
        reference_vjp=reference.rms_norm_vjp,
        summary="root mean square norm of the last axis",
        options={"eps": 1e-5},
        tests=_NORM_TESTS + _tests((3, 65), (2, 1032), options=_GEMMA),
        cases=_NORM_CASES
        + (
            Case("Gemma 2 2B prompt", (512, 2304), _GEMMA),
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
        ours=norm.layer_norm,
        twin=mx.fast.layer_norm,
        twin_text="`mx.fast.layer_norm`",
        reference=reference.layer_norm,
        reference_vjp=reference.layer_norm_vjp,
        summary="layer norm of the last axis",
        options={"eps": 1e-5},
        tests=_NORM_TESTS + _tests((65, 4109), (66, 4104)),  # long rows: a thread holds eight packs
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
        ours=norm.softmax,
        twin=mx.softmax,
        twin_text="`mx.softmax(precise=True)`",
        reference=lambda a, axis=None, precise=True: reference.softmax(a, axis),
        reference_vjp=lambda a, dy, axis=None, precise=True, **more: reference.softmax_vjp(a, dy, axis, **more),
        from_output=True,
        summary="softmax over any axis or axes, summed in float32",
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
        ours=norm.add_rms_norm,
        twin=_add_then_rms_norm,
        twin_text="`x + residual` and `mx.fast.rms_norm`",
        reference=reference.add_rms_norm,
        reference_vjp=reference.add_rms_norm_vjp,
        rounds_first=True,
        summary="residual sum and its norm in one kernel",
        options={"eps": 1e-5},
        tests=_NORM_TESTS + _tests((3, 65), (2, 1032), options=_GEMMA),
        cases=_NORM_CASES + _LARGE_CASES + (Case("Llama-3.1-8B prompt", (512, 4096), vjp=True, quick=True),),
    ),
    RowOp(
        name="norm_add_norm",
        parameters=(("x", "rows"), ("residual", "rows"), ("weight", "weight"), ("next_weight", "weight")),
        outputs=2,
        ours=norm.norm_add_norm,
        twin=_norm_then_add_then_norm,
        twin_text="two `mx.fast.rms_norm`, a sum between them",
        reference=reference.norm_add_norm,
        reference_vjp=reference.norm_add_norm_vjp,
        rounds_first=True,
        summary="norm of a block's output, residual sum and its norm in one kernel",
        options={"eps": 1e-5},
        tests=_NORM_TESTS
        + _tests((3, 65), (2, 1032), options={**_GEMMA, "next_weight_offset": 1.0})
        + _tests(*_CLIPPED, options={"clip_sum": True}),
        cases=(
            Case("Gemma 2 2B decode", (1, 2304), {**_GEMMA, "next_weight_offset": 1.0}, quick=True),
            Case("Gemma 3 1B prompt", (512, 1152), {**_GEMMA, "next_weight_offset": 1.0}, quick=True),
            Case("GLM-4 9B decode", (1, 4096)),
            Case("GLM-4 9B prompt", (512, 4096)),
        )
        + _LARGE_CASES
        + (Case("GLM-4 9B prompt", (512, 4096), vjp=True, quick=True),),
    ),
    RowOp(
        name="qk_norm",
        parameters=(("queries", "rows"), ("keys", "rows"), ("query_weight", "weight"), ("key_weight", "weight")),
        outputs=2,
        ours=norm.qk_norm,
        twin=_two_rms_norms,
        twin_text="two `mx.fast.rms_norm`",
        reference=reference.qk_norm,
        reference_vjp=reference.qk_norm_vjp,
        summary="norms of the heads of queries and of keys in one kernel",
        options={"eps": 1e-6},
        # Heads on both sides of every threshold of csrc/ops/norm/qk_norm.cpp.
        tests=_tests(
            (1, 1),
            (3, 7),
            (5, 12),
            (9, 24),
            (2, 3, 33),
            (1, 4, 2, 64),
            (7, 65),
            (2, 3, 4, 128),
            (2, 200),
            (3, 256),
            (9, 255),
            (3, 300),
            (3, 480),
            (5, 512),
            (2, 600),
            (3, 1025),
            (2, 2050),
            (1, 8300),
            (513, 64),
        )
        + _tests((2, 3, 96), options=_GEMMA),
        cases=(
            Case("16 heads, decode", (1, 16, 1, 128), quick=True),
            Case("16 heads, prompt", (1, 16, 512, 128), quick=True),
            Case("4 heads of Gemma 3, prompt", (1, 4, 512, 256), _GEMMA),
            Case("16 heads, prompt", (1, 16, 512, 128), vjp=True, quick=True),
        ),
    ),
    RowOp(
        name="softcap",
        parameters=(("logits", "rows"),),
        ours=norm.softcap,
        twin=_softcap,
        twin_text="`cap * mx.tanh(logits / cap)`",
        reference=reference.softcap,
        reference_vjp=reference.softcap_vjp,
        # Where it is nearly linear, where it bends, and where it has come to the cap.
        inputs=Spread(deviation=15.0, offset=10.0, outlier=20.0),
        summary="smooth bound of logits",
        options={"cap": 30.0},
        tests=_tests((1, 1), (3, 7), (5, 33), (2, 3, 64), (2, 1024), (3, 1025), (1, 4100), (9, 2881)),
        cases=(
            Case("Gemma 2 vocabulary", (1, 256000), quick=True),
            Case("Gemma 2 scores, prompt", (1, 8, 512, 512), {"cap": 50.0}, quick=True),
        )
        + _LARGE_CASES
        + (Case("Gemma 2 scores, prompt", (1, 8, 512, 512), {"cap": 50.0}, vjp=True, quick=True),),
    ),
)


def _by_rows(
    function: Callable[..., Any], case: Case, arrays: Sequence[np.ndarray | None], options: Mapping[str, Any]
) -> list[np.ndarray]:
    """Evaluates a reference, large cases in blocks: rows do not know of each other, and blocks share the cores."""

    def evaluate(block: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        with np.errstate(invalid="ignore"):  # NaN from infinities is an answer like any other
            result = function(*(None if a is None else a.astype(np.float64) for a in block), **options)
        return [a for a in (result if isinstance(result, (tuple, list)) else [result]) if a is not None]

    if math.prod(case.shape) < BLOCKWISE or options.get("axis", -1) != -1:
        return evaluate(arrays)
    columns = case.shape[-1]
    rows = math.prod(case.shape[:-1])
    flat = [a if a is None or a.shape != case.shape else a.reshape(rows, columns) for a in arrays]
    parts = in_blocks(
        lambda block: evaluate([a if a is None or a.ndim == 1 else a[block] for a in flat]), rows, columns
    )
    return [
        sum(part) if part[0].ndim == 1 else np.concatenate(part).reshape(case.shape)
        for part in zip(*parts, strict=True)
    ]
