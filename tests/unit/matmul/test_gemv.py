"""Products of a few rows with a dense matrix."""

import json
import platform
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, exact_product
from helpers.support import child_environment, peak_memory
from helpers.tolerances import SUMS, assert_error_at_most_that_of_mx, assert_product_right, of_terms

import mlx_mittens as mm
from mlx_mittens.specs import widen


def product(rng, rows, columns, outputs, dtype, transpose=True, with_bias=False):
    w = draw(rng, (outputs, columns) if transpose else (columns, outputs), dtype)
    x = draw(rng, (rows, columns), dtype)
    bias = draw(rng, (outputs,), dtype) if with_bias else None
    y = mm.gemv(w, x, bias, transpose=transpose)
    assert y.shape == (rows, outputs)
    assert_product_right(y, exact_product(widen(x), widen(w) if transpose else widen(w).T, widen(bias)), dtype)


@pytest.mark.parametrize(
    "rows, columns, outputs",
    [
        (1, 1, 1), (1, 7, 3), (1, 8, 5), (1, 256, 4), (1, 255, 9), (1, 2880, 21), (1, 4100, 6), (2, 513, 10),
        (3, 1024, 7), (4, 96, 33), (5, 777, 8), (7, 2048, 5), (8, 640, 12), (9, 100, 6), (12, 1032, 11), (16, 520, 9),
        (16, 33, 2), (7, 16392, 5), (7, 16391, 5), (16, 16392, 3), (7, 16392, 40), (16, 8712, 35),
    ],
)  # fmt: skip
@pytest.mark.parametrize("transpose", [True, False])
def test_shapes(rng, dtype, executor, rows, columns, outputs, transpose):
    product(rng, rows, columns, outputs, dtype, transpose, with_bias=rows % 2 == 1)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("rows", [*range(1, 18), 31, 32, 33, 127, 129, 257, 300])
def test_any_number_of_rows(rng, dtype, native, rows, transpose):
    """Shapes off the edges of tiles and panels, drawn anew."""
    columns, outputs = (int(n) for n in rng.integers(1, 150, 2))
    product(rng, rows, columns, outputs, dtype, transpose, with_bias=rows % 2 == 0)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("rows, columns, outputs", [(3, 1100, 67), (6, 2049, 131), (9, 1024, 64), (40, 1023, 129),
                                                    (18, 3001, 5), (260, 515, 97)])  # fmt: skip
def test_several_panels(rng, dtype, native, rows, columns, outputs, transpose):
    product(rng, rows, columns, outputs, dtype, transpose)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 5, 9, 20])
def test_results_repeat_bit_for_bit(rng, dtype, native, rows, transpose):
    w, x = draw(rng, (200, 200), dtype), draw(rng, (rows, 200), dtype)
    first, second = (widen(mm.gemv(w, x, transpose=transpose)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("rows", [1, 3, 11])
@pytest.mark.parametrize("transpose", [True, False])
def test_nothing_beyond_a_view_is_read(rng, dtype, native, rows, transpose):
    """Weights inside a matrix of NaN, on any boundary."""
    for _ in range(4):
        columns, outputs = (int(n) for n in rng.integers(1, 80, 2))
        shape = (outputs, columns) if transpose else (columns, outputs)
        top, left = (int(n) for n in rng.integers(0, 9, 2))
        whole = mx.full((shape[0] + 16, shape[1] + 16), float("nan"), dtype)
        w = draw(rng, shape, dtype)
        whole[top : top + shape[0], left : left + shape[1]] = w
        view = whole[top : top + shape[0], left : left + shape[1]]
        x = draw(rng, (rows, columns), dtype)
        exact = exact_product(widen(x), widen(w) if transpose else widen(w).T)
        assert_product_right(mm.gemv(view, x, transpose=transpose), exact, dtype)


@pytest.mark.parametrize("columns, outputs", [(65536, 2), (40_001, 3), (32_768, 64)])
def test_few_outputs_of_many_columns(rng, executor, columns, outputs):
    """Several threadgroups share the columns."""
    product(rng, 1, columns, outputs, mx.float16, True, True)
    product(rng, 2, columns, outputs, mx.float32, False)


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 1, 3, 64), (0, 64)])
def test_any_leading_shape(rng, executor, shape):
    w, x = draw(rng, (10, 64), mx.float32), draw(rng, shape, mx.float32)
    y = mm.gemv(w, x)
    assert y.shape == (*shape[:-1], 10)
    assert_product_right(y, exact_product(widen(x), widen(w)), mx.float32)


