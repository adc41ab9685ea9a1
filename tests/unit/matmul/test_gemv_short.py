"""One row of x with short rows of weights, a simdgroup an output, which only the rules for NVIDIA GPUs choose."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, exact_product
from helpers.tolerances import assert_product_right

import mlx_mittens as mm
from mlx_mittens.specs import DTYPES, widen


def loads_for(columns, dtype):
    """Loads of 16 bytes a lane that cover a row."""
    return next(loads for loads in (4, 5, 8) if columns * dtype.size <= 512 * loads)


def product(w, x, bias=None):
    return exact_product(widen(x), widen(w), widen(bias))


@pytest.mark.parametrize("packs", [1, 31, 32, 33, 64, 112, 127, 128, 129, 144, 159, 160, 161, 176, 255, 256])
def test_shapes(rng, nvidia_kernels, dtype, packs):
    """Packs of 16 bytes, around a simdgroup's load; outputs, around a threadgroup's number."""
    columns = packs * 16 // dtype.size
    for outputs in (1, 8, 8 * int(rng.integers(1, 4)) + int(rng.integers(1, 8))):
        w, x, bias = draw(rng, (outputs, columns), dtype), draw(rng, (1, columns), dtype), draw(rng, (outputs,), dtype)
        assert_product_right(mm.gemv(w, x), product(w, x), dtype)
        assert_product_right(mm.gemv(w, x, bias), product(w, x, bias), dtype)
    name = next(name for name in DTYPES if DTYPES[name] == dtype)
    assert set(nvidia_kernels()) == {f"gemv_short_{loads_for(columns, dtype)}_{name}"}


def test_views(rng, nvidia_kernels, dtype):
    """Rows apart, and a slice of columns that begins on 16 bytes, between NaN that nobody may read."""
    whole = mx.full((48, 400), float("nan"), dtype)
    whole[8:40, 16:280] = draw(rng, (32, 264), dtype)
    x = draw(rng, (1, 264), dtype)
    for view in (whole[8:40, 16:280], whole[8:40:3, 16:280]):
        assert_product_right(mm.gemv(view, x), product(view, x), dtype)
    assert all("_short_" in name for name in nvidia_kernels())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite(rng, nvidia_kernels, dtype, value):
    """It stays in the row that has it, wherever it stands, and does not meet a lane's filler past the row's end."""
    for column in (0, 255, 256, 711):
        w, x = draw(rng, (19, 712), dtype), mx.abs(draw(rng, (1, 712), dtype)) + 1
        w[5, column] = value
        y = widen(mm.gemv(w, x))
        np.testing.assert_array_equal(y[0, 5], value)
        assert np.isfinite(np.delete(y, 5, axis=1)).all()
        assert not np.isfinite(widen(mm.gemv(w[:5], w[5:6]))).any()


def test_results_repeat_bit_for_bit(rng, nvidia_kernels, dtype):
    w, x = draw(rng, (21, 520), dtype), draw(rng, (1, 520), dtype)
    first, second = (widen(mm.gemv(w, x)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    "rows, packs, more", [(1, 256, 8), (1, 8, 1), (2, 64, 0)], ids=["longer", "no whole packs", "two rows"]
)
def test_others_keep_their_kernel(rng, nvidia_kernels, dtype, rows, packs, more):
    columns = packs * 16 // dtype.size + more
    w, x = draw(rng, (9, columns), dtype), draw(rng, (rows, columns), dtype)
    assert_product_right(mm.gemv(w, x), product(w, x), dtype)
    assert all("_rows_" in name for name in nvidia_kernels())


def test_apple_gpus_keep_theirs(rng, counted, native):
    w, x = draw(rng, (9, 512), mx.float16), draw(rng, (1, 512), mx.float16)
    (counts,) = counted(lambda: mm.gemv(w, x))
    assert counts["threadgroups"] == 1  # of three simdgroups with four outputs each; of eight with one there are two
