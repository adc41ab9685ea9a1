"""Predicted launches: trip counts of loops from the simulator's counts, times of launches with a known limit."""

import dataclasses
import itertools
import json
import math

import mlx.core as mx
import pytest

import mlx_mittens as mm
from mlx_mittens import _ext, frontend, specs, table
from mlx_mittens.apple import agx_compiler, machine_code
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.bench import architectures
from mlx_mittens.cli import predicted_models, predictions, simulate
from mlx_mittens.cli.main import main
from mlx_mittens.frontend import CompileError
from mlx_mittens.peer import mlx_metal, mlx_quantized
from mlx_mittens.prediction import launches as prediction

problem = frontend.compiler_problem() or agx_compiler.problem()
needs_compilers = pytest.mark.skipif(bool(problem), reason=problem)

CASE = "test 1x4x2x3x50x64 mask=causal"


def predict(body, *, outputs=1024, inputs=65536, threads=64, dtype=mx.float32, chip="m2-max", grid=None):
    kernel = mm.simulator.metal_kernel("own", ["x"], ["y"], f"uint i = thread_position_in_grid.x;\n{body}")
    return kernel.predict(
        inputs=[mx.zeros((inputs,), dtype)],
        output_shapes=[(outputs,)],
        output_dtypes=[dtype],
        grid=(grid or outputs, 1, 1),
        threadgroup=(threads, 1, 1),
        template=[("T", dtype)],
        chip=chip,
    )


# 1024 threads are 32 simdgroups. The sum is taken over strided elements, so that no loads are merged.
LOOPS = {
    "one": ("for (uint j = 0; j < x_shape[0] / 1024 - 27; ++j) s += x[i + j * 1024];", {"loads": 37}),
    "two after another": (
        "for (uint j = 0; j < x_shape[0] / 1024 - 27; ++j) s += x[i + j * 1024];\n"
        "for (uint j = 0; j < x_shape[0] / 1024 - 51; ++j) s += simd_sum(s + j);",
        {"loads": 37, "reductions": 13},
    ),
    "one in another": (
        "for (uint j = 0; j < x_shape[0] / 1024 - 59; ++j) {\n"
        "  for (uint k = 0; k < x_shape[0] / 1024 - 55; ++k) s += x[i + (j * 9 + k) * 1024];\n"
        "  s = simd_max(s + j);\n}",
        {"loads": 45, "reductions": 5},
    ),
    "none": ("s = x[i];", {"loads": 1, "reductions": 0}),
    "many rounds": ("for (uint j = 0; j < x_shape[0] / 3; ++j) s += x[(i + j * 32) & 65535];", {"loads": 21845}),
    "a way that is not taken": (
        "if (x_shape[0] < 100) { for (uint j = 0; j < x_shape[0]; ++j) s += simd_sum(x[i + j * 1024]); }\n"
        "else { for (uint j = 0; j < x_shape[0] / 1024 - 27; ++j) s += x[i + j * 1024]; }",
        {"loads": 37, "reductions": 0},
    ),
    "two ways, one of which is taken": (
        "if (x_shape[0] > 100) s = x[i] + x[i + 1024] + x[i + 2048];\nelse s = exp2(x[i]) * x[i + 4096];",
        {"loads": 3, "exponentials": 0},
    ),
}


# A case for each schedule of the ops, as users run them.
SHIPPED = {
    "softmax 512x4096": ("softmax", "512x4096"),
    "rms_norm": ("rms_norm", "8B decode 1x4096"),
    "gemv": ("gemv", "1x4096x4096"),
    "attention, decode": ("scaled_dot_product_attention", "decode 1x32x8x1x1024x64"),
    "quantized_matmul": ("quantized_matmul", "1x2880x9"),
    "rope_append": ("rope_append", "test"),
}


