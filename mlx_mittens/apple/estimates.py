"""Estimates the work of launches without machine code, from their bytes and operations.

Instructions are counted in the inner loops of MLX's kernels, as their sources have them. The published measurements
that the model is held to are predicted with the same functions (`bench/apple/works.py`).
"""

from __future__ import annotations

import math

from .model import LANES, LINE_BYTES, Instructions, Work

ONE_FLOAT = Instructions(floats=1)


def elementwise(values: float, nbytes: float, each: Instructions = ONE_FLOAT) -> Work:
    """A kernel that maps values one by one, 1024 threads a threadgroup.

    Args:
        values: How many are written.
        nbytes: Bytes that are read and written.
        each: Instructions of a simdgroup for 32 values beside a load, a store and addresses.
    """
    simdgroups = values / LANES
    return Work(
        threadgroups=max(1.0, values / 1024),
        threads=1024,
        lines=nbytes / LINE_BYTES,
        instructions=simdgroups * (each + Instructions(loads=1, stores=1, integers=3)),
        rounds=1,
    )


def norm(rows: int, columns: int, nbytes: float) -> Work:
    """A norm of rows: a threadgroup a row, eight values a thread.

    Args:
        rows: How many.
        columns: Values of a row.
        nbytes: Bytes that are read and written.
    """
    threads = min(1024, math.ceil(columns / 256) * 32)
    return Work(
        threadgroups=rows,
        threads=threads,
        lines=nbytes / LINE_BYTES,
        instructions=rows * columns / LANES * Instructions(floats=6, loads=0.75, stores=0.25)
        + rows * threads / LANES * Instructions(reductions=4, rsqrts=1, loads=2, stores=2, integers=12, control=10),
        rounds=3,
    )


def vector_product(rows: int, columns: int, size: int, rounds_a_step: int = 1) -> Work:
    """MLX's gemv: 8 simdgroups of 4 rows of the matrix, a lane takes 4 neighbouring values of each row at a time.

    Args:
        rows: Of the matrix.
        columns: Of the matrix.
        size: Bytes of a value.
        rounds_a_step: Loads that a step waits for one after another.
    """
    steps = columns / 128
    each = Instructions(floats=16, loads=5, integers=14, multiplies=2, control=8)
    return Work(
        threadgroups=math.ceil(rows / 32),
        threads=256,
        half_registers=103 if size == 4 else 91,
        lines=(rows * columns + columns + rows) * size / LINE_BYTES,
        summed_lines=(rows * columns + math.ceil(rows / 32) * columns) * size / LINE_BYTES,
        instructions=math.ceil(rows / 4) * steps * each,
        rounds=rounds_a_step * steps,
    )


def matrix_product(batch: int, m: int, n: int, k: int, dtype: str, size: int, tensor_units: bool = False) -> Work:
    """MLX's steel GEMM with 64 rows of the product in a threadgroup, 64 or 32 columns, 16 of K at a time.

    Four simdgroups of 32x32 (float) or two of 64x32 (half types): 8 or 12 fragments for 16 or 32 multiplies.

    Args:
        batch: Products.
        m: Rows of a product.
        n: Columns of a product.
        k: Terms of a sum.
        dtype: Of the operands.
        size: Bytes of a value.
        tensor_units: Whether it is written for tensor units, where the chip has them.
    """
    columns = 64 if n > 32 else 32
    half = dtype != "float32"
    simdgroups = 2 if half else 4
    tiles = batch * math.ceil(m / 64) * math.ceil(n / columns)
    multiplies = tiles * 8 * (columns / 8) * math.ceil(k / 8)
    steps = math.ceil(k / 16)
    # Each step copies 64 + columns rows of 16 values to threadgroup memory, four or eight values an instruction.
    copies = tiles * steps * (64 + columns) * 16 / (8 if half else 4) / LANES
    return Work(
        threadgroups=tiles,
        threads=LANES * simdgroups,
        half_registers=144,  # MLX's steel attention, the nearest of its kernels that was compiled, has 129 to 143
        lines=batch * (m * k + k * n + m * n) * size / LINE_BYTES,
        fragment_lines=batch * m * n * size / LINE_BYTES,
        summed_lines=tiles * (64 * k + columns * k + 64 * columns) * size / LINE_BYTES,
        instructions=Instructions(
            matrix=multiplies,
            fragments=multiplies * (0.375 if half else 0.5),
            loads=copies,
            stores=copies,
            integers=tiles * simdgroups * steps * 6,
            control=tiles * simdgroups * steps * 4,
        ),
        rounds=steps,
        matrix_dtype=dtype,
        tensor_units=tensor_units,
    )


def unit_product(
    batch: int,
    m: int,
    n: int,
    k: int,
    dtype: str,
    size: int,
    tile: tuple[int, int] = (128, 128),
    parts: int = 1,
    along_k: int = 1,
) -> Work:
    """MLX's steel GEMM on matrix units, the launch that computes products.

    A simdgroup has 32x32 of the product. It reads its operands from memory as it multiplies them, 32 of K at a time,
    and a load of a lane is of four values of a row of 16.

    Args:
        batch: Products.
        m: Rows of a product.
        n: Columns of a product.
        k: Terms of a sum.
        dtype: Of the operands; `int8` stands for whatever kernel has the same tiles of bytes.
        size: Bytes of a value.
        tile: Rows and columns of a threadgroup.
        parts: Parts of K. Each leaves a sum of its own, in float32.
        along_k: SIMD-groups of a threadgroup that share its tile and have each a part of K.
    """
    rows, columns = tile
    simdgroups = rows * columns // 32**2
    result = 4 * parts if parts > 1 else size
    k_of_one = math.ceil(k / (parts * along_k))
    simdgroups *= along_k
    batch_of_parts = batch * parts
    tiles = batch_of_parts * math.ceil(m / rows) * math.ceil(n / columns)
    steps = math.ceil(k_of_one / 32)
    read = (rows + columns) * math.ceil(k / parts) * size
    return Work(
        threadgroups=tiles,
        threads=LANES * simdgroups,
        lines=batch * ((m + n) * k * size + m * n * result) / LINE_BYTES,
        summed_lines=tiles * (read + rows * columns * (4 if parts > 1 else size)) / LINE_BYTES,
        instructions=tiles
        * simdgroups
        * Instructions(matrix=64 * steps, loads=16 * steps, control=2 * steps, integers=6 * steps, stores=8),
        rounds=steps,
        matrix_dtype=dtype,
        tensor_units=True,
    )
