"""Rows of the table of ops for mixtures of experts; `specs` puts them into the table.

The shape of a case is ``(tokens, chosen, experts, columns, outputs)``: each token is multiplied with so many of the
experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..ops import moe
from . import matmul, normed
from .op import (
    Case,
    Exact,
    ModelOp,
    Op,
    add_outliers,
    cases_for_tests,
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
    option ``parts`` says what there is beside the experts: ``shared``, ``bias``, or nothing.
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
        # Experts are told apart by scores in the type of the logits, as those of route_top_k.
        route = {"k": options["k"], "scores": options["scores"], "renormalize": options.get("renormalize", False)}
        chosen, factors = (
            np.array(a.astype(mx.float32)) for a in _mx_route(given["logits"], given["router_bias"], **route)
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
        # Experts are told apart by scores in the type of the logits: those of mx, whose last bit may decide.
        options = self.arguments(case)
        indices = np.array(_mx_route(*arrays, **options)[0])
        logits = widen(arrays[0])
        assert logits is not None
        if options["scores"] == "sigmoid":
            weights = np.take_along_axis(1 / (1 + np.exp(-logits)), indices, -1)
        else:
            exponentials = np.exp(logits - logits.max(-1, keepdims=True))
            weights = np.take_along_axis(exponentials, indices, -1)
            over_chosen = options["scores"] == "chosen"
            weights = weights / (weights if over_chosen else exponentials).sum(-1, keepdims=True)
        if options.get("renormalize"):
            weights = weights / weights.sum(-1, keepdims=True)
        return [Exact(indices.astype(np.float64)), Exact(weights * options.get("scale", 1.0))]


def _route(logits, bias, k, **options):
    return moe.route_top_k(logits, k, bias, **options)


def _mx_route(logits, bias, k, scores, renormalize=False, descending=True, scale=1.0):
    wide = logits.astype(mx.float32)
    values = {"softmax": lambda: mx.softmax(wide, -1, precise=True), "sigmoid": lambda: mx.sigmoid(wide)}
    values = values.get(scores, lambda: wide)()
    keys = values.astype(logits.dtype).astype(mx.float32) + (0 if bias is None else bias)
    indices = mx.argsort(-keys, -1)[..., :k] if descending else mx.argsort(keys, -1)[..., -k:]
    indices = mx.stop_gradient(indices)
    weights = mx.take_along_axis(values, indices, -1)
    if scores == "chosen":
        weights = mx.softmax(weights, -1, precise=True)
    elif renormalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return indices, (weights * scale).astype(logits.dtype)


def _pairs(x: mx.array, indices: mx.array) -> tuple[mx.array, mx.array]:
    """x and indices for mx's gathers. Of one expert for each token they lie along one axis, as mlx-lm sorts them."""
    return (x[:, None], indices.reshape(-1)) if indices.shape[1] == 1 else (x[:, None, None], indices)


def _gather_qmm(x, w, scales, biases, indices, **options):
    x, chosen = _pairs(x, indices)
    y = moe.gather_qmm(x, w, scales, biases, rhs_indices=chosen, **options)
    return y.reshape(*indices.shape, *y.shape[-2:])


def _mx_gather_qmm(x, w, scales, biases, indices, **options):
    x, chosen = _pairs(x, indices)
    y = mx.gather_qmm(x, w, scales, biases, rhs_indices=chosen, **options)
    return y.reshape(*indices.shape, *y.shape[-2:])


def _gather_sum(x, w, scales, biases, indices, weights, bias, **options):
    return moe.gather_sum(x, w, scales, biases, indices, weights, bias=bias, **options)


def _mx_gather_sum(x, w, scales, biases, indices, weights, bias, **options):
    y = mx.gather_qmm(x[..., None, :], w, scales, biases, rhs_indices=indices, **options).squeeze(-2)
    return ((y + bias[indices]) * weights[..., None]).sum(axis=-2)


def _gather_swiglu(x, gate, gate_scales, gate_biases, up, up_scales, up_biases, indices, **options):
    triples = [(gate, gate_scales, gate_biases), (up, up_scales, up_biases)]
    triples = [tuple(a for a in triple if a is not None) for triple in triples]
    return moe.gather_swiglu(x[:, None, None], *triples, rhs_indices=indices, **options)


def _mx_gather_swiglu(
    x, gate, gate_scales, gate_biases, up, up_scales, up_biases, indices, activation="swiglu", **options
):
    product = lambda *triple: _mx_gather_qmm(x, *triple, indices, **options)
    return matmul.gated_by_mx(product(gate, gate_scales, gate_biases), product(up, up_scales, up_biases), activation)


_TRIPLES = ("gate", "up", "down", "shared_gate", "shared_up", "shared_down")


