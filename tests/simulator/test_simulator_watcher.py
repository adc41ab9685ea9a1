"""The memory watcher: planted faults of every kind, each beside a sound twin: it neither misses nor cries wolf."""

from textwrap import dedent

import numpy as np
import pytest
from helpers.simulate import HEADER, kernel, register, run

from mlx_mittens.simulator import Fault

# 64 threads a threadgroup, two threadgroups; x and y have 128 floats, counters 4; `at` is the thread's own element.
ARGUMENTS = (
    "const device float* x [[buffer(0)]], device float* y [[buffer(1)]], device atomic_uint* counters [[buffer(2)]],\n"
    "    constant int4& params [[buffer(3)]]"
)
MACROS = """
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup);
#define SIMD_BARRIER simdgroup_barrier(mem_flags::mem_threadgroup);
#define at (group * 64 + i)
#define relaxed memory_order_relaxed
"""


class Plant:
    """Words that the message must have, a faulty body, and a sound one that differs as little as it can."""

    def __init__(self, words, faulty, sound):
        self.words, self.faulty, self.sound = words, dedent(faulty).strip(), dedent(sound).strip()


PLANTS = {
    # Races in threadgroup memory.
    "no_barrier_after_write": Plant(
        ["race", '"a"'],
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        a[i] = x[i];
        y[at] = a[63 - i];
        """,
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        a[i] = x[i];
        BARRIER
        y[at] = a[63 - i];
        """,
    ),
    "no_barrier_before_rewrite": Plant(
        ["race", '"a"'],
        """
        threadgroup float a[64];
        a[i] = x[i];
        BARRIER
        const float v = a[63 - i];
        a[i] = v;
        y[at] = v;
        """,
        """
        threadgroup float a[64];
        a[i] = x[i];
        BARRIER
        const float v = a[63 - i];
        BARRIER
        a[i] = v;
        y[at] = v;
        """,
    ),
    "simdgroup_barrier_across_simdgroups": Plant(
        ["race", '"a"'],
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        a[i] = x[i];
        SIMD_BARRIER
        y[at] = a[i ^ 32];
        """,
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        a[i] = x[i];
        SIMD_BARRIER
        y[at] = a[i ^ 16];
        """,
    ),
    "no_barrier_within_a_simdgroup": Plant(
        ["race"],
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        a[i] = x[i];
        y[at] = a[i ^ 1];
        """,
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        a[i] = x[i];
        SIMD_BARRIER
        y[at] = a[i ^ 1];
        """,
    ),
    "reads_on_both_sides_of_a_simdgroup_barrier": Plant(
        ["race", '"a"'],
        """
        threadgroup float a[64];
        a[i] = x[i];
        SIMD_BARRIER
        const float v = lane >= 1 ? a[i - 1] : 0;
        a[i] += v;
        SIMD_BARRIER
        y[at] = a[i];
        """,
        """
        threadgroup float a[64];
        a[i] = x[i];
        SIMD_BARRIER
        const float v = lane >= 1 ? a[i - 1] : 0;
        SIMD_BARRIER
        a[i] += v;
        SIMD_BARRIER
        y[at] = a[i];
        """,
    ),
    "broadcast_read_before_a_rewrite": Plant(
        ["race", '"a"'],
        """
        threadgroup float a[2];
        if (lane == 0) { a[simdgroup] = x[i]; }
        SIMD_BARRIER
        y[at] = a[simdgroup];
        if (lane == 0) { y[at] += a[simdgroup]; a[simdgroup] += 1; }
        SIMD_BARRIER
        y[at] += a[simdgroup];
        """,
        """
        threadgroup float a[2];
        if (lane == 0) { a[simdgroup] = x[i]; }
        SIMD_BARRIER
        y[at] = a[simdgroup];
        SIMD_BARRIER
        if (lane == 0) { y[at] += a[simdgroup]; a[simdgroup] += 1; }
        SIMD_BARRIER
        y[at] += a[simdgroup];
        """,
    ),
    "reads_of_two_simdgroups": Plant(
        ["race", '"a"'],
        """
        threadgroup float a[64];
        a[i] = x[i];
        BARRIER
        float v = a[i ^ 32];
        SIMD_BARRIER
        v += a[i];
        SIMD_BARRIER
        a[i] = v;
        y[at] = v;
        """,
        """
        threadgroup float a[64];
        a[i] = x[i];
        BARRIER
        float v = a[i ^ 32];
        SIMD_BARRIER
        v += a[i];
        BARRIER
        a[i] = v;
        y[at] = v;
        """,
    ),
    "simd_operation_is_no_barrier": Plant(
        ["race"],
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        a[i] = simd_sum(x[i]);
        y[at] = a[i ^ 1] + simd_max(x[i]);
        """,
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        a[i] = simd_sum(x[i]);
        y[at] = a[i] + simd_max(x[i]);
        """,
    ),
    "barrier_without_memory": Plant(
        ["race"],
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        a[i] = x[i];
        threadgroup_barrier(mem_flags::mem_none);
        y[at] = a[63 - i];
        """,
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        a[i] = x[i];
        threadgroup_barrier(mem_flags::mem_none | mem_flags::mem_threadgroup);
        y[at] = a[63 - i];
        """,
    ),
    "barrier_of_the_other_memory": Plant(
        ["race"],
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        a[i] = x[i];
        threadgroup_barrier(mem_flags::mem_device);
        y[at] = a[63 - i];
        """,
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        a[i] = x[i];
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
        y[at] = a[63 - i];
        """,
    ),
    "two_write_one_place": Plant(
        ["race", "written by"],
        """
        threadgroup float a[64];
        a[i / 2] = x[i];
        BARRIER
        y[at] = a[i / 2];
        """,
        """
        threadgroup float a[64];
        if (i % 2 == 0) { a[i / 2] = x[i]; }
        BARRIER
        y[at] = a[i / 2];
        """,
    ),
    "second_round_overtakes": Plant(
        ["race"],
        """
        threadgroup float a;
        float sum = 0;
        for (int k = 0; k < 3; ++k) {
        if (i == 0) { a = k; }
        BARRIER
        sum += a;
        }
        y[at] = sum;
        """,
        """
        threadgroup float a;
        float sum = 0;
        for (int k = 0; k < 3; ++k) {
        if (i == 0) { a = k; }
        BARRIER
        sum += a;
        BARRIER
        }
        y[at] = sum;
        """,
    ),
    "neighbour_halves_of_one_word": Plant(
        ["race"],
        """
        threadgroup half a[64];
        a[i] = half(x[i]);
        a[(i + 1) % 64] = 0;
        BARRIER
        y[at] = a[i];
        """,
        """
        threadgroup half a[64];
        a[i] = half(x[i]);
        BARRIER
        y[at] = a[i];
        """,
    ),
    "vector_over_scalars": Plant(
        ["race"],
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        a[i] = x[i];
        SIMD_BARRIER
        y[at] = (*(threadgroup float4*)&a[(63 - i) / 4 * 4]).x;
        """,
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        a[i] = x[i];
        SIMD_BARRIER
        y[at] = (*(threadgroup float4*)&a[i / 4 * 4]).x;
        """,
    ),
    "atomic_against_plain": Plant(
        ["race", "atomic"],
        """
        threadgroup atomic_uint n;
        if (i == 0) { atomic_store_explicit(&n, 0u, relaxed); }
        BARRIER
        atomic_fetch_add_explicit(&n, 1u, relaxed);
        y[at] = *(threadgroup uint*)&n;
        """,
        """
        threadgroup atomic_uint n;
        if (i == 0) { atomic_store_explicit(&n, 0u, relaxed); }
        BARRIER
        atomic_fetch_add_explicit(&n, 1u, relaxed);
        BARRIER
        y[at] = *(threadgroup uint*)&n;
        """,
    ),
    "matrix_store_unguarded": Plant(
        ["race"],
        """
        threadgroup float a[64];
        simdgroup_float8x8 m = simdgroup_float8x8(1.0);
        if (simdgroup == 0) { simdgroup_store(m, a, 8); }
        simdgroup_barrier(mem_flags::mem_none);
        y[at] = simdgroup == 0 ? a[lane] : 0;
        """,
        """
        threadgroup float a[64];
        simdgroup_float8x8 m = simdgroup_float8x8(1.0);
        if (simdgroup == 0) { simdgroup_store(m, a, 8); }
        SIMD_BARRIER
        y[at] = simdgroup == 0 ? a[lane] : 0;
        """,
    ),
    # Races in device memory.
    "device_neighbour": Plant(
        ["race", '"y"'],
        """
        y[at] = x[i];
        BARRIER
        y[at] += y[group * 64 + (i + 1) % 64];
        """,
        """
        y[at] = x[i];
        threadgroup_barrier(mem_flags::mem_device);
        const float v = y[group * 64 + (i + 1) % 64];
        threadgroup_barrier(mem_flags::mem_device);
        y[at] += v;
        """,
    ),
    "threadgroups_write_one_place": Plant(
        ["race between threadgroups", "written by thread", "threadgroup (0, 0, 0)"],
        """
        y[i] = x[i] + at;
        y[64 + i] = x[i];
        """,
        """
        y[at] = x[i];
        """,
    ),
    "threadgroup_reads_another": Plant(
        ["race between threadgroups"],
        """
        y[at] = x[i];
        threadgroup_barrier(mem_flags::mem_device);
        if (group == 1) { y[64 + i] += y[i]; }
        """,
        """
        y[at] = x[i];
        threadgroup_barrier(mem_flags::mem_device);
        if (group == 1) { y[64 + i] += x[i]; }
        """,
    ),
    "plain_read_of_a_counter": Plant(
        ["race", "counters"],
        """
        atomic_fetch_add_explicit(&counters[0], 1u, relaxed);
        y[at] = float(*(device uint*)&counters[0]);
        """,
        """
        y[at] = float(atomic_fetch_add_explicit(&counters[0], 1u, relaxed));
        """,
    ),
    # Outside of buffers and arrays.
    "read_past_the_end": Plant(
        ["reads 4 bytes", "byte 512", '"x"', "512 bytes", "out of bounds"],
        """
        y[at] = x[group * 64 + i + 1];
        """,
        """
        y[at] = x[at];
        """,
    ),
    "read_before_the_start": Plant(
        ["byte -4", '"x"', "out of bounds"],
        """
        y[at] = x[int(group * 64 + i) - 1];
        """,
        """
        y[at] = x[max(int(group * 64 + i) - 1, 0)];
        """,
    ),
    "write_past_the_end": Plant(
        ["writes 4 bytes", '"y"', "byte 512"],
        """
        y[at] = 0;
        if (group == 1 && i == 63) { y[65 + i] = 0; }
        """,
        """
        y[at] = 0;
        if (group == 1 && i == 63) { y[64 + i] = 0; }
        """,
    ),
    "write_far_away": Plant(
        ["writes", "out of bounds", '"y"'],
        """
        y[at] = 0;
        y[(params.x + i) * 10000000] = 0;
        """,
        """
        y[at] = 0;
        if (params.x == 7) { y[(params.x + i) * 10000000] = 0; }
        """,
    ),
    "negative_index_that_wraps": Plant(
        ["byte 17179869180", '"x"', "out of bounds"],
        """
        const uint before = i - 1;
        y[at] = x[before];
        """,
        """
        const uint before = i - 1;
        y[at] = i ? x[before] : 0;
        """,
    ),
    "vector_over_the_end": Plant(
        ["reads 4 bytes", "byte 524", "out of bounds"],
        """
        y[at] = (*(const device float4*)(x + (i + 1) * 2 / 4 * 4)).w;
        """,
        """
        y[at] = (*(const device float4*)(x + i * 2 / 4 * 4)).w;
        """,
    ),
    "threadgroup_array_past_the_end": Plant(
        ["out of bounds", 'threadgroup array "a"'],
        """
        threadgroup float a[64];
        a[i] = 0;
        BARRIER
        y[at] = a[i + params.x];
        """,
        """
        threadgroup float a[65];
        a[i] = 0;
        if (i == 0) { a[64] = 0; }
        BARRIER
        y[at] = a[i + params.x];
        """,
    ),
    "one_array_into_the_next": Plant(
        ["out of bounds", '"a"', "128 bytes"],
        """
        threadgroup float a[32], b[32];
        if (i < 32) { a[i] = 0; b[i] = 0; }
        BARRIER
        y[at] = a[i];
        """,
        """
        threadgroup float a[32], b[32];
        if (i < 32) { a[i] = 0; b[i] = 0; }
        BARRIER
        y[at] = a[i % 32] + b[i % 32];
        """,
    ),
    "params_past_the_end": Plant(
        ['"params"', "byte 16", "out of bounds"],
        """
        y[at] = (&params)[1].x;
        """,
        """
        y[at] = (&params)[0].x;
        """,
    ),
    "atomic_past_the_end": Plant(
        ["atomically", '"counters"', "out of bounds"],
        """
        y[at] = 0;
        atomic_fetch_add_explicit(&counters[4], 1u, relaxed);
        """,
        """
        y[at] = 0;
        atomic_fetch_add_explicit(&counters[3], 1u, relaxed);
        """,
    ),
    "atomic_change_of_an_input": Plant(
        ["atomically", '"x"', "input"],
        """
        y[at] = 0;
        atomic_fetch_add_explicit((device atomic_uint*)x + at, 0u, relaxed);
        """,
        """
        y[at] = atomic_load_explicit((const device atomic_uint*)x + at, relaxed);
        """,
    ),
    "plain_store_after_an_atomic_load": Plant(
        ["race", '"counters"', "read by an atomic operation"],
        """
        y[at] = 0;
        if (i < 32) { y[at] = atomic_load_explicit(&counters[group], relaxed); }
        if (i == 63) { ((device uint*)counters)[group] = 1; }
        """,
        """
        y[at] = 0;
        if (i < 32) { y[at] = atomic_load_explicit(&counters[group], relaxed); }
        threadgroup_barrier(mem_flags::mem_device);
        if (i == 63) { ((device uint*)counters)[group] = 1; }
        """,
    ),
    "plain_load_after_atomic_sums": Plant(
        ["race", '"counters"', "written by an atomic operation"],
        """
        y[at] = 0;
        if (i < 32) { atomic_fetch_add_explicit(&counters[group], 1u, relaxed); }
        simdgroup_barrier(mem_flags::mem_none);
        if (i == 0) { y[at] = ((device uint*)counters)[group]; }
        """,
        """
        y[at] = 0;
        if (i == 5) { atomic_fetch_add_explicit(&counters[group], 1u, relaxed); }
        if (i == 5) { y[at] = ((device uint*)counters)[group]; }
        """,
    ),
    "plain_and_atomic_loads": Plant(
        ["race", '"counters"', "read by several threads"],
        """
        y[at] = i % 2 ? atomic_load_explicit(&counters[3], relaxed) : ((device uint*)counters)[3];
        if (i == 63) { atomic_store_explicit(&counters[3], 1u, relaxed); }
        """,
        """
        y[at] = i % 2 ? atomic_load_explicit(&counters[3], relaxed) : ((device uint*)counters)[3];
        """,
    ),
    "plain_store_after_its_load_and_an_atomic_one": Plant(
        ["race", '"counters"'],
        """
        y[at] = 0;
        if (i == 1) { y[at] = atomic_load_explicit(&counters[group], relaxed); }
        if (i == 2) { ((device uint*)counters)[group] = ((device uint*)counters)[group] + 1; }
        """,
        """
        y[at] = 0;
        if (i == 1) { y[at] = atomic_load_explicit(&counters[group], relaxed); }
        if (i == 2) { atomic_store_explicit(&counters[group], ((device uint*)counters)[group] + 1, relaxed); }
        """,
    ),
    "plain_store_after_an_atomic_load_of_another": Plant(
        ["race", '"counters"'],
        """
        y[at] = ((device uint*)counters)[group + 2];
        if (i == 1) { y[at] = atomic_load_explicit(&counters[group], relaxed); }
        if (i == 0) { y[at] = ((device uint*)counters)[group]; }
        simdgroup_barrier(mem_flags::mem_none);
        if (i == 0) { ((device uint*)counters)[group] = 1; }
        """,
        """
        y[at] = ((device uint*)counters)[group + 2];
        if (i == 1) { y[at] = atomic_load_explicit(&counters[group], relaxed); }
        if (i == 0) { y[at] = ((device uint*)counters)[group]; }
        threadgroup_barrier(mem_flags::mem_device);
        if (i == 0) { ((device uint*)counters)[group] = 1; }
        """,
    ),
    "matrix_load_past_the_end": Plant(
        ["reads", '"x"', "out of bounds"],
        """
        simdgroup_float8x8 m;
        simdgroup_load(m, x + 1 + group * 64, 8);
        y[at] = m.thread_elements()[0];
        """,
        """
        simdgroup_float8x8 m;
        simdgroup_load(m, x + group * 64, 8);
        y[at] = m.thread_elements()[0];
        """,
    ),
    "write_to_an_input": Plant(
        ["writes", '"x"', "input"],
        """
        y[at] = 0;
        ((device float*)x)[i] = 1;
        """,
        """
        y[at] = 0;
        ((device float*)y)[group * 64 + i] = 1;
        """,
    ),
    # Reads of memory that nothing wrote.
    "threadgroup_memory_unwritten": Plant(
        ["uninitialised", "byte 36", 'threadgroup array "a"'],
        """
        threadgroup float a[64];
        if (i != 9) { a[i] = x[i]; }
        BARRIER
        y[at] = a[63 - i];
        """,
        """
        threadgroup float a[64];
        a[i] = i != 9 ? x[i] : 0;
        BARRIER
        y[at] = a[63 - i];
        """,
    ),
    "threadgroup_memory_of_the_last_threadgroup": Plant(
        ["uninitialised", "threadgroup (1, 0, 0)"],
        """
        threadgroup float a[64];
        if (group == 0) { a[i] = x[i]; }
        BARRIER
        y[at] = a[i];
        """,
        """
        threadgroup float a[64];
        a[i] = x[i];
        BARRIER
        y[at] = a[i];
        """,
    ),
    "output_read_first": Plant(
        ["uninitialised", '"y"'],
        """
        y[at] += x[i];
        """,
        """
        y[at] = 0;
        y[at] += x[i];
        """,
    ),
    "output_unwritten": Plant(
        ["not written", '"y"', "byte 20"],
        """
        if (i != 5) { y[at] = 0; }
        """,
        """
        y[at] = 0;
        """,
    ),
    "half_an_output_unwritten": Plant(
        ["not written", '"y"', "byte 256", "256 of its 512"],
        """
        if (group == 0) { y[i] = 0; }
        """,
        """
        y[at] = 0;
        """,
    ),
    # Alignment.
    "misaligned_load": Plant(
        ["misaligned", "16 bytes", '"x"'],
        """
        y[at] = (*(const device float4*)(x + i)).x;
        """,
        """
        y[at] = (*(const device float4*)(x + i / 4 * 4)).x;
        """,
    ),
    "misaligned_store": Plant(
        ["misaligned", "8 bytes", '"y"'],
        """
        y[at] = 0;
        *(device float2*)(y + group * 64 + i / 32 * 32 + 1) = 0;
        """,
        """
        if (i % 2 == 0) { *(device float2*)(y + group * 64 + i) = 0; }
        """,
    ),
    "misaligned_threadgroup": Plant(
        ["misaligned", "8 bytes", '"a"'],
        """
        threadgroup half a[256];
        a[i * 4] = 0; a[i * 4 + 1] = 0; a[i * 4 + 2] = 0; a[i * 4 + 3] = 0;
        BARRIER
        y[at] = (*(threadgroup half4*)&a[i * 2 + 1]).x;
        """,
        """
        threadgroup half a[256];
        a[i * 4] = 0; a[i * 4 + 1] = 0; a[i * 4 + 2] = 0; a[i * 4 + 3] = 0;
        BARRIER
        y[at] = (*(threadgroup half4*)&a[i * 4]).x;
        """,
    ),
}


