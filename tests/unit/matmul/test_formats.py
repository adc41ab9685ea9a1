"""Products with weights in every format of mx.quantize: on the CPU all are native."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers.matrices import draw, exact_product
from helpers.tolerances import OUTLIERS, SUMS, assert_product_right, assert_right, of_terms

import mlx_mittens as mm
from mlx_mittens.specs import Case, Exact, dequantized, widen
from mlx_mittens.specs import get as op_of

# mode, bits, group size
AFFINE = [("affine", bits, group) for bits in (2, 3, 5, 6) for group in (32, 64, 128)]
FLOATS = [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
FORMATS = [*AFFINE, *FLOATS]


@pytest.fixture(params=FORMATS, ids=lambda f: f"{f[0]}-{f[1]}-{f[2]}")
def form(request):
    return request.param


def quantize(rng, shape, dtype, form):
    """The result of mx.quantize, and the weights in float64; of the floats with every scale and value that there is."""
    mode, bits, group = form
    w = draw(rng, shape, mx.float32) * mx.array(np.exp2(rng.integers(-3, 4, (shape[0], 1))).astype(np.float32))
    with mx.stream(mx.cpu):
        arrays = mx.quantize(w, group_size=group, bits=bits, mode=mode)
        mx.eval(arrays)
    if mode == "affine":
        arrays = (arrays[0], arrays[1].astype(dtype), arrays[2].astype(dtype))
    exact = dequantized(*arrays, *([] if mode == "affine" else [None]), group, bits, mode)
    return arrays, exact


def multiply(x, arrays, form, transpose=True, bias=None):
    mode, bits, group = form
    biases = arrays[2] if len(arrays) == 3 else None
    return mm.quantized_matmul(x, arrays[0], arrays[1], biases, transpose, group, bits, mode, bias=bias)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize(
    "rows, groups, other", [(1, 3, 7), (2, 9, 37), (5, 1, 66), (8, 17, 5), (9, 4, 70), (33, 9, 12)]
)
def test_shapes(rng, dtype, native, form, rows, groups, other, transpose):
    columns = groups * form[2]
    columns = -(-columns // 32) * 32
    arrays, w = quantize(rng, (other, columns), dtype, form)
    x = draw(rng, (rows, columns if transpose else other), dtype)
    bias = draw(rng, (other if transpose else columns,), dtype) if rows % 2 else None
    y = multiply(x, arrays, form, transpose, bias)
    assert_product_right(y, exact_product(widen(x), w if transpose else w.T, widen(bias)), dtype)


@pytest.mark.parametrize("form", [*AFFINE[1::3], *FLOATS], ids=lambda f: f"{f[0]}-{f[1]}-{f[2]}")
@pytest.mark.parametrize("rows, columns, outputs", [(1, 64, 1), (1, 1728, 7), (2, 576, 3), (3, 64, 6), (4, 1088, 9)])
def test_few_rows(rng, dtype, executor, form, rows, columns, outputs):
    """By the kernels, too: fewer outputs than a simdgroup has, columns that fill no whole step."""
    arrays, w = quantize(rng, (outputs, columns), dtype, form)
    x, bias = draw(rng, (rows, columns), dtype), draw(rng, (outputs,), dtype)
    assert_product_right(multiply(x, arrays, form, bias=bias), exact_product(widen(x), w, widen(bias)), dtype)


@pytest.mark.parametrize("form", [*AFFINE[1::3], *FLOATS], ids=lambda f: f"{f[0]}-{f[1]}-{f[2]}")
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("rows, groups, other", [(1, 3, 300), (5, 5, 1), (8, 9, 41), (16, 1, 33)])
def test_several_rows(rng, dtype, form, rows, groups, other, transpose):
    """By matrices: columns and outputs that fill none, and a second block of rows."""
    packed = -(-groups * form[2] // 32) * 32
    arrays, w = quantize(rng, (other, packed), dtype, form)
    x, bias = (
        draw(rng, (rows, packed if transpose else other), dtype),
        draw(rng, (other if transpose else packed,), dtype),
    )
    with mm.simulator.enabled():
        y = multiply(x, arrays, form, transpose, bias)
        mx.eval(y)
    assert_product_right(y, exact_product(widen(x), w if transpose else w.T, widen(bias)), dtype)


@pytest.mark.parametrize(
    "form, seeds", [(FLOATS[1], (19, 20, 33, 136)), (FLOATS[2], (110, 142, 263, 318))], ids=("mxfp8", "nvfp4")
)
def test_sums_of_matrices_are_short(form, seeds):
    """Draws that sums of 64 or of 32 float32 products took further off than rounding and mx's own error allow."""
    mode, bits, group = form
    options = {"transpose": True, "group_size": group, "bits": bits, "mode": mode}
    case, op = Case("test", (3, 576, 6), options), op_of("quantized_matmul")
    for seed in seeds:
        with mm.simulator.enabled(seed=seed + 1, gpu="m1"):
            assert_right(op, case, op.draw(np.random.default_rng(seed), case, mx.float32))


