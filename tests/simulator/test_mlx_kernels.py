"""MLX's own Metal kernels, out of the installed wheel, through our front end and simulator: right, and without a fault.

They calibrate both: text that Apple's compiler takes must pass here, and the watcher must not cry wolf over it. How MLX
launches these kernels, as `mlx_mittens.peer.mlx_metal` does, is the subject of test_mlx_metal.py.
"""

import struct

import numpy as np
import pytest
from helpers.simulate import run
from helpers.tolerances import BFLOAT16, FLOAT16, SUM

from mlx_mittens import frontend
from mlx_mittens.simulator import Fault

KERNELS = "mlx/backend/metal/kernels"


def source(name, headers, *instantiations):
    """A text as MLX writes them: its headers, and instantiations by its macro."""
    lines = [f'#include "{KERNELS}/{header}"' for header in headers]
    lines += [f'instantiate_kernel("{host_name}", {arguments})' for host_name, arguments in instantiations]
    frontend.register_source(name, "\n".join(lines) + "\n")
    return name


def ints(*values):
    return np.array(values, np.int32).tobytes()


def longs(*values):
    return np.array(values, np.int64).tobytes()


def floats(*values):
    return np.array(values, np.float32).tobytes()


def near(found, expected, tolerance=SUM):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.fixture(params=[0, 7], ids=["in order", "shuffled"])
def seed(request):
    return request.param


@pytest.mark.parametrize("kind", ["block", "looped"])
@pytest.mark.parametrize("type_name", ["float", "half", "bfloat16_t"])
def test_softmax(kind, type_name, seed, rng):
    file = source(
        "mlx_softmax.metal",
        ["utils.h", "softmax.h"],
        *(
            (f"{kind}_{name}", f"softmax_{function}, {name}, float")
            for kind, function in (("block", "single_row"), ("looped", "looped"))
            for name in ("float", "half", "bfloat16_t")
        ),
    )
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = {"float": np.float32, "half": np.float16, "bfloat16_t": ml_dtypes.bfloat16}[type_name]
    rows, columns = (3, 500) if kind == "block" else (2, 4500)
    x = (3 * rng.standard_normal((rows, columns))).astype(dtype)
    y = np.zeros_like(x)
    threads = 128 if kind == "block" else 1024
    data = [("input", x.view(np.uint8)), ("output", y.view(np.uint8)), ints(columns)]
    run(file, f"{kind}_{type_name}", data, rows, threads, seed=seed)
    tolerance = {"float": SUM, "half": FLOAT16, "bfloat16_t": BFLOAT16}[type_name]
    near(y.astype(np.float64), softmax(x.astype(np.float64)), tolerance)


def test_binary(rng):
    """Its header has a log in constant memory, which is made from strings there."""
    instantiation = ("divide", "binary_vv, float, float, Divide")
    file = source("mlx_binary.metal", ["utils.h", "binary_ops.h", "binary.h"], instantiation)
    a, b = (rng.standard_normal(77).astype(np.float32) for _ in range(2))
    c = np.zeros_like(a)
    data = [("input", a), ("input", b), ("output", c), np.array([77], np.uint32).tobytes()]
    run(file, "divide", data, 2, 32)
    assert (c == a / b).all()


def gemv_data(matrix, vector, out, inner, outer):
    return [
        ("input", matrix), ("input", vector), ("input", np.zeros(1, np.float32)), ("output", out),
        ints(inner), ints(outer), ints(matrix.shape[1]), floats(1), floats(0), ints(1), ints(1),
        longs(0), longs(0), longs(0), ints(1),
    ]  # fmt: skip


