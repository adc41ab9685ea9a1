"""Rows of the table of ops that multiply with a matrix of weights; `specs` puts them together."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..ops.matmul import (
    block_dequantize,
    block_matmul,
    block_quantize,
    gemv,
    matmul,
    quantized_matmul,
    quantized_matmuls,
    quantized_swiglu,
)
from . import gguf, normed
from .matmul_cases import (
    COMMON_KINDS,
    EXACT_TESTS,
    MODEL_LAYERS,
    QUANTIZED_TESTS,
    TILES,
    TRANSPOSED_TILES,
    model_cases,
    prompt_cases,
    test_cases,
    tile_tests,
    training_cases,
)
from .matrix_op import MatricesOp, MatrixOp, quantized_blocks
from .op import (
    FLOAT_MODES,
    Case,
    Op,
    all_rows,
)


def _quantized_swiglu(x, gate, gate_scales, gate_biases, up, up_scales, up_biases, is_normed=False, **options):
    both = (gate, gate_scales, gate_biases), (up, up_scales, up_biases)
    triples = [[a for a in triple if a is not None] for triple in both]
    return normed.swiglu(x, *triples, options) if is_normed else quantized_swiglu(x, *triples, **options)


def _matrices_of(arrays):
    """The triples of three matrices, and their biases if there are any."""
    triples = [[a for a in arrays[i : i + 3] if a is not None] for i in (0, 3, 6)]
    return triples, None if arrays[9] is None else arrays[9:]


def _quantized_matmuls(x, *arrays, is_normed=False, **options):
    triples, bias = _matrices_of(arrays)
    if is_normed:
        return normed.matmuls(x, triples, bias, options)
    return quantized_matmuls(x, triples, bias=bias, **options)


def _mx_matmuls(x, *arrays, is_normed=False, **options):
    triples, bias = _matrices_of(arrays)
    total = []
    if is_normed:
        x, *total = normed.row_of_mx(x, triples[0], bias, options)
        triples, bias = triples[1:], None if bias is None else bias[1:]
    products = [mx.quantized_matmul(x, *triple, transpose=True, **options) for triple in triples]
    return [*total, *(products if bias is None else [y + b for y, b in zip(products, bias)])]


def _mx_quantized_matmul(*arrays, exact=False, **options):
    return mx.quantized_matmul(*arrays, **options)


def _mx_swiglu(
    x,
    gate,
    gate_scales,
    gate_biases,
    up,
    up_scales,
    up_biases,
    activation="swiglu",
    is_normed=False,
    exact=False,
    **options,
):
    if is_normed:
        triple = [a for a in (gate, gate_scales, gate_biases) if a is not None]
        x, _ = normed.row_of_mx(x, triple, None, options)
    linear = mx.quantized_matmul(x, gate, gate_scales, gate_biases, **options)
    return gated_by_mx(linear, mx.quantized_matmul(x, up, up_scales, up_biases, **options), activation)


def gated_by_mx(gate: mx.array, up: mx.array, activation: str) -> mx.array:
    """A model's computation from two products, the twin of our gated ones."""
    return (nn.gelu_approx(gate) if activation == "geglu" else gate * mx.sigmoid(gate)) * up


def _mx_matmul(x, w, bias=None, transpose=True):
    return _mx_gemv(w, x, bias, transpose)


def _mx_gemv(w, x, bias=None, transpose=True):
    y = x @ (w.T if transpose else w)
    return y if bias is None else y + bias


def _mx_blocks(x, blocks, kind):
    return x @ _mx_dequantize(blocks, kind, x.dtype).T


def _mx_dequantize(blocks, kind, dtype=mx.float32):
    if kind not in ("q4_0", "q8_0"):
        return mx.array(gguf.weights(np.array(blocks), kind).astype(np.float32)).astype(dtype)
    parts = blocks.reshape(*blocks.shape[:-1], -1, gguf.KINDS[kind].bytes)
    d = mx.view(mx.contiguous(parts[..., :2]), mx.float16).astype(mx.float32)
    if kind == "q8_0":
        integers = mx.view(mx.contiguous(parts[..., 2:]), mx.int8).astype(mx.float32)
    else:
        integers = mx.concatenate([parts[..., 2:] & 15, parts[..., 2:] >> 4], axis=-1).astype(mx.float32) - 8
    return (d * integers).reshape(*blocks.shape[:-1], -1).astype(dtype)


def _mx_quantize(w, kind):
    return mx.array(quantized_blocks(np.array(w.astype(mx.float32)), kind))


