"""`mlx_mittens.peer.mlx_metal`: MLX's own kernels, launched as MLX does, give mx's results, simulated and on a GPU."""

import re

import mlx.core as mx
import numpy as np
import pytest
from helpers import matrices
from helpers.tolerances import PEER, SUMS

import mlx_mittens as mm
from mlx_mittens import _ext, frontend, specs
from mlx_mittens.bench import machine, measure, timing
from mlx_mittens.cli import bench
from mlx_mittens.cli.main import main
from mlx_mittens.frontend import ptxas
from mlx_mittens.peer import mlx_gathers, mlx_metal, mlx_quantized, mlx_sources
from mlx_mittens.simulator import Fault


@pytest.fixture(params=["cpu"] + ["gpu"] * (mx.is_available(mx.gpu) and _ext.cuda_available()), autouse=True)
def device(request):
    before = mx.default_device()
    mx.set_default_device(getattr(mx, request.param))
    yield request.param
    mx.set_default_device(before)


@pytest.fixture
def draw(rng):
    """Normal numbers of a shape."""
    return lambda *shape, dtype=mx.float32: matrices.draw(rng, shape, dtype, outliers=False)


def assert_near(found, expected, tolerance=None, size=0.0):
    """size: of the terms that are summed up, beside which a result that happens to cancel cannot be more exact."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    a, b = specs.widen(found), specs.widen(expected)
    assert np.abs(a - b).max() <= (tolerance or PEER[found.dtype]) * max(np.abs(b).max(), size)


@pytest.mark.parametrize("columns", [7, 100, 1030, 4096, 4097, 9001])
def test_softmax(draw, dtype, columns):
    a = draw(2, 2, columns, dtype=dtype)
    assert_near(mlx_metal.softmax(a), mx.softmax(a, axis=-1, precise=True))


def test_softmax_of_a_view(draw):
    a = draw(40, 12).T
    assert_near(mlx_metal.softmax(a), mx.softmax(a, axis=-1))


@pytest.mark.parametrize("columns, threads", [(7, 32), (128, 32), (129, 64), (4096, 1024), (4097, 1024)])
def test_softmax_has_mlxs_geometry(draw, launches, columns, threads):
    ((kernel, *geometry),) = launches(lambda: mlx_metal.softmax(draw(3, columns)))
    assert geometry == [(3, 1, 1), (threads, 1, 1)]
    assert ("looped" in kernel) == (columns > 4096)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with kernels of the names and arguments of MLX's norms: a thread takes every `threads`-th element."""
    template = """
    #include "mlx/backend/metal/kernels/utils.h"
    template <typename T>
    [[kernel]] void NAME(const device T* x, const device T* w, PARAMETERS device T* out, constant float& eps,
        constant uint& size, constant uint& w_stride, STRIDES uint row [[threadgroup_position_in_grid]],
        uint t [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
      threadgroup float shared[2];
      x += row * size;
      if (t == 0) {
        float mean = 0, squares = 0;
        for (uint i = 0; i < size; ++i) mean += CENTRED * float(x[i]) / size;
        for (uint i = 0; i < size; ++i) squares += (float(x[i]) - mean) * (float(x[i]) - mean);
        shared[0] = mean;
        shared[1] = rsqrt(squares / size + eps);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint i = t; i < size; i += threads)
        out[row * size + i] = T((float(x[i]) - shared[0]) * shared[1] * w[w_stride * i] BIAS);
    }
    #define both(name, type) \\
      instantiate_kernel(FIRST #name, NAME, type) instantiate_kernel(FIRST "_looped" #name, NAME, type)
    both(float32, float) both(float16, half) both(bfloat16, bfloat16_t)
    """
    names = ("NAME", "FIRST", "CENTRED", "PARAMETERS", "STRIDES", "BIAS")
    words = {
        "rms_norm": ("rms", '"rms"', "0", "", "", ""),
        "layer_norm": (
            *("layer", '"layer_norm"', "1", "const device T* b,", "constant uint& b_stride,"),
            "+ float(b[b_stride * i])",
        ),
    }
    folder = tmp_path / "mlx/backend/metal/kernels"
    folder.mkdir(parents=True)
    for file, values in words.items():
        text = template
        for name, value in zip(names, values):
            text = text.replace(name, value)
        (folder / f"{file}.metal").write_text(text)
    monkeypatch.setenv(mlx_sources.CHECKOUT, str(tmp_path))


