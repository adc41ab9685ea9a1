"""Every op and its derivatives in functions that mx.compile traces once for all shapes: a trace at the shapes of a
call, then calls at two others, beside the same functions without mx.compile."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from helpers.calls import CALLS
from helpers.tolerances import LAYERS, SUM, SUMS, assert_near

import mlx_mittens as mm

pytestmark = pytest.mark.usefixtures("native", "lenient")

EVERY = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
# Calls that no kernel covers, which mx differentiates or refuses to.
DERIVED = [call for call in CALLS if call.covered and call.differentiable()]
DIFFERENTIABLE = pytest.mark.parametrize("call", DERIVED, ids=lambda call: call.name)
# mx refuses the second derivatives of its products with chosen experts by their scales.
TWICE = [
    call for call in DERIVED if "2D" in call.what or not call.what and call.op not in ("gather_swiglu", "gather_sum")
]


def later(call, step: int) -> dict[str, int]:
    """Other sizes of a call: words and groups, which share a column, get multiples of their sizes."""
    sizes = dict(call.sizes)
    for i, (name, size) in enumerate(sizes.items()):
        if name == "width" and "freqs" in call.arguments:
            continue  # as many as the dimensions that are turned, a number
        packed = size % 32 == 0 or name == "width"
        sizes[name] = size * (1 + step) if packed else size + step * (1 + i % 2)
    return {**sizes, "experts": 3 + step}


def assert_serves_later_shapes(call, function, rng, tolerance, arrays_of=lambda arrays: list(arrays.values())):
    """Compares a function of lists of arrays, compiled for all shapes, with the function itself."""
    compiled = mx.compile(function, shapeless=True)
    for step in (0, 1, 2):
        arrays = arrays_of(call.arrays(rng, **later(call, step)))
        results, expected = compiled(arrays), function(arrays)
        for i, (a, b) in enumerate(zip(results, expected, strict=True)):
            assert a.dtype == b.dtype
            assert_near(a, b, f"result {i}, {', '.join(str(x.shape) for x in arrays)}", tolerance)


@EVERY
def test_results(call, rng):
    assert_serves_later_shapes(call, lambda arrays: call.run(*arrays), rng, SUM)


def differentiated(call, derive):
    """A function of a call's arrays, with tangents and cotangents behind them; `derive` gets the call as a function of
    its differentiable arrays, these, and the arguments behind."""
    names = call.differentiable()
    places = [list(call.arguments).index(name) for name in names]
    count = len(call.arguments)

    def function(arrays):
        def of_some(*some):
            filled = list(arrays[:count])
            for place, array in zip(places, some, strict=True):
                filled[place] = array
            return [y for y in call.run(*filled) if mx.issubdtype(y.dtype, mx.floating)]

        return list(derive(of_some, [arrays[place] for place in places], arrays[count:]))

    return function, names


def with_more(call, rng, more):
    """Lists of a call's arrays, and behind them numbers of the shapes that `more` returns."""

    def arrays_of(arrays):
        like = more(arrays)
        numbers = [mx.array(rng.standard_normal(a.shape).astype(np.float32)) for a in like]
        return [*arrays.values(), *numbers]

    return arrays_of


def floating_results(call):
    return lambda arrays: [y for y in call.run(*arrays.values()) if mx.issubdtype(y.dtype, mx.floating)]


@DIFFERENTIABLE
def test_gradients(call, rng):
    function, _ = differentiated(call, lambda f, primals, cotangents: mx.vjp(f, primals, cotangents)[1])
    assert_serves_later_shapes(call, function, rng, SUMS, with_more(call, rng, floating_results(call)))


@DIFFERENTIABLE
def test_directional_derivatives(call, rng):
    function, names = differentiated(call, lambda f, primals, tangents: mx.jvp(f, primals, tangents)[1])
    arrays_of = with_more(call, rng, lambda arrays: [arrays[name] for name in names])
    assert_serves_later_shapes(call, function, rng, SUMS, arrays_of)


@pytest.mark.parametrize("call", TWICE, ids=lambda call: call.name)
def test_gradients_of_gradients(call, rng):
    def second(f, primals, cotangents):
        def along(*primals):
            return sum((a * a).sum() for a in mx.vjp(f, list(primals), cotangents)[1])

        return mx.vjp(lambda *primals: [along(*primals)], primals, [mx.array(1.0)])[1]

    function, _ = differentiated(call, second)
    assert_serves_later_shapes(call, function, rng, LAYERS, with_more(call, rng, floating_results(call)))


