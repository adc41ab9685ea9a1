"""The build of the package: its requirements, the options of the compiler, and the places of its products."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

from mlx_mittens import frontend
from mlx_mittens.frontend import library
from mlx_mittens.frontend.read import sources

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "cmake"))
import guard  # noqa: E402

# Prints, for a platform and config settings, scikit-build-core's requirements, definitions and tag.
ASK = """
import json, platform, sys
sys.platform = sys.argv[1]
from scikit_build_core.builder.get_requires import GetRequires
from scikit_build_core.builder.macos import get_macosx_deployment_target
from scikit_build_core.settings.skbuild_read_settings import SettingsReader
given = json.loads(sys.argv[2])
defines = SettingsReader.from_file("pyproject.toml", given, state="wheel").settings.cmake.define
platform.mac_ver = lambda: ("26.1", ("", "", ""), "arm64")
print(json.dumps({
    "requires": list(GetRequires.from_config_settings(given, state="wheel").dynamic_metadata()),
    "defines": defines,
    "tag": str(get_macosx_deployment_target(arm=True, cmake_defines=defines)),
}))
"""


def ask(platform="linux", given=None, **environment):
    clean = {name: value for name, value in os.environ.items() if name != "MACOSX_DEPLOYMENT_TARGET"}
    command = [sys.executable, "-c", ASK, platform, json.dumps(given or {})]
    done = subprocess.run(command, cwd=ROOT, env={**clean, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_build_with_ptx_brings_a_clang():
    asked = ask(given={"mittens.ptx": "true"})
    assert any(requirement.startswith("ziglang") for requirement in asked["requires"])
    assert asked["defines"]["MITTENS_PTX"] == "TRUE"
    assert "-C mittens.ptx=true" in (ROOT / "docs" / "nvidia.md").read_text()


def test_a_build_without_ptx_brings_none():
    asked = ask()
    assert asked["requires"] == [] and "MITTENS_PTX" not in asked["defines"]


def configure_with_ptx(folder, **environment):
    """Configures Kernels.cmake alone, with this Python for the build's."""
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(test LANGUAGES NONE)\nset(MITTENS_PTX ON)\n"
        f'set(Python_EXECUTABLE "{sys.executable}")\nset(CMAKE_CURRENT_SOURCE_DIR "{ROOT}")\n'
        f'include("{ROOT}/cmake/Kernels.cmake")\n'
    )
    environment = {**os.environ, **environment}
    return subprocess.run(["cmake", "-B", "out", "."], cwd=folder, env=environment, capture_output=True, text=True)


def test_ptx_without_a_clang_is_refused_when_it_is_configured(tmp_path):
    done = configure_with_ptx(tmp_path, MLX_MITTENS_CLANG="/no/such/clang")
    assert done.returncode != 0
    assert "/no/such/clang" in done.stderr and "-C mittens.ptx=true" in done.stderr


def test_another_failure_of_the_front_end_is_not_said_to_be_a_missing_clang(tmp_path):
    (tmp_path / "shadows").mkdir()
    (tmp_path / "shadows" / "concurrent.py").write_text("raise ImportError('shadowed')\n")
    done = configure_with_ptx(tmp_path, PYTHONPATH=str(tmp_path / "shadows"))
    assert done.returncode != 0
    assert "ImportError: shadowed" in done.stderr and "mittens.ptx" not in done.stderr


