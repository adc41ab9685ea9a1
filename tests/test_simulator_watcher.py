"""The memory watcher: planted faults of every kind, each beside a sound twin, so that it neither misses nor cries wolf."""

import numpy as np
import pytest
from simulate import HEADER, kernel, register, run

from mlx_mittens.simulator import Fault

# 64 threads a threadgroup; x and y have 128 floats, counters 4.
ARGUMENTS = (
    "const device float* x [[buffer(0)]], device float* y [[buffer(1)]], device atomic_uint* counters [[buffer(2)]],\n"
    "    constant int4& params [[buffer(3)]]"
)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
ALL = "y[group * 64 + i] = "  # completes the output


class Plant:
    """A faulty body, what the message must say, a sound body that differs as little as it can, and the threadgroups."""

    def __init__(self, faulty, words, sound, groups=2):
        self.faulty, self.words, self.sound, self.groups = faulty, words, sound, groups


PLANTS = {
    # Races in threadgroup memory.
    "no_barrier_after_write": Plant(
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\na[i] = x[i];\n{ALL}a[63 - i];",
        ["race", '"a"'],
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\na[i] = x[i];\n{BARRIER}\n{ALL}a[63 - i];",
    ),
    "no_barrier_before_rewrite": Plant(
        f"threadgroup float a[64];\na[i] = x[i];\n{BARRIER}\nconst float v = a[63 - i];\na[i] = v;\n{ALL}v;",
        ["race", '"a"'],
        f"threadgroup float a[64];\na[i] = x[i];\n{BARRIER}\nconst float v = a[63 - i];\n{BARRIER}\na[i] = v;\n{ALL}v;",
    ),
    "simdgroup_barrier_across_simdgroups": Plant(
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\na[i] = x[i];\n{SIMD_BARRIER}\n{ALL}a[i ^ 32];",
        ["race", '"a"'],
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\na[i] = x[i];\n{SIMD_BARRIER}\n{ALL}a[i ^ 16];",
    ),
    "no_barrier_within_a_simdgroup": Plant(
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\na[i] = x[i];\n{ALL}a[i ^ 1];",
        ["race"],
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\na[i] = x[i];\n{SIMD_BARRIER}\n{ALL}a[i ^ 1];",
    ),
    "simd_operation_is_no_barrier": Plant(
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\na[i] = simd_sum(x[i]);\n{ALL}a[i ^ 1] + simd_max(x[i]);",
        ["race"],
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\na[i] = simd_sum(x[i]);\n{ALL}a[i] + simd_max(x[i]);",
    ),
    "barrier_without_memory": Plant(
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\na[i] = x[i];\n"
        f"threadgroup_barrier(mem_flags::mem_none);\n{ALL}a[63 - i];",
        ["race"],
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\na[i] = x[i];\n"
        f"threadgroup_barrier(mem_flags::mem_none | mem_flags::mem_threadgroup);\n{ALL}a[63 - i];",
    ),
    "barrier_of_the_other_memory": Plant(
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\na[i] = x[i];\n"
        f"threadgroup_barrier(mem_flags::mem_device);\n{ALL}a[63 - i];",
        ["race"],
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\na[i] = x[i];\n"
        f"threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);\n{ALL}a[63 - i];",
    ),
    "two_write_one_place": Plant(
        f"threadgroup float a[64];\na[i / 2] = x[i];\n{BARRIER}\n{ALL}a[i / 2];",
        ["race", "written by"],
        f"threadgroup float a[64];\nif (i % 2 == 0) {{ a[i / 2] = x[i]; }}\n{BARRIER}\n{ALL}a[i / 2];",
    ),
    "second_round_overtakes": Plant(
        f"threadgroup float a;\nfloat sum = 0;\nfor (int k = 0; k < 3; ++k) {{\n"
        f"if (i == 0) {{ a = k; }}\n{BARRIER}\nsum += a;\n}}\n{ALL}sum;",
        ["race"],
        f"threadgroup float a;\nfloat sum = 0;\nfor (int k = 0; k < 3; ++k) {{\n"
        f"if (i == 0) {{ a = k; }}\n{BARRIER}\nsum += a;\n{BARRIER}\n}}\n{ALL}sum;",
    ),
    "neighbour_halves_of_one_word": Plant(
        f"threadgroup half a[64];\na[i] = half(x[i]);\na[(i + 1) % 64] = 0;\n{BARRIER}\n{ALL}a[i];",
        ["race"],
        f"threadgroup half a[64];\na[i] = half(x[i]);\n{BARRIER}\n{ALL}a[i];",
    ),
    "vector_over_scalars": Plant(
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\na[i] = x[i];\n{SIMD_BARRIER}\n"
        f"{ALL}(*(threadgroup float4*)&a[(63 - i) / 4 * 4]).x;",
        ["race"],
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\na[i] = x[i];\n{SIMD_BARRIER}\n"
        f"{ALL}(*(threadgroup float4*)&a[i / 4 * 4]).x;",
    ),
    "atomic_against_plain": Plant(
        f"threadgroup atomic_uint n;\nif (i == 0) {{ atomic_store_explicit(&n, 0u, memory_order_relaxed); }}\n{BARRIER}\n"
        f"atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);\n{ALL}*(threadgroup uint*)&n;",
        ["race", "atomic"],
        f"threadgroup atomic_uint n;\nif (i == 0) {{ atomic_store_explicit(&n, 0u, memory_order_relaxed); }}\n{BARRIER}\n"
        f"atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);\n{BARRIER}\n{ALL}*(threadgroup uint*)&n;",
    ),
    "matrix_store_unguarded": Plant(
        f"threadgroup float a[64];\nsimdgroup_float8x8 m = simdgroup_float8x8(1.0);\n"
        f"if (simdgroup == 0) {{ simdgroup_store(m, a, 8); }}\nsimdgroup_barrier(mem_flags::mem_none);\n"
        f"{ALL}simdgroup == 0 ? a[lane] : 0;",
        ["race"],
        f"threadgroup float a[64];\nsimdgroup_float8x8 m = simdgroup_float8x8(1.0);\n"
        f"if (simdgroup == 0) {{ simdgroup_store(m, a, 8); }}\n{SIMD_BARRIER}\n"
        f"{ALL}simdgroup == 0 ? a[lane] : 0;",
    ),
    # Races in device memory.
    "device_neighbour": Plant(
        f"{ALL}x[i];\n{BARRIER}\ny[group * 64 + i] += y[group * 64 + (i + 1) % 64];",
        ["race", '"y"'],
        f"{ALL}x[i];\nthreadgroup_barrier(mem_flags::mem_device);\nconst float v = y[group * 64 + (i + 1) % 64];\n"
        f"threadgroup_barrier(mem_flags::mem_device);\ny[group * 64 + i] += v;",
    ),
    "threadgroups_write_one_place": Plant(
        "y[i] = x[i];\ny[64 + i] = x[i];",
        ["race between threadgroups", "written by thread", "threadgroup (0, 0, 0)"],
        "y[group * 64 + i] = x[i];",
    ),
    "threadgroup_reads_another": Plant(
        f"{ALL}x[i];\nthreadgroup_barrier(mem_flags::mem_device);\nif (group == 1) {{ y[64 + i] += y[i]; }}",
        ["race between threadgroups"],
        f"{ALL}x[i];\nthreadgroup_barrier(mem_flags::mem_device);\nif (group == 1) {{ y[64 + i] += x[i]; }}",
    ),
    "plain_read_of_a_counter": Plant(
        f"atomic_fetch_add_explicit(&counters[0], 1u, memory_order_relaxed);\n{ALL}float(*(device uint*)&counters[0]);",
        ["race", "counters"],
        f"{ALL}float(atomic_fetch_add_explicit(&counters[0], 1u, memory_order_relaxed));",
    ),
    # Outside of buffers and arrays.
    "read_past_the_end": Plant(
        f"{ALL}x[group * 64 + i + 1];", ["reads 4 bytes", "byte 512", '"x"', "512 bytes", "out of bounds"],
        f"{ALL}x[group * 64 + i];",
    ),
    "read_before_the_start": Plant(
        f"{ALL}x[int(group * 64 + i) - 1];", ["byte -4", '"x"', "out of bounds"], f"{ALL}x[max(int(group * 64 + i) - 1, 0)];",
    ),
    "write_past_the_end": Plant(
        f"{ALL}0;\nif (group == 1 && i == 63) {{ y[65 + i] = 0; }}", ["writes 4 bytes", '"y"', "byte 512"],
        f"{ALL}0;\nif (group == 1 && i == 63) {{ y[64 + i] = 0; }}",
    ),
    "write_far_away": Plant(
        f"{ALL}0;\ny[(params.x + i) * 10000000] = 0;", ["writes", "out of bounds", '"y"'],
        f"{ALL}0;\nif (params.x == 7) {{ y[(params.x + i) * 10000000] = 0; }}",
    ),
    "negative_index_that_wraps": Plant(
        f"const uint before = i - 1;\n{ALL}x[before];", ["byte 17179869180", '"x"', "out of bounds"], f"const uint before = i - 1;\n{ALL}i ? x[before] : 0;",
    ),
    "vector_over_the_end": Plant(
        f"{ALL}(*(const device float4*)(x + (i + 1) * 2 / 4 * 4)).w;", ["reads 16 bytes", "byte 512", "out of bounds"],
        f"{ALL}(*(const device float4*)(x + i * 2 / 4 * 4)).w;",
    ),
    "threadgroup_array_past_the_end": Plant(
        f"threadgroup float a[64];\na[i] = 0;\n{BARRIER}\n{ALL}a[i + params.x];", ["out of bounds", 'threadgroup array "a"'],
        f"threadgroup float a[65];\na[i] = 0;\na[64] = 0;\n{BARRIER}\n{ALL}a[i + params.x];".replace("a[64] = 0;", "if (i == 0) { a[64] = 0; }"),
    ),
    "one_array_into_the_next": Plant(
        f"threadgroup float a[32], b[32];\nif (i < 32) {{ a[i] = 0; b[i] = 0; }}\n{BARRIER}\n{ALL}a[i];",
        ["out of bounds", '"a"', "128 bytes"],
        f"threadgroup float a[32], b[32];\nif (i < 32) {{ a[i] = 0; b[i] = 0; }}\n{BARRIER}\n{ALL}a[i % 32] + b[i % 32];",
    ),
    "params_past_the_end": Plant(
        f"{ALL}(&params)[1].x;", ['"params"', "byte 16", "out of bounds"], f"{ALL}(&params)[0].x;",
    ),
    "atomic_past_the_end": Plant(
        f"{ALL}0;\natomic_fetch_add_explicit(&counters[4], 1u, memory_order_relaxed);", ["atomically", '"counters"', "out of bounds"],
        f"{ALL}0;\natomic_fetch_add_explicit(&counters[3], 1u, memory_order_relaxed);",
    ),
    "matrix_load_past_the_end": Plant(
        f"simdgroup_float8x8 m;\nsimdgroup_load(m, x + 1 + group * 64, 8);\n{ALL}m.thread_elements()[0];", ["reads", '"x"', "out of bounds"],
        f"simdgroup_float8x8 m;\nsimdgroup_load(m, x + group * 64, 8);\n{ALL}m.thread_elements()[0];",
    ),
    "write_to_an_input": Plant(
        f"{ALL}0;\n((device float*)x)[i] = 1;", ["writes", '"x"', "input"], f"{ALL}0;\n((device float*)y)[group * 64 + i] = 1;",
    ),
    # What nothing wrote.
    "threadgroup_memory_unwritten": Plant(
        f"threadgroup float a[64];\nif (i != 9) {{ a[i] = x[i]; }}\n{BARRIER}\n{ALL}a[63 - i];",
        ["uninitialised", "byte 36", 'threadgroup array "a"'],
        f"threadgroup float a[64];\na[i] = i != 9 ? x[i] : 0;\n{BARRIER}\n{ALL}a[63 - i];",
    ),
    "threadgroup_memory_of_the_last_threadgroup": Plant(
        f"threadgroup float a[64];\nif (group == 0) {{ a[i] = x[i]; }}\n{BARRIER}\n{ALL}a[i];", ["uninitialised", "threadgroup (1, 0, 0)"],
        f"threadgroup float a[64];\na[i] = x[i];\n{BARRIER}\n{ALL}a[i];",
    ),
    "output_read_first": Plant(
        "y[group * 64 + i] += x[i];", ["uninitialised", '"y"'], f"{ALL}0;\ny[group * 64 + i] += x[i];",
    ),
    "output_unwritten": Plant(
        "if (i != 5) { y[group * 64 + i] = 0; }", ["not written", '"y"', "byte 20"], f"{ALL}0;",
    ),
    "half_an_output_unwritten": Plant(
        "if (group == 0) { y[i] = 0; }", ["not written", '"y"', "byte 256", "256 of its 512"], f"{ALL}0;",
    ),
    # Alignment.
    "misaligned_load": Plant(
        f"{ALL}(*(const device float4*)(x + i)).x;", ["misaligned", "16 bytes", '"x"'], f"{ALL}(*(const device float4*)(x + i / 4 * 4)).x;",
    ),
    "misaligned_store": Plant(
        f"{ALL}0;\n*(device float2*)(y + group * 64 + i / 32 * 32 + 1) = float2(lane, 0);".replace("float2(lane, 0)", "0"),
        ["misaligned", "8 bytes", '"y"'],
        f"if (i % 2 == 0) {{ *(device float2*)(y + group * 64 + i) = 0; }}",
    ),
    "misaligned_threadgroup": Plant(
        f"threadgroup half a[256];\na[i * 4] = 0; a[i * 4 + 1] = 0; a[i * 4 + 2] = 0; a[i * 4 + 3] = 0;\n{BARRIER}\n"
        f"{ALL}(*(threadgroup half4*)&a[i * 2 + 1]).x;",
        ["misaligned", "8 bytes", '"a"'],
        f"threadgroup half a[256];\na[i * 4] = 0; a[i * 4 + 1] = 0; a[i * 4 + 2] = 0; a[i * 4 + 3] = 0;\n{BARRIER}\n"
        f"{ALL}(*(threadgroup half4*)&a[i * 4]).x;",
    ),
}  # fmt: skip


