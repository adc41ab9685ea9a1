"""One row of x with 4-bit weights by 8x8 matrices, which only the rules for NVIDIA GPUs choose."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, exact_product, exact_swiglu, quantize
from helpers.tolerances import assert_error_at_most_that_of_mx, assert_product_right

import mlx_mittens as mm
from mlx_mittens.specs import dequantized, widen

HALVES = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])


@HALVES
@pytest.mark.parametrize(
    "columns, outputs, group_size",
    [
        (64, 1, 64), (128, 7, 128), (192, 8, 64), (512, 9, 64), (576, 16, 64), (640, 17, 128), (896, 37, 64),
        (2880, 5, 64), (4096, 6, 128), (8960, 3, 64), (14336, 2, 64), (64, 4095, 64), (192, 4099, 64),
        (16896, 2, 128), (25664, 1, 64),  # three and four rounds of a simdgroup
    ],
)  # fmt: skip
def test_shapes(rng, nvidia_kernels, dtype, columns, outputs, group_size):
    triple = quantize(rng, (outputs, columns), dtype, group_size, 4)
    x, bias = draw(rng, (1, columns), dtype), draw(rng, (outputs,), dtype)
    y = mm.quantized_matmul(x, *triple, group_size=group_size, bits=4, bias=bias)
    exact = exact_product(widen(x), dequantized(*triple, group_size, 4), widen(bias))
    assert_product_right(y, exact, dtype)
    assert nvidia_kernels() == [f"quantized_matmul_row_4bit_{'b' * (dtype == mx.bfloat16)}float16"]


@HALVES
@pytest.mark.parametrize(
    "columns, outputs, group_size", [(64, 1, 64), (128, 9, 128), (2880, 10, 64), (4096, 3, 64), (704, 8, 64)]
)
def test_gate_and_up(rng, nvidia_kernels, dtype, columns, outputs, group_size):
    gate, up = (quantize(rng, (outputs, columns), dtype, group_size, 4) for _ in range(2))
    x = draw(rng, (1, columns), dtype) * (0.5 / columns**0.5)
    y = mm.quantized_swiglu(x, gate, up, group_size, 4)
    assert_product_right(y, exact_swiglu(x, gate, up, group_size, 4), dtype)
    assert nvidia_kernels() == [f"quantized_swiglu_row_4bit_{'b' * (dtype == mx.bfloat16)}float16"]


@HALVES
def test_strides_and_batches(rng, nvidia_kernels, dtype):
    """Matrices as slices of a larger buffer, each with a row of x of its own; and every other row of one."""
    triple = quantize(rng, (2, 3, 40, 192), dtype, 64, 4)
    views = [a[:, :, 5:26] for a in triple]
    x = draw(rng, (2, 3, 1, 192), dtype)
    exact = exact_product(widen(x), dequantized(*triple, 64, 4)[:, :, 5:26])
    assert_product_right(mm.quantized_matmul(x, *views), exact, dtype)
    alternate = [a[0, 0, ::2] for a in triple]
    exact = exact_product(widen(x[0, 0]), dequantized(*triple, 64, 4)[0, 0, ::2])
    assert_product_right(mm.quantized_matmul(x[0, 0], *alternate), exact, dtype)
    assert all("_row_" in name for name in nvidia_kernels() if "quantized" in name)


@HALVES
def test_scales_of_zero_infinity_and_nan(rng, nvidia_kernels, dtype):
    words, scales, biases = quantize(rng, (20, 576), dtype, 64, 4)
    scales[0] = 0.0
    scales[1, 0] = float("inf")
    scales[2, 8] = float("nan")
    biases[3, 3] = float("-inf")
    x = mx.abs(draw(rng, (1, 576), dtype)) + 1
    w = dequantized(words, scales, biases, 64, 4)
    y = widen(mm.quantized_matmul(x, words, scales, biases))
    np.testing.assert_array_equal(np.isfinite(y), np.isfinite(exact_product(widen(x), w).value))
    assert np.isnan(y[:, 2]).all() and np.isneginf(y[:, 3]).all()
    assert_product_right(mx.array(y).astype(dtype)[:, 4:], exact_product(widen(x), w[4:]), dtype)


@HALVES
@pytest.mark.parametrize("at", [0, 63, 64, 130, 511, 512, 700])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_in_x(rng, nvidia_kernels, dtype, at, value):
    """It is multiplied with the integers of its own column alone: a scale of 0 elsewhere does not hide it."""
    words, scales, biases = quantize(rng, (9, 704), dtype, 64, 4)
    x = draw(rng, (1, 704), dtype)
    x[0, at] = value
    assert not np.isfinite(widen(mm.quantized_matmul(x, words, scales, biases))).any()


def test_activations_at_the_edge_of_float16(rng, nvidia_kernels):
    words, scales, biases = quantize(rng, (9, 576), mx.float16, 64, 4)
    triple = (words, scales * 1e-3, biases * 1e-3)
    x = mx.array(rng.choice([-65504.0, 65504.0, 6e-8, 0.0], (1, 576))).astype(mx.float16)
    assert_product_right(
        mm.quantized_matmul(x, *triple), exact_product(widen(x), dequantized(*triple, 64, 4)), mx.float16
    )


@HALVES
def test_error_is_at_most_that_of_mx(rng, nvidia_kernels, dtype):
    triple = quantize(rng, (64, 4096), dtype, 64, 4)
    x = draw(rng, (1, 4096), dtype)
    exact = exact_product(widen(x), dequantized(*triple, 64, 4))
    assert_error_at_most_that_of_mx(mm.quantized_matmul(x, *triple), mx.quantized_matmul(x, *triple), exact)


@pytest.mark.parametrize(
    "columns, outputs, bits, group_size, dtype",
    [(128, 9, 4, 32, mx.float16), (128, 9, 8, 64, mx.float16), (128, 9, 4, 64, mx.float32)],
)
def test_others_keep_their_kernel(rng, nvidia_kernels, columns, outputs, bits, group_size, dtype):
    triple = quantize(rng, (outputs, columns), dtype, group_size, bits)
    x = draw(rng, (1, columns), dtype)
    y = mm.quantized_matmul(x, *triple, group_size=group_size, bits=bits)
    assert_product_right(y, exact_product(widen(x), dequantized(*triple, group_size, bits)), dtype)
    assert "_rows_" in nvidia_kernels()[0]


def test_which_gpu():
    with (
        pytest.raises(ValueError, match="gpu is 'amd': expected one of apple, nvidia, h200, m1-7, m1"),
        mm.simulator.enabled(gpu="amd"),
    ):
        pass
