"""Exchanges between the lanes of a simdgroup and of a quad, against numpy, in several thread orders."""

import numpy as np
import pytest
from helpers.simulate import kernel, register, run
from helpers.tolerances import SUM

LANES = np.arange(32)
QUAD = LANES // 4 * 4
SEEDS = [0, 1, 2]


def up(x, delta, fill, modulo=32):
    """simd_shuffle_and_fill_up: within groups of `modulo`, moved up by delta, the last of `fill` below."""
    at = LANES % modulo
    return np.where(at >= delta, x[LANES - delta], fill[LANES - at + (at + modulo - delta) % modulo])


def down(x, delta, fill, modulo=32):
    at = LANES % modulo
    return np.where(at + delta < modulo, x[(LANES + delta) % 32], fill[LANES - at + (at + delta) % modulo])


def quads(f):
    return lambda x: np.repeat(np.array([f(q) for q in x.reshape(8, 4)]), 4)


# For x, an int in every lane: the Metal expression, and the lanes' expected values.
INTEGER = {
    "simd_sum(x)": lambda x: np.full(32, x.sum()),
    "simd_product(x % 3 + 1)": lambda x: np.full(32, (np.fmod(x, 3) + 1).prod(dtype=np.int32)),
    "simd_min(x)": lambda x: np.full(32, x.min()),
    "simd_max(x)": lambda x: np.full(32, x.max()),
    "simd_and(x)": lambda x: np.full(32, np.bitwise_and.reduce(x)),
    "simd_or(x)": lambda x: np.full(32, np.bitwise_or.reduce(x)),
    "simd_xor(x)": lambda x: np.full(32, np.bitwise_xor.reduce(x)),
    "simd_prefix_inclusive_sum(x)": lambda x: x.cumsum(),
    "simd_prefix_exclusive_sum(x)": lambda x: x.cumsum() - x,
    "simd_prefix_inclusive_product(x % 2 + 2)": lambda x: (np.fmod(x, 2) + 2).cumprod(dtype=np.int32),
    "simd_broadcast(x, 5)": lambda x: np.full(32, x[5]),
    "simd_broadcast_first(x)": lambda x: np.full(32, x[0]),
    "simd_shuffle(x, 31 - lane)": lambda x: x[::-1],
    "simd_shuffle(x, (lane * 7) % 32)": lambda x: x[LANES * 7 % 32],
    "simd_shuffle_xor(x, 11)": lambda x: x[LANES ^ 11],
    "simd_shuffle_up(x, 3)": lambda x: np.where(LANES >= 3, x[LANES - 3], x),
    "simd_shuffle_down(x, 3)": lambda x: np.where(LANES < 29, x[(LANES + 3) % 32], x),
    "simd_shuffle_rotate_up(x, 9)": lambda x: x[(LANES - 9) % 32],
    "simd_shuffle_rotate_down(x, 9)": lambda x: x[(LANES + 9) % 32],
    "simd_shuffle_and_fill_up(x, -x, 5)": lambda x: up(x, 5, -x),
    "simd_shuffle_and_fill_down(x, -x, 5)": lambda x: down(x, 5, -x),
    "simd_shuffle_and_fill_up(x, -x, 3, 8)": lambda x: up(x, 3, -x, 8),
    "simd_shuffle_and_fill_down(x, -x, 3, 8)": lambda x: down(x, 3, -x, 8),
    "int(ulong(simd_ballot(x > 0)))": lambda x: np.full(32, (1 << LANES[x > 0]).sum()).astype(np.int32),
    "int(ulong(simd_active_threads_mask()) >> 1)": lambda x: np.full(32, 0x7FFFFFFF),
    "simd_any(x == 7777777)": lambda x: np.zeros(32),
    "simd_any(lane == 13)": lambda x: np.ones(32),
    "simd_all(lane < 32)": lambda x: np.ones(32),
    "simd_all(lane != 31)": lambda x: np.zeros(32),
    "simd_is_first()": lambda x: LANES == 0,
    "quad_sum(x)": quads(np.sum),
    "quad_max(x)": quads(np.max),
    "quad_min(x)": quads(np.min),
    "quad_broadcast(x, 2)": lambda x: x[QUAD + 2],
    "quad_shuffle(x, 3 - lane % 4)": lambda x: x[QUAD + 3 - LANES % 4],
    "quad_shuffle_xor(x, 1)": lambda x: x[LANES ^ 1],
    "quad_shuffle_up(x, 1)": lambda x: np.where(LANES % 4 >= 1, x[LANES - 1], x),
    "quad_shuffle_down(x, 2)": lambda x: np.where(LANES % 4 < 2, x[(LANES + 2) % 32], x),
    "quad_shuffle_rotate_up(x, 1)": lambda x: x[QUAD + (LANES - 1) % 4],
    "quad_prefix_inclusive_sum(x)": lambda x: x.reshape(8, 4).cumsum(1).reshape(-1),
    "quad_ballot(true).all() + 2 * quad_ballot(x > 0).all()": quads(lambda q: 1 + 2 * (q > 0).all()),
    "simd_ballot(true).all() + 2 * simd_ballot(lane != 7).all()": lambda x: np.ones(32),
    "int(ulong(quad_ballot(x > 0)))": quads(lambda q: sum(1 << i for i in range(4) if q[i] > 0)),
    "quad_all(x == x)": lambda x: np.ones(32),
}


