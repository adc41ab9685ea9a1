"""Products of many rows by integers on an M5's matrix units: exact in integers, in any layout, refused elsewhere."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers.int8_products import GROUPS, ORDER, as_rounded, rounded
from helpers.matrices import draw, exact_product, exact_swiglu, quantize
from helpers.simulate import run
from helpers.tolerances import INT8_ACTIVATIONS, PEER

import mlx_mittens as mm
from mlx_mittens import _ext, frontend
from mlx_mittens.specs import dequantized, widen

ROWS_FILE, FILE = (f"matmul/apple/m5/{name}.metal" for name in ("int8_rows", "qmm_int8"))
TYPES = {"float32": np.float32, "float16": np.float16}
TILE = 64


@pytest.fixture(params=["m5", "shuffled"])
def layout(request):
    return request.param


@pytest.fixture
def m5(layout):
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m5", tensor_layout=layout):
        yield


def launched(call):
    """The result, and the kernels that a call launches."""
    _ext.simulator_record(True)
    try:
        result = call()
        mx.eval(result)
    finally:
        runs = _ext.simulator_record(False)
    return result, [run["kernel"] for run in runs]


def params(rows, columns, outputs, group):
    """Int8Params of contiguous arrays without a bias."""
    padded = -(-rows // TILE) * TILE
    fields = (rows, padded, columns, outputs, columns // 8, columns // group, columns // group, 0)
    return np.array(fields, np.uint32).tobytes()


def in_order(integers):
    """Columns of eight as kernels keep them."""
    return integers.reshape(*integers.shape[:-1], -1, 8)[..., ORDER].reshape(integers.shape)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_become_integers(rng, dtype, group):
    rows, columns = 5, 9 * group
    x = (10 * rng.standard_normal((rows, columns))).astype(TYPES[dtype])
    x[1] = 0
    x[2, :group] = 1e-30 if dtype == "float32" else 0
    x[3, 4] = 500
    integers = np.full((TILE, columns), 77, np.int8)
    scales = np.zeros((columns // group, TILE, 2), np.float32)
    data = [("input", x), ("output", integers), ("output", scales), params(rows, columns, 1, group)]
    run(ROWS_FILE, f"quantized_matmul_int8_rows_{group}_{dtype}", data, (-(-columns // 1024), TILE, 1), 128)
    expected, expected_scales = rounded(x, group)
    assert (integers[:rows] == in_order(expected)).all() and not integers[rows:].any()
    assert (scales[:, :rows, 0].T == expected_scales).all() and not scales[:, rows:].any()
    assert (scales[:, :rows, 1].T == expected.reshape(rows, -1, group).sum(-1)).all()
    assert np.abs(expected).reshape(rows, -1, group).max(-1)[0].min() == 127


@pytest.mark.parametrize("group, rows, columns, outputs", [(32, 70, 96, 65), (64, 64, 128, 64), (128, 3, 256, 5)])
def test_integers_are_exact(rng, layout, group, rows, columns, outputs):
    """With scales of 1 and no offset a result is a sum of integers, which float32 holds; NumPy's are int64."""
    x, q = rng.integers(-127, 128, (rows, columns)), rng.integers(0, 16, (outputs, columns))
    padded = np.zeros((-(-rows // TILE) * TILE, columns), np.int8)
    padded[:rows] = in_order(x)
    x_scales = np.ones((columns // group, len(padded), 2), np.float32)
    words = np.bitwise_or.reduce([q[:, i::8].astype(np.uint32) << np.uint32(4 * i) for i in range(8)])
    ones, zeros = (np.full((outputs, columns // group), value, np.float32) for value in (1, 0))
    y = np.zeros((rows, outputs), np.float32)
    data = [("input", a) for a in (padded, x_scales, words, ones, zeros, zeros)]
    data += [("output", y), params(rows, columns, outputs, group)]
    grid = (len(padded) // TILE, -(-outputs // TILE), 1)
    counts = run(
        *(FILE, f"quantized_matmul_qmm_int8_{group}_float32", data, grid, 128), shuffled_tensors=layout == "shuffled"
    )
    assert (y == x @ q.T).all()
    assert counts["tensor_multiplies"] == counts["byte_tensor_multiplies"] == grid[0] * grid[1] * TILE**2 * columns


@pytest.mark.parametrize(
    "rows, group, outputs, columns", [(17, 32, 71, 160), (64, 64, 64, 128), (65, 128, 130, 256), (33, 64, 3, 192)]
)
def test_products(rng, dtype, m5, rows, group, outputs, columns):
    """Right by float64 of the integers that x became, and near the products of x."""
    triple = quantize(rng, (outputs, columns), dtype, group, 4)
    x, bias = draw(rng, (rows, columns), dtype, outliers=False), draw(rng, (outputs,), dtype)
    call = lambda: mm.quantized_matmul(x, *triple, group_size=group, bits=4, bias=bias, activations="int8")
    y, kernels = launched(call)
    assert [name.rpartition("_")[0] for name in kernels] == [
        f"quantized_matmul_int8_rows_{group}",
        f"quantized_matmul_qmm_int8_{group}",
    ]
    w = dequantized(*triple, group, 4)
    of_integers = exact_product(as_rounded(widen(x), group), w, widen(bias))
    assert y.dtype == dtype and y.shape == (rows, outputs)
    assert (np.abs(widen(y) - of_integers.value) <= PEER[dtype] * (of_integers.magnitude + np.abs(widen(bias)))).all()
    exact = exact_product(widen(x), w, widen(bias)).value
    assert np.sqrt(np.mean((widen(y) - exact) ** 2)) <= INT8_ACTIVATIONS * np.sqrt(np.mean(exact**2))


def test_views(rng, m5):
    """Of x, weights and batches."""
    words, scales, biases = quantize(rng, (2 * 66, 128), mx.float16, 64, 4)
    w = [a[::2] for a in (words, scales, biases)]
    x = draw(rng, (2, 128, 20), mx.float16, outliers=False).swapaxes(1, 2)
    y, kernels = launched(lambda: mm.quantized_matmul(x, *w, group_size=64, bits=4, activations="int8"))
    assert any("qmm_int8" in name for name in kernels)
    exact = exact_product(as_rounded(widen(x).reshape(40, 128), 64), dequantized(*w, 64, 4))
    assert (np.abs(widen(y).reshape(40, 66) - exact.value) <= PEER[mx.float16] * exact.magnitude).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite(rng, dtype, m5, value):
    triple = quantize(rng, (40, 128), dtype, 64, 4)
    x = widen(draw(rng, (20, 128), dtype, outliers=False))
    finite = mx.array(x).astype(dtype)
    x[3, 70] = value
    product = lambda x: mm.quantized_matmul(x, *triple, group_size=64, bits=4, activations="int8")
    y, expected = product(mx.array(x).astype(dtype)), product(finite)
    others = np.arange(20) != 3
    assert not np.isfinite(widen(y)[3]).any() and (widen(y)[others] == widen(expected)[others]).all()
    if not np.isnan(value):  # the sign of each weight says which infinity
        weights = dequantized(*triple, 64, 4)[:, 70]
        clear = np.abs(weights) > 1e-2
        assert (np.sign(widen(y)[3]) == np.sign(value) * np.sign(weights))[clear].all()


@pytest.mark.parametrize("size", [2.0**-140, 2.0**-118, 2.0**110])
def test_tiny_and_huge_rows(rng, m5, size):
    triple = quantize(rng, (16, 128), mx.float32, 64, 4)
    x = draw(rng, (20, 128), mx.float32, outliers=False) * size
    y = mm.quantized_matmul(x, *triple, group_size=64, bits=4, activations="int8")
    exact = exact_product(as_rounded(widen(x), 64), dequantized(*triple, 64, 4))
    assert (np.abs(widen(y) - exact.value) <= PEER[mx.float32] * exact.magnitude).all()


def test_results_beyond_float16(rng, m5):
    triple = [mx.abs(a) if a.dtype == mx.float16 else a for a in quantize(rng, (8, 128), mx.float16, 64, 4)]
    y = mm.quantized_matmul(mx.full((17, 128), 6e4, mx.float16), *triple, group_size=64, bits=4, activations="int8")
    assert mx.isinf(y).all()


NOT = [
    # rows, options, the shape of weights before the last two
    (1, {}, ()),
    (16, {}, ()),
    (17, {"bits": 8}, ()),
    (17, {"transpose": False}, ()),
    (17, {"mode": "mxfp4", "group_size": 32}, ()),
    (17, {}, (2,)),
    (8, {"exact": True}, ()),
]


@pytest.mark.parametrize("rows, options, stack", NOT, ids=str)
def test_what_is_multiplied_as_without(rng, rows, options, stack):
    """Also decoding: few rows."""
    shape = {"group_size": 64, "bits": 4, "mode": "affine", **options}
    exact, transpose = shape.pop("exact", False), shape.pop("transpose", True)
    with mx.stream(mx.cpu):
        triple = mx.quantize(draw(rng, (*stack, 128, 128), mx.float16), **shape)
        x = draw(rng, (*stack, rows, 128), mx.float16)
        mx.eval(triple, x)
        with mm.simulator.enabled(gpu="m5"):
            call = lambda **more: mm.quantized_matmul(x, *triple, transpose=transpose, exact=exact, **shape, **more)
            y, kernels = launched(lambda: call(activations="int8"))
            assert not [name for name in kernels if "int8" in name]
            assert mx.array_equal(y, call())


def test_the_patch(rng):
    layer = nn.QuantizedLinear(128, 40, bias=True, group_size=64, bits=4)
    x = draw(rng, (20, 128), mx.float32, outliers=False)
    mx.eval(layer.parameters(), x)
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m5"):
        with mm.patched(activations="int8"):
            y, kernels = launched(lambda: layer(x))
            token, of_token = launched(lambda: layer(x[:1]))
        with mm.patched():
            plain = layer(x[:1])
        assert [name for name in kernels if "qmm_int8" in name] and not [name for name in of_token if "int8" in name]
        assert mx.array_equal(token, plain)
    w = dequantized(layer.weight, layer.scales, layer.biases, 64, 4)
    exact = exact_product(widen(x), w, widen(layer.bias)).value
    assert np.sqrt(np.mean((widen(y) - exact) ** 2)) <= INT8_ACTIVATIONS * np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize("by_patch", [False, True])
def test_gate_and_up(rng, by_patch):
    """Each is a product by integers, also where a patch would make one kernel of both."""
    gate, up = (quantize(rng, (72, 128), mx.float16, 64, 4) for _ in range(2))
    x = draw(rng, (20, 128), mx.float16, outliers=False)
    options = {"group_size": 64, "bits": 4}

    def call():
        if not by_patch:
            return mm.quantized_swiglu(x, gate, up, **options)
        first, second = (mx.quantized_matmul(x, *triple, **options) for triple in (gate, up))
        return _ext.try_swiglu(first, second) or nn.silu(first) * second

    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m5"), mm.patched(activations="int8"):
        y, kernels = launched(call)
    assert sum("qmm_int8" in name for name in kernels) == 2 and not [name for name in kernels if "swiglu" in name]
    exact = exact_swiglu(x, gate, up, 64, 4).value
    assert np.sqrt(np.mean((widen(y) - exact) ** 2)) <= 2 * INT8_ACTIVATIONS * np.sqrt(np.mean(exact**2))


def test_gradients_are_not_rounded(rng):
    triple = quantize(rng, (128, 64), mx.float32, 64, 4)
    x, dy = (draw(rng, (20, size), mx.float32, outliers=False) for size in (64, 128))
    product = lambda x: mm.quantized_matmul(x, *triple, group_size=64, bits=4)
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m5"):
        with mm.patched(activations="int8"):
            dx = mx.vjp(product, [x], [dy])[1][0]
            mx.eval(dx)
        assert mx.array_equal(dx, mx.vjp(product, [x], [dy])[1][0])


def test_vmap_and_a_function_of_any_shape(rng):
    triple = quantize(rng, (40, 64), mx.float16, 64, 4)
    x = draw(rng, (3, 20, 64), mx.float16, outliers=False)
    product = lambda x: mm.quantized_matmul(x, *triple, group_size=64, bits=4, activations="int8")
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m5"):
        each = mx.stack([product(row) for row in x])
        y, kernels = launched(lambda: mx.vmap(product)(x))
        assert mx.array_equal(y, each) and sum("qmm_int8" in name for name in kernels) == 1
        shapeless = mx.compile(product, shapeless=True)
        assert mx.array_equal(shapeless(x[0]), each[0]) and mx.array_equal(shapeless(x[1, :17]), each[1, :17])


@pytest.mark.parametrize("gpu", ["m4-max", "apple", "h200"])
def test_another_gpu_refuses(rng, gpu):
    """The op, and the patch."""
    triple = quantize(rng, (8, 64), mx.float16, 64, 4)
    x = draw(rng, (20, 64), mx.float16)
    refused = (
        r"activations is 'int8' on a GPU without matrix units for integers, .*expected a CPU, or an Apple GPU from "
    )
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu=gpu):
        with pytest.raises(ValueError, match=rf"\[quantized_matmul\] {refused}the M5 on with macOS 26.2; leave"):
            mm.quantized_matmul(x, *triple, group_size=64, bits=4, activations="int8")
        with pytest.raises(ValueError, match=rf"\[patch\] {refused}"), mm.patched(activations="int8"):
            pass
    assert mx.isfinite(mm.quantized_matmul(x, *triple, group_size=64, bits=4, activations="int8", stream=mx.cpu)).all()


def test_they_are_of_no_library_and_no_machine_code():
    """A Mac's compiler gets their text when they are launched, and only where the units are."""
    for file in (ROWS_FILE, FILE):
        assert frontend.is_for_matrix_units(file) and frontend.metallib(file) == ""
        text, kernel = frontend.metal_text(file, frontend.variants(file)[0].name)
        assert kernel and text.count("\ninstantiate_kernel(") == 1
    with pytest.raises(frontend.CompileError, match="tensors of Metal 4, which run on an M5 and in the simulator: no "):
        frontend.spirv(FILE, frontend.variants(FILE)[0].name)
