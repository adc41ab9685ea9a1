"""Rows of the table of ops on chosen experts: their arrays, and their results in float64.

The shape of a case is ``(tokens, chosen, experts, columns, outputs)``: experts chosen for each token, of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from . import normed
from .op import (
    Case,
    Exact,
    ModelOp,
    Op,
    add_outliers,
    dequantized,
    draw_packed,
    gated,
    mode_of,
    weight_bytes,
    widen,
)


@dataclass(frozen=True, kw_only=True)
class GatherOp(ModelOp):
    """Tokens, weights of experts, and for each token the experts chosen.

    The table's gradients are by x, and by dense weights.

    Attributes:
        stacks: How many stacks of matrices there are.
        sums: Whether the products of a token are summed, with an x for each of them.
        dense: Parameters that are no weights of experts.
    """

    # The least shape that any case's options allow.
    smallest = (2, 2, 3, 64, 8)
    stacks: int = 1
    sums: bool = False
    dense: tuple[str, ...] = ("x", "indices", "weights", "bias")

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        tokens, chosen, experts, columns, outputs = case.shape
        options = self.arguments(case)
        indices = (tokens, chosen)
        if self.sums:
            return [(tokens, chosen, columns), *self._triple(case), indices, indices, (experts, outputs)]
        if "bits" not in options:
            return [(tokens, columns), *[(experts, outputs, columns)] * self.stacks, indices]
        return [(tokens, columns), *self._triple(case) * self.stacks, indices]

    def _triple(self, case: Case) -> list[tuple[int, ...]]:
        """Words, scales and biases of a stack."""
        _, _, experts, columns, outputs = case.shape
        options = self.arguments(case)
        groups = (experts, outputs, columns // options["group_size"])
        return [(experts, outputs, columns * options["bits"] // 32), groups, groups]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        tokens, chosen, experts, columns, _ = case.shape
        options = self.arguments(case)
        arrays: list[mx.array | None] = []
        for (name, _), shape in zip(self.parameters, self.shapes(case), strict=True):
            mode = mode_of(options)
            if name == "indices":
                order = rng.random((tokens, experts)).argsort(-1)[:, :chosen].astype(np.uint32)
                arrays.append(mx.array(np.sort(order, axis=0) if options.get("sorted_indices") else order))
            elif name.endswith("biases") and mode != "affine":
                arrays.append(None)
            elif name not in self.dense and "bits" in options:
                arrays.append(draw_packed(rng, name, shape, options["bits"], dtype, columns**-0.5, mode))
            else:
                numbers = rng.standard_normal(shape, dtype=np.float32)
                add_outliers(rng, numbers)
                arrays.append(mx.array(numbers * np.float32(columns**-0.5 if name == "w" else 1)).astype(dtype))
        return arrays

    def cotangents(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array]:
        if not case.vjp:
            return []
        tokens, chosen, _, _, outputs = case.shape
        return [mx.array(rng.standard_normal((tokens, chosen, 1, outputs), dtype=np.float32)).astype(dtype)]

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        tokens, chosen, experts, columns, outputs = case.shape
        options = self.arguments(case)
        weight = weight_bytes(options, dtype) if "bits" in options else float(dtype.size)
        read = min(tokens * chosen, experts) * columns * outputs * weight * self.stacks
        small = tokens * (chosen * columns + outputs if self.sums else columns + chosen * outputs)
        if case.vjp and "bits" not in options:  # x is read too, and each weight has a gradient
            read, small = read + experts * columns * outputs * weight, small + tokens * columns
        return int(read) + dtype.size * small + 4 * tokens * chosen * (2 if self.sums else 1)

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        given = dict(zip((name for name, _ in self.parameters), arrays, strict=True))
        x, indices = widen(given["x"]), given["indices"]
        assert x is not None
        stacks = [a for name, a in given.items() if a is not None and name not in self.dense]
        chosen = np.array(indices)
        of_pairs = x[:, :, None] if self.sums else x[:, None, None]
        of_pairs = np.broadcast_to(of_pairs, (*chosen.shape, 1, x.shape[-1]))
        size = len(stacks) // self.stacks
        weights = [self._matrices(case, stacks[i : i + size]) for i in range(0, len(stacks), size)]
        if case.vjp:
            dy = widen(cotangents[0])
            return _gradients(x, weights[0], dy[..., 0, :], chosen, with_weights="bits" not in self.arguments(case))
        products = [_products(of_pairs, w, chosen) for w in weights]
        if self.sums:
            factors, bias = widen(given["weights"]), widen(given["bias"])
            assert factors is not None and bias is not None
            return [_summed(products[0], factors, bias[chosen])]
        if self.stacks == 1:
            return [products[0]]
        gate, up = products
        return [gated(gate, up, self.arguments(case).get("activation", "swiglu"))]

    def _matrices(self, case: Case, stack: Sequence[mx.array]) -> np.ndarray:
        """A stack in float64."""
        options = self.arguments(case)
        if "bits" not in options:
            return widen(stack[0])
        words, scales, *biases = stack
        mode = mode_of(options)
        return dequantized(words, scales, biases[0] if biases else None, options["group_size"], options["bits"], mode)


@dataclass(frozen=True, kw_only=True)
class MixtureOp(ModelOp):
    """Tokens, a router's logits, six triples, the shared expert's logits, and biases.

    The shape of a case is ``(tokens, chosen, experts, columns, hidden)``; there are as many outputs as columns. An
    option ``parts`` names the parts beside the experts: ``shared``, ``bias``, or nothing.
    """

    smallest = (2, 2, 16, 64, 64)

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        tokens, chosen, experts, columns, hidden = case.shape
        options = self.arguments(case)
        words, group = options["bits"] / 32, options["group_size"]
        up, down = (hidden, columns), (columns, hidden)
        matrices = [(experts, *up), (experts, *up), (experts, *down), up, up, down]
        triples = [
            shape
            for *rows, width in matrices
            for shape in ((*rows, int(width * words)), *[(*rows, width // group)] * 2)
        ]
        biases = [(experts, hidden), (experts, hidden), (experts, columns), (experts,)]
        return [(tokens, columns), (tokens, experts), *triples, (tokens, 1), *biases]

    def _is_there(self, case: Case, name: str) -> bool:
        options = self.arguments(case)
        if name.endswith("biases"):
            affine = mode_of(options) == "affine"
            return affine and (not name.startswith("shared") or options["parts"] == "shared")
        if name.startswith("shared"):
            return bool(options["parts"] == "shared")
        return options["parts"] == "bias" or not name.endswith("bias")

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        tokens, chosen, experts, columns, hidden = case.shape
        options = self.arguments(case)
        mode = mode_of(options)
        arrays: list[mx.array | None] = []
        for (name, _), shape in zip(self.parameters, self.shapes(case), strict=True):
            if not self._is_there(case, name):
                arrays.append(None)
            elif name == "logits":
                # So far apart that rounding settles no choice.
                places = rng.random(shape).argsort(-1)
                arrays.append(mx.array((places - experts) / 8, mx.float32).astype(dtype))
            elif name in ("x", "shared_logits") or name.endswith("bias"):
                numbers = mx.array(rng.standard_normal(shape, dtype=np.float32))
                arrays.append(numbers / 64 if name == "router_bias" else numbers.astype(dtype))
            else:
                size = (hidden if "down" in name else columns) ** -0.5
                arrays.append(draw_packed(rng, name, shape, options["bits"], dtype, size, mode))
        return arrays

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        tokens, chosen, experts, columns, hidden = case.shape
        options = self.arguments(case)
        weight = weight_bytes(options, dtype)
        shared = int(options["parts"] == "shared")
        read = (min(tokens * chosen, experts) + shared) * 3 * columns * hidden * weight
        small = tokens * (2 * columns + 2 * (chosen + shared) * hidden + experts + 2 * chosen + shared)
        return int(read) + dtype.size * small + 8 * tokens * chosen

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        options = self.arguments(case)
        given = dict(zip((name for name, _ in self.parameters), arrays, strict=True))
        x = widen(given["x"])
        assert x is not None and given["logits"] is not None
        # Experts are told apart by scores in the type of the logits, as in route_top_k.
        route = {"k": options["k"], "scores": options["scores"], "renormalize": options.get("renormalize", False)}
        chosen, factors = (
            np.array(a.astype(mx.float32)) for a in mx_route(given["logits"], given["router_bias"], **route)
        )
        chosen, factors = chosen.astype(np.int64), factors[..., None]

        def matrix(name: str) -> np.ndarray:
            words, scales, biases = (given[f"{name}{end}"] for end in ("", "_scales", "_biases"))
            assert words is not None and scales is not None
            mode = mode_of(options)
            return dequantized(words, scales, biases, options["group_size"], options["bits"], mode)

        gate, up, down = map(matrix, ("gate", "up", "down"))
        if options.get("is_normed") == "x":
            x, _ = normed.exact_row(x, x @ gate[0].T)
        bias = [widen(given[f"{name}_bias"]) for name in ("gate", "up", "down")]
        if options["parts"] == "shared":
            gate, up, down = (
                np.concatenate([w, matrix(f"shared_{name}")[None]])
                for name, w in zip(("gate", "up", "down"), (gate, up, down))
            )
            logits = widen(given["shared_logits"])
            assert logits is not None
            chosen = np.concatenate([chosen, np.full((len(x), 1), len(gate) - 1)], -1)
            factors = np.concatenate([factors, 1 / (1 + np.exp(-logits))[:, None]], 1)
        pairs = np.broadcast_to(x[:, None, None], (*chosen.shape, 1, x.shape[-1]))

        def product(given: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> Exact:
            y = _products(given, w, chosen)
            return y if bias is None else Exact(y.value + bias[chosen][..., None, :], y.magnitude)

        hidden = gated(product(pairs, gate, bias[0]), product(pairs, up, bias[1]), options.get("activation", "swiglu"))
        y = product(hidden.value, down, bias[2])
        assert hidden.magnitude is not None
        size = np.sqrt((hidden.magnitude**2) @ np.swapaxes(down[chosen], -1, -2) ** 2)[..., 0, :]
        total = (y.value[..., 0, :] * factors).sum(-2) + (x if options.get("is_normed") == "y" else 0)
        return [Exact(total, np.sqrt(((size * factors) ** 2).sum(-2)))]


def _products(x: np.ndarray, w: np.ndarray, chosen: np.ndarray) -> Exact:
    """Each of x times the transpose of its matrix, and the size of such sums."""
    with np.errstate(invalid="ignore", over="ignore"):
        matrices = np.swapaxes(w[chosen], -1, -2)
        return Exact(x @ matrices, np.sqrt((x * x) @ (matrices * matrices)))


def _gradients(x: np.ndarray, w: np.ndarray, dy: np.ndarray, chosen: np.ndarray, with_weights: bool) -> list[Exact]:
    """Gradients by x, and by each expert's weights."""
    by_x, of_w = [np.zeros((2, *a.shape)) for a in (x, w)]
    for expert, matrix in enumerate(w):
        token, choice = np.nonzero(chosen == expert)
        rows, given = dy[token, choice], x[token]
        np.add.at(by_x[0], token, rows @ matrix)
        np.add.at(by_x[1], token, (rows * rows) @ (matrix * matrix))
        of_w[:, expert] = rows.T @ given, (rows * rows).T @ (given * given)
    found = [Exact(by_x[0], np.sqrt(by_x[1])), Exact(of_w[0], np.sqrt(of_w[1]))]
    return found if with_weights else found[:1]