@needs_compilers
@pytest.mark.parametrize("name", SHIPPED)
def test_kernels_of_ours_execute_what_the_simulator_counts(name):
    op = specs.get(SHIPPED[name][0])
    case = simulate.find_case(op, SHIPPED[name][1])
    chip = find_chip("m2-max")
    ((_, launches),) = simulate.own_launches(op, case, mx.float16, [chip])
    predicted = prediction.predict_launches([*map(mm.simulator.Launch.of, launches)], chip)
    # The copy that makes arrays contiguous loads their shapes, which the simulator does not tell from elements.
    own = [launch for launch in predicted if not launch.launch.kernel.startswith("copy_strided")]
    for launch in own:
        # Products and barriers are held, so all of a miss is in the loads: of decoding's, Mesa splits a tenth.
        assert launch.mismatch < (0.11 if name == "attention, decode" else 0.1), launch
        assert ("missed" in str(launch)) == (launch.mismatch > prediction.MISMATCH)
        count = launch.launch.counts["matrix_operations"]
        assert launch.work.instructions.matrix == pytest.approx(count, rel=0.005)
        scratch = sum(
            launch.executions.blocks[block.label] * block.opcodes.get("stack_load", 0) for block in launch.code.blocks
        )
        loads = launch.launch.device_loads + launch.launch.threadgroup_loads
        assert launch.work.instructions.loads - scratch == pytest.approx(loads, rel=0.15)


def matrices_of_mlx(dtype):
    """MLX's products and attention of prompts, whose loads Mesa splits and the simulator merges."""
    x, w = (mx.random.normal((64, 256)).astype(dtype) for _ in range(2))
    weights = mx.quantize(w, group_size=64, bits=4)
    q = mx.random.normal((1, 2, 64, 64)).astype(dtype)
    return (
        lambda: mlx_quantized.quantized_matmul(x, *weights, group_size=64, bits=4, stream=mx.cpu),
        lambda: mlx_metal.scaled_dot_product_attention(q, q, q, scale=0.1, mask="causal", stream=mx.cpu),
    )


@needs_compilers
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_products_of_matrices_and_barriers_are_those_that_the_simulator_counts(dtype):
    calls = matrices_of_mlx(dtype)
    for call in calls:
        with mm.simulator.profiled() as launches:
            mx.eval(call())
        launch = prediction.predict_launches(launches, find_chip("m1"))[0]
        counts = launch.launch.counts
        assert launch.mismatch > prediction.MISMATCH, "MLX's loads are no longer split: no test of what is held"
        assert counts["matrix_operations"] > 1000 and counts["threadgroup_barriers"] > 30
        assert launch.work.instructions.matrix == pytest.approx(counts["matrix_operations"], rel=0.005)
        simdgroups = math.prod(launch.launch.threads) // 32
        barriers = launch.executions.opcodes["threadgroup_barrier"]
        assert barriers == pytest.approx(simdgroups * counts["threadgroup_barriers"], rel=0.005)


@needs_compilers
def test_no_prediction_of_matrices_is_above_the_peak_of_the_chip():
    """A core multiplies and adds 128 pairs of numbers a cycle."""
    for call in matrices_of_mlx(mx.float16):
        with mm.simulator.profiled() as launches:
            mx.eval(call())
        for name in ("m1", "m4-max"):
            chip = dataclasses.replace(find_chip(name), cores=1)  # which the few threadgroups fill
            launch = prediction.predict_launches(launches, chip)[0]
            flops = 1024 * launch.launch.counts["matrix_operations"]
            assert 0.2 < flops / (256 * chip.clock_GHz * 1e3 * launch.prediction.microseconds) < 0.95


@needs_compilers
@pytest.mark.parametrize(
    ("operands", "dtype"), [("float", "float32"), ("half", "float16"), ("bfloat", "bfloat16"), ("mixed", "float32")]
)
def test_the_type_of_a_product_is_that_of_its_fragments(operands, dtype):
    """The kernel's name says none; half operands beside float ones are multiplied as floats."""
    a, b = ("half", "float") if operands == "mixed" else (operands, operands)
    body = (
        f"simdgroup_matrix<{a}, 8, 8> a = make_filled_simdgroup_matrix<{a}, 8, 8>({a}(x[0]));\n"
        f"simdgroup_matrix<{b}, 8, 8> b = make_filled_simdgroup_matrix<{b}, 8, 8>({b}(x[1]));\n"
        "simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0.f);\n"
        "simdgroup_multiply_accumulate(c, a, b, c);\n"
        "simdgroup_store(c, y + i / 32 * 64, 8);"
    )
    assert predict(body, outputs=2048, grid=1024).work.matrix_dtype == dtype