def _triples(arrays):
    """Arrays of a mixture, without biases where there are none."""
    each = [arrays[i : i + 3] for i in range(0, 18, 3)]
    return [tuple(a for a in triple if a is not None) for triple in each]


def _parts(arrays, parts):
    """The triples, and the other arguments of a mixture, which has these parts."""
    triples = _triples(arrays[:18])
    has_shared, has_bias = parts == "shared", parts == "bias"
    others = {
        "shared_logits": arrays[18],
        "bias": arrays[19:22] if has_bias else None,
        "router_bias": arrays[22],
    }
    return triples[: 6 if has_shared else 3], others


def _first(triple):
    """The triple of the first expert."""
    return [array[0] for array in triple]


def _mixture(x, logits, *arrays, k, parts, is_normed="", **options):
    triples, others = _parts(arrays, parts)
    shared = dict(zip(("shared_gate", "shared_up", "shared_down"), triples[3:]))
    x = normed.row_before(x, _first(triples[0]), options) if is_normed == "x" else x
    y = moe.mixture(x, logits, k, *triples[:3], **shared, **others, **options)
    return normed.sum_before(y, x, _first(triples[0]), options) if is_normed == "y" else y


def _mx_mixture(x, logits, *arrays, is_normed="", **options):
    if is_normed == "x":
        x, _ = normed.row_of_mx(x, _first(_triples(arrays[:18])[0]), None, normed.widths(options))
    y = _mx_experts(x, logits, *arrays, **options)
    return x + y if is_normed == "y" else y


def _mx_experts(
    x, logits, *arrays, k, parts, scores, renormalize=False, descending=True, activation="swiglu", **options
):
    (gate, up, down, *shared), others = _parts(arrays, parts)
    indices, weights = _mx_route(logits, others["router_bias"], k, scores, renormalize, descending)
    gate_bias, up_bias, down_bias = others["bias"] or (None, None, None)

    def product(x, triple, bias):
        y = mx.gather_qmm(x, triple[0], *triple[1:], rhs_indices=indices, **options)
        return y if bias is None else y + mx.expand_dims(bias[indices], -2)

    rows = x[:, None, None]
    hidden = matmul.gated_by_mx(product(rows, gate, gate_bias), product(rows, up, up_bias), activation)
    y = (product(hidden, down, down_bias).squeeze(-2) * weights[..., None]).sum(axis=-2)
    if not shared:
        return y
    alone = lambda x, triple: mx.quantized_matmul(x, triple[0], *triple[1:], transpose=True, **options)
    hidden = matmul.gated_by_mx(alone(x, shared[0]), alone(x, shared[1]), activation)
    return y + mx.sigmoid(others["shared_logits"]) * alone(hidden, shared[2])


def _gather_mm(x, w, indices, **options):
    x, chosen = _pairs(x, indices)
    y = moe.gather_mm(x, w.swapaxes(-1, -2), rhs_indices=chosen, **options)
    return y.reshape(*indices.shape, *y.shape[-2:])


def _mx_gather_mm(x, w, indices, **options):
    dtype = x.dtype
    if mx.default_device() != mx.gpu:  # in half types mx has none on a CPU
        x, w = x.astype(mx.float32), w.astype(mx.float32)
    x, chosen = _pairs(x, indices)
    y = mx.gather_mm(x, w.swapaxes(-1, -2), rhs_indices=chosen, **options)
    return y.reshape(*indices.shape, *y.shape[-2:]).astype(dtype)


# The first product of an expert: (experts, chosen, columns, outputs).
_MODELS = {
    "Granite 3.1 1B-A400M": (32, 8, 1024, 512),
    "OLMoE 1B-7B": (64, 8, 2048, 1024),
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Mixtral 8x7B": (8, 2, 4096, 14336),
    "gpt-oss 20B": (32, 4, 2880, 2880),
}
_ON_CPU = ("Granite 3.1 1B-A400M", "OLMoE 1B-7B")


def _models(tokens: tuple[int, ...] = (1,), **options: Any) -> tuple[Case, ...]:
    return tuple(
        Case(
            model,
            (count, chosen, experts, columns, outputs),
            options,
            quick=count == 1 and model == _ON_CPU[0],
            gpu_only=model not in _ON_CPU[: 1 if count > 1 or not options else 2],  # mx takes seconds there
        )
        for count in tokens
        for model, (experts, chosen, columns, outputs) in _MODELS.items()
    )


