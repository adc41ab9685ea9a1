"""MLX's kernels for matrix units: launched where MLX launches them, right, and predicted without machine code."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import matrices
from helpers.peers import assert_near, recorded

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.apple import agx_compiler
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.cli import simulate
from mlx_mittens.cli.main import main
from mlx_mittens.ops.custom import Output, int32
from mlx_mittens.peer import mlx_matrix_units, mlx_metal, mlx_quantized
from mlx_mittens.peer.mlx_formats import Format
from mlx_mittens.simulator import Fault

HALF, FULL = mx.float16, mx.float32


@pytest.fixture
def draw(rng):
    return lambda *shape, dtype=HALF: matrices.draw(rng, shape, dtype, outliers=False)


QUANTIZED = [
    # GPU, dtype, rows of x, weights, the kernel's name, its threadgroups
    ("m5", HALF, 64, (70, 64), "affine_qmm_t_nax_half_64_4_false_false_64_64_64_2_2", (2, 1, 1)),
    ("m5-max", mx.bfloat16, 65, (128, 64), "affine_qmm_t_nax_bfloat16_t_64_4_true_false_64_64_64_2_2", (2, 2, 1)),
    ("m5", HALF, 13, (4160, 64), "affine_qmm_t_nax_half_64_4_true_false_32_64_64_2_2", (65, 1, 1)),
    ("m5", HALF, 32, (16, 64), "affine_qmv_quad_half", (32, 1, 1)),
    ("m5", FULL, 33, (16, 64), "affine_qmm_t_float", (1, 2, 1)),  # these tests refuse TF32
    ("m4-max", HALF, 33, (16, 64), "affine_qmm_t_half", (1, 2, 1)),
]


@pytest.mark.parametrize("gpu, dtype, rows, shape, kernel, groups", QUANTIZED, ids=str)
def test_quantized_products(draw, gpu, dtype, rows, shape, kernel, groups):
    weights = mx.quantize(draw(*shape, dtype=dtype), group_size=64, bits=4)
    x = draw(rows, shape[1], dtype=dtype)
    found, ((name, threadgroups, _),) = recorded(lambda: mlx_quantized.quantized_matmul(x, *weights), gpu)
    assert name.startswith(kernel) and threadgroups == groups and found.dtype == dtype
    w = specs.widen(mx.dequantize(*weights, group_size=64, bits=4))
    assert_near(found, specs.widen(x) @ w.T, 2)


@pytest.mark.parametrize("rows, whole", [(13, 13), (16, 32), (32, 32), (33, 64), (64, 64), (95, 95), (96, 128)])
def test_rows_that_leave_a_simdgroup_of_the_last_tile_short(draw, rows, whole):
    """Its SIMD-groups wait at two copies of a barrier, which Metal's specification forbids and a GPU does not mind."""
    assert mlx_matrix_units.rows_that_run(rows) == whole
    weights = mx.quantize(draw(64, 64), group_size=64, bits=4)

    def call():
        values = [*weights, draw(rows, 64), Output((rows, 64), HALF), int32(64), int32(64), int32(rows)]
        return mlx_matrix_units.qmm(values, HALF, (rows, 64, 64), Format(), mx.cpu)

    if whole == rows:
        recorded(call, "m5")
        return
    with pytest.raises(Fault, match=r"quantized_nax\.h:\d+, while thread \(0, 0, \d\) .* waits at threadgroup_barrier"):
        recorded(call, "m5")


def test_quantized_products_that_mlx_splits(draw):
    """So few tiles it splits along K before it asks for matrix units, and computes the parts without them."""
    weights = mx.quantize(draw(64, 128), group_size=64, bits=4)
    x = draw(64, 128)
    found, runs = recorded(lambda: mlx_quantized.quantized_matmul(x, *weights), "m5")
    assert [name.split("_half")[0] for name, *_ in runs] == ["affine_qmm_t_splitk", "gemm_splitk_accum_float"]
    assert runs[0][1] == (2, 2, 2) and found.dtype == HALF
    w = specs.widen(mx.dequantize(*weights, group_size=64, bits=4))
    assert_near(found, specs.widen(x) @ w.T, 2)


