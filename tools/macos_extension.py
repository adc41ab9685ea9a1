"""The native libraries for macOS on Apple silicon, cross-compiled on Linux by ziglang.

The core is compiled once, an extension for each release of MLX: against MLX as released for macOS and the headers of
the Python that runs this, and linked with the released libmlx.dylib. macOS' own libraries are not here: ours may take
from libc++ and libobjc what libmlx.dylib takes, and what macos_libcxx.txt lists. tools/macos_wheel.py packs them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_CSRC = ROOT / "csrc"
MACOS = (14, 0)
RPATHS = ("@loader_path/..", "@loader_path/../../mlx/lib")  # of an extension: the core, and libmlx
CORE = "libmlx_mittens_core.dylib"

sys.path.insert(0, str(ROOT / "cmake"))
import guard  # noqa: E402  # which reads the releases of mlx


def common_header() -> str:
    """The header that the build precompiles, with the includes of most sources."""
    cmake = (ROOT / "csrc" / "extension" / "CMakeLists.txt").read_text()
    listed = re.search(r"target_precompile_headers\(\s*\S+\s+PRIVATE\s([^)]*)\)", cmake)
    assert listed is not None
    return "".join(f"#include {name}\n" for name in listed[1].split())


def newest() -> str:
    return list(guard.releases())[-1]


def download(folder: Path, release: str) -> Path:
    """A site-packages folder with a release of MLX for macOS, and the sources of its nanobind."""
    major, minor = sys.version_info[:2]
    mac = [f"--platform=macosx_{MACOS[0]}_{MACOS[1]}_arm64", f"--python-version={major}.{minor}"]
    mac += ["--implementation=cp", f"mlx=={release}", f"mlx-metal=={release}"]
    folder = folder / release
    wheels = folder / "wheels"
    for arguments in (mac, [f"nanobind=={guard.releases()[release]}"]):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(wheels), *arguments], check=True)
    site = folder / "site"
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    return site


@dataclass(frozen=True)
class Compiler:
    """Zig's clang for macOS.

    Attributes:
        site: The folder that `download` made.
        optimize: The level of optimization, such as "-O2".
    """

    site: Path
    optimize: str = "-O2"

    def run(self, *arguments: object, target: str) -> None:
        """Runs it; raises RuntimeError with its output if it fails."""
        includes = [
            self.site / "mlx" / "include",
            self.site / "mlx" / "include" / "metal_cpp",
            self.site / "nanobind" / "include",
            self.site / "nanobind" / "ext" / "robin_map" / "include",
            ROOT / "tests" / "verification" / "macos" / "include",
            ROOT / "csrc",
            ROOT / "metal",
            sysconfig.get_paths()["include"],
        ]
        # Zig would add checks of undefined behaviour, and use symbols that only a later macOS has in its libc++.
        command = [*_zig(), "c++", "-target", f"aarch64-macos.{MACOS[0]}.{MACOS[1]}", "-std=c++20", self.optimize]
        annotations = "_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS"
        command += [f"-U{annotations}", f"-D{annotations}=1"]
        command += ["-fno-sanitize=all", "-g0", "-fvisibility=hidden", "-D_METAL_", "-DNB_DOMAIN=mlx", "-DNDEBUG"]
        command += [f"-I{folder}" for folder in includes]
        _checked([*command, *map(str, arguments)], target)

    def precompiled(self, text: str, folder: Path) -> list[str]:
        """Compiles the text as a header, with its templates instantiated; the options with which sources include it."""
        header, compiled = folder / "common.h", folder / "common.pch"
        header.write_text(text)
        once = ["-Xclang", "-fpch-instantiate-templates"]  # else each source would instantiate them again
        self.run("-x", "c++-header", *once, "-c", header, "-o", compiled, target="the common header")
        return ["-include-pch", str(compiled), *once]

    def core_objects(self, folder: Path) -> list[Path]:
        """The objects of the C++ files that include nothing of MLX and nanobind."""
        folder.mkdir(exist_ok=True)
        # The longest come first. The others are short: each folder is compiled as one.
        sources = sorted((_CSRC / "cpu" / "isa").rglob("*.cpp"))
        integers = [path for path in sources if path.name.startswith("integer_")]
        panels = [path for path in integers if path.name.startswith("integer_panel_")]
        sets = {"neon": sources, "dotprod": integers, "i8mm": panels}
        # Zig's default processor for macOS has the instructions that the first two need.
        options = {"i8mm": ["-Xclang", "-target-feature", "-Xclang", "+i8mm"]}
        items = [
            (name, path, [f"-DMITTENS_ISA={name}", *options.get(name, [])])
            for name, paths in sets.items()
            for path in paths
        ]
        shared = ["-fvisibility=default"]
        families = [path for path in sorted((_CSRC / "cpu").iterdir()) if path.is_dir() and path.name != "isa"]
        folders = (_CSRC / "cpu", *families, _CSRC / "simulator")
        items += [("core", _together(one, folder), shared) for one in folders]
        return self._compiled(items, folder)

    def objects(self, folder: Path) -> list[Path]:
        """The objects of all other C++ files, and of nanobind."""
        common = self.precompiled(common_header(), folder)
        items = [("nanobind", self.site / "nanobind" / "src" / "nb_combined.cpp", ["-DNB_SHARED=0"])]
        core = (_CSRC / "cpu", _CSRC / "simulator")
        sources = (path for path in sorted(_CSRC.rglob("*.cpp")) if not any(path.is_relative_to(one) for one in core))
        items += [("extension", path, common) for path in sources]
        items += [("tools", ROOT / "tools" / "macos_availability.cpp", [])]
        return self._compiled(items, folder)

    def _compiled(self, items: Iterable[tuple[str, Path, list[str]]], folder: Path) -> list[Path]:
        """Objects of sources with options of their own, each with a name before the source's."""

        def build(item: tuple[str, Path, list[str]]) -> Path:
            name, path, options = item
            output = folder / "_".join([name, *path.with_suffix(".o").parts[-4:]])  # folders have sources of one name
            self.run(*options, "-c", path, "-o", output, target=str(path))
            return output

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(build, items))


