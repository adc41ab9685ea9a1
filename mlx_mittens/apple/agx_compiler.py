"""asahi_clc, Mesa's compiler from SPIR-V to the machine code of Apple GPUs: where it is, and how it is built.

It is built from Debian's source package of Mesa, with a patch (mesa.patch) that leaves out what needs LLVM, lets
registers be spilled, and prints statistics and machine code. The result stays in the cache of compiled kernels, under
the version of Mesa and a key of the patch. Mesa's licence is MIT.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..frontend import cache

VERSION = "25.0.7"
VARIABLE = "MLX_MITTENS_ASAHI_CLC"
COMMAND = "mlx-mittens agx-compiler"

_PATCH = Path(__file__).with_name("mesa.patch")
_SUITE = "trixie"  # whose Mesa it is; the machine itself may run another Debian
_ARCHIVE = f"mesa_{VERSION}.orig.tar.xz"
_ARCHIVE_SHA256 = "592272df3cf01e85e7db300c449df5061092574d099da275d19e97ef0510f8a6"
_TARGET = "src/asahi/clc/asahi_clc"
_PYTHON_TOOLS = ("meson", "ninja", "mako", "pyyaml", "packaging")
# Debian's package of each program that the build calls.
_PROGRAMS = {"cc": "gcc", "c++": "g++", "patch": "patch", "ld": "binutils"}
_DISABLED = (
    *("egl", "expat", "gbm", "gles1", "gles2", "glx", "libunwind", "llvm", "lmsensors", "shader-cache", "valgrind"),
    *("xmlconfig", "zlib", "zstd"),
)
_OPTIONS = (
    *(f"-D{option}=disabled" for option in _DISABLED),
    *("-Dgallium-drivers=", "-Dvulkan-drivers=", "-Dplatforms=", "-Dvideo-codecs=", "-Dopengl=false", "-Dtools=asahi"),
    # Assertions stay: they are how it says what it does not compile.
    *("-Dbuildtype=plain", "-Doptimization=1", "-Db_ndebug=false", "-Dcpp_rtti=false", "-Dc_args=-w", "-Dcpp_args=-w"),
)


class BuildError(RuntimeError):
    """The compiler cannot be built here: what is missing, or what failed."""


def _cached() -> Path:
    """Where the cache has the program of this version and patch."""
    return cache.cache_folder() / f"asahi_clc-{VERSION}-{cache.key(_PATCH.read_text(), ' '.join(_OPTIONS))[:16]}"


def problem() -> str:
    """What keeps machine code from being made here, with the command to run; or an empty string."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return "" if shutil.which(chosen) else f"{VARIABLE} is {chosen!r}, which is not a program that runs"
    if _cached().is_file():
        return ""
    return f"there is no asahi_clc, the compiler of Apple GPUs' machine code: run {COMMAND}"


def find() -> Path:
    """The program: $MLX_MITTENS_ASAHI_CLC, else the one that was built into the cache.

    Raises:
        RuntimeError: There is none; the message says what to run.
    """
    if missing := problem():
        raise RuntimeError(missing)
    chosen = shutil.which(os.environ.get(VARIABLE) or "")
    return Path(chosen) if chosen else _cached()


@functools.cache
def identity(program: Path) -> str:
    """What changes with the program: part of the key of what it compiled."""
    return hashlib.sha256(program.read_bytes()).hexdigest()


def build(force: bool = False, report: Callable[[str], None] = lambda line: None) -> Path:
    """Builds the program into the cache, if it is not there.

    Args:
        force: Build it again if it is there.
        report: Is told of each step.

    Raises:
        BuildError: A program is missing, or a step fails.
    """
    path = _cached()
    if path.is_file() and not force:
        return path
    folder = cache.writable_folder()
    _require_programs(report)
    with tempfile.TemporaryDirectory(prefix="mlx-mittens-mesa-") as scratch:
        work = Path(scratch)
        report(f"download Mesa {VERSION}: source package of Debian {_SUITE}")
        archive = _download(work)
        report("unpack and patch")
        source = _unpack(archive, work)
        report("install " + ", ".join(_PYTHON_TOOLS) + " for the build")
        environment = _python_tools(work)
        report("configure")
        build_folder = work / "build"
        meson = [sys.executable, "-m", "mesonbuild.mesonmain"]
        _call([*meson, "setup", build_folder, source, "--native-file", _native_file(work), *_OPTIONS], environment)
        report("compile")
        ninja = shutil.which("ninja", path=environment["PATH"]) or "ninja"
        _call([ninja, "-C", build_folder, _TARGET], environment)
        handle, made = tempfile.mkstemp(prefix=".asahi_clc", dir=folder)
        os.close(handle)
        shutil.copyfile(build_folder / _TARGET, made)
        if strip := shutil.which("strip"):
            _call([strip, made])
        os.chmod(made, 0o755)
        final = folder / path.name
        os.replace(made, final)
    return final


