"""MLX's products with chosen matrices, small floats and few rows: the kernels that MLX launches, right, predicted."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import matrices
from helpers.peers import assert_near, recorded

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.apple import agx_compiler
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.peer import mlx_gathers, mlx_matrix_units, mlx_metal, mlx_quantized, mlx_unit_gathers
from mlx_mittens.prediction import launches, mlx_launches, mlx_quantized_launches, mlx_tiles, mlx_unit_launches
from mlx_mittens.prediction.mlx_graph import Array, Operation
from mlx_mittens.simulator import Fault

HALF, BFLOAT, FULL = mx.float16, mx.bfloat16, mx.float32
FORMATS = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


@pytest.fixture
def draw(rng):
    return lambda *shape, dtype=HALF: matrices.draw(rng, shape, dtype, outliers=False)


def quantized(draw, mode, *shape):
    """Weights, how to call a product of them, and their values."""
    group_size, bits = FORMATS.get(mode, (64, 4))
    options = {"group_size": group_size, "bits": bits, "mode": mode}
    weights = mx.quantize(draw(*shape), **options)
    return [*weights, None][:3], options, specs.widen(mx.dequantize(*weights, **options)).astype(np.float64)


SMALL_FLOATS = [
    # GPU, mode, type, rows of x, weights, the kernel, its threadgroups
    ("m5", "mxfp4", HALF, 65, (4190, 64), "qmm_t_nax_half_32_4_false_false_64_64_64_2_2", (66, 2, 1)),
    ("m5", "mxfp8", HALF, 32, (40, 96), "qmv_wide_half_32_8_5_16_false", (7, 10, 1)),
    ("m4-max", "mxfp4", HALF, 16, (40, 96), "qmm_t_splitk_half_32_4_false", (2, 1, 3)),
    ("m5-max", "nvfp4", HALF, 1, (4096, 512), "qmv_fast_half_16_4_false_false_false_2", (1, 1024, 1)),
    ("m5", "nvfp4", HALF, 1, (4096, 512), "qmv_fast_half_16_4_false_false", (1, 512, 1)),
]


@pytest.mark.parametrize("gpu, mode, dtype, rows, shape, kernel, groups", SMALL_FLOATS, ids=str)
def test_which_products_with_small_floats_mlx_launches(draw, gpu, mode, dtype, rows, shape, kernel, groups):
    weights, options, _ = quantized(draw, mode, *shape)
    x = draw(rows, shape[1], dtype=dtype)
    _, runs = recorded(lambda: mlx_quantized.quantized_matmul(x, *weights, **options), gpu, dry=True)
    assert runs[0][:2] == (f"fp_{kernel}", groups)


@pytest.mark.parametrize("mode, dtype, is_asked", [("mxfp4", HALF, True), ("nvfp4", BFLOAT, False)])
def test_products_with_small_floats_on_matrix_units(draw, mode, dtype, is_asked):
    weights, options, wide = quantized(draw, mode, 70, 64)
    x = draw(65, 64, dtype=dtype)
    form = mlx_quantized.Format(**options)

    def call():
        return mlx_quantized.by_matrices(x, weights, (65, 64, 70), form, 1, True, mx.cpu)

    found, ((name, *_),) = recorded(call)
    assert name.startswith("fp_qmm_t_nax")
    assert_near(found, specs.widen(x) @ wide.T, 2)
    if is_asked:
        with pytest.raises(Fault, match="never asked"):
            recorded(call, tensor_layout="shuffled")


def test_split_products_with_small_floats(draw):
    weights, options, wide = quantized(draw, "mxfp4", 40, 96)
    x = draw(16, 96)
    found, runs = recorded(lambda: mlx_quantized.quantized_matmul(x, *weights, **options), "m4-max")
    assert [name.split("_half")[0] for name, *_ in runs] == ["fp_qmm_t_splitk", "gemm_splitk_accum_float"]
    assert_near(found, specs.widen(x) @ wide.T, 2)


STACKS = [
    # GPU, mode, rows of x, outputs, columns, the kernel
    ("m5", "affine", 65, 70, 64, "affine_qmm_t_nax_half_64_4_false_true_64_64_64_2_2"),
    ("m5", "mxfp4", 65, 64, 64, "fp_qmm_t_nax_half_32_4_true_true_64_64_64_2_2"),
    ("m4-max", "affine", 33, 40, 128, "affine_qmm_t_half_64_4_false_true"),
    ("m5", "affine", 3, 70, 192, "affine_qmv_wide_half_64_4_3_8_true"),
    ("m5", "affine", 1, 70, 192, "affine_qmv_half_64_4_true"),
    ("m5", "affine", 1, 64, 512, "affine_qmv_fast_half_64_4_true_false"),
    ("m5", "affine", 2, 64, 128, "affine_qmv_quad_half_64_4_128_true"),
]


@pytest.mark.parametrize("gpu, mode, rows, outputs, columns, kernel", STACKS, ids=str)
def test_quantized_products_of_a_stack(draw, gpu, mode, rows, outputs, columns, kernel):
    weights, options, wide = quantized(draw, mode, 3, outputs, columns)
    x = draw(3, rows, columns)
    found, ((name, (*_, matrices), _),) = recorded(lambda: mlx_quantized.quantized_matmul(x, *weights, **options), gpu)
    assert (name, matrices) == (kernel, 3)
    assert_near(found, specs.widen(x) @ wide.swapaxes(1, 2), 2)


COLUMNS = [
    # GPU, mode, rows of x, columns, outputs, the kernel
    ("m5", "affine", (65, 64), 128, "affine_qmm_n_nax_half_64_4_false_64_64_64_2_2"),
    ("m5", "affine", (3, 4, 128), 64, "affine_qmm_n_nax_half_64_4_true_64_64_64_2_2"),
    ("m5", "affine", (33, 96), 64, "affine_qmm_n_half_64_4_false"),
    ("m5", "mxfp4", (33, 64), 96, "fp_qmm_n_half_32_4_false"),
    ("m4-max", "affine", (2, 5, 64), 128, "affine_qmm_n_half_64_4_true"),
]


@pytest.mark.parametrize("gpu, mode, shape, outputs, kernel", COLUMNS, ids=str)
def test_quantized_products_of_weights_that_are_not_transposed(draw, gpu, mode, shape, outputs, kernel):
    weights, options, wide = quantized(draw, mode, *shape[:-2], shape[-1], outputs)
    x = draw(*shape)
    found, ((name, *_),) = recorded(
        lambda: mlx_quantized.quantized_matmul(x, *weights, transpose=False, **options), gpu
    )
    assert name == kernel
    assert_near(found, specs.widen(x) @ wide, 2)


@pytest.mark.parametrize("rows, gpu, times", [(20, "m5", None), (4096, "m5", 64 * 16), (4096, "m2-max", 128 * 16)])
def test_weights_that_are_not_transposed_are_predicted(rows, gpu, times):
    x, w, of_groups = of("float16", rows, 64), of("uint32", 64, 128), of("float16", 64, 16)
    operation = Operation(
        "QuantizedMatmul", (64, 4, "affine", False), (x, w, of_groups, of_groups), (of("float16", rows, 1024),)
    )
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu=gpu):
        call = mlx_quantized_launches.product(operation)
        assert call is not None and (call.tiles and call.tiles.times) == times
        mx.eval(call.make())


def test_a_stack_has_the_axes_of_its_rows(draw):
    weights, options, _ = quantized(draw, "affine", 3, 8, 64)
    with pytest.raises(ValueError, match=r"x has shape \(2, 1, 64\), w \(3, 8, 8\): expected the same axes"):
        mlx_quantized.quantized_matmul(draw(2, 1, 64), *weights, **options)


@pytest.mark.parametrize("outputs, is_large", [(64, False), (4096, True)])
def test_a_stack_is_predicted(outputs, is_large):
    x, w = Array((16, 512, 128), "float16", 2), Array((16, outputs, 16), "uint32", 4)
    of_groups = Array((16, outputs, 2), "float16", 2)
    y = Array((16, 512, outputs), "float16", 2)
    operation = Operation("QuantizedMatmul", (64, 4, "affine", True), (x, w, of_groups, of_groups), (y,))
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m5"):
        call = mlx_quantized_launches.product(operation)
    assert call is not None and (call.tiles is not None) == is_large
    if is_large:
        assert call.tiles.times == 16 * 8 * 64
        assert call.tiles.nbytes == (x.nbytes + w.nbytes + 2 * of_groups.nbytes + y.nbytes,)


def by_row(x, weights, indices):
    return np.stack([row.astype(np.float64) @ weights[i] for row, i in zip(specs.widen(x), np.array(indices).ravel())])


@pytest.mark.parametrize(
    "gpu, mode, kernel",
    [
        ("m5", "mxfp4", "fp_gather_qmm_rhs_nax_half_32_4_32_64_64_2_2_true"),
        ("m4-max", "affine", "affine_gather_qmm_rhs_half_64_4_16_32_32_1_2_true"),
    ],
)
def test_quantized_products_of_sorted_rows(draw, gpu, mode, kernel):
    weights, options, wide = quantized(draw, mode, 3, 70, 64)
    rhs = mx.array(np.repeat(np.arange(3), (5, 0, 32)).astype(np.uint32))
    x, lhs = draw(37, 1, 64), mx.arange(37, dtype=mx.uint32)
    found, ((name, *_),) = recorded(
        lambda: mlx_gathers.gather_qmm(x, *weights, lhs, rhs, **options, sorted_indices=True), gpu
    )
    assert name == kernel
    assert_near(found, by_row(x, wide.swapaxes(1, 2), rhs), 2)


def test_quantized_products_of_chosen_matrices(draw):
    weights, options, wide = quantized(draw, "nvfp4", 3, 70, 64)
    x, lhs, rhs = draw(2, 33, 64), mx.array([1, 0], mx.uint32), mx.array([2, 0], mx.uint32)
    ((name, *geometry),) = recorded(lambda: mlx_gathers.gather_qmm(x, *weights, lhs, rhs, **options), dry=True)[1]
    assert name.startswith("fp_gather_qmm_t_nax_half_16_4_false_64_64_64") and geometry[0] == (2, 1, 2)
    x = draw(2, 5, 64)
    found, ((name, *geometry),) = recorded(lambda: mlx_gathers.gather_qmm(x, *weights, lhs, rhs, **options))
    assert name == "fp_gather_qmv_half_16_4" and geometry[0] == (5, 9, 2)
    assert_near(found, specs.widen(x)[[1, 0]] @ wide[[2, 0]].swapaxes(1, 2))


DENSE = [
    # GPU, rows, are indices sorted, is w a transposed view, the kernel
    ("m5", 1, False, True, "gemv_gather_half_4_1_1_32_4_4"),
    ("m5", 1, False, False, "gemv_t_gather_half_1_2_8_4_4_4"),
    ("m4-max", 1, True, True, "gather_mm_rhs_half_16_64_16_1_2_false_true"),
    ("m5", 3, False, True, "gemv_wide_gather_half_3_32"),
]


@pytest.mark.parametrize("gpu, rows, is_sorted, turned, kernel", DENSE, ids=str)
def test_dense_products_of_chosen_matrices(draw, gpu, rows, is_sorted, turned, kernel):
    x, w = draw(6, rows, 40), draw(3, 64, 40).swapaxes(1, 2)
    w = w if turned else mx.contiguous(w)
    lhs, rhs = mx.arange(6, dtype=mx.uint32), mx.array([0, 0, 1, 2, 2, 2] if is_sorted else [2, 0, 1, 1, 0, 2])
    found, ((name, *_),) = recorded(lambda: mlx_gathers.gather_mm(x, w, lhs, rhs.astype(mx.uint32), is_sorted), gpu)
    assert name == kernel
    assert_near(found, by_row(x, specs.widen(w), rhs))


def test_what_the_peer_of_gathers_does_not_take(draw):
    one = mx.zeros((1,), mx.uint32)
    with pytest.raises(ValueError, match=r"x has shape \(1, 40, 8\): expected \[..., M, K\] of few rows"):
        recorded(lambda: mlx_gathers.gather_mm(draw(1, 40, 8), draw(1, 8, 8), one, one))
    with pytest.raises(ValueError, match="expected one shape"):
        mlx_gathers.gather_qmm(draw(1, 1, 64), *[draw(1, 8, 8)] * 3, one, mx.zeros((2,), mx.uint32))
    with pytest.raises(ValueError, match="mode is 'other'"):
        mlx_quantized.quantized_matmul(draw(1, 64), draw(1, 8), draw(1, 8), mode="other")


FEW = [
    # GPU, rows, outputs, bias, the kernel, threadgroups
    ("m5", 2, 70, False, "gemv_wide_half_2_32", (1, 18, 1)),
    ("m5", 6, 70, True, "gemv_wide_half_3_16", (2, 18, 1)),
    ("m4-max", 15, 60, False, "gemv_wide_half_5_32", (3, 15, 1)),
]


@pytest.mark.parametrize("gpu, rows, outputs, has_bias, kernel, groups", FEW, ids=str)
def test_dense_products_of_few_rows(draw, gpu, rows, outputs, has_bias, kernel, groups):
    x, w, bias = draw(rows, 44), draw(outputs, 44), draw(outputs) if has_bias else None
    found, ((name, *geometry),) = recorded(lambda: mlx_gathers.gemv_wide(x, w, bias), gpu)
    assert name == kernel and geometry == [groups, (32, 4 if kernel.endswith("32") else 2, 1)]
    exact = specs.widen(x).astype(np.float64) @ specs.widen(w).T
    assert_near(found, exact + (0 if bias is None else specs.widen(bias)))


def test_which_products_of_few_rows_read_a_matrix_once():
    wide = mlx_gathers.is_wide
    with mx.stream(mx.cpu):
        with mm.simulator.enabled(gpu="m5"):
            assert wide(2, 64, 64, HALF) and wide(15, 64, 64, BFLOAT) and not wide(16, 64, 64, HALF)
            assert not wide(1, 64, 64, HALF) and not wide(2, 64, 62, HALF) and not wide(2, 64, 64, FULL)
        for gpu in ("m2-max", "h200"):
            with mm.simulator.enabled(gpu=gpu):
                assert not wide(2, 64, 64, HALF)
    assert mlx_gathers.wide_tile(15, 65536) == (5, 16, 1)


@pytest.mark.parametrize("turned", [(True, False), (False, True)])
def test_segments_of_transposed_views(draw, turned):
    a, b = (draw(*(shape[::-1] if lies else shape)) for shape, lies in zip(((20, 96), (96, 64)), turned))
    a, b = (x.T if lies else x for x, lies in zip((a, b), turned))
    segments = mx.array([[0, 30], [30, 96]], mx.uint32)
    found, ((name, *_),) = recorded(lambda: mlx_unit_gathers.segmented_mm(a, b, segments))
    assert name == "segmented_mm_nax_half_64_64_64_2_2_{}_{}".format(*(str(lies).lower() for lies in turned))
    wide = [specs.widen(x).astype(np.float64) for x in (a, b)]
    assert_near(found, np.stack([wide[0][:, i:j] @ wide[1][i:j] for i, j in ((0, 30), (30, 96))]))


def of(dtype, *shape):
    return Array(shape, dtype, {"uint8": 1, "float16": 2, "uint32": 4}[dtype], None, True)


def planned(operation, graph=(), chip="m5"):
    with launches._planned_for(find_chip(chip)):
        return mlx_launches.plan(operation, [*graph, operation])


def predicted(operation, graph=(), chip="m5"):
    found = find_chip(chip)
    with launches._planned_for(found):
        return launches._simulated(mlx_launches.plan(operation, [*graph, operation]).call, found)


def weights_of(mode, *shape):
    group_size, bits = FORMATS.get(mode, (64, 4))
    *outer, columns = shape
    groups = (*outer, columns // group_size)
    words = of("uint32", *outer, columns * bits // 32)
    return [words, *([of("float16", *groups)] * 2 if mode == "affine" else [of("uint8", *groups)])]


def gathered(mode, rows, shape, is_sorted=True):
    group_size, bits = FORMATS.get(mode, (64, 4))
    indices = [of("uint32", rows)] * 2
    x, weights = of("float16", rows, 1, shape[2]), weights_of(mode, *shape)
    details = group_size, bits, mode, True, is_sorted
    return Operation("GatherQMM", details, (x, *weights, *indices), (of("float16", rows, 1, shape[1]),))


def quantized_product(mode, rows, shape):
    group_size, bits = FORMATS.get(mode, (64, 4))
    x, weights = of("float16", rows, shape[1]), weights_of(mode, *shape)
    return Operation("QuantizedMatmul", (group_size, bits, mode, True), (x, *weights), (of("float16", rows, shape[0]),))


SORTED_DENSE = Operation(
    "GatherMM",
    (True,),
    (of("float16", 128, 1, 64), of("float16", 2, 64, 256), of("uint32", 128), of("uint32", 128)),
    (of("float16", 128, 1, 256),),
)
SEGMENTS = Operation(
    "SegmentedMM",
    (),
    (of("float16", 128, 96), of("float16", 96, 64), of("uint32", 2, 2)),
    (of("float16", 2, 128, 64),),
)
LARGE = {
    "sorted quantized": gathered("mxfp4", 128, (2, 128, 64)),
    "quantized": quantized_product("affine", 128, (4160, 64)),
    "sorted dense": SORTED_DENSE,
    "segments": SEGMENTS,
}


@pytest.mark.parametrize("dense", [True, False])
def test_few_sorted_rows_of_each_matrix_run(dense):
    """A tile near the end has fewer rows left than its SIMD-groups have places."""
    if dense:
        indices = [of("uint32", 200)] * 2
        inputs = of("float16", 200, 1, 64), of("float16", 4, 64, 128), *indices
        operation = Operation("GatherMM", (True,), inputs, (of("float16", 200, 1, 128),))
    else:
        operation = gathered("affine", 20, (4, 64, 64))
    recorded(planned(operation).call.make)


@pytest.mark.skipif(bool(agx_compiler.problem()), reason=agx_compiler.problem())
@pytest.mark.parametrize("name", LARGE)
def test_a_large_product_has_the_work_of_its_tiles(monkeypatch, name):
    (whole,) = predicted(LARGE[name])
    for module in (mlx_quantized_launches, mlx_unit_launches):
        monkeypatch.setattr(module, "MOST_SIMULATED", 0)
    (found,) = predicted(LARGE[name])
    assert found.source == mlx_tiles.SOURCE and found.name == whole.launch.kernel
    assert mlx_tiles.SOURCE in str(found)
    # MLX's grid of two sorted matrices has a threadgroup without rows for each column of tiles.
    assert found.work.threadgroups == whole.work.threadgroups - 2 * name.startswith("sorted")
    assert found.work.rounds * found.work.threadgroups == whole.work.rounds * whole.work.threadgroups
    a, b = found.work.instructions, whole.work.instructions
    assert a.matrix == b.matrix and a.loads == pytest.approx(b.loads, rel=0.05) and a.stores == b.stores
    assert found.work.lines == pytest.approx(whole.work.lines, rel=0.05)


def test_launches_of_small_floats_and_few_rows_are_planned():
    for mode in FORMATS:
        assert isinstance(planned(quantized_product(mode, 1, (64, 256))), mlx_launches.Peer)
        assert isinstance(planned(gathered(mode, 4, (8, 64, 256), False)), mlx_launches.Peer)
    turned = Operation("Transpose", (1, 0), (of("float16", 512, 256),), (of("float16", 256, 512),))
    made = Array((256, 512), "float16", 2, 0)
    few = Operation("Matmul", (), (of("float16", 5, 256), made), (of("float16", 5, 512),))
    _, ((name, *_),) = recorded(planned(few, [turned]).call.make, dry=True)
    assert name == "gemv_wide_half_5_32"
    assert isinstance(planned(few, [turned], chip="m2-max"), tuple)
    assert isinstance(planned(SEGMENTS, chip="m4-max"), tuple)


def test_the_table_has_peers_of_gathers():
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m5"):
        assert mlx_matrix_units.are_used(HALF)
        for name in ("gather_qmm", "gather_mm"):
            op = specs.get(name)
            assert all(mlx_metal.of(op, case) for case in op.tests if not case.vjp)
