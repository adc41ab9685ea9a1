"""MLX's dense, gathered and segmented products on matrix units: the launches of MLX's host, and right."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers import matrices
from helpers.peers import assert_near, recorded
from helpers.tolerances import PEER

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.peer import mlx_gathers, mlx_matrix_units, mlx_metal, mlx_unit_gathers, mlx_unit_products
from mlx_mittens.peer.mlx_formats import Format
from mlx_mittens.simulator import Fault

HALF, FULL = mx.float16, mx.float32
# Launches of MLX 0.32.4's host.
LINES = [line.split() for line in (Path(__file__).parent / "mlx_host_launches.txt").read_text().splitlines()]
HOST = {op: [line[1:] for line in LINES if line[0] == op] for op in {line[0] for line in LINES}}
GPUS = {"base": "m5", "max": "m5-max"}


@pytest.fixture
def draw(rng):
    return lambda *shape, dtype=HALF: matrices.draw(rng, shape, dtype, outliers=False)


@pytest.fixture
def with_tf32(monkeypatch):
    """Products of floats on matrix units, as MLX has them by default."""
    monkeypatch.setattr(mlx_matrix_units, "are_used", lambda dtype, stream=None: True)


def decided(call, gpu="m5"):
    """Each launch's kernel, threadgroups and threads; none runs."""
    return recorded(call, gpu, dry=True)[1]


def of_matrices(x, weights, indices):
    return np.stack([row.astype(np.float64) @ weights[i] for row, i in zip(specs.widen(x)[:, 0], np.array(indices))])[
        :, None
    ]


def sizes(text):
    return tuple(int(size) for size in text.split("x"))


def on_tier(tier, monkeypatch):
    if tier == "ultra":  # no such chip is in the table
        monkeypatch.setattr(mlx_matrix_units, "gpu", lambda stream=None: {"tier": "ultra"})
    return mm.simulator.enabled(gpu=GPUS.get(tier, "m5-max"))


