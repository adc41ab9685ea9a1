"""Rows of the table of ops for mixtures of experts; `specs` puts them into the table."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..ops import moe
from . import matmul, normed
from .gathered import GatherOp, MixtureOp, RouterOp, mx_route
from .op import (
    Case,
    Op,
    all_rows,
    cases_for_tests,
)


def _route(logits, bias, k, **options):
    return moe.route_top_k(logits, k, bias, **options)


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
    indices, weights = mx_route(logits, others["router_bias"], k, scores, renormalize, descending)
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
        parameters=all_rows("x", "w", "scales", "biases", "indices"),
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
        parameters=all_rows("x", "w", "indices"),
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
        parameters=all_rows(
            "x", *(f"{w}{end}" for w in ("gate", "up") for end in ("", "_scales", "_biases")), "indices"
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
        parameters=all_rows("x", "w", "scales", "biases", "indices", "weights", "bias"),
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
        parameters=all_rows(
            *("x", "logits"),
            *(f"{w}{end}" for w in _TRIPLES for end in ("", "_scales", "_biases")),
            *("shared_logits", "gate_bias", "up_bias", "down_bias", "router_bias"),
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
        parameters=all_rows("logits", "bias"),
        outputs=2,
        ours=_route,
        twin=mx_route,
        twin_text="softmax or sigmoid, `mx.argpartition`, `mx.take_along_axis`",
        summary="a router's experts and their weights in one kernel",
        options={"k": 8, "scores": "softmax"},
        tests=tuple(
            Case(
                "test",
                (tokens, experts),
                {"scores": scores, "renormalize": scores in ("sigmoid", "sqrtsoftplus"), "descending": order},
            )
            for scores in ("softmax", "sigmoid", "chosen", "sqrtsoftplus")
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
