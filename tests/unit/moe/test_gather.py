"""Products of tokens with chosen experts."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, exact_product, quantize
from helpers.support import assert_same_bits
from helpers.tolerances import GRADIENTS_16_BIT, LAYERS, SUMS, assert_near, assert_product_right, of_product

import mlx_mittens as mm
from mlx_mittens import specs

E, N, K = 5, 12, 64  # experts, outputs, columns


def stacks(rng, dtype=mx.float32, experts=E, outputs=N, columns=K, bits=4, transpose=True):
    shape = (experts, outputs, columns) if transpose else (experts, columns, outputs)
    return quantize(rng, shape, dtype, 32, bits)


def exact(x, w, lhs, rhs):
    """Of flat batches, w [experts, outputs, columns]; NaN where an index is out of range."""
    lhs, rhs = np.broadcast_arrays(lhs, rhs)
    bad = (lhs < 0) | (lhs >= len(x)) | (rhs < 0) | (rhs >= len(w))
    product = exact_product(x[np.where(bad, 0, lhs)], w[np.where(bad, 0, rhs)])
    product.value[bad] = np.nan
    return product


# Those of 1 bit go to mx.
OPS = ("gather_qmm 4", "gather_qmm 8", "gather_qmm 1", "gather_mm")


@pytest.fixture(params=OPS)
def case(request, rng):
    """An op: its weights of a type and shape, the same in float64 as [experts, outputs, columns], and a call."""
    name, _, bits = request.param.partition(" ")
    bits = int(bits or 0)

    class Case:
        op = name
        covered = bits in (0, 4, 8)

        @staticmethod
        def weights(dtype=mx.float32, experts=E, outputs=N, columns=K, transpose=True):
            if bits:
                return stacks(rng, dtype, experts, outputs, columns, bits, transpose)
            w = draw(rng, (experts, outputs, columns), dtype)
            return [w.swapaxes(-1, -2) if transpose else mx.contiguous(w.swapaxes(-1, -2))]

        @staticmethod
        def wide(weights, transpose=True):
            w = specs.dequantized(*weights, 32, bits) if bits else specs.widen(weights[0])
            return w if bits and transpose else np.swapaxes(w, -1, -2)

        @staticmethod
        def call(x, weights, lhs=None, rhs=None, transpose=True, sorted_indices=False):
            if bits:
                return mm.gather_qmm(x, *weights, lhs, rhs, transpose, 32, bits, sorted_indices=sorted_indices)
            return mm.gather_mm(x, *weights, lhs, rhs, sorted_indices=sorted_indices)

    with mm.strict(Case.covered):
        yield Case


def tokens(rng, count, dtype=mx.float32, rows=1, columns=K):
    return draw(rng, (count, rows, columns), dtype, outliers=False) / columns**0.5


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize(
    "count, rows, columns, outputs", [(1, 1, 64, 1), (7, 1, 320, 32), (32, 1, 64, 64), (3, 5, 96, 32)]
)
def test_products(case, rng, dtype, executor, count, rows, columns, outputs, transpose):
    outputs = outputs if transpose else 64
    if dtype != mx.float32 and not case.covered:
        return
    if executor == "gpu" and case.op == "gather_qmm" and not transpose:  # mx's, there
        return
    weights = case.weights(dtype, outputs=outputs, columns=columns, transpose=transpose)
    x = tokens(rng, count, dtype, rows, columns)
    rhs = rng.integers(0, E, (count, 2))
    y = case.call(x[:, None], weights, rhs=mx.array(rhs), transpose=transpose)
    expected = exact(specs.widen(x), case.wide(weights, transpose), np.arange(count)[:, None], rhs)
    assert_product_right(y, expected, dtype)


def test_every_index_has_its_pair(case, rng, executor):
    """Of any shapes that broadcast, over batches of several axes, on both sides."""
    weights = case.weights(experts=6)
    x, flat = tokens(rng, 4), case.wide(weights)
    stacked = [w.reshape(2, 3, *w.shape[1:]) for w in weights]
    for batch, lhs, rhs in [
        ((4,), (3,), (2, 1)),
        ((2, 2), (2, 3, 1), (3, 4)),
        ((1, 4), (), (5,)),
        ((4,), None, (3, 4)),
        ((2, 2), None, (2, 1)),
        ((4, 1), None, (4, 3)),
        ((1, 1), None, (2, 2)),
        ((2, 2), (4,), None),
    ]:
        those = x[:1] if batch == (1, 1) else x
        given = those.reshape(*batch, 1, K)
        count = len(those)
        left = rng.integers(0, count, lhs) if lhs is not None else np.arange(count).reshape(batch)
        if rhs is None:
            right, left = np.arange(6).reshape(2, 3), np.broadcast_to(left[:2].reshape(2, 1), (2, 3))
        else:
            right = rng.integers(0, 6, rhs)
        as_array = lambda a, there: mx.array(np.ascontiguousarray(a).astype(np.int32)) if there else None
        y = case.call(given, stacked, as_array(left, lhs is not None), as_array(right, rhs is not None))
        assert_product_right(y, exact(specs.widen(those), flat, left, right), mx.float32)


@pytest.mark.parametrize("mode, bits", [("affine", 4), ("affine", 8), ("mxfp4", 4)])
def test_pairs_that_share_an_expert(rng, dtype, executor, mode, bits):
    """On GPUs up to four pairs of an expert are one product; each gives the same beside any others."""
    w = mx.random.normal((E, N, K), key=mx.random.key(0)).astype(dtype)
    w, *scales = mx.quantize(w, 32, bits, mode=mode)
    options = {"group_size": 32, "bits": bits, "mode": mode}
    rhs = np.array([3, 3, 1, 3, 9, 3, 1, 3, 0, 9, 3, 3, 1, 3, 3])
    x = tokens(rng, len(rhs), dtype)

    def products(order):
        of = (x[mx.array(order)], w, *(scales if len(scales) == 2 else (*scales, None)))
        y = mm.gather_qmm(*of, rhs_indices=mx.array(rhs[order]), **options)
        return y[mx.array(np.argsort(order))]

    y = products(np.arange(len(rhs)))
    of_groups = [s if mode == "mxfp4" else s.astype(mx.float32) for s in scales]  # else weights are rounded
    wide = specs.widen(mx.dequantize(w, *of_groups, **options))
    expected = exact(specs.widen(x), wide, np.arange(len(rhs)), rhs)
    assert_product_right(y, expected, dtype)
    assert_same_bits(products(rng.permutation(len(rhs))), y, "permuted")


@pytest.mark.parametrize("dtype", [mx.int8, mx.uint8, mx.int32, mx.uint32, mx.int64, mx.uint64])
def test_indices_of_every_type(case, rng, executor, dtype):
    """Those out of range give NaN, and read nothing: the arrays end where they end."""
    weights, x = case.weights(), tokens(rng, 3)
    most = {1: 127, 4: 2**31 - 1, 8: 2**40}[dtype.size]
    bad = [E, most] + ([-1, -E] if dtype in (mx.int8, mx.int32, mx.int64) else [])
    rhs = np.array([[0, E - 1, b] for b in bad])
    lhs = np.array([[0, 2, 1]] * len(bad))
    lhs[0, 0] = 3
    y = case.call(x, weights, mx.array(lhs.tolist(), dtype), mx.array(rhs.tolist(), dtype))
    assert_product_right(y, exact(specs.widen(x), case.wide(weights), lhs, rhs), mx.float32)


def test_64_bits_do_not_wrap(case, rng, executor):
    weights, x = case.weights(), tokens(rng, 1)
    rhs = mx.array([2**32, 2**32 + 1, -(2**32), 1], mx.int64)
    y = np.array(case.call(x, weights, rhs=rhs))
    assert np.isnan(y[:3]).all() and np.isfinite(y[3]).all()


def test_sorted_indices_change_nothing(case, rng, native):
    weights, x = case.weights(), tokens(rng, 6)
    rhs = mx.array([0, 0, 1, 3, 4, 4])
    assert_same_bits(case.call(x, weights, rhs=rhs), case.call(x, weights, rhs=rhs, sorted_indices=True), "sorted")


def test_beside_mx(case, rng, native):
    weights, x = case.weights(), tokens(rng, 6)[:, None]
    rhs = mx.array(rng.integers(0, E, (6, 3)))
    if case.op == "gather_mm":
        expected = mx.gather_mm(x, *weights, rhs_indices=rhs)
    else:
        bits = weights[0].shape[-1] * 32 // K
        expected = mx.gather_qmm(x, *weights, rhs_indices=rhs, group_size=32, bits=bits)
    assert_near(case.call(x, weights, rhs=rhs), expected, "mx", SUMS)


def test_views_are_read_where_they_lie(case, rng, executor):
    """Every other expert, every other token, transposed indices."""
    if not case.covered:
        return
    weights, x = case.weights(experts=2 * E), tokens(rng, 8)
    rhs = mx.array(rng.integers(0, E, (3, 4)))
    every = [w[::2] for w in weights]
    y = case.call(x[::2], every, mx.array([[0], [1], [2], [3]]), rhs.T)
    plain = case.call(
        mx.contiguous(x[::2]), [mx.contiguous(w) for w in every], mx.array([[0], [1], [2], [3]]), mx.contiguous(rhs.T)
    )
    assert_near(y, plain, "views", SUMS)


def test_each_expert_once_for_all_its_rows(rng, executor):
    """64 tokens that all chose one expert."""
    weights, x = stacks(rng), tokens(rng, 64)
    y = mm.gather_qmm(x, *weights, rhs_indices=mx.full((64,), 3, mx.uint32), group_size=32)
    exact = exact_product(specs.widen(x), specs.dequantized(*weights, 32, 4)[3])
    assert_product_right(y, exact, mx.float32)


def test_special_values_stay_in_their_pair(case, rng, dtype, executor):
    if not case.covered:
        return
    weights, x = case.weights(dtype), tokens(rng, 4, dtype)
    rhs = mx.array([1, 2, 1, 0])
    clean = case.call(x, weights, rhs=rhs)
    x[2, 0, 5] = mx.nan
    y = case.call(x, weights, rhs=rhs)
    assert bool(mx.isnan(y[2]).all())
    for i in (0, 1, 3):
        np.testing.assert_array_equal(specs.widen(y[i]), specs.widen(clean[i]))


def test_gradients(case, rng, executor):
    """By x and by the weights, beside a dense product; pairs out of range have none."""
    if not case.covered:
        return
    weights, x = case.weights(), tokens(rng, 3)
    lhs, rhs = mx.array([0, 2, 2, 0, 9]), mx.array([1, 1, 4, E, 0])
    good = mx.array([0, 1, 2])
    cotangent = draw(rng, (5, 1, N), mx.float32, outliers=False)
    for i, given in enumerate([x, *weights]):
        if given.dtype == mx.uint32:
            continue

        def with_it(a, i=i):
            return [*[x, *weights][:i], a, *[x, *weights][i + 1 :]]

        def dense(a):
            x, *w = with_it(a)
            w = mx.dequantize(*w, 32, bits).swapaxes(-1, -2) if case.op == "gather_qmm" else w[0]
            return x[lhs[good]] @ w[rhs[good]]

        bits = weights[0].shape[-1] * 32 // K if case.op == "gather_qmm" else 0
        ours = lambda a: case.call(with_it(a)[0], with_it(a)[1:], lhs, rhs)
        (found,) = mx.vjp(ours, [given], [cotangent])[1]
        (expected,) = mx.vjp(dense, [given], [cotangent[good]])[1]
        assert found.dtype == given.dtype
        assert_near(found, expected, f"gradient of argument {i}", LAYERS)
        tangent = draw(rng, given.shape, mx.float32, outliers=False)
        (along,) = mx.jvp(ours, [given], [tangent])[1]
        assert_near(along[good], mx.jvp(dense, [given], [tangent])[1][0], f"derivative by argument {i}", LAYERS)


@pytest.mark.parametrize("k", [1, 2])
def test_derivatives_where_indices_come_from_x(case, rng, native, k):
    """mx passes tangents of integers on, which there are none of."""
    if not case.covered:
        return
    weights, x, tangent = case.weights(), tokens(rng, 3), tokens(rng, 3)
    router = draw(rng, (K, E), mx.float32)
    chosen = mx.argpartition(x @ router, E - k, axis=-1)[:, E - k :]
    of = lambda x, rhs: case.call(x[:, None, None], weights, rhs=rhs)
    along = lambda function: mx.jvp(function, [x], [tangent])[1][0]
    found = along(lambda x: of(x, mx.argpartition(x @ router, E - k, axis=-1)[:, E - k :]))
    np.testing.assert_array_equal(np.array(found), np.array(along(lambda x: of(x, chosen))))


def told_sorted(y):
    """Whether a gather of mx's behind a result is told that indices of inputs are sorted, and indices of experts."""
    found = []

    def visit(event):
        if event["type"] == "primitive" and event["name"].startswith("Gather"):
            found.append(tuple(event["arguments"][-2:]))

    mx.export_function(visit, lambda: y)
    return found


