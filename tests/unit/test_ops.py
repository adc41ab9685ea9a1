"""Promises of every op of the table, whatever it computes."""

import itertools
import math
import threading
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import EXECUTORS, absences, as_list, assert_same_bits
from helpers.tolerances import LAYERS, ROUNDINGS, SUM, assert_near, assert_right, units

from mlx_mittens import specs
from mlx_mittens.specs import Case, Spread

SMALL = Case("small", (6, 40))

# test_quick.py and test_variants.py run all of the table's shapes in the simulator.
unsimulated = pytest.mark.parametrize("executor", [name for name in EXECUTORS if name != "simulator"], indirect=True)


@unsimulated
def test_values_and_gradients(op, dtype, executor, rng):
    for case in op.checks():
        assert_right(op, case, op.draw(rng, case, dtype), op.cotangents(rng, case, dtype))


@unsimulated
def test_longest_rows(op, dtype, executor, rng):
    for shape, vjp in itertools.product([(1, 262144), (3, 262144)], [False, True]):
        case = Case("long", shape, vjp=vjp)
        assert_right(op, case, op.draw(rng, case, dtype), op.cotangents(rng, case, dtype))


@unsimulated
def test_many_rows(op, dtype, executor, rng):
    for shape, vjp in itertools.product([(20011, 1), (5003, 24), (4099, 129), (257, 16400)], [False, True]):
        case = Case("many", shape, vjp=vjp)
        assert_right(op, case, op.draw(rng, case, dtype), op.cotangents(rng, case, dtype))


def test_absent_weight_and_bias(op, dtype, executor, rng):
    for case in (
        Case("absent", (3, 65)),
        Case("absent", (2, 2051)),
        Case("absent", (3, 65), vjp=True),
        Case("absent", (2, 2051), vjp=True),
    ):
        for arrays in absences(op, op.draw(rng, case, dtype), case):
            assert_right(op, case, arrays, op.cotangents(rng, case, dtype))


def test_promotion(op, executor, rng):
    for case in (SMALL, replace(SMALL, vjp=True)):
        for dtypes in itertools.product(specs.DTYPES.values(), repeat=len(op.parameters)):
            if len(set(dtypes)) == 1:
                continue
            arrays = [a.astype(dtype) for a, dtype in zip(op.draw(rng, case, mx.float32), dtypes)]
            outputs = specs.call(op.ours, arrays, op.arguments(case))
            twins = specs.call(op.twin, arrays, op.arguments(case))
            assert [a.dtype for a in outputs] == [a.dtype for a in twins], dtypes
            if not case.vjp:
                assert_right(op, case, arrays)
                continue
            cotangents = op.cotangents(rng, case, outputs[0].dtype)
            gradients = specs.gradients(op.ours, arrays, cotangents, op.arguments(case))
            assert [a.dtype for a in gradients] == list(dtypes)
            exact = op.exact(case, arrays, cotangents)
            # Gradients are computed in the promoted type or better and end in the argument's own.
            twins = specs.gradients(op.twin, arrays, cotangents, op.arguments(case))
            coarsest = max(dtypes, key=specs.EPSILON.get)
            for name, a, b, c in zip(op.parameters, gradients, twins, exact, strict=True):
                assert specs.error(a, c) <= specs.tolerance(coarsest, specs.error(b, c), vjp=True), (name, dtypes)


def test_types_are_those_of_mx(op, native, rng):
    """Of results and gradients, whatever is absent."""
    drawn = op.draw(rng, SMALL, mx.float32)
    for dtypes in itertools.product(specs.DTYPES.values(), repeat=len(drawn)):
        for arrays in absences(op, [a.astype(dtype) for a, dtype in zip(drawn, dtypes)], SMALL):
            here = [None if a is None else a.dtype for a in arrays]
            outputs, twins = (specs.call(f, arrays, op.arguments(SMALL)) for f in (op.ours, op.twin))
            assert [a.dtype for a in outputs] == [a.dtype for a in twins], here
            case = replace(SMALL, vjp=True)
            gradients = specs.run(op, op.ours, case, arrays, op.cotangents(rng, case, outputs[0].dtype))
            assert [a.dtype for a in gradients] == [dtype for dtype in here if dtype], here


