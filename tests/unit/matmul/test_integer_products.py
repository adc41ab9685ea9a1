"""Products on CPUs in which x becomes integers: int16 of half types, if these can stand for its elements, and int8."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, exact_product, exact_swiglu, quantize
from helpers.support import check_instruction_sets
from helpers.tolerances import INT8_ACTIVATIONS, units

import mlx_mittens as mm
from mlx_mittens.specs import EPSILON, dequantized, widen

HALVES = [mx.float16, mx.bfloat16]
CPU = mx.Device(mx.cpu)

pytestmark = pytest.mark.parametrize("bits", [4, 8])


def zero_at(column, rng, columns, bits, dtype):
    """Quantized weights of 8 outputs in groups of 64, with one column of zeros."""
    middle = 1 << (bits - 1)
    integers = rng.integers(0, 2 * middle, (8, columns))
    integers[:, column] = middle
    scales = np.full((8, columns // 64), 2.0**-bits)
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    words = (integers.reshape(8, -1, per_word).astype(np.uint32) << shifts).sum(-1, dtype=np.uint32)
    return mx.array(words), mx.array(scales).astype(dtype), mx.array(-middle * scales).astype(dtype)


def relative_error(y, x, triple, bits):
    exact = exact_product(widen(x), dequantized(*triple, 64, bits)).value
    return np.abs(widen(y) - exact).max() / np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [64, 4096])
@pytest.mark.parametrize("outlier", [8.0, 100.0, 6e4])
def test_an_outlier_that_meets_a_weight_of_zero_hides_nothing(rng, dtype, columns, outlier, bits):
    """The other columns are as right as without it: to the rounding of the result, of a few root mean squares."""
    triple = zero_at(5, rng, columns, bits, dtype)
    x = widen(draw(rng, (1, columns), dtype))
    x[:, 5] = outlier
    x = mx.array(x).astype(dtype)
    y = mm.quantized_matmul(x, *triple, group_size=64, bits=bits, stream=CPU)
    assert relative_error(y, x, triple, bits) < units(2, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [64, 4096])
def test_outliers_in_some_of_many_rows_hide_nothing(rng, dtype, columns, bits):
    """An outlier takes the precision of its whole group there; the largest of many results rounds further."""
    triple = zero_at(5, rng, columns, bits, dtype)
    x = widen(draw(rng, (40, columns), dtype))
    x[::3, 5] = 8
    x[1, 5] = 100
    x[2, 5] = 6e4
    x = mx.array(x).astype(dtype)
    y = mm.quantized_matmul(x, *triple, group_size=64, bits=bits, stream=CPU)
    exact = exact_product(widen(x), dequantized(*triple, 64, bits)).value
    assert (np.abs(widen(y) - exact) <= units(1, dtype) * (np.abs(exact) + np.sqrt(np.mean(exact**2)))).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("rows", [2, 40])
def test_an_element_that_is_not_finite_stays_in_its_row(rng, dtype, value, rows, bits):
    triple = quantize(rng, (24, 256), dtype, 64, bits)
    x = widen(draw(rng, (rows, 256), dtype))
    alone = mm.quantized_matmul(mx.array(x[1:]).astype(dtype), *triple, group_size=64, bits=bits, stream=CPU)
    x[0, 17] = value
    x = mx.array(x).astype(dtype)
    y = mm.quantized_matmul(x, *triple, group_size=64, bits=bits, stream=CPU)
    assert not np.isfinite(widen(y[0])).any()
    assert mx.array_equal(y[1:], alone)


@pytest.mark.parametrize("size", [0.0, 2.0**-120, 2.0**-90, 2.0**100])
@pytest.mark.parametrize("rows", [1, 40])
def test_tiny_and_huge_rows(rng, size, rows, bits):
    triple = quantize(rng, (16, 192), mx.bfloat16, 64, bits)
    x = (draw(rng, (rows, 192), mx.float32) * size).astype(mx.bfloat16)
    y = widen(mm.quantized_matmul(x, *triple, group_size=64, bits=bits, stream=CPU))
    exact = exact_product(widen(x), dequantized(*triple, 64, bits))
    assert (np.abs(y - exact.value) <= EPSILON[mx.bfloat16] * np.abs(exact.value) + 2.0**-14 * exact.magnitude).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", ["quantized_matmul", "quantized_swiglu"])
def test_exact_rows_are_those_of_each_row_alone(rng, dtype, op, bits):
    """Of 1 to 32 rows. Some have outliers, and one is zero."""
    gate, up = (quantize(rng, (40, 512), dtype, 64, bits) for _ in range(2))
    x = widen(draw(rng, (32, 512), dtype))
    x[3::5, 100] = 500
    x[7] = 0
    x = mx.array(x).astype(dtype)

    def product(x):
        if op == "quantized_matmul":
            return mm.quantized_matmul(x, *gate, group_size=64, bits=bits, exact=True, stream=CPU)
        return mm.quantized_swiglu(x, gate, up, 64, bits, exact=True, stream=CPU)

    alone = mx.concatenate([product(x[i : i + 1]) for i in range(32)])
    for rows in (1, 2, 3, 5, 8, 9, 31, 32):
        assert mx.array_equal(product(x[:rows]), alone[:rows])


def rms(values):
    return np.sqrt(np.mean(np.square(values)))


def assert_right_in_8_bits(y, exact, dtype):
    assert y.dtype == dtype and y.shape == exact.shape
    assert rms(widen(y) - exact) <= INT8_ACTIVATIONS * rms(exact)


@pytest.mark.parametrize("rows", [1, 7, 33, 300])
@pytest.mark.parametrize(
    "dtype, group, outputs, columns",
    [(mx.float32, 32, 71, 544), (mx.float16, 64, 130, 1088), (mx.bfloat16, 128, 65, 2304)],
)
def test_int8_activations(rng, dtype, rows, group, outputs, columns, bits):
    """By float64, with a bias; panels of weights and their chunks have odd ends."""
    triple = quantize(rng, (outputs, columns), dtype, group, bits)
    x = draw(rng, (rows, columns), dtype, outliers=False)
    bias = draw(rng, (outputs,), dtype)
    options = {"group_size": group, "bits": bits, "stream": CPU}
    y = mm.quantized_matmul(x, *triple, bias=bias, activations="int8", **options)
    exact = exact_product(widen(x), dequantized(*triple, group, bits), widen(bias)).value
    assert_right_in_8_bits(y, exact, dtype)
    with mm.patched(activations="int8"):
        assert mx.array_equal(mm.quantized_matmul(x, *triple, bias=bias, **options), y)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("rows", [2, 40])
def test_int8_activations_of_a_feed_forward_part(rng, dtype, rows, bits):
    gate, up = (quantize(rng, (72, 512), dtype, 64, bits) for _ in range(2))
    x = draw(rng, (rows, 512), dtype, outliers=False)
    with mm.patched(activations="int8"):
        y = mm.quantized_swiglu(x, gate, up, 64, bits, stream=CPU)
    exact = exact_swiglu(x, gate, up, 64, bits).value
    assert rms(widen(y) - exact) <= 2 * INT8_ACTIVATIONS * rms(exact)  # of two products


@pytest.mark.parametrize("tokens", [3, 200])
def test_int8_activations_of_experts(rng, tokens, bits):
    """Experts with several numbers of rows, and an index beyond the last."""
    w = [quantize(rng, (40, 256), mx.float16, 64, bits) for _ in range(4)]
    stack = [mx.stack(arrays) for arrays in zip(*w, strict=True)]
    x = draw(rng, (tokens, 1, 256), mx.float16, outliers=False)
    experts = rng.integers(0, 4, (tokens, 2)).astype(np.uint32)
    experts[-1, -1] = 9
    with mm.patched(activations="int8"):
        y = mm.gather_qmm(
            mx.expand_dims(x, 1), *stack, rhs_indices=mx.array(experts), group_size=64, bits=bits, stream=CPU
        )
    dense = np.stack([dequantized(*one, 64, bits) for one in w])
    exact = np.einsum("tk,tenk->ten", widen(x)[:, 0], dense[np.minimum(experts, 3)])
    result = widen(y)[:, :, 0]
    assert np.isnan(result[-1, -1]).all()
    right = experts < 4
    assert rms(result[right] - exact[right]) <= INT8_ACTIVATIONS * rms(exact[right])


@pytest.mark.parametrize("dtype", [mx.float32, *HALVES])
@pytest.mark.parametrize("rows", [4, 300])
def test_rows_that_int8_cannot_stand_for(rng, dtype, rows, bits):
    """Alone, next to each other and where they are many: those with an element that is not finite, and huge ones."""
    triple = quantize(rng, (70, 512), dtype, 64, bits)
    x = widen(draw(rng, (rows, 512), dtype, outliers=False))
    refused = [1, 2, 3] + list(range(10, 270)) * (rows == 300)
    x[refused, 5] = float("nan")
    x[2] = float("inf")
    if dtype != mx.float16:
        x[3] = 2.0**97
    x = mx.array(x).astype(dtype)
    y = widen(mm.quantized_matmul(x, *triple, group_size=64, bits=bits, activations="int8", stream=CPU))
    exact = exact_product(widen(x), dequantized(*triple, 64, bits)).value
    finite = np.isfinite(exact).all(-1)
    assert not np.isfinite(y[~finite]).any()
    for row in np.flatnonzero(finite):
        assert rms(y[row] - exact[row]) <= 2 * INT8_ACTIVATIONS * rms(exact[row])  # of 70 results


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("outlier", [8.0, 100.0, 6e4])
def test_outliers_in_int8(rng, rows, outlier, bits):
    """One in each group is the most that a row may lose: the square root of the group's size, of steps."""
    triple = quantize(rng, (70, 512), mx.float32, 128, bits)
    x = widen(draw(rng, (rows, 512), mx.float32, outliers=False))
    x[:, ::128] = outlier
    x = mx.array(x).astype(mx.float32)
    y = mm.quantized_matmul(x, *triple, group_size=128, bits=bits, activations="int8", stream=CPU)
    exact = exact_product(widen(x), dequantized(*triple, 128, bits))
    assert rms(widen(y) - exact.value) <= 4 * INT8_ACTIVATIONS * rms(exact.magnitude)