@pytest.mark.parametrize("is_sorted", [False, True])
def test_mx_is_told_that_indices_are_sorted(rng, lenient, native, is_sorted):
    """It multiplies rows of the same expert as one matrix then. Given indices of inputs too it would not."""
    one_bit, x = stacks(rng, bits=1), tokens(rng, 96)[:, None]
    rhs, lhs = mx.sort(mx.array(rng.integers(0, E, 96))), mx.arange(96)
    mx.eval(x, rhs, lhs, *one_bit)
    arguments = {"group_size": 32, "bits": 1, "sorted_indices": is_sorted}
    assert told_sorted(mm.gather_qmm(x, *one_bit, rhs_indices=rhs, **arguments)) == [(False, is_sorted)]
    assert told_sorted(mm.gather_swiglu(x, one_bit, one_bit, None, rhs, **arguments)) == [(False, is_sorted)] * 2
    assert told_sorted(mm.gather_qmm(x, *one_bit, lhs, rhs, **arguments)) == [(False, False)]


def test_gradient_of_x_in_half_types(case, rng, native):
    if not case.covered:
        return
    for dtype in (mx.float16, mx.bfloat16):
        weights, x = case.weights(dtype), tokens(rng, 3, dtype)[:, None]
        rhs = mx.array([[0, 1], [1, 1], [4, 2]])
        loss = lambda x: case.call(x, weights, rhs=rhs).astype(mx.float32).sum()
        gradient = mx.grad(loss)(x)
        expected = case.wide(weights).sum(axis=-2)[np.array(rhs)].sum(axis=1)
        assert gradient.dtype == dtype and gradient.shape == x.shape
        assert_near(gradient[:, 0, 0], expected, "gradient of x", GRADIENTS_16_BIT)