# Each makes an array of the given shape that is not laid out row after row.
VIEWS = {
    "transposed": lambda a: mx.contiguous(mx.swapaxes(a, 0, -1)).swapaxes(0, -1),
    "every second column": lambda a: mx.repeat(a, 2, axis=-1)[..., ::2],
    "every second row": lambda a: mx.repeat(a, 2, axis=0)[::2],
    "columns of a wider array": lambda a: mx.concatenate([a[..., :3], a, a[..., :2]], axis=-1)[..., 3:-2],
    "rows of a taller array": lambda a: mx.concatenate([a[:1], a, a[:1]], axis=0)[1:-1],
    "backwards": lambda a: mx.contiguous(a[..., ::-1])[..., ::-1],
    "broadcast rows": lambda a: mx.broadcast_to(a[:1], a.shape),
    "broadcast columns": lambda a: mx.broadcast_to(a[..., :1], a.shape),
    "odd offset": lambda a: mx.concatenate([a.reshape(-1)[:1], a.reshape(-1)])[1:].reshape(a.shape),
}


# Where a row starts between two 16-byte boundaries its sum is taken in another order. qk_norm reads all rows in place
# whose columns are.
READ_IN_PLACE = ("rows of a taller array", "odd offset")


@pytest.mark.parametrize("view", VIEWS)
def test_views(op, dtype, executor, rng, view):
    for shape, vjp in itertools.product([(6, 40), (3, 5, 129)], [False, True]):
        case = Case(view, shape, vjp=vjp)
        rows = lambda a: VIEWS[view](a) if a.ndim > 1 else a
        arrays = [rows(a) for a in op.draw(rng, case, dtype)]
        cotangents = [rows(a) for a in op.cotangents(rng, case, dtype)]
        flat = [
            [mx.array(np.array(a.astype(mx.float32))).astype(dtype) for a in group] for group in (arrays, cotangents)
        ]
        mx.eval(arrays, cotangents, flat)
        assert_right(op, case, arrays, cotangents)
        if view in READ_IN_PLACE or op.name == "qk_norm":
            continue
        seen = specs.run(op, op.ours, case, arrays, cotangents)
        plain = specs.run(op, op.ours, case, *flat)
        for a, b in zip(seen, plain, strict=True):
            assert_same_bits(a, b, f"{op.name} {case.name}")


def test_views_of_many_dimensions(op, dtype, executor, rng):
    case = Case("many dimensions", (2, 3, 1, 2, 2, 2, 3, 2, 5, 9))
    arrays = op.draw(rng, case, dtype)
    shuffled = [a if a.ndim == 1 else mx.contiguous(a.transpose()).transpose() for a in arrays]
    assert_right(op, case, shuffled)
    pairs = zip(specs.run(op, op.ours, case, shuffled), specs.run(op, op.ours, case, arrays), strict=True)
    for a, b in pairs:
        assert_same_bits(a, b, op.name)


def test_strided_weight_and_bias(op, dtype, executor, rng):
    arrays = op.draw(rng, SMALL, dtype)
    for view in ("every second column", "columns of a wider array", "backwards", "broadcast columns"):
        views = [VIEWS[view](a) if a.ndim == 1 else a for a in arrays]
        flat = [mx.array(np.array(a.astype(mx.float32))).astype(dtype) for a in views]
        pairs = zip(specs.run(op, op.ours, SMALL, views), specs.run(op, op.ours, SMALL, flat), strict=True)
        for a, b in pairs:
            assert_same_bits(a, b, f"{op.name} {view}")


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3), (0, 0)], ids=str)
def test_empty(op, dtype, executor, rng, shape):
    case = Case("empty", shape)
    arrays = op.draw(rng, case, dtype)
    outputs = specs.run(op, op.ours, case, arrays)
    assert [a.shape for a in outputs] == [shape] * op.outputs
    assert all(a.dtype == dtype for a in outputs)
    case = replace(case, vjp=True)
    gradients = specs.run(op, op.ours, case, arrays, op.cotangents(rng, case, dtype))
    assert [a.shape for a in gradients] == op.shapes(case)
    for a in gradients:
        assert not np.any(specs.widen(a)), "a sum over no rows is zero"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("columns", [5, 1000, 4099])
