"""MLX's kernels for the M5's matrix units that gather, cut and chain products, in the simulator, against float64.

All of them assume the layout of an M5: a shuffled one ends in a fault that names the line.
"""

import struct

import numpy as np
import pytest
from helpers.simulate import run
from helpers.tensor_ops import ints, longs, mlx_kernel, near
from helpers.tolerances import FLOAT16, FLOAT16_TWICE, SUM

from mlx_mittens.simulator import Fault

GEMM = ["utils.h", "steel/gemm/gemm_nax.h"]
QUANTIZED = [*GEMM, "quantized_nax.h"]


def check(file, data, groups, threads, constants=None, line=r"nax\.h:\d+: the left operand"):
    """Runs it in the layout of an M5, and then in another, which it does not ask for."""
    run(file, "test", data, groups, threads, constants=constants)
    with pytest.raises(Fault, match=rf"{line} .*never asked"):
        run(file, "test", data, groups, threads, constants=constants, shuffled_tensors=True)


def halves(rng, *shape):
    return rng.standard_normal(shape).astype(np.float16)


def quantized(rng, *shape):
    """Packed weights of 4 bits, scales and biases of 64, and the weights."""
    q = rng.integers(0, 16, shape).astype(np.uint32)
    packed = np.bitwise_or.reduce([q[..., i::8] << np.uint32(4 * i) for i in range(8)])
    groups = (*shape[:-1], shape[-1] // 64)
    scales, biases = (0.1 * halves(rng, *groups) for _ in range(2))
    wide = [np.repeat(a.astype(np.float64), 64, -1) for a in (scales, biases)]
    return [packed, scales, biases], q * wide[0] + wide[1]


def inputs(*arrays):
    return [("input", a) for a in arrays]


def test_chosen_quantized_products(rng):
    m, n, k, matrices = 20, 64, 64, 3
    template = "affine_gather_qmm_t_nax, half, 64, 4, true, 64, 64, 64, 2, 2"
    file = mlx_kernel("nax_gather_qmm.metal", QUANTIZED, template)
    packed, weights = quantized(rng, matrices, n, k)
    x, y = halves(rng, 2, m, k), np.zeros((3, m, n), np.float16)
    of_x, of_w = np.array([1, 0, 1], np.uint32), np.array([2, 0, 0], np.uint32)
    data = [*inputs(*packed, x, of_x, of_w), ("output", y), ints(k), ints(n), ints(m)]
    data += [ints(1), ints(2), longs(m * k), ints(1), ints(matrices), longs(n * k // 8), longs(n * k // 64)]
    data += [longs(n * k // 64), ints(1), ints(3), longs(1), longs(1)]
    check(file, data, (1, 1, 3), (32, 2, 2))
    near(y, x[of_x].astype(np.float64) @ weights[of_w].swapaxes(1, 2), FLOAT16_TWICE)


def test_quantized_products_of_weights_that_are_not_transposed(rng):
    m, n, k = 20, 64, 64
    file = mlx_kernel("nax_qmm_n.metal", QUANTIZED, "affine_qmm_n_nax, half, 64, 4, false, 64, 64, 64, 2, 2")
    packed, weights = quantized(rng, k, n)
    x, y = halves(rng, m, k), np.zeros((m, n), np.float16)
    data = [*inputs(*packed, x), ("output", y), ints(k), ints(n), ints(m)]
    data += [ints(0), ints(0), longs(0), ints(0), ints(0), longs(0), longs(0), longs(0)]
    check(file, data, (1, 1, 1), (32, 2, 2))
    near(y, x.astype(np.float64) @ weights, FLOAT16_TWICE)


# Rows of each expert, one after another: none, a whole tile of 32, and parts of one.
ROWS = [5, 0, 32, 3]


def sorted_rows():
    """Where each expert's rows begin, and the expert of each row."""
    begins = np.cumsum([0, *ROWS[:-1]]).astype(np.int32)
    return begins, np.repeat(np.arange(len(ROWS)), ROWS)


def of_experts(x, weights, experts):
    return np.stack([row.astype(np.float64) @ weights[expert].T for row, expert in zip(x, experts)])


def test_quantized_products_of_sorted_rows(rng):
    n, k = 64, 64
    begins, experts = sorted_rows()
    m = len(experts)
    file = mlx_kernel(
        "nax_gather_qmm_rhs.metal", QUANTIZED, "affine_gather_qmm_rhs_nax, half, 64, 4, 32, 64, 64, 2, 2, true"
    )
    packed, weights = quantized(rng, len(ROWS), n, k)
    x, y = halves(rng, m, k), np.zeros((m, n), np.float16)
    data = [*inputs(x, *packed, begins), ("output", y), ints(m), ints(n), ints(k), ints(len(ROWS))]
    tiles = -(-m // 32) + len(ROWS) - 1
    check(file, data, (1, tiles, 1), (32, 2, 2), {200: False, 201: True, 202: True})
    near(y, of_experts(x, weights, experts), FLOAT16_TWICE)


def test_dense_products_of_sorted_rows(rng):
    n, k = 70, 48
    begins, experts = sorted_rows()
    m = len(experts)
    file = mlx_kernel(
        "nax_gather_mm.metal",
        [*GEMM, "steel/gemm/kernels/steel_gemm_gather_nax.h"],
        "gather_mm_rhs_nax, half, 32, 64, 64, 2, 2, false, true",
    )
    x, w = halves(rng, m, k), halves(rng, len(ROWS), n, k)
    y = np.zeros((m, n), np.float16)
    params = struct.pack("<8i3q3i4x", m, n, k, k, k, n, 2, -(-m // 32), 0, n * k, 0, 0, k // 64, 0)
    data = [*inputs(x, w, begins), ("output", y), params, ints(len(ROWS))]
    tiles = -(-m // 32) + len(ROWS) - 1
    check(file, data, (2, tiles, 1), (32, 2, 2), {200: False, 201: False, 202: False})
    near(y, of_experts(x, w.astype(np.float64), experts), FLOAT16)


def test_products_of_segments(rng):
    m, n, k = 20, 24, 100
    file = mlx_kernel(
        "nax_segmented.metal",
        [*GEMM, "steel/gemm/kernels/steel_gemm_segmented_nax.h"],
        "segmented_mm_nax, half, 64, 64, 64, 2, 2, false, false",
    )
    a, b = halves(rng, m, k), halves(rng, k, n)
    segments = np.array([0, 64, 64, 64, 64, 100], np.uint32)  # whole steps, none, a part of one
    c = np.zeros((3, m, n), np.float16)
    params = struct.pack("<8i3q3i4x", m, n, k, k, n, n, 1, 1, 0, 0, m * n, 0, 0, 0)
    data = [*inputs(a, b, segments), ("output", c), params]
    check(file, data, (3, 1, 1), (32, 2, 2), {199: True, 200: False, 201: False})
    wide = a.astype(np.float64), b.astype(np.float64)
    near(c, np.stack([wide[0][:, i:j] @ wide[1][i:j] for i, j in segments.reshape(3, 2)]), FLOAT16)


def test_products_in_parts_of_k(rng):
    m, n, k, parts, size = 20, 64, 160, 2, 96
    file = mlx_kernel(
        "nax_splitk.metal",
        [*GEMM, "steel/gemm/kernels/steel_gemm_splitk_nax.h"],
        "gemm_splitk_nax, half, 64, 64, 64, 2, 2, true, false",
    )
    a, b = halves(rng, k, m), halves(rng, k, n)
    c = np.zeros((parts, m, n), np.float32)
    params = struct.pack("<13i", m, n, k, m, n, n, 1, 1, parts, m * n, size, 0, 0)
    data = [*inputs(a, b), ("output", c), params]
    check(file, data, (parts, 1, 1), (32, 2, 2), {200: False, 201: True})
    wide = a.astype(np.float64).T, b.astype(np.float64)
    near(c, np.stack([wide[0][:, i : i + size] @ wide[1][i : i + size] for i in (0, size)]), SUM)


def test_a_barrier_that_simdgroups_meet_in_two_copies(rng):
    """If rows fill one SIMD-group's tile and not the next one's, they run different copies of the loop over k.

    Metal's specification wants every thread at the same barrier; a GPU counts arrivals.
    """
    m, n, k = 40, 64, 64
    file = mlx_kernel(
        "nax_splitk.metal",
        [*GEMM, "steel/gemm/kernels/steel_gemm_splitk_nax.h"],
        "gemm_splitk_nax, half, 64, 64, 64, 2, 2, true, false",
    )
    params = struct.pack("<13i", m, n, k, m, n, n, 1, 1, 1, m * n, k, 0, 0)
    data = [*inputs(halves(rng, k, m), halves(rng, k, n)), ("output", np.zeros((m, n), np.float32)), params]
    with pytest.raises(Fault, match=r"divergence: .* at threadgroup_barrier, .*gemm_nax\.h:\d+, while .*gemm_nax\.h"):
        run(file, "test", data, (1, 1, 1), (32, 2, 2), constants={200: False, 201: True})


def gated_delta(q, k, v, state, g, beta):
    """Outputs and the last state of one head, token by token."""
    outputs = []
    for t in range(len(q)):
        state = state * g[t]
        state = state + np.outer(beta[t] * (v[t] - state @ k[t]), k[t])
        outputs.append(state @ q[t])
    return np.stack(outputs), state


def test_gated_delta(rng):
    """Lanes read each other's sums of gates without a barrier: a race that a SIMD-group in step does not show."""
    length, of_keys, of_values, key_heads, heads = 20, 32, 64, 1, 2
    file = mlx_kernel(
        "nax_gated_delta.metal",
        ["utils.h", "gated_delta_update_nax.h"],
        f"gated_delta_fused_nax, half, {of_keys}, {of_values}, {key_heads}, {heads}, 16, 4",
    )
    q, k = (halves(rng, 1, length, key_heads, of_keys) for _ in range(2))
    k /= np.linalg.norm(k.astype(np.float32), axis=-1, keepdims=True).astype(np.float16)
    v = halves(rng, 1, length, heads, of_values)
    g, beta = (rng.uniform(low, 1, (1, length, heads)).astype(np.float16) for low in (0.8, 0.2))
    state = rng.standard_normal((1, heads, of_values, of_keys)).astype(np.float32)
    y, after = np.zeros_like(v), np.zeros_like(state)
    unused = np.zeros(16, np.float32)
    data = [*inputs(q, k, v, state, g, beta), ("output", y), ("output", after), ints(length), *inputs(*[unused] * 3)]
    where = (file, "test", data, (1, of_values // 64, heads), (32, 4, 1))
    with pytest.raises(Fault, match=r'update_nax\.h:\d+\) at byte \d+ of threadgroup array "gamma_all", .* a race'):
        run(*where, constants={200: False})
    run(*where, constants={200: False}, watch=False, watched=True)
    with pytest.raises(Fault, match=r"nax_ops\.h:\d+: the left operand .*never asked"):
        run(*where, constants={200: False}, watch=False, watched=True, shuffled_tensors=True)
    wide = [a[0].astype(np.float64) for a in (q, k, v, g, beta)]
    for head in range(heads):
        of_head = [a[:, 0] for a in wide[:2]] + [wide[2][:, head]]
        exact, last = gated_delta(*of_head, state[0, head].astype(np.float64), *(a[:, head] for a in wide[3:]))
        near(y[0, :, head], exact, FLOAT16_TWICE)
        near(after[0, head], last, FLOAT16)
