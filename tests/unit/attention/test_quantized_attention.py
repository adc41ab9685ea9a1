"""Attention over packed keys and values."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.attention import MASKS, draw, exact_of, hidden_keys, hides, mask_of, poisoned, run, without
from helpers.matrices import quantize
from helpers.tolerances import LAYERS, SUM, SUMS, assert_attention_right, assert_near

import mlx_mittens as mm
from mlx_mittens.specs import dequantized
from mlx_mittens.specs.attention import composed, twin_mask, zero_unseeing


def attend(q, keys, values, scale, mask=None, sinks=None, window=None, group_size=64, bits=8):
    """One call, compared with float64 and with mlx-lm's."""
    y = run(
        lambda: mm.quantized_scaled_dot_product_attention(
            q, keys, values, scale, mask, group_size, bits, sinks=sinks, window=window
        )
    )
    with mx.stream(mx.cpu):
        shape = (mask, window, q.shape[2], keys[0].shape[2])
        twin = zero_unseeing(
            composed(q, keys, values, scale, twin_mask(*shape), sinks, group_size, bits), *shape)  # fmt: skip
    dense = (dequantized(*triple, group_size, bits) for triple in (keys, values))
    assert_attention_right(y, twin, exact_of(q, *dense, scale, mask, sinks, window), q.dtype)
    return y