def test_special_values_stay_in_their_row(op, dtype, executor, rng, value, columns):
    case = Case("special", (4, columns))
    arrays = op.draw(rng, case, dtype)
    clean = specs.run(op, op.ours, case, arrays)
    arrays[0][2, columns // 2] = value
    assert_right(op, case, arrays)
    for a, b in zip(specs.run(op, op.ours, case, arrays), clean, strict=True):
        for row in (0, 1, 3):
            assert_same_bits(a[row], b[row], f"row {row}")


def test_rows_of_infinities(op, dtype, executor, rng):
    for fill in (-math.inf, math.inf, math.nan, 0.0):
        case = Case("filled", (3, 70))
        arrays = op.draw(rng, case, dtype)
        arrays[0][1] = fill
        assert_right(op, case, arrays)


def test_largest_values(op, dtype, executor, rng):
    """Squares and sums overflow float16, not float32."""
    case = Case("large", (3, 513))
    arrays = op.draw(rng, case, mx.float32)
    largest = 1e15 if dtype != mx.float16 else 6e4 / op.outputs
    arrays[0] = largest * mx.array(rng.uniform(-1, 1, size=case.shape).astype(np.float32))
    assert_right(op, case, [a.astype(dtype) for a in arrays])


LARGE = (3.4e38, 3e38, 1e20, 1e19)  # sums of the first two, and squares of all but the last, overflow float32
LARGE_SIGNS = ((1,), (-1,), (1, -1), (1, 1), (-1, 1, -1))


def with_large_elements(rng, x: mx.array, dtype: mx.Dtype) -> mx.array:
    """One to three elements of each row become large, and finite in the type."""
    x = np.array(x)
    columns = x.shape[-1]
    kinds = list(itertools.product(LARGE, (0, columns // 2, columns - 1), LARGE_SIGNS))
    for row, kind in zip(x, rng.permutation(len(kinds))):
        value, first, signs = kinds[kind]
        for i, sign in enumerate(signs):
            row[(first + i * max(columns // 7, 1)) % columns] = sign * min(value, mx.finfo(dtype).max)
    return mx.array(x).astype(dtype)


@pytest.mark.parametrize("columns", [3, 33, 1000, 4099, 20000])
@pytest.mark.parametrize("vjp", [False, True], ids=["forward", "vjp"])
def test_elements_near_the_largest_float(op, executor, rng, vjp, columns):
    """A number wherever mx has one, and no farther from the exact one."""
    case = Case("near the largest", (60 if columns < 4000 else 7, columns), vjp=vjp)
    for dtype in (mx.float32, mx.bfloat16):
        x, *others = op.draw(rng, case, mx.float32)
        arrays = [with_large_elements(rng, x, dtype), *(a.astype(dtype) for a in others)]
        cotangents = op.cotangents(rng, case, dtype)
        ours, twins = (specs.run(op, function, case, arrays, cotangents) for function in (op.ours, op.twin))
        with np.errstate(all="ignore"):
            exact = op.exact(case, arrays, cotangents)
        for a, b, c in zip(ours, twins, exact, strict=True):
            ours, twin, terms = specs.widen(a), specs.widen(b), c.value if c.magnitude is None else c.magnitude
            numbers = np.isfinite(twin)
            assert np.isfinite(ours[numbers]).all(), f"{dtype}: {(~np.isfinite(ours) & numbers).sum()} are no numbers"
            # A number with nearly all of the variance has a gradient that cancels to a part in `columns`.
            rounding = units(16, dtype) + units(columns, mx.float32)
            near = np.broadcast_to(np.abs(terms).max(-1, keepdims=True) * rounding, ours.shape)
            off, allowed = (np.abs(values - c.value)[numbers] for values in (ours, twin))
            assert (off <= np.maximum(2 * allowed, near[numbers])).all(), dtype


def test_jvp(op, executor, rng):
    case = Case("jvp", (3, 37))
    arrays = op.draw(rng, case, mx.float32)
    tangents = [a / 4 for a in replace(op, inputs=Spread()).draw(rng, case, mx.float32)]  # softmax's are far from zero
    options = op.arguments(case)
    ours, twins = (mx.jvp(lambda *a, f=f: specs.call(f, a, options), arrays, tangents)[1] for f in (op.ours, op.twin))
    x, t, h = [specs.widen(a) for a in arrays], [specs.widen(a) for a in tangents], 1e-6
    ahead, behind = (op.reference(*[a + s * b for a, b in zip(x, t)], **options) for s in (h, -h))
    if op.outputs == 1:
        ahead, behind = [ahead], [behind]
    for a, b, c, d in zip(ours, twins, ahead, behind, strict=True):
        assert_near(a, (c - d) / (2 * h), "jvp against float64")
        assert_near(a, b, "jvp against mx")


def test_jvp_of_some_arguments(op, executor, rng):
    case = Case("jvp", (2, 24))
    arrays = op.draw(rng, case, mx.float32)
    for i in range(len(arrays)):
        tangent = mx.array(rng.standard_normal(arrays[i].shape).astype(np.float32))
        results = []
        for f in (op.ours, op.twin):
            one = lambda a, f=f: specs.call(f, [*arrays[:i], a, *arrays[i + 1 :]], op.arguments(case))
            results.append(mx.jvp(one, [arrays[i]], [tangent])[1])
        for a, b in zip(*results, strict=True):
            assert_near(a, b, f"jvp of {op.parameters[i][0]}")


def test_gradient_of_some_arguments(op, executor, rng):
    case = Case("grad", (3, 50))
    arrays = op.draw(rng, case, mx.float32)
    for some in itertools.chain.from_iterable(
        itertools.combinations(range(len(arrays)), n) for n in range(1, len(arrays) + 1)
    ):
        results = []
        for f in (op.ours, op.twin):
            loss = lambda *a, f=f: sum((y * y.sin()).sum() for y in specs.call(f, a, op.arguments(case)))
            results.append(as_list(mx.grad(loss, argnums=some)(*arrays)))
        for i, a, b in zip(some, *results, strict=True):
            assert_near(a, b, f"gradient of {op.parameters[i][0]}")


def test_gradient_of_one_output(executor, rng):
    op = specs.get("add_rms_norm")
    arrays = op.draw(rng, SMALL, mx.float32)
    for output in (0, 1):
        results = [
            mx.grad(lambda *a, f=f: (specs.call(f, a, op.arguments(SMALL))[output] ** 2).sum(), argnums=(0, 1, 2))(
                *arrays
            )
            for f in (op.ours, op.twin)
        ]
        for a, b in zip(*results, strict=True):
            assert_near(a, b, f"gradient of output {output}")


def test_second_derivatives(op, executor, rng):
    case = Case("second", (3, 20))
    arrays = op.draw(rng, case, mx.float32)
    argnums = tuple(range(len(arrays)))
    results = []
    for f in (op.ours, op.twin):
        loss = lambda *a, f=f: sum((y**3).sum() for y in specs.call(f, a, op.arguments(case)))
        size = lambda *a, loss=loss: sum((g * g).sum() for g in as_list(mx.grad(loss, argnums=argnums)(*a)))
        results.append(as_list(mx.grad(size, argnums=argnums)(*arrays)))
    for (name, _), a, b in zip(op.parameters, *results, strict=True):
        assert_near(a, b, f"second derivative of {name}", LAYERS)


def test_vmap(op, executor, rng):
    case = Case("vmap", (4, 24))
    batch = 3
    drawn = [op.draw(rng, case, mx.float32) for _ in range(batch)]
    for axes in itertools.product([None, 0, 1], repeat=len(op.parameters)):
        if axes == (None,) * len(axes):
            continue
        arrays = [
            drawn[0][i] if axis is None else mx.stack([one[i] for one in drawn], axis=axis)
            for i, axis in enumerate(axes)
        ]
        mapped = mx.vmap(lambda *a: tuple(specs.call(op.ours, a, op.arguments(case))), in_axes=axes)(*arrays)
        for k in range(batch):
            single = [drawn[0][i] if axis is None else drawn[k][i] for i, axis in enumerate(axes)]
            for a, b in zip(mapped, specs.call(op.ours, single, op.arguments(case)), strict=True):
                assert_near(a[k], b, f"vmap over {axes}", SUM)


def test_vmap_of_gradients(op, executor, rng):
    case = Case("vmap", (4, 24))
    stacked = [mx.stack(group) for group in zip(*(op.draw(rng, case, mx.float32) for _ in range(3)))]
    argnums = tuple(range(len(stacked)))
    results = []
    for f in (op.ours, op.twin):
        loss = lambda *a, f=f: sum((y**2).sum() for y in specs.call(f, a, op.arguments(case)))
        results.append(as_list(mx.vmap(mx.grad(loss, argnums=argnums))(*stacked)))
    for a, b in zip(*results, strict=True):
        assert_near(a, b, "vmap of grad")


@pytest.mark.parametrize("shapeless", [False, True])
def test_compile(op, dtype, executor, rng, shapeless):
    options = op.arguments(SMALL)
    plain = lambda *a: [y + 1 for y in specs.call(op.ours, [a[0] * 2, *a[1:]], options)]
    compiled = mx.compile(plain, shapeless=shapeless)
    for shape in ((6, 40), (9, 40), (6, 40), (3, 77)):
        arrays = op.draw(rng, Case("compile", shape), dtype)
        for a, b in zip(compiled(*arrays), plain(*arrays), strict=True):
            assert a.shape == shape and a.dtype == dtype
            assert_near(a, b, f"compiled, {shape}", units(1, dtype))


def test_compiled_gradients(op, executor, rng):
    loss = lambda *a: sum((y * y).sum() for y in specs.call(op.ours, a, op.arguments(SMALL)))
    gradient = lambda *a: as_list(mx.grad(loss, argnums=tuple(range(len(a))))(*a))
    compiled = mx.compile(gradient)
    for shape in ((6, 40), (5, 72)):
        arrays = op.draw(rng, Case("compile", shape), mx.float32)
        for a, b in zip(compiled(*arrays), gradient(*arrays), strict=True):
            assert_near(a, b, f"compiled gradient, {shape}")


def test_gradients_are_the_same_from_run_to_run(op, dtype, executor, rng):
    for shape in ((700, 24), (19, 1111)) if executor == "simulator" else ((20000, 24), (601, 1111), (3, 50000)):
        case = Case("again", shape, vjp=True)
        arrays, cotangents = op.draw(rng, case, dtype), op.cotangents(rng, case, dtype)
        first = specs.run(op, op.ours, case, arrays, cotangents)
        for _ in range(3):
            for a, b in zip(specs.run(op, op.ours, case, arrays, cotangents), first, strict=True):
                assert_same_bits(a, b, f"{op.name} {case.name}")


def test_streams(op, executor, rng):
    device = mx.default_device()
    streams = [mx.new_stream(device) for _ in range(3)]
    arrays = op.draw(rng, SMALL, mx.float32)
    options = op.arguments(SMALL)
    serial, parallel = [list(arrays)], [list(arrays)]
    for i in range(9):
        serial.append([specs.call(op.ours, serial[-1], options)[0], *arrays[1:]])
        parallel.append([specs.call(op.ours, parallel[-1], {**options, "stream": streams[i % 3]})[0], *arrays[1:]])
    assert_same_bits(parallel[-1][0], serial[-1][0], "across streams")
    for where in (device, device.type, streams[0]):
        for a, b in zip(
            specs.call(op.ours, arrays, {**options, "stream": where}), specs.call(op.ours, arrays, options)
        ):
            assert_same_bits(a, b, f"on {where}")


def test_threads(op, executor, rng):
    shapes = [(6, 40), (1, 8192), (64, 128), (3, 1001)]
    work = [(case, op.draw(rng, case, mx.float16)) for case in (Case("thread", shape) for shape in shapes)]
    right = [specs.run(op, op.ours, case, arrays) for case, arrays in work]
    mx.eval(right, [arrays for _, arrays in work])
    device = mx.default_device()
    failures = []

    def repeat(i):
        try:
            case, arrays = work[i % len(work)]
            with mx.stream(mx.new_stream(device)):
                for _ in range(5):
                    for a, b in zip(specs.run(op, op.ours, case, arrays), right[i % len(work)], strict=True):
                        assert_same_bits(a, b, f"thread {i}")
        except BaseException as exception:
            failures.append(exception)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_nothing_runs_before_it_is_asked_for(op, executor, rng):
    case = Case("lazy", (64, 512))
    arrays = op.draw(rng, case, mx.float32)
    mx.eval(arrays)
    before = mx.get_active_memory()
    outputs = specs.run(op, op.ours, case, arrays)
    gradients = specs.run(op, op.ours, replace(case, vjp=True), arrays, outputs)
    assert mx.get_active_memory() - before < arrays[0].nbytes
    mx.eval(outputs, gradients)
    assert mx.get_active_memory() - before >= arrays[0].nbytes


def test_inputs_outlive_the_op(op, dtype, executor, rng):
    """An output may take over the memory of an input that nobody else holds, and of no other."""
    case = Case("donated", (6, 256))
    arrays = op.draw(rng, case, dtype)
    values = [specs.widen(a) for a in arrays]
    right = specs.run(op, op.ours, case, arrays)
    mx.eval(right)

    fresh = [a + 0 for a in arrays]  # held here and read again below
    kept = [a * 2 for a in fresh]
    outputs = specs.run(op, op.ours, case, fresh)
    mx.eval(outputs, kept)
    for a, b, value in zip(fresh, kept, values):
        np.testing.assert_array_equal(specs.widen(a), value)
        np.testing.assert_array_equal(specs.widen(b), specs.widen(mx.array(value.astype(np.float32)).astype(dtype) * 2))

    donated = specs.run(op, op.ours, case, [a + 0 for a in arrays])
    part = specs.run(op, op.ours, case, [(mx.concatenate([a, a]) + 0)[: len(a)] for a in arrays])
    mx.eval(donated, part)
    for a, b, c, d in zip(donated, part, outputs, right, strict=True):
        for other in (a, b, c):
            assert_same_bits(other, d, "whatever became of the inputs")


def test_one_array_as_two_arguments(executor, rng):
    op = specs.get("add_rms_norm")
    x, _, weight = op.draw(rng, SMALL, mx.float32)
    for a, b in zip(op.ours(x, x, weight, 1e-5), op.twin(x, x, weight, 1e-5), strict=True):
        assert_near(a, b, "x + x", ROUNDINGS)
    y = x + 0
    normed, total = op.ours(y, y, weight, 1e-5)
    del y
    assert_near(total, x + x, "x + x", ROUNDINGS)
    assert_near(normed, op.twin(x, x, weight, 1e-5)[0], "norm of x + x", ROUNDINGS)
