"""The profile of launches against counts by hand: distinct lines, merged accesses, executions by line of the source."""

import functools
import json

import mlx.core as mx
import numpy as np
import pytest
from helpers.simulate import kernel, register, run

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.cli.main import main

ARGUMENTS = "const device {0}* x [[buffer(0)]], device {0}* y [[buffer(1)]]"
FIRST_LINE = 6  # of a body, after the header and the three lines of the signature


@functools.cache
def together(dtype):
    """One text of the kernels of the tables below, which is compiled at once; the name of each by its body."""
    tables = {"float": (TOUCHED, EXECUTED), "half": (MERGED,)}[dtype]
    names = {body: f"body_{i}" for i, (body, _) in enumerate(row for table in tables for row in table.values())}
    texts = [kernel(body, ARGUMENTS.format(dtype), name) for body, name in names.items()]
    return register("".join(f"#line {FIRST_LINE - 3}\n{text}" for text in texts)), names


def profile(body, dtype="float", x=None, threadgroups=1, threads=32, outputs=4096, seed=0):
    """The profile of a kernel with one input and one output, and its lines as {(line of the body, what): (n, n)}."""
    kind = np.float32 if dtype == "float" else np.float16
    x = np.zeros(65536, kind) if x is None else x.astype(kind)
    file, names = together(dtype)
    if body not in names:
        file, names = register(kernel(body, ARGUMENTS.format(dtype))), {body: "test"}
    y = ("inout", np.zeros(outputs, kind))
    counts = run(file, names[body], [x, y], threadgroups, threads, profile=True, seed=seed)
    lines = {(line - FIRST_LINE + 1, f"{what} {memory}".strip()): n for _, line, what, memory, *n in counts["lines"]}
    return counts, {key: tuple(n) for key, n in lines.items()}


def lines_of(counts):
    return counts["distinct_lines_loaded"], counts["distinct_lines_stored"], counts["threadgroup_lines"]


# A body; for two threadgroups of 64 threads and floats: lines loaded, lines stored, lines summed over threadgroups.
TOUCHED = {
    "each its own": ("y[group * 64 + i] = x[group * 64 + i];", (4, 4, 8)),
    "both the same": ("y[group * 64 + i] = x[i];", (2, 4, 2 * (2 + 2))),
    "broadcast": ("y[group * 64 + i] = x[7];", (1, 4, 2 * (1 + 2))),
    "twice": ("y[group * 64 + i] = x[i] + x[63 - i];", (2, 4, 2 * (2 + 2))),
    "stride 2": ("y[group * 64 + i] = x[(group * 64 + i) * 2];", (8, 4, 12)),
    "a line each": ("y[group * 64 + i] = x[i * 32];", (64, 4, 2 * (64 + 2))),
    "across a line": ("y[group * 64 + i] = x[i + 16];", (3, 4, 2 * (3 + 2))),
    "8 heads a row": ("y[group * 64 + i] = x[i / 8 * 512 + i % 8 * 4];", (8, 4, 2 * (8 + 2))),
    "load and store": ("y[group * 64 + i] += 1;", (4, 4, 4)),
}


@pytest.mark.parametrize("name", TOUCHED)
def test_distinct_lines(name):
    body, expected = TOUCHED[name]
    counts, _ = profile(body, threadgroups=2, threads=64)
    assert lines_of(counts) == expected
    both = expected[1] if name == "load and store" else sum(expected[:2])
    assert counts["distinct_lines"] == both


def test_a_gather_counts_each_line_once():
    """64 rows of a line each, gathered by index; 5 different ones."""
    index = np.array([3, 9, 9, 60, 3, 11, 0, 0] * 8)
    x = np.concatenate([index, np.zeros(64 * 32)])
    counts, lines = profile("y[i] = x[64 + uint(x[i]) * 32 + i % 32];", x=x, threads=64)
    assert counts["distinct_lines_loaded"] == 2 + 5
    assert lines == {(1, "load device"): (2, 4), (1, "store device"): (2, 2)}


