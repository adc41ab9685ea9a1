"""A wheel for Linux on arm64, cross-compiled on x86-64 and tried under qemu-user.

python tools/arm64_wheel.py FOLDER

FOLDER keeps downloads and builds; another run goes on from it. The wheel is for the Python that runs this, of a
version that Debian has: Debian's Python for arm64 runs the CMake guard, the stub generator and the tests. Debian's
packages `qemu-user-static` and `g++-aarch64-linux-gnu` must be installed, and this package's build requirements:
`pip install -e ".[cpu,test]"`. The exit status is 1 if a step fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "cmake"))
import guard  # noqa: E402  # which reads the releases of mlx

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

_EMULATOR, _COMPILER = "qemu-aarch64-static", "aarch64-linux-gnu-g++"
_NEEDED = {_EMULATOR: "qemu-user-static", _COMPILER: "g++-aarch64-linux-gnu", "apt-get": "apt", "dpkg-deb": "dpkg"}

# mlx needs glibc 2.35, which only its tag says: Debian's may be newer or older.
_PLATFORMS = ("linux_aarch64", "manylinux_2_35_aarch64", "manylinux_2_28_aarch64", "manylinux_2_17_aarch64")

# Every op, on the CPU: the tests that need neither a compiler nor hours under an emulator.
_TESTS = (ROOT / "tests" / "unit" / "test_ops.py", "-k", "test_values_and_gradients and native")

# Products with integers have code for each instruction set.
_PRODUCTS = tuple(
    ROOT / "tests" / "unit" / "matmul" / f"test_{name}.py" for name in ("integer_products", "unpacked_integers")
)
_SETS = ("neon", "dotprod", "i8mm")


class Failed(Exception):
    """A step went wrong; its text says how."""


def run(command: Sequence[object], folder: Path = ROOT, **environment: str) -> None:
    """Runs a program in a folder; its output is shown.

    Raises:
        Failed: It ends with an error.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env={**os.environ, **environment})
    if done.returncode:
        raise Failed(f"{' '.join(words)} ends with {done.returncode}")