def arrays():
    return [
        np.arange(128, dtype=np.float32),
        ("output", np.full(128, 5, np.float32)),
        ("inout", np.zeros(4, np.uint32)),
        np.ones(4, np.int32).tobytes(),
    ]


@pytest.fixture(scope="module")
def planted():
    bodies = {f"{name}_{which}": getattr(plant, which) for name, plant in PLANTS.items() for which in ("faulty", "sound")}
    texts = {name: kernel(body, ARGUMENTS, name) for name, body in bodies.items()}
    return register("".join(texts.values())), "".join(texts.values())


def line_of(text: str, fragment: str) -> int:
    return (HEADER + text[: text.index(fragment)]).count("\n") + 1


@pytest.mark.parametrize("name", PLANTS)
def test_planted_fault(planted, name):
    file, text = planted
    plant = PLANTS[name]
    for seed in range(3):
        data = arrays()
        with pytest.raises(Fault) as caught:
            run(file, f"{name}_faulty", data, plant.groups, 64, seed=seed)
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
        run(planted[0], f"{name}_sound", arrays(), PLANTS[name].groups, 64, seed=seed)


def test_there_are_enough_plants():
    assert len(PLANTS) >= 30


def test_lines_are_those_of_the_access():
    body = "  const float a = x[i];\n  const float b =\n      x[i + 200];\n  y[i] = a + b;\n  y[i + 64] = a;"
    file = register(kernel(body, ARGUMENTS))
    with pytest.raises(Fault, match=rf"\({file}:9\) at byte 800"):
        run(file, "test", arrays(), 1, 64)


