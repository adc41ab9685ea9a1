"""An Apple GPU with matrix units, as the M5 has them: calls that go to mx there, whose kernels use them."""

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from helpers.attention import exact_of, inputs, run
from helpers.matrices import draw
from helpers.tolerances import assert_attention_right, assert_near, units

import mlx_mittens as mm
from mlx_mittens import _ext, specs
from mlx_mittens.specs.attention import twin_mask

HALF, FULL = mx.float16, mx.float32


@pytest.fixture
def m5(native, lenient, rng):
    """The simulator in the place of an M5; a call gives the launches."""
    with mm.simulator.enabled(seed=int(rng.integers(1, 2**31)), gpu="m5"):
        _ext.simulator_record(True)
        mm.stats(reset=True)
        yield lambda: [launch["kernel"] for launch in _ext.simulator_record(True)]
        _ext.simulator_record(False)


def assert_sent(op, kernels, what, sent):
    """To mx with the reason for it, or to a kernel."""
    reasons = {} if op not in mm.stats() else mm.stats()[op]["mx"]
    assert reasons == ({f"many {what} where there are matrix units": 1} if sent else {})
    assert bool(kernels) != sent


def test_which_gpus_have_them():
    """As MLX's rule has it, by the architecture's generation. Phones have matrix units one generation later."""
    have = {f"applegpu_g{n}{size}": n >= 17 + (size == "p") for n in (9, 13, 16, 17, 18, 20) for size in "pgsd"}
    assert {name: _ext.has_matrix_units(name) for name in have} == have
    assert not _ext.has_matrix_units("") and not _ext.has_matrix_units("g7")


ATTENTION = [
    # dtype, queries, keys, width, options, whether it goes to mx
    (HALF, 16, 40, 64, {}, False),
    (HALF, 17, 40, 64, {}, True),
    (mx.bfloat16, 33, 300, 128, {"mask": "causal"}, True),
    (HALF, 20, 40, 80, {}, False),
    (HALF, 20, 40, 256, {}, True),
    (HALF, 40, 200, 64, {"window": 50}, False),
    (HALF, 40, 199, 64, {"window": 50}, True),
    (HALF, 20, 40, 64, {"force_fused": True}, False),
    (FULL, 20, 40, 64, {}, False),
]


@pytest.mark.parametrize("dtype, queries, keys, width, options, sent", ATTENTION)
def test_prompts(rng, m5, dtype, queries, keys, width, options, sent):
    q, k, v = inputs(rng, (1, 2, 1, queries, keys, width), dtype)
    y = run(lambda: mm.scaled_dot_product_attention(q, k, v, scale=width**-0.5, **options))
    assert_sent("scaled_dot_product_attention", m5(), "queries", sent)
    mask, window = options.get("mask"), options.get("window")
    twin = mx.fast.scaled_dot_product_attention(q, k, v, scale=width**-0.5, mask=twin_mask(mask, window, queries, keys))
    assert_attention_right(y, twin, exact_of(q, k, v, width**-0.5, mask, None, window), dtype)


def operands(rng, dtype, rows, columns, outputs, transpose):
    """x and w of a product."""
    w = draw(rng, (outputs, columns) if transpose else (columns, outputs), dtype, outliers=False)
    return draw(rng, (rows, columns), dtype, outliers=False), w


def product(x, w, transpose):
    return specs.widen(x) @ (specs.widen(w).T if transpose else specs.widen(w))


DENSE = [
    # dtype, rows, columns, outputs, transpose, whether it goes to mx
    (HALF, 8, 64, 40, False, False),
    (HALF, 9, 64, 40, False, True),
    (HALF, 15, 64, 40, True, False),
    (HALF, 16, 64, 40, True, True),
    (HALF, 9, 66, 40, True, True),
    (FULL, 16, 64, 40, True, False),
]


@pytest.mark.parametrize("dtype, rows, columns, outputs, transpose, sent", DENSE)
def test_dense_products(rng, m5, dtype, rows, columns, outputs, transpose, sent):
    x, w = operands(rng, dtype, rows, columns, outputs, transpose)
    y = run(lambda: mm.gemv(w, x, transpose=transpose))
    assert_sent("gemv", m5(), "rows of x", sent)
    assert_near(y, product(x, w, transpose), "y", units(8, dtype))