def test_quantized_products_of_columns_that_64_does_not_divide(draw):
    weights = mx.quantize(draw(16, 96), group_size=32, bits=4)
    _, runs = recorded(lambda: mlx_quantized.quantized_matmul(draw(33, 96), *weights, group_size=32), "m5")
    assert [name.startswith("affine_qmm_t") and "nax" not in name for name, *_ in runs][0]


@pytest.mark.parametrize("columns, outputs, rows", [(2048, 2048, 33), (4096, 512, 25), (512, 4097, 13)])
def test_from_how_many_rows_on_mlx_multiplies_matrices(columns, outputs, rows):
    with mx.stream(mx.cpu):
        for gpu, expected in (("m5", rows), ("m5-pro", rows), ("m4-max", None), ("h200", None)):
            with mm.simulator.enabled(gpu=gpu):
                assert mlx_matrix_units.fewest_rows_of_qmm(columns, outputs) == expected


ATTENTION = [
    # heads, heads of keys, queries, keys, width, mask, the kernel's name, threads
    (2, 1, 70, 70, 64, "causal", "attention_nax_half_64_32_64_64_4_1", (32, 4, 1)),
    (1, 1, 20, 45, 96, None, "attention_nax_half_64_32_96_96_4_1", (32, 4, 1)),
    (1, 1, 9, 40, 128, "causal", "attention_nax_half_64_32_128_128_4_1", (32, 4, 1)),
    (1, 1, 20, 40, 256, "causal", "attention_nax_dsplit_half_64_32_256_4_2", (32, 4, 2)),
    (1, 1, 20, 40, 80, None, "attention_half_32_32_80_80_4_1", (32, 4, 1)),
    (1, 1, 8, 40, 64, None, "sdpa_vector_half_64_64", (1024, 1, 1)),
]