@needs_compilers
def test_caches_that_an_op_updates_are_not_copied():
    op = specs.get("rope_append")
    case = simulate.find_case(op, "test")
    for chips in (["m1"], ["m1", "m3-max"]):
        planned = simulate.own_launches(op, case, mx.float16, [find_chip(name) for name in chips])
        assert {launch["kernel"] for _, launches in planned for launch in launches} == {"rope_append_float16"}
    _, launches = simulate.simulate(op, case, mx.float16)
    assert [launch["kernel"] for launch in launches] == ["rope_append_float16"]


@needs_compilers
def test_a_loop_in_a_loop_that_only_computes_runs_each_time_that_it_is_come_to():
    body = (
        "float s = 0;\nfor (uint j = 0; j < x_shape[0] / 1024 - 24; ++j) {\n  s += x[i + j * 1024];\n"
        "  for (uint k = 0; k < x_shape[0] / 1024; ++k) s = fma(s, s, 0.5f) + s;\n}\ny[i] = s;"
    )
    launch = predict(body)
    inner = max(range(len(launch.code.loops)), key=lambda i: launch.code.loops[i].depth)
    header = launch.code.loops[inner].header
    assert launch.uncounted == 1
    assert launch.executions.blocks[header] / 32 == pytest.approx(40, rel=0.1)


@needs_compilers
def test_counts_that_the_machine_code_cannot_have_are_reported():
    launch = predict("y[i] = x[i];")
    wrong = dataclasses.replace(launch.launch, device_loads=5 * launch.launch.device_loads)
    executions = prediction.executions(launch.code, wrong)
    other = prediction.PredictedLaunch(wrong, launch.code, executions, "", launch.chip)
    assert other.mismatch > 0.2 and "its counts are missed by" in str(other)


@needs_compilers
@pytest.mark.parametrize("name", LOOPS)
def test_loops_run_as_often_as_the_simulator_counts(name):
    body, each = LOOPS[name]
    found = predict(f"T s = 0;\n{body}\ny[i] = s;").work.instructions
    for kind, count in each.items():
        assert getattr(found, kind) / 32 == pytest.approx(count, rel=0.02, abs=0.02), kind
    assert found.stores / 32 == pytest.approx(1)


@needs_compilers
def test_a_copy_is_limited_by_memory():
    """16 MB through the 400 GB/s of an M2 Max, where 93 % is reached."""
    launch = predict("y[i] = x[i];", outputs=1 << 21, inputs=1 << 21, threads=1024)
    assert launch.prediction.limit == "device memory"
    assert launch.work.lines == 2 * (1 << 21) * 4 / 128
    assert launch.prediction.microseconds == pytest.approx(16.8e6 / (0.926 * 409.6e3) + 2.5, rel=0.05)


@needs_compilers
def test_a_loop_that_only_computes_is_reported():
    """The simulator counts accesses and operations between threads; how often such a loop runs, it does not say."""
    body = "float s = x[i];\nfor (uint j = 0; j < x_shape[0] / 64; ++j) s = fma(s, s, 0.5f) + s;\ny[i] = s;"
    launch = predict(body)
    assert launch.uncounted == 1
    assert str(launch).endswith("; 1 loop that only computes is taken to run once")
    assert predict("y[i] = x[i];").uncounted == 0