def _summed(products: Exact, weights: np.ndarray, bias: np.ndarray) -> Exact:
    assert products.magnitude is not None
    weights = weights[..., None]
    value = ((products.value[..., 0, :] + bias) * weights).sum(axis=-2)
    return Exact(value, np.sqrt(((products.magnitude[..., 0, :] * weights) ** 2).sum(axis=-2)))


@dataclass(frozen=True, kw_only=True)
class RouterOp(Op):
    """Logits of experts. The shape of a case is ``(tokens, experts)``. Gradients are tested beside the table."""

    smallest = (2, 16)

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        return [case.shape, case.shape[-1:]]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        logits = rng.standard_normal(case.shape, dtype=np.float32) * np.float32(2)
        bias = rng.standard_normal(case.shape[-1:], dtype=np.float32) * np.float32(0.1)
        with_bias = self.arguments(case)["scores"] == "sigmoid"
        return [mx.array(logits).astype(dtype), mx.array(bias) if with_bias else None]

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        tokens, experts = case.shape
        return dtype.size * tokens * experts + (dtype.size + 4) * tokens * self.arguments(case)["k"]

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        # Experts are told apart by mx's scores in the type of the logits, whose last bit may decide.
        options = self.arguments(case)
        indices = np.array(mx_route(*arrays, **options)[0])
        logits = widen(arrays[0])
        assert logits is not None
        if options["scores"] == "sigmoid":
            weights = np.take_along_axis(1 / (1 + np.exp(-logits)), indices, -1)
        elif options["scores"] == "sqrtsoftplus":
            weights = np.take_along_axis(np.sqrt(np.logaddexp(logits, 0)), indices, -1)
        else:
            exponentials = np.exp(logits - logits.max(-1, keepdims=True))
            weights = np.take_along_axis(exponentials, indices, -1)
            over_chosen = options["scores"] == "chosen"
            weights = weights / (weights if over_chosen else exponentials).sum(-1, keepdims=True)
        if options.get("renormalize"):
            weights = weights / weights.sum(-1, keepdims=True)
        return [Exact(indices.astype(np.float64)), Exact(weights * options.get("scale", 1.0))]


def mx_route(logits, bias, k, scores, renormalize=False, descending=True, scale=1.0, precise=False, eps=1e-20):
    wide = logits.astype(mx.float32)
    values = {"softmax": lambda: mx.softmax(wide, -1, precise=True), "sigmoid": lambda: mx.sigmoid(wide)}
    values["sqrtsoftplus"] = lambda: mx.sqrt(mx.logaddexp(wide, 0.0))
    values = values.get(scores, lambda: wide)()
    keys = (values if precise else values.astype(logits.dtype).astype(mx.float32)) + (0 if bias is None else bias)
    indices = mx.argsort(-keys, -1)[..., :k] if descending else mx.argsort(keys, -1)[..., -k:]
    indices = mx.stop_gradient(indices)
    weights = mx.take_along_axis(values, indices, -1)
    if scores == "chosen":
        weights = mx.softmax(weights, -1, precise=True)
    elif renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + eps)
    return indices, (weights * scale).astype(logits.dtype)
