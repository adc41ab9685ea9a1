"""Bad input is an exception that says what is wrong, before anything runs."""

import inspect
import itertools
import math

import mlx.core as mx
import numpy as np
import pytest
from helpers.calls import CALLS
from helpers.tolerances import SUMS

import mlx_mittens as mm
from mlx_mittens import specs

X = mx.ones((3, 8))
W = mx.ones((8,))
NORMS = {
    "rms_norm": lambda x=X, weight=W, eps=1e-5: mm.rms_norm(x, weight, eps),
    "layer_norm": lambda x=X, weight=W, bias=W, eps=1e-5: mm.layer_norm(x, weight, bias, eps),
    "add_rms_norm": lambda x=X, residual=X, weight=W, eps=1e-5: mm.add_rms_norm(x, residual, weight, eps),
    "norm_add_norm": lambda x=X, residual=X, weight=W, next_weight=W, eps=1e-5: mm.norm_add_norm(
        x, residual, weight, next_weight, eps
    ),
}
VECTORS = [("rms_norm", "weight"), ("layer_norm", "weight"), ("layer_norm", "bias"), ("add_rms_norm", "weight")]
VECTORS += [("norm_add_norm", "weight"), ("norm_add_norm", "next_weight")]
ROWS = [("rms_norm", "x"), ("layer_norm", "x"), ("add_rms_norm", "x"), ("add_rms_norm", "residual")]
ROWS += [("norm_add_norm", "x"), ("norm_add_norm", "residual")]


def message_of(error, function, *arguments, **options) -> str:
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    return str(caught.value)


def assert_names(message: str, *words):
    for word in words:
        assert str(word) in message, f"{word!r} is not in: {message}"


@pytest.mark.parametrize("eps", [-1e-5, -math.inf, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("op", NORMS)
def test_eps(op, eps):
    message = message_of(ValueError, NORMS[op], eps=eps)
    assert_names(message, f"[{op}]", "eps")
    assert_names(message.lower(), "nan" if math.isnan(eps) else "inf" if math.isinf(eps) else "-1e-05")


@pytest.mark.parametrize("op, argument", ROWS + VECTORS)
def test_complex(op, argument):
    a = mx.zeros((3, 8) if (op, argument) in ROWS else (8,), mx.complex64)
    message = message_of(mm.DtypeError, NORMS[op], **{argument: a})
    assert_names(message, f"[{op}]", argument, "complex64", "float32", "float16", "bfloat16")


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint8, mx.bool_, mx.int64], ids=str)
@pytest.mark.parametrize("op", NORMS)
def test_integers(op, dtype):
    arguments = {name: mx.zeros((3, 8) if (op, name) in ROWS else (8,), dtype) for o, name in ROWS + VECTORS if o == op}
    message = message_of(mm.DtypeError, NORMS[op], **arguments)
    assert_names(message, f"[{op}]", "x", str(dtype).removeprefix("mlx.core."), "float32", "float16", "bfloat16")


def test_integers_beside_floats_are_promoted_as_mx_promotes_them():
    weight = mx.arange(8)
    for x in (X, X.astype(mx.float16)):
        y, twin = mm.rms_norm(x, weight, 1e-5), mx.fast.rms_norm(x, weight, 1e-5)
        assert y.dtype == twin.dtype and mx.allclose(y, twin).item()


def test_float64_goes_to_mx_or_is_refused():
    with mx.stream(mx.cpu):
        x = X.astype(mx.float64)
        assert_names(message_of(RuntimeError, mm.rms_norm, x, None, 1e-5), "[rms_norm]", "strict", "float64")
        with mm.strict(False):
            assert mm.rms_norm(x, None, 1e-5).dtype == mx.float64


def test_complex_softmax_is_not_ours():
    a = mx.ones((3, 8), mx.complex64)
    assert_names(message_of(RuntimeError, mm.softmax, a, axis=-1), "[softmax]", "strict", "complex64")
    with mm.strict(False):
        assert mx.allclose(mm.softmax(a, axis=-1), mx.softmax(a, axis=-1))


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_integers_are_refused_without_a_weight(op):
    """As in mx: a bias does not make them floating."""
    message = message_of(mm.DtypeError, NORMS[op], x=mx.ones((3, 8), mx.int32), weight=None)
    assert_names(message, f"[{op}]", "x has dtype int32")


DTYPES = [mx.float64, mx.complex64, mx.bool_, mx.int32, mx.uint8, mx.uint32, mx.int64]
ONE_OF_EACH = list({(call.op, *call.arguments): call for call in reversed(CALLS) if call.covered}.values())


