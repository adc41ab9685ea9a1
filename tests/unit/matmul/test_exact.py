"""exact=True: a row of several is bit for bit the row alone."""

from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, draw_blocks, quantize
from helpers.tolerances import SUMS

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.specs.gguf import KINDS


def assert_rows_alone(of, x):
    together = np.array(of(x).astype(mx.float32))
    alone = [np.array(of(x[i : i + 1]).astype(mx.float32)) for i in range(x.shape[0])]
    np.testing.assert_array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("rows", [2, 5, 16])
@pytest.mark.parametrize("bits, transpose", [(4, True), (4, False), (8, True), (3, True)])
def test_quantized_matmul(rng, dtype, executor, rows, bits, transpose):
    triple, bias = quantize(rng, (64, 576), dtype, 32, bits), draw(rng, (64 if transpose else 576,), dtype)
    x = draw(rng, (rows, 576 if transpose else 64), dtype)
    exact = lambda x: mm.quantized_matmul(x, *triple, transpose, 32, bits, bias=bias, exact=True)
    assert_rows_alone(exact, x)
    alone = mm.quantized_matmul(x[:1], *triple, transpose, 32, bits, bias=bias)
    assert mx.array_equal(exact(x[:1]), alone).item()
    assert mx.array_equal(exact(x.reshape(rows, 1, -1))[:, 0], exact(x)).item()


def test_one_launch(rng):
    x, triple = draw(rng, (4, 512), mx.float16), quantize(rng, (12, 512), mx.float16, 64, 4)
    blocks = mm.block_quantize(draw(rng, (12, 512), mx.float32), "q4_0")
    mx.eval(blocks)
    with mm.simulator.enabled(), mm.simulator.profiled() as launches:
        mx.eval(mm.quantized_matmul(x, *triple, exact=True), mm.quantized_swiglu(x, triple, triple, exact=True))
        mx.eval(mm.block_matmul(x, blocks, "q4_0", exact=True))
    assert sorted(launch.kernel for launch in launches) == [
        "block_matmul_q4_0_4_float16",
        "quantized_matmul_qmv_4bit_4_float16",
        "quantized_swiglu_qmv_4bit_4_float16",
    ]


@pytest.mark.parametrize("rows", [2, 7])
def test_others(rng, dtype, executor, rows):
    gate, up = (quantize(rng, (9, 320), dtype, 64, 4) for _ in range(2))
    x = draw(rng, (rows, 320), dtype) / 20
    assert_rows_alone(lambda x: mm.quantized_swiglu(x, gate, up, exact=True), x)
    with mx.stream(mx.cpu):
        blocks = mm.block_quantize(draw(rng, (9, 320), mx.float32), "q4_0")
    assert_rows_alone(lambda x: mm.block_matmul(x, blocks, "q4_0", exact=True), x)


@pytest.mark.parametrize("shape", [(40, 576), (12, 2048), (7, 130)], ids=str)
def test_the_patch_on_a_cpu(rng, dtype, native, shape):
    """Its products of up to 32 rows read the weights once all the same."""
    triples = [quantize(rng, (shape[0], 576), dtype, 64, bits) for bits in (2, 3, 4, 8)] if shape[1] == 576 else []
    dense, bias = draw(rng, shape, dtype), draw(rng, shape[:1], dtype)
    with mm.patched(exact=True):
        for rows in (2, 3, 9, 31, 32):
            x = draw(rng, (rows, shape[1]), dtype)
            assert_rows_alone(lambda x: mm.gemv(dense, x, bias), x)
            for triple, bits in zip(triples, (2, 3, 4, 8)):
                assert_rows_alone(lambda x, t=triple, b=bits: mm.quantized_matmul(x, *t, group_size=64, bits=b), x)
        if triples:
            gate, up = triples[2], quantize(rng, (shape[0], 576), dtype, 64, 4)
            assert_rows_alone(lambda x: mm.quantized_swiglu(x, gate, up), x / 20)