@pytest.mark.parametrize("heads, key_heads, queries, keys, width, mask, kernel, threads", ATTENTION)
def test_attention(draw, heads, key_heads, queries, keys, width, mask, kernel, threads):
    q, k, v = draw(1, heads, queries, width), *(draw(1, key_heads, keys, width) for _ in range(2))
    call = lambda: mlx_metal.scaled_dot_product_attention(q, k, v, scale=width**-0.5, mask=mask)
    found, ((name, groups, size),) = recorded(call, "m5")
    assert name.startswith(kernel) and size == threads and found.dtype == HALF
    assert "nax" not in name or groups == (-(-queries // 64), heads, 1)
    wide = [specs.widen(a).astype(np.float64) for a in (q, k, v)]
    scores = wide[0] @ np.repeat(wide[1], heads // key_heads, 1).swapaxes(2, 3) * width**-0.5
    if mask:
        scores = np.where(np.tri(queries, keys, keys - queries, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = weights / weights.sum(-1, keepdims=True) @ np.repeat(wide[2], heads // key_heads, 1)
    assert_near(found, exact, 2)


def test_which_attention_mlx_has_in_one_piece():
    of = lambda width, queries, causal: mlx_metal.has_attention_kernel(
        (1, 2, queries, width), (1, 2, queries, width), HALF, causal
    )
    with mx.stream(mx.cpu):
        with mm.simulator.enabled(gpu="m5"):
            assert of(96, 20, False) and of(80, 20, False) and of(256, 1024, True)
            assert not of(256, 1024, False) and not of(256, 1023, True) and not of(192, 1024, True)
        with mm.simulator.enabled(gpu="m4-max"):
            assert of(80, 20, False) and not of(96, 20, False) and not of(256, 1024, True)


needs_compiler = pytest.mark.skipif(bool(agx_compiler.problem()), reason=agx_compiler.problem() or "")


@needs_compiler
def test_they_are_predicted_without_machine_code(draw):
    weights = mx.quantize(draw(64, 64), group_size=64, bits=4)
    x, q = draw(40, 64), draw(1, 1, 64, 64)
    mx.eval(x, q, weights)

    def calls():
        mx.eval(mx.quantized_matmul(x, *weights), mx.fast.scaled_dot_product_attention(q, q, q, scale=0.1))

    with mx.stream(mx.cpu):
        with mm.simulator.predicted("m5-max", peer="metal") as launches:
            calls()
        with mm.simulator.predicted("m4-max", peer="metal") as earlier:
            calls()
    kernels = sorted(launch.launch.kernel for launch in launches)
    assert len(kernels) == 2 and kernels[0].startswith("affine_qmm_t_nax") and kernels[1].startswith("attention_nax")
    assert not [str(launch) for launch in earlier if "nax" in str(launch)]
    for launch in launches:
        assert launch.code is None and str(launch).endswith("as the simulator counts them")
        assert launch.on(earlier.chip).prediction is None  # which has no such units
        assert launch.work.instructions.matrix * 8**3 == launch.launch.counts["tensor_multiplies"]
    of_weights = next(launch for launch in launches if launch.launch.kernel == kernels[0])
    assert of_weights.launch.counts["tensor_multiplies"] == 64 * 64 * 64  # a whole tile of rows
    assert launches.total.microseconds > sum(launch.prediction.microseconds for launch in launches)


CASE = "test 2x2x1x20x37x64 mask=causal"


def test_chips_with_and_without_them_have_launches_of_their_own():
    op = specs.get("scaled_dot_product_attention")
    case = simulate.find_case(op, CASE)
    found = simulate.peer_of_chips(op, case, HALF, [find_chip(name) for name in ("m5", "m4-max", "m5-pro")], 0)
    kernels = [([chip.name for chip in chips], [launch["kernel"] for launch in launches]) for chips, launches in found]
    rest = "half_64_32_64_64_4_1_half_float", "half_32_32_64_64_4_1_half_float"
    assert kernels == [(["m5", "m5-pro"], [f"attention_nax_{rest[0]}"]), (["m4-max"], [f"attention_{rest[1]}"])]


@needs_compiler
def test_simulate_shows_them_beside_ours(capsys):
    assert main(["simulate", "scaled_dot_product_attention", CASE, "--peer", "metal", "--chip", "m5"]) == 0
    out = capsys.readouterr().out
    name = "attention_nax_half_64_32_64_64_4_1_half_float"
    assert f"MLX: {name}\n    no machine code: products, loads and stores as the simulator counts them\n" in out
    (of_m5,) = (line.split() for line in out.splitlines() if line.startswith("m5 "))
    assert len(of_m5) > 3 and float(of_m5[-1]) > 0


def test_a_kernel_that_assumes_the_layout_of_an_m5_is_found_by_another(draw):
    q = draw(1, 1, 20, 256)
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m5", tensor_layout="shuffled"):
        with pytest.raises(Fault, match=r"attn/nax\.h:\d+: the left operand .*never asked"):
            mx.eval(mlx_metal.scaled_dot_product_attention(q, q, q, scale=0.1))


@needs_compiler
def test_dense_products_and_sorted_experts_are_predicted(draw):
    """A large product by the tiles of its launch, others by the simulator."""
    x, w, wide = draw(33, 64), draw(70, 64), draw(4096, 64)
    experts, rows = draw(3, 64, 64), draw(48, 1, 64)
    packed = mx.quantize(experts, group_size=64, bits=4)
    rhs = mx.array([0] * 16 + [1] * 16 + [2] * 16, mx.uint32)
    bias, many = draw(70), draw(1024, 64)
    mx.eval(x, w, wide, experts, rows, packed, rhs, bias, many)

    def names(gpu):
        with mx.stream(mx.cpu), mm.simulator.predicted(gpu, peer="metal") as launches:
            mx.eval(x @ w.T, mx.addmm(bias, x, w.T), many @ wide.T)
            mx.eval(mx.gather_qmm(rows, *packed, rhs_indices=rhs, transpose=True, group_size=64, sorted_indices=True))
        return [launch.launch.kernel if hasattr(launch, "launch") else launch.name for launch in launches]

    found = names("m5")
    assert sorted(found[:3]) == ["Matmul", *["gemm_thin_nax_half_2_2_1_1_4_true"] * 2]
    assert found[-1] == "affine_gather_qmm_rhs_nax_half_64_4_32_64_64_2_2_true"
    assert not [name for name in names("m4-max") if "nax" in name]
