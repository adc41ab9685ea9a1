"""The commands check and simulate."""

import pytest

from mlx_mittens import frontend, specs
from mlx_mittens.cli import simulate
from mlx_mittens.cli.main import main
from mlx_mittens.frontend.read.sources import metal_folder

SOUND = """#include <metal_stdlib>
using namespace metal;
kernel void twice(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = 2 * x[i];
}
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "mine.metal"
        path.write_text(text)
        return str(path)

    return write


def test_check_passes_a_sound_file(file, capsys):
    path = file(SOUND)
    assert main(["check", path]) == 0
    assert capsys.readouterr().out == f"{path}: 1 kernel, no mistake that this check knows of\n"


def test_check_says_what_is_wrong_by_line(file, capsys):
    path = file(SOUND.replace("x[i] = 2 * x[i];", "double y = x[i];\n  static int n = 0;\n  x[i] = unknown;"))
    assert main(["check", path]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{path}:4:3: error: Metal has no double: write float",
        f"{path}:5:3: error: 'twice' has a static variable: keep it in a buffer, or write 'constant' outside of a "
        "function",
        f"{path}:6:10: error: use of undeclared identifier 'unknown': declare it before, in this block or around it",
    ]


def test_check_goes_on_to_the_next_file(file, capsys):
    broken = file(SOUND.replace("float*", "float* double"))
    ours = metal_folder() / "norm/softmax.metal"
    assert main(["check", broken, str(ours)]) == 1
    out = capsys.readouterr().out
    assert f"{broken}:3:" in out and f"{ours}: " in out


def test_check_without_a_file(capsys, tmp_path):
    assert main(["check", str(tmp_path / "none.metal")]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x.py", "x.cpp", "x.txt"])
def test_check_of_another_language(name, tmp_path, capsys):
    (tmp_path / name).write_text("# a comment\n# another\n")
    assert main(["check", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert f"{name} is no Metal file: expected one that ends in .metal, or a header" in error
    assert error.count("\n") == 1


NO_KERNEL = {
    "": "there is no kernel in the file",
    "#include <metal_stdlib>\ninline float f(float x) { return x; }\n": "there is no kernel in the file",
    "template <typename T> kernel void k(device T* a [[buffer(0)]]) { a[0] = 1; }\n": "instantiate 'k'",
}


@pytest.mark.parametrize("text", NO_KERNEL)
def test_a_file_without_kernels(text, file, capsys):
    path = file(text)
    assert main(["check", path]) == 1
    assert f"{path}:1:1: error: " in (out := capsys.readouterr().out) and NO_KERNEL[text] in out
    assert main(["registers", path]) == 2
    assert "has no kernel: expected functions marked kernel" in capsys.readouterr().err


def test_check_without_a_compiler(file, monkeypatch, capsys):
    monkeypatch.setattr(frontend, "compiler_problem", lambda: "no clang++ here")
    assert main(["check", file(SOUND)]) == 2
    assert "no clang++ here" in capsys.readouterr().err


def test_simulate_prints_what_every_launch_did(capsys):
    assert main(["simulate", "rms_norm", "7x500", "--dtype", "float32", "--seed", "3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("rms_norm, test 7x500, float32: 1 launch, error ")
    assert "norm/rms_norm.metal: rms_norm_" in text
    for words in ("threads of each", "of threadgroups", " simd, ", "bytes", "accesses, merged", "distinct lines"):
        assert words in text
    assert "times the fewest\n" in text and "bytes of device memory moved" in text


def test_simulate_counts_what_the_kernel_has_to_move():
    (op,) = (op for op in specs.OPS if op.name == "softmax")
    check, launches = simulate.simulate(op, specs.Case("test", (4, 1024)), specs.DTYPES["float32"])
    assert check.passed and len(launches) == 1
    counts = launches[0]["counts"]
    assert counts["device_bytes_stored"] == 4 * 1024 * 4
    assert counts["device_bytes_loaded"] >= 4 * 1024 * 4
    assert counts["device_lines"] == counts["device_lines_fewest"] >= 2 * 4 * 1024 * 4 // 128
    assert counts["threads"] == 32 * (counts["threads"] // 32) > 0


def test_simulate_shows_every_launch_of_a_gradient(capsys):
    assert main(["simulate", "layer_norm", "130x1030 vjp", "--dtype", "float32"]) == 0
    text = capsys.readouterr().out
    assert text.count("threads of each") == int(text.split(": ")[1].split(" launch")[0]) > 1


def test_simulate_shows_what_mlxs_own_kernel_does(capsys):
    assert main(["simulate", "softmax", "7x500", "--peer", "metal"]) == 0
    text = capsys.readouterr().out
    assert text.count("threads of each") == 2 and "mlx/softmax_single_row_half_float.metal" in text
    assert main(["simulate", "rms_norm", "7x500", "--peer", "metal"]) == 0
    assert "MLX has no Metal kernel of its own to show for rms_norm, test 7x500" in capsys.readouterr().out


def test_simulate_says_what_the_watcher_finds_in_mlxs_own_kernel(capsys):
    arguments = ["simulate", "quantized_matmul", "test 1x2880x9 transpose=True group_size=32 bits=4", "--peer", "metal"]
    assert main(arguments) == 0
    assert "NOTE on MLX's kernel" in capsys.readouterr().out
    assert main([*arguments, "--no-watch"]) == 0
    text = capsys.readouterr().out
    assert "NOTE" not in text and "mlx/affine_qmv_half_32_4_false.metal" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_op", "3x7"], "no op is called 'no_such_op'; there are rms_norm"),
        (["rms_norm", "no such case"], "no case 'no such case'; the nearest are\n  "),
        (["rms_norm", "--json", "x.json"], "--json goes with OP and CASE, which mlx-mittens simulate lists"),
        (["--chip", "m1"], "--chip goes with OP and CASE"),
        (["rms_norm", "--no-watch"], "--no-watch goes with OP and CASE"),
        (["rms_norm", "--seed", "0"], "--seed goes with OP and CASE"),
    ],
)
def test_simulate_says_what_there_is(arguments, message, capsys):
    assert main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err