QUANTIZED = [
    # dtype, rows, columns, outputs, transpose, whether it goes to mx
    (HALF, 12, 4160, 8, True, False),
    (HALF, 13, 4160, 8, True, True),
    (HALF, 13, 64, 4160, True, True),
    (HALF, 13, 4128, 8, True, False),
    (HALF, 24, 2112, 8, True, False),
    (HALF, 25, 2112, 8, True, True),
    (HALF, 32, 64, 8, True, False),
    (HALF, 33, 64, 8, True, True),
    (HALF, 33, 8, 64, False, True),
    (FULL, 33, 64, 8, True, False),
]


@pytest.mark.parametrize("dtype, rows, columns, outputs, transpose, sent", QUANTIZED)
def test_quantized_products(rng, m5, dtype, rows, columns, outputs, transpose, sent):
    x, w = operands(rng, dtype, rows, columns, outputs, transpose)
    w = mx.quantize(w, 32, 4)
    y = run(lambda: mm.quantized_matmul(x, *w, transpose=transpose, group_size=32, bits=4))
    assert_sent("quantized_matmul", m5(), "rows of x", sent)
    exact = product(x, mx.dequantize(*w, group_size=32, bits=4), transpose)
    assert_near(y, exact, "y", units(64, dtype))


def test_stacks_of_matrices_count_the_rows_of_each(rng, m5):
    w = mx.quantize(draw(rng, (3, 8, 64), HALF, outliers=False), 32, 4)
    for rows, sent in ((32, False), (33, True)):
        mm.stats(reset=True)
        run(
            lambda rows=rows: mm.quantized_matmul(
                draw(rng, (3, rows, 64), HALF, outliers=False), *w, group_size=32, bits=4
            )
        )
        assert_sent("quantized_matmul", m5(), "rows of x", sent)


@pytest.mark.parametrize("rows, sent", [(32, False), (33, True)])
def test_gate_and_up(rng, m5, rows, sent):
    gate, up = (mx.quantize(draw(rng, (8, 64), HALF, outliers=False), 32, 4) for _ in range(2))
    x = draw(rng, (rows, 64), HALF, outliers=False)
    y = run(lambda: mm.quantized_swiglu(x, gate, up, 32, 4))
    assert_sent("quantized_swiglu", m5(), "rows of x", sent)
    a, b = (specs.widen(x) @ specs.widen(mx.dequantize(*w, group_size=32, bits=4)).T for w in (gate, up))
    assert_near(y, a / (1 + np.exp(-a)) * b, "y", units(64, HALF))


def test_the_patch_leaves_them_to_mx_unless_it_is_strict(rng, m5):
    q, k, v = inputs(rng, (1, 2, 1, 20, 40, 64), HALF)
    call = lambda: mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1)
    for options, sent in (({}, True), ({"strict": True}, False)):
        mm.stats(reset=True)
        with mm.patched(**options):
            run(call)
        assert_sent("scaled_dot_product_attention", m5(), "queries", sent)
    mm.stats(reset=True)
    with mm.strict():
        run(lambda: mm.scaled_dot_product_attention(q, k, v, scale=0.1))
    assert_sent("scaled_dot_product_attention", m5(), "queries", False)


@pytest.mark.parametrize("tf32", ["0", "1", ""])
def test_float32_goes_where_mx_takes_it_as_tf32(tf32):
    """Which it does unless the environment forbids it."""
    code = (
        "import mlx.core as mx, mlx_mittens as mm\n"
        "with mm.simulator.enabled(gpu='m5'): mm.gemv(mx.ones((8, 64)), mx.ones((16, 64)))\n"
        "print(sum(mm.stats().get('gemv', {'mx': {}})['mx'].values()))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MLX_ENABLE_TF32"}
    environment |= {"MLX_ENABLE_TF32": tf32} if tf32 else {}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == ("0" if tf32 == "0" else "1")
