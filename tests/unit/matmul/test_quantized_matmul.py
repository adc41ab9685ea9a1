"""Products with affine quantized weights."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, exact_product, quantize
from helpers.support import peak_memory
from helpers.tolerances import OUTLIERS, SUM, SUMS, assert_error_at_most_that_of_mx, assert_product_right, of_terms

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.specs import dequantized, widen


def covered(rows, executor):
    """As many rows, or as many as all kernels take on a GPU: more of them may be left to mx there."""
    return min(rows, 16) if executor == "gpu" else rows


def product(rng, rows, columns, outputs, dtype, group_size, bits, transpose=True, with_bias=False):
    """Computes one product and compares it with float64."""
    shape = (outputs, columns) if transpose else (columns, outputs)
    triple = quantize(rng, shape, dtype, group_size, bits)
    x = draw(rng, (rows, columns), dtype)
    bias = draw(rng, (outputs,), dtype) if with_bias else None
    y = mm.quantized_matmul(x, *triple, transpose, group_size, bits, bias=bias)
    w = dequantized(*triple, group_size, bits)
    assert y.shape == (rows, outputs)
    assert_product_right(y, exact_product(widen(x), w if transpose else w.T, widen(bias)), dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "rows, columns, outputs, group_size",
    [
        (1, 32, 1, 32), (1, 64, 3, 64), (1, 128, 7, 128), (1, 576, 8, 64), (1, 896, 37, 32), (1, 2880, 21, 64),
        (1, 1024, 33, 128), (1, 11008, 5, 64), (2, 960, 9, 32), (3, 2880, 6, 64), (4, 640, 13, 128), (5, 544, 11, 32),
        (5, 2048, 70, 64), (6, 64, 3, 32), (7, 1088, 10, 64), (8, 2048, 4, 64), (8, 96, 21, 32), (9, 576, 17, 64),
        (11, 320, 5, 64), (16, 832, 18, 32), (16, 1152, 75, 128), (21, 160, 12, 32),
    ],
)  # fmt: skip
def test_shapes(rng, dtype, executor, rows, columns, outputs, group_size, bits):
    product(rng, covered(rows, executor), columns, outputs, dtype, group_size, bits, with_bias=rows % 2 == 1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "rows, columns, outputs, group_size",
    [
        (1, 1, 32, 32), (1, 7, 64, 64), (1, 300, 96, 32), (2, 33, 128, 128), (3, 1000, 128, 64), (4, 65, 320, 64),
        (6, 200, 160, 32), (8, 129, 256, 128), (13, 77, 64, 32), (16, 40, 352, 32),
    ],
)  # fmt: skip
def test_shapes_along_outputs(rng, dtype, executor, rows, columns, outputs, group_size, bits):
    product(rng, rows, columns, outputs, dtype, group_size, bits, transpose=False, with_bias=rows % 2 == 1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("rows", [*range(1, 18), 31, 32, 33, 127, 129, 257, 300])
def test_any_number_of_rows(rng, dtype, native, rows, transpose, bits):
    """Shapes off the edges of tiles and panels, drawn anew."""
    group_size = int(rng.choice([32, 64, 128]))
    along, across = group_size * int(rng.integers(1, 6)), int(rng.integers(1, 150))
    columns, outputs = (along, across) if transpose else (across, along)
    product(rng, rows, columns, outputs, dtype, group_size, bits, transpose, with_bias=rows % 2 == 0)


@pytest.fixture(params=[1, 2, 3])
def tiles(native, request):
    """The kernels for many rows of Apple GPUs, in several orders of threads; a call gives the launches."""
    with mm.simulator.enabled(seed=request.param, gpu="m2-max"):
        _ext.simulator_record(True)
        yield lambda: [launch["kernel"] for launch in _ext.simulator_record(True)]
        _ext.simulator_record(False)


@pytest.mark.parametrize("bits, group_size", [(4, 32), (8, 64), (3, 128)])
@pytest.mark.parametrize(
    "rows, columns, outputs, size",
    [(17, 1, 16, 32), (32, 3, 65, 32), (33, 3, 77, 64), (64, 1, 19, 64), (65, 2, 130, 32), (577, 1, 21, 64)],
)
def test_tiles_of_many_rows(rng, dtype, tiles, rows, columns, outputs, size, bits, group_size):
    """Columns: in groups. Bands of tiles, and tails of rows, columns and outputs."""
    product(rng, rows, columns * group_size, outputs, dtype, group_size, bits, with_bias=rows % 2 == 1)
    name = str(dtype).split(".")[-1]
    assert tiles() == [f"quantized_matmul_qmm_tiles_{bits}bit_{32 if bits == 3 else size}_{name}"]


@pytest.mark.parametrize("bits, group_size", [(4, 32), (8, 64), (3, 128)])
@pytest.mark.parametrize(
    "rows, columns, outputs, splits",
    [
        (17, 2048, 70, 8),
        (32, 1504, 200, 4),
        (33, 640, 256, 2),
        (64, 1152, 200, 2),
        (100, 512, 130, 2),
        (100, 256, 256, 1),
    ],
)
def test_tiles_that_share_columns(rng, dtype, native, rows, columns, outputs, splits, bits, group_size):
    """Of few outputs, so that they keep a GPU busy; the last may have fewer columns."""
    columns -= columns % group_size
    with mm.simulator.enabled(seed=int(rng.integers(1, 1000)), gpu="m1"):
        _ext.simulator_record(True)
        product(rng, rows, columns, outputs, dtype, group_size, bits, with_bias=rows % 2 == 1)
        launches = _ext.simulator_record(False)
    name = str(dtype).split(".")[-1]
    kernels = [f"quantized_matmul_qmm_tiles_{bits}bit_32_{name}", *[f"split_sum_{name}"] * (splits > 1)]
    assert [launch["kernel"] for launch in launches] == kernels
    assert list(launches[0]["threadgroups"]) == [-(-rows // 32), -(-outputs // 64), splits]


def test_tiles_of_stacks_that_share_columns(rng, dtype, native):
    triple = quantize(rng, (5, 64, 1024), dtype, 32, 4)
    x, bias = draw(rng, (5, 20, 1024), dtype), draw(rng, (64,), dtype)
    with mm.simulator.enabled(seed=2, gpu="m1"):
        _ext.simulator_record(True)
        y = mm.quantized_matmul(x, *triple, group_size=32, bits=4)
        mx.eval(y)
        launches = _ext.simulator_record(False)
        biased = mm.quantized_matmul(x, *triple, group_size=32, bits=4, bias=bias)
        mx.eval(biased)
    assert list(launches[0]["threadgroups"]) == [1, 1, 5 * 4]
    w = dequantized(*triple, 32, 4)
    assert_product_right(y, exact_product(widen(x), w), dtype)
    assert_product_right(biased, exact_product(widen(x), w, widen(bias)), dtype)


@pytest.mark.parametrize("rows", [20, 70])
def test_tiles_of_stacks_and_views(rng, dtype, tiles, rows):
    """Matrices of a larger buffer, shared by several heads."""
    triple = quantize(rng, (2, 3, 50, 96), dtype, 32, 4)
    views = [a[:, :, 3:44] for a in triple]
    x = draw(rng, (2, 3, rows, 96), dtype)
    y = mm.quantized_matmul(x, *views, group_size=32, bits=4)
    assert_product_right(y, exact_product(widen(x), dequantized(*triple, 32, 4)[:, :, 3:44]), dtype)
    assert all("qmm_tiles" in name or "copy" in name for name in tiles())


@pytest.mark.parametrize("bits, group_size", [(4, 32), (8, 64), (3, 128)])
@pytest.mark.parametrize(
    "rows, columns, groups, size",
    [(17, 1, 1, 32), (32, 33, 5, 32), (33, 31, 3, 64), (64, 130, 1, 64), (65, 40, 2, 32), (577, 10, 1, 64)],
)
def test_tiles_along_outputs(rng, dtype, tiles, rows, columns, groups, size, bits, group_size):
    """Bands of tiles, and tails of rows, columns and outputs."""
    outputs = groups * group_size
    product(rng, rows, columns, outputs, dtype, group_size, bits, transpose=False, with_bias=rows % 2 == 1)
    name = str(dtype).split(".")[-1]
    assert tiles() == [f"quantized_matmul_qvm_tiles_{bits}bit_{32 if bits == 3 else size}_{name}"]


@pytest.mark.parametrize("rows", [20, 70])
def test_tiles_of_stacks_along_outputs(rng, dtype, tiles, rows):
    """Matrices of a larger buffer, shared by several heads."""
    triple = quantize(rng, (2, 3, 50, 96), dtype, 32, 4)
    views = [a[:, :, 3:44] for a in triple]
    x = draw(rng, (2, 3, rows, 41), dtype)
    y = mm.quantized_matmul(x, *views, transpose=False, group_size=32, bits=4)
    w = dequantized(*triple, 32, 4)[:, :, 3:44].swapaxes(-1, -2)
    assert_product_right(y, exact_product(widen(x), w), dtype)
    assert all("qvm_tiles" in name or "copy" in name for name in tiles())


@pytest.mark.parametrize("columns", [64, 71])
def test_tiles_along_outputs_and_values_that_are_not_finite(rng, dtype, tiles, columns):
    """They stay in their group and row, also where a step of columns is cut short."""
    words, scales, biases = quantize(rng, (columns, 64), dtype, 32, 4)
    scales[columns - 1, 1] = float("nan")
    x = mx.abs(draw(rng, (20, columns), dtype)) + 1
    x[5, 0] = float("nan")
    y = widen(mm.quantized_matmul(x, words, scales, biases, False, 32, 4))
    w = dequantized(words, scales, biases, 32, 4)
    assert np.isnan(y[5]).all() and np.isnan(y[:, 32:]).all()
    others = np.arange(20) != 5
    finite = mx.array(y[others][:, :32]).astype(dtype)
    assert_product_right(finite, exact_product(widen(x)[others], w.T[:32]), dtype)


def test_tiles_need_as_many_outputs_as_a_simdgroup_has(rng, tiles):
    product(rng, 20, 64, 15, mx.float16, 64, 4)
    assert tiles() == ["quantized_matmul_qmm_4bit_float16"]


@pytest.mark.parametrize("rows", [20, 40])
@pytest.mark.parametrize("columns", [64, 96])
def test_tiles_and_values_that_are_not_finite(rng, dtype, tiles, rows, columns):
    """They stay in their output and row, also where a step of columns is cut short."""
    words, scales, biases = quantize(rng, (64, columns), dtype, 32, 4)
    scales[2, 1] = float("nan")
    biases[3, 0] = float("-inf")
    x = mx.abs(draw(rng, (rows, columns), dtype)) + 1
    x[5, 0] = float("nan")
    y = widen(mm.quantized_matmul(x, words, scales, biases, True, 32, 4))
    w = dequantized(words, scales, biases, 32, 4)
    assert np.isnan(y[5]).all() and np.isnan(y[:, 2]).all()
    others = np.arange(rows) != 5
    assert np.isneginf(y[others, 3]).all()
    finite = mx.array(y[others][:, 4:]).astype(dtype)
    assert_product_right(finite, exact_product(widen(x)[others], w[4:]), dtype)


def test_the_gradient_of_many_rows(rng, tiles):
    triple = quantize(rng, (96, 64), mx.float32, 32, 4)
    x, cotangent = draw(rng, (20, 64), mx.float32), draw(rng, (20, 96), mx.float32)
    (found,) = mx.vjp(lambda x: mm.quantized_matmul(x, *triple, True, 32, 4), [x], [cotangent])[1]
    assert_product_right(found, exact_product(widen(cotangent), dequantized(*triple, 32, 4).T), mx.float32)
    assert tiles()[-1] == "quantized_matmul_qvm_tiles_4bit_32_float32"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "rows, columns, outputs, transpose",
    [
        (7, 1152, 70, True), (9, 2176, 66, True), (33, 1056, 131, True), (257, 1024, 65, True), (3, 700, 1152, False),
        (9, 515, 416, False), (33, 257, 544, False), (1, 5000, 64, False), (2, 9001, 32, False),
    ],
)  # fmt: skip
def test_several_panels(rng, dtype, native, rows, columns, outputs, transpose, bits):
    product(rng, rows, columns, outputs, dtype, 32, bits, transpose)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40, 300])
def test_many_matrices(rng, native, rows, transpose):
    matrices = 5 if rows > 3 else 400
    triple = quantize(rng, (matrices, 64, 96), mx.float16, 32, 4)
    x = draw(rng, (matrices, rows, 96 if transpose else 64), mx.float16)
    w = dequantized(*triple, 32, 4)
    y = mm.quantized_matmul(x, *triple, transpose=transpose, group_size=32, bits=4)
    assert_product_right(y, exact_product(widen(x), w if transpose else np.swapaxes(w, -1, -2)), mx.float16)


@pytest.mark.parametrize("transpose", [True, False])
def test_enough_outputs_for_every_batch_of_rows(rng, executor, transpose):
    """Threadgroups that compute many outputs, the last of them cut short."""
    product(rng, 1, 96 if transpose else 64, 20_011 if transpose else 20_000 // 32 * 32, mx.float16, 32, 4, transpose)


@pytest.mark.parametrize("transpose", [True, False])
def test_strides_and_broadcasting(rng, dtype, executor, transpose):
    """Weights as a KV cache holds them: slices of a larger buffer, shared by several heads."""
    batch, heads, shared, capacity, length, size, rows = 2, 3, 4, 80, 41, 64, 2
    triple = quantize(rng, (batch, heads, capacity, size), dtype, 32, 4)
    views = [a[:, :, :length] for a in triple]
    columns, outputs = (size, length) if transpose else (length, size)
    x = draw(rng, (batch, heads, shared, rows, columns), dtype)
    y = mm.quantized_matmul(x, *(a[:, :, None] for a in views), transpose=transpose, group_size=32, bits=4)
    w = dequantized(*triple, 32, 4)[:, :, None, :length]
    assert y.shape == (batch, heads, shared, rows, outputs)
    assert_product_right(y, exact_product(widen(x), w if transpose else np.swapaxes(w, -1, -2)), dtype)


def test_stacks_that_broadcast_in_front(rng, executor):
    triple = quantize(rng, (3, 8, 64), mx.float32, 32, 8)
    w = dequantized(*triple, 32, 8)
    for x_shape in [(5, 1, 2, 64), (5, 3, 2, 64), (1, 2, 64), (3, 2, 64)]:
        x = draw(rng, x_shape, mx.float32)
        y = mm.quantized_matmul(x, *triple, group_size=32, bits=8)
        assert_product_right(y, exact_product(widen(x), w), mx.float32)


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 1, 3, 64), (0, 64)])
def test_any_leading_shape(rng, executor, shape):
    triple = quantize(rng, (10, 64), mx.float16, 64, 4)
    x = draw(rng, shape, mx.float16)
    y = mm.quantized_matmul(x, *triple)
    assert y.shape == (*shape[:-1], 10)
    assert_product_right(y, exact_product(widen(x), dequantized(*triple, 64, 4)), mx.float16)


def test_views_that_have_no_rows(rng, executor):
    """Every argument as a view that lies in memory in another order, or off the boundaries of 16 bytes."""
    words, scales, biases = quantize(rng, (2 * 12, 192), mx.float32, 32, 4)
    x = draw(rng, (192, 3), mx.float32)
    exact = exact_product(widen(x).T, dequantized(words, scales, biases, 32, 4))
    views = [mx.contiguous(a.T).T for a in (words, scales, biases)]
    assert_product_right(mm.quantized_matmul(x.T, *views, group_size=32), exact, mx.float32)

    def shifted(a):
        return mx.concatenate([mx.zeros((1,), a.dtype), a.reshape(-1)])[1:].reshape(a.shape)

    views = [shifted(a) for a in (words, scales, biases)]
    assert_product_right(mm.quantized_matmul(shifted(x.T), *views, group_size=32), exact, mx.float32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 20])
def test_scales_of_zero_infinity_and_nan(rng, dtype, executor, bits, transpose, rows):
    words, scales, biases = quantize(rng, (64, 64), dtype, 32, bits)
    scales[0] = 0.0
    scales[1, 0] = float("inf")
    scales[2, 1] = float("nan")
    biases[3, 0] = float("-inf")
    # Of one sign: which infinity a sum has then does not hang on its order.
    x = mx.abs(draw(rng, (covered(rows, executor), 64), dtype)) + 1
    w = dequantized(words, scales, biases, 32, bits)
    y = widen(mm.quantized_matmul(x, words, scales, biases, transpose, 32, bits))
    exact = exact_product(widen(x), w if transpose else w.T).value
    # Which of the values that are not finite: with an infinite scale that hangs on the order of the operations.
    np.testing.assert_array_equal(np.isfinite(y), np.isfinite(exact))
    if transpose:
        assert np.isnan(y[:, 2]).all() and np.isneginf(y[:, 3]).all()
        assert_product_right(mx.array(y).astype(dtype)[:, 4:], exact_product(widen(x), w[4:]), dtype)


@pytest.mark.parametrize("bits", [4, 8])
def test_activations_at_the_edge_of_float16(rng, executor, bits):
    triple = quantize(rng, (9, 256), mx.float16, 64, bits)
    triple = (triple[0], triple[1] * 1e-3, triple[2] * 1e-3)
    x = mx.array(rng.choice([-65504.0, 65504.0, 6e-8, 0.0], (2, 256))).astype(mx.float16)
    y = mm.quantized_matmul(x, *triple, bits=bits)
    assert_product_right(y, exact_product(widen(x), dequantized(*triple, 64, bits)), mx.float16)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_large_activations(rng, executor, dtype, rows, bits):
    """Up to the docstring's bound for bfloat16; in float32 and in the native code up to the largest results."""
    triple = quantize(rng, (16, 512), dtype, 64, bits)
    largest = 1e33 if dtype == mx.bfloat16 and executor != "native" else 1e36
    x = rng.standard_normal((rows, 512)) * rng.choice([1, largest / 4], (rows, 512))
    x = mx.array(np.clip(x, -largest, largest).astype(np.float32)).astype(dtype)
    y = mm.quantized_matmul(x, *triple, bits=bits)
    assert_product_right(y, exact_product(widen(x), dequantized(*triple, 64, bits)), dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_activations_near_the_largest_number(rng, native, dtype, rows, bits):
    """Neither integers times activations nor sums of activations overflow, where the product does not."""
    w = mx.array((rng.normal(size=(37, 256)) * 1e-4).astype(np.float32)).astype(dtype)
    triple = mx.quantize(w, 64, bits)
    x = np.full((rows, 256), 2e38, np.float32)
    x[1::2] = 1.0  # rows of their own, which nothing is done to
    x = mx.array(x).astype(dtype)
    y = mm.quantized_matmul(x, *triple, True, 64, bits)
    assert_product_right(y, exact_product(widen(x), dequantized(*triple, 64, bits)), dtype)


@pytest.mark.parametrize("rows", [17, 32, 41, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_up_to_64_rows_on_nvidia(rng, nvidia_kernels, rows, bits):
    """A server's batch: x of a row for each sequence."""
    triple = quantize(rng, (24, 256), mx.float16, 64, bits)
    x, bias = draw(rng, (rows, 1, 256), mx.float16), draw(rng, (24,), mx.float16)
    y = mm.quantized_matmul(x, *triple, True, 64, bits, bias=bias)
    assert y.shape == (rows, 1, 24)
    exact = exact_product(widen(x), dequantized(*triple, 64, bits), widen(bias))
    assert_product_right(y, exact, mx.float16)
    assert nvidia_kernels() == [f"quantized_matmul_tiles_{bits}bit_16_by64_float16"]


def test_overflow_is_infinity(executor):
    words, scales, biases = mx.full((2, 8), 0xFFFFFFFF, mx.uint32), mx.ones((2, 1)), mx.zeros((2, 1))
    x = mx.full((1, 64), 1000.0)
    y = mm.quantized_matmul(*(a if a.dtype == mx.uint32 else a.astype(mx.float16) for a in (x, words, scales, biases)))
    assert np.isinf(np.array(y)).all()


def test_promotes_as_mx_does(rng, executor):
    words, scales, biases = quantize(rng, (8, 64), mx.float16, 64, 4)
    for x_type, type in [(mx.float16, mx.float16), (mx.bfloat16, mx.float16), (mx.float32, mx.bfloat16)]:
        x, s, b = draw(rng, (1, 64), x_type), scales.astype(type), biases.astype(type)
        assert mm.quantized_matmul(x, words, s, b).dtype == mx.quantized_matmul(x, words, s, b).dtype


@pytest.mark.parametrize("columns, outputs, simdgroups", [(1280, 7008, 5), (2048, 4224, 8), (2048, 4256, 4)])
def test_simdgroups_of_several_rows(rng, counted, columns, outputs, simdgroups):
    """The fewest rounds of all waves: where each has one round, unless 133 threadgroups of eight need two waves."""
    triple = quantize(rng, (outputs, columns), mx.bfloat16, 64, 4)
    x = draw(rng, (8, columns), mx.bfloat16)
    (counts,) = counted(lambda: mm.quantized_matmul(x, *triple), gpu="nvidia")
    assert counts["threads"] == counts["threadgroups"] * 32 * simdgroups


def test_error_is_at_most_that_of_mx(rng, dtype, executor):
    triple = quantize(rng, (64, 2048), dtype, 64, 4)
    x = draw(rng, (1, 2048), dtype)
    exact = exact_product(widen(x), dequantized(*triple, 64, 4))
    assert_error_at_most_that_of_mx(mm.quantized_matmul(x, *triple), mx.quantized_matmul(x, *triple), exact)


def test_results_repeat_bit_for_bit(rng, executor):
    triple = quantize(rng, (64, 512), mx.float32, 64, 4)
    for transpose in (True, False):
        x = draw(rng, (1, 512 if transpose else 64), mx.float32)
        first, second = (np.array(mm.quantized_matmul(x, *triple, transpose)) for _ in range(2))
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("transpose", [True, False])
def test_gradients(rng, executor, transpose):
    triple = quantize(rng, (96, 64), mx.float32, 32, 4)
    columns, outputs = (64, 96) if transpose else (96, 64)
    x, bias = draw(rng, (3, columns), mx.float32), draw(rng, (outputs,), mx.float32)
    cotangent = draw(rng, (3, outputs), mx.float32)

    def ours(x, scales, biases, bias):
        return mm.quantized_matmul(x, triple[0], scales, biases, transpose, 32, 4, bias=bias)

    def dense(x, scales, biases, bias):
        w = mx.dequantize(triple[0], scales, biases, 32, 4)
        return x @ (w.T if transpose else w) + bias

    primals = [x, triple[1], triple[2], bias]
    with mm.strict(False):
        found = mx.vjp(ours, primals, [cotangent])[1]
    for a, b in zip(found, mx.vjp(dense, primals, [cotangent])[1], strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=OUTLIERS, atol=of_terms(200))
    tangents = [draw(rng, p.shape, mx.float32) for p in primals]
    for a, b in zip(mx.jvp(ours, primals, tangents)[1], mx.jvp(dense, primals, tangents)[1], strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=OUTLIERS, atol=of_terms(2000))


@pytest.mark.parametrize("transpose", [True, False])
def test_vmap(rng, executor, transpose):
    words, scales, biases = quantize(rng, (4, 32, 64), mx.float32, 32, 8)
    columns = 64 if transpose else 32
    x = draw(rng, (4, 2, columns), mx.float32)
    bias = draw(rng, (4, 32 if transpose else 64), mx.float32)

    def one(x, words, scales, biases, bias):
        return mm.quantized_matmul(x, words, scales, biases, transpose, 32, 8, bias=bias)

    each = [one(x[i], words[i], scales[i], biases[i], bias[i]) for i in range(4)]
    np.testing.assert_allclose(
        np.array(mx.vmap(one)(x, words, scales, biases, bias)), np.array(mx.stack(each)), rtol=SUMS, atol=SUMS
    )
    shared = mx.vmap(one, in_axes=(1, None, None, None, None))(x, words[0], scales[0], biases[0], bias[0])
    assert shared.shape[:2] == (2, 4)
    np.testing.assert_allclose(
        np.array(shared[1]), np.array(one(x[:, 1], words[0], scales[0], biases[0], bias[0])), rtol=SUMS, atol=SUMS
    )


def test_compile(rng, executor):
    triple = quantize(rng, (32, 64), mx.float32, 64, 4)
    step = mx.compile(lambda x: mm.quantized_matmul(mx.exp(x), *triple) * 2)
    for rows in (1, 3):
        x = draw(rng, (rows, 64), mx.float32, outliers=False)
        np.testing.assert_allclose(
            np.array(step(x)), np.array(mm.quantized_matmul(mx.exp(x), *triple) * 2), rtol=SUM, atol=SUM
        )


@pytest.mark.parametrize("order", [(8, 1), (1, 8, 1)])
@pytest.mark.parametrize("transpose", [True, False])
def test_compiled_for_any_shape(rng, executor, transpose, order):
    triple = quantize(rng, (64, 2048) if transpose else (2048, 64), mx.float32, 64, 4)
    w = dequantized(*triple, 64, 4)
    compiled = mx.compile(lambda x: mm.quantized_matmul(x, *triple, transpose=transpose) + 1, shapeless=True)
    for rows in order:
        x = draw(rng, (rows, 2048), mx.float32)
        assert_product_right(compiled(x), exact_product(widen(x), w if transpose else w.T, np.ones(64)), mx.float32)


def test_what_goes_to_mx(rng, native):
    words, scales, biases = quantize(rng, (8, 64), mx.float32, 64, 4)
    x = draw(rng, (1, 64), mx.float32)
    one = mx.quantize(draw(rng, (8, 64), mx.float32), bits=1)
    with pytest.raises(RuntimeError, match="1 bit"):
        mm.quantized_matmul(x, *one, bits=1)
    with mm.strict(False):
        assert mx.array_equal(mm.quantized_matmul(x, *one, bits=1), mx.quantized_matmul(x, *one, bits=1)).item()


@pytest.mark.parametrize("lead", [(20, 1), (3, 7), (2, 9, 1)])
def test_rows_that_share_a_matrix_are_one_product_of_mx(rng, native, lenient, tmp_path, lead):
    """A batch of tokens is x of (B, 1, K), which mx takes for B matrices: on NVIDIA GPUs each is a product alone."""
    triple = quantize(rng, (32, 64), mx.float32, 32, 1)  # no kernel has one bit
    x = draw(rng, (*lead, 64), mx.float32)
    mx.eval(x)
    y = mm.quantized_matmul(x, *triple, True, 32, 1)
    mx.export_to_dot(str(tmp_path / "y.dot"), y)
    assert "Flatten" in (tmp_path / "y.dot").read_text()
    expected = mx.quantized_matmul(x.reshape(-1, 64), *triple, True, 32, 1).reshape(*lead, 32)
    assert mx.array_equal(y, expected).item()


def test_rows_that_share_a_matrix_are_one_product_under_the_patch(rng, native, lenient, tmp_path):
    triple = quantize(rng, (32, 64), mx.float32, 32, 1)
    x = draw(rng, (20, 1, 64), mx.float32)
    mx.eval(x)
    for whole, with_matrix in ((triple, True), ([mx.stack([a] * 20) for a in triple], False)):
        with mm.patched():
            y = mx.quantized_matmul(x, *whole, group_size=32, bits=1)
        path = tmp_path / f"{with_matrix}.dot"
        mx.export_to_dot(str(path), y)
        assert ("Flatten" in path.read_text()) == with_matrix
        assert y.shape == (20, 1, 32)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"bits": 7}, ValueError, r"bits is 7: expected 1, 2, 3, 4, 5, 6 or 8"),
        ({"group_size": 48}, ValueError, r"group_size is 48: expected 32, 64 or 128"),
        ({"mode": "q9"}, ValueError, r"mode is 'q9'"),
        ({"w": mx.zeros((8, 8))}, mm.DtypeError, r"w has dtype float32: expected uint32"),
        ({"w": mx.zeros((8,), mx.uint32)}, ValueError, r"w has shape \(8\)"),
        ({"scales": mx.zeros((8, 2))}, ValueError, r"biases has shape \(8,1\), scales has shape \(8,2\)"),
        ({"scales": mx.zeros((8, 2)), "biases": mx.zeros((8, 2))}, ValueError, r"expected shape \(8,1\)"),
        ({"scales": mx.zeros((8, 1), mx.int32)}, mm.DtypeError, r"scales has dtype int32"),
        ({"biases": None}, ValueError, r"biases is None"),
        ({"x": mx.zeros((1, 32))}, ValueError, r"x has 32 columns"),
        ({"x": mx.zeros((1, 64), mx.complex64)}, mm.DtypeError, r"x has dtype complex64"),
        ({"x": mx.zeros((1, 64), mx.float64)}, mm.DtypeError, r"x has dtype float64"),
        (
            {"w": mx.zeros((0, 8, 8), mx.uint32), "scales": mx.zeros((0, 8, 1)), "biases": mx.zeros((0, 8, 1))},
            ValueError,
            r"w has shape \(0,8,8\), x has shape \(1,64\): expected at least one matrix",
        ),
        ({"bias": mx.zeros((3,))}, ValueError, r"bias has shape \(3\): expected one dimension with 8 elements"),
    ],
)
def test_bad_input(change, error, message):
    arguments = {"x": mx.zeros((1, 64)), "w": mx.zeros((8, 8), mx.uint32), "scales": mx.zeros((8, 1))}
    arguments |= {"biases": mx.zeros((8, 1)), **change}
    with pytest.raises(error, match=r"\[quantized_matmul\] .*" + message):
        mm.quantized_matmul(arguments.pop("x"), arguments.pop("w"), **arguments)