@pytest.mark.parametrize("columns", [7, 256, 4100, 6664])
def test_norms_of_a_checkout(checkout, draw, dtype, columns):
    x, w, b = draw(2, columns, dtype=dtype), draw(columns, dtype=dtype), draw(columns, dtype=dtype)
    assert_near(mlx_metal.rms_norm(x, w, 1e-5), mx.fast.rms_norm(x, w, 1e-5))
    assert_near(mlx_metal.layer_norm(x, w, b, 1e-5), mx.fast.layer_norm(x, w, b, 1e-5))


@pytest.mark.parametrize(
    "columns, rms, layer",
    [(7, 32, 32), (129, 64, 32), (4096, 1024, 512), (4097, 1024, 544), (6656, 1024, 832), (6657, 1024, 1024)],
)
def test_norms_have_mlxs_geometry(checkout, draw, launches, columns, rms, layer):
    x, w = draw(3, columns), draw(columns)
    (first,) = launches(lambda: mlx_metal.rms_norm(x, w, 1e-5))
    (second,) = launches(lambda: mlx_metal.layer_norm(x, w, w, 1e-5))
    assert first[1:] == ((3, 1, 1), (rms, 1, 1)) and ("looped" in first[0]) == (columns > 4096)
    assert second[1:] == ((3, 1, 1), (layer, 1, 1)) and ("looped" in second[0]) == (columns > 6656)


def test_norms_need_a_checkout(draw, monkeypatch):
    monkeypatch.delenv(mlx_sources.CHECKOUT, raising=False)
    with pytest.raises(ValueError, match=f"{mlx_sources.CHECKOUT} is None: expected a checkout"):
        mlx_metal.rms_norm(draw(2, 64), draw(64), 1e-5)


def test_layer_norm_is_covered_where_each_thread_has_columns(checkout):
    op = specs.get("layer_norm")
    covered = {
        columns for columns in (100, 248, 256, 768, 1000, 7000) if mlx_metal.of(op, specs.Case("x", (2, columns)))
    }
    assert covered == {248, 256, 768, 7000}


@pytest.mark.parametrize("shape", [(64, 256), (100, 1000), (64, 48), (4100, 70), (2052, 96)], ids=str)
def test_gemv(draw, dtype, shape):
    w, x = draw(*shape, dtype=dtype), draw(shape[1], dtype=dtype)
    assert_near(mlx_metal.gemv(w, x), (w.astype(mx.float32) @ x.astype(mx.float32)).astype(dtype))


@pytest.mark.parametrize("shape", [(64, 256), (48, 128), (40, 64), (1000, 1024)], ids=str)
def test_gemv_of_the_transpose(draw, dtype, shape):
    w, x = draw(*shape, dtype=dtype), draw(shape[0], dtype=dtype)
    assert_near(mlx_metal.gemv(w, x, transpose=False), (x.astype(mx.float32) @ w.astype(mx.float32)).astype(dtype))