@pytest.mark.parametrize("columns", [64, 65])
def test_strided_weights(rng, dtype, executor, columns):
    w, x = draw(rng, (3 * 20, columns + 8), dtype), draw(rng, (2, 20), dtype)
    for view in (w[::3, 8:], w[1::3, 3 : columns + 3], w[:20].T[:columns].T, w[::-3, :columns]):
        assert_product_right(mm.gemv(view, x, transpose=False), exact_product(widen(x), widen(view).T), dtype)
        other = draw(rng, (2, columns), dtype)
        assert_product_right(mm.gemv(view, other), exact_product(widen(other), widen(view)), dtype)


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_weights_that_lie_by_columns(rng, dtype, executor, rows):
    """As in GPT-2, whose weights mlx-lm transposes when it loads them; also as its layers are called."""
    base = draw(rng, (96, 160), dtype)
    x, w = draw(rng, (rows, 96), dtype), base.T
    mx.eval(base, w)
    assert_product_right(mm.gemv(w, x), exact_product(widen(x), widen(w)), dtype)
    assert_product_right(mm.gemv(base.T, x), exact_product(widen(x), widen(w)), dtype)
    assert_product_right(mm.gemv(mx.contiguous(base.T).T, x, transpose=False), exact_product(widen(x), widen(w)), dtype)


@pytest.mark.parametrize("rows", [1, 3])
def test_weights_are_read_where_they_lie(rng, native, rows):
    x, w = draw(rng, (rows, 512), mx.float16), draw(rng, (512, 1024), mx.float16).T
    mx.eval(x, w)
    assert peak_memory(lambda: mm.gemv(w, x)) < w.nbytes / 4


def test_strided_rows(rng, executor):
    w, x = draw(rng, (9, 64), mx.float32), draw(rng, (64, 3), mx.float32)
    assert_product_right(mm.gemv(w, x.T), exact_product(widen(x).T, widen(w)), mx.float32)
    x = draw(rng, (3 * 64 + 1,), mx.float32)[1:].reshape(3, 64)
    assert_product_right(mm.gemv(w, x), exact_product(widen(x), widen(w)), mx.float32)


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_infinity_and_nan(rng, dtype, executor, rows):
    w, x = mx.abs(draw(rng, (8, 64), dtype)), mx.abs(draw(rng, (rows, 64), dtype)) + 1
    w[1, 3] = float("inf")
    w[2, 60] = float("nan")
    w[3, 5] = float("-inf")
    assert_product_right(mm.gemv(w, x), exact_product(widen(x), widen(w)), dtype)
    assert_product_right(mm.gemv(w.T, x, transpose=False), exact_product(widen(x), widen(w)), dtype)


def test_the_edge_of_float16(executor):
    w = mx.full((4, 64), 32.0, mx.float16)
    w[1] = 31.0
    x = mx.full((1, 64), 32.0, mx.float16)
    y = np.array(mm.gemv(w, x))
    assert np.isinf(y[0, 0]) and y[0, 1] == 31 * 32 * 64


def test_error_is_at_most_that_of_mx(rng, dtype, executor):
    w, x = draw(rng, (64, 2048), dtype), draw(rng, (1, 2048), dtype)
    assert_error_at_most_that_of_mx(mm.gemv(w, x), x @ w.T, exact_product(widen(x), widen(w)))