@pytest.mark.parametrize("call", [call for call in CALLS if call.covered], ids=lambda call: call.name)
def test_vmap(call, rng):
    """Over all arrays, which have one more axis in front, and over the first alone."""
    names = list(call.arguments)
    for mapped in (names, names[:1]):
        axes = tuple(0 if name in mapped else None for name in names)

        def batched(arrays, mapped=mapped):
            turned = lambda a: a[::-1] if a.ndim > 1 else a  # bytes of one block make no other block
            return [mx.stack([a, turned(a)]) if name in mapped else a for name, a in arrays.items()]

        function = mx.vmap(lambda *arrays: call.run(*arrays), in_axes=axes)
        assert_serves_later_shapes(call, lambda arrays: function(*arrays), rng, SUM, batched)  # noqa: B023


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (1, 2, 2, 3)], ids=str)
def test_gradients_of_gemv_by_every_argument(rng, lead, transpose):
    """The widths of w and x come from the call, not from the trace."""
    draw = lambda *shape: mx.array(rng.standard_normal(shape).astype(np.float32))

    def gradients(w, x, bias, dy):
        return mx.vjp(lambda *a: [mm.gemv(*a, transpose=transpose)], [w, x, bias], [dy])[1]

    compiled = mx.compile(gradients, shapeless=True)
    for outputs, columns, more in ((8, 64, 0), (12, 64, 0), (5, 24, 1)):
        rows = tuple(n + more for n in lead)
        w = draw(outputs, columns) if transpose else draw(columns, outputs)
        arrays = w, draw(*rows, columns), draw(outputs), draw(*rows, outputs)
        by_w = arrays[3].reshape(-1, outputs).T @ arrays[1].reshape(-1, columns)
        exact = [by_w if transpose else by_w.T, arrays[3] @ (w if transpose else w.T), arrays[3].reshape(-1, outputs)]
        exact[2] = exact[2].sum(axis=0)
        for name, a, b in zip(("w", "x", "bias"), compiled(*arrays), exact, strict=True):
            assert a.shape == b.shape
            assert_near(a, b, f"the gradient by {name}, {outputs} outputs of {columns}", SUM)


@pytest.mark.parametrize("axis", [None, (0, 1), (0, -1), 0, -1])
def test_patched_softmax_along_any_axes(axis):
    x = mx.random.normal((6, 256), key=mx.random.key(0))
    with mm.patched():
        compiled = mx.compile(lambda a: mx.softmax(a, axis=axis), shapeless=True)
        for a in (x, x[:3], mx.concatenate([x, x]), x[:, :40]):
            assert_near(compiled(a), mx.softmax(a, axis=axis), f"{a.shape}", SUM)


def test_sizes_of_zero_and_one_before_others(rng):
    """Neither an empty result nor a broadcast is left in the graph."""
    function = lambda a, b: mm.softmax(mm.rms_norm(a, b, 1e-5), axis=(0, 1))
    for shapes in itertools.permutations([(0, 8), (1, 8), (5, 8), (5, 1)], 3):
        compiled = mx.compile(function, shapeless=True)
        for shape in shapes:
            a, b = (mx.array(rng.standard_normal(s).astype(np.float32)) for s in (shape, shape[1:]))
            assert_near(compiled(a, b), function(a, b), f"{shape} of {shapes}", SUM)


def test_wrong_shapes_of_a_later_call_are_named():
    compiled = mx.compile(lambda w, x: mm.gemv(w, x), shapeless=True)
    mx.eval(compiled(mx.ones((8, 64)), mx.ones((2, 64))))
    with pytest.raises(ValueError, match=r"\[gemv\] x has 64 columns, w has shape \(8,32\)"):
        compiled(mx.ones((8, 32)), mx.ones((2, 64)))


def test_a_kernel_that_no_shape_chose():
    """A plan is made for the shapes of each call: long rows are split where there are few of them."""
    compiled = mx.compile(lambda x: mm.rms_norm(x, None, 1e-5), shapeless=True)
    with mm.simulator.enabled(gpu="h200"):
        for shape in ((2, 64), (1, 70000), (3, 2048)):
            mm.stats(reset=True)
            mx.eval(compiled(mx.ones(shape)))
            inside = mm.stats(reset=True)["rms_norm"]["kernels"]
            mx.eval(mm.rms_norm(mx.ones(shape), None, 1e-5))
            assert inside == mm.stats()["rms_norm"]["kernels"]


def test_strict_mode_refuses_in_the_trace():
    with mm.strict(True), pytest.raises(RuntimeError, match=r"\[softmax\] strict mode"):
        mx.compile(lambda x: mm.softmax(x, axis=-1), shapeless=True)(mx.ones((2, 3), mx.complex64))


def test_calls_of_mx_are_counted_once():
    compiled = mx.compile(lambda x: mm.gemv(x, x), shapeless=True)
    mm.stats(reset=True)
    with mx.stream(mx.cpu):
        x = mx.ones((4, 4), mx.float32).astype(mx.float64)
        mx.eval(compiled(x))
        assert mm.stats(reset=True)["gemv"]["mx"] == {"float64": 1}
        mx.eval(compiled(x))
        assert mm.stats()["gemv"]["mx"] == {"float64": 1}


def test_an_export_names_the_op(tmp_path):
    path = str(tmp_path / "norm.mlxfn")
    with pytest.raises(mm.ExportError, match="mlx_mittens.rms_norm cannot be exported"):
        mx.export_function(path, lambda x: mm.rms_norm(x, None, 1e-5), mx.ones((2, 8)), shapeless=True)


def test_tokens_of_a_key(rng):
    """A key is an array of the call. Drawing one of mx.random's state is mx's to refuse: its numbers have a shape."""
    logits = mx.array(rng.standard_normal((3, 50)).astype(np.float32))
    compiled = mx.compile(lambda x, key: mm.sample(x, key=key), shapeless=True)
    for i, x in enumerate((logits, logits[:2], mx.concatenate([logits, logits]))):
        assert compiled(x, mx.random.key(i)).tolist() == mm.sample(x, key=mx.random.key(i)).tolist()