MODES = [("affine", 2, 64), ("affine", 3, 64), ("affine", 4, 32), ("affine", 5, 64), ("affine", 6, 64),
         ("affine", 8, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]  # fmt: skip


@pytest.mark.parametrize("gpu", ["m2-max", "h200"])
@pytest.mark.parametrize("mode, bits, group_size", MODES, ids=str)
def test_the_patch_on_gpus(rng, dtype, gpu, mode, bits, group_size):
    """In every format; of few and of many columns and outputs, which simdgroups share in different ways."""
    for shape in ((40, 576), (3, 1024)):
        with mx.stream(mx.cpu):
            pack = lambda: mx.quantize(draw(rng, shape, dtype), group_size, bits, mode=mode)
            w, up, bias = pack(), pack(), draw(rng, shape[:1], dtype)
            mx.eval(w, up, bias)
        options = {"group_size": group_size, "bits": bits, "mode": mode}
        with mm.patched(exact=True), mm.simulator.enabled(gpu=gpu):
            for rows in (2, 3, 8, 11):
                x = draw(rng, (rows, shape[1]), dtype) / 20
                assert_rows_alone(lambda x: mm.quantized_matmul(x, *w, bias=bias, **options), x)
                if rows != 11:
                    assert_rows_alone(lambda x: mm.quantized_swiglu(x, w, up, **options), x)


@pytest.mark.parametrize("bits", [4, 8, 3])
def test_every_number_of_rows_on_a_cpu(rng, dtype, native, bits):
    """Of a product, and of one expert: parts that rows are cut into have all sizes, 9 of float32 one of 4."""
    triple = quantize(rng, (128, 64), dtype, 64, bits)
    stack = [a[None] for a in triple]
    options = {"group_size": 64, "bits": bits}
    with mm.patched(exact=True):
        for rows in range(1, 33):
            x = draw(rng, (rows, 64), dtype)
            expert = mx.zeros((rows, 1), mx.uint32)
            for _ in range(4):  # which a write outside of its memory does not outlive
                assert_rows_alone(lambda x: mm.quantized_matmul(x, *triple, **options), x)
                of_expert = mm.gather_qmm(x[:, None, None], *stack, rhs_indices=expert, **options)
                mx.eval(of_expert)
            assert mx.array_equal(of_expert[:, 0, 0], mm.quantized_matmul(x, *triple, **options)), rows


@pytest.mark.parametrize("gpu", ["m2-max", "h200"])
@pytest.mark.parametrize("shape", [(40, 576), (12, 2048), (7, 130)], ids=str)
def test_dense_weights_on_gpus(rng, dtype, gpu, shape):
    w, bias = draw(rng, shape, dtype), draw(rng, shape[:1], dtype)
    by_columns = mx.contiguous(w.T)
    mx.eval(by_columns)
    with mm.patched(exact=True), mm.simulator.enabled(gpu=gpu):
        for rows in (2, 3, 5, 8, 16):
            x = draw(rng, (rows, shape[1]), dtype)
            assert_rows_alone(lambda x: mm.gemv(w, x, bias), x)
            assert_rows_alone(lambda x: mm.matmul(x, by_columns, transpose=False), x)


@pytest.mark.parametrize("gpu", ["m2-max", "m5", "h200"])
def test_exact_rows_stay_where_mx_is_faster(rng, gpu, lenient):
    """The sums of mx's kernels depend on the number of rows."""
    triple, dense = quantize(rng, (40, 576), mx.float16, 64, 4), draw(rng, (40, 576), mx.float16)
    x = draw(rng, (14, 576), mx.float16) / 20
    products = {
        "quantized_matmul": lambda x: mm.quantized_matmul(x, *triple),
        "quantized_swiglu": lambda x: mm.quantized_swiglu(x, triple, triple),
        "gemv": lambda x: mm.gemv(dense, x),
    }
    with mm.simulator.enabled(gpu=gpu):
        _ext.calibration_force((True, "", 0))  # mx is the faster
        try:
            with mm.patched(exact=True):
                for product in products.values():
                    assert_rows_alone(product, x)
            assert_rows_alone(lambda x: mm.quantized_matmul(x, *triple, exact=True), x)
            mm.stats(reset=True)
            mx.eval([product(x) for product in products.values()])
            assert not any(mm.stats()[op]["kernels"] for op in products), "rows that need not be exact go to mx"
        finally:
            _ext.calibration_force(None)


def assert_tokens_alone(rng, dtype, columns):
    """Of 16 tokens with 5 of 6 experts each."""
    gate, up = (quantize(rng, (6, 40, columns), dtype, 64, 4) for _ in range(2))
    dense = draw(rng, (6, 40, columns), dtype)
    experts = mx.array(rng.integers(0, 6, (16, 5)), mx.uint32)
    x = draw(rng, (16, 1, 1, columns), dtype) / 10

    def of_tokens(product):
        together = product(x, experts)
        alone = [product(x[i : i + 1], experts[i : i + 1]) for i in range(16)]
        np.testing.assert_array_equal(*(np.array(y.astype(mx.float32)) for y in (together, mx.concatenate(alone))))

    of_tokens(lambda x, e: mm.gather_qmm(x, *gate, rhs_indices=e))
    of_tokens(lambda x, e: mm.gather_swiglu(x, gate, up, rhs_indices=e))
    of_tokens(lambda x, e: mm.gather_mm(x, dense.swapaxes(-1, -2), rhs_indices=e))


@pytest.mark.parametrize("gpu", ["m2-max", "h200"])
def test_experts_on_gpus(rng, dtype, gpu):
    """Also of many pairs of an expert, which share a product otherwise."""
    with mm.patched(exact=True), mm.simulator.enabled(gpu=gpu):
        assert_tokens_alone(rng, dtype, 256)


def test_experts_on_a_cpu(rng, dtype, native):
    with mm.patched(exact=True):
        assert_tokens_alone(rng, dtype, 576)


def blocks_of(rng, kind, outputs, columns):
    return mx.array(draw_blocks(rng, outputs, columns // KINDS[kind].weights, kind))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_gguf_under_the_patch_on_a_cpu(rng, dtype, native, kind):
    """Of one, two and all rows that integers and panels take otherwise; beyond 32 with the argument."""
    blocks, bias = blocks_of(rng, kind, 70, 768), draw(rng, (70,), dtype)
    with mm.patched(exact=True):
        for rows in (2, 3, 9, 31, 32):
            assert_rows_alone(lambda x: mm.block_matmul(x, blocks, kind, bias), draw(rng, (rows, 768), dtype))
    assert_rows_alone(lambda x: mm.block_matmul(x, blocks, kind, exact=True), draw(rng, (67, 768), dtype))


@pytest.mark.parametrize("gpu", ["m2-max", "m5", "h200"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_gguf_on_gpus(rng, dtype, gpu, kind):
    """Of few and of many columns and outputs, which simdgroups share in different ways."""
    for outputs, columns in ((21, 256), (3, 1024)):
        blocks, bias = blocks_of(rng, kind, outputs, columns), draw(rng, (outputs,), dtype)
        with mm.simulator.enabled(gpu=gpu):
            with mm.patched(exact=True):
                for rows in (2, 5, 16):
                    assert_rows_alone(
                        lambda x: mm.block_matmul(x, blocks, kind, bias), draw(rng, (rows, columns), dtype)
                    )
            assert_rows_alone(lambda x: mm.block_matmul(x, blocks, kind, exact=True), draw(rng, (18, columns), dtype))


@pytest.mark.parametrize("gpu", [None, "m2-max", "h200"])
def test_a_row_that_is_not_finite_spoils_itself_alone(rng, gpu):
    """NaN and infinity in some rows of x: the others keep the bits that they have alone."""
    triple, dense = quantize(rng, (40, 576), mx.float16, 64, 4), draw(rng, (40, 576), mx.float16)
    blocks = blocks_of(rng, "q4_0", 40, 576)
    values = np.array(draw(rng, (7, 576), mx.float16)) / 20
    values[1, 3], values[4, 575] = np.nan, np.inf
    x = mx.array(values)
    products = {
        "dense": lambda x: mm.gemv(dense, x),
        "4 bits": lambda x: mm.quantized_matmul(x, *triple),
        "gate and up": lambda x: mm.quantized_swiglu(x, triple, triple),
        "blocks": lambda x: mm.block_matmul(x, blocks, "q4_0"),
    }
    with mm.patched(exact=True), mm.simulator.enabled(gpu=gpu) if gpu else nullcontext():
        for name, product in products.items():
            assert_rows_alone(product, x)
            y = np.array(product(x).astype(mx.float32))
            assert np.isnan(y[1]).all() and np.isfinite(np.delete(y, [1, 4], axis=0)).all(), name
            assert not np.isfinite(y[4]).any(), name


def test_gradients(rng, native):
    triple = quantize(rng, (8, 64), mx.float32, 64, 4)
    x, cotangent = draw(rng, (3, 64), mx.float32), draw(rng, (3, 8), mx.float32)
    found, expected = (
        mx.vjp(lambda x: mm.quantized_matmul(x, *triple, exact=exact), [x], [cotangent])[1][0]
        for exact in (True, False)
    )
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=SUMS, atol=SUMS)


def test_one_matrix(rng, native):
    stack = quantize(rng, (2, 8, 64), mx.float32, 64, 4)
    with pytest.raises(ValueError, match=r"w has shape \(2,8,8\): exact=True expects one matrix"):
        mm.quantized_matmul(mx.zeros((2, 3, 64)), *stack, exact=True)
    with pytest.raises(ValueError, match="x has 32 columns"):
        mm.quantized_matmul(mx.zeros((3, 32)), *quantize(rng, (8, 64), mx.float32, 64, 4), exact=True)