# More than 64 rows, which Apple GPUs without matrix units take by tiles.
_TILED = (11, 6, 7, 96, 33)
_SHAPES = ((1, 2, 4, 64, 9), (1, 8, 16, 320, 10), (5, 3, 4, 128, 7), (3, 1, 2, 96, 33))
_MANY = Case("test", (33, 2, 3, 64, 5), {"group_size": 32}, cpu_only=True)
_MXFP4: dict[str, Any] = {"mode": "mxfp4", "group_size": 32, "bits": 4}
_RARE: tuple[dict[str, Any], ...] = (
    *({"group_size": 32, "bits": bits} for bits in (2, 3, 5, 6)),
    {"mode": "mxfp8", "group_size": 32, "bits": 8},
    {"mode": "nvfp4", "group_size": 16, "bits": 4},
)


def _mixtures(shape: tuple[int, ...], apple_only: bool = True, **options: Any) -> tuple[Case, ...]:
    """Cases on an NVIDIA GPU are few: there a mixture is composed, and MLX compiles for up to 30 s for each twin."""
    return (Case("test", shape, {**options, "k": shape[1]}, apple_only=apple_only),)


_TILED_TESTS = tuple(
    case
    for options in ({"group_size": 32, "bits": 4}, {"group_size": 32, "bits": 8}, _MXFP4, *_RARE)
    for case in cases_for_tests(_TILED, **options)
)


# Training with mlx-lm, which sorts the pairs of a batch by their experts: of all weights of a small mixture, and of the
# two products of its adapters.
def _training(*shapes: tuple[int, ...], label: str, **options: Any) -> tuple[Case, ...]:
    sorted_options = {"sorted_indices": True, **options}
    return tuple(Case(label, shape, sorted_options, vjp=True, cpu_only=True) for shape in shapes)


# Of gpt-oss 20B with the weights that it has.
_GPT_OSS = Case("gpt-oss 20B", (1, 4, 32, 2880, 2880), _MXFP4, gpu_only=True)