@pytest.mark.parametrize("over", ["x", "weights", "lhs", "rhs", "x weights", "x weights lhs rhs", "x rhs"])
@pytest.mark.parametrize("with_lhs", [True, False])
def test_vmap(case, rng, executor, over, with_lhs):
    """A loop of calls; an index out of range does not reach the next element's experts, nor its inputs."""
    if not case.covered or (not with_lhs and "lhs" in over):
        return
    B = 3
    several = [case.weights() for _ in range(B)]
    xs = [tokens(rng, 4)[:, None] for _ in range(B)]
    lefts = [mx.array([[0], [3], [4], [1]]) for _ in range(B)]
    rights = [mx.array(rng.permutation([0, 1, E, E + 1, 2 * E, -1, 4, 3]).reshape(4, 2)) for _ in range(B)]
    stacked = {
        "x": mx.stack(xs), "lhs": mx.stack(lefts), "rhs": mx.stack(rights),
        "weights": [mx.stack(parts) for parts in zip(*several)],
    }  # fmt: skip
    single = {"x": xs, "lhs": lefts, "rhs": rights, "weights": several}
    names = over.split()

    def call(x, lhs, rhs, *weights):
        return case.call(x, weights, lhs if with_lhs else None, rhs)

    arguments = {name: stacked[name] if name in names else single[name][0] for name in single}
    axes = [0 if name in names else None for name in ("x", "lhs", "rhs")]
    axes += [0 if "weights" in names else None] * len(arguments["weights"])
    y = mx.vmap(call, in_axes=tuple(axes))(arguments["x"], arguments["lhs"], arguments["rhs"], *arguments["weights"])
    for b in range(B):
        one = {name: single[name][b if name in names else 0] for name in single}
        expected = call(one["x"], one["lhs"], one["rhs"], *one["weights"])
        np.testing.assert_allclose(np.array(y[b]), np.array(expected), rtol=SUMS, atol=SUMS, err_msg=f"element {b}")
        assert np.isnan(np.array(expected)).any() and np.isfinite(np.array(expected)).any()