MATRIX_OPS: tuple[Op, ...] = (
    MatrixOp(
        name="gemv",
        parameters=(("w", "rows"), ("x", "rows"), ("bias", "bias")),
        ours=gemv,
        twin=_mx_gemv,
        twin_text="`x @ w.T + bias`",
        summary="`mm.matmul` with the weights first",
        options={"transpose": True},
        tests=test_cases(
            (1, 4104, 9),
            (1, 777, 5),
            (2, 1024, 10),
            (2, 333, 3),
            (3, 640, 6),
            (4, 99, 7),
            (8, 520, 19),
            (7, 65, 9),
            (6, 712, 21),
            (6, 72, 8193),
            (7, 136, 5),
            (16, 264, 18),
            (11, 31, 3),
            (13, 72, 8199),
            (1, 32768, 2),
        )
        + test_cases(
            (1, 600, 72),
            (1, 300, 21),
            (2, 90, 64),
            (2, 77, 13),
            (4, 50, 24),
            (3, 64, 9),
            (8, 33, 40),
            (5, 20, 7),
            (16, 24, 16),
            (9, 17, 5),
            (1, 8192, 8),
            transpose=False,
        )
        + test_cases((1, 512, 6), label="strided")
        + test_cases(
            (1, 512, 17),
            (1, 1024, 9),
            (1, 8, 3),
            (1, 600, 9),
            (1, 712, 7),
            (1, 1096, 4),
            (1, 1416, 10),
            (1, 2048, 6),
            gpu="nvidia",
        )
        # GPUs leave them to mx: in the simulator they test a kernel with rows beyond its first block of them.
        + test_cases((19, 264, 17), (18, 31, 3), cpu_only=True),
        cases=model_cases((1, 2, 4, 8, 16))
        + prompt_cases((128, 896, 896), (512, 896, 896))
        + training_cases((512, 896, 896), label="Qwen2.5-0.5B training")
        + training_cases((512, 896, 8), (512, 8, 896), label="Qwen2.5-0.5B LoRA"),
    ),
    MatrixOp(
        name="matmul",
        parameters=(("x", "rows"), ("w", "rows"), ("bias", "bias")),
        ours=matmul,
        twin=_mx_matmul,
        twin_text="`x @ w.T + bias`",
        summary="rows times a dense matrix",
        options={"transpose": True},
        tests=test_cases((1, 520, 9), (7, 136, 21))
        + test_cases((2, 90, 40), transpose=False)
        # Few GPUs have tiles, and for few rows: in the simulator these test a kernel with many rows.
        + test_cases(*TILES, cpu_only=True)
        + test_cases(*TRANSPOSED_TILES, cpu_only=True, transpose=False),
        cases=(Case("Qwen2.5-0.5B prompt", (512, 896, 896), cpu_only=True, quick=True),),
    ),
    MatrixOp(
        name="quantized_matmul",
        parameters=all_rows("x", "w", "scales", "biases"),
        ours=quantized_matmul,
        twin=_mx_quantized_matmul,
        twin_text="`mx.quantized_matmul`",
        summary="rows times quantized weights",
        options={"group_size": 64, "bits": 4},
        tests=QUANTIZED_TESTS
        + tile_tests(TILES, transpose=True)
        + tile_tests(TRANSPOSED_TILES, transpose=False)
        + EXACT_TESTS,
        cases=model_cases((1, 2, 4, 8, 16), bits=4)
        + model_cases((1, 4), bits=8)
        + prompt_cases((128, 896, 896), (512, 896, 128), bits=4)
        + tuple(
            Case("Llama-3.1-8B prompt", (rows, columns, outputs), {"bits": 4}, gpu_only=True, apple_only=True)
            for rows in (32, 512, 2048)
            for columns, outputs in MODEL_LAYERS["Llama-3.1-8B"][:4]
        )
        + training_cases((32, 896, 896), label="Qwen2.5-0.5B QLoRA", bits=4),  # mx takes seconds in half types
        layout="affine",
        frozen=("w", "scales", "biases"),
    ),
    MatricesOp(
        name="quantized_matmuls",
        parameters=(
            ("x", "rows"),
            *((f"w{i}{end}", "rows") for i in range(3) for end in ("", "_scales", "_biases")),
            *((f"bias{i}", "rows") for i in range(3)),
        ),
        outputs=3,
        ours=_quantized_matmuls,
        twin=_mx_matmuls,
        twin_text="several `mx.quantized_matmul`",
        summary="one row times several quantized matrices in one launch",
        options={"group_size": 64, "bits": 4},
        tests=(
            *(
                Case("test", shape, {"bits": bits, "group_size": 32})
                for bits in (4, 8)
                for shape in ((1, 320, 9, 4, 1), (1, 64, 38, 3, 16))
            ),
            Case("test", (1, 1088, 9, 5, 2), {"mode": "mxfp4", "group_size": 32, "bits": 4}),
            *(
                Case("test", (1, 96, 96, 38, 3), {"is_normed": True, "group_size": 32, **options})
                for options in ({"bits": 4}, {"bits": 8}, {"mode": "mxfp4", "bits": 4})
            ),
        ),
        cases=(
            Case("Qwen3-30B-A3B", (1, 2048, 4096, 512, 512), quick=True),
            Case("Llama 3.1 8B", (1, 4096, 4096, 1024, 1024), gpu_only=True),
        ),
    ),
    MatrixOp(
        name="quantized_swiglu",
        parameters=all_rows("x", "gate", "gate_scales", "gate_biases", "up", "up_scales", "up_biases"),
        ours=_quantized_swiglu,
        twin=_mx_swiglu,
        twin_text="`nn.silu(gate) * up` of two `mx.quantized_matmul`",
        summary="gate, activation and product in one kernel",
        options={"group_size": 64, "bits": 4},
        tests=tuple(
            case
            for bits in (4, 8)
            for case in test_cases((1, 2880, 9), (1, 64, 38), (2, 576, 5), (4, 320, 6), (7, 128, 3), bits=bits)
        )
        + tuple(case for bits in (2, 3, 5, 6) for case in test_cases((1, 1088, 9), (9, 576, 21), bits=bits))
        + tuple(
            case
            for mode, bits, group_size in FLOAT_MODES
            for case in test_cases((1, 1088, 9), (9, 608, 21), group_size=group_size, bits=bits, mode=mode)
        )
        + EXACT_TESTS
        + tuple(
            case
            for bits in (4, 8)
            for case in test_cases((1, 320, 9), (2, 576, 5), (4, 320, 6), group_size=32, bits=bits, gpu="nvidia")
        )
        + test_cases((1, 2880, 9), (1, 4672, 9), (1, 64, 38), gpu="nvidia")
        + tile_tests(TILES)
        + test_cases((1, 2880, 9), (4, 320, 6), activation="geglu")
        + test_cases((2, 576, 5), bits=8, activation="geglu")
        + tuple(
            case
            for options in ({"bits": 4}, {"bits": 8}, {"mode": "mxfp4", "bits": 4})
            for case in test_cases((1, 96, 96), is_normed=True, group_size=32, **options)
        ),
        cases=tuple(
            Case(
                model,
                (1, columns, outputs),
                {"bits": 4, **({"activation": "geglu"} if model.startswith("Gemma") else {})},
                quick=model == "Llama-3.2-1B",
                gpu_only=model != "Llama-3.2-1B",
            )
            for model, columns, outputs in (
                ("Llama-3.2-1B", 2048, 8192),
                ("Llama-3.1-8B", 4096, 14336),
                ("Qwen3-0.6B", 1024, 3072),
                ("Qwen3-8B", 4096, 12288),
                ("Qwen2.5-0.5B", 896, 4864),
                ("Gemma 3 1B", 1152, 6912),
            )
        ),
        layout="gated",
    ),
    MatrixOp(
        name="block_matmul",
        parameters=all_rows("x", "blocks"),
        ours=block_matmul,
        twin=_mx_blocks,
        twin_text="`x @ w.T`, `w` dequantized at each call",
        summary="rows times the weights of a GGUF file",
        # Of 4000 draws of 1x96x38 in q8_0 the worst was 5.9 units off; mx's own worst was 8.0.
        units=8,
        tests=tuple(
            case
            for kind in ("q4_0", "q8_0")
            for case in (
                *test_cases((1, 2880, 9), (1, 96, 38), (2, 1056, 5), (5, 64, 7), kind=kind),
                *test_cases((1, 96, 5), kind=kind, label="strided"),
            )
        )
        + tuple(case for kind in ("q4_k", "q5_k", "q6_k") for case in test_cases((1, 1280, 9), (5, 256, 7), kind=kind))
        + tuple(
            case
            for kind in ("q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4")
            for case in test_cases((1, 768, 6), kind=kind)
        )
        + tuple(
            case
            for kind in sorted(gguf.KINDS)
            for case in test_cases(
                *((rows, 256, 21) for rows in ((20, 40) if kind in COMMON_KINDS else (20,))), apple_only=True, kind=kind
            )
        ),
        cases=tuple(
            Case("Llama-3.1-8B", (1, columns, outputs), {"kind": kind}, quick=outputs == 4096, gpu_only=outputs != 4096)
            for kind in ("q4_0", "q8_0")
            for columns, outputs in ((4096, 4096), (4096, 14336))
        ),
        layout="blocks",
    ),
    MatrixOp(
        name="block_quantize",
        parameters=all_rows("w"),
        ours=block_quantize,
        twin=_mx_quantize,
        twin_text="the `gguf` package",
        summary="weights to GGUF blocks, and back",
        tests=test_cases((9, 96, 0), kind="q4_0") + test_cases((9, 96, 0), kind="q8_0"),
        # The twin computes on the host, where each call would wait for the GPU.
        cases=(Case("Llama-3.1-8B", (4096, 4096, 0), {"kind": "q4_0"}, quick=True, cpu_only=True),),
        layout="block",
    ),
    MatrixOp(
        name="block_dequantize",
        parameters=all_rows("blocks"),
        ours=block_dequantize,
        twin=_mx_dequantize,
        twin_text="the `gguf` package",
        summary="weights to GGUF blocks, and back",
        tests=tuple(
            Case("test", (9, 96, 0), {"kind": kind, "dtype": dtype})
            for kind in ("q4_0", "q8_0")
            for dtype in (mx.float32, mx.float16, mx.bfloat16)
        )
        + tuple(Case("test", (3, 256, 0), {"kind": kind, "dtype": mx.float32}) for kind in sorted(gguf.KINDS)),
        # The twin computes on the host, where each call would wait for the GPU.
        cases=(Case("Llama-3.1-8B", (4096, 4096, 0), {"kind": "q4_0"}, quick=True, cpu_only=True),),
        layout="block",
    ),
)
