"""Random calls of the ops of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from verification.fuzz import exact
from verification.fuzz.case import Case
from verification.fuzz.compare import LARGEST, overflow
from verification.fuzz.draw import FLOATS, Draw, describe, promoted
from verification.fuzz.products import EPSILON32, gated, moved, packed, size_of, size_of_packed

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs.op import draw_packed

SMALL_FLOATS = (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16))
LARGEST_INDEX = 2**31 - 1


@dataclass(frozen=True)
class Format:
    """How the experts' weights are packed."""

    mode: str
    bits: int
    group_size: int

    @classmethod
    def of(cls, draw: Draw) -> Format:
        if draw.chance(0.4):
            return cls(*draw.pick(SMALL_FLOATS))
        return cls("affine", draw.pick((4, 4, 8, 8, 2, 3, 5, 6)), draw.pick((32, 64, 128)))

    @property
    def arrays(self) -> int:
        return 3 if self.mode == "affine" else 2

    @property
    def options(self) -> dict:
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    @property
    def columns(self) -> int:
        """The number that a matrix's columns are a multiple of."""
        return max(32, self.group_size)

    def draw(self, draw: Draw, shape: Sequence[int], dtype: mx.Dtype) -> list[mx.array]:
        if self.mode == "affine":
            return packed(draw, shape, dtype, self.group_size, self.bits)
        *leading, columns = shape
        words, scales = (
            np.array(draw_packed(draw.rng, name, (*leading, size), self.bits, dtype, 1.0, self.mode))
            for name, size in (("w", columns * self.bits // 32), ("scales", columns // self.group_size))
        )
        if draw.chance(0.05):  # the largest of a byte is no number
            scales.reshape(-1)[0] = draw.pick((0, 1, 127 if self.mode == "nvfp4" else 255))
        return [draw.array(words, mx.uint32), draw.array(scales, mx.uint8)]

    def matrices(self, *arrays: mx.array) -> mx.array:
        """In float64."""
        if self.mode == "affine":
            return exact.dequantize(*arrays, self.group_size, self.bits)
        return mx.array(specs.dequantized(*arrays, None, self.group_size, self.bits, self.mode), mx.float64)

    def size(self, arrays: Sequence[mx.array]) -> np.ndarray:
        """A bound of the weights' sizes."""
        if self.mode == "affine":
            return size_of_packed(arrays[1], arrays[2], self.group_size, self.bits)
        return _finite_size(self.matrices(*arrays))

    def flushed(self, draw: Draw, arrays: Sequence[mx.array]) -> np.ndarray:
        """Sizes of the weights that kernels take for 0: the scale of a byte of 0, 2^-127, is no normal number."""
        size = self.size(arrays)
        if not draw.gpu or self.mode not in ("mxfp4", "mxfp8"):
            return np.zeros_like(size)
        return np.where(np.repeat(np.array(arrays[1]) == 0, self.group_size, -1), size, 0.0)

    def overflow(self, draw: Draw, x: np.ndarray) -> np.ndarray | float:
        """Kernels multiply with packed values, at most 448, and scale the sums of a group afterwards."""
        return overflow(max(2**self.bits - 1, 448) * x.sum(-1, keepdims=True)) if draw.gpu else 0.0


@dataclass(frozen=True)
class Choice:
    """Tokens that each go to some of the experts."""

    tokens: int
    chosen: int
    experts: int
    rows: int
    columns: int
    outputs: int

    @classmethod
    def of(cls, draw: Draw, form: Format, most_chosen: int, several_rows: bool) -> Choice:
        tokens, chosen = draw.pick((1, 1, 2, 3, 5, 8)), draw.integer(1, most_chosen)
        rows = draw.pick((1, 1, 1, 2, 3)) if several_rows else 1
        columns = form.columns * draw.pick((1, 1, 2, 3, 5))
        return cls(tokens, chosen, draw.integer(1, 6), rows, columns, draw.integer(1, draw.limit(70, 40)))

    def indices(self, draw: Draw) -> mx.array:
        indices = draw.rng.integers(0, self.experts, (self.tokens, self.chosen))
        if draw.chance(0.1):
            bad = draw.pick((self.experts, LARGEST_INDEX, -1))
            indices.reshape(-1)[draw.integer(0, indices.size - 1)] = bad
            return draw.array(indices, mx.int32)
        return draw.array(indices, draw.pick((mx.uint32, mx.int32, mx.uint8)))

    def has(self, indices: mx.array) -> bool:
        """Whether all of them are in range: the derivative of a result that is NaN whatever the input is, is 0."""
        wide = np.array(indices).astype(np.int64)
        return bool(((wide >= 0) & (wide < self.experts)).all())

    def of_experts(self, stack: mx.array, indices: mx.array) -> tuple[mx.array, mx.array]:
        """The arrays of each pair's expert, and whether there is such an expert."""
        wide = indices.astype(mx.int64)
        there = (wide >= 0) & (wide < self.experts)
        return stack[mx.where(there, wide, 0)], there


def _or_nan(values: mx.array, there: mx.array) -> mx.array:
    return mx.where(there, values, mx.array(mx.nan, values.dtype))


def _product(form: Format, choice: Choice, in_float64: bool) -> Callable[..., mx.array]:
    """x of shape [tokens, 1 or chosen, rows, columns] times the matrices of the experts."""

    def product(x: mx.array, weights: Sequence[mx.array], indices: mx.array) -> mx.array:
        if in_float64:
            w, there = choice.of_experts(form.matrices(*weights), indices)
            return _or_nan(x @ w.swapaxes(-1, -2), there[..., None, None])
        experts, there = choice.of_experts(mx.arange(choice.experts, dtype=mx.uint32), indices)
        biases = weights[2] if len(weights) == 3 else None
        x = mx.broadcast_to(x, (*indices.shape, *x.shape[-2:]))
        inputs = mx.arange(indices.size, dtype=mx.uint32).reshape(indices.shape)
        y = mx.gather_qmm(
            x, weights[0], weights[1], biases, lhs_indices=inputs, rhs_indices=experts, transpose=True, **form.options
        )
        return _or_nan(y, there[..., None, None])

    return product


def _sizes(choice: Choice, x: np.ndarray, weights: np.ndarray, indices: mx.array) -> np.ndarray:
    """A bound of sums of terms that are products of positive numbers, of shape [tokens, chosen, rows, outputs]."""
    experts = np.clip(np.array(indices).astype(np.int64), 0, choice.experts - 1)
    return x @ np.swapaxes(weights[experts], -1, -2)


def _errors(
    draw: Draw, form: Format, choice: Choice, x: mx.array, weights: Sequence[mx.array], indices: mx.array
) -> np.ndarray:
    """The effect of rounding on the products of experts, of shape [tokens, chosen, rows, outputs]."""
    of_sums = _sizes(choice, moved(draw, x), form.size(weights), indices)
    return of_sums + _sizes(choice, size_of(x), form.flushed(draw, weights), indices)


def _in_float64(weights: Sequence[mx.array]) -> list[mx.array]:
    """Packed weights with scales and biases of affine groups in float64."""
    return [a.astype(mx.float64) if a.dtype in FLOATS else a for a in weights]


def _finite_size(values: mx.array) -> np.ndarray:
    """Absolute values, with 0 for infinity and NaN."""
    return np.abs(np.nan_to_num(np.array(values), posinf=0, neginf=0))


def gather_qmm(draw: Draw) -> Case:
    dtype, form = draw.dtype(), Format.of(draw)
    choice = Choice.of(draw, form, 4, several_rows=True)
    kind, indices = draw.kind(), choice.indices(draw)
    arrays = [
        draw.array(draw.numbers([choice.tokens, 1, choice.rows, choice.columns], kind), dtype),
        *form.draw(draw, [choice.experts, choice.outputs, choice.columns], draw.dtype_like(dtype)),
        indices,
    ]

    def ours(x: mx.array, *others: mx.array) -> mx.array:
        *weights, indices = others
        biases = weights[2] if len(weights) == 3 else None
        return mm.gather_qmm(x, weights[0], weights[1], biases, rhs_indices=indices, **form.options)

    def noise() -> list[np.ndarray | float]:
        total = _errors(draw, form, choice, arrays[0], arrays[1:-1], arrays[-1])
        return [total + form.overflow(draw, size_of(arrays[0]))]

    return Case(
        describe(arrays, draw, numbers=kind, **form.options),
        arrays,
        ours=ours,
        twin=lambda x, *w: _product(form, choice, False)(x, w[:-1], w[-1]),
        exact=lambda x, *w: _product(form, choice, True)(x, w[:-1], w[-1]),
        of_nothing=list,
        differentiable=[0],
        noise=noise,
        ordinary=kind == "normal" and choice.has(indices),
    )


def gather_mm(draw: Draw) -> Case:
    dtype = draw.dtype()
    choice = Choice.of(draw, Format("affine", 4, 32), 4, several_rows=True)
    choice = replace(choice, columns=max(1, draw.size(draw.limit(600, 97))))
    kinds, indices, transposed = (draw.kind(), draw.kind()), choice.indices(draw), draw.chance(0.6)
    shape = [choice.outputs, choice.columns] if transposed else [choice.columns, choice.outputs]
    arrays = [
        draw.array(draw.numbers([choice.tokens, 1, choice.rows, choice.columns], kinds[0]), dtype),
        draw.array(draw.numbers([choice.experts, *shape], kinds[1]), draw.dtype_like(dtype)),
        indices,
    ]
    matrices = lambda w: w.swapaxes(-1, -2) if transposed else w

    def product(x: mx.array, w: mx.array, indices: mx.array) -> mx.array:
        w, there = choice.of_experts(matrices(w), indices)
        return _or_nan(x @ w, there[..., None, None])

    def noise() -> list[np.ndarray | float]:
        weights = size_of(arrays[1]) if transposed else np.swapaxes(size_of(arrays[1]), -1, -2)
        return [4 * EPSILON32 * _sizes(choice, size_of(arrays[0]), weights, indices)]

    return Case(
        describe(arrays, draw, numbers=kinds, transposed=transposed),
        arrays,
        ours=lambda x, w, indices: mm.gather_mm(x, matrices(w), rhs_indices=indices),
        twin=product,
        exact=product,
        of_nothing=list,
        differentiable=[0, 1],
        noise=noise,
        ordinary=kinds == ("normal", "normal") and choice.has(indices),
    )


def gather_swiglu(draw: Draw) -> Case:
    dtype, form = draw.dtype(), Format.of(draw)
    choice = Choice.of(draw, form, 4, several_rows=True)
    kind = draw.kind(("normal", "normal", "small", "constant", "special"))
    activation, weight_dtype = draw.pick(("swiglu", "geglu", "clipped")), draw.dtype_like(dtype)
    shape, indices = [choice.experts, choice.outputs, choice.columns], choice.indices(draw)
    arrays = [
        draw.array(draw.numbers([choice.tokens, 1, choice.rows, choice.columns], kind), dtype),
        *form.draw(draw, shape, weight_dtype),
        *form.draw(draw, shape, weight_dtype),
        indices,
    ]
    count = form.arrays
    result_dtype = promoted(*(a.dtype for a in arrays if a.dtype in FLOATS))

    def composed(in_float64: bool) -> Callable[..., mx.array]:
        product = _product(form, choice, in_float64)
        return lambda x, *w: gated(product(x, w[:count], w[-1]), product(x, w[count:-1], w[-1]), activation)

    def noise(is_composed: bool = not draw.gpu) -> list[np.ndarray | float]:
        products, errors, infinite = [], [], 0.0
        for weights in (arrays[1 : 1 + count], arrays[1 + count : -1]):
            wide = _in_float64(weights)
            y = _product(form, choice, True)(arrays[0].astype(mx.float64), wide, arrays[-1])
            # A limit clips an infinite product, which is infinity minus infinity where scales and biases are apart.
            infinite = infinite + np.where(np.isinf(np.array(y)), np.inf, 0.0)
            products.append(_finite_size(y))
            errors.append(_errors(draw, form, choice, arrays[0], wide, arrays[-1]))
            if activation == "clipped" and is_composed:  # of products, which are rounded
                errors[-1] = errors[-1] + specs.EPSILON[result_dtype] * products[-1]
        # All slopes are less than 1.2.
        total = 2 * (errors[0] * 1.2 * (products[1] + 1 + errors[1]) + errors[1] * products[0])
        return [total + infinite + form.overflow(draw, size_of(arrays[0]))]

    return Case(
        describe(arrays, draw, numbers=kind, activation=activation, **form.options),
        arrays,
        ours=lambda x, *w: mm.gather_swiglu(
            x, tuple(w[:count]), tuple(w[count:-1]), rhs_indices=w[-1], activation=activation, **form.options
        ),
        twin=composed(False),
        exact=composed(True),
        of_nothing=list,
        differentiable=[0],
        noise=noise,
        noise_of_composition=lambda: noise(True),
        ordinary=kind == "normal" and choice.has(indices),
    )


def gather_sum(draw: Draw) -> Case:
    dtype, form = draw.dtype(), Format.of(draw)
    choice = Choice.of(draw, form, draw.pick((2, 4, 8)), several_rows=False)
    kind, indices = draw.kind(), choice.indices(draw)
    count = form.arrays
    arrays = [
        draw.array(draw.numbers([choice.tokens, choice.chosen, choice.columns], kind), dtype),
        *form.draw(draw, [choice.experts, choice.outputs, choice.columns], draw.dtype_like(dtype)),
        indices,
        draw.array(draw.rng.uniform(0, 1, (choice.tokens, choice.chosen)), draw.pick((mx.float32, dtype))),
    ]
    if draw.chance(0.5):
        arrays.append(draw.array(draw.numbers([choice.experts, choice.outputs]), draw.dtype_like(dtype)))

    def ours(x: mx.array, *others: mx.array) -> mx.array:
        w, indices, weights, *bias = others[:count], *others[count:]
        biases = w[2] if count == 3 else None
        return mm.gather_sum(x, w[0], w[1], biases, indices, weights, bias=bias[0] if bias else None, **form.options)

    def composed(in_float64: bool) -> Callable[..., mx.array]:
        def sums(x: mx.array, *others: mx.array) -> mx.array:
            w, indices, weights, *bias = others[:count], *others[count:]
            y = _product(form, choice, in_float64)(x[..., None, :], w, indices).squeeze(-2)
            if bias:
                y = y + choice.of_experts(bias[0], indices)[0]
            return (y * weights[..., None]).sum(-2)

        return sums

    def noise(rounds_terms: bool = not draw.gpu) -> list[np.ndarray | float]:
        wide = _in_float64(arrays[1 : 1 + count])
        of_products = _errors(draw, form, choice, arrays[0][..., None, :], wide, indices)[..., 0, :]
        of_bias = size_of(arrays[-1]).max(0, initial=0) if len(arrays) > 3 + count else 0.0
        errors = of_products + 4 * EPSILON32 * of_bias
        if rounds_terms:  # as the native code and the composition do, and kernels with a bias
            terms = _product(form, choice, True)(arrays[0].astype(mx.float64)[..., None, :], wide, indices)
            size = _finite_size(terms)[..., 0, :]
            types = [a.dtype for a in arrays if a.dtype in FLOATS]
            errors = errors + max(specs.EPSILON[t] for t in types) * (size + of_bias)
            errors[size + of_bias > 0.99 * min(LARGEST[t] for t in types)] = np.inf
        of_x = form.overflow(draw, size_of(arrays[0]))
        weights = np.maximum(size_of(arrays[2 + count])[..., None], 1e-30)
        return [(errors * weights).sum(-2) + (np.max(of_x, -2) if draw.gpu else 0.0)]

    return Case(
        describe(arrays, draw, numbers=kind, **form.options),
        arrays,
        ours=ours,
        twin=None,  # of another type where weights are not of x's
        exact=composed(True),
        of_nothing=list,
        differentiable=[0, 2 + count],
        noise=noise,
        noise_of_composition=lambda: noise(True),
        ordinary=kind == "normal" and choice.has(indices),
    )


def route_top_k(draw: Draw) -> Case:
    """Logits lie apart by steps, or are equal, so that rounded scores have one order, a stable one.

    Indices are compared as float32.
    """
    dtype, experts = draw.dtype(), draw.integer(1, 64)
    k = draw.integer(1, min(experts, draw.pick((2, 8, 64))))
    scores, descending = draw.pick(("softmax", "sigmoid", "chosen")), draw.chance(0.7)
    renormalize, scale, precise = draw.chance(0.5), draw.pick((1.0, 2.5)), draw.chance(0.3)
    steps = draw.rng.random((draw.integer(1, 5), experts)).argsort(-1)
    if draw.chance(0.3):
        steps //= draw.pick((2, 5, 64))
    arrays = [draw.array((steps - experts // 2) / 16.0, dtype)]
    if draw.chance(0.4) and scores == "sigmoid":
        arrays.append(draw.array(draw.rng.integers(0, 3, experts) * 2.0, mx.float32))

    def in_float64(logits: mx.array, *bias: mx.array) -> tuple[mx.array, mx.array]:
        values = {"softmax": lambda: exact.softmax(logits, -1), "sigmoid": lambda: mx.sigmoid(logits)}
        values = values.get(scores, lambda: logits)()
        keys = np.array(values + bias[0] if bias else values)
        order = np.argsort(-keys if descending else keys, -1, kind="stable")
        indices = mx.array(order[..., :k] if descending else order[..., experts - k :])
        weights = mx.take_along_axis(values, indices, -1)
        if scores == "chosen":
            weights = exact.softmax(weights, -1)
        elif renormalize:
            weights = weights / weights.sum(-1, keepdims=True)
        return indices.astype(mx.float64), weights * mx.array(scale, mx.float64)

    def ours(logits: mx.array, bias: mx.array | None = None) -> tuple[mx.array, mx.array]:
        indices, weights = mm.route_top_k(
            logits, k, bias, scores, renormalize=renormalize, descending=descending, scale=scale, precise=precise
        )
        return indices.astype(mx.float32), weights

    return Case(
        describe(
            arrays,
            draw,
            **{"k": k, "scores": scores, "renormalize": renormalize, "descending": descending, "scale": scale},
            precise=precise,
        ),
        arrays,
        ours=ours,
        twin=None,
        exact=in_float64,
        of_nothing=list,
        noise=lambda: [0.0, 8 * EPSILON32 * scale],
    )


def mixture(draw: Draw) -> Case:
    """Of numbers that models have. Logits lie apart by steps, so that rounded scores have one order."""
    dtype, form = draw.dtype(), Format("affine", draw.pick((4, 4, 8, 6)), draw.pick((32, 64)))
    tokens, chosen = draw.pick((1, 1, 2, 3)), draw.integer(1, draw.pick((3, 15)))
    experts = chosen + draw.integer(0, 5)
    columns, hidden = (form.columns * draw.pick((1, 2, 3)) for _ in range(2))
    activation, has_shared, has_bias = draw.pick(("swiglu", "geglu")), draw.chance(0.6), draw.chance(0.3)
    route = {"scores": draw.pick(("softmax", "chosen")), "renormalize": draw.chance(0.5)}
    matrices = [(hidden, columns), (hidden, columns), (columns, hidden)]
    stacks, alone = (
        [each for rows, width in matrices for each in form.draw(draw, [*leading, rows, width], dtype)]
        for leading in ([experts], [])
    )
    steps = draw.rng.random((tokens, experts)).argsort(-1)
    arrays = [
        draw.array(draw.numbers([tokens, columns]) / 16, dtype),
        draw.array((steps - experts) / 4.0, dtype),
        *stacks,
        *([draw.array(draw.numbers([tokens, 1]), dtype), *alone] if has_shared else []),
        *([draw.array(draw.numbers([experts, rows]) / 16, dtype) for rows, _ in matrices] if has_bias else []),
    ]

    def indices_of(logits: mx.array) -> mx.array:
        order = np.argsort(-np.array(logits.astype(mx.float32)), -1, kind="stable")
        return mx.array(order[..., :chosen].astype(np.uint32))

    def parts(
        arrays: Sequence[mx.array],
    ) -> tuple[list[Sequence[mx.array]], mx.array | None, Sequence[mx.array] | None]:
        """Triples, logits of the shared expert, and biases."""
        triples = [arrays[i : i + 3] for i in range(2, 11, 3)]
        shared = [arrays[i : i + 3] for i in range(12, 21, 3)] if has_shared else []
        return [*triples, *shared], arrays[11] if has_shared else None, list(arrays[-3:]) if has_bias else []

    def ours(*arrays: mx.array) -> mx.array:
        (gate, up, down, *shared), logits, bias = parts(arrays)
        beside = dict(zip(("shared_gate", "shared_up", "shared_down"), shared))
        given = {"shared_logits": logits, "bias": bias or None, "group_size": form.group_size, "bits": form.bits}
        return mm.mixture(*arrays[:2], chosen, gate, up, down, **beside, **given, activation=activation, **route)

    def weights_of(logits: mx.array, indices: mx.array) -> mx.array:
        if route["scores"] == "chosen":
            return exact.softmax(mx.take_along_axis(logits, indices, -1), -1)
        weights = mx.take_along_axis(exact.softmax(logits, -1), indices, -1)
        return weights / weights.sum(-1, keepdims=True) if route["renormalize"] else weights

    def terms(arrays: Sequence[mx.array]) -> tuple[mx.array, mx.array | None]:
        """The outputs of the chosen experts, before they are weighted, and of the shared one."""
        triples, logits, bias = parts(arrays)
        each = [exact.dequantize(*triple, form.group_size, form.bits) for triple in triples]
        x, rows = arrays[0], arrays[0][:, None, None]
        indices = indices_of(arrays[1])
        added = [b[indices][..., None, :] for b in bias] if bias else [0, 0, 0]
        product = lambda x, i: x @ each[i][indices].swapaxes(-1, -2) + added[i]
        y = product(gated(product(rows, 0), product(rows, 1), activation), 2)[..., 0, :]
        return y, None if logits is None else gated(x @ each[3].T, x @ each[4].T, activation) @ each[5].T

    def in_float64(*arrays: mx.array) -> mx.array:
        outputs, shared = terms(arrays)
        y = (outputs * weights_of(arrays[1], indices_of(arrays[1]))[..., None]).sum(-2)
        return y if shared is None else y + mx.sigmoid(parts(arrays)[1]) * shared

    def noise() -> list[np.ndarray | float]:
        """Arrays between the launches are rounded, and so are weights, and products that are launches of their own."""
        wide = [a if a.dtype == mx.uint32 else a.astype(mx.float64) for a in arrays]
        triples, logits, bias = parts(wide)
        each = [np.abs(np.array(exact.dequantize(*triple, form.group_size, form.bits))) for triple in triples]
        which = np.array(indices_of(wide[1]))
        factors = np.array(weights_of(wide[1], mx.array(which)))
        added = [np.abs(np.array(b))[which][..., None, :] if bias else 0.0 for b in bias or [0, 0, 0]]
        if has_shared:
            each = [np.concatenate([each[i], each[3 + i][None]]) for i in range(3)]
            which = np.concatenate([which, np.full((tokens, 1), experts)], -1)
            factors = np.concatenate([factors, np.ones((tokens, 1))], -1)
            added = [np.pad(b, [(0, 0), (0, 1), (0, 0), (0, 0)]) if bias else 0.0 for b in added]
        gate, up, down = each
        x = np.abs(np.array(wide[0]))[:, None, None]
        sums = [x @ np.swapaxes(w[which], -1, -2) + b for w, b in zip((gate, up), added)]
        size = 1.2 * (sums[0] + 1) * (sums[1] + 1) @ np.swapaxes(down[which], -1, -2) + added[2]
        total = (size[..., 0, :] * factors[..., None]).sum(-2)
        noise = 6 * specs.EPSILON[dtype] * total
        if not draw.gpu:  # native code stores outputs before it weighs them
            outputs, shared = terms(wide)
            stored = [np.abs(np.array(outputs)).max(-2), *([] if shared is None else [np.abs(np.array(shared))])]
            noise[np.maximum.reduce(stored) > 0.99 * LARGEST[dtype]] = np.inf
        return [noise]

    return Case(
        describe(arrays, draw, activation=activation, chosen=chosen, **route, **form.options),
        arrays,
        ours=ours,
        twin=None,
        exact=in_float64,
        of_nothing=list,
        differentiable=[0],
        noise=noise,
        ordinary=False,
    )