# Prints the largest error of sums of 2,048 equal products, in units of float32, by where the weights come from.
EQUAL_PRODUCTS = """
import json
import mlx.core as mx, mlx_mittens as mm, numpy as np
mx.set_default_device(mx.cpu)
rng, worst = np.random.default_rng(0), {"dense": 0.0, "8 bits": 0.0}
words = mx.full((4, 2048 // 4), 0xC8C8C8C8, mx.uint32)  # four times 200
for rows in (1, 2, 4, 15):
    for x, weight in rng.uniform(1, 2, (20, 2)).astype(np.float32):
        of_x, of_groups = mx.full((rows, 2048), x), mx.full((4, 32), weight)
        biases = mx.zeros((4, 32))
        for name, y, exact in (
            ("dense", mm.gemv(mx.full((4, 2048), weight), of_x), 1.0),
            ("8 bits", mm.quantized_matmul(of_x, words, of_groups, biases, group_size=64, bits=8), 200.0),
        ):
            y = np.array(y, np.float64) / (exact * 2048 * float(x) * float(weight))
            worst[name] = max(worst[name], abs(y - 1).max() / 2**-23)
print(json.dumps(worst))
"""


def test_equal_products_in_few_lanes():
    """A lane of four adds 512 of them, and all roundings go the same way: an eighth of a unit for each in a chain."""
    environment = child_environment()
    if platform.machine() in ("x86_64", "AMD64"):
        environment["MLX_MITTENS_CPU"] = "baseline"
    done = subprocess.run([sys.executable, "-c", EQUAL_PRODUCTS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Chains of 32, 16 of them, and 4 lanes; as much again for the products, before they are rounded.
    assert {name: error for name, error in json.loads(done.stdout).items() if error > 8} == {}


@pytest.mark.parametrize("transpose", [True, False])
def test_gradients(rng, executor, transpose):
    columns, outputs = 48, 20
    primals = [
        draw(rng, (outputs, columns) if transpose else (columns, outputs), mx.float32),
        draw(rng, (2, 2, columns), mx.float32),
        draw(rng, (outputs,), mx.float32),
    ]

    def ours(w, x, bias):
        return mm.gemv(w, x, bias, transpose=transpose)

    def twin(w, x, bias):
        return x @ (w.T if transpose else w) + bias

    cotangent = draw(rng, (2, 2, outputs), mx.float32)
    for a, b in zip(mx.vjp(ours, primals, [cotangent])[1], mx.vjp(twin, primals, [cotangent])[1], strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=SUMS, atol=of_terms(100))
    tangents = [draw(rng, p.shape, mx.float32) for p in primals]
    for a, b in zip(mx.jvp(ours, primals, tangents)[1], mx.jvp(twin, primals, tangents)[1], strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=SUMS, atol=of_terms(1000))


@pytest.mark.parametrize("transpose", [True, False])
def test_vmap_and_compile(rng, executor, transpose):
    w, x = draw(rng, (3, 32, 32), mx.float32), draw(rng, (3, 2, 32), mx.float32)
    one = mx.compile(lambda w, x: mm.gemv(w, x, transpose=transpose))
    each = mx.stack([one(w[i], x[i]) for i in range(3)])
    np.testing.assert_allclose(np.array(mx.vmap(one)(w, x)), np.array(each), rtol=SUMS, atol=SUMS)
    shared = mx.vmap(one, in_axes=(None, 1), out_axes=1)(w[0], x)
    np.testing.assert_allclose(np.array(shared[0]), np.array(one(w[0], x[0])), rtol=SUMS, atol=SUMS)


SPLIT, WHOLE = (1, 4200), (16, 40)  # rows and columns of x


@pytest.mark.parametrize("order", [(WHOLE, SPLIT), (SPLIT, WHOLE, SPLIT)])
@pytest.mark.parametrize("transpose", [True, False])
def test_compiled_for_any_shape(rng, executor, transpose, order):
    """Threadgroups share out the columns where these are many, whatever the graph was traced with."""
    compiled = mx.compile(lambda w, x: mm.gemv(w, x, transpose=transpose) + 1, shapeless=True)
    for rows, columns in order:
        w = draw(rng, (48, columns) if transpose else (columns, 48), mx.float32)
        x = draw(rng, (rows, columns), mx.float32)
        exact = exact_product(widen(x), widen(w) if transpose else widen(w).T, np.ones(48))
        mm.stats(reset=True)
        assert_product_right(compiled(w, x), exact, mx.float32)
        kernels = str(mm.stats()["gemv"]["kernels"])
        split = (rows, columns) == SPLIT
        assert executor == "native" or ("split_sum" in kernels) == split, kernels


@pytest.mark.parametrize("columns, outputs, simdgroups", [(2048, 64, 8), (1280, 4864, 5), (1280, 7008, 4)])
def test_simdgroups_of_several_rows(rng, counted, columns, outputs, simdgroups):
    """The fewest rounds of all waves. Eight simdgroups take 16 chunks in two rounds, five take 10 chunks in two. 304
    threadgroups of five are one wave; 438 would be two waves, so four simdgroups in three rounds are better."""
    w, x = draw(rng, (outputs, columns), mx.bfloat16), draw(rng, (8, columns), mx.bfloat16)
    (counts,) = counted(lambda: mm.gemv(w, x))
    assert counts["threads"] == counts["threadgroups"] * 32 * simdgroups


@pytest.mark.parametrize(
    "dtype, rows, outputs, transpose, kernel",
    [
        (mx.float16, 3, 4097, False, False), (mx.bfloat16, 8, 4097, False, False), (mx.float16, 3, 4096, False, True),
        (mx.float16, 2, 4097, False, True), (mx.float16, 1, 4097, False, True), (mx.float32, 3, 4097, False, True),
        (mx.float16, 3, 4097, True, True), (mx.bfloat16, 8, 4097, True, True),
        (mx.float16, 8, 65600, True, True), (mx.float16, 9, 65600, True, False), (mx.float16, 9, 65536, True, True),
        (mx.float32, 9, 65600, True, False), (mx.float32, 9, 65536, True, True),
    ],
)  # fmt: skip
def test_what_goes_to_mx(rng, lenient, nvidia_kernels, dtype, rows, outputs, transpose, kernel):
    """By the rules for NVIDIA GPUs."""
    columns = 64
    mm.stats(reset=True)
    product(rng, rows, columns, outputs, dtype, transpose)
    reason = {"many rows of x where there are tensor cores": 1}
    assert mm.stats()["gemv"]["mx"] == ({} if kernel else reason)
    assert bool(nvidia_kernels()) == kernel


def test_no_columns(executor):
    y = mm.gemv(mx.zeros((4, 0)), mx.zeros((2, 0)), mx.arange(8.0)[::2] / 2)
    np.testing.assert_array_equal(np.array(y), [[0, 1, 2, 3]] * 2)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"w": mx.zeros((4,))}, ValueError, r"w has shape \(4\): expected two dimensions"),
        ({"x": mx.zeros((1, 3))}, ValueError, r"x has 3 columns, w has shape \(4,8\)"),
        ({"x": mx.array(1.0)}, ValueError, r"x has no dimensions"),
        ({"bias": mx.zeros((8,))}, ValueError, r"bias has shape \(8\): expected one dimension with 4 elements"),
        ({"w": mx.zeros((4, 8), mx.int32), "x": mx.zeros((1, 8), mx.int32)}, mm.DtypeError, r"x has dtype int32"),
    ],
)
def test_bad_input(change, error, message):
    with pytest.raises(error, match=r"\[gemv\] .*" + message):
        mm.gemv(**{"w": mx.zeros((4, 8)), "x": mx.zeros((1, 8)), **change})