def _together(sources: Path, folder: Path) -> Path:
    """A source that includes all sources of a folder."""
    path = folder / f"{sources.name}.cpp"
    path.write_text("".join(f'#include "{source}"\n' for source in sorted(sources.glob("*.cpp"))))
    return path


def build_core(site: Path, folder: Path, optimize: str = "-O2") -> Path:
    """Compiles and links the core; its path. Raises RuntimeError with the first error of the compiler."""
    library = folder / CORE
    objects = Compiler(site, optimize).core_objects(folder / "core")
    _link(library, f"@rpath/{CORE}", [*objects, *stubs(site / "mlx" / "lib" / "libmlx.dylib", folder)])
    return library


def build(site: Path, core: Path, folder: Path, optimize: str = "-O2") -> Path:
    """Compiles and links the extension for the MLX of a site; its path. Raises RuntimeError as `build_core` does."""
    folder.mkdir(exist_ok=True)
    library, libmlx = folder / "_ext.so", site / "mlx" / "lib" / "libmlx.dylib"
    objects = Compiler(site, optimize).objects(folder)
    _link(library, "@rpath/_ext.so", [*objects, core, libmlx, *stubs(libmlx, folder)], RPATHS)
    return library


def _link(library: Path, name: str, inputs: Iterable[Path], rpaths: Iterable[str] = ()) -> None:
    # By `build-lib`: `c++` would compile libc++ first, and link it in.
    command = [*_zig(), "build-lib", "-dynamic", "-target", f"aarch64-macos.{MACOS[0]}.{MACOS[1]}", "-O", "ReleaseFast"]
    command += ["-fno-compiler-rt", "-fno-ubsan-rt", "-fstrip", "-lc", "-dead_strip", "-fallow-shlib-undefined"]
    command += [word for rpath in rpaths for word in ("-rpath", rpath)]
    command += ["-install_name", name, f"-femit-bin={library}"]
    _checked([*command, *map(str, inputs)], name)


def stubs(libmlx: Path, folder: Path) -> list[Path]:
    """Text stubs of libc++ and libobjc, for the linker."""
    taken = imports(libmlx)
    exported = {"/usr/lib/libc++.1.dylib": taken["/usr/lib/libc++.1.dylib"] | listed()}
    exported["/usr/lib/libobjc.A.dylib"] = taken["/usr/lib/libobjc.A.dylib"]
    written = []
    for name, symbols in exported.items():
        path = folder / f"{Path(name).name.partition('.')[0]}.tbd"
        path.write_text(_stub(name, symbols))
        written.append(path)
    return written


def listed() -> set[str]:
    """The symbols of libc++ that macos_libcxx.txt lists."""
    lines = (ROOT / "tools" / "macos_libcxx.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def imports(library: Path) -> Mapping[str, set[str]]:
    """The symbols that a library for macOS takes from others, by the library that it takes them from."""
    import lief

    found: dict[str, set[str]] = {}
    binary = lief.parse(str(library))
    for symbol in binary.imported_symbols:
        known = symbol.has_binding_info and symbol.binding_info.has_library
        found.setdefault(symbol.binding_info.library.name if known else "", set()).add(symbol.name)
    return found


def _stub(name: str, symbols: Iterable[str]) -> str:
    return f"""--- !tapi-tbd
tbd-version: 4
targets: [ arm64-macos ]
install-name: '{name}'
exports:
  - targets: [ arm64-macos ]
    symbols: [ {", ".join(repr(symbol) for symbol in sorted(symbols))} ]
...
"""


def _zig() -> list[str]:
    if importlib.util.find_spec("ziglang") is None:
        raise RuntimeError('there is no ziglang to cross-compile with: pip install "ziglang>=0.17"')
    return [sys.executable, "-m", "ziglang"]


def _checked(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what}:\n{done.stderr}")