def test_ptx_is_compiled_by_what_pip_brought(tmp_path):
    """pip names the packages of its build environment by PYTHONPATH."""
    package = tmp_path / "overlay" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "zig").write_text(f'#!/bin/sh\ntouch "{package}/asked"\necho clang version 19.1.0\n')
    (package / "zig").chmod(0o755)
    programs = tmp_path / "programs"  # no clang++ among them
    programs.mkdir()
    for program in ("cmake", "make", "ninja", "sh", "touch"):
        if shutil.which(program):
            (programs / program).symlink_to(shutil.which(program))
    environment = {"PATH": str(programs), "PYTHONPATH": str(tmp_path / "overlay"), "MLX_MITTENS_CLANG": ""}
    done = configure_with_ptx(tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert (package / "asked").exists()


@pytest.mark.parametrize("environment, target", [({}, "14.0"), ({"MACOSX_DEPLOYMENT_TARGET": "15.0"}, "15.0")])
def test_library_and_wheel_tag_have_one_deployment_target(environment, target):
    asked = ask("darwin", **environment)
    assert asked["defines"]["CMAKE_OSX_DEPLOYMENT_TARGET"] == asked["tag"] == target


def test_linux_knows_no_deployment_target():
    assert ask()["defines"] == {}


@pytest.mark.parametrize("compiler, told", [("GNU", True), ("Clang", False), ("AppleClang", False)])
def test_only_gcc_is_told_of_its_own_warning(tmp_path, compiler, told):
    """Clang warns of each -Wno- option that it does not know."""
    if shutil.which("make") is None:
        pytest.skip("no make, of whose generator CMake writes down commands")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one.cpp").write_text("")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\n"
        f"set(CMAKE_CXX_COMPILER {sys.executable})\nset(CMAKE_CXX_COMPILER_ID {compiler})\n"
        "set(CMAKE_CXX_COMPILER_ID_RUN ON)\nset(CMAKE_CXX_COMPILER_FORCED ON)\nset(CMAKE_EXPORT_COMPILE_COMMANDS ON)\n"
        f'project(test LANGUAGES CXX)\ninclude("{ROOT}/cmake/Instructions.cmake")\n'
        "add_library(whole STATIC source/one.cpp)\nmittens_add_instruction_sets(whole source)\n"
    )
    command = ["cmake", "-G", "Unix Makefiles", "-B", "out", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    commands = [entry["command"] for entry in json.loads((tmp_path / "out" / "compile_commands.json").read_text())]
    assert any("-Wextra" in command for command in commands)
    assert any("-Wno-maybe-uninitialized" in command for command in commands) == told


@pytest.fixture
def editable(tmp_path, monkeypatch):
    """The folder of an editable install: built files and the kernels they were built from; the code is elsewhere."""
    shutil.copytree(sources.metal_folder(), tmp_path / "metal")
    monkeypatch.setattr(library, "installed", lambda: tmp_path)
    return tmp_path


def test_what_was_built_is_beside_the_extension():
    import mlx_mittens

    assert library.installed() == pathlib.Path(mlx_mittens._ext.__file__).parents[1]


def test_an_editable_install_finds_its_metallib(editable):
    assert frontend.metallib() == ""
    (editable / "metal" / "mlx_mittens.metallib").write_bytes(b"MTLB")
    assert frontend.metallib() == str(editable / "metal" / "mlx_mittens.metallib")


# Stands for Xcode's: writes the files that Metal's compiler is asked for, or says that there is none.
XCRUN = """#!/bin/sh
[ -z "$NO_METAL_COMPILER" ] || exit 1
while [ $# -gt 0 ]; do
  case "$1" in -MF) : > "$2" ;; -o) echo MTLB > "$2" ;; esac
  shift
done
"""


@pytest.mark.parametrize("compiler", [True, False])
def test_the_metallib_is_installed_where_it_is_looked_for(tmp_path, monkeypatch, compiler):
    """CMake's part of a build on a Mac: scikit-build-core puts the installed files beside the extension."""
    if shutil.which("make") is None:
        pytest.skip("no make, by which CMake builds")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "xcrun").write_text(XCRUN)
    (tmp_path / "bin" / "xcrun").chmod(0o755)
    shutil.copytree(sources.metal_folder(), tmp_path / "metal")
    mlx = next(pathlib.Path(p) for p in importlib.util.find_spec("mlx").submodule_search_locations)
    installs = [line for line in (ROOT / "CMakeLists.txt").read_text().splitlines() if "install(DIRECTORY" in line]
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(test LANGUAGES NONE)\nset(APPLE TRUE)\n"
        f'include("{mlx}/share/cmake/MLX/extension.cmake")\nadd_custom_target(mlx_mittens_core ALL)\n'
        f'include("{ROOT}/cmake/Kernels.cmake")\n' + "\n".join(installs) + "\n"
    )
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment |= {} if compiler else {"NO_METAL_COMPILER": "1"}
    steps = (["-G", "Unix Makefiles", "-B", "out", "."], ["--build", "out"], ["--install", "out", "--prefix", "site"])
    for step in steps:
        done = subprocess.run(["cmake", *step], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    monkeypatch.setattr(library, "installed", lambda: tmp_path / "site" / "mlx_mittens")
    installed = tmp_path / "site" / "mlx_mittens" / "metal" / "mlx_mittens.metallib"
    assert frontend.metallib() == frontend.metallib("norm/softmax.metal") == (str(installed) if compiler else "")


def test_registered_sources_are_in_no_metallib(editable):
    (editable / "metal" / "mlx_mittens.metallib").write_bytes(b"MTLB")
    frontend.register_source("tests/own.metal", "kernel void own(device int* x [[buffer(0)]]) {}\n")
    assert frontend.metallib("norm/softmax.metal") and not frontend.metallib("tests/own.metal")


def test_a_metallib_of_other_kernels_is_not_used(editable):
    """As after an edit of a kernel, or of a header, in an editable install."""
    (editable / "metal" / "mlx_mittens.metallib").write_bytes(b"MTLB")
    header = editable / "metal" / "mittens" / "tile.h"
    header.write_text(header.read_text() + "// edited\n")
    assert frontend.metallib() == ""
    header.unlink()
    assert frontend.metallib() == ""


def test_an_editable_install_finds_its_ptx(editable):
    assert not frontend.has_prebuilt_ptx()
    file = "norm/softmax.metal"
    kernel = frontend.variants(file)[0].name
    path = editable / "ptx" / "sm_80" / f"{frontend.entry_name(kernel)}.ptx"
    path.parent.mkdir(parents=True)
    path.write_text(f"// {library.prebuilt_key(frontend.flatten(file))}\nprebuilt")
    assert frontend.has_prebuilt_ptx()
    assert frontend.ptx(file, kernel).endswith("\nprebuilt")


# Files that a source archive leaves out: they belong to the repository, not to the package.
NOT_IN_SOURCE = (".ci/", ".github/", ".pre-commit-config.yaml", ".gitignore", ".clang-format")


def test_a_source_archive_holds_what_the_build_needs(tmp_path):
    """Every file of the repository, and nothing that was built or lies beside it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git repository: an archive was unpacked")
    code = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    assert names - {"PKG-INFO", ".gitignore", ".clang-format"} >= {
        name for name in tracked if not name.startswith(NOT_IN_SOURCE)
    }
    assert not [name for name in names if name.startswith((".ci/", ".github/", "build/", "dist/", ".git/"))]


def test_versions_of_mlx_are_the_same_everywhere():
    """The pin of pyproject.toml, and the documentation's text on it: the newest release that is known."""
    text = (ROOT / "pyproject.toml").read_text()
    pins = set(re.findall(r"mlx(?:\[\w+\])?==([\d.]+)", text))
    assert len(pins) == 1, pins
    (version,) = pins
    releases = list(guard.releases())
    assert version == releases[-1]
    ranges = set(re.findall(r'"mlx(?:\[\w+\])?>=([\d.]+),<([\d.]+)"', text))
    assert len(ranges) == 1, ranges
    oldest, beyond = ranges.pop()
    assert oldest == releases[0] and guard.numbers(version) < guard.numbers(beyond)
    for page in ("README.md", "docs/versioning.md", "docs/configuration.md"):
        assert f"mlx {version}" in (ROOT / page).read_text(), page
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) ", (ROOT / "docs/versioning.md").read_text(), re.M)
    assert rows == list(guard.releases().items()), "the table of releases, each with its nanobind"