def test_a_view_starts_within_a_line():
    """32 floats from byte 64 of their buffer lie in two lines."""
    from mlx_mittens import frontend

    library = frontend.simulator_library(register(kernel("y[i] = x[i];", ARGUMENTS.format("float"))))
    x, y = np.zeros(32, np.float32).view(np.uint8), np.zeros(32, np.float32).view(np.uint8)
    arguments = [("x", "input", x, 64), ("y", "output", y)]
    counts = _ext.simulate(library, "test", arguments, [1, 1, 1], [32, 1, 1], profile=True)
    assert lines_of(counts) == (2, 1, 3)


# A body of half elements; loads and stores of device memory, loads and stores of threadgroup memory, for 32 threads.
MERGED = {
    "scalar": ("y[i] = x[i];", (1, 1, 0, 0)),
    "half4": ("((device half4*)y)[i] = ((const device half4*)x)[i];", (1, 1, 0, 0)),
    "elements of a half4": (
        "half4 v = ((const device half4*)x)[i];\ny[4 * i] = v.x; y[4 * i + 1] = v.y;",
        (1, 1, 0, 0),
    ),
    "two half4": (
        "for (uint k = 0; k < 2; ++k) ((device half4*)y)[2 * i + k] = ((const device half4*)x)[2 * i + k];",
        (1, 1, 0, 0),
    ),
    "four scalars": (
        "half4 v;\nfor (uint k = 0; k < 4; ++k) v[k] = x[4 * i + k];\ny[i] = v.x + v.y + v.z + v.w;",
        (1, 1, 0, 0),
    ),
    "in the other order": (
        "half4 v;\nfor (int k = 3; k >= 0; --k) v[k] = x[4 * i + k];\ny[i] = v.x + v.y + v.z + v.w;",
        (1, 1, 0, 0),
    ),
    "eight scalars": ("half s = 0;\nfor (uint k = 0; k < 8; ++k) s += x[8 * i + k];\ny[i] = s;", (2, 1, 0, 0)),
    "a store after each load": ("for (uint k = 0; k < 4; ++k) y[4 * i + k] = x[4 * i + k] * 2;", (1, 1, 0, 0)),
    "a store to the same array": ("for (uint k = 0; k < 4; ++k) y[4 * i + k] = y[4 * i + k] * 2;", (4, 4, 0, 0)),
    "every other": ("half s = 0;\nfor (uint k = 0; k < 4; ++k) s += x[8 * i + 2 * k];\ny[i] = s;", (4, 1, 0, 0)),
    "a column": ("half s = 0;\nfor (uint k = 0; k < 4; ++k) s += x[32 * k + i];\ny[i] = s;", (4, 1, 0, 0)),
    "two streams": (
        "half s = 0;\nfor (uint k = 0; k < 4; ++k) s += x[4 * i + k] * x[512 + 4 * i + k];\ny[i] = s;",
        (2, 1, 0, 0),
    ),
    "rounds not known": (
        "half s = 0;\nfor (uint k = 0; k < uint(x[9000]) + 4; ++k) s += x[4 * i + k];\ny[i] = s;",
        (5, 1, 0, 0),
    ),
    "each in an if": (
        "half s = 0;\nfor (uint k = 0; k < 4; ++k) if (x[9000 + 64 * k] == 0) s += x[4 * i + k];\ny[i] = s;",
        (8, 1, 0, 0),
    ),
    "threadgroup": (
        "threadgroup half a[128];\nfor (uint k = 0; k < 4; ++k) a[4 * i + k] = i;\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = a[124 - 4 * i] + a[125 - 4 * i];",
        (0, 1, 1, 1),
    ),
    "threadgroup, by a row": (
        "threadgroup half a[128];\nfor (uint k = i; k < 128; k += 32) a[k] = i;\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = a[i] + a[i + 64];",
        (0, 1, 2, 4),
    ),
}


@pytest.mark.parametrize("name", MERGED)
def test_merged_accesses(name):
    body, expected = MERGED[name]
    for seed in (0, 1):
        counts, _ = profile(body, "half", seed=seed)
        seen = [counts[f"{memory}_{what}"] for memory in ("device", "threadgroup") for what in ("loads", "stores")]
        assert tuple(seen) == expected