def arrays():
    return [
        np.arange(128, dtype=np.float32),
        ("output", np.full(128, 5, np.float32)),
        ("inout", np.zeros(4, np.uint32)),
        np.ones(4, np.int32).tobytes(),
    ]


@pytest.fixture(scope="module")
def planted():
    bodies = {f"{name}_faulty": plant.faulty for name, plant in PLANTS.items()}
    bodies |= {f"{name}_sound": plant.sound for name, plant in PLANTS.items()}
    text = MACROS + "".join(kernel(body, ARGUMENTS, name) for name, body in bodies.items())
    return register(text), text


def line_of(text: str, fragment: str) -> int:
    return (HEADER + text[: text.index(fragment)]).count("\n") + 1


@pytest.mark.parametrize("name", PLANTS)
def test_planted_fault(planted, name):
    file, text = planted
    plant = PLANTS[name]
    for seed in range(3):
        data = arrays()
        with pytest.raises(Fault) as caught:
            run(file, f"{name}_faulty", data, 2, 64, seed=seed)
        message = str(caught.value)
        assert f"[{name}_faulty]" in message
        if seed == 0:
            assert all(word in message for word in plant.words), message
        if "not written" not in message:
            body = text.index(f"void {name}_faulty(")
            first = line_of(text[:body] + "@", "@")
            lines = [int(part.split(":")[1].split(")")[0]) for part in message.split("(") if part.startswith(file)]
            assert lines and all(first + 4 <= at <= first + 4 + plant.faulty.count("\n") for at in lines), message
        assert (data[1][1] == 5).all()  # a launch that failed has written nothing


