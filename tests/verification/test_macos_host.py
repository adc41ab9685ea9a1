"""The macOS extension compiles and links on Linux against the released MLX for macOS, with every symbol found."""

import ctypes
import importlib.metadata
import os
import pathlib
import subprocess
import sys
import sysconfig
import zipfile
from concurrent.futures import ThreadPoolExecutor

import lief
import pytest

ROOT = pathlib.Path(__file__).parents[2]
ZIG = [sys.executable, "-m", "ziglang"]
TARGET = ["-target", "aarch64-macos.14.0"]
MLX = importlib.metadata.version("mlx")
NANOBIND = "3.1.0"


def download(folder: pathlib.Path, *requirements: str, platform: list[str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platform]
        + ["--dest", str(folder), *requirements],
        check=True,
    )


@pytest.fixture(scope="session")
def macos(tmp_path_factory) -> pathlib.Path:
    """A site-packages folder with MLX for macOS, as released, and nanobind's sources."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    mac = ["--platform=macosx_14_0_arm64", "--python-version=3.12", "--implementation=cp"]
    download(wheels, f"mlx=={MLX}", f"mlx-metal=={MLX}", platform=mac)
    download(wheels, f"nanobind=={NANOBIND}", platform=[])
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    return site


def compile_object(source: pathlib.Path, output: pathlib.Path, site: pathlib.Path, options: list[str]) -> pathlib.Path:
    includes = [
        site / "mlx" / "include",
        site / "mlx" / "include" / "metal_cpp",
        site / "nanobind" / "include",
        site / "nanobind" / "ext" / "robin_map" / "include",
        ROOT / "tests" / "verification" / "macos" / "include",
        ROOT / "csrc",
        ROOT / "metal",
        pathlib.Path(sysconfig.get_paths()["include"]),
    ]
    # The library is inspected and never run, so it is not optimized; Zig would add checks of undefined behaviour.
    command = [*ZIG, "c++", *TARGET, "-std=c++20", "-O0", "-fno-sanitize=all", "-g0", "-fvisibility=hidden"]
    command += ["-D_METAL_", "-DNB_DOMAIN=mlx"]
    command += [
        f'-DMITTENS_MLX_VERSION="{MLX}"',
        "-DMITTENS_KNOWN_MLX=1",
        *options,
        *(f"-I{folder}" for folder in includes),
    ]
    result = subprocess.run([*command, "-c", str(source), "-o", str(output)], capture_output=True, text=True)
    assert result.returncode == 0, (
        f"{source.relative_to(ROOT) if ROOT in source.parents else source.name}:\n{result.stderr}"
    )
    return output


# What most sources include, parsed once.
COMMON = """
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"
"""


@pytest.fixture(scope="session")
def extension(macos, tmp_path_factory):
    """The macOS extension, linked."""
    folder = tmp_path_factory.mktemp("objects")
    header = folder / "common.h"
    header.write_text(COMMON)
    common = compile_object(header, folder / "common.pch", macos, ["-x", "c++-header"])
    ours = sorted((ROOT / "csrc").rglob("*.cpp"))
    sources = [(path, ["-include-pch", str(common)]) for path in ours if "isa" not in path.parts]
    sources += [(path, ["-DMITTENS_ISA=neon"]) for path in ours if "isa" in path.parts]
    sources += [(macos / "nanobind" / "src" / "nb_combined.cpp", ["-DNB_SHARED=0"])]

    def build(item):
        path, options = item
        name = "_".join(path.with_suffix(".o").parts[-4:])  # files of several folders have the same stem
        return compile_object(path, folder / name, macos, options)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(build, sources))
    library = folder / "_ext.so"
    command = [*ZIG, "c++", *TARGET, "-shared", "-Wl,-undefined,dynamic_lookup", "-o", str(library), *map(str, objects)]
    command += [str(macos / "mlx" / "lib" / "libmlx.dylib")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return lief.parse(str(library))


def exported(path: pathlib.Path) -> set[str]:
    binary = lief.parse(str(path))
    return {symbol.name for symbol in binary.exported_symbols}


def test_every_symbol_of_mlx_is_in_the_released_library(extension, macos):
    wanted = {symbol.name for symbol in extension.imported_symbols if "3mlx" in symbol.name}
    assert len(wanted) > 20, "the extension calls MLX"
    assert any("get_command_encoder" in name and "5metal" in name for name in wanted), "it reaches Metal's encoder"
    assert not wanted - exported(macos / "mlx" / "lib" / "libmlx.dylib")


def test_every_other_symbol_has_a_home(extension, macos):
    libmlx = exported(macos / "mlx" / "lib" / "libmlx.dylib")
    objective_c = {"_objc_msgSend", "_objc_getClass", "_objc_lookUpClass", "_objc_getProtocol", "_sel_registerName"}
    homeless = {
        symbol.name
        for symbol in extension.imported_symbols
        if not from_system_library(symbol) and symbol.name not in libmlx | objective_c and not in_python(symbol.name)
    }
    assert not homeless


def in_python(symbol: str) -> bool:
    """Whether it is of Python's C API, as this Python exports it."""
    return hasattr(ctypes.pythonapi, symbol.removeprefix("_"))


def from_system_library(symbol) -> bool:
    return (
        symbol.has_binding_info and symbol.binding_info.has_library and "libmlx" not in symbol.binding_info.library.name
    )