def test_compile(case, rng, executor):
    if not case.covered:
        return
    weights = case.weights()
    compiled = mx.compile(lambda x, rhs: case.call(x, weights, rhs=rhs), shapeless=True)
    for count in (2, 5):
        x, rhs = tokens(rng, count)[:, None], mx.array(rng.integers(0, E + 1, (count, 2)))
        np.testing.assert_allclose(
            np.array(compiled(x, rhs)), np.array(case.call(x, weights, rhs=rhs)), rtol=SUMS, atol=SUMS
        )


def test_sizes_of_zero(case, rng, executor):
    for experts, outputs, columns, count, pairs in [
        (0, N, K, 3, 2), (E, 0, K, 3, 2), (E, N, 0, 3, 2), (E, N, K, 0, 2), (E, N, K, 3, 0), (0, N, K, 0, 2),
    ]:  # fmt: skip
        w = case.weights(outputs=max(outputs, 1), columns=max(columns, 32))
        if case.op == "gather_mm":
            w = [w[0][:experts, :columns, :outputs]]
        else:
            w = [a[:experts, :outputs, : a.shape[-1] if columns else 0] for a in w]
        x = tokens(rng, count, columns=max(columns, 1))[..., :columns]
        lhs, rhs = mx.zeros((pairs,), mx.int32), mx.zeros((pairs,), mx.int32)
        y = case.call(x, w, lhs, rhs)
        assert y.shape == (pairs, 1, outputs)
        values = np.array(y)
        if columns == 0:
            assert not values.any(), "a sum of no terms is zero"
        elif experts == 0 or count == 0:
            assert np.isnan(values).all(), "no index is in range"
        else:
            assert np.isfinite(values).all()