@pytest.mark.parametrize("name", PLANTS)
def test_sound_twin(planted, name):
    for seed in range(6):
        run(planted[0], f"{name}_sound", arrays(), 2, 64, seed=seed)


def test_there_are_enough_plants():
    assert len(PLANTS) >= 30


def test_lines_are_those_of_the_access():
    body = "  const float a = x[i];\n  const float b =\n      x[i + 200];\n  y[i] = a + b;\n  y[i + 64] = a;"
    file = register(kernel(body, ARGUMENTS))
    with pytest.raises(Fault, match=rf"\({file}:9\) at byte 800"):
        run(file, "test", arrays(), 1, 64)


def test_the_other_side_of_a_race_has_its_line_too():
    body = "  threadgroup float a[64];\n  a[i] = x[i];\n\n  y[i] = a[i / 2 * 2];\n  y[64 + i] = 0;"
    file = register(kernel(body, ARGUMENTS))
    with pytest.raises(Fault, match=rf"reads 4 bytes \({file}:10\).*written by thread 0 \({file}:8\)"):
        run(file, "test", arrays(), 1, 64)


def test_no_write_lands_outside(rng):
    """Neighbours of the output in one numpy array keep their values, whatever the kernel does."""
    body = "  y[int(i * params.x) - 40] = 1;"
    file = register(kernel(body, ARGUMENTS))
    memory = np.full(384, 7, np.float32)
    for stride in (-1000003, -2, 1, 3, 5000, 30000000):
        params = np.full(4, stride, np.int32).tobytes()
        data = [np.zeros(128, np.float32), ("output", memory[128:256]), np.zeros(4, np.uint32), params]
        with pytest.raises(Fault):
            run(file, "test", data, 1, 64)
        assert (memory == 7).all()


