"""The tile library, one operation at a time, in the simulator."""

import functools
from pathlib import Path

import numpy as np
import pytest
from helpers.simulate import kernel, register, run
from helpers.tolerances import ROUNDINGS, SUM

from mlx_mittens.frontend.check import dialect
from mlx_mittens.simulator import Fault

WHOLE_TILES = (Path(__file__).parents[2] / "examples" / "ladder" / "tiles.h").read_text()
HEADERS = '#include "mittens/tile.h"\n#include "mittens/fragment_layout.h"\n'
INCLUDE = f"{HEADERS}{WHOLE_TILES}using namespace mittens;\n"
TYPES = {"float": np.float32, "half": np.float16}
R, C = 2, 3  # matrices of the tiles here: 16 rows, 24 columns


registered = functools.cache(register)  # a text that comes again is not compiled again


def simulate(body, arguments, arrays, *, threads=32, seed=5):
    """Runs a body; arrays are bound in order, the last is written and returned."""
    run(registered(INCLUDE + kernel(body, arguments)), "test", list(arrays), 1, threads, seed=seed)
    return arrays[-1]


def draw(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def on_tile(rng, operations, result_shape=(16, 24), result="store<float>(x, y, 24, lane);", at=0):
    """Runs operations on a float tile x [16, 24] and an integer `at`; returns x and y."""
    x = draw(rng, 16, 24)
    y = np.zeros(result_shape, np.float32)
    body = f"Tile<float, {R}, {C}> x; load(x, given, 24, lane);\n{operations}\n{result}"
    arguments = "const device float* given [[buffer(0)]], constant int& at [[buffer(1)]], device float* y [[buffer(2)]]"
    return x, simulate(body, arguments, [x, np.int32(at).tobytes(), y])


@pytest.mark.parametrize("space", ["device", "threadgroup"])
@pytest.mark.parametrize("name, dtype", TYPES.items())
def test_load_and_store(rng, name, dtype, space):
    """With a stride, in device and in threadgroup memory."""
    x, y = draw(rng, 16, 40, dtype=dtype), np.zeros((16, 30), np.float32)
    through = f"Tile<{name}, 2, 3> tile; load(tile, x, 40, lane);"
    if space == "threadgroup":
        through = (
            f"threadgroup {name} shared[16 * 25]; Tile<{name}, 2, 3> first; load(first, x, 40, lane);"
            f"store<{name}>(first, shared, 25, lane); simdgroup_barrier(mem_flags::mem_threadgroup);"
            f"Tile<{name}, 2, 3> tile; load(tile, shared, 25, lane);"
        )
    body = through + "fill_rest(y, lane); simdgroup_barrier(mem_flags::mem_device); store<float>(tile, y, 30, lane);"
    rest = "inline void fill_rest(device float* y, uint lane) { for (uint i = lane; i < 480; i += 32) { y[i] = 0; } }\n"
    file = register(
        INCLUDE + rest + kernel(body, f"const device {name}* x [[buffer(0)]], device float* y [[buffer(1)]]")
    )
    run(file, "test", [x, y], seed=3)
    np.testing.assert_array_equal(y[:, :24], x[:, :24].astype(np.float32))
    assert not y[:, 24:].any()


@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 24), (8, 8), (9, 17), (16, 23), (0, 5), (16, 24)])
def test_ragged_edges(rng, rows, columns):
    """Elements outside are neither read nor written: the arrays end there."""
    x, y = draw(rng, max(rows, 1), max(columns, 1)), np.full((16, 24), np.nan, np.float32)
    declared = "Tile<float, 2, 3> tile;"
    body = declared + "load(tile, x, size[2], size[0], size[1], -7.0f, lane); store<float>(tile, y, 24, lane);"
    size = np.array([rows, columns, x.shape[1]], np.uint32).tobytes()
    arguments = "const device float* x [[buffer(0)]], constant uint* size [[buffer(1)]], device float* y [[buffer(2)]]"
    simulate(body, arguments, [x, size, y])
    expected = np.full((16, 24), -7, np.float32)
    expected[:rows, :columns] = x[:rows, :columns]
    np.testing.assert_array_equal(y, expected)
    if rows:
        z = np.zeros((rows, columns), np.float32)
        body = declared + "load(tile, x, 24, lane); store<float>(tile, y, size[1], size[0], size[1], lane);"
        simulate(body, arguments, [y, size, z])
        np.testing.assert_array_equal(z, expected[:rows, :columns])


def test_a_store_past_the_edge_is_seen(rng):
    with pytest.raises(Fault, match="out of bounds"):
        simulate(
            "Tile<float, 2, 3> tile; fill(tile, 1.0f); store<float>(tile, y, 24, 16, 24, lane);",
            "device float* y [[buffer(0)]]",
            [np.zeros((15, 24), np.float32)],
        )


