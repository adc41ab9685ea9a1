"""The commands `registers` and `agx-compiler`."""

import re
import runpy
import tarfile
import types
from pathlib import Path

import pytest

from mlx_mittens import frontend, table
from mlx_mittens.apple import agx_compiler, kernels, machine_code
from mlx_mittens.cli import main, registers
from mlx_mittens.frontend import CompileError
from mlx_mittens.peer import mlx_instances

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


WITH_CONSTANTS = """#include <metal_stdlib>
using namespace metal;
constant int count [[function_constant(0)]];
constant bool wide [[function_constant(1)]];
constant int maybe [[function_constant(2)]];
constant int factor = is_function_constant_defined(maybe) ? maybe : 3;
kernel void counted(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  for (int j = 0; j < count; ++j) {
    x[i + j] = exp2(x[i]);
  }
}
kernel void widened(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (wide) {
    x[i] = exp2(x[i]);
  }
}
kernel void without(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = x[i] * factor;
}
"""


@pytest.fixture
def with_constants(tmp_path):
    path = tmp_path / "constants.metal"
    path.write_text(WITH_CONSTANTS)
    return str(path)


@needs_compilers
def test_a_kernel_is_not_compiled_without_the_function_constants_that_it_uses(with_constants, capsys):
    assert main.main(["registers", with_constants]) == 1
    out, err = capsys.readouterr()
    rows = {line.split()[1]: " ".join(line.split()[2:]) for line in out.splitlines()[1:]}
    assert rows["counted"] == rows["widened"] == machine_code.NOT_COMPILED
    assert int(rows["without"].split()[0]) > 0  # asks whether its constant has a value
    assert "give --constant count=VALUE" in err and "give --constant wide=VALUE" in err


@needs_compilers
def test_values_of_function_constants(with_constants, capsys):
    stores = {}
    for count in (2, 5):
        arguments = ["--constant", f"count={count}", "--constant", "wide=true", "--disassemble"]
        assert main.main(["registers", with_constants, *arguments]) == 0
        out = capsys.readouterr().out
        assert machine_code.NOT_COMPILED not in out
        stores[count] = out.partition(": widened")[0].count("device_store")
    assert stores == {2: 2, 5: 5}


@needs_compilers
@pytest.mark.parametrize(
    ("constant", "words"),
    [
        ("coun=4", "no kernel has such a function constant; did you mean count?"),
        ("wide=7", "wide=7: 7 is no bool"),
        ("count=1.5", "count=1.5: 1.5 is no int"),
        ("count", "expected NAME=VALUE"),
    ],
)
def test_wrong_function_constants(constant, words, with_constants, capsys):
    assert main.main(["registers", with_constants, "--constant", constant]) == 2
    assert words in capsys.readouterr().err


@needs_compilers
@pytest.mark.parametrize("more", [(), ("--kernel", "x"), ("--disassemble",)])
def test_a_file_without_kernels(more, tmp_path, capsys):
    path = tmp_path / "none.metal"
    path.write_text("#include <metal_stdlib>\n")
    assert main.main(["registers", str(path), *more]) == 2
    assert f"{path} has no kernel: expected" in capsys.readouterr().err


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
        (["softmaxx"], "neither a .metal file nor an op; did you mean softmax? There are rms_norm"),
        (["none.metal"], "there is no file none.metal"),
        (["norm/sofmax.metal"], "there is no file norm/sofmax.metal; did you mean norm/softmax.metal?"),
        (["softmax", "--kernel", "softmax_blok1_float32"], "in its name; the nearest are\n  softmax_block1_float32\n"),
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


def test_a_wrong_name_is_said_before_a_compiler_is_asked_for(capsys, monkeypatch, tmp_path):
    """It takes minutes to build."""
    monkeypatch.delenv("MLX_MITTENS_ASAHI_CLC", raising=False)
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    assert main.main(["registers", "softmx"]) == 2
    assert "did you mean softmax?" in capsys.readouterr().err