@pytest.mark.parametrize("call", ONE_OF_EACH, ids=lambda call: call.name)
def test_every_dtype_of_every_array(call, lenient, native, rng):
    """An argument of a dtype that an op does not take is the op's own error; of one that it takes, it is a number."""
    arrays = call.arrays(rng)
    for name, dtype in itertools.product(arrays, DTYPES):
        if arrays[name].dtype == dtype or (name == "mask" and dtype == mx.bool_):  # which is another mask
            continue
        a = mx.round(10 * mx.abs(arrays[name])) + 1 if call.arguments[name].is_float else arrays[name]
        given = {**arrays, name: a.astype(dtype)}
        try:
            outputs = call.run(*given.values())
        except ValueError as error:
            message = str(error)
            assert_names(message, f"[{call.op}]", str(dtype).removeprefix("mlx.core."), "expected")
            assert isinstance(error, mm.DtypeError), f"{name} of {dtype}: {message}"
            continue
        mx.eval(outputs)
        is_index = call.arguments[name].holds == "indices"
        as_floats = {**arrays, name: arrays[name] if is_index else given[name].astype(mx.float32)}
        for a, b in zip(outputs, call.run(*as_floats.values()), strict=True):
            a, b = (np.array(v.astype(mx.float32)) for v in (a, b))
            np.testing.assert_allclose(a, b, rtol=SUMS, atol=SUMS * np.abs(b).max(), err_msg=f"{name} of {dtype}")


def test_dtype_error_is_both_kinds():
    assert issubclass(mm.DtypeError, TypeError) and issubclass(mm.DtypeError, ValueError)


@pytest.mark.parametrize("op, argument", VECTORS)
def test_wrong_length(op, argument):
    message = message_of(ValueError, NORMS[op], **{argument: mx.ones((7,))})
    assert_names(message, f"[{op}]", argument, 7, 8)


@pytest.mark.parametrize("shape", [(1, 8), (), (3, 8), (8, 1)], ids=str)
@pytest.mark.parametrize("op, argument", VECTORS)
def test_wrong_rank(op, argument, shape):
    assert_names(message_of(ValueError, NORMS[op], **{argument: mx.ones(shape)}), f"[{op}]", argument)


@pytest.mark.parametrize("op", NORMS)
def test_scalar(op):
    scalars = {"x": mx.array(1.0), "weight": None}
    if op in ("add_rms_norm", "norm_add_norm"):
        scalars["residual"] = mx.array(1.0)
    if op == "norm_add_norm":
        scalars["next_weight"] = None
    if op == "layer_norm":
        scalars["bias"] = None
    assert_names(message_of(ValueError, NORMS[op], **scalars), f"[{op}]", "x")


@pytest.mark.parametrize("op", ["add_rms_norm", "norm_add_norm"])
@pytest.mark.parametrize("shape", [(3, 9), (4, 8), (8, 3)], ids=str)
def test_residual_of_another_shape(shape, op):
    message = message_of(ValueError, NORMS[op], residual=mx.ones(shape))
    assert_names(message, f"[{op}]", "residual", *shape)


@pytest.mark.parametrize("axis", [2, -3, (0, 5), 100], ids=str)
def test_axis_out_of_range(axis):
    message = message_of(ValueError, mm.softmax, X, axis=axis)
    assert_names(message, "[softmax]", "axis", axis if isinstance(axis, int) else 5)


@pytest.mark.parametrize("axis", [(0, 0), (1, -1)], ids=str)
def test_axis_named_twice(axis):
    assert_names(message_of(ValueError, mm.softmax, X, axis=axis), "[softmax]", "axis")


def test_axis_of_a_scalar():
    assert_names(message_of(ValueError, mm.softmax, mx.array(1.0), axis=0), "[softmax]", "axis")


@pytest.mark.parametrize(
    "call",
    [
        lambda: mm.rms_norm([1.0, 2.0], None, 1e-5),
        lambda: mm.rms_norm(X, [1.0] * 8, 1e-5),
        lambda: mm.rms_norm(X, W, "small"),
        lambda: mm.rms_norm(X, W),
        lambda: mm.layer_norm(X, W, 1e-5),
        lambda: mm.softmax("scores"),
        lambda: mm.softmax(X, axis=1.5),
        lambda: mm.softmax(a=X),
        lambda: mm.add_rms_norm(X, None, W, 1e-5),
        lambda: mm.rms_norm(X, W, 1e-5, stream="gpu"),
    ],
)
def test_wrong_kind_of_object(call):
    with pytest.raises(TypeError):
        call()


def test_signatures_are_those_of_the_twins():
    assert str(inspect.signature(mm.rms_norm)).startswith("(x: ")
    parameters = {
        name: list(inspect.signature(getattr(mm, name)).parameters.values()) for name in (op.name for op in specs.OPS)
    }
    assert [p.name for p in parameters["rms_norm"]] == ["x", "weight", "eps", "weight_offset", "stream"]
    assert [p.name for p in parameters["layer_norm"]] == ["x", "weight", "bias", "eps", "stream"]
    assert [p.name for p in parameters["softmax"]] == ["a", "axis", "precise", "stream"]
    assert [p.name for p in parameters["add_rms_norm"]] == ["x", "residual", "weight", "eps", "weight_offset", "stream"]
    assert parameters["softmax"][0].kind is inspect.Parameter.POSITIONAL_ONLY
    assert all(p[-1].kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())


@pytest.mark.parametrize("op", [op.name for op in specs.OPS])
def test_docstrings(op):
    text = getattr(mm, op).__doc__
    for part in ("Args:", "Returns:", "Raises:", "Source:"):
        assert part in text