@pytest.mark.parametrize("mode, group_size", [("affine", 64), ("mxfp4", 32)])
@pytest.mark.parametrize("shape, fast", [((6, 16, 512), True), ((4, 12, 576), False)], ids=str)
def test_gather_qmv(draw, launches, mode, group_size, shape, fast):
    weights = mx.quantize(draw(*shape), group_size, 4, mode=mode)
    w, scales, *biases = weights
    x = draw(1, 3, 1, shape[2])
    lhs, rhs = mx.array([[0, 1, 2]], mx.uint32), mx.array([[3, 0, 3]], mx.uint32)
    found = mlx_gathers.gather_qmm(x, w, scales, biases[0] if biases else None, lhs, rhs, group_size, 4, mode)
    whole = mx.dequantize(*weights, group_size=group_size, bits=4, mode=mode)
    assert_near(found, mx.stack([x[0, i] @ whole[e].T for i, e in enumerate((3, 0, 3))])[None], SUMS)
    again = lambda: mlx_gathers.gather_qmm(x, w, scales, biases[0] if biases else None, lhs, rhs, group_size, 4, mode)
    ((kernel, *geometry),) = launches(again)
    assert geometry == [(1, -(-shape[1] // 8), 3), (32, 2, 1)] and ("_fast_" in kernel) == fast


QUANTIZED = [
    # rows of x, weights, the kernels that MLX launches, their threadgroups
    (1, (16, 512), ["qmv_fast"], [(1, 2, 1)]),
    (1, (24, 576), ["qmv"], [(1, 3, 1)]),
    (1, (3, 192), ["qmv"], [(1, 1, 1)]),
    (1, (64, 64), ["qmv_quad"], [(1, 1, 1)]),
    (3, (70, 128), ["qmv_quad"], [(3, 2, 1)]),
    (2, (24, 576), ["qmv_wide"], [(1, 3, 1)]),
    (5, (20, 512), ["qmv_wide"], [(1, 3, 1)]),
    (6, (24, 576), ["qmv_wide"], [(2, 3, 1)]),
    (12, (8, 256), ["qmv_wide"], [(3, 1, 1)]),
    (13, (40, 192), ["qmm_t_splitk", "gemm_splitk_accum"], [(2, 1, 3), (5, 13, 1)]),
    (16, (64, 256), ["qmm_t_splitk", "gemm_splitk_accum"], [(2, 1, 4), (1, 1, 1)]),
    (33, (16, 64), ["qmm_t"], [(1, 2, 1)]),
]


@pytest.fixture
def launches(device):
    """The launches of a call: a kernel's name, threadgroups and threads of each."""

    def launches(call):
        if device != "cpu":
            pytest.skip("the simulator records launches")
        _ext.simulator_record(True)
        try:
            mx.eval(call())
        finally:
            runs = _ext.simulator_record(False)
        return [(run["kernel"], run["threadgroups"], run["threads"]) for run in runs]

    return launches


def quantized(draw, dtype, bits, rows, shape):
    """x, weights and the exact result, with the size of the terms."""
    weights = mx.quantize(draw(*shape, dtype=dtype), group_size=64, bits=bits)
    x = draw(rows, shape[1], dtype=dtype)
    w = mx.dequantize(*weights, group_size=64, bits=bits).astype(mx.float32)
    size = np.sqrt(specs.widen(x) ** 2 @ specs.widen(w).T ** 2).max()
    return x, weights, (x.astype(mx.float32) @ w.T).astype(dtype), size


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows, shape, kernels, groups", QUANTIZED, ids=str)
def test_quantized_matmul(draw, dtype, bits, rows, shape, kernels, groups):
    x, weights, exact, size = quantized(draw, dtype, bits, rows, shape)
    # qmm multiplies weights that are rounded to x's type.
    tolerance = None if "qmv" in kernels[0] else 2 * PEER[dtype]
    assert_near(mlx_quantized.quantized_matmul(x, *weights, group_size=64, bits=bits), exact, tolerance, size)


@pytest.mark.parametrize("rows, shape, kernels, groups", QUANTIZED, ids=str)
def test_quantized_matmul_launches_what_mlx_launches(draw, launches, rows, shape, kernels, groups):
    x, weights, *_ = quantized(draw, mx.float16, 4, rows, shape)
    found = launches(lambda: mlx_quantized.quantized_matmul(x, *weights, group_size=64, bits=4))
    assert [re.sub("^affine_|_(half|float)_.*", "", name) for name, *_ in found] == kernels
    assert [threadgroups for _, threadgroups, _ in found] == groups


@pytest.mark.parametrize(
    "columns, outputs, rows", [(2048, 2048, 13), (4096, 512, 15), (512, 4096, 15), (4096, 4097, 13), (14336, 4096, 13)]
)
def test_from_how_many_rows_on_mlx_multiplies_matrices(columns, outputs, rows):
    assert mlx_quantized.fewest_rows_of_qmm(columns, outputs) == rows


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_matmul_with_a_partial_block_of_outputs(draw, bits):
    x, weights, exact, size = quantized(draw, mx.float32, bits, 1, (13, 512))
    with mm.simulator.enabled(watch=False):  # threadgroups overlap: FINDINGS has the watcher's message
        assert_near(mlx_quantized.quantized_matmul(x, *weights, group_size=64, bits=bits), exact, size=size)


SHARED = [
    # query heads, key heads, keys, width, query heads of a simdgroup (None: each head reads the keys itself)
    (8, 1, 8192, 64, 8),
    (8, 1, 8192, 128, 4),
    (12, 1, 8192, 128, 4),
    (16, 1, 8192, 128, 2),
    (12, 1, 8192, 64, None),
    (16, 1, 8191, 128, None),
    (4, 1, 8192, 128, None),
]


@pytest.mark.parametrize("heads, key_heads, keys, width, shared", SHARED, ids=str)
def test_attention_launches_what_mlx_launches(draw, launches, heads, key_heads, keys, width, shared):
    q, k = draw(1, heads, 1, width, dtype=mx.float16), mx.zeros((1, key_heads, keys, width), mx.float16)
    with mm.simulator.enabled(watch=False):
        (first, groups, threads), _ = launches(lambda: mlx_metal.scaled_dot_product_attention(q, k, k, scale=1.0))
    group = heads // key_heads
    name = f"sdpa_vector_2pass_1_gqa_half_{width}_{width}_{group}_{shared}" if shared else "sdpa_vector_2pass_1_half"
    assert first.startswith(name) and (groups, threads) == ((key_heads, 1, 128 if group > 4 else 64), (32, group, 1))


ATTENTION = [
    # heads, kv heads, queries, keys, dimensions, mask
    (4, 2, 1, 70, 64, None),
    (4, 2, 3, 70, 128, "causal"),
    (4, 1, 1, 1030, 64, None),  # from 1024 keys on in two passes
    (2, 2, 2, 1100, 128, "causal"),
    (4, 2, 64, 64, 64, None),  # from 9 queries on steel attention
    (4, 2, 50, 75, 64, "causal"),
    (2, 1, 40, 40, 128, "causal"),
]


@pytest.mark.parametrize("sizes", ATTENTION, ids=str)
def test_attention(draw, dtype, sizes):
    heads, kv_heads, queries, keys, dims, mask = sizes
    q = draw(2, heads, queries, dims, dtype=dtype)
    k, v = (draw(2, kv_heads, keys, dims, dtype=dtype) for _ in range(2))
    exact = mx.fast.scaled_dot_product_attention(
        *(a.astype(mx.float32) for a in (q, k, v)), scale=dims**-0.5, mask=mask
    )
    assert_near(mlx_metal.scaled_dot_product_attention(q, k, v, scale=dims**-0.5, mask=mask), exact.astype(dtype))


# Layers transpose heads and tokens, and keep keys and values as the front of a larger cache.
VIEWS = {
    "a transposed prompt": ((2, 4, 20, 64), (2, 2, 37, 64), True),
    "a transposed prompt of one sequence": ((1, 4, 35, 128), (1, 2, 35, 128), True),
    "one query and the front of a cache": ((1, 4, 1, 64), (1, 2, 70, 64), False),
    "few transposed queries and the front of a cache": ((1, 4, 3, 64), (1, 2, 70, 64), False),
    "one query of two passes": ((1, 4, 1, 64), (1, 2, 1030, 64), False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_attention_copies_no_view_that_mlx_takes(draw, launches, name):
    of_queries, of_keys, transposed = VIEWS[name]
    swapped = lambda shape: draw(shape[0], shape[2], shape[1], shape[3], dtype=mx.float16).swapaxes(1, 2)
    front = lambda shape: draw(*shape[:2], 1280, shape[3], dtype=mx.float16)[:, :, : shape[2]]
    q, k, v = (swapped(of_queries), *((swapped if transposed else front)(of_keys) for _ in range(2)))
    found = []
    with mm.simulator.enabled():
        made = launches(lambda: found.append(mlx_metal.scaled_dot_product_attention(q, k, v, scale=0.1)) or found[0])
    assert [kernel for kernel, *_ in made if not kernel.startswith(("attention", "sdpa_vector"))] == []
    assert_near(found[0], mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1))


def test_attention_copies_a_view_that_mlx_copies(draw):
    """Columns that do not lie beside each other."""
    q = draw(1, 2, 64, 20, dtype=mx.float16).swapaxes(2, 3)
    k = draw(1, 2, 37, 128, dtype=mx.float16)[..., ::2]
    for queries in (q, q[:, :, :1]):
        found = mlx_metal.scaled_dot_product_attention(queries, k, k, scale=0.1)
        assert_near(found, mx.fast.scaled_dot_product_attention(queries, k, k, scale=0.1))


@pytest.mark.parametrize("heads", [12, 16])
def test_attention_of_heads_that_share_what_they_read(draw, heads):
    q, k, v = draw(1, heads, 1, 128, dtype=mx.float16), *(draw(1, 1, 8200, 128, dtype=mx.float16) for _ in range(2))
    scores = specs.widen(q)[0, :, 0] @ specs.widen(k)[0, 0].T * 128**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = weights / weights.sum(-1, keepdims=True) @ specs.widen(v)[0, 0]
    found = mlx_metal.scaled_dot_product_attention(q, k, v, scale=128**-0.5)
    assert_near(found, mx.array(exact.astype(np.float32)).astype(mx.float16).reshape(q.shape))


# Findings of the watcher in MLX's kernels, each looked into: true by the Metal specification, and as far as can be
# seen without effect on results.
FINDINGS = {
    "gemv, bn = 8: a barrier in a branch that only the first lane of each simdgroup takes": (
        lambda draw: _gemv(draw(600), draw(3, 600), True),
        r"threadgroup_barrier, mlx/backend/metal/kernels/gemv\.h:\d+, is missed by 248 of 256 threads",
    ),
    "gemv, sm = 8: a shuffle after lanes beyond the last row have returned": (
        lambda draw: _gemv(draw(48), draw(10, 48), True),
        r"simd_shuffle_down, mlx/backend/metal/kernels/gemv\.h:\d+, is missed by 20 of 32 threads",
    ),
    "gemv_t: a barrier in a branch that lanes beyond the last column do not take": (
        lambda draw: _gemv(draw(1000), draw(1000, 900), False),
        r"threadgroup_barrier, mlx/backend/metal/kernels/gemv\.h:\d+, is missed",
    ),
    "qmv: two threadgroups write the same values where the rows are no multiple of 8": (
        lambda draw: _qmv(draw(1, 192), mx.quantize(draw(9, 192), 64, 4)),
        r'quantized\.h:\d+\) at byte 20 of buffer "y", written by .* a race between threadgroups',
    ),
}


def _gemv(x, w, transpose):
    return mlx_metal.gemv(w, x, transpose=transpose), x @ (w.T if transpose else w)


def _qmv(x, weights):
    return mlx_quantized.quantized_matmul(x, *weights), x @ mx.dequantize(*weights).T


@pytest.mark.parametrize("finding", FINDINGS)
def test_what_the_watcher_finds_in_them(draw, device, finding):
    call, message = FINDINGS[finding]
    found, expected = call(draw)
    if device == "gpu":
        assert_near(found, expected)
        return
    with mm.simulator.enabled(equal_writes="fault"), pytest.raises(Fault, match=message):
        mx.eval(found)


def test_unwatched_the_race_is_without_effect(draw):
    with mm.simulator.enabled(watch=False):
        assert_near(*_qmv(draw(1, 192), mx.quantize(draw(9, 192), 64, 4)))


@pytest.mark.parametrize("family", [family for family in mlx_sources.HEADERS if not family.endswith("_nax")])
def test_assembles(family):
    """As PTX, in bfloat16, in the instantiations that matter most."""
    if ptxas.find() is None:
        pytest.skip("no ptxas: pip install nvidia-cuda-nvcc")
    t = "bfloat16_t"
    kernels = {
        "softmax": [("softmax_single_row", t, "float"), ("softmax_looped", t, "float")],
        "gemv": [("gemv", t, 8, 1, 1, 32, 4, 4, False, False), ("gemv_t", t, 1, 16, 8, 4, 4, 4, False, False)],
        "quantized": [
            *[(f"affine_{f}", t, 64, bits, False) for f in ("qmv", "qmv_fast") for bits in (4, 8)],
            ("affine_qmv_quad", t, 64, 4, 128, False),
            *[("affine_qmv_wide", t, 64, bits, rows, 8, False) for rows in (2, 5) for bits in (4, 8)],
            ("affine_qmm_t", t, 64, 4, True, False),
            ("affine_qmm_t_splitk", t, 64, 4, True),
            *[(f"affine_gather_{f}", t, 64, 4) for f in ("qmv", "qmv_fast")],
        ],
        "fp_quantized": [(f"fp_gather_{f}", t, 32, 4) for f in ("qmv", "qmv_fast")],
        "splitk": [("gemm_splitk_accum", "float", t)],
        "steel_gemm": [("gemm", t, 64, 64, 16, 2, 2, False, True)],
        "steel_gather": [("gather_mm_rhs", t, 16, 64, 16, 1, 2, False, True)],
        "sdpa_vector": [
            ("sdpa_vector", t, 128, 128),
            ("sdpa_vector_2pass_1", t, 128, 128),
            *[("sdpa_vector_2pass_1_gqa", t, 128, 128, group, shared) for group, shared in ((8, 4), (12, 4), (16, 2))],
            ("sdpa_vector_2pass_2", t, 128),
        ],
        "steel_attention": [("attention", t, 32, 16, 128, 128, 4, 1, t, "float")],
    }[family]
    texts = {}
    for template in kernels:
        file, kernel = mlx_sources.instance(family, *template)
        texts[frontend.entry_name(kernel)] = frontend.ptx(file, kernel)
    for arch in ("sm_80", "sm_90"):
        assert set(ptxas.assemble(texts, arch)) == set(texts)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda a: mlx_metal.softmax(a, axis=0), "axis is 0"),
        (lambda a: mlx_quantized.quantized_matmul(a[:1], a, a, a, transpose=False), "transpose is False, x has 1 rows"),
        (lambda a: mlx_metal.scaled_dot_product_attention(a, a, a, scale=1, mask=a), "mask is an array"),
    ],
)
def test_what_the_peer_does_not_do(call, message):
    with pytest.raises(ValueError, match=message):
        call(mx.ones((4, 4)))


def test_what_the_table_takes_for_covered_runs(rng):
    """Every case for which the table says that MLX has a kernel, unless it is large."""
    covered = [
        (op, case)
        for op in specs.OPS
        for case in (*op.tests, *op.cases)
        if mlx_metal.of(op, case) and np.prod(case.shape) <= 120_000
    ]
    of_a_checkout = set() if mlx_sources.has_checkout() else {"rms_norm", "layer_norm"}
    on_matrix_units = {"matmul"}  # test_mlx_unit_products.py
    assert {op.name for op, _ in covered} == set(mlx_metal.PEERS) - of_a_checkout - on_matrix_units
    with mm.simulator.enabled(watch=False):
        for op, case in covered:
            arrays = op.draw(rng, case, mx.float32)
            (found,) = specs.run(op, mlx_metal.of(op, case), case, arrays)
            assert specs.error(found, op.exact(case, arrays)[0]) < SUMS, f"{op.name} {case.name}"


def test_bench_measures_the_peer(draw, device, rng, monkeypatch):
    """The measurement itself, on whatever device: in the simulator it is slow, but it is one."""
    monkeypatch.setattr(timing, "_CPU_BYTES", (1 << 14, 1 << 14))
    monkeypatch.setattr(timing, "_GPU_BYTES", 1 << 14)
    monkeypatch.setattr(measure, "_SHORTEST_SAMPLE", {"cpu": 0, "gpu": 0})
    op, budget = specs.get("softmax"), measure.Budget(seconds=0, fewest=2, most=2)
    outcome = measure.measure(op, specs.Case("test", (2, 64)), "float16", device, budget, rng, with_peer=True)
    assert outcome.passed and outcome.row.peer_ms > 0
    assert dict(zip((column.name for column in bench._COLUMNS), bench._cells(outcome, "test")))["peer ms"]
    assert bench.json_rows([outcome], with_peer=True)[0]["peer_ms"] == outcome.row.peer_ms
    assert "peer_ms" not in bench.json_rows([outcome])[0]
    without = measure.measure(op, specs.Case("test", (2, 64), vjp=True), "float16", device, budget, rng, with_peer=True)
    assert without.row.peer_ms is None


@pytest.mark.parametrize("executor, words", [("native", "NVIDIA GPU"), ("metal", "mx ms")])
def test_bench_without_an_nvidia_gpu(executor, words, capsys, monkeypatch):
    monkeypatch.setattr(machine, "executor", lambda: executor)
    monkeypatch.setattr(bench, "executors", lambda: {executor: "ready"})
    assert main(["bench", "--quick", "--ops", "softmax", "--peer", "metal"]) == 2
    assert re.search(f"--peer metal: .*{words}", capsys.readouterr().err)