def test_bad_input(case, rng, native):
    weights, x = case.weights(), tokens(rng, 3)
    some = mx.array([0, 1, 2])
    for dtype in (mx.float32, mx.bool_):
        for sides in ({"lhs": some.astype(dtype)}, {"rhs": some.astype(dtype)}):
            with pytest.raises(mm.DtypeError, match=rf"\[{case.op}\] [lr]hs_indices has dtype .*: expected integers"):
                case.call(x, weights, **sides)
    with pytest.raises(ValueError, match=rf"\[{case.op}\] lhs_indices has shape \(3\), rhs_indices has shape \(2\)"):
        case.call(x, weights, some, some[:2])
    with pytest.raises(ValueError, match=rf"\[{case.op}\] x has a batch of shape \(3\), rhs_indices has shape \(2\)"):
        case.call(x, weights, rhs=some[:2])
    with pytest.raises(ValueError, match=rf"\[{case.op}\] . has 32 columns"):
        case.call(x[..., :32], weights, rhs=some)
    with pytest.raises(ValueError, match=rf"\[{case.op}\] . has shape \(64\): expected at least two dimensions"):
        case.call(x[0, 0], weights, rhs=some)


@pytest.mark.parametrize(
    "mode, group_size, bits",
    [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4), *(("affine", 64, bits) for bits in (2, 3, 5, 6))],
)
def test_every_format(rng, dtype, executor, mode, group_size, bits):
    """Indices out of range give NaN wherever it is."""
    words, scales, *biases = mx.quantize(draw(rng, (E, 32, K), mx.float32), group_size, bits, mode)
    biases = [a.astype(dtype) for a in biases]
    scales = scales.astype(dtype) if biases else scales
    x, rhs = tokens(rng, 3, dtype), np.array([0, E, E - 1])
    options = {"group_size": group_size, "bits": bits, "mode": mode}
    y = mm.gather_qmm(x, words, scales, *biases, rhs_indices=mx.array(rhs), **options)
    w = specs.dequantized(words, scales, biases[0] if biases else None, group_size, bits, mode)
    assert_product_right(y, exact(specs.widen(x), w, np.arange(3), rhs), dtype)
    assert y.dtype == dtype
    if executor == "gpu":  # there mx has the experts that are not transposed
        return
    loss = lambda x: mm.gather_qmm(x, words, scales, *biases, rhs_indices=mx.array([0, 1, 4]), **options).sum()
    tolerance = LAYERS if dtype == mx.float32 else GRADIENTS_16_BIT
    assert_near(mx.grad(loss)(x), w.sum(axis=-2)[[0, 1, 4]][:, None], "gradient", tolerance)


