"""MLX's kernels for the M5's matrix units in the simulator, against float64."""

import struct

import numpy as np
import pytest
from helpers.simulate import run
from helpers.tensor_ops import ints, longs, mlx_kernel, near, product
from helpers.tolerances import FLOAT16, FLOAT16_TWICE

from mlx_mittens.simulator import Fault


@pytest.fixture(params=[False, True], ids=["m5", "shuffled"])
def shuffled(request):
    return request.param


GEMM = ["utils.h", "steel/gemm/gemm_nax.h"]


def assumes_its_layout(*arguments, **options):
    """Which a shuffled one shows: MLX's kernels fill operands by the places of an M5."""
    with pytest.raises(Fault, match=r"nax\.h:\d+: the left operand .*never asked"):
        run(*arguments, **options, shuffled_tensors=True)


def gemm_params(m, n, k, tile_m, tile_n, blocks):
    tiles = -(-n // tile_n), -(-m // tile_m)
    return struct.pack("<8i3q3i4x", m, n, k, k, k, n, *tiles, 0, 0, 0, 0, blocks, 1)


def test_mlx_fused_products(rng):
    m, n, k = 70, 64, 80
    file = mlx_kernel(
        "nax_fused.metal", [*GEMM, "steel/gemm/kernels/steel_gemm_fused_nax.h"],
        "gemm, half, 64, 64, 64, 2, 2, false, true, float",
    )  # fmt: skip
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((n, k)).astype(np.float16)
    c = np.zeros((m, n), np.float16)
    data = [("input", a), ("input", b), ints(0), ("output", c), gemm_params(m, n, k, 64, 64, k // 64)]
    constants = {10: False, 100: False, 110: False, 200: False, 201: True, 202: False}
    where = (file, "test", [*data, ints(0), ints(0), longs(0)], (1, 2, 1), (32, 2, 2))
    run(*where, constants=constants)
    near(c, product(a, b, False, True), FLOAT16)
    assumes_its_layout(*where, constants=constants)


def test_mlx_thin_products_ask_for_their_layout(shuffled, rng):
    """They load and store tensors."""
    m, n, k = 20, 70, 130
    file = mlx_kernel(
        "nax_thin.metal",
        [*GEMM, "steel/gemm/kernels/steel_gemm_thin_nax.h"],
        "gemm_thin_nax, half, 2, 2, 1, 2, 2, true",
    )
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((n, k)).astype(np.float16)
    c = np.zeros((m, n), np.float16)
    data = [("input", a), ("input", b), ints(0), ("output", c), gemm_params(m, n, k, 32, 64, 2), ints(0)]
    constants = {100: False, 110: False, 200: False, 201: False, 202: False}
    run(file, "test", data, (2, 1, 1), 128, constants=constants, shuffled_tensors=shuffled)
    near(c, product(a, b, False, True), FLOAT16)


def test_mlx_quantized_products(rng):
    m, n, k = 64, 64, 128
    file = mlx_kernel(
        "nax_quantized.metal",
        [*GEMM, "quantized_nax.h"],
        "affine_qmm_t_nax, half, 64, 4, true, false, 64, 64, 64, 2, 2",
    )
    q = rng.integers(0, 16, (n, k)).astype(np.uint32)
    packed = np.bitwise_or.reduce([q[:, i::8] << np.uint32(4 * i) for i in range(8)])
    scales, biases = ((0.1 * rng.standard_normal((n, k // 64))).astype(np.float16) for _ in range(2))
    x, y = rng.standard_normal((m, k)).astype(np.float16), np.zeros((m, n), np.float16)
    weights = q * np.repeat(scales.astype(np.float64), 64, 1) + np.repeat(biases.astype(np.float64), 64, 1)
    data = [("input", packed), ("input", scales), ("input", biases), ("input", x), ("output", y), ints(k), ints(n)]
    data += [ints(m), ints(0), ints(0), longs(0), ints(0), ints(0), longs(0), longs(0), longs(0)]
    where = (file, "test", data, (1, 1, 1), (32, 2, 2))
    run(*where)
    near(y, x.astype(np.float64) @ weights.T, FLOAT16_TWICE)
    assumes_its_layout(*where)


def test_mlx_attention(rng):
    heads, length, size, queries, keys = 1, 70, 64, 64, 32
    file = mlx_kernel(
        "nax_attention.metal", ["utils.h", "steel/attn/kernels/steel_attention_nax.h"],
        f"attention_nax, half, {queries}, {keys}, {size}, {size}, 4, 1, half, float",
    )  # fmt: skip
    q, k, v = (rng.standard_normal((1, heads, length, size)).astype(np.float16) for _ in range(3))
    out = np.zeros_like(q)
    rest = (length % queries, length % keys)
    params = struct.pack("<6if7i", 1, heads, size, length, length, 1, size**-0.5, -(-length // queries),
                         -(-length // keys), length // queries, length // keys, *rest, 0)  # fmt: skip
    params += longs(*(heads * length * size, length * size, size) * 4)
    constants = {200: False, 201: False, 300: False, 301: True, 302: False, 303: False}
    data = [("input", q), ("input", k), ("input", v), ("output", out), params]
    where = (file, "test", data, (-(-length // queries), heads, 1), (32, 4, 1))
    run(*where, constants=constants)
    scores = np.einsum("bhqd,bhkd->bhqk", *(a.astype(np.float64) for a in (q, k))) * size**-0.5
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    near(out, weights / weights.sum(-1, keepdims=True) @ v.astype(np.float64), FLOAT16_TWICE)
    assumes_its_layout(*where, constants=constants)
