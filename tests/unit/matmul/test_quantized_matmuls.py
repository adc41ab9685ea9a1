"""Products of one row with several matrices: where they are one launch, gradients, and bad input."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, quantize
from helpers.support import assert_same_bits, launched_on_apple
from helpers.tolerances import LAYERS, ROUNDINGS, assert_near, of_roundings

import mlx_mittens as mm

K, SIZES = 64, (12, 5, 1)


def call_of(rng, rows=1, dtype=mx.float32, sizes=SIZES, bits=4):
    x = draw(rng, (rows, K), dtype, outliers=False)
    return x, [quantize(rng, (n, K), dtype, 32, bits) for n in sizes], [draw(rng, (n,), dtype) for n in sizes]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_launch_gives_what_each_gives(rng, dtype, count, has_bias):
    x, matrices, bias = call_of(rng, dtype=dtype, sizes=(*SIZES, 33)[:count])
    added = bias if has_bias else None
    mx.eval(x, matrices, bias)
    (name,) = launched_on_apple(lambda: mm.quantized_matmuls(x, matrices, 32, 4, bias=added))
    assert name.startswith("quantized_matmuls_4bit")
    with mm.simulator.enabled(gpu="m2-max"):
        together = mm.quantized_matmuls(x, matrices, 32, 4, bias=added)
        alone = [
            mm.quantized_matmul(x, *w, group_size=32, bits=4, bias=b if has_bias else None)
            for w, b in zip(matrices, bias)
        ]
        mx.eval(together, alone)
    for ours, beside in zip(together, alone, strict=True):
        assert_near(ours, beside, str(ours.shape), ROUNDINGS if dtype == mx.float32 else of_roundings(dtype))


def test_views_of_one_matrix(rng):
    x, [whole], _ = call_of(rng, sizes=(40,))
    parts = [tuple(a[start:end] for a in whole) for start, end in ((0, 16), (16, 25), (25, 40))]
    with mm.simulator.enabled(gpu="m2-max"):
        together = mm.quantized_matmuls(x, parts, 32, 4)
        expected = mm.quantized_matmul(x, *whole, group_size=32, bits=4)
        mx.eval(together, expected)
    assert_near(mx.concatenate(together, -1), expected, "parts", ROUNDINGS)


@pytest.mark.parametrize(
    ("rows", "count", "bits", "gpu"),
    [(2, 3, 4, "m2-max"), (1, 1, 4, "m2-max"), (1, 3, 6, "m2-max"), (1, 3, 4, "nvidia")],
)
def test_other_calls_are_products_of_their_own(rng, rows, count, bits, gpu):
    x, matrices, _ = call_of(rng, rows, sizes=SIZES[:count], bits=bits)
    with mm.simulator.enabled(gpu=gpu):
        mm.stats(reset=True)
        found = mm.quantized_matmuls(x, matrices, 32, bits)
        mx.eval(found)
        assert set(mm.stats()) == {"quantized_matmul"}
    for ours, w in zip(found, matrices, strict=True):
        assert_near(ours, mx.quantized_matmul(x, *w, group_size=32, bits=bits), "product", LAYERS)


def test_more_than_four_are_products_of_their_own(rng):
    x, matrices, _ = call_of(rng, sizes=(8,) * 5)
    with mm.simulator.enabled(gpu="m2-max"):
        mm.stats(reset=True)
        mx.eval(mm.quantized_matmuls(x, matrices, 32, 4))
        assert set(mm.stats()) == {"quantized_matmul"}


def test_gradients(rng):
    x, matrices, bias = call_of(rng)
    loss = lambda x: sum((y**2).sum() for y in mm.quantized_matmuls(x, matrices, 32, 4, bias=bias))
    expected = mx.grad(loss)(x)
    mx.eval(expected)
    with mm.simulator.enabled(gpu="m2-max"):
        assert_near(mx.grad(loss)(x), expected, "gradient", LAYERS)


def test_on_the_cpu_each_is_quantized_matmul(rng, native):
    x, matrices, bias = call_of(rng, 3)
    for ours, w, b in zip(mm.quantized_matmuls(x, matrices, 32, 4, bias=bias), matrices, bias, strict=True):
        assert_same_bits(ours, mm.quantized_matmul(x, *w, group_size=32, bits=4, bias=b), "product")


def test_bad_input(rng):
    x, matrices, bias = call_of(rng)

    def fails(text, *arguments, **options):
        with pytest.raises(ValueError, match=rf"\[quantized_matmuls\] {text}"):
            mm.quantized_matmuls(*arguments, 32, 4, **options)

    fails("matrices has no triples", x, [])
    fails("matrix 1 has 2 arrays: mode affine expects 3, w, scales and biases", x, [matrices[0], matrices[1][:2]])
    fails(r"matrix 0's w has shape \(1,12,8\): expected \[outputs, words\]", x, [tuple(a[None] for a in matrices[0])])
    fails("bias has 2 arrays, matrices has 3: expected one for each matrix", x, matrices, bias=bias[:2])
    fails(r"bias 1 has shape \(12\): expected one dimension with 5 elements", x, matrices, bias=[bias[0], *bias[:2]])
    with pytest.raises(mm.DtypeError, match="x has dtype int32"):
        mm.quantized_matmuls(mx.zeros((1, K), mx.int32), matrices, 32, 4)
    assert np.array(x).size