@pytest.mark.parametrize("columns, group_size, bits", [(2880, 64, 3), (576, 64, 5), (96, 32, 2), (96, 32, 6)])
def test_weights_are_read_where_they_lie(rng, native, columns, group_size, bits):
    """Also of rows that are no multiple of 16 bytes, as in gpt-oss with 3 bits."""
    weights = quantize(rng, (1024, columns), mx.float16, group_size, bits)
    x = draw(rng, (1, columns), mx.float16)
    mx.eval(x)
    assert weights[0].shape[-1] % 4
    taken = peak_memory(lambda: mm.quantized_matmul(x, *weights, True, group_size, bits))
    assert taken < weights[0].nbytes / 4


@pytest.mark.parametrize("columns, bits", [(2880, 3), (576, 5)])
def test_experts_are_read_where_they_lie(rng, native, columns, bits):
    weights = quantize(rng, (8, 256, columns), mx.float16, 64, bits)
    x, rhs = draw(rng, (1, 1, columns), mx.float16), mx.array([3])
    mx.eval(x, rhs)
    taken = peak_memory(lambda: mm.gather_qmm(x, *weights, None, rhs, True, 64, bits))
    assert taken < weights[0].nbytes / 64


def test_views_of_many_axes(rng, executor):
    """More than a kernel copies at once, and none of them merges with the next."""
    weights = quantize(rng, (4, 32), mx.float32, 32, 8)
    x = draw(rng, (*[2] * 11, 1, 32), mx.float32)
    view = x.transpose(*reversed(range(11)), 11, 12)[:, :1, :1]
    found = mm.quantized_matmul(view, *weights, True, 32, 8)
    rows = widen(mx.contiguous(view)).reshape(-1, 32)
    assert_product_right(found.reshape(-1, 4), exact_product(rows, dequantized(*weights, 32, 8)), mx.float32)