@pytest.mark.parametrize("name, dtype", TYPES.items())
@pytest.mark.parametrize("transpose", [False, True], ids=["ab", "abt"])
def test_products(rng, name, dtype, transpose):
    """[16, 40] by [40, 24], either as it is or transposed, added to the output's contents."""
    inner = 40
    a = draw(rng, 16, inner, dtype=dtype)
    b = draw(rng, *((24, inner) if transpose else (inner, 24)), dtype=dtype)
    of_b = "3, 5" if transpose else "5, 3"
    call = "multiply_add_abt(sums, a, b, lane);" if transpose else "multiply_add(sums, a, b);"
    body = (
        f"Tile<{name}, 2, 5> a; load(a, left, {a.shape[1]}, lane);"
        f"Tile<{name}, {of_b}> b; load(b, right, {b.shape[1]}, lane);"
        f"Tile<float, 2, 3> sums; fill(sums, 1.0f); {call} store<float>(sums, y, 24, lane);"
    )
    arguments = (
        f"const device {name}* left [[buffer(0)]], const device {name}* right [[buffer(1)]],"
        "device float* y [[buffer(2)]]"
    )
    y = simulate(body, arguments, [a, b, np.zeros((16, 24), np.float32)])
    a, b = a.astype(np.float64), b.astype(np.float64)
    exact = 1 + a @ (b.T if transpose else b)
    np.testing.assert_allclose(y, exact, rtol=0, atol=SUM * np.abs(exact).max())


@pytest.mark.parametrize("name", [*TYPES, "bfloat"])
def test_transposed(rng, name):
    """Small integers, which all types have; a pair of 16-bit ones is shuffled as one word."""
    given = rng.integers(-100, 100, (16, 24)).astype(np.float32)
    body = (
        f"Tile<float, 2, 3> x; load(x, given, 24, lane); Tile<{name}, 2, 3> tile = converted<{name}>(x);"
        f"const Tile<{name}, 3, 2> turned = transposed(tile, lane); store<float>(turned, y, 16, lane);"
    )
    arguments = "const device float* given [[buffer(0)]], device float* y [[buffer(1)]]"
    y = simulate(body, arguments, [given, np.zeros((24, 16), np.float32)])
    np.testing.assert_array_equal(y, given.T)


def test_conversion(rng):
    x, y = on_tile(
        rng, "const Tile<half, 2, 3> narrow = converted<half>(x);", result="store<float>(narrow, y, 24, lane);"
    )
    np.testing.assert_array_equal(y, x.astype(np.float16).astype(np.float32))


OF_ROWS = "if (tile_column(lane) == 0) { for (uint r = 0; r < 2; ++r) { y[r * 8 + tile_row(lane)] = values.at[r]; } }"


@pytest.mark.parametrize("start", [-1e30, 0.5])
def test_reductions(rng, start):
    """Of rows, starting from earlier values."""
    rows = f"RowValues<2> values; fill(values, float({start}));"
    x, y = on_tile(rng, rows + "row_max(x, values);", (16,), OF_ROWS)
    np.testing.assert_array_equal(y, np.maximum(x.max(1), np.float32(start)))
    if start > 0:
        x, y = on_tile(rng, rows + "row_sum(x, values);", (16,), OF_ROWS)
        np.testing.assert_allclose(y, x.sum(1) + start, atol=SUM)
        part = (
            "row_sum_of_lane(x, values); for (int r = 0; r < 2; ++r) { values.at[r] = lanes_of_row_sum(values.at[r]); }"
        )
        x, y = on_tile(rng, "RowValues<2> values; fill(values, 0.0f);" + part, (16,), OF_ROWS)
        np.testing.assert_allclose(y, x.sum(1), atol=SUM)


def test_maps(rng):
    """Broadcast over rows, and by element."""
    maxima = "RowValues<2> values; fill(values, -1e30f); row_max(x, values);"
    x, y = on_tile(rng, maxima + "subtract_rows(x, values); exp2_of(x);")
    np.testing.assert_allclose(y, np.exp2(x - x.max(1, keepdims=True)), rtol=SUM)
    x, y = on_tile(rng, maxima + "multiply_rows(x, values); multiply(x, 3.0f);")
    np.testing.assert_allclose(y, 3 * x * x.max(1, keepdims=True), rtol=ROUNDINGS)
    x, y = on_tile(rng, "const Tile<float, 2, 3> other = x; add(x, other);")
    np.testing.assert_array_equal(y, 2 * x)


@pytest.mark.parametrize("at", [-30, -8, -3, 0, 1, 5, 8, 23, 24, 40])
def test_causal_fill(rng, at):
    row, column = np.mgrid[:16, :24]
    x, y = on_tile(rng, "fill_from(x, at, -9.0f, lane);", at=at)
    np.testing.assert_array_equal(y, np.where(column >= row + at, np.float32(-9), x))


def test_a_macs_compiler_would_take_all_of_it():
    """Every function of the library, instantiated."""
    body = """
      Tile<half, 2, 3> a; load(a, x, 24, lane);
      Tile<half, 3, 2> b = transposed(a, lane);
      Tile<float, 2, 2> sums; fill(sums, 0.0f); multiply_add(sums, a, b); multiply_add_abt(sums, a, a, lane);
      store<half>(sums, y, 16, lane);
    """
    file = register(INCLUDE + kernel(body, "const device half* x [[buffer(0)]], device half* y [[buffer(1)]]"))
    assert dialect.check(file) == []