def test_neighbours_by_chance_are_not_merged():
    """A gather of two elements, which are neighbours for all threads but one."""
    index = np.stack([np.arange(32) * 2, np.arange(32) * 2 + 1])
    index[1, 5] = 90
    x = np.concatenate([index.reshape(-1), np.zeros(128)])
    body = "const device float* data = x + 64;\ny[i] = data[uint(x[i])] + data[uint(x[32 + i])];"
    counts, _ = profile(body, x=x)
    assert counts["device_loads"] == 2 + 2


# A body of three lines or more, for two threadgroups of 64 threads: executions and operations by line.
EXECUTED = {
    "a loop": (
        "float s = x[0];\nfor (uint k = 0, n = uint(s) + 7; k < n; ++k) {\n"
        "  s += x[k * 64 + i];\n}\ny[i + 64 * group] = s;",
        {(1, "load device"): (4, 4), (3, "load device"): (4 * 7, 4 * 7), (5, "store device"): (4, 4)},
    ),
    "loops in a loop": (
        "float s = x[0];\nfor (uint j = 0; j < uint(s) + 3; ++j) {\n  s += simd_sum(s) * 0;\n"
        "  for (uint k = 0; k < uint(s) + 5; ++k) {\n    s += x[k * 64 + i] * 0;\n  }\n"
        "  threadgroup_barrier(mem_flags::mem_none);\n}\ny[i + 64 * group] = s;",
        {
            (1, "load device"): (4, 4),
            (3, "simd"): (4 * 3, 4 * 3),
            (5, "load device"): (4 * 3 * 5, 4 * 3 * 5),
            (7, "barrier"): (4 * 3, 4 * 3),
            (9, "store device"): (4, 4),
        },
    ),
    "rounds of lanes": (  # a lane takes as many rounds as its number in the simdgroup: a simdgroup 31
        "float s = 0;\nfor (uint k = 0; k < lane; ++k) {\n  s += x[k * 64 + i];\n}\ny[i + 64 * group] = s;",
        {(3, "load device"): (4 * 31, 4 * 31), (5, "store device"): (4, 4)},
    ),
    "one simdgroup": (
        "if (simdgroup == 1) {\n  y[i + 64 * group] = simd_max(x[i]);\n}",
        {(2, "load device"): (2, 2), (2, "simd"): (2, 2), (2, "store device"): (2, 2)},
    ),
    "quads": (
        "y[i + 64 * group] = quad_sum(x[i]);",
        {(1, "load device"): (4, 4), (1, "simd"): (4, 4), (1, "store device"): (4, 4)},
    ),
    "unrolled": (
        "float s = 0;\nfor (uint k = 0; k < 3; ++k) {\n  s += x[k * 64 + i];\n}\ny[i + 64 * group] = s;",
        {(3, "load device"): (4, 4 * 3), (5, "store device"): (4, 4)},
    ),
    "a matrix": (
        "simdgroup_float8x8 a, b, c(0.0f);\nsimdgroup_load(a, x, 8);\nsimdgroup_load(b, x, 8, ulong2(0, 0), true);\n"
        "for (uint k = 0; k < uint(x[0]) + 9; ++k) {\n  simdgroup_multiply_accumulate(c, a, b, c);\n}\n"
        "simdgroup_store(c, y + 64 * (simdgroup + 2 * group), 8);",
        {
            (2, "load device"): (4, 4),
            (3, "load device"): (4, 4 * 2),
            (4, "load device"): (4 * 9, 4 * 10),
            (5, "matrix"): (4 * 9, 4 * 9),
            (7, "store device"): (4, 4),
        },
    ),
}


@pytest.mark.parametrize("name", EXECUTED)
def test_executions(name):
    body, expected = EXECUTED[name]
    for seed in (0, 3):
        _, lines = profile(body, threadgroups=2, threads=64, seed=seed)
        assert lines == expected


