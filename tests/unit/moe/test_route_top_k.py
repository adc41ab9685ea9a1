"""A router's choice."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import ROUNDINGS, SUMS, assert_near, units

import mlx_mittens as mm
from mlx_mittens import specs


def logits_of(rng, shape, dtype=mx.float32):
    return mx.array(rng.standard_normal(shape).astype(np.float32) * 2).astype(dtype)


@pytest.fixture
def any_routes(executor):
    """Executors; an NVIDIA GPU leaves such routes to mx."""
    with mm.strict(executor != "gpu" or not mx.cuda.is_available()):
        yield executor


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "chosen", "sqrtsoftplus"])
def test_beside_numpy(rng, dtype, any_routes, scores, descending):
    for tokens, experts, k in [(1, 8, 2), (5, 128, 8), (3, 17, 17), (2, 1, 1)]:
        logits = logits_of(rng, (tokens, experts), dtype)
        indices, weights = mm.route_top_k(logits, k, None, scores, descending=descending, scale=1.5)
        assert indices.dtype == mx.uint32 and weights.dtype == dtype and indices.shape == weights.shape == (tokens, k)
        x, chosen = specs.widen(logits), np.array(indices)
        # Experts are chosen by scores in the type of the logits.
        wide = logits.astype(mx.float32)
        values = {"softmax": mx.softmax(wide, -1), "sigmoid": mx.sigmoid(wide), "chosen": wide}
        values = {**values, "sqrtsoftplus": mx.sqrt(mx.logaddexp(wide, 0.0))}[scores]
        keys = specs.widen(values.astype(dtype))
        most = np.sort(keys, -1)[:, experts - k :]
        np.testing.assert_array_equal(np.take_along_axis(keys, chosen, -1), most[:, ::-1] if descending else most)
        of_chosen = np.take_along_axis(x, chosen, -1)
        if scores == "sigmoid":
            expected = 1 / (1 + np.exp(-of_chosen))
        elif scores == "sqrtsoftplus":
            expected = np.sqrt(np.logaddexp(of_chosen, 0))
        else:
            total = np.exp(of_chosen if scores == "chosen" else x).sum(-1, keepdims=True)
            expected = np.exp(of_chosen) / total
        tolerance = max(units(1, dtype), 4 * ROUNDINGS)
        np.testing.assert_allclose(specs.widen(weights), 1.5 * expected, rtol=tolerance)


@pytest.mark.parametrize("descending", [True, False])
def test_ties_are_those_of_mx(rng, executor, descending):
    """Sets of experts are the same for scores of few values; the order is settled."""
    for _ in range(50):
        experts = int(rng.integers(2, 40))
        k = int(rng.integers(1, experts + 1))
        logits = mx.array(rng.integers(0, 4, (3, experts)).astype(np.float32))
        indices = np.array(mm.route_top_k(logits, k, None, "chosen", descending=descending)[0])
        if descending:
            of_mx = mx.argpartition(-logits, k - 1)[..., :k]
            expected = np.argsort(-np.array(logits), -1, kind="stable")[:, :k]
        else:
            of_mx = mx.argpartition(logits, -k)[..., -k:]
            expected = np.argsort(np.array(logits), -1, kind="stable")[:, experts - k :]
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_array_equal(np.sort(indices, -1), np.sort(np.array(of_mx), -1))


def test_bias_chooses_and_does_not_weigh(rng, executor):
    """As the routers of DeepSeek-V3."""
    logits = logits_of(rng, (4, 16))
    bias = mx.array(rng.standard_normal(16).astype(np.float32))
    indices, weights = mm.route_top_k(logits, 3, bias, "sigmoid", renormalize=True, scale=2.5)
    scores = mx.sigmoid(logits)
    expected = np.argsort(-np.array(scores + bias), -1, kind="stable")[:, :3]
    np.testing.assert_array_equal(np.array(indices), expected)
    chosen = np.take_along_axis(specs.widen(scores), expected, -1)
    np.testing.assert_allclose(np.array(weights), 2.5 * chosen / chosen.sum(-1, keepdims=True), rtol=ROUNDINGS)


def test_precise(rng, dtype, any_routes):
    """Scores near 1 are equal in half types, and are told apart in float32."""
    logits = (5 + mx.array(rng.permutation(24).reshape(2, 12)) / 16).astype(dtype)
    bias = mx.array(rng.integers(0, 2, 12) * 1e-3).astype(mx.float32)
    keys = 1 / (1 + np.exp(-specs.widen(logits))) + specs.widen(bias)
    for descending in (True, False):
        indices, _ = mm.route_top_k(logits, 4, bias, "sigmoid", descending=descending, precise=True)
        most = np.argsort(keys, -1)[:, -4:]
        np.testing.assert_array_equal(np.array(indices), most[:, ::-1] if descending else most)


def test_softplus_of_large_logits(any_routes):
    """Where exp(x) is far below 1, or is infinite."""
    logits = mx.array([[-60.0, -30.0, -12.0, -5.0, -4.0, 0.0, 20.0, 200.0]])
    _, weights = mm.route_top_k(logits, 8, None, "sqrtsoftplus")
    expected = np.sqrt(np.logaddexp(specs.widen(logits), 0))[:, ::-1]
    np.testing.assert_allclose(np.array(weights), expected, rtol=4 * ROUNDINGS)


def test_eps(rng, any_routes):
    logits = logits_of(rng, (3, 9)) - 8
    _, weights = mm.route_top_k(logits, 3, None, "sigmoid", renormalize=True, eps=1e-2)
    chosen = np.sort(1 / (1 + np.exp(-specs.widen(logits))), -1)[:, ::-1][:, :3]
    np.testing.assert_allclose(np.array(weights), chosen / (chosen.sum(-1, keepdims=True) + 1e-2), rtol=SUMS)


def keys_of_groups(keys, groups, kept, dropped):
    parts = keys.reshape(*keys.shape[:-1], groups, -1)
    sums = np.sort(parts, -1)[..., -2:].sum(-1)
    order = np.argsort(sums, -1, kind="stable")[..., : groups - kept]
    parts = parts.copy()
    np.put_along_axis(parts, order[..., None], dropped, axis=-2)
    return parts.reshape(keys.shape)


@pytest.mark.parametrize("dropped", [0.0, -np.inf])
@pytest.mark.parametrize("descending", [True, False])
def test_groups(rng, any_routes, descending, dropped):
    """As the routers of DeepSeek-V3, whose biases may be negative; ties of groups too."""
    for experts, groups, kept, k in [(16, 4, 2, 3), (256, 8, 4, 8), (64, 32, 1, 4), (6, 3, 3, 2), (10, 1, 1, 2)]:
        logits, bias = logits_of(rng, (3, experts)), logits_of(rng, (experts,)) * 0.3
        logits[2] = mx.round(logits[2])
        route = {"descending": descending, "precise": True, "groups": (groups, kept), "dropped": dropped}
        indices, weights = mm.route_top_k(logits, k, bias, "sigmoid", **route)
        scores = np.array(mx.sigmoid(logits))
        keys = keys_of_groups(scores + np.array(bias), groups, kept, dropped)
        order = np.argsort(-keys if descending else keys, -1, kind="stable")
        np.testing.assert_array_equal(np.array(indices), order[:, :k] if descending else order[:, experts - k :])
        chosen = np.take_along_axis(scores, np.array(indices), -1)
        np.testing.assert_allclose(np.array(weights), chosen, rtol=ROUNDINGS)


def test_a_group_with_nan_is_kept(any_routes):
    """NaN is the largest where groups are sorted, as mx sorts it."""
    logits = mx.array([[mx.nan, 0.1, 0.2, 0.3, 2.0, 3.0]])
    indices, _ = mm.route_top_k(logits, 1, None, "chosen", groups=(3, 1), dropped=-np.inf)
    assert indices.item() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": (3, 1)}, "8 columns, there are 3 groups"),
        ({"groups": (8, 1)}, "at least two experts in each"),
        ({"groups": (2, 3)}, "2, with 3 kept"),
        ({"groups": (2, 0)}, "2, with 0 kept"),
        ({"eps": -1.0}, "eps is -1"),
        ({"eps": mx.nan}, "eps is nan"),
    ],
)
def test_bad_groups_and_eps(options, message):
    with pytest.raises(ValueError, match=message):
        mm.route_top_k(mx.zeros((1, 8)), 2, **options)


def test_more_groups_than_lanes(rng, lenient):
    """On the CPU, and where a GPU has no kernel."""
    logits = logits_of(rng, (2, 80))
    indices, _ = mm.route_top_k(logits, 5, None, "chosen", groups=(40, 3), dropped=-np.inf)
    expected = np.argsort(-keys_of_groups(np.array(logits), 40, 3, -np.inf), -1, kind="stable")[:, :5]
    np.testing.assert_array_equal(np.array(indices), expected)


@pytest.mark.parametrize("options", [{"precise": True}, {"groups": (4, 2)}, {"renormalize": True, "eps": 1e-3}])
def test_nvidia_kernels_are_the_measured_ones(rng, lenient, nvidia_kernels, options):
    logits = logits_of(rng, (3, 16))
    found = [np.array(a) for a in mm.route_top_k(logits, 4, None, "sigmoid", **options)]
    assert nvidia_kernels() == []
    mx.eval(mm.route_top_k(logits, 4, None, "sigmoid"))
    assert nvidia_kernels() == ["route_top_k_float32"]
    with mm.simulator.enabled(seed=1, gpu="m2-max"):
        expected = mm.route_top_k(logits, 4, None, "sigmoid", **options)
    np.testing.assert_array_equal(found[0], np.array(expected[0]))
    np.testing.assert_allclose(found[1], np.array(expected[1]), rtol=SUMS)


def test_renormalized(rng, dtype, executor):
    logits = logits_of(rng, (2, 3, 32), dtype)
    _, weights = mm.route_top_k(logits, 4, renormalize=True)
    np.testing.assert_allclose(specs.widen(weights).sum(-1), 1, atol=max(units(4, dtype), ROUNDINGS))
    same, others = (
        mm.route_top_k(logits.astype(mx.float32), 4, None, *how) for how in (("softmax", True), ("chosen",))
    )
    np.testing.assert_array_equal(np.array(same[0]), np.array(others[0]))
    np.testing.assert_allclose(np.array(same[1]), np.array(others[1]), rtol=SUMS)


@pytest.mark.parametrize("fill", [mx.nan, mx.inf, -mx.inf])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "chosen", "sqrtsoftplus"])
def test_indices_stay_in_range(any_routes, scores, fill):
    for descending in (True, False):
        row = mx.array([1.0, fill, 0.5, fill, 2.0])
        for logits in (row, mx.full((5,), fill)):
            indices = np.array(mm.route_top_k(logits, 3, None, scores, descending=descending)[0])
            assert len(set(indices.tolist())) == 3 and (indices < 5).all()


def test_gradients(rng, executor):
    logits = logits_of(rng, (3, 12))
    cotangent = logits_of(rng, (3, 4))
    for scores in ("softmax", "sigmoid", "chosen"):
        indices, _ = mm.route_top_k(logits, 4, None, scores, True)

        def dense(x):
            values = {"softmax": mx.softmax(x, -1), "sigmoid": mx.sigmoid(x), "chosen": x}[scores]
            chosen = mx.take_along_axis(values, indices, -1)
            return mx.softmax(chosen, -1) if scores == "chosen" else chosen / chosen.sum(-1, keepdims=True)

        ours = lambda x: mm.route_top_k(x, 4, None, scores, True)[1]
        (found,), (expected,) = (mx.vjp(f, [logits], [cotangent])[1] for f in (ours, dense))
        assert_near(found, expected, scores)


def test_vmap_and_compile(rng, executor):
    logits, bias = logits_of(rng, (3, 2, 9)), logits_of(rng, (3, 9))
    call = lambda x, b: mm.route_top_k(x, 2, b, "sigmoid")
    for axes in ((0, 0), (0, None), (None, 0)):
        given = [a if axis == 0 else a[0] for a, axis in zip((logits, bias), axes)]
        mapped = mx.vmap(call, in_axes=axes)(*given)
        for i in range(3):
            one = call(*(a[i] if axis == 0 else a for a, axis in zip(given, axes)))
            np.testing.assert_array_equal(np.array(mapped[0][i]), np.array(one[0]))
            np.testing.assert_allclose(np.array(mapped[1][i]), np.array(one[1]), rtol=ROUNDINGS)
    compiled = mx.compile(call)(logits, bias[0])
    np.testing.assert_array_equal(np.array(compiled[0]), np.array(call(logits, bias[0])[0]))


def test_bad_input(native):
    logits = mx.zeros((2, 8))
    for k in (0, 9, -1):
        with pytest.raises(ValueError, match=rf"\[route_top_k\] k is {k}, logits has 8 columns"):
            mm.route_top_k(logits, k)
    with pytest.raises(
        ValueError, match=r"\[route_top_k\] scores is 'tanh': expected softmax, sigmoid, chosen or sqrtsoftplus"
    ):
        mm.route_top_k(logits, 2, None, "tanh")
    with pytest.raises(ValueError, match=r"\[route_top_k\] bias has shape \(7\)"):
        mm.route_top_k(logits, 2, mx.zeros((7,)))
    with pytest.raises(mm.DtypeError, match=r"\[route_top_k\] logits has dtype int32"):
        mm.route_top_k(logits.astype(mx.int32), 2)
    with pytest.raises(ValueError, match=r"\[route_top_k\] scale is inf"):
        mm.route_top_k(logits, 2, scale=mx.inf)
