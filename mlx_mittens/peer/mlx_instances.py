"""Instantiations of MLX's own Metal kernels that MLX chooses for common shapes, and their threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..apple.machine_code import Request
from .mlx_sources import instance

_SIMD = 32
_HALVES = ("half", "bfloat16_t")
_ALL = ("float", *_HALVES)
_QUANTIZED = ((64, 4), (64, 8), (32, 4))  # group size, bits
# Of attention: no mask, sinks or causal order; then how many parts the keys are split into.
_VECTOR_CONSTANTS: dict[int, object] = {20: False, 21: False, 22: False, 23: False, 24: False, 25: False}
_FULL_CONSTANTS: dict[int, object] = {200: True, 201: True, 300: False, 301: False, 302: False, 303: False}


@dataclass(frozen=True)
class Instance:
    """One instantiation of a kernel of MLX's.

    Attributes:
        op: Our op that does the same.
        file: The source that has it, as the front end knows it.
        kernel: Its name.
        threads: Of a threadgroup.
        constants: Values of its function constants, by index.
    """

    op: str
    file: str
    kernel: str
    threads: int
    constants: tuple[tuple[int, object], ...] = ()


Row = tuple[str, str, str, tuple[object, ...], int, dict[int, object]]


def instances(op: str | None = None) -> list[Instance]:
    """Instances of an op, or all; each is registered as a source of the front end."""
    found = []
    for of, family, function, template, threads, constants in _rows():
        if op in (None, of):
            file, kernel = instance(family, function, *template)
            found.append(Instance(of, file, kernel, threads, tuple(constants.items())))
    return found


def requests(op: str | None = None) -> list[Request]:
    """The same, to be compiled for Apple GPUs."""
    return [Request(each.file, each.kernel, each.threads, each.constants) for each in instances(op)]


def ops() -> list[str]:
    """The ops that `instances` knows."""
    return list(dict.fromkeys(row[0] for row in _rows()))


def _rows() -> Iterator[Row]:
    for dtype in _ALL:
        accumulator = () if dtype == "float" else ("float",)
        for function in ("softmax_single_row", "softmax_looped"):
            yield "softmax", "softmax", function, (dtype, *accumulator), 1024, {}
        for simdgroups in (8, 4):
            yield "gemv", "gemv", "gemv", (dtype, simdgroups, 1, 1, 32, 4, 4, False, False), simdgroups * _SIMD, {}
        for rows, columns in ((8, 4), (4, 8)):
            yield "gemv", "gemv", "gemv_t", (dtype, 1, 16, rows, columns, 4, 4, False, False), 16 * _SIMD, {}
        yield from _quantized(dtype)
        yield from _attention(dtype)


def _quantized(dtype: str) -> Iterator[Row]:
    def row(function: str, template: tuple[object, ...], threads: int, family: str = "quantized") -> Row:
        return "quantized_matmul", family, function, template, threads, {}

    for group, bits in _QUANTIZED:
        yield row("affine_qmv_fast", (dtype, group, bits, False, False), 2 * _SIMD)
    yield row("affine_qmv", (dtype, 64, 4, False), 2 * _SIMD)
    yield row("affine_qmv_quad", (dtype, 64, 4, 128, False), _SIMD)
    for vectors in (2, 3, 4, 5):
        yield row("affine_qmv_wide", (dtype, 64, 4, vectors, 8, False), 2 * _SIMD)
    yield row("affine_qvm", (dtype, 64, 4, False), 2 * _SIMD)
    yield row("affine_qvm_split_k", (dtype, 64, 4, 8), 2 * _SIMD)
    for bits in (4, 8):
        yield row("affine_qmm_t", (dtype, 64, bits, True, False), 4 * _SIMD)
    yield row("affine_qmm_t_splitk", (dtype, 64, 4, True), 4 * _SIMD)
    yield row("gemm_splitk_accum", ("float", dtype), 1024, "splitk")


def _attention(dtype: str) -> Iterator[Row]:
    def row(function: str, template: tuple[object, ...], threads: int, parts: int = 0) -> Row:
        constants = _VECTOR_CONSTANTS | {26: parts}
        return "scaled_dot_product_attention", "sdpa_vector", function, template, threads, constants

    for width in (64, 96, 128, 256):
        yield row("sdpa_vector", (dtype, width, width), 1024)
    for width in (64, 128, 256):
        yield row("sdpa_vector_2pass_1", (dtype, width, width), 8 * _SIMD, 128)
        yield row("sdpa_vector_2pass_2", (dtype, width), 1024, 128)
    for group, width, shared in ((8, 64, 8), (8, 128, 4), (16, 128, 2)):
        yield row("sdpa_vector_2pass_1_gqa", (dtype, width, width, group, shared), group * _SIMD, 128)
    for width, columns in ((64, 32), (80, 32), (128, 16)):
        template = (dtype, 32, columns, width, width, 4, 1, dtype, "float")
        op = "scaled_dot_product_attention"
        yield op, "steel_attention", "attention", template, 4 * _SIMD, _FULL_CONSTANTS