def test_several_panels(rng, native, form):
    arrays, w = quantize(rng, (70, 2176), mx.float32, form)
    for transpose in (True, False):
        x = draw(rng, (11, 2176 if transpose else 70), mx.float32)
        exact = exact_product(widen(x), w if transpose else w.T)
        assert_product_right(multiply(x, arrays, form, transpose), exact, mx.float32)


@pytest.mark.parametrize("form", FLOATS, ids=str)
def test_every_value_and_scale(native, form):
    """All bytes as mx has them, values that are no number too. mx takes the power of two that is none for infinity."""
    mode, bits, group = form
    words = mx.array(np.tile(np.arange(256, dtype=np.uint8), 4).view(np.uint32).reshape(1, -1))
    columns = words.shape[1] * 32 // bits
    for scale in [*range(0, 255, 5), 1, 126, 127, 128, 254, *([255] if mode == "nvfp4" else [])]:
        scales = mx.full((1, columns // group), scale, mx.uint8)
        with np.errstate(over="ignore"):
            w = np.float32(dequantized(words, scales, None, group, bits, mode))
        np.testing.assert_array_equal(
            w, np.array(mx.dequantize(words, scales, None, group, bits, mode, None, mx.float32))
        )
        y = mm.quantized_matmul(mx.ones((1, 1)), words, scales, None, False, group, bits, mode)
        np.testing.assert_array_equal(np.array(y), w)


@pytest.mark.parametrize("form", FLOATS, ids=str)
def test_what_is_no_number(executor, form):
    """A row with such a scale or value is none, the others stay."""
    mode, bits, group = form
    words = np.full((3, 64 * bits // 32), 0x11111111, np.uint32)
    scales = np.full((3, 64 // group), 0x38, np.uint8)
    scales[0, 1] = 127 if mode == "nvfp4" else 255
    words[1, 5] = 0x1111FF11 if bits == 8 else words[1, 5]
    y = np.array(multiply(mx.ones((1, 64)), (mx.array(words), mx.array(scales)), form))[0]
    np.testing.assert_array_equal(np.isnan(y), [True, bits == 8, False])


def test_stacks_and_strides(rng, native, form):
    arrays, w = quantize(rng, (2 * 3 * 20, 128), mx.float16, form)
    stacks = [a.reshape(2, 3, 20, -1)[:, :, 4:17] for a in arrays]
    x = draw(rng, (2, 3, 2, 128), mx.float16)
    exact = exact_product(widen(x), w.reshape(2, 3, 20, -1)[:, :, 4:17])
    assert_product_right(multiply(x, stacks, form), exact, mx.float16)


@pytest.mark.parametrize("rows", [1, 3, 9, 20])
def test_gate_and_up(rng, dtype, native, form, rows):
    assert_gated(rng, dtype, form, rows)


@pytest.mark.parametrize("form", [*AFFINE[1::3], *FLOATS], ids=lambda f: f"{f[0]}-{f[1]}-{f[2]}")
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_gate_and_up_by_kernels(rng, dtype, form, rows):
    with mm.simulator.enabled():
        assert_gated(rng, dtype, form, rows)


def assert_gated(rng, dtype, form, rows):
    mode, bits, group = form
    (gate, g), (up, u) = (quantize(rng, (21, 160 if group < 64 else 256), dtype, form) for _ in range(2))
    x = draw(rng, (rows, g.shape[1]), dtype) * (0.1 / g.shape[1] ** 0.5)
    y = mm.quantized_swiglu(x, gate, up, group, bits, mode)
    gated, linear = (exact_product(widen(x), w) for w in (g, u))
    silu = gated.value / (1 + np.exp(-gated.value))
    size = np.abs(silu) * linear.magnitude + (np.abs(gated.magnitude) + np.abs(silu)) * np.abs(linear.value)
    assert_product_right(y, Exact(silu * linear.value, size), dtype)


def test_gradients_vmap_and_compile(rng, native, form):
    arrays, w = quantize(rng, (64, 128), mx.float32, form)
    x, cotangent = draw(rng, (3, 128), mx.float32), draw(rng, (3, 64), mx.float32)
    dense = mx.array(w.astype(np.float32))
    ours = lambda x: multiply(x, arrays, form)
    for f in (lambda f: mx.vjp(f, [x], [cotangent])[1][0], lambda f: mx.jvp(f, [x], [x])[1][0]):
        np.testing.assert_allclose(
            np.array(f(ours)), np.array(f(lambda x: x @ dense.T)), rtol=OUTLIERS, atol=of_terms(2000)
        )
    for f in (mx.vmap(ours), mx.compile(ours)):
        np.testing.assert_allclose(np.array(f(x)), np.array(ours(x)), rtol=SUMS, atol=of_terms(200))


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_gradients_of_scales_and_biases(rng, native, bits):
    (words, scales, biases), _ = quantize(rng, (6, 64), mx.float32, ("affine", bits, 32))
    x, cotangent = draw(rng, (2, 64), mx.float32), draw(rng, (2, 6), mx.float32)

    def product(of):
        return lambda s, b: of(x, words, s, b, True, 32, bits)

    with mm.strict(False):
        found, expected = (
            mx.vjp(product(of), [scales, biases], [cotangent])[1] for of in (mm.quantized_matmul, mx.quantized_matmul)
        )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=OUTLIERS, atol=of_terms(200))


def test_layers(rng, native, form):
    """A layer of a model, as users have it."""
    mode, bits, group = form
    layer = nn.Linear(128, 12).to_quantized(group, bits, mode=mode)
    x = draw(rng, (2, 128), mx.float32, outliers=False)
    y = mm.quantized_matmul(
        x, layer.weight, layer.scales, layer.get("biases"), True, group, bits, mode, bias=layer.bias
    )
    np.testing.assert_allclose(np.array(y), np.array(layer(x)), rtol=SUMS, atol=of_terms(20))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"mode": "mxfp4", "bits": 8}, ValueError, r"bits is 8 and group_size is 32: mode mxfp4 expects 4 and 32"),
        ({"mode": "nvfp4", "group_size": 32}, ValueError, r"mode nvfp4 expects 4 and 16"),
        ({"mode": "nvfp4"}, ValueError, r"expected shape \(8,4\)"),
        ({"mode": "mxfp8"}, ValueError, r"expected shape \(8,1\)"),
        ({"mode": "mxfp4", "scales": mx.zeros((8, 2))}, mm.DtypeError, r"scales has dtype float32: expected uint8"),
        ({"mode": "mxfp4", "biases": mx.zeros((8, 2))}, ValueError, r"biases has shape \(8,2\): expected None"),
        ({"mode": "mxfp4", "x": mx.zeros((1, 64), mx.int32)}, mm.DtypeError, r"x has dtype int32"),
        ({"mode": "affine", "bits": 3}, mm.DtypeError, r"scales has dtype uint8"),
    ],
)
def test_bad_input(change, error, message):
    arguments = {"x": mx.zeros((1, 64)), "w": mx.zeros((8, 8), mx.uint32), "scales": mx.zeros((8, 2), mx.uint8)}
    arguments |= {"biases": mx.zeros((8, 2)) if change["mode"] == "affine" else None, **change}
    with pytest.raises(error, match=r"\[quantized_matmul\] .*" + message):
        mm.quantized_matmul(arguments.pop("x"), arguments.pop("w"), **arguments)


def test_bad_gate_and_up(rng, native):
    gate, _ = quantize(rng, (16, 64), mx.float32, ("mxfp4", 4, 32))
    with pytest.raises(ValueError, match=r"\[quantized_swiglu\] up has 1 arrays: mode mxfp4 expects 2, w and scales"):
        mm.quantized_swiglu(mx.zeros((1, 64)), gate, gate[:1], mode="mxfp4")
    with pytest.raises(ValueError, match=r"\[quantized_swiglu\] gate has 2 arrays: mode affine expects 3"):
        mm.quantized_swiglu(mx.zeros((1, 64)), gate, gate)
