"""How the simulator runs a grid: threads, barriers, thread orders; and its message on kernels that never end."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from helpers.simulate import kernel, register, run

import mlx_mittens as mm
from mlx_mittens.simulator import Fault

OUT = "device int* out [[buffer(0)]]"


def fault(file, name, arguments, threadgroups=1, threads=32, **options) -> str:
    with pytest.raises(Fault) as caught:
        run(file, name, arguments, threadgroups, threads, **options)
    assert f"[{name}]" in str(caught.value)
    return str(caught.value)


ATTRIBUTES = {
    "thread_position_in_grid": 3,
    "thread_position_in_threadgroup": 3,
    "threadgroup_position_in_grid": 3,
    "threads_per_threadgroup": 3,
    "threadgroups_per_grid": 3,
    "threads_per_grid": 3,
    "dispatch_threads_per_threadgroup": 3,
    "thread_index_in_threadgroup": 1,
    "thread_index_in_simdgroup": 1,
    "thread_index_in_quadgroup": 1,
    "simdgroup_index_in_threadgroup": 1,
    "quadgroup_index_in_threadgroup": 1,
    "simdgroups_per_threadgroup": 1,
    "quadgroups_per_threadgroup": 1,
    "threads_per_simdgroup": 1,
    "thread_execution_width": 1,
}


@pytest.fixture(scope="module")
def attribute_file():
    text = ""
    for name, dimensions in ATTRIBUTES.items():
        type_name, xyz = ("uint3", ["value.x", "value.y", "value.z"]) if dimensions == 3 else ("uint", ["value"])
        stores = "".join(f"  out[n * {dimensions} + {d}] = {v};\n" for d, v in enumerate(xyz))
        text += f"""[[kernel]] void {name}(device uint* out [[buffer(0)]], {type_name} value [[{name}]],
    uint3 at [[thread_position_in_grid]], uint3 size [[threads_per_grid]]) {{
  const uint n = at.x + size.x * (at.y + size.y * at.z);
{stores}}}
"""
    return register(text)


@pytest.mark.parametrize("grid", [None, (7, 5, 3)])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes(attribute_file, name, grid):
    threadgroups, threads = (2, 2, 2), (4, 3, 2)
    size = grid or tuple(g * t for g, t in zip(threadgroups, threads))
    out = np.zeros((size[2], size[1], size[0], ATTRIBUTES[name]), np.uint32)
    run(attribute_file, name, [out], threadgroups, threads, grid=list(grid) if grid else None, seed=1)

    z, y, x = np.indices(size[::-1])
    at = np.stack([x, y, z], -1)
    in_threadgroup, group = at % threads, at // threads
    own = np.minimum(threads, size - group * threads)  # a threadgroup at the edge of the grid is cut short
    index = in_threadgroup[..., 0] + own[..., 0] * (in_threadgroup[..., 1] + own[..., 1] * in_threadgroup[..., 2])
    count = own.prod(-1)
    expected = {
        "thread_position_in_grid": at,
        "thread_position_in_threadgroup": in_threadgroup,
        "threadgroup_position_in_grid": group,
        "threads_per_threadgroup": own,
        "threadgroups_per_grid": threadgroups,
        "threads_per_grid": size,
        "dispatch_threads_per_threadgroup": threads,
        "thread_index_in_threadgroup": index[..., None],
        "thread_index_in_simdgroup": index[..., None] % 32,
        "thread_index_in_quadgroup": index[..., None] % 4,
        "simdgroup_index_in_threadgroup": index[..., None] // 32,
        "quadgroup_index_in_threadgroup": index[..., None] // 4,
        "simdgroups_per_threadgroup": (count[..., None] + 31) // 32,
        "quadgroups_per_threadgroup": (count[..., None] + 3) // 4,
        "threads_per_simdgroup": 32,
        "thread_execution_width": 32,
    }[name]
    np.testing.assert_array_equal(out, np.broadcast_to(expected, out.shape))


def test_attributes_take_the_type_that_is_asked_for():
    text = """[[kernel]] void test(device int* out [[buffer(0)]], ushort2 a [[thread_position_in_threadgroup]],
    uint b [[threadgroup_position_in_grid]], ushort c [[thread_index_in_simdgroup]]) {
  out[b * 4 + c] = a.x + 10 * a.y + 100 * int(b);
}
"""
    out = np.zeros((2, 4), np.int32)
    run(register(text), "test", [out], (2, 1, 1), (2, 2, 1))
    np.testing.assert_array_equal(out, [[0, 1, 10, 11], [100, 101, 110, 111]])


def test_threadgroup_memory_and_barriers(rng):
    """A reversal and a tree, over threads of several simdgroups, in several orders."""
    body = """  threadgroup float staged[256], sums[8][32];
  threadgroup float total;
  staged[i] = in[group * 256 + i];
  sums[simdgroup][lane] = in[group * 256 + i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint step = 4; step > 0; step /= 2) {
    if (simdgroup < step) {
      sums[simdgroup][lane] += sums[simdgroup + step][lane];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (simdgroup == 0) {
    const float sum = simd_sum(sums[0][lane]);
    if (lane == 0) {
      total = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[group * 256 + i] = staged[255 - i] + total;"""
    file = register(kernel(body, "const device float* in [[buffer(0)]], device float* out [[buffer(1)]]"))
    x = rng.integers(-50, 50, (3, 256)).astype(np.float32)
    for seed in range(6):
        y = np.zeros_like(x)
        counts = run(file, "test", [x, y], 3, 256, seed=seed)
        np.testing.assert_array_equal(y, x[:, ::-1] + x.sum(1, keepdims=True))
        assert counts["threadgroup_barriers"] == 3 * 5
        assert counts["threadgroup_bytes"] == 256 * 4 + 256 * 4 + 16


def test_threadgroup_memory_of_the_launch(rng):
    text = """[[kernel]] void test(const device float* in [[buffer(0)]], device float* out [[buffer(1)]],
    threadgroup float* staged [[threadgroup(0)]], uint i [[thread_position_in_threadgroup]]) {
  staged[i] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = staged[63 - i];
}
"""
    file = register(text)
    x, y = rng.standard_normal(64).astype(np.float32), np.zeros(64, np.float32)
    run(file, "test", [x, y], 1, 64, threadgroup_bytes=256)
    np.testing.assert_array_equal(y, x[::-1])
    assert "out of bounds" in fault(file, "test", [x, y], 1, 64, threadgroup_bytes=252)
    assert "32768" in fault(file, "test", [x, y], 1, 64, threadgroup_bytes=40000)


def test_seeds_change_the_order_and_only_they():
    """Which thread comes first, as an atomic counter tells."""
    body = """  out[i + group * 64] = atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);"""
    file = register(kernel(body, "device atomic_int* counter [[buffer(0)]], device int* out [[buffer(1)]]"))

    def order(seed):
        out = np.zeros((4, 64), np.int32)
        run(file, "test", [("inout", np.zeros(1, np.int32)), out], 4, 64, seed=seed)
        assert sorted(out.reshape(-1)) == list(range(256))
        return out

    np.testing.assert_array_equal(order(0).reshape(-1), range(256))
    orders = {seed: order(seed).tobytes() for seed in range(1, 6)}
    assert len(set(orders.values())) == 5
    assert all(order(seed).tobytes() == orders[seed] for seed in orders)


ATOMICS = {
    "add": ("int", lambda x: x.sum()),
    "sub": ("int", lambda x: -x.sum()),
    "min": ("int", lambda x: min(x.min(), 0)),
    "max": ("int", lambda x: max(x.max(), 0)),
    "or": ("uint", np.bitwise_or.reduce),
    "xor": ("uint", np.bitwise_xor.reduce),
    "and": ("uint", lambda x: 0),
    "add_float": ("float", lambda x: x.sum()),
}


@pytest.fixture(scope="module")
def atomic_file():
    parts = []
    for name, (type_name, _) in ATOMICS.items():
        call = f"atomic_fetch_{name.split('_')[0]}_explicit"
        arguments = (
            f"device atomic<{type_name}>* total [[buffer(0)]], const device {type_name}* in [[buffer(1)]],\n"
            f"    device {type_name}* out [[buffer(2)]]"
        )
        body = f"""  threadgroup atomic<{type_name}> own;
  if (i == 0) {{
    atomic_store_explicit(&own, 0, memory_order_relaxed);
  }}
  threadgroup_barrier(mem_flags::mem_threadgroup);
  {call}(total, in[group * 64 + i], memory_order_relaxed);
  {call}(&own, in[group * 64 + i], memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i == 0) {{
    out[group] = atomic_load_explicit(&own, memory_order_relaxed);
  }}"""
        parts.append(kernel(body, arguments, f"atomic_{name}"))
    body = """  int expected = 0;
  int wins = 0;
  if (atomic_compare_exchange_weak_explicit(owner, &expected, int(i + 1), memory_order_relaxed, memory_order_relaxed)) {
    wins = 1;
  }
  out[i] = wins + 2 * (expected == 0);"""
    parts.append(kernel(body, "device atomic_int* owner [[buffer(0)]], device int* out [[buffer(1)]]", "exchange"))
    return register("".join(parts))


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(atomic_file, name, rng):
    dtype = {"int": np.int32, "uint": np.uint32, "float": np.float32}[ATOMICS[name][0]]
    x = rng.integers(0 if dtype == np.uint32 else -99, 99, (3, 64)).astype(dtype)
    total, own = np.zeros(1, dtype), np.zeros(3, dtype)
    run(atomic_file, f"atomic_{name}", [("inout", total), x, own], 3, 64, seed=int(rng.integers(100)))
    assert total[0] == ATOMICS[name][1](x.reshape(-1))
    assert own.tolist() == [ATOMICS[name][1](row) for row in x]


def test_compare_exchange(atomic_file):
    owner, out = np.zeros(1, np.int32), np.zeros(64, np.int32)
    run(atomic_file, "exchange", [("inout", owner), out], 1, 64, seed=4)
    assert (out == 3).sum() == 1 and (out == 0).sum() == 63 and out[owner[0] - 1] == 3


# A barrier or a simd operation that some threads miss, and words that the message must have; ":2" is a body's line.
DIVERGENT = {
    "early_return": (
        "  if (i == 40) { return; }\n  threadgroup_barrier(mem_flags::mem_threadgroup);\n  out[i] = 1;",
        ["threadgroup_barrier", "missed by 1 of 64", "thread (40, 0, 0)", "has returned", ":2"],
    ),
    "barrier_in_a_branch": (
        "  if (i < 32) { threadgroup_barrier(mem_flags::mem_threadgroup); }\n  out[i] = 1;",
        ["threadgroup_barrier", "missed by 32 of 64", "has returned"],
    ),
    "two_barriers": (
        "  if (i < 32) {\n    threadgroup_barrier(mem_flags::mem_none);\n  } else {\n"
        "    threadgroup_barrier(mem_flags::mem_none);\n  }\n  out[i] = 1;",
        ["divergence", ":2", ":4"],
    ),
    "two_simdgroup_barriers": (
        "  if (lane < 7) {\n    simdgroup_barrier(mem_flags::mem_none);\n  } else {\n"
        "    simdgroup_barrier(mem_flags::mem_none);\n  }\n  out[i] = 1;",
        ["divergence", ":2", ":4"],
    ),
    "sum_in_a_branch": (
        "  out[i] = 0;\n  if (lane < 7) { out[i] = simd_sum(lane); }",
        ["simd_sum", "missed by 25 of 32", "has returned"],
    ),
    "two_sums": (
        "  if (lane < 7) { out[i] = simd_sum(lane); } else { out[i] = simd_sum(1u); }",
        ["simd_sum", "while", ":1"],
    ),
    "sum_against_shuffle": (
        "  if (lane & 1) {\n    out[i] = simd_sum(lane);\n  } else {\n    out[i] = simd_shuffle_xor(lane, 1);\n  }",
        ["simd_sum", "simd_shuffle_xor"],
    ),
    "loop_of_different_length": (
        "  int sum = 0;\n  for (uint k = 0; k < lane; ++k) { sum += simd_max(k); }\n  out[i] = sum;",
        ["simd_max", "missed", "has returned"],
    ),
    "simdgroup_barrier_missed": (
        "  if (lane != 3) { simdgroup_barrier(mem_flags::mem_threadgroup); }\n  out[i] = 1;",
        ["simdgroup_barrier", "missed by 1 of 32"],
    ),
    "barrier_against_sum": (
        "  if (simdgroup == 1 && lane < 4) {\n    out[i] = simd_sum(lane);\n  } else {\n"
        "    threadgroup_barrier(mem_flags::mem_none);\n    out[i] = 0;\n  }",
        ["simd_sum", "threadgroup_barrier", "waits at"],
    ),
    "quad_in_a_branch": (
        "  out[i] = 0;\n  if (lane % 4 < 2) { out[i] = quad_sum(lane); }",
        ["quad_sum", "missed by 2 of 4"],
    ),
    "matrix_in_a_branch": (
        "  simdgroup_float8x8 a = simdgroup_float8x8(1.0), b = a;\n"
        "  if (lane != 9) { simdgroup_multiply(b, a, a); }\n  out[i] = int(b.thread_elements()[0]);",
        ["simdgroup_multiply", "missed by 1 of 32"],
    ),
}
# The same shapes where all threads of the scope go the same way.
CONVERGENT = {
    "uniform_branch": "  out[i] = 0;\n  if (simdgroup == 1) { out[i] = simd_sum(lane); }",
    "whole_simdgroup_returns": "  out[i] = 1;\n  if (simdgroup == 1) { return; }\n  out[i] = simd_max(lane) - 30;",
    "loop_of_one_length": (
        "  int sum = 0;\n  for (uint k = 0; k < 3; ++k) {\n    sum += simd_max(k);\n"
        "    threadgroup_barrier(mem_flags::mem_none);\n  }\n  out[i] = sum;"
    ),
    "divergence_before_and_after": (
        "  uint x = lane;\n  if (lane < 9) { x *= 3; } else { x += 100; }\n  x = simd_sum(x);\n"
        "  if (lane & 1) { x += 1; } else { x -= 1; }\n  out[i] = simd_min(x);"
    ),
    "quads_on_their_own": "  out[i] = 0;\n  if (lane >= 16) { out[i] = quad_sum(lane); }",
}


@pytest.fixture(scope="module")
def divergence_file():
    """All kernels, compiled at once; messages name the lines of a text with one kernel alone."""
    bodies = {**{name: body for name, (body, _) in DIVERGENT.items()}, **CONVERGENT}
    return register("".join(f"#line 3\n{kernel(body, OUT, name)}" for name, body in bodies.items()))


@pytest.mark.parametrize("name", DIVERGENT)
def test_divergence(divergence_file, name):
    for watch in (True, False):
        for seed in (0, 1):
            message = fault(divergence_file, name, [np.zeros(64, np.int32)], 1, 64, seed=seed, watch=watch)
            assert "threadgroup (0, 0, 0)" in message
            before = 5  # lines before the body
            words = [f"{divergence_file}:{int(w[1:]) + before}" if w[0] == ":" else w for w in DIVERGENT[name][1]]
            if seed == 0:
                assert all(word in message for word in words), message


@pytest.mark.parametrize("name", CONVERGENT)
def test_no_divergence(divergence_file, name):
    for seed in range(4):
        run(divergence_file, name, [np.zeros(64, np.int32)], 1, 64, seed=seed)


def _in_rounds(rounds):
    """Of sums of all lanes but a third, which is another in each round, the digits in base 1,000."""
    return sum(1000**at * (496 - sum(range(k, 32, 3))) for at, k in enumerate(reversed(rounds)))


# Operations of the lanes that reach them, by Metal's rule: the results in the lanes of a simdgroup.
ACTIVE = {
    "sum": ("  if (lane < 7) { out[i] = simd_sum(lane + 1); }", [28] * 7),
    "sum_of_scattered_lanes": (
        "  if (lane % 5 == 3) { out[i] = simd_sum(lane); }",
        dict.fromkeys(range(3, 32, 5), 93),
    ),
    "least_of_those_left": (
        "  if (lane < 9) { return; }\n  out[i] = simd_min(lane);",
        dict.fromkeys(range(9, 32), 9),
    ),
    "prefix": (
        "  if (lane & 1) { out[i] = simd_prefix_exclusive_sum(lane); }",
        {lane: sum(range(1, lane, 2)) for lane in range(1, 32, 2)},
    ),
    "ballot": (
        "  if (lane > 27) { out[i] = int(uint(simd_vote::vote_t(simd_ballot(lane & 1))) >> 28); }",
        dict.fromkeys(range(28, 32), 10),
    ),
    "mask": (
        "  if (lane < 4) { out[i] = int(simd_vote::vote_t(simd_active_threads_mask())); }",
        [15] * 4,
    ),
    "all_and_any": ("  if (lane < 2) { out[i] = simd_all(lane < 2) * 2 + simd_any(lane > 1); }", [2, 2]),
    "first": (
        "  if (lane > 4 && lane < 8) { out[i] = 100 * simd_is_first() + simd_broadcast_first(int(lane)); }",
        {5: 105, 6: 5, 7: 5},
    ),
    "shuffle": ("  if (lane < 8) { out[i] = simd_shuffle_up(lane + 1, 1); }", [1, 1, 2, 3, 4, 5, 6, 7]),
    "loop_of_different_length": (
        "  int sum = 0;\n  for (uint k = 0; k < lane; ++k) { sum += simd_sum(1); }\n  out[i] = sum;",
        [sum(range(31, 31 - lane, -1)) for lane in range(32)],
    ),
    "quad": ("  if (lane % 4 < 3) { out[i] = quad_sum(1); }", {lane: 3 for lane in range(32) if lane % 4 < 3}),
    "quad_then_whole": (
        "  int sum = 0;\n  if (lane % 4 < 2) { sum = quad_sum(1); }\n  out[i] = simd_sum(sum);",
        [32] * 32,
    ),
    # Where lanes part, each branch works on its own; behind it all of them meet.
    "both_branches": (
        "  if (lane < 7) { out[i] = simd_sum(lane); } else { out[i] = simd_sum(1); }",
        [21] * 7 + [25] * 25,
    ),
    "sum_and_shuffle": (
        "  if (lane & 1) { out[i] = simd_sum(lane); } else { out[i] = simd_shuffle_xor(lane, 2); }",
        {lane: 256 if lane & 1 else lane ^ 2 for lane in range(32)},
    ),
    "branch_then_whole": ("  int x = 0;\n  if (lane < 8) { x = simd_sum(1); }\n  out[i] = simd_sum(x);", [64] * 32),
    "branches_then_whole": (
        "  int x = 0;\n  if (lane < 8) { x = simd_sum(1); } else if (lane < 10) { x = simd_sum(2); }\n"
        "  else { x = simd_max(int(lane)); }\n  out[i] = simd_sum(x);",
        [8 * 8 + 2 * 4 + 22 * 31] * 32,
    ),
    "nested_branches": (
        "  int x = 0;\n  if (lane < 16) {\n    if (lane & 1) { x = simd_sum(1); }\n    x += 100 * simd_sum(1);\n  }\n"
        "  out[i] = x + 10000 * simd_sum(1);",
        {lane: 320000 + (1600 + 8 * (lane & 1) if lane < 16 else 0) for lane in range(32)},
    ),
    "helper_in_a_branch_then_whole": (
        "  int x = 0;\n  if (lane < 8) { x = total_of(1); }\n  out[i] = total_of(x);",
        [64] * 32,
    ),
    "helper_in_both_branches": (
        "  int x = 0;\n  if (lane < 8) { x = total_of(1); } else { x = total_of(2); }\n  out[i] = total_of(x);",
        [8 * 8 + 24 * 48] * 32,
    ),
    "loop_then_whole": (
        "  int x = 0;\n  for (uint k = 0; k < lane % 3; ++k) { x += simd_sum(1); }\n  out[i] = simd_sum(x);",
        [11 * 21 + 10 * 31] * 32,
    ),
    "loop_in_a_branch": (
        "  int x = 0;\n  if (lane & 1) {\n    for (uint k = 0; k < 2 + lane / 32; ++k) { x += simd_sum(1); }\n"
        "  } else {\n    x = simd_max(int(lane));\n  }\n  out[i] = simd_sum(x);",
        [16 * 32 + 16 * 30] * 32,
    ),
    "loop_that_lanes_leave": (
        "  int x = 0;\n  for (uint k = 0; k < 4; ++k) {\n    if (lane == k) { break; }\n    x = simd_sum(1);\n  }\n"
        "  out[i] = x + 100 * simd_sum(1);",
        [3200, 3231, 3230, 3229] + [3228] * 28,
    ),
    # In a loop, which is not unrolled, they meet again at the end of each round.
    "round_that_lanes_skip": (
        "  int x = 0;\n  for (uint k = 0; k < 3 + lane / 32; ++k) {\n    if (lane % 3 == k) { continue; }\n"
        "    x = 1000 * x + simd_sum(lane);\n  }\n  out[i] = x;",
        {lane: _in_rounds([k for k in range(3) if k != lane % 3]) for lane in range(32)},
    ),
    "branch_in_a_loop": (
        "  int x = 0;\n  for (uint k = 0; k < 3 + lane / 32; ++k)\n    if (lane % 3 == k) x += simd_sum(lane);\n"
        "  out[i] = x;",
        {lane: sum(range(lane % 3, 32, 3)) for lane in range(32)},
    ),
    "operand_in_a_loop": (
        "  int x = 0;\n  uint k = 0;\n  do x += lane % 3 == k && simd_sum(lane) == 155; while (++k < 3 + lane / 32);\n"
        "  out[i] = x;",
        {lane: int(lane % 3 == 2) for lane in range(32)},
    ),
    "loop_that_lanes_leave_in_a_loop": (
        "  int x = 0;\n  for (uint k = 0; k < 2 + lane / 32; ++k) {\n    for (uint j = 0; j < 4 + lane / 32; ++j) {\n"
        "      if (lane % 4 == j) { break; }\n      x += simd_sum(1);\n    }\n  }\n  out[i] = x;",
        {lane: 2 * (0, 24, 40, 48)[lane % 4] for lane in range(32)},
    ),
    "loops_in_a_row": (
        "  int x = 0;\n  for (uint k = 0; k < lane % 4; ++k) {\n    if (k < 2) { x += simd_sum(1); }\n  }\n"
        "  for (uint k = 0; k < 2 + lane / 32; ++k) {\n    if (lane % 2 == k) { x += 100 * simd_sum(1); }\n  }\n"
        "  out[i] = x;",
        {lane: 1600 + (0, 24, 40, 40)[lane % 4] for lane in range(32)},
    ),
    "loop_of_a_function": (
        "  int x = in_rounds(lane, lane % 4);\n  out[i] = x + 1000 * in_rounds(lane, 4 + lane / 32);",
        {lane: (0, 0, 8, 8)[lane % 4] + 128000 for lane in range(32)},
    ),
    "head_of_a_loop": (
        "  int x = 0;\n  uint left = lane % 4;\n  while (simd_any(left > 0)) {\n    if (left == 0) { continue; }\n"
        "    --left;\n    x += simd_sum(1);\n  }\n  out[i] = x + 1000 * simd_sum(1);",
        {lane: 32000 + (0, 24, 40, 48)[lane % 4] for lane in range(32)},
    ),
    "cases_of_a_switch": (
        "  int x = 0;\n  switch (lane % 3) {\n    case 0: x = simd_sum(1); break;\n"
        "    case 1: x = simd_sum(2); break;\n    default: x = simd_sum(3);\n  }\n  out[i] = x + 100 * simd_sum(1);",
        {lane: 3200 + (11, 22, 30)[lane % 3] for lane in range(32)},
    ),
    "branch_then_quad": (
        "  int x = 0;\n  if (lane == 0) { x = simd_sum(5); }\n  out[i] = quad_sum(x + 1);",
        [9] * 4 + [4] * 28,
    ),
    "branch_then_barrier": (
        "  int x = 0;\n  if (lane < 8) { x = simd_sum(1); }\n  simdgroup_barrier(mem_flags::mem_none);\n"
        "  out[i] = simd_sum(x);",
        [64] * 32,
    ),
    "prefix_in_both_branches": (
        "  if (lane & 1) { out[i] = simd_prefix_inclusive_sum(1); } else { out[i] = -simd_prefix_exclusive_sum(1); }",
        {lane: lane // 2 + 1 if lane & 1 else -(lane // 2) for lane in range(32)},
    ),
    "twice": (
        "  threadgroup int shared[2];\n  if (lane < 3) { shared[simdgroup] = simd_sum(1) + simd_sum(2); }\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  out[i] = shared[simdgroup] + simd_sum(1);",
        [41] * 32,
    ),
}


@pytest.fixture(scope="module")
def active_file():
    """Before the barrier some lanes wait for the others, where none returns."""
    wait = "\n  threadgroup_barrier(mem_flags::mem_threadgroup);"
    bodies = {name: body + ("" if "return" in body else wait) for name, (body, _) in ACTIVE.items()}
    kernels = "".join(kernel("  out[i] = -1;\n" + body, OUT, name) for name, body in bodies.items())
    helpers = """int total_of(int x) { return simd_sum(x); }
    int in_rounds(uint lane, uint rounds) {
      int x = 0;
      for (uint k = 0; k < rounds; ++k) {
        if (lane % 4 == 3 - k || rounds == 4) { x += simd_sum(1); }
      }
      return x;
    }
    """
    return register(helpers + kernels)


@pytest.mark.parametrize("name", ACTIVE)
def test_operations_of_active_lanes(active_file, name):
    expected = ACTIVE[name][1]
    values = expected if isinstance(expected, dict) else dict(enumerate(expected))
    for seed in range(4):
        out = np.zeros(64, np.int32)
        run(active_file, name, [out], 1, 64, seed=seed, active_lanes=True)
        for simdgroup in out.reshape(2, 32).tolist():
            assert simdgroup == [values.get(lane, -1) for lane in range(32)]


@pytest.mark.parametrize(
    "name",
    ["barrier_in_a_branch", "two_barriers", "two_simdgroup_barriers", "simdgroup_barrier_missed", "matrix_in_a_branch"],
)
def test_what_no_lane_may_miss(divergence_file, name):
    message = fault(divergence_file, name, [np.zeros(64, np.int32)], 1, 64, active_lanes=True)
    assert "divergence" in message


def test_a_lane_that_is_not_active_has_no_value():
    """A shuffle from it is undefined in Metal; here it is NaN."""
    file = register(
        kernel("  if (lane < 8) { out[i] = simd_shuffle_down(float(lane), 4); }", "device float* out [[buffer(0)]]")
    )
    out = np.zeros(32, np.float32)
    run(file, "test", [("inout", out)], 1, 32, active_lanes=True)
    assert out[:4].tolist() == [4, 5, 6, 7] and np.isnan(out[4:8]).all()


def test_kernels_of_metal_kernel_have_active_lanes():
    source = "uint i = thread_position_in_grid.x; y[i] = 0; if (i < 5) { y[i] = simd_sum(x[i]); }"
    kernel = mm.simulator.metal_kernel("sums", ["x"], ["y"], source)
    sizes = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(32,)], "output_dtypes": [mx.float32]}
    assert kernel(inputs=[mx.arange(32.0)], **sizes)[0].tolist() == [10.0] * 5 + [0.0] * 27


def test_kernels_that_lean_on_early_exits():
    """As MLX's gemv does: on a GPU the lanes that have returned do not hold up the others of their simdgroup."""
    body = "  out[i] = 2;\n  if (lane != 0) { return; }\n  threadgroup_barrier(mem_flags::mem_none);"
    file = register(kernel(body, OUT))
    out = np.zeros(64, np.int32)
    assert "missed" in fault(file, "test", [out], 1, 64)
    run(file, "test", [out], 1, 64, early_exits=True)
    assert (out == 2).all()


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize(
    "body",
    [
        "  while (true) { }",
        "  for (uint k = 1; k != 0; k |= 1) { out[i] = k; }",
        "  while (simd_sum(1) == 32) { }",
        "  for (;;) { threadgroup_barrier(mem_flags::mem_none); }",
    ],
)
def test_endless_loops(body, watch):
    file, out = register(kernel(body, OUT)), np.zeros(64, np.int32)
    message = fault(file, "test", [out], 1, 64, watch=watch, step_limit=1_000_000)
    assert "1000000 steps (step_limit)" in message


def test_a_long_loop_is_not_endless():
    file = register(kernel("  int x = i;\n  for (int k = 0; k < 100000; ++k) { x = x * 3 + k; }\n  out[i] = x;", OUT))
    run(file, "test", [np.zeros(64, np.int32)], 1, 64)


def test_launches_that_no_gpu_takes():
    file = register(
        "[[kernel, max_total_threads_per_threadgroup(64)]] void few(device int* out [[buffer(0)]],\n"
        "    uint i [[thread_position_in_threadgroup]]) { out[i] = 1; }\n"
        "template <int n> [[kernel, max_total_threads_per_threadgroup(n * 32)]] void some(\n"
        "    device int* out [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) { out[i] = 1; }\n"
        'template [[host_name("some_2")]] [[kernel]] decltype(some<2>) some<2>;\n'
        + kernel("  threadgroup float big[8200];\n  big[i] = 1;\n  out[i] = int(big[i]);", OUT, "large")
        + kernel("  out[i] = 1;", OUT, "plain")
    )
    out = np.zeros(2048, np.int32)
    assert "2048 threads" in fault(file, "plain", [out], 1, 2048)
    assert "1 to 64" in fault(file, "few", [out], 1, 65)
    assert "1 to 64" in fault(file, "some_2", [out], 1, 65)
    assert "0 threads" in fault(file, "plain", [out], 1, (32, 0, 1))
    message = fault(file, "large", [out], 1, 32)
    assert "32800 bytes" in message and '"big"' in message and "32768" in message
    with pytest.raises(ValueError, match="no kernel"):
        run(file, "missing", [out])


def test_arrays_that_claim_more_than_their_buffer():
    x = mx.zeros((8,))
    mx.eval(x)
    beyond = mx.as_strided(x, (4, 1024), (1024, 1))
    with mm.simulator.enabled(), pytest.raises(Fault, match=r"argument 0 'x' is bound to 16384 bytes, its buffer"):
        mx.eval(mm.rms_norm(beyond, None, 1e-5))


def test_no_threadgroups_is_no_work():
    out = np.full(4, 7, np.int32)
    with pytest.raises(Fault, match="not written"):
        run(register(kernel("  out[i] = 1;", OUT)), "test", [out], (0, 1, 1), 4)
    assert (out == 7).all()


def test_outputs_start_as_nan_and_a_fault_leaves_them_alone():
    file = register(
        kernel("  out[i] = in[i];\n  if (i == 3) { return; }\n  threadgroup_barrier(mem_flags::mem_none);",
               "const device float* in [[buffer(0)]], device float* out [[buffer(1)]]", "faulty")
        + kernel("  if (i != 3) { out[i] = in[i]; }",
                 "const device float* in [[buffer(0)]], device float* out [[buffer(1)]]", "holey")
    )  # fmt: skip
    x, y = np.ones(8, np.float32), np.full(8, 5, np.float32)
    fault(file, "faulty", [x, y], 1, 8)
    assert (y == 5).all()
    run(file, "holey", [x, y], 1, 8, complete=False)
    assert np.isnan(y[3]) and (np.delete(y, 3) == 1).all()


def test_function_constants():
    text = """constant bool twice [[function_constant(0)]];
constant int offset [[function_constant(1)]];
constant float scale [[function_constant(7)]];
constant float used = is_function_constant_defined(scale) ? scale : 10.0;
[[kernel]] void test(device float* out [[buffer(0)]], const device float* more [[buffer(1), function_constant(twice)]],
    uint i [[thread_position_in_threadgroup]]) {
  out[i] = (i + offset) * used;
  if (twice) {
    out[i] += more[i];
  }
}
"""
    file = register(text)
    out = np.zeros(4, np.float32)
    run(file, "test", [("output", out)], 1, 4, constants={1: 5})
    np.testing.assert_array_equal(out, [50, 60, 70, 80])
    more = np.arange(4, dtype=np.float32)
    run(file, "test", [("output", out), ("input", more)], 1, 4, constants={0: True, 1: 0, 7: 2.5})
    np.testing.assert_array_equal(out, [0, 3.5, 7, 10.5])


def test_threads_of_the_host_take_turns(rng):
    arguments = "const device int* in [[buffer(0)]], device int* out [[buffer(1)]]"
    file = register(kernel("  out[i] = simd_sum(in[i]);", arguments))
    x = rng.integers(0, 99, (8, 32)).astype(np.int32)
    y = np.zeros_like(x)
    workers = [threading.Thread(target=run, args=(file, "test", [x[k], y[k]])) for k in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    np.testing.assert_array_equal(y, np.broadcast_to(x.sum(1, keepdims=True), x.shape))