@pytest.mark.parametrize("fields", HOST["product"], ids=lambda fields: "-".join(fields[:7]))
def test_the_plan_of_a_product_is_that_of_the_host(fields, monkeypatch):
    tier, m, n, k, layout, dtype, batch, kernel, threadgroups, threads, params = fields
    m, n, k, batch = map(int, (m, n, k, batch))
    with mx.stream(mx.cpu), on_tier(tier, monkeypatch):
        turned = tuple(letter == "t" for letter in layout)
        found = mlx_unit_products.plan(m, n, k, getattr(mx, dtype), batch=batch, turned=turned)
    assert (found.threadgroups, found.threads) == (sizes(threadgroups), sizes(threads))
    integers = [int(each) for each in params.split(",")]
    assert found.tiles == (integers[7], integers[6])
    rows, columns, along_k = found.simdgroups
    tile = f"bm{found.tile[0]}_bn{found.tile[1]}_bk{found.step}_wm{rows}_wn{columns}"
    if found.kernel == "split":
        assert kernel.startswith("steel_gemm_splitk_nax") and kernel.endswith(tile)
        assert (found.parts, found.part, found.swizzle) == (integers[8], integers[10], integers[11])
    elif found.kernel == "thin":
        assert kernel.startswith("steel_gemm_thin_nax") and kernel.endswith(f"um2_un2_sm1_sn{columns}_ks{along_k}")
    else:
        assert kernel.startswith("steel_gemm_fused_nax") and kernel.endswith(tile)
        assert (found.swizzle, k // found.step) == (integers[14], integers[15])


@pytest.mark.parametrize("fields", HOST["quantized"], ids=lambda fields: "-".join(fields[:5]))
def test_which_quantized_products_are_split(fields):
    """And by that not on matrix units: MLX tells so few tiles first."""
    _, m, n, k, group_size, kernel, *_ = fields
    shape = int(m), int(k), int(n)
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m5"):
        assert mlx_matrix_units.takes_product(HALF, shape, int(group_size)) == ("_nax_" in kernel)
    assert (mlx_matrix_units.parts_of_qmm(shape, int(group_size)) > 1) == ("splitk" in kernel)


def test_which_products_mlx_computes_by_vectors():
    takes = mlx_unit_products.takes
    with mx.stream(mx.cpu):
        with mm.simulator.enabled(gpu="m5"):
            assert not takes(1, 64, 64, HALF) and not takes(64, 1, 64, HALF) and not takes(15, 64, 64, HALF)
            assert takes(16, 64, 64, HALF) and takes(2, 64, 62, HALF) and takes(2, 64, 64, HALF, turned=(False, False))
            assert not takes(64, 64, 64, FULL)  # these tests refuse TF32
        with mm.simulator.enabled(gpu="m4-max"):
            assert not takes(64, 64, 64, HALF)


PRODUCTS = [
    # GPU, dtype, shapes, whether each is transposed, bias, the kernel's name
    ("m5", HALF, (20, 70, 130), "nt", False, "gemm_thin_nax_half_2_2_1_1_4_true"),
    ("m5", mx.bfloat16, (70, 40, 64), "nn", True, "gemm_thin_nax_bfloat16_t_2_2_1_1_4_false"),
    ("m5", HALF, (2, 9, 6), "nt", True, "gemm_thin_nax_half_2_2_1_1_4_true"),
    ("m5", HALF, (140, 150, 70), "nn", False, "steel_gemm_fused_nax_half_128_128_512_4_4_false_false"),
    ("m5", HALF, (256, 128, 40), "tt", False, "steel_gemm_fused_nax_half_128_128_512_4_4_true_true"),
    ("m5-max", HALF, (130, 129, 257), "tn", True, "steel_gemm_fused_nax_half_64_128_256_2_4_true_false"),
    ("m5-max", mx.bfloat16, (70, 129, 33), "nt", True, "steel_gemm_fused_nax_bfloat16_t_64_128_256_2_4_false_true"),
    ("m5", HALF, (90, 80, 300), "nt", False, "gemm_splitk_nax_half_64_64_256_2_2_false_true"),
    ("m5", HALF, (66, 65, 1100), "tn", True, "gemm_splitk_nax_half_64_64_256_2_2_true_false"),
]


@pytest.mark.parametrize("gpu, dtype, shape, layout, has_bias, kernel", PRODUCTS, ids=str)
def test_products(draw, gpu, dtype, shape, layout, has_bias, kernel):
    m, n, k = shape
    a, b = draw(m, k, dtype=dtype), draw(k, n, dtype=dtype)
    bias = draw(n, dtype=dtype) if has_bias else None
    given = [mx.contiguous(x.T).T if letter == "t" else x for x, letter in zip((a, b), layout)]

    def call():
        return mlx_unit_products.matmul(*given, bias)

    found, runs = recorded(call, gpu)
    assert runs[0][0] == kernel and len(runs) == 1 + ("split" in kernel)
    exact = specs.widen(a).astype(np.float64) @ specs.widen(b)
    assert_near(found, exact + (0 if bias is None else specs.widen(bias)))


def test_products_of_a_batch_and_of_more_axes(draw):
    a, b, w = draw(3, 33, 40), draw(3, 40, 64), draw(40, 64)
    found, ((kernel, groups, _),) = recorded(lambda: mlx_unit_products.matmul(a, b))
    assert kernel.startswith("steel_gemm_fused_nax") and groups == (1, 1, 3)
    assert_near(found, specs.widen(a).astype(np.float64) @ specs.widen(b))
    found, ((kernel, _, _),) = recorded(lambda: mlx_unit_products.matmul(a, w))
    assert kernel.startswith("gemm_thin_nax") and found.shape == (3, 33, 64)
    assert_near(found, specs.widen(a).astype(np.float64) @ specs.widen(w))


def test_products_of_floats(draw, with_tf32):
    a, b = draw(130, 64, dtype=FULL), draw(64, 70, dtype=FULL)
    found, ((kernel, *_),) = recorded(lambda: mlx_unit_products.matmul(a, b))
    assert kernel.startswith("steel_gemm_fused_nax_float_128")
    exact = specs.widen(a).astype(np.float64) @ specs.widen(b)
    assert np.abs(specs.widen(found) - exact).max() <= PEER[HALF] * np.abs(exact).max()  # TF32 has its ten bits


def test_a_last_tile_that_leaves_simdgroups_short(draw):
    """They wait at two copies of a barrier, which Metal's specification forbids and a GPU does not mind."""
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m5"):
        planned = mlx_unit_products.plan(140, 100, 16, HALF)
    assert planned.that_runs(128, 159) == (128, 159) and planned.that_runs(160, 31) == (256, 31)
    assert planned.that_runs(140, 100) == (140, 128)
    a, b = draw(140, 512), draw(512, 100)
    with pytest.raises(Fault, match=r"divergence: .*gemm_nax\.h:\d+, while .*gemm_nax\.h"):
        recorded(lambda: mlx_unit_products.matmul(a, b))


def test_only_a_thin_product_asks_for_the_layout(draw):
    a, b = draw(20, 64), mx.contiguous(draw(40, 64)).T
    found, _ = recorded(lambda: mlx_unit_products.matmul(a, b), tensor_layout="shuffled")
    assert_near(found, specs.widen(a).astype(np.float64) @ specs.widen(b))
    a, b = draw(128, 64), draw(64, 128)
    with pytest.raises(Fault, match=r"nax\.h:\d+: the left operand .*never asked"):
        recorded(lambda: mlx_unit_products.matmul(a, b), tensor_layout="shuffled")


@pytest.mark.parametrize("fields", HOST["gather_mm"], ids=lambda fields: "-".join(fields[:6]))
def test_launches_of_dense_products_of_sorted_rows(draw, fields, with_tf32):
    _, rows, n, k, count, layout, kernel, threadgroups, threads, _ = fields
    rows, n, k, count = map(int, (rows, n, k, count))
    x = draw(rows, 1, k)
    w = draw(count, n, k).swapaxes(1, 2) if layout == "nt" else draw(count, k, n)
    rhs = mx.array(np.repeat(np.arange(count), rows // count + 1)[:rows].astype(np.uint32))
    ((name, *geometry),) = decided(lambda: mlx_unit_gathers.gather_mm(x, w, rhs))
    tile = kernel[kernel.index("_bm") + 1 :]
    numbers = [part.strip("bmnkw") for part in tile.split("_")]
    assert name.startswith("gather_mm_rhs_nax_half_" + "_".join(numbers))
    assert geometry == [sizes(threadgroups), sizes(threads)]


@pytest.mark.parametrize("fields", HOST["gather_qmm"], ids=lambda fields: "-".join(fields[:6]))
def test_launches_of_quantized_products_of_sorted_rows(draw, fields):
    _, rows, n, k, count, layout, kernel, threadgroups, threads, _ = fields
    rows, n, k, count = map(int, (rows, n, k, count))
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m5"):
        assert mlx_gathers.are_sorted_by_matrices(rows, count) == ("_rhs_nax_" in kernel)
    if "_rhs_nax_" not in kernel:
        return
    weights = mx.quantize(draw(count, *((n, k) if layout == "nt" else (k, n))), group_size=64, bits=4)
    x, rhs = draw(rows, 1, k), mx.array((np.arange(rows) * count // rows).astype(np.uint32))
    call = lambda: mlx_unit_gathers.gather_qmm(x, weights, rhs, layout == "nt", Format())
    ((name, *geometry),) = decided(call)
    tile = kernel.split("_bm_")[1].split("_")[0]
    assert name == f"affine_gather_qmm_rhs_nax_half_64_4_{tile}_64_64_2_2_{str(layout == 'nt').lower()}"
    assert geometry == [sizes(threadgroups), sizes(threads)]


# Rows of each matrix, of tiles of 16, 32 and 64.
ROWS = [[5, 0, 16, 20], [32, 64, 3], [64, 31, 64]]


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("turned", [True, False])
def test_dense_products_of_sorted_rows(draw, rows, turned):
    x, w = draw(sum(rows), 1, 40), draw(len(rows), 150, 40).swapaxes(1, 2)
    w = w if turned else mx.contiguous(w)
    rhs = mx.array(np.repeat(np.arange(len(rows)), rows).astype(np.uint32))
    found, ((name, *_),) = recorded(lambda: mlx_unit_gathers.gather_mm(x, w, rhs))
    assert name.startswith(f"gather_mm_rhs_nax_half_{mlx_unit_gathers.tile_of_mm(sum(rows), len(rows))[0]}_128_128")
    assert_near(found, of_matrices(x, specs.widen(w), rhs))


@pytest.mark.parametrize("rows, transpose", [([5, 0, 32], True), ([33, 64, 3], False), ([64, 70, 64], True)])
def test_quantized_products_of_sorted_rows(draw, rows, transpose):
    weights = mx.quantize(draw(len(rows), *((70, 128) if transpose else (128, 64))), group_size=64, bits=4)
    x, rhs = draw(sum(rows), 1, 128), mx.array(np.repeat(np.arange(len(rows)), rows).astype(np.uint32))
    found, ((name, *_),) = recorded(lambda: mlx_unit_gathers.gather_qmm(x, weights, rhs, transpose, Format()))
    assert name.startswith(f"affine_gather_qmm_rhs_nax_half_64_4_{64 if sum(rows) >= 192 else 32}")
    wide = specs.widen(mx.dequantize(*weights, group_size=64, bits=4))
    assert_near(found, of_matrices(x, wide.swapaxes(1, 2) if transpose else wide, rhs), 2)


def test_rows_that_the_simulator_runs():
    """The last rows are a whole tile, or less than one SIMD-group's part of it where no others are before them."""
    of = mlx_unit_gathers.rows_that_run
    assert of(100, 3, 32, 2) == [34, 33, 64] and of(100, 3, 16) == [34, 33, 33]
    assert of(15, 1, 32, 2) == [15] and of(16, 1, 32, 2) == [32] and of(2, 3, 32, 2) == [1, 32, 0]
    assert np.array(mlx_unit_gathers.indices_of([2, 0, 3])).tolist() == [0, 0, 2, 2, 2]


def test_quantized_products_of_chosen_matrices(draw):
    weights = mx.quantize(draw(3, 64, 64), group_size=64, bits=4)
    x, lhs, rhs = draw(2, 65, 64), mx.array([1, 0, 1, 1], mx.uint32), mx.array([2, 0, 0, 1], mx.uint32)
    call = lambda: mlx_gathers.gather_qmm(x, *weights, lhs, rhs)
    found, ((name, *geometry),) = recorded(call)
    assert name.startswith("affine_gather_qmm_t_nax_half_64_4_true_64_64_64") and geometry == [(1, 2, 4), (32, 2, 2)]
    wide = specs.widen(mx.dequantize(*weights, group_size=64, bits=4)).astype(np.float64)
    exact = specs.widen(x)[np.array(lhs)] @ wide[np.array(rhs)].swapaxes(1, 2)
    assert_near(found, exact, 2)


@pytest.mark.parametrize("fields", HOST["segmented_mm"], ids=lambda fields: "-".join(fields[:5]))
def test_products_of_segments(draw, fields):
    _, m, n, k, count, kernel, threadgroups, threads, _ = fields
    m, n, k, count = map(int, (m, n, k, count))
    a, b = draw(m, k), draw(k, n)
    ends = np.linspace(0, k, count + 1).astype(np.uint32)
    segments = mx.array(np.stack([ends[:-1], ends[1:]], 1))
    try:
        found, ((name, *geometry),) = recorded(lambda: mlx_unit_gathers.segmented_mm(a, b, segments))
    except Fault as fault:  # its last tiles leave SIMD-groups short
        assert "divergence" in str(fault) and {m % 64, n % 64} & set(range(32, 64))
        return
    step = kernel.split("_bk")[1].split("_")[0]
    assert name.startswith(f"segmented_mm_nax_half_64_64_{step}_2_2") and geometry == [
        sizes(threadgroups),
        sizes(threads),
    ]
    wide = [specs.widen(x).astype(np.float64) for x in (a, b)]
    assert_near(found, np.stack([wide[0][:, i:j] @ wide[1][i:j] for i, j in zip(ends, ends[1:])]))


def test_what_these_do_not_take(draw):
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m5"):
        with pytest.raises(ValueError, match=r"shapes are \(4, 8\) and \(9, 8\): expected"):
            mlx_unit_products.matmul(draw(4, 8), draw(9, 8))
        with pytest.raises(ValueError, match="expected a product that MLX computes on matrix units"):
            mlx_unit_products.matmul(draw(4, 8), mx.contiguous(draw(9, 8)).T)
        with pytest.raises(ValueError, match=r"x has shape \(4, 2, 8\): expected \[..., 1, K\]"):
            mlx_unit_gathers.gather_mm(draw(4, 2, 8), draw(2, 8, 8), mx.zeros((4,), mx.uint32))


def test_the_op_has_this_peer_where_there_are_matrix_units(rng):
    op = specs.get("matmul")
    case = next(case for case in op.tests if case.shape == (2, 90, 40))
    arrays = op.draw(rng, case, HALF)
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m4-max"):
        assert mlx_metal.of(op, case) is None
    found, ((kernel, *_),) = recorded(lambda: specs.run(op, mlx_metal.of(op, case), case, arrays)[0])
    assert kernel == "gemm_thin_nax_half_2_2_1_1_4_false"
    assert specs.error(found, op.exact(case, arrays)[0]) < PEER[HALF]