@needs_compilers
def test_matrix_products_are_limited_by_issue_slots():
    body = (
        "simdgroup_float8x8 a, b, c = make_filled_simdgroup_matrix<float, 8, 8>(0.f);\n"
        "simdgroup_load(a, x + i / 32 * 64, 8);\nsimdgroup_load(b, x, 8);\n"
        "for (uint j = 0; j < x_shape[0] / 512; ++j) simdgroup_multiply_accumulate(c, a, b, c);\n"
        "simdgroup_store(c, y + i / 32 * 64, 8);"
    )
    launch = predict(body, outputs=1 << 16, grid=1 << 15, threads=128)
    assert launch.prediction.limit == "issue slots"
    assert launch.work.instructions.matrix == pytest.approx(1024 * 128, rel=0.01)


@needs_compilers
def test_bfloat16_costs_nothing_more_where_the_chip_has_it():
    body = "for (uint j = 0; j < 64; ++j) y[i + j * 1024] = x[i + j * 1024] * T(3);"
    old = predict(body, outputs=65536, grid=1024, dtype=mx.bfloat16, chip="m2-max")
    new = old.on(find_chip("m3-max"))
    assert old.code.kinds["complex"] >= 1
    assert new.work.instructions.multiplies < old.work.instructions.multiplies


@needs_compilers
def test_every_launch_in_a_block_is_predicted():
    x = mx.zeros((4, 512))
    with mm.simulator.enabled(), mm.simulator.predicted(chip="m4-max") as launches:
        mx.eval(mm.softmax(x, axis=-1, stream=mx.cpu), mm.rms_norm(x, None, 1e-5, stream=mx.cpu))
    assert sorted(launch.launch.kernel.split("_block")[0] for launch in launches) == ["rms_norm", "softmax"]
    assert all(launch.chip.name == "m4-max" and launch.prediction.microseconds > 2.5 for launch in launches)
    both = prediction.total(launches)
    assert both.microseconds > max(launch.prediction.microseconds for launch in launches)
    assert "half registers" in str(launches[0])


def columns(launches):
    """The cells of the printed table by the names of its columns."""
    head, *lines = str(launches).splitlines()
    names = [name.strip() for name in head.split("  ") if name.strip()]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return [dict(zip(names, each)) for each in cells if len(each) == len(names)], lines


@needs_compilers
def test_own_times_and_gaps_add_up_to_the_total():
    x = mx.zeros((4, 512))
    with mm.simulator.enabled(), mm.simulator.predicted(chip="m4-max") as launches:
        y = mm.softmax(x, axis=-1, stream=mx.cpu)
        mx.eval([mm.rms_norm(y, None, 1e-5 * i, stream=mx.cpu) for i in range(1, 4)])
    rows, lines = columns(launches)
    assert [row["launches"] for row in rows] == ["3", "1"]
    own, gaps = (sum(float(row[name]) for row in rows) for name in ("us", "gaps us"))
    assert gaps == pytest.approx(3 * 4.7, abs=0.11) and own + gaps == pytest.approx(
        launches.total.microseconds, abs=0.2
    )
    assert f"{launches.total.microseconds:.0f} us on m4-max, {gaps:.0f} us of it in the gaps" in "\n".join(lines)


