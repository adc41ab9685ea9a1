"""Products with dense weights, x first: as x @ w.T, and by the tiles for many rows."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, exact_product
from helpers.tolerances import SUMS, assert_product_right, of_terms

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.specs import widen


def product(rng, rows, columns, outputs, dtype, transpose=True, with_bias=False):
    w = draw(rng, (outputs, columns) if transpose else (columns, outputs), dtype)
    x = draw(rng, (rows, columns), dtype)
    bias = draw(rng, (outputs,), dtype) if with_bias else None
    y = mm.matmul(x, w, bias, transpose=transpose)
    assert y.shape == (rows, outputs) and y.dtype == dtype
    assert_product_right(y, exact_product(widen(x), widen(w) if transpose else widen(w).T, widen(bias)), dtype)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("rows, columns, outputs", [(1, 96, 33), (5, 77, 8), (16, 520, 9)])
def test_few_rows(rng, dtype, executor, rows, columns, outputs, transpose):
    product(rng, rows, columns, outputs, dtype, transpose, with_bias=rows == 5)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("rows", [17, 40, 129])
def test_many_rows(rng, dtype, native, rows, transpose):
    product(rng, rows, int(rng.integers(1, 150)), int(rng.integers(1, 150)), dtype, transpose, with_bias=rows == 40)


@pytest.fixture(params=[("m1", 1), ("m2-max", 2)])
def tiles(native, request):
    """The kernels for many rows of Apple GPUs, in two orders of threads; a call gives the launches."""
    gpu, seed = request.param
    with mm.simulator.enabled(seed=seed, gpu=gpu):
        _ext.simulator_record(True)
        yield lambda: [launch["kernel"] for launch in _ext.simulator_record(True)]
        _ext.simulator_record(False)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(
    "rows, columns, outputs, size", [(17, 8, 16, 32), (33, 72, 77, 64), (65, 200, 19, 32), (577, 64, 21, 64)]
)
def test_tiles(rng, tiles, rows, columns, outputs, size, with_bias):
    """Bands of tiles, and tails of rows, columns and outputs."""
    product(rng, rows, columns, outputs, mx.bfloat16, with_bias=with_bias)
    assert tiles() == [f"matmul_tiles_{size}_bfloat16"]


@pytest.mark.parametrize("gpu, most", [("m1", 64), ("m2-max", 64), ("m3-max", 32), ("m4", 32), ("m5", 0)])
@pytest.mark.parametrize(
    "rows, columns, outputs", [(17, 8, 16), (32, 72, 77), (33, 136, 70), (64, 64, 19), (65, 8, 16)]
)
def test_tiles_of_few_rows(rng, dtype, native, gpu, most, rows, columns, outputs):
    """In every type; more rows in bfloat16 alone, on M1 and M2."""
    with mm.simulator.enabled(seed=int(rng.integers(1, 1000)), gpu=gpu):
        _ext.simulator_record(True)
        product(rng, rows, columns, outputs, dtype, with_bias=rows % 2 == 1)
        kernels = [launch["kernel"] for launch in _ext.simulator_record(False)]
    is_early = gpu in ("m1", "m2-max")
    is_tiled = rows <= most or (is_early and dtype == mx.bfloat16)
    assert is_tiled == all(kernel.startswith("matmul_tiles") for kernel in kernels)
    if is_tiled:
        size = 64 if dtype == mx.bfloat16 and rows in (33, 64) else 32
        assert kernels == [f"matmul_tiles_{size}_{str(dtype).split('.')[-1]}"]


def test_rows_that_are_no_whole_16_bytes_are_no_tiles(rng, dtype, native):
    with mm.simulator.enabled(gpu="m1"):
        _ext.simulator_record(True)
        product(rng, 20, 66 if dtype == mx.float32 else 68, 32, dtype)
        kernels = [launch["kernel"] for launch in _ext.simulator_record(False)]
    assert not any("matmul_tiles" in kernel for kernel in kernels)


@pytest.mark.parametrize(
    "rows, columns, outputs, size", [(17, 1, 32, 32), (33, 71, 136, 64), (65, 30, 200, 32), (577, 64, 40, 64)]
)
def test_tiles_along_outputs(rng, tiles, rows, columns, outputs, size):
    product(rng, rows, columns, outputs, mx.bfloat16, transpose=False, with_bias=rows % 2 == 1)
    assert tiles() == [f"matmul_columns_tiles_{size}_bfloat16"]


@pytest.mark.parametrize("transpose", [True, False])
def test_tiles_of_views(rng, tiles, transpose):
    """Rows of a larger buffer, a matrix that lies by columns, and rows that do not begin on 16 bytes."""
    x = draw(rng, (2, 20, 80), mx.bfloat16)[:, :, 8:72]
    w = draw(rng, (50, 96), mx.bfloat16)
    for view in (w[3:35, 16:80], w[3:35, 3:67], draw(rng, (64, 32), mx.bfloat16).T):
        y = mm.matmul(x, view if transpose else view.T, transpose=transpose)
        assert_product_right(y, exact_product(widen(x), widen(view)), mx.bfloat16)
    assert all("tiles" in name or "copy" in name for name in tiles())


@pytest.mark.parametrize("columns", [64, 72])
def test_values_that_are_not_finite(rng, tiles, columns):
    """They stay in their output and row, also where a step of columns is cut short."""
    x, w = draw(rng, (20, columns), mx.bfloat16), draw(rng, (32, columns), mx.bfloat16)
    x[5, 0], w[2, 0], w[3, columns - 1] = float("nan"), float("inf"), float("nan")
    y = widen(mm.matmul(x, w))
    assert np.isnan(y[5]).all() and np.isnan(y[:, 3]).all()
    others = np.arange(20) != 5
    assert not np.isfinite(y[:, 2]).any()
    finite = mx.array(y[others][:, 4:]).astype(mx.bfloat16)
    assert_product_right(finite, exact_product(widen(x)[others], widen(w)[4:]), mx.bfloat16)


def test_the_gradient_of_many_rows(rng, tiles):
    x, w, cotangent = (draw(rng, shape, mx.bfloat16) for shape in ((20, 64), (96, 64), (20, 96)))
    (found,) = mx.vjp(lambda x: mm.matmul(x, w), [x], [cotangent])[1]
    assert_product_right(found, exact_product(widen(cotangent), widen(w).T), mx.bfloat16)
    assert tiles()[-1] == "matmul_columns_tiles_32_bfloat16"


def test_stacks_are_those_of_mx(rng, native):
    x, w = draw(rng, (2, 3, 5, 16), mx.float32), draw(rng, (3, 7, 16), mx.float32)
    bias = draw(rng, (7,), mx.float32)
    with mm.strict(False):
        found = mm.matmul(x, w, bias)
        turned = mm.matmul(x, w.swapaxes(-1, -2), bias, transpose=False)
    expected = x @ w.swapaxes(-1, -2) + bias
    for y in (found, turned):
        np.testing.assert_allclose(np.array(y), np.array(expected), rtol=SUMS, atol=of_terms(16))


def test_compile_vmap_and_any_shape(rng, native):
    w = draw(rng, (9, 16), mx.float32)
    x = draw(rng, (4, 3, 16), mx.float32)
    expected = np.array(x @ w.T)
    for f in (mx.compile(mm.matmul), mx.compile(mm.matmul, shapeless=True), mx.vmap(mm.matmul, in_axes=(0, None))):
        np.testing.assert_allclose(np.array(f(x, w)), expected, rtol=SUMS, atol=of_terms(16))


def test_bad_input(native):
    x, w = mx.zeros((2, 8)), mx.zeros((3, 8))
    for arguments, message in (
        ((x, mx.zeros((8,))), r"\[matmul\] w has shape \(8\): expected at least two dimensions"),
        ((x, mx.zeros((3, 7))), r"\[matmul\] x has 8 columns, w has shape \(3,7\)"),
        ((x, mx.zeros((2, 3, 7))), r"\[matmul\] x has shape \(2,8\), w has shape \(2,3,7\)"),
        ((x, w, mx.zeros((2,))), r"\[matmul\] bias has shape \(2\): expected one dimension with 3 elements"),
    ):
        with pytest.raises(ValueError, match=message):
            mm.matmul(*arguments)
