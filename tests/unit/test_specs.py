"""The table, the references in it, and the measure of error that everything is judged by."""

import math
import re
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import DIFFERENCES, DIFFERENCES_FLOOR, FLOAT64, ROUNDINGS, SUM, units

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs import Case, Exact, norm, reference

README = Path(__file__).parents[2] / "README.md"


def test_rows_name_exported_ops():
    names = [op.name for op in specs.OPS]
    assert len(set(names)) == len(names)
    for op in specs.OPS:
        assert callable(getattr(mm, op.name))


def test_case_names_are_unique(op):
    names = [case.name for case in op.cases]
    assert len(set(names)) == len(names)
    assert any(case.quick for case in op.cases) and any(case.vjp for case in op.cases)


@pytest.mark.parametrize("name", ["gemv", "quantized_matmul", "gather_mm", "gather_qmm"])
def test_gradients_that_training_takes_are_timed_and_right(name, native):
    """Of the whole table's options, on small shapes: of x, and of dense weights."""
    op = specs.get(name)
    timed = [case for case in op.cases if case.vjp]
    assert timed and all(case.cpu_only for case in timed)  # a GPU leaves this many rows to mx
    for i, case in enumerate(timed):
        shape = (24, *case.shape[1:2], 4, 64, 64) if name.startswith("gather") else (24, 64, 64)
        small = replace(case, shape=shape)
        dtype = list(specs.DTYPES)[i % 3]
        rng = np.random.default_rng(i)
        arrays, cotangents = op.draw(rng, small, specs.DTYPES[dtype]), op.cotangents(rng, small, specs.DTYPES[dtype])
        by = [op.parameters[i][0] for i in op.trained(arrays)]
        assert by == {"gemv": ["w", "x"], "gather_mm": ["x", "w"]}.get(name, ["x"])
        check = specs.check(op, small, arrays, cotangents, mx.Device(mx.cpu))
        assert check.passed, check.detail
        assert op.bytes_moved(small, specs.DTYPES[dtype]) > sum(a.nbytes for a in arrays if a is not None) / 2


def test_twins_that_compute_on_the_host_are_timed_on_a_cpu_alone():
    """On a GPU hundreds of calls are queued at once, and each would wait there."""
    on_host = [op for op in specs.OPS if "package" in op.twin_text]
    assert {op.name for op in on_host} == {"block_quantize", "block_dequantize"}
    assert all(case.cpu_only for op in on_host for case in op.cases)


def test_get_says_which_ops_there_are():
    with pytest.raises(
        KeyError, match="rms_norm, layer_norm, softmax, add_rms_norm, norm_add_norm, qk_norm, softcap, sample"
    ):
        specs.get("rmsnorm")


def test_readme_holds_the_table():
    found = re.search(r"<!-- ops -->\n(.*?)\n<!-- /ops -->", README.read_text(), re.S)
    assert found and found.group(1) == specs.markdown(), "run python docs/where.py --write"


def test_inputs_are_fresh_and_have_outliers(op, dtype, rng):
    case = Case("draw", (64, 256))
    first, second = (op.draw(rng, case, dtype) for _ in range(2))
    for a, b, shape in zip(first, second, op.shapes(case), strict=True):
        assert a.shape == shape and a.dtype == dtype
        assert not mx.array_equal(a, b).item()
    rows = specs.widen(first[0])
    rows -= np.median(rows, axis=-1, keepdims=True)
    assert np.abs(rows).max() > 4 * rows.std()


def test_bytes_moved():
    op = specs.get("layer_norm")
    assert op.bytes_moved(Case("", (10, 4)), mx.float16) == 2 * (40 + 4 + 4 + 40)
    assert op.bytes_moved(Case("", (10, 4), vjp=True), mx.float32) == 4 * (48 + 40 + 48)
    assert specs.get("add_rms_norm").bytes_moved(Case("", (10, 4)), mx.float32) == 4 * (84 + 80)


def test_reference_agrees_with_mx(op, rng):
    case = Case("reference", (5, 33))
    arrays = op.draw(rng, case, mx.float32)
    for a, exact in zip(specs.run(op, op.twin, case, arrays), op.exact(case, arrays), strict=True):
        assert specs.error(a, exact) < SUM


@pytest.mark.parametrize("options", [{}, {"axis": 0}, {"axis": (0, 1)}, {"axis": None}], ids=str)
def test_reference_gradients_are_derivatives(op, rng, options):
    """By finite differences in float64, along a direction drawn for each argument."""
    if options and op.name != "softmax":
        options = {}
    case = Case("derivative", (4, 9), options)
    arguments = op.arguments(case)
    x = [rng.standard_normal(shape) for shape in op.shapes(case)]
    dy = [rng.standard_normal(case.shape) for _ in range(op.outputs)]

    def loss(arrays):
        result = op.reference(*arrays, **arguments)
        return sum((a * b).sum() for a, b in zip(result if isinstance(result, tuple) else [result], dy))

    gradients = op.reference_vjp(*x, *dy, **arguments)
    for i, gradient in enumerate(gradients):
        direction, h = rng.standard_normal(x[i].shape), 1e-6
        ahead, behind = ([*x[:i], x[i] + s * direction, *x[i + 1 :]] for s in (h, -h))
        slope = (loss(ahead) - loss(behind)) / (2 * h)
        assert math.isclose((gradient * direction).sum(), slope, rel_tol=DIFFERENCES, abs_tol=DIFFERENCES_FLOOR), (
            op.parameters[i]
        )


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantized_agrees_with_mx(rng, bits):
    with mx.stream(mx.cpu):
        triple = mx.quantize(mx.array(rng.standard_normal((2, 5, 96)).astype(np.float32)), 32, bits)
        weights = mx.dequantize(*triple, 32, bits)
    np.testing.assert_allclose(
        specs.dequantized(*triple, 32, bits), specs.widen(weights), rtol=ROUNDINGS, atol=ROUNDINGS
    )