def test_alignment_is_that_of_the_gpu_buffer():
    """A view that starts 4 bytes into its buffer is misaligned for float4, wherever numpy keeps it."""
    from mlx_mittens import _ext, frontend

    arguments = "const device float* x [[buffer(0)]], device float* y [[buffer(1)]]"
    text = kernel("  y[i] = (*(const device float4*)(x + i / 4 * 4)).x;", arguments)
    library = frontend.simulator_library(register(text))
    memory, out = np.zeros(65, np.float32), np.zeros(64, np.float32)
    for array, offset in ((memory[1:], 0), (memory[:64], 4), (memory[1:], 16), (memory[1:], 8)):
        arguments = [("x", "input", array.view(np.uint8), offset), ("y", "output", out.view(np.uint8))]
        if offset % 16 == 0:
            _ext.simulate(library, "test", arguments, [1, 1, 1], [64, 1, 1])
        else:
            with pytest.raises(Fault, match="misaligned"):
                _ext.simulate(library, "test", arguments, [1, 1, 1], [64, 1, 1])


def test_a_buffer_that_is_not_bound():
    text = kernel("  y[i] = x[i];", "const device float* x [[buffer(0)]], device float* y [[buffer(1)]]")
    with pytest.raises(Fault, match="did not bind"):
        run(register(text), "test", [("input", None), np.zeros(64, np.float32)], 1, 64)