MOE_OPS: tuple[Op, ...] = (
    GatherOp(
        name="gather_qmm",
        parameters=tuple((name, "rows") for name in ("x", "w", "scales", "biases", "indices")),
        ours=_gather_qmm,
        twin=_mx_gather_qmm,
        twin_text="`mx.gather_qmm`",
        summary="tokens times their experts, of quantized weights",
        options={"group_size": 64, "bits": 4},
        tests=(
            *(case for bits in (4, 8) for case in cases_for_tests(*_SHAPES, group_size=32, bits=bits)),
            *cases_for_tests(*_SHAPES[1:3], **_MXFP4),
            *(case for options in _RARE for case in cases_for_tests(_SHAPES[1], **options)),
            *_TILED_TESTS,
            _MANY,
        ),
        cases=(
            *_models((1, 4), bits=4),
            _GPT_OSS,
            *_training((1024, 1, 8, 256, 256), label="QLoRA", bits=4),
        ),
        frozen=("w", "scales", "biases", "indices"),
    ),
    GatherOp(
        name="gather_mm",
        parameters=tuple((name, "rows") for name in ("x", "w", "indices")),
        ours=_gather_mm,
        twin=_mx_gather_mm,
        twin_text="`mx.gather_mm`",
        summary="tokens times their experts, of dense weights",
        tests=cases_for_tests(*_SHAPES, (2, 2, 3, 37, 5), _TILED),
        cases=_models((1, 4))
        + _training((1024, 1, 8, 256, 256), label="training")
        + _training((1024, 1, 32, 256, 8), (1024, 1, 32, 8, 256), label="LoRA"),
        frozen=("indices",),
    ),
    GatherOp(
        name="gather_swiglu",
        parameters=tuple(
            (name, "rows")
            for name in ("x", *(f"{w}{end}" for w in ("gate", "up") for end in ("", "_scales", "_biases")), "indices")
        ),
        ours=_gather_swiglu,
        twin=_mx_gather_swiglu,
        twin_text="`nn.silu(gate) * up` of two `mx.gather_qmm`",
        summary="gate, activation and product of the experts in one kernel",
        options={"group_size": 64, "bits": 4},
        tests=(
            *(case for bits in (4, 8) for case in cases_for_tests(*_SHAPES, group_size=32, bits=bits)),
            *cases_for_tests(*_SHAPES[1:3], **_MXFP4),
            *(case for options in _RARE for case in cases_for_tests(_SHAPES[1], **options)),
            *cases_for_tests(*_SHAPES[1:3], group_size=32, bits=4, activation="geglu"),
            *_TILED_TESTS,
        ),
        cases=(*_models((1, 4), bits=4), _GPT_OSS),
        stacks=2,
    ),
    GatherOp(
        name="gather_sum",
        parameters=tuple((name, "rows") for name in ("x", "w", "scales", "biases", "indices", "weights", "bias")),
        ours=_gather_sum,
        twin=_mx_gather_sum,
        twin_text="`(mx.gather_qmm * weights).sum(-2)`",
        summary="the chosen experts' products and their weighted sum in one kernel",
        options={"group_size": 64, "bits": 4},
        tests=(
            *cases_for_tests((1, 8, 16, 320, 10), (5, 9, 12, 128, 7), group_size=32, bits=4),
            *cases_for_tests((3, 1, 2, 96, 33), (2, 16, 16, 64, 3), group_size=32, bits=8),
            *cases_for_tests((1, 9, 16, 320, 9), **_MXFP4),
            *(case for options in _RARE for case in cases_for_tests((1, 9, 12, 64, 6), **options)),
            *cases_for_tests((11, 6, 7, 64, 33), (5, 16, 20, 64, 16), group_size=32, bits=4),
        ),
        cases=(
            Case("Qwen3-30B-A3B", (1, 8, 128, 768, 2048), {"bits": 4}, gpu_only=True),
            Case("Mixtral 8x7B", (1, 2, 8, 14336, 4096), {"bits": 4}, gpu_only=True),
            Case("Granite 3.1 1B-A400M", (1, 8, 32, 512, 1024), {"bits": 4}, quick=True),
            _GPT_OSS,
        ),
        sums=True,
    ),
    MixtureOp(
        name="mixture",
        parameters=tuple(
            (name, "rows")
            for name in (
                *("x", "logits"),
                *(f"{w}{end}" for w in _TRIPLES for end in ("", "_scales", "_biases")),
                *("shared_logits", "gate_bias", "up_bias", "down_bias", "router_bias"),
            )
        ),
        ours=_mixture,
        twin=_mx_mixture,
        twin_text="softmax, `mx.argpartition`, `mx.gather_qmm`, `mx.quantized_matmul` and a sum",
        summary="a mixture from its router's logits on, with a shared expert, in two launches",
        options={"group_size": 64, "bits": 4, "k": 2, "scores": "softmax", "parts": "shared"},
        tests=(
            *_mixtures((1, 8, 16, 320, 64), apple_only=False, group_size=32, bits=4),
            *_mixtures((1, 8, 16, 320, 64), group_size=32, bits=8, parts=""),
            *_mixtures(
                (3, 1, 2, 96, 32),
                apple_only=False,
                group_size=32,
                bits=4,
                scores="sigmoid",
                parts="bias",
                renormalize=True,
            ),
            *_mixtures((2, 15, 16, 64, 96), group_size=32, bits=4, renormalize=True, descending=False),
            *_mixtures((1, 9, 16, 64, 320), **_MXFP4, scores="chosen", parts="bias"),
            *_mixtures((2, 3, 65, 64, 64), group_size=32, bits=4, activation="geglu", descending=False),
            *(
                case
                for options in ({"group_size": 32, "bits": 4}, {"group_size": 32, "bits": 8, "parts": "bias"}, _MXFP4)
                for case in (
                    *_mixtures((1, 3, 5, 96, 64), is_normed="y", **options),
                    *_mixtures((1, 3, 5, 96, 96), is_normed="x", **options),
                )
            ),
            *_mixtures((1, 2, 5, 64, 64), group_size=32, bits=4, is_normed="x", parts=""),
        ),
        cases=(
            Case("Qwen3-Next", (1, 10, 512, 2048, 512), {"bits": 4, "k": 10, "renormalize": True}, gpu_only=True),
            Case("Granite 4.0 tiny", (1, 6, 64, 1536, 512), {"bits": 4, "k": 6}, quick=True),
            Case("Qwen3-30B-A3B", (1, 8, 128, 2048, 768), {"bits": 4, "k": 8, "parts": ""}, gpu_only=True),
        ),
    ),
    RouterOp(
        name="route_top_k",
        parameters=(("logits", "rows"), ("bias", "rows")),
        outputs=2,
        ours=_route,
        twin=_mx_route,
        twin_text="softmax or sigmoid, `mx.argpartition`, `mx.take_along_axis`",
        summary="a router's experts and their weights in one kernel",
        options={"k": 8, "scores": "softmax"},
        tests=tuple(
            Case("test", (tokens, experts), {"scores": scores, "renormalize": scores == "sigmoid", "descending": order})
            for scores in ("softmax", "sigmoid", "chosen")
            for tokens, experts, order in ((1, 8, True), (3, 60, True), (2, 128, False), (5, 257, True))
        ),
        cases=(
            Case("Qwen3-30B-A3B", (1, 128), {"renormalize": True, "descending": False}, quick=True),
            Case("Qwen3-30B-A3B", (64, 128), {"renormalize": True, "descending": False}),
            Case("Mixtral 8x7B", (1, 8), {"k": 2, "scores": "chosen"}),
            Case("DeepSeek-V3", (1, 256), {"scores": "sigmoid", "renormalize": True, "scale": 2.5}),
        ),
    ),
)
