"""What only index_scores promises."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw
from helpers.support import launched_on_apple
from helpers.tolerances import assert_near, assert_right

import mlx_mittens as mm
from mlx_mittens import specs

OP = specs.get("index_scores")


def of_mx(q, k, weights, scale=1.0):
    scores = mx.maximum(q @ k[:, None].swapaxes(-1, -2), 0)
    return ((weights * scale).swapaxes(-1, -2)[..., None] * scores).sum(axis=1)


def test_hand_worked(executor):
    """Scores below zero count nothing, whatever their weight."""
    q = mx.concatenate([mx.ones((1, 1, 1, 64)), -mx.ones((1, 1, 1, 64))], axis=1)
    k = mx.stack([mx.ones((1, 64)), -mx.ones((1, 64)), mx.zeros((1, 64))], axis=1)
    assert mm.index_scores(q, k, mx.array([[[2.0, 3.0]]]), scale=0.5).tolist() == [[[64.0, 96.0, 0.0]]]


@pytest.mark.parametrize("case", OP.tests, ids=lambda case: case.name)
def test_values(dtype, executor, rng, case):
    assert_right(OP, case, OP.draw(rng, case, dtype))


@pytest.mark.parametrize("heads", [1, 7, 8, 9, 64])
@pytest.mark.parametrize("keys", [1, 7, 8, 31, 33])
def test_sizes(executor, rng, heads, keys):
    case = specs.Case("test", (2, heads, 2, 64, keys))
    assert_right(OP, case, OP.draw(rng, case, mx.float16))


def test_views(executor, rng):
    """As a layer has them: heads of a product, the front of a cache, and columns of another product."""
    q = draw(rng, (2, 3, 5, 64), mx.float32).swapaxes(1, 2)
    k = draw(rng, (2, 1, 40, 64), mx.float32)[:, 0, :33]
    weights = draw(rng, (2, 3, 11), mx.float32)[..., 3:8]
    found = mm.index_scores(q, k, weights)
    assert_near(found, mm.index_scores(*map(mx.contiguous, (q, k, weights))), "views", 0)


def test_values_that_are_not_finite(executor, rng):
    """NaN is no score below zero, and nothing of one key reaches another."""
    q, k, weights = OP.draw(rng, OP.tests[0], mx.float32)
    expected = np.array(mm.index_scores(q, k, weights))
    k[0, 3], k[1, 5, 7], k[1, 6] = mx.nan, mx.inf, -mx.inf
    found = np.array(mm.index_scores(q, k, weights))
    untouched = np.ones_like(expected, dtype=bool)
    untouched[0, :, 3] = untouched[1, :, 5] = untouched[1, :, 6] = False
    np.testing.assert_array_equal(found[untouched], expected[untouched])
    assert np.isnan(found[0, :, 3]).all()
    assert not np.isfinite(found[1, :, 6]).any()
    weights[0, 0, 1] = mx.nan
    assert mx.isnan(mm.index_scores(q, k, weights)[0, 0]).all()


def test_no_heads_and_no_keys(executor):
    nothing = mm.index_scores(mx.zeros((2, 0, 3, 64)), mx.ones((2, 5, 64)), mx.zeros((2, 3, 0)))
    assert nothing.shape == (2, 3, 5) and not nothing.any()
    assert mm.index_scores(mx.ones((2, 4, 3, 64)), mx.ones((2, 0, 64)), mx.ones((2, 3, 4))).shape == (2, 3, 0)


@pytest.mark.parametrize(
    "shape", [(1, 3, 0, 33, 40), (2, 0, 1, 64, 5), (1, 3, 2, 0, 7), (1, 3, 2, 48, 0), (0, 3, 2, 64, 5)]
)
def test_gradients_of_nothing(executor, lenient, shape):
    """Also of widths that mx computes."""
    batch, heads, queries, width, keys = shape
    arrays = [mx.ones(s) for s in ((batch, heads, queries, width), (batch, keys, width), (batch, queries, heads))]
    y, gradients = mx.vjp(mm.index_scores, arrays, [mx.ones((batch, queries, keys))])
    assert not y[0].any() and all(g.shape == a.shape and not g.any() for g, a in zip(gradients, arrays, strict=True))


def test_gradients(executor, rng):
    arrays = OP.draw(rng, OP.tests[0], mx.float32)
    ours, twin = (
        mx.grad(lambda *a, f=f: (f(*a, scale=0.125) ** 2).sum(), argnums=(0, 1, 2))(*arrays)
        for f in (mm.index_scores, of_mx)
    )
    for a, b in zip(ours, twin, strict=True):
        assert_near(a, b, "gradient")


def test_vmap(executor, rng):
    q, k, weights = (mx.stack([a, a[::-1]]) for a in OP.draw(rng, OP.tests[0], mx.float32))
    found = mx.vmap(mm.index_scores, in_axes=(0, None, 0))(q, k[0], weights)
    for i in range(2):
        assert_near(found[i], mm.index_scores(q[i], k[0], weights[i]), "vmap")


def test_one_launch(rng):
    arrays = OP.draw(rng, specs.Case("", (1, 64, 1, 128, 300)), mx.float16)
    mx.eval(arrays)
    assert launched_on_apple(lambda: mm.index_scores(*arrays)) == ["index_scores_128_float16"]


def test_other_widths_are_left_to_mx(rng):
    q, k, weights = OP.draw(rng, specs.Case("", (1, 2, 1, 48, 9)), mx.float32)
    with mm.strict(False):
        mm.stats(reset=True)
        assert_near(mm.index_scores(q, k, weights), of_mx(q, k, weights), "width 48")
        assert mm.index_scores(*(a.astype(mx.float64) for a in (q, k, weights)), stream=mx.cpu).dtype == mx.float64
        assert set(mm.stats()["index_scores"]["mx"]) == {"heads of other than 64 or 128 columns", "float64"}


def test_types_are_promoted(executor, rng):
    q, k, weights = OP.draw(rng, OP.tests[0], mx.bfloat16)
    found = mm.index_scores(q, k, weights.astype(mx.float32))
    assert found.dtype == mx.float32
    wide = [a.astype(mx.float32) for a in (q, k, weights)]
    assert_near(found, mm.index_scores(*wide), "promoted", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": mx.ones((2, 3, 64))}, r"q has shape \(2,3,64\): expected four dimensions"),
        ({"k": mx.ones((2, 5, 32))}, r"k has shape \(2,5,32\), q has shape \(2,3,1,64\): expected \[batch, keys,"),
        ({"k": mx.ones((1, 5, 64))}, r"k has shape \(1,5,64\), q has shape"),
        ({"weights": mx.ones((2, 3, 1))}, r"weights has shape \(2,3,1\), q has shape .* \[batch, queries, heads\]"),
        ({"q": mx.ones((2, 3, 1, 64), mx.int32), "k": mx.ones((2, 5, 64), mx.int32),
          "weights": mx.ones((2, 1, 3), mx.int32)}, "q has dtype int32: expected float32"),
    ],
)  # fmt: skip
def test_bad_input(arguments, message):
    right = {"q": mx.ones((2, 3, 1, 64)), "k": mx.ones((2, 5, 64)), "weights": mx.ones((2, 1, 3))}
    with pytest.raises(ValueError, match=r"\[index_scores\] " + message):
        mm.index_scores(**{**right, **arguments})


def test_other_shapes_of_a_compiled_function(rng):
    step = mx.compile(lambda q, k, w: mm.index_scores(q, k, w), shapeless=True)
    for shape in ((1, 2, 1, 64, 9), (2, 3, 2, 128, 5)):
        arrays = OP.draw(rng, specs.Case("", shape), mx.float32)
        assert_near(step(*arrays), of_mx(*arrays), "compiled")