def test_atomics_are_lines_of_their_own():
    arguments = "device atomic_uint* counters [[buffer(0)]]"
    file = register(kernel("atomic_fetch_add_explicit(&counters[i % 2], 1u, memory_order_relaxed);", arguments))
    counters = np.zeros(64, np.uint32)
    counts = run(file, "test", [("inout", counters)], 1, 64, profile=True)
    assert counts["lines"] == [(file, FIRST_LINE, "atomic", "device", 2, 2)]
    assert lines_of(counts) == (1, 1, 1) and counts["distinct_lines"] == 1
    assert counts["device_loads"] == counts["device_stores"] == 0


def test_params_are_not_counted():
    text = kernel("  y[i] = x[i] + p[0];", ARGUMENTS.format("float") + ", constant float* p [[buffer(2)]]")
    arguments = [np.zeros(32, np.float32), ("output", np.zeros(32, np.float32)), np.zeros(4, np.float32).tobytes()]
    counts = run(register(text), "test", arguments, profile=True)
    assert lines_of(counts) == (1, 1, 2) and counts["device_loads"] == 1
    assert counts["params_bytes_loaded"] == 128


def test_without_the_profile_there_is_none():
    file = register(kernel("y[i] = x[i];", ARGUMENTS.format("float")))
    arguments = [np.zeros(32, np.float32), np.zeros(32, np.float32)]
    assert not {"lines", "distinct_lines", "device_loads"} & set(run(file, "test", arguments))


SCALE = """uint row = thread_position_in_grid.y, column = thread_position_in_grid.x;
float s = 0;
for (int k = 0; k < x_shape[1]; k += 32) {
  s += x[row / 8 * x_shape[1] + k + column];
}
y[row * 32 + column] = s;"""


@pytest.mark.parametrize("name", ["metal_kernel", "mx.fast.metal_kernel"])
def test_a_kernel_of_a_user(name):
    """16 heads, 8 to a row of keys: each of the 2 rows of 96 floats counts once, though 8 threadgroups read it."""
    names = {"name": "scale", "input_names": ["x"], "output_names": ["y"], "source": SCALE}
    sizes = {"grid": (32, 16, 1), "threadgroup": (32, 1, 1), "output_shapes": [(16, 32)], "output_dtypes": [mx.float32]}
    x = mx.ones((2, 96))
    with mm.simulator.enabled(seed=4), mm.simulator.profiled() as launches:
        made = mm.simulator.metal_kernel(**names) if name == "metal_kernel" else mx.fast.metal_kernel(**names)
        y = made(inputs=[x], **sizes)[0]
        mx.eval(y)
    assert (y == 3).all()
    (launch,) = launches
    assert launch.threadgroups == (1, 16, 1) and launch.threads == (32, 1, 1)
    assert (launch.distinct_lines_loaded, launch.distinct_lines_stored, launch.distinct_lines) == (6, 16, 22)
    assert launch.threadgroup_lines == 16 * (3 + 1)
    assert (launch.device_loads, launch.device_stores) == (48, 16)
    lines = {(line.file, line.line, line.operation): line.executions for line in launch.lines}
    assert lines == {("scale.metal", 4, "load"): 48, ("scale.metal", 6, "store"): 16}


def test_one_array_in_two_places_counts_once():
    x = mx.ones((4, 512), mx.float32)
    source = "uint i = thread_position_in_grid.x; y[i] = a[i] + b[i];"
    add = mm.simulator.metal_kernel(name="add", input_names=["a", "b"], output_names=["y"], source=source)
    sizes = {
        "grid": (2048, 1, 1),
        "threadgroup": (64, 1, 1),
        "output_shapes": [(4, 512)],
        "output_dtypes": [mx.float32],
    }
    with mm.simulator.profiled() as launches:
        mx.eval(add(inputs=[x, x], **sizes), add(inputs=[x, mx.zeros((4, 512))], **sizes))
    assert sorted(launch.distinct_lines_loaded for launch in launches) == [64, 128]
    assert [launch.threadgroup_lines for launch in launches if launch.distinct_lines_loaded == 64] == [32 * (2 + 2)]


