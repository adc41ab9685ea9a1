"""Our standard library and MLX's headers: the folders, their digest, and kernels that were built ahead of time."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from . import cache, compiler
from .read import sources

_FOLDER = Path(__file__).resolve().parent
INCLUDE = _FOLDER / "include"


def abi_folder() -> Path:
    """Where simulator/abi.h is: installed beside our headers, in a source tree beside the simulator."""
    for folder in (INCLUDE, _FOLDER.parent.parent / "csrc", sources.metal_folder().parent / "csrc"):
        if (folder / "simulator" / "abi.h").is_file():
            return folder
    raise FileNotFoundError("mlx_mittens finds no simulator/abi.h: reinstall the package")


def installed() -> Path:
    """The folder with the build's products. In an editable install it differs from the source folder."""
    package = __package__.rpartition(".")[0]
    spec = importlib.util.find_spec(f"{package}._build") if package else None
    return Path(spec.origin).parent if spec and spec.origin else _FOLDER.parent


@functools.cache
def key() -> str:
    """A digest of our whole standard library and this package: part of the key of compiled kernels."""
    abi = abi_folder() / "simulator" / "abi.h"  # in a source tree it is elsewhere than in an installed package
    own = {path for path in [*INCLUDE.rglob("*"), *_FOLDER.rglob("*.py")] if path.is_file()} - {abi}
    return cache.key(*(path.read_text() for path in [*sorted(own), abi]))


@functools.cache
def mlx_include() -> list[Path]:
    """The folder of MLX's own headers, where the wheel that is installed has it."""
    spec = importlib.util.find_spec("mlx")
    folders = [Path(place) / "include" for place in (spec.submodule_search_locations if spec else None) or ()]
    return [folder for folder in folders if (folder / "mlx").is_dir()]


def parsed(found: compiler.Compiler, flags: list[str]) -> str:
    """The file in which clang keeps our standard library as these flags have it, which takes longer to parse than most
    kernels to compile; empty if it makes none."""
    headers = [*(path for path in INCLUDE.rglob("*") if path.is_file()), abi_folder() / "simulator" / "abi.h"]
    stamps = sorted(
        f"{path} {path.stat().st_mtime_ns} {path.stat().st_size}" for path in headers
    )  # clang compares them
    name = cache.key(key(), *stamps, found.identity, " ".join(flags), processor())

    def make(path: Path) -> None:
        done = found.run([*compiler.header_flags(flags), "-o", str(path)], '#include "metal/stdlib.h"\n')
        if done.returncode:
            raise ChildProcessError(done.stderr)

    try:
        return str(cache.cached(f"stdlib-{name}.pch", make))
    except ChildProcessError:
        return ""


def prebuilt_key(flat: str) -> str:
    """The mark by which a prebuilt PTX file names its source text, so that an edited kernel does not run old PTX."""
    return cache.key(flat, key())


@functools.cache
def processor() -> str:
    """The features of this machine's processor: libraries are compiled for it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        import platform

        return platform.platform()
    return "".join(sorted({line for line in text.splitlines() if line.startswith(("flags", "Features", "model name"))}))


def metallib(file: str = "") -> str:
    """The path of the Metal library that was built ahead of time; empty if there is none, or an outdated one.

    Args:
        file: The .metal file whose kernels are wanted. Registered sources are in no library, and neither are files for
            matrix units, which want a newer Metal: the GPU's own compiler gets their text.
    """
    if sources.is_registered(file) or sources.is_for_matrix_units(file):
        return ""
    folder, now = installed() / "metal", sources.metal_folder()
    path = folder / "mlx_mittens.metallib"
    current = path.is_file() and (folder == now or _texts(folder) == _texts(now))
    return str(path) if current else ""


def _texts(folder: Path) -> dict[Path, bytes]:
    """Kernels and headers of a folder."""
    paths = [path for kind in ("*.metal", "*.h") for path in folder.rglob(kind)]
    return {path.relative_to(folder): path.read_bytes() for path in paths}