def test_the_other_side_of_a_race_has_its_line_too():
    body = f"  threadgroup float a[64];\n  a[i] = x[i];\n\n  {ALL}a[i / 2 * 2];\n  y[64 + i] = 0;"
    file = register(kernel(body, ARGUMENTS))
    with pytest.raises(Fault, match=rf"reads 4 bytes \({file}:10\).*written by thread 0 \({file}:8\)"):
        run(file, "test", arrays(), 1, 64)


def test_no_write_lands_outside(rng):
    """Neighbours of the output in one numpy array keep their values, whatever the kernel does."""
    body = "  y[int(i * params.x) - 40] = 1;"
    file = register(kernel(body, ARGUMENTS))
    memory = np.full(384, 7, np.float32)
    for stride in (-1000003, -2, 1, 3, 5000, 30000000):
        data = [np.zeros(128, np.float32), ("output", memory[128:256]), np.zeros(4, np.uint32), np.full(4, stride, np.int32).tobytes()]
        with pytest.raises(Fault):
            run(file, "test", data, 1, 64)
        assert (memory == 7).all()


def test_alignment_is_that_of_the_gpu_buffer():
    """A view that starts 4 bytes into its buffer is misaligned for float4, wherever numpy keeps it."""
    from mlx_mittens import _ext, frontend

    text = kernel("  y[i] = (*(const device float4*)(x + i / 4 * 4)).x;", "const device float* x [[buffer(0)]], device float* y [[buffer(1)]]")
    library = frontend.simulator_library(register(text))
    memory = np.zeros(65, np.float32)
    for array, offset, sound in ((memory[1:], 0, True), (memory[:64], 4, False), (memory[1:], 16, True), (memory[1:], 8, False)):
        arguments = [("x", "input", array.view(np.uint8), offset), ("y", "output", np.zeros(64, np.float32).view(np.uint8))]
        if sound:
            _ext.simulate(library, "test", arguments, [1, 1, 1], [64, 1, 1])
        else:
            with pytest.raises(Fault, match="misaligned"):
                _ext.simulate(library, "test", arguments, [1, 1, 1], [64, 1, 1])


def test_a_buffer_that_is_not_bound():
    text = kernel("  y[i] = x[i];", "const device float* x [[buffer(0)]], device float* y [[buffer(1)]]")
    with pytest.raises(Fault, match="did not bind"):
        run(register(text), "test", [("input", None), np.zeros(64, np.float32)], 1, 64)


def test_counts():
    body = f"  threadgroup float a[64];\n  a[i] = x[i];\n  {BARRIER}\n  {ALL}a[63 - i] + simd_sum(a[i]);"
    counts = run(register(kernel(body, ARGUMENTS)), "test", arrays(), 2, 64)
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