def test_versions_of_mlx_lm_are_the_same_everywhere():
    """A range and no pin: mlx-lm 0.31.3 is the newest for Python 3.10, whose users install the extras too."""
    text = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'"mlx-lm(.*?)"', text)
    assert len(named) == 2 and len(set(named)) == 1, named
    oldest, newest = re.fullmatch(r">=([\d.]+),<=([\d.]+)", named[0]).groups()
    assert 'requires-python = ">=3.10,' in text and oldest == "0.31.3"
    for page in ("patching", "versioning", "configuration"):
        assert f"{oldest} to {newest}" in (ROOT / "docs" / f"{page}.md").read_text(), page
    for page in ("README.md", "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        assert not re.search(r"mlx-lm(\[.*?\])?[=~]=", (ROOT / page).read_text()), page
    assert f"Python 3.10 has mlx-lm {oldest}" in (ROOT / "docs" / "patching.md").read_text()


def test_the_mlx_whose_private_parts_are_known_is_the_same_everywhere():
    """The newest one in the pages on features that are off beside another, and the oldest one that can be built for."""
    (known,) = re.findall(r'KNOWN_MLX_VERSION "([\d.]+)"', (ROOT / "csrc/mlx_internals/releases.h").read_text())
    for page in ("architecture", "nvidia", "patching"):
        assert f"mlx {known}" in (ROOT / "docs" / f"{page}.md").read_text().replace("MLX is not version", "mlx"), page
    oldest = next(iter(guard.releases()))
    assert f"mlx {oldest} or later" in (ROOT / "docs" / "versioning.md").read_text()