@dataclass(frozen=True)
class Arm64:
    """A stand-in for a machine of the other kind.

    Attributes:
        folder: Keeps all of it.
    """

    folder: Path

    @property
    def root(self) -> Path:
        """Debian's packages for arm64, unpacked."""
        return self.folder / "root"

    @property
    def site(self) -> Path:
        """The Python packages for arm64."""
        return self.folder / "site"

    @property
    def python(self) -> Path:
        """A script that runs the arm64 Python."""
        return self.folder / "python"

    def unpack_debian(self) -> None:
        """Python, its headers and the C++ library, with their requirements, by an apt of its own."""
        if (self.root / "usr" / "bin" / f"python{VERSION}").exists():
            return
        state, cache = self.folder / "apt" / "state", self.folder / "apt" / "cache"
        for folder in (state / "lists" / "partial", cache / "archives" / "partial"):
            folder.mkdir(parents=True, exist_ok=True)
        (state / "status").touch()
        options = {
            "APT::Architecture": "arm64",
            "APT::Architectures": "arm64",
            "APT::Sandbox::User": "root",  # the folder may be one that another user cannot enter
            "Dir::State": state,
            "Dir::State::status": state / "status",
            "Dir::Cache": cache,
            "Debug::NoLocking": "true",
        }
        apt = ["apt-get", "--quiet", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
        run([*apt, "update"])
        packages = [f"python{VERSION}", f"libpython{VERSION}-dev", "libstdc++6"]
        run([*apt, "install", "--download-only", "--yes", "--no-install-recommends", *packages])
        for package in sorted((cache / "archives").glob("*.deb")):
            run(["dpkg-deb", "--extract", package, self.root])

    def install(self, *packages: object) -> None:
        """Puts packages for arm64 into `site`."""
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", self.site]
        pip += ["--only-binary=:all:", "--implementation=cp", f"--python-version={VERSION}"]
        run([*pip, *(f"--platform={name}" for name in _PLATFORMS), *packages])

    def write_python(self) -> None:
        emulator = f"{_EMULATOR} -L {self.root} -E PYTHONPATH={self.site} -E PYTHONDONTWRITEBYTECODE=1"
        self.python.write_text(f'#!/bin/sh\nexec {emulator} {self.root}/usr/bin/python{VERSION} "$@"\n')
        self.python.chmod(0o755)

    def build(self, releases: str = "") -> Path:
        """Cross-compiles the wheel for releases of mlx, else for the one that is installed; its path."""
        wheels = self.folder / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        defined = {
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": "aarch64",
            "CMAKE_CXX_COMPILER": _COMPILER,
            "CMAKE_CXX_FLAGS": f"-idirafter {self.root}/usr/include",
            "Python_EXECUTABLE": self.python,
            "Python_INCLUDE_DIR": f"{self.root}/usr/include/python{VERSION}",
        }
        pip = [sys.executable, "-m", "pip", "wheel", ROOT, "--no-build-isolation", "--no-deps", "--wheel-dir", wheels]
        pip += ["--config-settings", f"build-dir={self.folder / 'build'}"]
        if releases:
            pip += ["--config-settings", f"mittens.releases={releases}"]
        for name, value in defined.items():
            pip += ["--config-settings", f"cmake.define.{name}={value}"]
        suffix = f".cpython-{VERSION.replace('.', '')}-aarch64-linux-gnu.so"
        run(pip, _PYTHON_HOST_PLATFORM="linux-aarch64", SETUPTOOLS_EXT_SUFFIX=suffix)
        (wheel,) = wheels.glob("*.whl")
        if not wheel.name.endswith("-linux_aarch64.whl"):
            raise Failed(f"{wheel.name} has no tag of arm64")
        return wheel


def requirements() -> list[str]:
    """The packages that the wheel and its tests import."""
    version = importlib.metadata.version("mlx")
    nanobind = importlib.metadata.version("nanobind")
    return [f"mlx[cpu]=={version}", f"nanobind=={nanobind}", "numpy", "pytest", "pytest-xdist", "gguf", "ml_dtypes"]


def releases_missing(wheel: Path, releases: str) -> list[str]:
    """The releases of mlx that were asked for and that the wheel has no extension of this processor for."""
    known = list(guard.releases())
    wanted = known if releases == "all" else releases.split(",") if releases else [importlib.metadata.version("mlx")]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    start = lambda release: f"mlx_mittens/_mlx_{release.replace('.', '_')}/_ext."
    inside = [name for name in names if name.endswith("-aarch64-linux-gnu.so")]
    return [release for release in wanted if not any(name.startswith(start(release)) for name in inside)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--seconds", default="8", help="in which cases of an op start (8)")
    parser.add_argument("--releases", default="", help="of mlx, with commas between them, or all (the installed one)")
    arguments = parser.parse_args()
    missing = [package for program, package in _NEEDED.items() if shutil.which(program) is None]
    if missing:
        print(f"missing: apt-get install {' '.join(missing)}", file=sys.stderr)
        return 1
    there = Arm64(arguments.folder.resolve())
    there.folder.mkdir(parents=True, exist_ok=True)
    try:
        there.unpack_debian()
        there.install(*requirements())
        there.write_python()
        wheel = there.build(arguments.releases)
        if missing := releases_missing(wheel, arguments.releases):
            raise Failed(f"{wheel.name} has no extension for mlx {', '.join(missing)}")
        there.install("--no-deps", wheel)
        run([there.python, ROOT / "tools" / "native_cases.py", "--seconds", arguments.seconds])
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml"]
        for instructions in _SETS:
            # In the clone Python would import the source folder.
            run([there.python, *pytest, *_TESTS], there.folder, MLX_MITTENS_CPU=instructions)
            run([there.python, *pytest, *_PRODUCTS], there.folder, MLX_MITTENS_CPU=instructions)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