@needs_compilers
def test_a_users_kernel_has_its_own_name():
    kernel = mm.simulator.metal_kernel("shifty", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = x[i];")
    with mm.simulator.enabled(), mm.simulator.predicted(chip="m1") as launches:
        arguments = {"output_shapes": [(64,)], "output_dtypes": [mx.float32], "grid": (64, 1, 1)}
        mx.eval(kernel(inputs=[mx.zeros(64)], threadgroup=(64, 1, 1), **arguments))
        mx.eval(mm.softmax(mx.zeros((4, 64)), axis=-1, stream=mx.cpu))
    assert sorted(row["of"] for row in columns(launches)[0]) == ["mlx_mittens", "shifty"]


@needs_compilers
def test_notebooks_show_predictions_and_profiles_as_tables():
    x = mx.zeros((4, 1024))
    with mm.simulator.enabled():
        with mm.simulator.predicted(chip="m1") as predicted:
            mx.eval(mm.softmax(x, axis=-1, stream=mx.cpu))
        with mm.simulator.profiled() as profiled:
            mx.eval(mm.softmax(x, axis=-1, stream=mx.cpu))
    for shown, cells in (
        (predicted, ["gaps us", "mlx_mittens", "Predicted, not measured."]),
        (profiled, ["threadgroups", "softmax_block1_float32"]),
        (profiled[0], ["executions", "norm/softmax.metal: softmax_block1_float32"]),
        (mm.stats(), ["op", "softmax"]),
    ):
        text = shown._repr_html_()
        assert text.startswith("<table><thead><tr><th") and all(f">{cell}" in text for cell in cells)
    assert "limited by" in predicted[0]._repr_html_()
    assert str(profiled).splitlines()[1].split()[:3] == ["softmax_block1_float32", "4", "256"]
    assert table.html([["a"], ["<b>"]], 1).count("&lt;b&gt;") == 1


@needs_compilers
def test_tables_mark_counts_that_are_missed(capsys):
    assert main(["simulate", "quantized_matmul", "test 16x", "--peer", "metal", "--chip", "m1"]) == 0
    out = capsys.readouterr().out
    assert f"\n{prediction.MARKED}" in out and "the simulator's counts are missed by" in out
    (row,) = (line for line in out.splitlines() if line.startswith("m1 "))
    assert row.split()[-2].endswith(prediction.MARK)
    with mm.simulator.profiled() as launches:
        mx.eval(matrices_of_mlx(mx.float16)[0]())
    predicted = mm.simulator.PredictedLaunches(find_chip("m1"))
    predicted += prediction.predict_launches(launches, find_chip("m1"))
    assert prediction.MARKED in str(predicted) and "*" in str(predicted).splitlines()[1]


@needs_compilers
def test_kernels_of_one_name_have_their_own_machine_code():
    calls = {}
    for factor in ("x[i]", "exp2(x[i])"):
        kernel = mm.simulator.metal_kernel(
            "same", ["x"], ["y"], f"uint i = thread_position_in_grid.x; y[i] = {factor};"
        )
        arguments = {"output_shapes": [(64,)], "output_dtypes": [mx.float32], "grid": (64, 1, 1)}
        calls[factor] = lambda kernel=kernel, a=arguments: kernel(inputs=[mx.zeros(64)], threadgroup=(64, 1, 1), **a)[0]
    with mm.simulator.predicted(chip="m1") as launches:
        mx.eval([call() for call in calls.values()])
    assert sorted(launch.work.instructions.exponentials for launch in launches) == pytest.approx([0, 2])


@needs_compilers
def test_a_kernel_that_mesa_refuses_is_not_compiled(monkeypatch):
    def refuse(file, kernel, *_):
        raise CompileError(file, kernel, "error: Mesa refuses it: no such thing")

    monkeypatch.setattr(machine_code, "compile", refuse)
    launch = predict("y[i] = x[i];")
    assert launch.work is None and launch.prediction is None
    assert "no such thing" in launch.problem and str(launch).endswith(machine_code.NOT_COMPILED)
    assert prediction.total([launch]) is None


def test_records_do_not_nest():
    with mm.simulator.profiled(), pytest.raises(RuntimeError, match="being profiled already"), mm.simulator.profiled():
        pass
    with mm.simulator.profiled() as launches:
        pass
    assert launches == []


def test_an_unknown_chip_lists_the_known_ones():
    with pytest.raises(ValueError, match="no Apple GPU is known as 'm9'; .*nown are .*m2-max"):
        predict("y[i] = x[i];", chip="m9")
    with pytest.raises(ValueError, match="m2-max"), mm.simulator.predicted(chip="m9"):
        pass


def test_without_mesa_the_error_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setenv(agx_compiler.VARIABLE, "/nowhere/asahi_clc")
    with pytest.raises(RuntimeError, match=agx_compiler.VARIABLE):
        predict("y[i] = x[i];")
    arguments = ["simulate", "scaled_dot_product_attention", CASE, "--chip", "m1"]
    assert main(arguments) == 0, "instructions of our kernels are in the package"
    assert main([*arguments, "--peer", "metal"]) == 2
    assert agx_compiler.VARIABLE in capsys.readouterr().err


@needs_compilers
def test_simulate_shows_a_line_for_each_chip(tmp_path, capsys):
    file = tmp_path / "out.json"
    arguments = ["simulate", "scaled_dot_product_attention", CASE, "--peer", "metal", "--json", str(file)]
    assert main([*arguments, "--chip", "m1,m5-max"]) == 0
    out = capsys.readouterr().out
    shown = out[out.index("Predicted, not measured:") :]
    assert max(map(len, shown.splitlines())) <= 80
    assert "nine in ten within" in shown and "published times" in shown and "half registers" in shown
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith(("m1 ", "m5-max "))}
    written = json.loads(file.read_text())["predictions"]
    for chip, row in rows.items():
        ours, theirs = (written[by]["chips"][chip]["microseconds"] for by in ("mlx_mittens", "mlx"))
        assert row[-3:] == [f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}"]
    assert set(rows) == {"m1", "m5-max"}


