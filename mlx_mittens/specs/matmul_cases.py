"""The shapes that products are tested on, and the layers of models that they are timed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from .op import (
    FLOAT_MODES,
    Case,
)


def test_cases(
    *shapes: tuple[int, int, int],
    label: str = "test",
    gpu: Literal["apple", "nvidia"] = "apple",
    cpu_only: bool = False,
    apple_only: bool = False,
    **options: Any,
) -> tuple[Case, ...]:
    return tuple(Case(label, shape, options, gpu=gpu, cpu_only=cpu_only, apple_only=apple_only) for shape in shapes)


# The layers that one token passes, as (columns, outputs), and the last one.
MODEL_LAYERS = {
    "Llama-3.2-1B": ((2048, 2048), (2048, 512), (2048, 8192), (8192, 2048), (2048, 128256)),
    "Llama-3.1-8B": ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096), (4096, 128256)),
    "Qwen3-0.6B": ((1024, 2048), (1024, 1024), (2048, 1024), (1024, 3072), (3072, 1024), (1024, 151936)),
    "Qwen3-8B": ((4096, 12288), (12288, 4096), (4096, 151936)),
    "Qwen2.5-0.5B": ((896, 896), (896, 128), (896, 4864), (4864, 896), (896, 151936)),
    "Gemma 3 1B": ((1152, 1024), (1152, 256), (1024, 1152), (1152, 6912), (6912, 1152), (1152, 262144)),
    "gpt-oss 20B": ((2880, 4096), (2880, 512), (4096, 2880), (2880, 201088)),
}

# Cases that are timed on a CPU too, and in the benchmark's short form.
_ON_CPU = {("Llama-3.1-8B", 4096, 4096), ("Llama-3.1-8B", 4096, 14336), ("Qwen2.5-0.5B", 896, 4864)}
_QUICK = {("Llama-3.1-8B", 4096, 4096)}


# Training of a layer, and of an adapter's two products, on one batch.
def training_cases(*shapes: tuple[int, int, int], label: str, **options: Any) -> tuple[Case, ...]:
    return tuple(Case(label, shape, options, vjp=True, cpu_only=True) for shape in shapes)


# A prompt through a layer, small enough that mx needs seconds: its products in half types are slow on a CPU.
def prompt_cases(*shapes: tuple[int, int, int], **options: Any) -> tuple[Case, ...]:
    return tuple(Case("Qwen2.5-0.5B prompt", shape, options, cpu_only=True) for shape in shapes)


def _timed_on_cpu(model: str, rows: int, columns: int, outputs: int) -> bool:
    """Of several rows one large layer, since mx needs minutes for all of them."""
    small = columns < 1024
    return (model, columns, outputs) in _ON_CPU and (small or rows == 1 or (rows == 8 and outputs == columns))


def model_cases(rows: tuple[int, ...] = (1,), **options: Any) -> tuple[Case, ...]:
    """The layers of the models for one row, and some of them for more rows."""
    return tuple(
        Case(
            model,
            (m, columns, outputs),
            options,
            quick=m == 1 and (model, columns, outputs) in _QUICK,
            gpu_only=not _timed_on_cpu(model, m, columns, outputs),
        )
        for m in rows
        for model, layers in MODEL_LAYERS.items()
        for columns, outputs in layers
        if m == 1 or (model, columns, outputs) in _ON_CPU
    )


# Tiles of 32 and of 64 rows, with tails of rows, columns and outputs.
TILES = ((19, 160, 133), (37, 160, 69))
TRANSPOSED_TILES = ((19, 41, 160), (37, 72, 96))


def tile_tests(shapes: Sequence[tuple[int, int, int]], **options: Any) -> tuple[Case, ...]:
    """Cases in each format. The first shape is for tiles of 32 rows: 2, 3, 5 and 6 bits have no other tiles."""
    formats: list[tuple[dict[str, Any], bool]] = [
        *(({"group_size": 32, "bits": bits}, bits in (4, 8)) for bits in (2, 3, 4, 5, 6, 8)),
        *(({"group_size": size, "bits": bits, "mode": mode}, True) for mode, bits, size in FLOAT_MODES),
    ]
    return tuple(
        case
        for more, both in formats
        for case in test_cases(*(shapes if both else shapes[:1]), apple_only=True, **options, **more)
    )


QUANTIZED_TESTS = tuple(
    case
    for bits in (4, 8)
    for case in (
        *test_cases((1, 2880, 9), (1, 96, 37), (2, 576, 10), (3, 1024, 7), (7, 192, 38), (16, 320, 9), (1, 8448, 3),
                transpose=True, group_size=32, bits=bits),
        *test_cases((1, 4096, 64), (4, 70, 320), (13, 20, 32), transpose=False, group_size=32, bits=bits),
        *test_cases((1, 4096, 64), (2, 33, 320), (4, 70, 64), (8, 41, 96), (13, 20, 32), transpose=False, group_size=32,
                bits=bits, gpu="nvidia"),
        *test_cases((1, 256, 6), transpose=True, group_size=128, bits=bits),
        *test_cases((11, 448, 37), transpose=True, group_size=64, bits=bits),
        *test_cases((1, 256, 6), transpose=True, group_size=64, bits=bits, label="strided"),
    )
) + tuple(
    case
    for bits in (2, 3, 5, 6)
    for case in (
        *test_cases((1, 1088, 9), (3, 576, 6), (9, 608, 37), transpose=True, group_size=32, bits=bits),
        *test_cases((9, 41, 96), transpose=False, group_size=32, bits=bits),
    )
) + tuple(
    case
    for mode, bits, group_size in FLOAT_MODES
    for case in (
        *test_cases((1, 1088, 9), (3, 576, 6), (9, 608, 37), transpose=True, group_size=group_size, bits=bits,
                    mode=mode),
        *test_cases((9, 41, 96), transpose=False, group_size=group_size, bits=bits, mode=mode),
    )
) + tuple(
    case
    for bits in (4, 8)
    for case in (
        *test_cases((1, 2880, 9), (2, 576, 10), (3, 1024, 7), (5, 640, 5), (11, 320, 9), transpose=True, group_size=32,
                bits=bits, gpu="nvidia"),
        *test_cases((6, 640, 35), (11, 448, 37), transpose=True, group_size=64, bits=bits, gpu="nvidia"),
    )
) + test_cases((1, 2880, 9), (1, 4672, 9), (1, 576, 21), (1, 128, 4099), transpose=True, gpu="nvidia")  # fmt: skip

# GGUF kinds with kernels for several rows of x.
COMMON_KINDS = ("q4_0", "q8_0", "q4_k", "q5_k", "q6_k")

# Rows that share the weights, each with the sums that it has alone.
EXACT_TESTS = tuple(
    Case("test", (rows, 576, 6), {"exact": True, **options}, gpu_only=True, apple_only=True)
    for options in ({"bits": 4}, {"bits": 8}, {"mode": "mxfp4", "bits": 4, "group_size": 32})
    for rows in (2, 4, 8)
)