def test_bad_formats(rng, native):
    words, scales = mx.quantize(draw(rng, (E, 32, K), mx.float32), mode="mxfp4")
    x, rhs = tokens(rng, 3), mx.array([0, 1, 2])
    call = lambda *parts, **options: mm.gather_qmm(x, words, *parts, rhs_indices=rhs, **options)
    with pytest.raises(ValueError, match=r"\[gather_qmm\] mode is 'int4': expected affine, mxfp4, mxfp8 or nvfp4"):
        call(scales, mode="int4")
    with pytest.raises(
        ValueError, match=r"\[gather_qmm\] biases has shape .*: expected None, as mode mxfp4 has no biases"
    ):
        call(scales, scales, mode="mxfp4")
    with pytest.raises(mm.DtypeError, match=r"\[gather_qmm\] scales has dtype float32: expected uint8"):
        call(scales.astype(mx.float32), mode="mxfp4")
    with pytest.raises(ValueError, match=r"\[gather_qmm\] global_scale is an array: expected None"):
        call(scales, mode="mxfp4", global_scale=mx.array(1.0))


def test_strict(rng, native):
    words, *parts = mx.quantize(draw(rng, (E, 32, K), mx.float32), 64, 1)
    with pytest.raises(RuntimeError, match="no kernel of mlx_mittens covers 1 bit"):
        mm.gather_qmm(tokens(rng, 1), words, *parts, rhs_indices=mx.array([0]), bits=1)