def test_counts():
    body = "  threadgroup float a[64];\n  a[i] = x[i];\n  BARRIER\n  y[at] = a[63 - i] + simd_sum(a[i]);"
    counts = run(register(MACROS + kernel(body, ARGUMENTS)), "test", arrays(), 2, 64)
    assert counts["threads"] == 128
    assert counts["device_bytes_loaded"] == counts["device_bytes_stored"] == 512
    assert counts["threadgroup_bytes_loaded"] == 1024 and counts["threadgroup_bytes_stored"] == 512
    assert counts["threadgroup_barriers"] == 2 and counts["simd_operations"] == 4
    assert counts["threadgroup_bytes"] == 256


def test_the_process_lives_on_after_many_faults(planted):
    for _ in range(50):
        for name in ("write_far_away", "no_barrier_after_write", "output_unwritten"):
            with pytest.raises(Fault):
                run(planted[0], f"{name}_faulty", arrays(), 2, 64)
    run(planted[0], "no_barrier_after_write_sound", arrays(), 2, 64)


# A body, and of its one access: lines touched, fewest lines, and bank conflicts, for 32 lanes.
TRAFFIC = {
    "neighbours": ("y[i] = x[i];", "device", 1, 1),
    "every_other": ("y[i] = x[i * 2];", "device", 2, 1),
    "a_line_each": ("y[i] = x[i * 32];", "device", 32, 1),
    "all_the_same": ("y[i] = x[7];", "device", 1, 1),
    "across_a_line": ("y[i] = x[i + 16];", "device", 2, 1),
    "four_floats_each": ("y[i] = dot(*(const device float4*)(x + i * 4), float4(1));", "device", 4, 4),
    "no_conflict": ("y[i] = a[i];", "threadgroup", 0, 0),
    "two_words_a_bank": ("y[i] = a[i * 2];", "threadgroup", 1, 0),
    "one_bank": ("y[i] = a[i * 32];", "threadgroup", 31, 0),
    "padded": ("y[i] = a[i * 33];", "threadgroup", 0, 0),
    "broadcast": ("y[i] = a[i / 8];", "threadgroup", 0, 0),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_traffic(name):
    access, space, touched, fewest = TRAFFIC[name]
    fill = "for (uint k = i; k < 1056; k += 32) { a[k] = 0; }" if space == "threadgroup" else ""
    body = f"  threadgroup float a[1056];\n  {fill}\n  SIMD_BARRIER\n  {access}"
    arguments = "const device float* x [[buffer(0)]], device float* y [[buffer(1)]]"
    file = register(MACROS + kernel(body, arguments))
    counts = run(file, "test", [np.zeros(1024, np.float32), np.zeros(32, np.float32)], count=True)
    if space == "device":
        assert counts["device_accesses"] == 2
        assert (counts["device_lines"] - 1, counts["device_lines_fewest"] - 1) == (touched, fewest)
    else:
        assert counts["threadgroup_accesses"] == 34 and counts["bank_conflicts"] == touched


@pytest.mark.parametrize("meeting", ["simdgroup_barrier(mem_flags::mem_none);", "s = simd_sum(s);", "BARRIER"])
def test_lanes_that_skip_an_access_are_not_paired_with_a_later_one(meeting):
    """Where they meet in between. Half of the lanes load 64 bytes in the first round; in the others all load a line."""
    body = f"""
  float s = 0;
  for (uint round = 0; round < 4; ++round) {{
    if (round > 0 || i % 32 < 16) {{ s += x[round * 32 + i % 32]; }}
    {meeting}
  }}
  y[i] = s;"""
    arguments = "const device float* x [[buffer(0)]], device float* y [[buffer(1)]]"
    file = register(MACROS + kernel(body, arguments))
    counts = run(file, "test", [np.zeros(128, np.float32), np.zeros(32, np.float32)], count=True)
    assert counts["device_accesses"] == 5
    assert counts["device_lines"] == counts["device_lines_fewest"] == 5


class TestOneBufferAtTwoIndices:
    TEXT = kernel(
        "  y[i] = x[i] + 1;\n  if (again) { y[i] += x[i + 1 < 32 ? i : 0]; }",
        "const device float* x [[buffer(0)]], device float* y [[buffer(1)]], constant int& again [[buffer(2)]]",
    )

    def launch(self, x, y, again):
        return run(register(self.TEXT), "test", [("input", x), ("inout", y), np.int32(again).tobytes()])

    def test_what_was_written_through_one_is_not_read_through_the_other(self):
        memory = np.arange(32, dtype=np.float32)
        with pytest.raises(Fault, match=r'buffer "x", which was written through "y".*bound to both'):
            self.launch(memory, memory, again=True)

    def test_an_element_that_is_read_before_it_is_written_is_no_fault(self):
        memory = np.arange(32, dtype=np.float32)
        self.launch(memory, memory, again=False)
        assert (memory == np.arange(32) + 1).all()

    def test_parts_that_do_not_overlap_are_no_fault(self):
        memory = np.arange(64, dtype=np.float32)
        self.launch(memory[:32], memory[32:], again=True)
        with pytest.raises(Fault, match="written through"):
            self.launch(memory[:32], memory[16:48], again=True)