def _call(
    command: Sequence[str | Path], environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> str:
    """Runs a step, in a folder; returns what it prints.

    Raises:
        BuildError: It fails; the message ends in the last lines that it printed.
    """
    done = subprocess.run(
        [str(part) for part in command],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-25:])
        raise BuildError(f"{Path(str(command[0])).name} failed (status {done.returncode}):\n{last}")
    return done.stdout


def _require_programs(report: Callable[[str], None]) -> None:
    """Installs what is missing, as root on a Debian; elsewhere says what it is."""
    if not sys.platform.startswith("linux"):
        raise BuildError(f"asahi_clc is built on Debian only: set {VARIABLE} to one that was built elsewhere")
    if not shutil.which("apt-get"):
        raise BuildError(
            "there is no apt-get, by which the source of Mesa is fetched: build on Debian 12 or 13, or set "
            f"{VARIABLE} to an asahi_clc that was built with {_PATCH}"
        )
    packages = [package for program, package in _PROGRAMS.items() if not shutil.which(program)]
    if not packages:
        return
    names = " ".join(packages)
    if os.geteuid() != 0:
        raise BuildError(f"the build needs {names}: as root, apt-get install {names}")
    report(f"apt-get install {names}")
    quiet = ["-qq", "-y", "--no-install-recommends"]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    _call(["apt-get", "update", "-qq"], environment)
    _call(["apt-get", "install", *quiet, *packages], environment)


def _mirror() -> str:
    """The mirror of Debian that apt uses here, also where its lists were not fetched yet."""
    targets = _call(["apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI)", "Created-By: Packages"])
    for line in targets.splitlines():
        if line.rstrip("/").endswith("/debian"):
            return line
    raise BuildError("apt has no mirror of Debian here: add one to its sources, and run apt-get update")


def _download(work: Path) -> Path:
    """Fetches the source by apt, which checks signatures, with lists of its own: the machine's stay as they are."""
    sources, lists = work / "sources.list", work / "lists"
    (lists / "partial").mkdir(parents=True)
    sources.write_text(f"deb-src {_mirror()} {_SUITE} main\n")
    options = [
        *("-o", f"Dir::Etc::SourceList={sources}", "-o", "Dir::Etc::SourceParts=/dev/null"),
        *("-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={work / 'apt'}", "-o", "Debug::NoLocking=1"),
        *("-o", "APT::Sandbox::User="),
    ]
    (work / "apt").mkdir()
    _call(["apt-get", *options, "-qq", "update"])
    _call(["apt-get", *options, "-qq", "source", "--download-only", "mesa"], folder=work)
    archive = work / _ARCHIVE
    if not archive.is_file():
        found = ", ".join(sorted(path.name for path in work.glob("mesa_*.orig.tar.*"))) or "nothing"
        raise BuildError(f"Debian {_SUITE} has {found}: expected {_ARCHIVE}, for which the patch is written")
    if hashlib.sha256(archive.read_bytes()).hexdigest() != _ARCHIVE_SHA256:
        raise BuildError(f"{_ARCHIVE} is not the file that the patch is written for: its SHA-256 differs")
    return archive


def _unpack(archive: Path, work: Path) -> Path:
    with tarfile.open(archive) as files:
        if hasattr(tarfile, "data_filter"):
            files.extractall(work, filter="data")
        else:
            files.extractall(work)
    source = work / f"mesa-{VERSION}"
    _call(["patch", "-s", "-p1", "-d", source, "-i", _PATCH])
    return source


def _python_tools(work: Path) -> dict[str, str]:
    """Installs what Mesa's build needs of Python; returns an environment with it."""
    folder = work / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target"]
    _call([*pip, folder, *_PYTHON_TOOLS])
    path = os.environ.get("PATH", os.defpath)
    return os.environ | {"PYTHONPATH": str(folder), "PATH": f"{folder / 'bin'}{os.pathsep}{path}"}


def _native_file(work: Path) -> Path:
    """Says which Python runs Mesa's generators: the one that has what they import."""
    file = work / "native.ini"
    file.write_text(f"[binaries]\npython = '{sys.executable}'\npython3 = '{sys.executable}'\n")
    return file