def exact_weight_gradient(x, dy, rhs, lhs, experts):
    """The sum of dy.T @ x over the pairs of each expert, and the sum of the absolute values of its terms."""
    x, dy = specs.widen(x), specs.widen(dy)
    value = np.zeros((2, experts, dy.shape[-1], x.shape[-1]))
    for pair, (i, e) in enumerate(zip(lhs, rhs, strict=True)):
        if 0 <= e < experts and 0 <= i < len(x):
            value[0, e] += dy[pair].T @ x[i]
            value[1, e] += np.abs(dy[pair]).T @ np.abs(x[i])
    return value


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("rows, columns, outputs", [(1, 64, 12), (1, 8, 96), (1, 96, 8), (3, 33, 35), (1, 7, 1)])
def test_gradient_of_weights(rng, dtype, executor, rows, columns, outputs, is_sorted, shared):
    """A product over the rows of each expert, also where pairs share an input. An expert without pairs has zeros."""
    if executor == "gpu":  # composed there
        return
    experts, count = 6, 30
    chosen = rng.integers(0, experts - 1, count)
    chosen = np.sort(chosen) if is_sorted else chosen
    rhs = np.where(chosen == 2, experts + 1, chosen)
    rhs = np.sort(rhs) if is_sorted else rhs
    w = draw(rng, (experts, outputs, columns), dtype)
    x = tokens(rng, count // shared, dtype, rows, columns)
    dy = draw(rng, (count, rows, outputs), dtype, outliers=False)
    indices = mx.array(rhs.reshape(count // shared, shared) if shared > 1 else rhs)
    given = x[:, None] if shared > 1 else x

    def y(w):
        return mm.gather_mm(given, w.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=is_sorted)

    mm.stats(reset=True)
    (found,) = mx.vjp(y, [w], [dy.reshape(*indices.shape, rows, outputs)])[1]
    mx.eval(found)
    if executor == "native":
        assert set(mm.stats()["gather_mm_vjp"]["kernels"]) == {f"native {mm._ext.cpu_instructions}"}
    value, terms = exact_weight_gradient(x, dy, rhs, np.arange(count) // shared, experts)
    assert found.dtype == dtype and found.shape == w.shape
    assert not np.array(found[experts - 1].astype(mx.float32)).any()
    error = np.abs(specs.widen(found) - value)
    smallest = 2.0**-24 if dtype == mx.float16 else 0.0
    assert (error <= of_product(dtype) * terms + smallest).all()


def test_gradient_of_weights_that_are_not_transposed(rng, executor):
    w, x = draw(rng, (E, K, N), mx.float32), tokens(rng, 9)
    rhs, lhs = np.sort(rng.integers(0, E, 9)), rng.integers(0, 9, 9)
    dy = draw(rng, (9, 1, N), mx.float32, outliers=False)
    y = lambda w: mm.gather_mm(x, w, mx.array(lhs), mx.array(rhs))
    (found,) = mx.vjp(y, [w], [dy])[1]
    value, terms = exact_weight_gradient(x, dy, rhs, lhs, E)
    assert (np.abs(specs.widen(found.swapaxes(-1, -2)) - value) <= of_product(mx.float32) * terms).all()


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("out_of_range", [False, True])
def test_second_derivatives_by_weights(rng, native, is_sorted, out_of_range):
    w, x = draw(rng, (E, N, K), mx.float32), tokens(rng, 8)
    rhs = np.sort(rng.integers(0, E, 8))
    rhs[-1] = E if out_of_range else rhs[-1]
    good = mx.array(rhs < E)[:, None, None]
    chosen = mx.array(np.eye(E + 1, E, dtype=np.float32)[rhs])  # a product, as mx's indexing has no forward derivative

    def ours(x, w):
        y = mm.gather_mm(x, w.swapaxes(-1, -2), rhs_indices=mx.array(rhs), sorted_indices=is_sorted)
        return (mx.where(good, y, 0) ** 3).sum()

    def dense(x, w):
        of_pairs = (chosen @ w.reshape(E, -1)).reshape(-1, N, K)
        return ((x @ of_pairs.swapaxes(-1, -2)) ** 3).sum()

    for by in (0, 1):
        along = lambda f, by=by: mx.grad(lambda x, w: (mx.grad(f, 1)(x, w) ** 2).sum(), by)(x, w)
        assert_near(along(ours), along(dense), f"by argument {by}", LAYERS)
    tangents = [draw(rng, a.shape, mx.float32, outliers=False) for a in (x, w)]
    forward = lambda f: mx.jvp(mx.grad(f, 1), [x, w], tangents)[1][0]
    assert_near(forward(ours), forward(dense), "forward over reverse", LAYERS)


def test_vmap_of_the_gradient_of_weights(rng, native):
    w, x = draw(rng, (2, E, N, K), mx.float32), mx.stack([tokens(rng, 8) for _ in range(2)])
    rhs = mx.array(rng.integers(0, E, 8))
    gradient = mx.grad(lambda w, x: (mm.gather_mm(x, w.swapaxes(-1, -2), rhs_indices=rhs) ** 2).sum())
    for axes in ((0, 0), (None, 0), (0, None)):
        given = [a if axis == 0 else a[0] for a, axis in zip((w, x), axes, strict=True)]
        found = mx.vmap(gradient, in_axes=axes)(*given)
        loop = [gradient(*(a[i] if axis == 0 else a for a, axis in zip(given, axes, strict=True))) for i in range(2)]
        assert_near(found, mx.stack(loop), str(axes), SUMS)


def test_gradient_of_weights_in_a_shapeless_function(rng, native):
    def gradient(w, x, rhs):
        y = lambda w: mm.gather_mm(x, w.swapaxes(-1, -2), rhs_indices=rhs, sorted_indices=True)
        return mx.vjp(y, [w], [mx.ones((1, 1, 1)) + y(w)])[1][0]

    compiled = mx.compile(gradient, shapeless=True)
    for experts, outputs, columns, count in ((4, 8, 16, 5), (4, 12, 24, 7), (6, 10, 8, 9)):
        w, x = draw(rng, (experts, outputs, columns), mx.float32), tokens(rng, count, columns=columns)
        rhs = mx.sort(mx.array(rng.integers(0, experts, count)))
        assert_near(compiled(w, x, rhs), gradient(w, x, rhs), "compiled", SUMS)