@pytest.mark.parametrize("rounds", ["", "for (int k = 0; k < 2; ++k)"])
@pytest.mark.parametrize(
    "unlikely",
    ["isnan(x[i])", "x[i] != x[i]", "!(x[i] == x[i])", "__builtin_expect(lane % 5 == 2, 0)", "lane % 5 == 2"],
)
def test_lanes_meet_behind_a_branch_that_is_unlikely(unlikely, rounds):
    """Wherever a compiler would place it: behind the join, too."""
    body = f"""  float s = 0;
  {rounds} {{
    s = lane;
    if ({unlikely}) {{ s = simd_max(float(lane)); }} else if (lane == 31) {{ s = simd_sum(s); }}
    y[i] = simd_sum(s);
  }}"""
    is_nan = LANES % 5 == 2
    x = np.where(is_nan, np.nan, LANES).astype(np.float32)
    arguments = "const device float* x [[buffer(0)]], device float* y [[buffer(1)]]"
    file = register(kernel(body, arguments))
    for seed in SEEDS:
        y = np.zeros(32, np.float32)
        run(file, "test", [x, y], seed=seed, active_lanes=True)
        assert (y == np.where(is_nan, 27, LANES).sum()).all()


# The same few for every type that the functions take: x is a value of it.
TYPES = {
    "float": np.float32,
    "half": np.float16,
    "uint": np.uint32,
    "short": np.int16,
    "uchar": np.uint8,
    "long": np.int64,
    "float4": np.float32,
    "half2": np.float16,
    "uint2": np.uint32,
}
TYPED = {
    "sum": ("simd_sum(x)", lambda x: np.broadcast_to(x.sum(0, dtype=x.dtype), x.shape)),
    "max": ("simd_max(x)", lambda x: np.broadcast_to(x.max(0), x.shape)),
    "xor": ("simd_shuffle_xor(x, 17)", lambda x: x[LANES ^ 17]),
    "down": ("simd_shuffle_down(x, 16)", lambda x: np.concatenate([x[16:], x[16:]])),
    "broadcast": ("simd_broadcast(x, 30)", lambda x: np.broadcast_to(x[30], x.shape)),
}


@pytest.fixture(scope="module")
def integer_file():
    arguments = "const device int* in [[buffer(0)]], device int* out [[buffer(1)]]"
    bodies = enumerate(f"  const int x = in[i];\n  out[i] = {expression};" for expression in INTEGER)
    return register("".join(kernel(body, arguments, f"test{n}") for n, body in bodies))


@pytest.mark.parametrize("expression", INTEGER)
def test_integers(integer_file, expression, rng):
    for seed in SEEDS:
        x = rng.integers(-1000, 1000, 32).astype(np.int32)
        y = np.zeros(32, np.int32)
        run(integer_file, f"test{list(INTEGER).index(expression)}", [x, y], seed=seed)
        np.testing.assert_array_equal(y, INTEGER[expression](x))


@pytest.fixture(scope="module")
def typed_file():
    parts = []
    for type_name in TYPES:
        for name, (expression, _) in TYPED.items():
            arguments = f"const device {type_name}* in [[buffer(0)]], device {type_name}* out [[buffer(1)]]"
            body = f"  const {type_name} x = in[i];\n  out[i] = {expression};"
            parts.append(kernel(body, arguments, f"{name}_{type_name}"))
    return register("".join(parts))


@pytest.mark.parametrize("name", TYPED)
@pytest.mark.parametrize("type_name", TYPES)
def test_types(typed_file, type_name, name, rng):
    width = int(type_name[-1]) if type_name[-1].isdigit() else 1
    x = rng.integers(0, 8, (32, width)).astype(TYPES[type_name])  # small: exact in every type, in any order
    y = np.zeros_like(x)
    run(typed_file, f"{name}_{type_name}", [x, y], seed=int(rng.integers(100)))
    np.testing.assert_array_equal(y, TYPED[name][1](x))


def test_lanes_that_do_not_exist_take_no_part(integer_file):
    """A simdgroup of 20 threads: reductions are over those, and a shuffle from elsewhere is not zero by chance."""
    x = np.arange(1, 21, dtype=np.int32)
    y = np.zeros(20, np.int32)
    run(integer_file, f"test{list(INTEGER).index('simd_sum(x)')}", [x, y], threads=20)
    np.testing.assert_array_equal(y, 210)
    run(integer_file, f"test{list(INTEGER).index('simd_shuffle(x, 31 - lane)')}", [x, y], threads=20)
    np.testing.assert_array_equal(y[:12], -1)
    np.testing.assert_array_equal(y[12:], x[:11:-1])