@needs_compilers
def test_all_chips(capsys):
    assert main(["simulate", "softmax", "test 3x64", "--chip", "all"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in ("m1", "m2-ultra", "m3-pro", "m4", "m5-max"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "softmax", "3x64", "--chip", "m9"], "no Apple GPU is known as 'm9'"),
        (["simulate", "softmax", "3x64", "--chip", "m1", "--no-watch"], "--chip needs the counts of accesses"),
        (["bench", "--chip", "m1"], "--chip goes with --predict"),
        (["bench", "--predict"], "--predict needs --chip NAME"),
        (["bench", "--predict", "--chip", "m1", "--device", "cpu"], "--device does not go with --predict"),
        (["bench", "--predict", "--chip", "m1", "--model", "x"], "--model: x given"),
        (["bench", "--predict", "--model", "qwen3-0.6b", "--quick"], "--quick does not go with --predict --model"),
        (["bench", "--predict", "--model", "qwen3-0.6b", "--tokens", "3"], "--tokens does not go with --predict"),
        (["bench", "--predict", "--model", "qwen3-0.6b", "--prompt", "1"], "--prompt 1: expected 2 or more"),
    ],
)
def test_bad_options(arguments, words, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@needs_compilers
def test_bench_predicts_its_cases(tmp_path, capsys):
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["bench", "--predict", "--quick", "--ops", "rms_norm", "--chip", "m1,m3-max"]
    assert main([*arguments, "--json", str(file), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["complete"] and written["predicted"] and written["chips"] == ["m1", "m3-max"]
    lines = [line for line in out.splitlines() if line.startswith("rms_norm")]
    assert len(lines) == 2 * len(written["rows"]) > 0
    for row in written["rows"]:
        assert row["mlx_mittens"]["kernels"][0]["half_registers"] > 0
        assert row["mlx_mittens"]["chips"]["m1"]["microseconds"] > row["mlx_mittens"]["chips"]["m3-max"]["microseconds"]
    assert "Predicted, not measured" in out and picture.stat().st_size > 1000


@needs_compilers
def test_what_mlx_has_no_kernel_for_in_its_wheel_is_estimated(tmp_path, capsys):
    file = tmp_path / "out.json"
    arguments = ["bench", "--predict", "--quick", "--chip", "m1,m3-max", "--json", str(file)]
    assert main([*arguments, "--ops", "rope_append,gather_sum"]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith(("rope_append", "gather_sum"))]
    assert len(rows) >= 4 and all("~" in line and "x  " in line for line in rows)
    assert "~ launches of mx whose kernels MLX's wheel lacks are estimated from their bytes" in out
    for row in json.loads(file.read_text())["rows"]:
        assert row["mlx"]["estimated"] and row["mlx"]["chips"]["m1"]["microseconds"] > 2.5


@pytest.fixture
def small_llama(monkeypatch):
    """llama-3.2-1b with small layers, and a token after few others."""
    small = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    llama = {**architectures.ARCHITECTURES["llama-3.2-1b"], **small, "vocab_size": 2048}
    monkeypatch.setitem(architectures.ARCHITECTURES, "llama-3.2-1b", llama)
    monkeypatch.setattr(predicted_models, "CONTEXT", 4)


@needs_compilers
def test_bench_predicts_a_token_and_a_prompt_of_a_model(small_llama, tmp_path, capsys):
    file = tmp_path / "out.json"
    arguments = ["--chip", "m1,m4-max", "--prompt", "12", "--json", str(file)]
    assert main(["bench", "--predict", "--model", "llama-3.2-1b", *arguments]) == 0
    out = capsys.readouterr().out
    rows = {(row["phase"], row["chip"]): row for row in json.loads(file.read_text())["rows"]}
    assert {*rows} == {(phase, chip) for phase in ("a token", "a prompt of 12") for chip in ("m1", "m4-max")}
    for row in rows.values():
        assert row["launches"] > 5 * 16 and row["mx_launches"] > row["launches"]
        assert row["mx_microseconds"] > 0 and row["microseconds"] > 2.5 * row["launches"]
    assert "planned for m1" in out and "Predicted, not measured" in out


@pytest.mark.skipif(bool(frontend.compiler_problem()), reason=frontend.compiler_problem())
def test_bench_predicts_a_model_of_ours_without_the_compiler_of_apple_gpus(small_llama, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MLX_MITTENS_ASAHI_CLC", "no-such-program")
    file = tmp_path / "out.json"
    assert main(["bench", "--predict", "--model", "llama-3.2-1b", "--chip", "m1,m4-max", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    for row in json.loads(file.read_text())["rows"]:
        assert row["launches"] > 5 * 16 and row["microseconds"] > 2.5 * row["launches"]
        assert row["mx_launches"] is None and row["mx_microseconds"] is None
    assert "mx's own kernels are not predicted: MLX_MITTENS_ASAHI_CLC is 'no-such-program'" in out


@needs_compilers
def test_a_gradient_on_chips(native, capsys):
    assert main(["simulate", "rms_norm", "test 2085x5 vjp", "--chip", "m2,m3-ultra"]) == 0
    assert "norm_vjp" in capsys.readouterr().out


@needs_compilers
def test_ops_are_planned_for_the_chip(native):
    """A large GPU has work for more threadgroups."""
    q, kv = mx.zeros((1, 8, 1, 64), mx.float16), mx.zeros((1, 8, 8192, 64), mx.float16)
    grids = {}
    for chip in ("m1-7", "m3-ultra"):
        with mm.simulator.enabled(), mm.simulator.predicted(chip=chip) as launches:
            mx.eval(mm.scaled_dot_product_attention(q, kv, kv, scale=1.0, stream=mx.cpu))
        grids[chip] = launches[0].launch.threadgroups
    with mm.simulator.enabled():
        assert _ext.gpu()["name"] == "m2-max"
    assert math.prod(grids["m1-7"]) < math.prod(grids["m3-ultra"])


@needs_compilers
def test_chips_of_other_plans_are_simulated_by_them(native):
    op = specs.get("scaled_dot_product_attention")
    case = simulate.find_case(op, "decode 1x32x8x1x1024x64")
    chosen = [find_chip(name) for name in ("m1", "m1-max", "m3-ultra")]
    planned = simulate.own_launches(op, case, mx.float16, chosen)
    assert sorted(chip.name for chips, _ in planned for chip in chips) == ["m1", "m1-max", "m3-ultra"]
    grids = [[launch["threadgroups"] for launch in launches] for _, launches in planned]
    assert len(grids) > 1 and all(a != b for a, b in itertools.combinations(grids, 2))
    side = predictions.Side.of(planned)
    entry = side.json()["kernels"][0]
    assert {*entry["chips"]} == {*side.predictions} == {chip.name for chip in chosen}
    assert entry["kernel"].startswith("attention_decode")
