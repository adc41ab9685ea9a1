"""Products of many rows with chosen experts by tiles of rows that have the same one, as Apple GPUs compute prompts."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, exact_product
from helpers.support import assert_same_bits
from helpers.tolerances import SUMS, assert_product_right, of_layer, of_product, of_terms

import mlx_mittens as mm
from mlx_mittens import _ext, specs
from mlx_mittens.specs import widen

ROWS = (0, 1, 7, 8, 9, 33, 65)  # of each expert
E = len(ROWS)
FORMATS = {
    **{f"{bits}bit": {"group_size": 32, "bits": bits} for bits in (2, 3, 4, 5, 6, 8)},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}


@pytest.fixture
def launched(native, rng):
    """The kernels of an Apple GPU in an order of threads drawn anew; a call gives the names of kernels that ran."""
    with mm.strict(), mm.simulator.enabled(seed=int(rng.integers(1, 2**31)), gpu="m2-max"):
        _ext.simulator_record(True)
        yield lambda: [launch["kernel"] for launch in _ext.simulator_record(True)]
        _ext.simulator_record(False)


def stack(rng, outputs, columns, dtype, options):
    """Experts as an op takes them, and their values."""
    parts = mx.quantize(draw(rng, (E, outputs, columns), mx.float32), **options)
    parts = [a.astype(dtype) if a.dtype == mx.float32 else a for a in parts]
    group_size, bits, mode = options["group_size"], options["bits"], options.get("mode", "affine")
    return parts, specs.dequantized(*parts, *[None] * (3 - len(parts)), group_size, bits, mode)


def chosen(rng, bad=3):
    """An expert for each pair, in no order, and `bad` ones that are out of range."""
    out_of_range = rng.choice([E, E + 9, 2**31 - 1, -1], bad)
    return rng.permutation(np.concatenate([np.repeat(np.arange(E), ROWS), out_of_range]))


def is_bad(experts):
    return (experts < 0) | (experts >= E)


def exact(x, w, experts):
    """Of a row for each pair, NaN where its expert is out of range."""
    bad = is_bad(experts)
    product = exact_product(widen(x)[:, None], w[np.where(bad, 0, experts)])
    product.value[bad] = np.nan
    return specs.Exact(product.value[:, 0], product.magnitude[:, 0])


def tokens(rng, count, columns, dtype):
    return draw(rng, (count, columns), dtype, outliers=False) / columns**0.5


@pytest.mark.parametrize("name", FORMATS)
def test_products(rng, dtype, launched, name):
    """Ragged outputs and columns, experts with and without rows, in any order."""
    columns, outputs = int(rng.choice([32, 96, 160])), int(rng.choice([16, 77, 130]))
    parts, w = stack(rng, outputs, columns, dtype, FORMATS[name])
    experts = chosen(rng)
    x = tokens(rng, len(experts), columns, dtype)
    w_, scales, biases = (*parts, None)[:3]
    y = mm.gather_qmm(x[:, None], w_, scales, biases, rhs_indices=mx.array(experts), **FORMATS[name])
    assert_product_right(y[:, 0], exact(x, w, experts), dtype)
    size = 32 if name in ("2bit", "3bit", "5bit", "6bit") else 64
    kind = str(dtype).split(".")[-1]
    assert launched() == ["expert_tiles", f"gather_qmm_tiles_{name}_{size}_{kind}"]


def dense(rng, outputs, columns, dtype, first=0, pad=0):
    """Experts as mlx-lm has them, [.., columns, outputs] by rows of columns, `pad` apart and from `first` on."""
    wide = draw(rng, (E, outputs, columns + pad + first), dtype)
    return wide[..., first : first + columns].swapaxes(-1, -2)


@pytest.mark.parametrize("first, pad", [(0, 0), (8, 24), (8, 3), (3, 5)])
def test_dense_products(rng, dtype, launched, first, pad):
    """Rows that tiles read where they lie, and rows that do not begin on 16 bytes, which are copied."""
    columns, outputs = int(rng.choice([8, 40, 72, 136])), int(rng.choice([16, 77, 130]))
    w = dense(rng, outputs, columns, dtype, first, pad)
    experts = chosen(rng)
    x = tokens(rng, len(experts), columns, dtype)
    y = mm.gather_mm(x[:, None], w, rhs_indices=mx.array(experts))
    assert_product_right(y[:, 0], exact(x, widen(w).swapaxes(-1, -2), experts), dtype)
    kernels = [name for name in launched() if not name.startswith("copy")]
    assert kernels == ["expert_tiles", f"gather_mm_tiles_64_{str(dtype).split('.')[-1]}"]


def test_dense_experts_that_lie_by_columns(rng, launched):
    """One that is still to be computed may lie so, and is copied."""
    w = draw(rng, (E, 64, 24), mx.float16)
    experts = chosen(rng)
    x = tokens(rng, len(experts), 64, mx.float16)
    y = mm.gather_mm(x[:, None], w * 1, rhs_indices=mx.array(experts))
    assert_product_right(y[:, 0], exact(x, widen(w).swapaxes(-1, -2), experts), mx.float16)
    assert launched()[-1] == "gather_mm_tiles_64_float16"


@pytest.mark.parametrize("columns, outputs", [(36, 24), (64, 15)])
def test_dense_experts_without_tiles(rng, launched, columns, outputs):
    """Rows that are no whole 16 bytes, and outputs of less than a simdgroup."""
    w = dense(rng, outputs, columns, mx.bfloat16)
    experts = chosen(rng)
    x = tokens(rng, len(experts), columns, mx.bfloat16)
    y = mm.gather_mm(x[:, None], w, rhs_indices=mx.array(experts))
    assert_product_right(y[:, 0], exact(x, widen(w).swapaxes(-1, -2), experts), mx.bfloat16)
    assert launched() == ["gather_mm_bfloat16"]


def test_dense_experts_of_one_matrix(rng, launched):
    """Without an axis of experts."""
    w = draw(rng, (40, 64), mx.float32)
    x = tokens(rng, 70, 64, mx.float32)
    y = mm.gather_mm(x[:, None], w.T, rhs_indices=mx.zeros((70,), mx.uint32))
    assert_product_right(y[:, 0], exact_product(widen(x), widen(w)), mx.float32)
    assert launched() == ["expert_tiles", "gather_mm_tiles_64_float32"]


def test_gradients_and_vmap_of_dense_experts(rng, launched):
    w = dense(rng, 32, 32, mx.float32)
    experts = mx.array(rng.integers(0, E, 70))
    x = tokens(rng, 70, 32, mx.float32)[:, None]
    call = lambda x, w: mm.gather_mm(x, w, rhs_indices=experts)
    cotangent = draw(rng, (70, 1, 32), mx.float32, outliers=False)
    with mm.strict(False):
        of_x, of_w = mx.vjp(call, [x, w], [cotangent])[1]
    expected = mx.vjp(lambda x, w: mx.gather_mm(x, w, rhs_indices=experts), [x, w], [cotangent])[1]
    for found, other in zip((of_x, of_w), expected, strict=True):
        np.testing.assert_allclose(found, other, rtol=SUMS, atol=of_terms(70))
    assert_same_bits(mx.vmap(call, (0, None))(mx.stack([x, x]), w)[1], call(x, w), "vmap")
    assert launched().count("gather_mm_tiles_64_float32") > 1


def test_inputs_and_rows_of_their_own(rng, launched):
    """Pairs that name their input, some out of range, of several rows each."""
    options = FORMATS["4bit"]
    (w, scales, biases), wide = stack(rng, 24, 64, mx.float16, options)
    x = draw(rng, (5, 3, 64), mx.float16, outliers=False) / 8
    lhs, rhs = rng.integers(0, 6, (8, 4)), rng.integers(0, E, (8, 4))
    y = mm.gather_qmm(x, w, scales, biases, mx.array(lhs), mx.array(rhs), **options)
    bad = lhs >= 5
    product = exact_product(widen(x)[np.where(bad, 0, lhs)], wide[rhs])
    product.value[bad] = np.nan
    assert_product_right(y, product, mx.float16)
    assert launched()[0] == "expert_tiles"


def test_order_changes_no_bits(rng, dtype, native):
    """The order of the rows, and of the threads."""
    options = FORMATS["4bit"]
    (w, scales, biases), _ = stack(rng, 40, 64, dtype, options)
    experts = chosen(rng)
    x = tokens(rng, len(experts), 64, dtype)

    def products(order, seed):
        with mm.strict(), mm.simulator.enabled(seed=seed, gpu="m1"):
            y = mm.gather_qmm(x[mx.array(order)][:, None], w, scales, biases, None, mx.array(experts[order]), **options)
            mx.eval(y)
        return y[mx.array(np.argsort(order))]

    y = products(np.arange(len(experts)), 1)
    for seed in (2, 3):
        assert_same_bits(products(np.argsort(experts, kind="stable"), seed), y, "sorted")


@pytest.mark.parametrize("name", FORMATS)
def test_gated_products(rng, dtype, launched, name):
    """With biases where values are clipped, as gpt-oss has them."""
    activation = "clipped" if name in ("mxfp4", "5bit") else "swiglu"
    columns, outputs = int(rng.choice([64, 96])), int(rng.choice([8, 45, 64]))
    (gate, wide_gate), (up, wide_up) = (stack(rng, outputs, columns, dtype, FORMATS[name]) for _ in "gu")
    experts = chosen(rng)
    x = 4 * tokens(rng, len(experts), columns, dtype)
    clips = activation == "clipped"
    bias = tuple(draw(rng, (E, outputs), dtype) for _ in "gu") if clips else None
    options = {**FORMATS[name], "bias": bias, "activation": activation}
    y = mm.gather_swiglu(x[:, None], gate, up, rhs_indices=mx.array(experts), **options)
    bad, inside = is_bad(experts), np.where(is_bad(experts), 0, experts)
    g, u = (exact(x, w, inside).value for w in (wide_gate, wide_up))
    if bias:
        g, u = (a + widen(b)[inside] for a, b in zip((g, u), bias, strict=True))
        g, u = np.minimum(g, 7), np.clip(u, -7, 7)
    expected = g / (1 + np.exp(-g * (1.702 if clips else 1))) * (u + 1 if clips else u)
    y = widen(y[:, 0])
    assert np.isnan(y[bad]).all()
    limit = of_layer(dtype)
    np.testing.assert_allclose(y[~bad], expected[~bad], rtol=limit, atol=limit * abs(expected).max())
    assert any(k.startswith("gather_swiglu_tiles") for k in launched())


@pytest.mark.parametrize("outputs", [48, 77])
def test_weighted_sums(rng, dtype, launched, outputs):
    """Of more experts than the kernel for a token takes, with biases; a sum with an index out of range is NaN."""
    options = FORMATS["mxfp4"]
    (w, scales), wide = stack(rng, outputs, 64, dtype, options)
    sums, of_each = 9, 17
    x = draw(rng, (sums, of_each, 64), dtype, outliers=False) / 8
    experts = rng.integers(0, E, (sums, of_each))
    experts[4, 2] = E
    weights = mx.softmax(draw(rng, (sums, of_each), mx.float32, outliers=False), -1)
    bias = draw(rng, (E, outputs), dtype)
    y = mm.gather_sum(x, w, scales, None, mx.array(experts), weights, bias=bias, **options)
    inside = np.minimum(experts, E - 1)
    terms = exact_product(widen(x)[:, :, None], wide[inside]).value[:, :, 0] + widen(bias)[inside]
    expected = (terms * widen(weights)[..., None]).sum(1)
    found = widen(y)
    assert np.isnan(found[4]).all()
    others = np.arange(sums) != 4
    limit = of_product(dtype)
    np.testing.assert_allclose(found[others], expected[others], rtol=limit, atol=limit * abs(terms).max())
    kind = str(dtype).split(".")[-1]
    assert launched() == ["expert_tiles", f"gather_qmm_tiles_mxfp4_64_{kind}", f"row_sums_{kind}"]


@pytest.mark.parametrize("count, experts", [(65, 1), (70, 200), (1025, 3)])
def test_tiles_hold_each_row_once(rng, launched, count, experts):
    """Fewer rows than experts, and more than the threads that sort them."""
    options = FORMATS["8bit"]
    w = mx.quantize(draw(rng, (experts, 16, 32), mx.float32), **options)
    chosen = rng.integers(0, experts, count)
    x = tokens(rng, count, 32, mx.float32)
    y = mm.gather_qmm(x[:, None], *w, rhs_indices=mx.array(chosen), **options)
    wide = specs.dequantized(*w, 32, 8)
    product = exact_product(widen(x)[:, None], wide[chosen])
    assert_product_right(y, product, mx.float32)
    assert launched()[0] == "expert_tiles"


def test_few_outputs_are_no_tiles(rng, launched):
    (w, scales, biases), wide = stack(rng, 15, 32, mx.float16, FORMATS["4bit"])
    experts = chosen(rng)
    x = tokens(rng, len(experts), 32, mx.float16)
    y = mm.gather_qmm(x[:, None], w, scales, biases, rhs_indices=mx.array(experts), **FORMATS["4bit"])
    assert_product_right(y[:, 0], exact(x, wide, experts), mx.float16)
    assert "expert_tiles" not in launched()


def test_gradients_and_vmap(rng, launched):
    options = FORMATS["4bit"]
    (w, scales, biases), wide = stack(rng, 32, 32, mx.float32, options)
    experts = rng.integers(0, E, 70)
    x = tokens(rng, 70, 32, mx.float32)[:, None]
    call = lambda x: mm.gather_qmm(x, w, scales, biases, rhs_indices=mx.array(experts), **options)
    cotangent = draw(rng, (70, 1, 32), mx.float32, outliers=False)
    with mm.strict(False):
        (gradient,) = mx.vjp(call, [x], [cotangent])[1]
    product = exact_product(widen(cotangent), wide[experts].swapaxes(-1, -2))
    assert_product_right(gradient, product, mx.float32)
    assert_same_bits(mx.vmap(call)(mx.stack([x, x]))[1], call(x), "vmap")