def packed(rng, shape, dtype, group_size, bits):
    """Queries and triples of (batch, heads, key_heads, queries, keys, width)."""
    batch, heads, key_heads, queries, keys, width = shape
    rows = (batch, key_heads, keys, width)
    return (
        draw(rng, (batch, heads, queries, width), dtype, outliers=False),
        *(quantize(rng, rows, dtype, group_size, bits) for _ in range(2)),
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 65), (1, 300), (3, 40), (9, 64), (20, 70), (65, 130)])
def test_shapes(rng, dtype, executor, queries, keys, group_size, bits):
    shape = (1, 2, 1, queries, keys, 128)
    mask = mask_of(rng, str(rng.choice(MASKS)), shape, dtype)
    sinks = draw(rng, (2,), dtype) if rng.integers(2) else None
    attend(*packed(rng, shape, dtype, group_size, bits), 128**-0.5, mask, sinks, None, group_size, bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "heads, key_heads, queries", [(1, 1, 1), (8, 2, 1), (6, 2, 5), (16, 1, 1), (4, 4, 17), (12, 2, 2)]
)
def test_ratios_and_batches(rng, executor, heads, key_heads, queries, bits):
    shape = (2, heads, key_heads, queries, 45, 64)
    sinks = draw(rng, (heads,), mx.bfloat16)
    attend(*packed(rng, shape, mx.bfloat16, 64, bits), 0.125, "causal", sinks, None, 64, bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("ratio, width", [(4, 64), (16, 64), (4, 128), (16, 128)])
def test_rows_that_share_keys(rng, executor, ratio, width, group_size, bits):
    """So many keys that they are split."""
    arrays = packed(rng, (1, ratio, 1, 1, 530, width), mx.float16, group_size, bits)
    mm.stats(reset=True)
    attend(*arrays, 0.125, None, None, None, group_size, bits)
    kernels = str(mm.stats()["quantized_scaled_dot_product_attention"]["kernels"])
    assert executor == "native" or ("decode" in kernels and "combine" in kernels), kernels


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries, window", [(1, 10), (4, 33), (40, 7)])
def test_window(rng, executor, mask, queries, window, bits):
    shape = (1, 4, 2, queries, 90, 64)
    mask = mask_of(rng, mask, shape, mx.float16)
    attend(*packed(rng, shape, mx.float16, 32, bits), 0.125, mask, None, window, 32, bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [32, 96, 160])
def test_widths_on_the_cpu(rng, dtype, native, width, bits):
    for queries in (1, 30):
        arrays = packed(rng, (1, 4, 2, queries, 50, width), dtype, 32, bits)
        attend(*arrays, width**-0.5, "causal", None, None, 32, bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("queries, mask, sinks", [(1, None, True), (5, "causal", False), (20, "causal", True)])
def test_deepseek_widths_have_kernels(rng, dtype, executor, queries, mask, sinks, bits):
    q, keys, _ = packed(rng, (1, 6, 2, queries, 300, 192), dtype, 64, bits)
    values = quantize(rng, (1, 2, 300, 128), dtype, 64, bits)
    attend(q, keys, values, 192**-0.5, mask, draw(rng, (6,), dtype) if sinks else None, None, 64, bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width, value_width", [(64, 32), (64, 96), (128, 64), (192, 64)])
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_values_of_another_width(rng, dtype, lenient, executor, queries, width, value_width, bits):
    q, keys, _ = packed(rng, (1, 4, 2, queries, 50, width), dtype, 32, bits)
    values = quantize(rng, (1, 2, 50, value_width), dtype, 32, bits)
    assert attend(q, keys, values, 0.125, "causal", None, None, 32, bits).shape == (1, 4, queries, value_width)


def test_graphs_of_native_code_do_not_reach_a_kernel_that_does_not_cover_them(rng, native):
    q, keys, _ = packed(rng, (1, 4, 2, 3, 50, 64), mx.float16, 32, 4)
    values = quantize(rng, (1, 2, 50, 544), mx.float16, 32, 4)
    y = mm.quantized_scaled_dot_product_attention(q, keys, values, 0.125, None, 32, 4)
    with mm.simulator.enabled(), pytest.raises(ValueError, match="no kernel covers"):
        mx.eval(y)


def check_hidden(rng, dtype, queries, how, bits, ratio=2, keys=40, width=64, group_size=32):
    """Scales and biases of hidden keys and values may be anything."""
    hidden = hidden_keys(rng, how, queries, keys, dtype)
    q, k, v = packed(rng, (1, ratio, 1, queries, keys, width), dtype, group_size, bits)
    dense = [dequantized(*triple, group_size, bits) for triple in (k, v)]
    exact = exact_of(q, *dense, 0.125, hidden.mask, window=hidden.window)
    with mx.stream(mx.cpu):
        seen = twin_mask(hidden.mask, hidden.window, queries, keys)
        twin = composed(q, k, v, 0.125, seen, None, group_size, bits)
    for value in (np.nan, np.inf):
        for scales, biases in ((value, None), (None, -value)):
            spoilt = [
                (words, *(a if x is None else poisoned(a, hidden.keys, x) for a, x in ((s, scales), (b, biases))))
                for words, s, b in (k, v)
            ]
            for triples in ((k, spoilt[1]), spoilt):
                y = run(lambda triples=triples: mm.quantized_scaled_dot_product_attention(
                    q, *triples, 0.125, hidden.mask, group_size, bits, window=hidden.window))  # fmt: skip
                assert_attention_right(without(y, hidden.hits, exact), twin, exact, dtype)
                if triples[0] is k:
                    assert not np.isfinite(np.array(y.astype(mx.float32)))[:, :, hidden.hits].any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("queries, how", [(n, how) for n in (1, 4, 24) for how in hides(n)])
def test_what_is_hidden_does_not_matter(rng, dtype, executor, queries, how, bits):
    check_hidden(rng, dtype, queries, how, bits)


@pytest.mark.parametrize("how", ["bool", "additive"])
@pytest.mark.parametrize("group_size, width, ratio", [(64, 64, 16), (64, 128, 4), (32, 256, 2)])
def test_what_is_hidden_does_not_matter_by_the_rules_for_nvidia(rng, nvidia_kernels, how, group_size, width, ratio):
    check_hidden(rng, mx.float16, 3, how, 4, ratio, 40, width, group_size)


@pytest.mark.parametrize("width, group_size", [(64, 32), (64, 64), (96, 32), (128, 64), (128, 128)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("queries, kernel", [(1, "decode8"), (6, "decode16")])
def test_kernels_that_load_ahead(rng, nvidia_kernels, queries, kernel, bits, width, group_size):
    """Pairs of integers are unpacked at once; the last keys are fewer than a simdgroup takes."""
    for dtype in (mx.float16, mx.bfloat16):
        q, keys, values = packed(rng, (1, 4, 1, queries, 77, width), dtype, group_size, bits)
        attend(q, keys, values, 0.125, None, None, None, group_size, bits)
        name = str(dtype).rpartition(".")[2]
        assert f"attention_{kernel}_{bits}bit_{width}_{width}_{name}" in nvidia_kernels()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("queries", [1, 20])
def test_strides(rng, dtype, executor, queries, bits):
    """The front of a cache, transposed arrays, and triples whose parts have strides of their own."""
    q = draw(rng, (2, queries, 4, 64), dtype, False).swapaxes(1, 2)
    cache = [quantize(rng, (2, 2, 256, 64), dtype, 32, bits) for _ in range(2)]
    attend(q, *([a[:, :, :70] for a in triple] for triple in cache), 0.125, "causal", None, None, 32, bits)
    attend(q, *([a[:, :, 5:80:3] for a in triple] for triple in cache), 0.125, None, None, None, 32, bits)
    mixed = [[w[:, :, :70], mx.contiguous(s[:, :, :70]), b[:, :, :70]] for w, s, b in cache]
    attend(q, *mixed, 0.125, None, None, None, 32, bits)
    moved = [[mx.contiguous(a[:, :, :70].swapaxes(1, 2)).swapaxes(1, 2) for a in triple] for triple in cache]
    attend(q, *moved, 0.125, "causal", None, None, 32, bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_long(rng, dtype, native, bits):
    attend(*packed(rng, (1, 4, 1, 1, 3001, 64), dtype, 64, bits), 0.125, None, None, None, 64, bits)
    attend(*packed(rng, (1, 2, 1, 200, 1000, 64), dtype, 64, bits), 0.125, "causal", None, None, 64, bits)


@pytest.mark.parametrize("queries", [2, 40])
def test_rows_that_see_no_key_are_zero(rng, executor, queries):
    q, keys, values = packed(rng, (1, 4, 2, queries, 5, 64), mx.float16, 64, 8)
    values = (values[0], values[1] + float("nan"), values[2])
    hidden = mx.zeros((queries, 5), mx.bool_)
    for mask, sinks in ((hidden, None), (mx.where(hidden, 0, -mx.inf), None), (hidden, mx.zeros((4,), mx.float16))):
        y = run(lambda mask=mask, sinks=sinks: mm.quantized_scaled_dot_product_attention(
            q, keys, values, 0.125, mask if mask.dtype == mx.bool_ else mask.astype(mx.float16), sinks=sinks)
        )  # fmt: skip
        assert y.dtype == mx.float16 and not mx.any(y != 0)


@pytest.mark.parametrize("bits", [4, 8])
def test_gradient_of_queries(rng, native, bits):
    q, keys, values = packed(rng, (2, 4, 2, 7, 40, 64), mx.float32, 64, bits)
    mask, sinks = draw(rng, (7, 40), mx.float32), draw(rng, (4,), mx.float32)
    ours = lambda q, m, s: mm.quantized_scaled_dot_product_attention(q, keys, values, 0.125, m, 64, bits, sinks=s)
    twin = lambda q, m, s: composed(q, keys, values, 0.125, m, s, 64, bits)
    cotangent = draw(rng, q.shape, mx.float32)
    gradients = [mx.vjp(f, [q, mask, sinks], [cotangent])[1] for f in (ours, twin)]
    for i, (a, b) in enumerate(zip(*gradients, strict=True)):
        assert_near(a, b, f"gradient {i}", SUMS)
    tangents = [draw(rng, a.shape, mx.float32) for a in (q, mask, sinks)]
    derivatives = [mx.jvp(f, [q, mask, sinks], tangents)[1][0] for f in (ours, twin)]
    assert_near(*derivatives, "jvp", LAYERS)
    with pytest.raises(ValueError, match="has no gradients with respect to packed keys and values"):
        mx.eval(mx.grad(lambda s: ours(q, mask, sinks).sum() * 0 + mm.quantized_scaled_dot_product_attention(
            q, (keys[0], s, keys[2]), values, 0.125, bits=bits).sum())(keys[1]))  # fmt: skip


@pytest.mark.parametrize("bits", [4, 8])
def test_vmap_and_compile(rng, executor, bits):
    q = draw(rng, (3, 2, 4, 2, 64), mx.float32, False)
    keys, values = ([mx.stack([a, a[:, ::-1], a * 1]) for a in quantize(rng, (2, 2, 30, 64), mx.float32, 64, bits)]
                    for _ in range(2))  # fmt: skip
    one = mx.compile(lambda q, k, v: mm.quantized_scaled_dot_product_attention(q, k, v, 0.125, "causal", 64, bits))
    each = run(lambda: mx.stack([one(q[i], [a[i] for a in keys], [a[i] for a in values]) for i in range(3)]))
    assert_near(run(lambda: mx.vmap(one)(q, keys, values)), each, "vmap")
    shared = run(lambda: mx.vmap(lambda q: one(q, [a[0] for a in keys], [a[0] for a in values]))(q))
    assert_near(shared[0], each[0], "vmap of queries")


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_other_bits_are_composed(rng, native, bits):
    q = draw(rng, (1, 4, 6, 64), mx.float32, False)
    keys, values = (mx.quantize(draw(rng, (1, 2, 40, 64), mx.float32), 32, bits) for _ in range(2))
    with pytest.raises(RuntimeError, match=rf"strict mode: no kernel of mlx_mittens covers {bits} bits"):
        mm.quantized_scaled_dot_product_attention(q, keys, values, 0.125, None, 32, bits)
    with mm.strict(False):
        for mask in (None, "causal", mx.array(rng.random((6, 40)) < 0.6), draw(rng, (6, 40), mx.float32)):
            for window, sinks in ((None, None), (9, None), (9, draw(rng, (4,), mx.float32))):
                y = mm.quantized_scaled_dot_product_attention(
                    q, keys, values, 0.125, mask, 32, bits, sinks=sinks, window=window
                )
                twin = composed(q, keys, values, 0.125, twin_mask(mask, window, 6, 40), sinks, 32, bits)
                assert_near(y, twin, f"{mask} {window}", SUM)
        for hidden in (mx.zeros((6, 40), mx.bool_), mx.full((6, 40), -mx.inf)):
            y = mm.quantized_scaled_dot_product_attention(q, keys, values, 0.125, hidden, 32, bits)
            assert not mx.any(y != 0)


def test_empty(rng, native):
    q, keys, values = packed(rng, (1, 2, 1, 3, 4, 64), mx.float32, 64, 8)
    none = [[a[:, :, :0] for a in triple] for triple in (keys, values)]
    assert not mx.any(mm.quantized_scaled_dot_product_attention(q, *none, 1.0)).item()
    assert mm.quantized_scaled_dot_product_attention(q[:, :, :0], keys, values, 1.0).shape == (1, 2, 0, 64)
    keys, values = ([a[:0] for a in triple] for triple in (keys, values))
    assert mm.quantized_scaled_dot_product_attention(q[:0], keys, values, 1.0).shape == (0, 2, 3, 64)


T = mx.zeros
WORDS = T((1, 2, 5, 16), mx.uint32)
PACKED = (WORDS, T((1, 2, 5, 1)), T((1, 2, 5, 1)))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"queries": T((4, 3, 64))}, ValueError, r"queries has shape \(4,3,64\): expected four dimensions"),
        ({"q_keys": (WORDS.astype(mx.int32), *PACKED[1:])}, mm.DtypeError,
         r"q_keys has words of dtype int32: expected uint32"),
        ({"q_values": (WORDS[0], *PACKED[1:])}, ValueError,
         r"q_values has an array of shape \(2,5,16\): expected four"),
        ({"q_keys": (WORDS, PACKED[1], T((1, 2, 5, 2)))}, ValueError,
         r"q_keys has words .* expected scales and biases of \(1,2,5,1\)"),
        ({"q_values": (WORDS, T((1, 2, 4, 1)), PACKED[2])}, ValueError, r"q_values has words"),
        ({"bits": 4}, ValueError, r"q_keys has words of shape \(1,2,5,16\), .* 128 integers of 4 bits"),
        ({"bits": 7}, ValueError, r"bits is 7"),
        ({"group_size": 48}, ValueError, r"group_size is 48"),
        ({"group_size": 128}, ValueError, r"64 integers of 8 bits"),
        ({"queries": T((1, 4, 3, 128))}, ValueError, r"queries have shape \(1,4,3,128\), keys \(1,2,5,64\)"),
        ({"queries": T((2, 4, 3, 64))}, ValueError, r"expected the same batch size"),
        ({"queries": T((1, 3, 3, 64))}, ValueError, r"queries have 3 heads, keys have 2: expected a multiple"),
        ({"q_values": tuple(a[:, :, :4] for a in PACKED)}, ValueError, r"there are 5 keys and 4 values"),
        ({"q_values": tuple(a[:, :1] for a in PACKED)}, ValueError, r"keys have 2 heads, values have 1"),
        ({"mask": T((3, 4))}, ValueError, r"mask has shape \(3,4\)"),
        ({"mask": "full"}, ValueError, r"mask is 'full'"),
        ({"window": 0}, ValueError, r"window is 0"),
        ({"sinks": T((2,))}, ValueError, r"sinks has shape \(2\)"),
        ({"queries": T((1, 4, 3, 64), mx.complex64)}, mm.DtypeError, r"queries has dtype complex64"),
        ({"q_keys": (WORDS, *(a.astype(mx.complex64) for a in PACKED[1:]))}, mm.DtypeError,
         r"scales has dtype complex64"),
    ],
)  # fmt: skip
def test_bad_input(change, error, message):
    arguments = {"queries": T((1, 4, 3, 64)), "q_keys": PACKED, "q_values": PACKED, "scale": 1.0, **change}
    with pytest.raises(error, match=r"\[quantized_scaled_dot_product_attention\] .*" + message):
        mm.quantized_scaled_dot_product_attention(**arguments)