def test_blocks_change_nothing(op, rng):
    """Large cases are evaluated in blocks of rows."""
    for vjp in (False, True):
        case = Case("blocks", (3, 1500, 500), vjp=vjp)
        arrays = [specs.widen(a) for a in op.draw(rng, case, mx.float32) + op.cotangents(rng, case, mx.float32)]
        whole = (op.reference_vjp if vjp else op.reference)(*arrays, **op.arguments(case))
        blocks = norm._by_rows(op.reference_vjp if vjp else op.reference, case, arrays, op.arguments(case))
        for a, b in zip(whole if isinstance(whole, tuple) else [whole], blocks, strict=True):
            np.testing.assert_allclose(a, b, rtol=FLOAT64, atol=FLOAT64)


def test_error_of_the_exact_value_is_rounding(dtype, rng):
    value = rng.standard_normal((20, 50))
    assert 0 < specs.error(mx.array(value.astype(np.float32)).astype(dtype), Exact(value)) <= units(1, dtype)


def test_a_sum_that_comes_rounded_is_no_error_of_the_weights_gradient(rng):
    """The rows' terms cancel in every column, and the rounding errors of x + residual remain."""
    op, case = specs.get("add_rms_norm"), Case("cancels", (2, 64), vjp=True)
    x, residual, dy = (rng.uniform(a, b, (1, 64)) for a, b in [(16, 20), (0.1, 0.2), (1, 2)])
    rows = [np.concatenate(a) for a in [(x, x), (residual, -residual), (dy, -dy * (x + residual) / (x - residual))]]
    x, residual, dy = (mx.array(a.astype(np.float32)).astype(mx.float16) for a in rows)
    arrays, cotangents = [x, residual, mx.ones(64, mx.float16)], [dy, mx.zeros((2, 64), mx.float16)]
    exact = op.exact(case, arrays, cotangents)[2]
    result = reference.rms_norm_vjp(specs.widen(x + residual), specs.widen(arrays[2]), specs.widen(dy), 1e-5)[1]
    result = mx.array(result.astype(np.float32)).astype(mx.float16)
    assert specs.error(result, exact) <= units(2, mx.float16) < specs.error(result, Exact(exact.value))
    assert specs.error(result + 0.02, exact) > units(2, mx.float16)


def test_error_sees_one_wrong_element(dtype, rng):
    value = rng.standard_normal((20, 50))
    wrong = value.copy()
    wrong[7, 11] += 0.1
    assert specs.error(mx.array(wrong.astype(np.float32)).astype(dtype), Exact(value)) > 0.02


@pytest.mark.parametrize(
    "actual, exact",
    [
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, math.nan]),
        ([1.0, math.inf], [1.0, 2.0]),
        ([1.0, math.inf], [1.0, -math.inf]),
        ([1.0, math.inf], [1.0, math.nan]),
        ([1.0, 2.0, 3.0], [1.0, 2.0]),
    ],
    ids=str,
)
def test_error_sees_misplaced_specials(actual, exact):
    assert specs.error(mx.array(actual), Exact(np.array(exact))) == math.inf


def test_error_takes_specials_in_their_place():
    assert specs.error(mx.array([math.nan, -math.inf, 1.0]), Exact(np.array([math.nan, -math.inf, 1.0]))) == 0
    assert specs.error(mx.array([math.inf], mx.float16), Exact(np.array([70000.0]))) == 0
    assert specs.error(mx.zeros((0, 3)), Exact(np.zeros((0, 3)))) == 0
    assert specs.error(mx.zeros((2, 3)), Exact(np.zeros((2, 3)))) == 0


def test_tolerance():
    assert specs.tolerance(mx.float16, 0.0) == 2.0**-10
    assert specs.tolerance(mx.float16, 0.0, vjp=True) == 2.0**-9
    assert specs.tolerance(mx.float32, 1e-6) == 2e-6
    assert specs.tolerance(mx.float32, math.inf) == 2.0**-21


def test_check_catches_a_wrong_op(op, dtype, rng):
    """An op that is slightly off, of another type or of another shape does not pass."""
    case = Case("wrong", (6, 40))
    arrays = op.draw(rng, case, dtype)
    as_op = lambda change: replace(op, ours=lambda *a, **k: [change(y) for y in specs.call(op.twin, a, k)])
    assert specs.check(as_op(lambda y: y), case, arrays).passed
    other = mx.float16 if dtype != mx.float16 else mx.float32
    for change in (
        lambda y: y * 1.05,
        lambda y: y.astype(other),
        lambda y: y[..., :-1],
        lambda y: mx.where(y == y.max(), 0, y),
    ):
        check = specs.check(as_op(change), case, arrays)
        assert not check.passed and check.detail


@pytest.mark.parametrize("op", specs.OPS, ids=lambda op: op.name)
def test_native_code_takes_every_case_that_is_for_tests_on_a_cpu(op, rng, native):
    """A call that is built is checked already: in strict mode it is an error where mx would have to compute it."""
    for case in op.tests:
        if case.runs_on("cpu") and not case.vjp and not case.left_to_mx:
            dtype = next(iter(op.dtypes(case)))
            specs.call(op.ours, op.draw(rng, case, specs.DTYPES[dtype]), op.arguments(case))
