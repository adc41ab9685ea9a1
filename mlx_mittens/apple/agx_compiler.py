"""asahi_clc, Mesa's compiler from SPIR-V to the machine code of Apple GPUs: where it is, and how it is built.

It is built from Debian's source package of Mesa, with a patch (mesa.patch) that leaves out what needs LLVM, lets
registers be spilled, and prints statistics and machine code. The result stays in the cache of compiled kernels, under
a key of the patch, the options and the machine's architecture, with its version of Mesa beside it. Mesa's licence is
MIT.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..frontend import cache

VERSION = "25.0.7"  # of Mesa, for which the patch is written
TRIED = (VERSION,)  # versions of Mesa with which the build and the table of bench/results/agx.md were made
VARIABLE = "MLX_MITTENS_ASAHI_CLC"
COMMAND = "mlx-mittens agx-compiler"

PATCH = Path(__file__).with_name("mesa.patch")
_SUITE = "trixie"  # whose Mesa it is; the machine itself may run another Debian
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
    # Assertions stay: by them it refuses kernels.
    *("-Dbuildtype=plain", "-Doptimization=1", "-Db_ndebug=false", "-Dcpp_rtti=false", "-Dc_args=-w", "-Dcpp_args=-w"),
)

# What ninja prints before each file when it prints into a pipe; and how often it is passed on.
_NINJA = re.compile(r"\[(\d+)/(\d+)\]")
_SAY_SECONDS = 10.0


class BuildError(RuntimeError):
    """The compiler cannot be built here: what is missing, or what failed."""


def _cached() -> Path:
    """Where the cache has the program of this patch, for machines of this kind."""
    made_of = PATCH.read_text(), " ".join(_OPTIONS), sys.platform, platform.machine()
    return cache.cache_folder() / f"asahi_clc-{cache.key(*made_of)[:16]}"


def _note(program: Path) -> Path:
    """The file beside a program that was built that says which Mesa it is of."""
    return program.with_name(f"{program.name}.version")


def version() -> str:
    """The version of Mesa that `find` has; ``unknown`` of a program that was built elsewhere."""
    note = _note(find())
    return note.read_text().strip() if note.is_file() else "unknown"


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
    """Changes with the program: part of the key of compiled kernels."""
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
        report(f"download Mesa: source package of Debian {_SUITE}")
        archive, found = _download(work)
        if found not in TRIED:
            report(f"Debian {_SUITE} has Mesa {found}; this was tried with {', '.join(TRIED)} only")
        report(f"unpack and patch Mesa {found}")
        source = _unpack(archive, found, work)
        report("install " + ", ".join(_PYTHON_TOOLS) + " for the build")
        environment = _python_tools(work)
        report("configure")
        build_folder = work / "build"
        meson = [sys.executable, "-m", "mesonbuild.mesonmain"]
        _call([*meson, "setup", build_folder, source, "--native-file", _native_file(work), *_OPTIONS], environment)
        report("compile")
        ninja = shutil.which("ninja", path=environment["PATH"]) or "ninja"
        _call([ninja, "-C", build_folder, _TARGET], environment, each_line=_Compiled(report))
        handle, made = tempfile.mkstemp(prefix=".asahi_clc", dir=folder)
        os.close(handle)
        shutil.copyfile(build_folder / _TARGET, made)
        if strip := shutil.which("strip"):
            _call([strip, made])
        os.chmod(made, 0o755)
        final = folder / path.name
        _note(final).write_text(f"{found}\n")
        os.replace(made, final)
    return final


class _Compiled:
    """Reads the lines of ninja, and reports how many files are compiled and how long the others will take."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._start = self._said = time.monotonic()

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if (counts := _NINJA.match(line)) and now - self._said > _SAY_SECONDS:
            self._said = now
            done, total = int(counts[1]), int(counts[2])
            left = (now - self._start) / done * (total - done)
            self._report(f"  {done} of {total}, {left:.0f} s left")


def _call(
    command: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    each_line: Callable[[str], None] = lambda line: None,
) -> str:
    """Runs a step, in a folder; returns what it prints, of which ``each_line`` is told while it runs.

    Raises:
        BuildError: It fails; the message ends in the last lines that it printed.
    """
    lines = []
    with subprocess.Popen(
        [str(part) for part in command],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            each_line(line)
    if process.returncode:
        last = "".join(lines[-25:]).rstrip("\n")
        raise BuildError(f"{Path(str(command[0])).name} failed (status {process.returncode}):\n{last}")
    return "".join(lines)


def _require_programs(report: Callable[[str], None]) -> None:
    """Installs what is missing, as root on a Debian; elsewhere says what it is."""
    if not sys.platform.startswith("linux"):
        raise BuildError(f"asahi_clc is built on Debian only: set {VARIABLE} to one that was built elsewhere")
    if not shutil.which("apt-get"):
        raise BuildError(
            "there is no apt-get, by which the source of Mesa is fetched: build on Debian 12 or 13, or set "
            f"{VARIABLE} to an asahi_clc that was built with {PATCH}"
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


def _download(work: Path) -> tuple[Path, str]:
    """Fetches the source by apt, which checks signatures, with lists of its own: the machine's stay as they are.

    Returns:
        tuple[Path, str]: The archive, and its version of Mesa.
    """
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
    archives = sorted(work.glob("mesa_*.orig.tar.*z"))
    if len(archives) != 1:
        names = ", ".join(path.name for path in archives) or "none"
        raise BuildError(
            f"apt-get source has fetched no archive of Mesa from Debian {_SUITE}: expected one, got {names}"
        )
    (archive,) = archives
    found = archive.name.removeprefix("mesa_").partition(".orig.tar.")[0]
    if found == VERSION and hashlib.sha256(archive.read_bytes()).hexdigest() != _ARCHIVE_SHA256:
        raise BuildError(f"{archive.name} is not the file that the patch is written for: its SHA-256 differs")
    return archive, found


def _unpack(archive: Path, found: str, work: Path) -> Path:
    """Unpacks and patches the source.

    Raises:
        BuildError: The patch does not fit this version.
    """
    with tarfile.open(archive) as files:
        if hasattr(tarfile, "data_filter"):
            files.extractall(work, filter="data")
        else:
            files.extractall(work)
    folders = [path for path in work.glob("mesa-*") if (path / "src").is_dir()]
    if len(folders) != 1:
        raise BuildError(f"{archive.name} has no folder mesa-{found} with Mesa's source: expected it and no other")
    try:
        _call(["patch", "-s", "-p1", "-d", folders[0], "-i", PATCH])
    except BuildError as error:
        raise BuildError(
            f"the patch does not fit Mesa {found}, which Debian {_SUITE} has; it was tried with {', '.join(TRIED)}. "
            f"Build asahi_clc of Mesa {VERSION} with {PATCH} elsewhere, and set {VARIABLE} to it.\n{error}"
        ) from None
    return folders[0]


def _python_tools(work: Path) -> dict[str, str]:
    """Installs what Mesa's build needs of Python; returns an environment with it."""
    folder = work / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target"]
    _call([*pip, folder, *_PYTHON_TOOLS])
    path = os.environ.get("PATH", os.defpath)
    return os.environ | {"PYTHONPATH": str(folder), "PATH": f"{folder / 'bin'}{os.pathsep}{path}"}


def _native_file(work: Path) -> Path:
    """Says which Python runs Mesa's generators: the one that has the modules they import."""
    file = work / "native.ini"
    file.write_text(f"[binaries]\npython = '{sys.executable}'\npython3 = '{sys.executable}'\n")
    return file