def test_a_kernel_without_machine_code_has_no_number(capsys, monkeypatch):
    rows = [registers.Row("a.metal", "bad", CompileError("a.metal", "bad", "error: Mesa refuses it: no textures"))]
    monkeypatch.setattr(agx_compiler, "problem", lambda: "")
    monkeypatch.setattr(registers, "rows", lambda requests: rows)
    assert main.main(["registers", "softmax", "--kernel", frontend.variants("norm/softmax.metal")[0].name]) == 1
    captured = capsys.readouterr()
    line = captured.out.splitlines()[1]
    assert line.split(maxsplit=2)[2] == machine_code.NOT_COMPILED
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
    assert main.main(["agx-compiler", "--source", "mesa-25.0.7.tar.xz"]) == 1
    assert "the build needs the programs cc c++ patch ld" in capsys.readouterr().err
    monkeypatch.setattr(agx_compiler.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(agx_compiler.shutil, "which", lambda name, **_: "/usr/bin/dnf" if name == "dnf" else None)
    assert main.main(["agx-compiler", "--source", "mesa-25.0.7.tar.xz"]) == 1
    assert "as root, dnf install gcc gcc-c++ patch binutils" in capsys.readouterr().err
    monkeypatch.setattr(agx_compiler.shutil, "which", lambda name, **_: "/usr/bin/apt-get" if "apt" in name else None)
    assert main.main(["agx-compiler"]) == 1
    assert "as root, apt-get install gcc g++ patch" in capsys.readouterr().err


def test_a_failed_step_ends_in_its_last_lines():
    with pytest.raises(agx_compiler.BuildError, match="(?s)sh failed .status 3.:\nno space left"):
        agx_compiler._call(["sh", "-c", "echo no space left; exit 3"])


def test_a_long_build_says_how_long_the_rest_takes(monkeypatch):
    clock = iter([0.0, 1.0, 5.0, 20.0])
    monkeypatch.setattr(agx_compiler, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    said = []
    lines = "echo ninja: Entering directory; echo '[1/100] cc a'; echo '[40/100] cc b'"
    printed = agx_compiler._call(["sh", "-c", lines], each_line=agx_compiler._Compiled(said.append))
    assert printed.count("\n") == 3 and said == ["  40 of 100, 30 s left"]


@pytest.mark.parametrize("installer", ["apt-get", "dnf"])
def test_what_the_build_lacks_is_installed_as_root(installer, monkeypatch):
    """By the program that installs packages here."""
    commands = []
    monkeypatch.setattr(agx_compiler.sys, "platform", "linux")
    monkeypatch.setattr(agx_compiler.os, "geteuid", lambda: 0)
    monkeypatch.setattr(agx_compiler.shutil, "which", lambda name, **_: name if name in (installer, "cc") else None)
    monkeypatch.setattr(agx_compiler, "_call", lambda command, environment=None: commands.append(list(command)))
    said = []
    agx_compiler._require_programs(said.append)
    names = ["g++" if installer == "apt-get" else "gcc-c++", "patch", "binutils"]
    assert said == [f"{installer} install {' '.join(names)}"]
    assert commands[-1][:2] == [installer, "install"] and commands[-1][-3:] == names


def fetched(monkeypatch, *names, mirrors=("http://mirror.test/debian-security/", "http://mirror.test/debian/")):
    """Has apt fetch archives of these names."""

    def call(command, environment=None, folder=None):
        if "indextargets" in command:
            return "".join(f"{mirror}\n" for mirror in mirrors)
        if "source" in command:
            for name in names:
                (folder / name).write_text("")
        return ""

    monkeypatch.setattr(agx_compiler, "_call", call)
    monkeypatch.setattr(agx_compiler.shutil, "which", lambda name: name)


def test_another_version_of_mesa_is_fetched(monkeypatch, tmp_path):
    fetched(monkeypatch, "mesa_26.1.0.orig.tar.xz", "mesa_26.1.0-1.debian.tar.xz")
    said = []
    archive = agx_compiler._download(tmp_path, said.append)
    assert archive == tmp_path / "mesa_26.1.0.orig.tar.xz" and agx_compiler._version_of(archive) == "26.1.0"
    assert (tmp_path / "sources.list").read_text().startswith("deb-src http://mirror.test/debian/ ")
    assert said == ["download Mesa: source package of Debian trixie"]


def test_the_known_version_has_to_be_the_known_file(monkeypatch, tmp_path):
    for name in ("mesa_25.0.7.orig.tar.xz", "mesa-25.0.7.tar.xz"):
        (tmp_path / name).write_text("")
        with pytest.raises(agx_compiler.BuildError, match="its SHA-256 differs"):
            agx_compiler._version_of(tmp_path / name)


@pytest.mark.parametrize("name", ["mesa-25.0.7.tar.xz", "linux-6.1.tar.xz"])
def test_a_source_that_is_none_is_named(name, tmp_path):
    if name.startswith("linux"):
        (tmp_path / name).write_text("")
    with pytest.raises(agx_compiler.BuildError, match=f"{name} is no archive of Mesa's source: expected a file such"):
        agx_compiler._version_of(tmp_path / name)


@pytest.mark.parametrize("apt", [True, False])
def test_without_a_mirror_of_debian_the_source_is_mesas_own(apt, monkeypatch, tmp_path):
    """As on Ubuntu, and on Fedora, which has no apt."""
    fetched(monkeypatch, mirrors=["http://archive.ubuntu.test/ubuntu/"])
    monkeypatch.setattr(agx_compiler.shutil, "which", lambda name: name if apt else None)
    served = tmp_path / "served.tar.xz"
    served.write_bytes(b"another file")
    monkeypatch.setattr(agx_compiler, "_URL", served.as_uri())
    said = []
    archive = agx_compiler._download(tmp_path, said.append)
    assert archive.name == "mesa-25.0.7.tar.xz" and archive.read_bytes() == b"another file"
    assert said == [f"download Mesa: {served.as_uri()}"]
    with pytest.raises(agx_compiler.BuildError, match="its SHA-256 differs"):
        agx_compiler._version_of(archive)
    served.unlink()
    with pytest.raises(agx_compiler.BuildError, match="cannot be downloaded here.*--source mesa-25.0.7.tar.xz"):
        agx_compiler._download(tmp_path, said.append)


def test_without_an_archive_the_build_says_so(monkeypatch, tmp_path):
    fetched(monkeypatch)
    with pytest.raises(agx_compiler.BuildError, match="has fetched no archive of Mesa from Debian trixie.*got none"):
        agx_compiler._download(tmp_path, lambda line: None)


HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*")


def hunks():
    """The patch's changes: for each file its hunks, each with its first lines, their numbers and its text."""
    found = {}
    for line in agx_compiler.PATCH.read_text().splitlines():
        if line.startswith("--- a/"):
            found[line.removeprefix("--- a/").split()[0]] = current = []
        elif match := HUNK.fullmatch(line):
            current.append((*(int(number or 1) for number in match.groups()), []))
        elif found and current and not line.startswith("+++ "):
            current[-1][4].append(line)
    return found


def source(version, folder, *, change=lambda file, line: line, moved=0):
    """An archive of Mesa that has no more than the lines that the patch needs, at their places or further down."""
    top = folder / "made" / f"mesa-{version}"
    for file, parts in hunks().items():
        lines = []
        for start, _, _, _, text in parts:
            lines += ["" for _ in range(moved + start - 1 - len(lines))]
            lines += [change(file, line[1:]) for line in text if line[:1] in (" ", "-", "")]
        (top / file).parent.mkdir(parents=True, exist_ok=True)
        (top / file).write_text("\n".join(lines) + "\n")
    archive = folder / f"mesa_{version}.orig.tar.xz"
    with tarfile.open(archive, "w:xz") as files:
        files.add(top, top.name)
    (folder / "work").mkdir()
    return archive


def test_the_patch_is_whole():
    """Every hunk has as many lines as its head says, and files belong to the compiler for Apple GPUs."""
    found = hunks()
    assert len(found) == 5 and all(file.startswith("src/asahi/") for file in found)
    for file, parts in found.items():
        shift = 0
        for start, before, now, after, text in parts:
            assert before == sum(line[:1] in (" ", "-", "") for line in text), (file, start)
            assert after == sum(line[:1] in (" ", "+", "") for line in text), (file, start)
            assert now == start + shift, (file, start)
            shift += after - before


@pytest.mark.parametrize(("version", "moved"), [("25.0.7", 0), ("26.1.0", 7)])
def test_the_patch_goes_into_sources_that_have_its_lines(version, moved, tmp_path):
    patched = agx_compiler._unpack(source(version, tmp_path, moved=moved), version, tmp_path / "work")
    for file, parts in hunks().items():
        text = (patched / file).read_text()
        for *_, lines in parts:
            assert "\n".join(line[1:] for line in lines if not line.startswith("-")) in text, file


def test_a_version_that_the_patch_does_not_fit_says_what_to_do(tmp_path):
    archive = source("26.1.0", tmp_path, change=lambda file, line: line.replace("assert", "check").replace("(", "["))
    words = "(?s)does not fit Mesa 26.1.0 .*tried with 25.0.7: download .*agx-compiler --source mesa-25.0.7"
    with pytest.raises(agx_compiler.BuildError, match=words):
        agx_compiler._unpack(archive, "26.1.0", tmp_path / "work")


def test_the_program_in_the_cache_is_of_this_machine(monkeypatch):
    here = agx_compiler._cached()
    monkeypatch.setattr(agx_compiler.platform, "machine", lambda: "riscv64")
    assert agx_compiler._cached() != here and agx_compiler._cached().parent == here.parent


def test_the_version_is_that_of_the_program(monkeypatch, tmp_path):
    program = tmp_path / "asahi_clc"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv(agx_compiler.VARIABLE, str(program))
    assert agx_compiler.version() == "unknown"
    agx_compiler._note(program).write_text("26.1.0\n")
    assert agx_compiler.version() == "26.1.0"