def test_simdgroups_are_apart(integer_file, rng):
    x = rng.integers(-9, 9, 128).astype(np.int32)
    for seed in SEEDS:
        y = np.zeros(128, np.int32)
        run(integer_file, f"test{list(INTEGER).index('simd_sum(x)')}", [x, y], threads=128, seed=seed)
        np.testing.assert_array_equal(y, np.repeat(x.reshape(4, 32).sum(1), 32))


def test_many_operations_in_a_row(rng):
    """A fast lane's next value must not overtake a value that a slow lane has yet to read."""
    body = """  int x = in[i];
  for (int k = 0; k < 50; ++k) {
    x = simd_shuffle_xor(x, k % 32) + simd_shuffle_rotate_up(x, 1) * 3;
  }
  out[i] = x;"""
    file = register(kernel(body, "const device int* in [[buffer(0)]], device int* out [[buffer(1)]]"))
    start = rng.integers(-1000, 1000, 32).astype(np.int32)
    expected = start.copy()
    for k in range(50):
        expected = expected[LANES ^ (k % 32)] + expected[(LANES - 1) % 32] * np.int32(3)
    for seed in range(5):
        y = np.zeros(32, np.int32)
        counts = run(file, "test", [start, y], seed=seed)
        np.testing.assert_array_equal(y, expected)
        assert counts["simd_operations"] == 100


ROW = (LANES // 4 & 4) + LANES // 2 % 4
COLUMN = (LANES // 4 & 2) * 2 + LANES % 2 * 2


@pytest.fixture(scope="module")
def matrix_file():
    parts = []
    for name in ("float", "half", "bfloat"):
        arguments = (
            f"const device {name}* a [[buffer(0)]], const device {name}* b [[buffer(1)]],\n"
            f"    const device float* c [[buffer(2)]], device float* d [[buffer(3)]]"
        )
        body = f"""  simdgroup_matrix<{name}, 8, 8> left, right;
  simdgroup_matrix<float, 8, 8> sum, product;
  simdgroup_load(left, a, 8);
  simdgroup_load(right, b, 8);
  simdgroup_load(sum, c, 8);
  simdgroup_multiply_accumulate(product, left, right, sum);
  simdgroup_store(product, d, 8);"""
        parts.append(kernel(body, arguments, f"multiply_{name}"))
    arguments = "const device float* a [[buffer(0)]], device float* d [[buffer(1)]]"
    body = """  simdgroup_float8x8 m;
  simdgroup_load(m, a, 16, ulong2(3, 2), {transpose});
  d[2 * i] = m.thread_elements()[0];
  d[2 * i + 1] = m.thread_elements()[1];"""
    parts.append(kernel(body.format(transpose="false"), arguments, "elements"))
    parts.append(kernel(body.format(transpose="true"), arguments, "transposed"))
    body = """  threadgroup float staged[64];
  simdgroup_float8x8 m = simdgroup_float8x8(2.0);
  simdgroup_float8x8 n = make_filled_simdgroup_matrix<float, 8, 8>(a[0]);
  simdgroup_float8x8 p;
  simdgroup_multiply(p, m, n);
  simdgroup_store(p, staged, 8);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  d[i] = staged[i];
  d[i + 32] = staged[i + 32];"""
    parts.append(kernel(body, arguments, "made"))
    return register("".join(parts))


@pytest.mark.parametrize("name", ["float", "half", "bfloat"])
def test_matrix_product(matrix_file, name, rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = {"float": np.float32, "half": np.float16, "bfloat": ml_dtypes.bfloat16}[name]
    a, b = (rng.standard_normal((8, 8)).astype(dtype) for _ in range(2))
    c, d = rng.standard_normal((8, 8)).astype(np.float32), np.zeros((8, 8), np.float32)
    counts = run(matrix_file, f"multiply_{name}", [a.view(np.uint8), b.view(np.uint8), c, d], seed=3)
    np.testing.assert_allclose(d, a.astype(np.float64) @ b.astype(np.float64) + c, rtol=SUM, atol=SUM)
    assert counts["matrix_operations"] == 1
    assert [counts[f"{each}_matrix_operations"] for each in ("half", "bfloat")] == [name == "half", name == "bfloat"]


def test_matrix_layout(matrix_file, rng):
    """Which lane holds which elements: Apple's layout, which kernels that use thread_elements() lean on."""
    a = rng.standard_normal((12, 16)).astype(np.float32)
    d = np.zeros((32, 2), np.float32)
    run(matrix_file, "elements", [a, d])
    np.testing.assert_array_equal(d[:, 0], a[2 + ROW, 3 + COLUMN])
    np.testing.assert_array_equal(d[:, 1], a[2 + ROW, 3 + COLUMN + 1])
    run(matrix_file, "transposed", [a, d])
    np.testing.assert_array_equal(d[:, 1], a[2 + COLUMN + 1, 3 + ROW])


def test_matrix_diagonal_and_filled(matrix_file):
    d = np.zeros(64, np.float32)
    run(matrix_file, "made", [np.array([1.5], np.float32), d])
    np.testing.assert_array_equal(d, 3.0)
