"""The commands `registers` and `agx-compiler`."""

import runpy
import subprocess
from pathlib import Path

import pytest

from mlx_mittens import frontend, table
from mlx_mittens.apple import agx_compiler, kernels
from mlx_mittens.bench import mlx_instances
from mlx_mittens.cli import main, registers
from mlx_mittens.frontend import CompileError

ROOT = Path(__file__).parents[2]
problem = frontend.compiler_problem() or agx_compiler.problem()
needs_compilers = pytest.mark.skipif(bool(problem), reason=problem)

KERNEL = """#include <metal_stdlib>
using namespace metal;
kernel void good(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = exp2(x[i]); }
"""


@needs_compilers
def test_a_users_file(tmp_path, capsys):
    path = tmp_path / "own.metal"
    path.write_text(KERNEL)
    assert main.main(["registers", str(path), "--disassemble"]) == 0
    out = capsys.readouterr().out
    assert "exp2" in out and "stop" in out
    row = next(line for line in out.splitlines() if line.startswith(str(path)) and "1024" in line)
    assert row.split()[1] == "good"


@needs_compilers
def test_an_op_and_a_part_of_a_name(capsys):
    assert main.main(["registers", "softmax", "--kernel", "softmax_block1_float"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["file", "kernel", "regs", "threads", "spills"]
    assert [line.split()[1] for line in lines[1:]] == ["softmax_block1_float32", "softmax_block1_float16"]


@needs_compilers
def test_mlx_kernels(capsys):
    assert main.main(["registers", "softmax", "--peer", "metal", "--kernel", "single_row_half"]) == 0
    assert "softmax_single_row_half_float" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["softmaxx"], "neither a .metal file nor an op; ops are rms_norm"),
        (["none.metal"], "cannot read none.metal: No such file"),
        (["softmax", "--kernel", "nothing"], "none has 'nothing' in its name; there are\n  softmax_"),
        (["rope_append", "--peer", "metal"], "knows no kernel of MLX's for 'rope_append'"),
    ],
)
def test_bad_arguments(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(agx_compiler, "problem", lambda: "")
    assert main.main(["registers", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_without_a_compiler_it_says_what_to_run(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("MLX_MITTENS_ASAHI_CLC", raising=False)
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    assert main.main(["registers", "softmax"]) == 2
    assert "run mlx-mittens agx-compiler" in capsys.readouterr().err


def test_a_kernel_without_machine_code_has_no_number(capsys, monkeypatch):
    rows = [registers.Row("a.metal", "bad", CompileError("a.metal", "bad", "error: Mesa refuses it: no textures"))]
    monkeypatch.setattr(agx_compiler, "problem", lambda: "")
    monkeypatch.setattr(registers, "rows", lambda requests: rows)
    assert main.main(["registers", "softmax"]) == 1
    captured = capsys.readouterr()
    line = captured.out.splitlines()[1]
    assert line.split(maxsplit=2)[2] == "not compiled"
    assert "kernel 'bad' of a.metal does not compile:\nerror: Mesa refuses it: no textures" in captured.err


def test_a_row_is_a_line_of_80_columns():
    names = [variant.name for file in frontend.files() for variant in frontend.variants(file)]
    names += [each.kernel for each in mlx_instances.instances()]
    cells = [["file", name, "255", "1024", "1013", "1013", "9999", *["9999"] * 8, "12"] for name in names]
    assert len(cells[0]) == len(registers.COLUMNS)
    assert max(map(len, table.text(registers.COLUMNS, cells, 80).splitlines())) <= 80


def test_files_of_ops_are_those_of_the_documentation():
    where = runpy.run_path(str(ROOT / "docs" / "where.py"))
    documented = {op: {f"{p.family}/{name}" for name in p.kernels} for p in where["PLACES"] for op in p.ops}
    assert {op: set(kernels.files_of(op)) for op in documented} == documented
    assert set(kernels.FILES) <= set(documented) and kernels.files_of("nothing") == ()
    assert set(kernels.for_apple()) < set(frontend.files())


def test_the_compiler_that_is_there_is_named(capsys, monkeypatch, tmp_path):
    program = tmp_path / "asahi_clc"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("MLX_MITTENS_ASAHI_CLC", str(program))
    assert main.main(["agx-compiler"]) == 0
    assert capsys.readouterr().out == f"{program}\n"


def test_what_the_build_lacks_is_said(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("MLX_MITTENS_ASAHI_CLC", raising=False)
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    monkeypatch.setattr(agx_compiler.sys, "platform", "linux")
    monkeypatch.setattr(agx_compiler.shutil, "which", lambda name, **_: None)
    assert main.main(["agx-compiler"]) == 1
    assert "there is no apt-get" in capsys.readouterr().err
    monkeypatch.setattr(agx_compiler.shutil, "which", lambda name, **_: "/usr/bin/apt-get" if "apt" in name else None)
    monkeypatch.setattr(agx_compiler.os, "geteuid", lambda: 1000)
    assert main.main(["agx-compiler"]) == 1
    assert "as root, apt-get install gcc g++ patch" in capsys.readouterr().err


def test_a_failed_step_ends_in_its_last_lines():
    with pytest.raises(agx_compiler.BuildError, match="(?s)sh failed .status 3.:\nno space left"):
        agx_compiler._call(["sh", "-c", "echo no space left; exit 3"])


def test_another_version_of_mesa_is_refused(monkeypatch, tmp_path):
    def call(command, environment=None, folder=None):
        if "indextargets" in command:
            return "http://mirror.test/debian-security/\nhttp://mirror.test/debian/\n"
        if "source" in command:
            (folder / "mesa_26.1.0.orig.tar.xz").write_text("")
        return ""

    monkeypatch.setattr(agx_compiler, "_call", call)
    with pytest.raises(agx_compiler.BuildError, match="has mesa_26.1.0.orig.tar.xz: expected mesa_25.0.7"):
        agx_compiler._download(tmp_path)
    assert (tmp_path / "sources.list").read_text().startswith("deb-src http://mirror.test/debian/ ")


def test_the_patch_names_only_what_the_source_has():
    listed = subprocess.run(["patch", "--version"], capture_output=True)
    assert listed.returncode == 0
    text = agx_compiler._PATCH.read_text()
    assert text.count("--- a/src/asahi/") == text.count("+++ b/src/asahi/") == 5