def test_softmax():
    """A row of 1024 halves is 16 lines, 4 of them a threadgroup's or a few simdgroups': loaded and stored once."""
    x = mx.ones((6, 1024), mx.float16)
    with mx.stream(mx.cpu), mm.simulator.enabled(), mm.simulator.profiled() as launches:
        mx.eval(mm.softmax(x, axis=-1))
    (launch,) = launches
    assert launch.distinct_lines_loaded == launch.distinct_lines_stored == 6 * 16
    assert launch.threadgroup_lines == launch.distinct_lines == 6 * 32
    packs = 6 * 1024 * 2 // 16 // 32  # an access of a simdgroup moves 32 packs of 16 bytes
    assert launch.device_loads == launch.device_stores == packs
    loads = [line for line in launch.lines if (line.operation, line.memory) == ("load", "device")]
    assert sum(line.operations for line in loads) == packs
    assert all(line.file.startswith(("mittens/", "norm/")) for line in launch.lines)


def test_a_row_of_keys_that_8_heads_read_counts_once():
    """16 query heads over 2 heads of 64 keys and values of 128 halves."""
    queries, keys = mx.ones((1, 16, 1, 128), mx.float16), mx.ones((1, 2, 64, 128), mx.float16)
    values = mx.ones((1, 2, 64, 128), mx.float16)
    with mx.stream(mx.cpu), mm.simulator.enabled(), mm.simulator.profiled() as launches:
        mx.eval(mm.scaled_dot_product_attention(queries, keys, values, scale=0.1))
    lines = lambda *shape: np.prod(shape) * 2 // 128
    one = [launch for launch in launches if "combine" not in launch.kernel]
    assert one and one[0].distinct_lines_loaded == lines(16, 128) + 2 * lines(2, 64, 128)
    assert sum(line.executions for line in one[0].lines if line.operation in ("load", "simd", "matrix")) > 0


def test_accesses_that_are_not_watched_cannot_be_profiled():
    with pytest.raises(ValueError, match="watch=False"), mx.stream(mx.cpu), mm.simulator.enabled(watch=False):
        with mm.simulator.profiled():
            mx.eval(mm.softmax(mx.ones((2, 64)), axis=-1))
    with mx.stream(mx.cpu), mm.simulator.enabled(), mm.simulator.profiled() as launches:
        pass
    assert launches == []


def test_a_fault_ends_the_profile():
    with pytest.raises(mm.simulator.Fault), mm.simulator.profiled():
        wrong = mm.simulator.metal_kernel(name="wrong", input_names=["x"], output_names=["y"], source="y[1] = x[99];")
        sizes = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)], "output_dtypes": [mx.float32]}
        mx.eval(wrong(inputs=[mx.ones(1)], **sizes))
    assert _ext.simulator_record(False) == []


@pytest.mark.parametrize(("op", "case", "peer"), [("softmax", "512x4096", ()), ("softmax", "3x7", ("--peer", "metal"))])
def test_the_command_prints_a_screen_and_writes_json(op, case, peer, capsys, tmp_path):
    path = tmp_path / "counts.json"
    assert main(["simulate", op, case, "--json", str(path), *peer]) == 0
    screen = capsys.readouterr().out.splitlines()
    assert max(map(len, screen)) <= 80
    if not peer:
        assert len(screen) <= 24
    assert any(line.split()[:4] == ["distinct", "lines,", "128", "B"] for line in screen)
    found = json.loads(path.read_text())
    assert found["op"] == op and found["passed"]
    assert {launch["by"] for launch in found["launches"]} == {"mlx_mittens", *["mlx"] * len(peer[:1])}
    launch = found["launches"][0]
    if not peer:
        assert launch["counts"]["distinct_lines"] == 2 * 512 * 4096 * 2 // 128
    line = launch["lines"][0]
    assert set(line) == {"file", "line", "operation", "memory", "executions", "operations"}
    assert f"{line['file']}:{line['line']}" in "\n".join(screen)