def test_gemv(seed, rng):
    """Its last barrier stands in a branch, names no memory, and the lanes of the other branch may have returned."""
    instantiation = ("gemv", "gemv, float, 1, 8, 1, 32, 4, 4, false, false")
    file = source("mlx_gemv.metal", ["utils.h", "gemv.h"], instantiation)
    rows, columns = 36, 260
    matrix = rng.standard_normal((rows, columns)).astype(np.float32)
    vector = rng.standard_normal(columns).astype(np.float32)
    out = np.zeros(rows, np.float32)
    data = gemv_data(matrix, vector, out, columns, rows)
    with pytest.raises(Fault, match=r"threadgroup_barrier, mlx/backend/metal/kernels/gemv\.h:\d+, is missed"):
        run(file, "gemv", data, rows // 4, (32, 8, 1), seed=seed)
    run(file, "gemv", data, rows // 4, (32, 8, 1), seed=seed, watch=False, early_exits=True)
    near(out, matrix @ vector)


def quantized(rng, rows, columns, bits, group_size=64):
    """Weights, their packed words, scales and biases."""
    q = rng.integers(0, 2**bits, (rows, columns)).astype(np.uint32)
    per_word = 32 // bits
    packed = np.bitwise_or.reduce([q[:, k::per_word] << np.uint32(bits * k) for k in range(per_word)])
    scales, biases = (rng.standard_normal((rows, columns // group_size)).astype(np.float32) for _ in range(2))
    return q * np.repeat(scales, group_size, 1) + np.repeat(biases, group_size, 1), packed, scales, biases


@pytest.mark.parametrize(("name", "bits"), [("qmv_fast", 4), ("qmv_fast", 8), ("qmv", 4)])
def test_quantized(name, bits, seed, rng):
    file = source(
        "mlx_quantized.metal",
        ["utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"],
        *((f"{kernel}_{b}", f"affine_{kernel}, float, 64, {b}, 0") for kernel in ("qmv_fast", "qmv") for b in (4, 8)),
    )
    rows, columns = 16, 1024 if name == "qmv_fast" else 576
    weights, packed, scales, biases = quantized(rng, rows, columns, bits)
    x, y = rng.standard_normal(columns).astype(np.float32), np.zeros(rows, np.float32)
    data = [("input", packed), ("input", scales), ("input", biases), ("input", x), ("output", y)]
    data += [ints(columns), ints(rows), ints(0), ints(0), longs(0), ints(0), ints(0), longs(0), longs(0), longs(0)]
    run(file, f"{name}_{bits}", data, (1, rows // 8, 1), (32, 2, 1), seed=seed)
    near(y, weights @ x)


def test_sdpa_vector(seed, rng):
    file = source("mlx_sdpa_vector.metal", ["utils.h", "sdpa_vector.h"], ("sdpa", "sdpa_vector, float, 64, 64"))
    heads, kv_heads, keys, size = 4, 2, 70, 64
    q = rng.standard_normal((heads, size)).astype(np.float32)
    k, v = (rng.standard_normal((kv_heads, keys, size)).astype(np.float32) for _ in range(2))
    out = np.zeros_like(q)
    data = [("input", q), ("input", k), ("input", v), ("output", out), ints(heads // kv_heads), ints(keys)]
    data += [longs(keys * size), longs(size)] * 2 + [floats(size**-0.5)]
    constants = {**dict.fromkeys(range(20, 26), False), 26: 0}
    run(file, "sdpa", data, heads, 1024, seed=seed, constants=constants)
    k, v = np.repeat(k, heads // kv_heads, 0), np.repeat(v, heads // kv_heads, 0)
    near(out, (softmax(np.einsum("hd,hkd->hk", q, k) * size**-0.5)[:, None] @ v)[:, 0])


@pytest.mark.parametrize("type_name", ["float", "half"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [64, 45])
def test_steel_attention(type_name, causal, length, seed, rng):
    file = source(
        "mlx_steel_attention.metal",
        ["utils.h", "steel/attn/kernels/steel_attention.h"],
        *((f"attention_{t}", f"attention, {t}, 32, 32, 64, 64, 4, 1, {t}, float") for t in ("float", "half")),
    )
    heads, size, block = 2, 64, 32
    dtype = {"float": np.float32, "half": np.float16}[type_name]
    q, k, v = (rng.standard_normal((1, heads, length, size)).astype(dtype) for _ in range(3))
    out = np.zeros_like(q)
    blocks, rest = -(-length // block), length % block
    params = struct.pack("<6if7i", 1, heads, size, length, length, 1, size**-0.5, blocks, blocks, length // block,
                         length // block, rest, rest, 0)  # fmt: skip
    params += longs(*(heads * length * size, length * size, size) * 4)
    aligned = rest == 0
    constants = {200: aligned, 201: aligned, 300: False, 301: causal, 302: False, 303: False}
    data = [("input", q), ("input", k), ("input", v), ("output", out), params]
    run(file, f"attention_{type_name}", data, (blocks, heads, 1), (32, 4, 1), seed=seed, constants=constants)
    scores = np.einsum("bhqd,bhkd->bhqk", *(a.astype(np.float64) for a in (q, k))) * size**-0.5
    if causal:
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    near(out, softmax(scores) @ v.astype(np.float64), 1e-5 if type_name == "float" else 2e-3)


QUANTIZED = ["utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"]
STEEL = ["utils.h", "steel/attn/kernels/steel_attention.h"]


@pytest.mark.parametrize(
    ("headers", "instantiation"),
    [
        (["utils.h", "softmax.h"], "softmax_looped, bfloat16_t, float"),
        (["utils.h", "gemv.h"], "gemv, bfloat16_t, 4, 1, 1, 32, 4, 4, false, false"),
        (["utils.h", "gemv.h"], "gemv_wide, half, 4, 32"),
        (QUANTIZED, "affine_qmv_fast, bfloat16_t, 64, 4, 0"),
        (QUANTIZED, "affine_qmm_t, bfloat16_t, 64, 4, true, 0"),
        (["utils.h", "sdpa_vector.h"], "sdpa_vector_2pass_1, bfloat16_t, 128, 128"),
        (STEEL, "attention, bfloat16_t, 32, 16, 128, 128, 4, 1, bool, float"),
    ],
    ids=lambda value: value.split(",")[0] if isinstance(value, str) else "",
)
def test_for_both_targets(headers, instantiation):
    file = source(f"mlx_{instantiation.split(',')[0]}.metal", headers, ("instance", instantiation))
    frontend.simulator_library(file)
    assert ".visible .entry instance(" in frontend.ptx(file, "instance")