@pytest.mark.parametrize("rows", [1, 40])
def test_rows_of_zeros_in_int8(rng, rows, bits):
    triple = quantize(rng, (70, 512), mx.float16, 64, bits)
    x = mx.zeros((rows, 512), mx.float16)
    y = mm.quantized_matmul(x, *triple, group_size=64, bits=bits, activations="int8", stream=CPU)
    assert not mx.any(y).item()


@pytest.mark.parametrize("dtype", [mx.float32, *HALVES])
def test_exact_rows_in_int8(rng, dtype, bits):
    triple = quantize(rng, (40, 512), dtype, 64, bits)
    x = draw(rng, (32, 512), dtype, outliers=False)
    with mm.patched(exact=True, activations="int8"):
        product = lambda x: mm.quantized_matmul(x, *triple, group_size=64, bits=bits, stream=CPU)
        alone = mx.concatenate([product(x[i : i + 1]) for i in range(32)])
        for rows in (3, 9, 32):
            assert mx.array_equal(product(x[:rows]), alone[:rows])


def test_gradients_are_not_rounded(rng, bits):
    """The gradient of a product of columns is one of rows."""
    triple = quantize(rng, (128, 64), mx.float32, 64, bits)
    x, dy = (draw(rng, (20, size), mx.float32, outliers=False) for size in (128, 64))

    def gradient():
        options = {"transpose": False, "group_size": 64, "bits": bits, "stream": CPU}
        return mx.vjp(lambda x: mm.quantized_matmul(x, *triple, **options), [x], [dy])[1][0]

    with mm.patched(activations="int8"):
        of_int8 = gradient()
    assert mx.array_equal(of_int8, gradient())


def test_unknown_activations(rng, bits):
    triple = quantize(rng, (8, 64), mx.float16, 64, bits)
    x = draw(rng, (2, 64), mx.float16)
    with pytest.raises(ValueError, match="activations is 'int4': expected 'int8' or None"):
        mm.quantized_matmul(x, *triple, group_size=64, bits=bits, activations="int4", stream=CPU)
    with pytest.raises(ValueError, match="activations is 'int4': expected 'int8' or None"):
        mm.patch(activations="int4")


def test_every_instruction_set(bits):
    """The tests above, with each set of this machine but its best one."""
    check_instruction_sets(__file__, f"{bits} and not every")
