"""asahi_clc, Mesa's compiler from SPIR-V to the machine code of Apple GPUs: where it is, and how it is built.

It is built from Mesa's source, which is Debian's source package, Mesa's own archive or a file, with a patch
(mesa.patch) that leaves out parts that need LLVM, lets registers be spilled, and prints statistics and machine code.
The result stays in the cache of compiled kernels, under a key of the patch, the options and the machine's
architecture, with its version of Mesa beside it. Mesa's licence is MIT.
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
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..frontend import cache

VERSION = "25.0.7"  # of Mesa, for which the patch is written
TRIED = (VERSION,)  # versions of Mesa with which the build and the table of bench/results/agx.md were made
VARIABLE = "MLX_MITTENS_ASAHI_CLC"
COMMAND = "mlx-mittens agx-compiler"

PATCH = Path(__file__).with_name("mesa.patch")
_SUITE = "trixie"  # whose Mesa it is; the machine itself may run another Debian
_URL = f"https://archive.mesa3d.org/mesa-{VERSION}.tar.xz"  # the same file as Debian's
_TIMEOUT = 60.0  # of the download, in seconds without a byte
_ARCHIVE_SHA256 = "592272df3cf01e85e7db300c449df5061092574d099da275d19e97ef0510f8a6"
_TARGET = "src/asahi/clc/asahi_clc"
_PYTHON_TOOLS = ("meson", "ninja", "mako", "pyyaml", "packaging")
# The package of each program that the build calls, by the program that installs packages.
_PACKAGES = {
    "apt-get": {"cc": "gcc", "c++": "g++", "patch": "patch", "ld": "binutils"},
    "dnf": {"cc": "gcc", "c++": "gcc-c++", "patch": "patch", "ld": "binutils"},
}
_ARCHIVE = _URL.rpartition("/")[2]
_FETCH_YOURSELF = f"download {_URL}, and run {COMMAND} --source {_ARCHIVE}"
_DISABLED = (
    *("egl", "expat", "gbm", "gles1", "gles2", "glx", "libunwind", "llvm", "lmsensors", "shader-cache", "valgrind"),
    *("xmlconfig", "zlib", "zstd"),
)
_OPTIONS = (
    *(f"-D{option}=disabled" for option in _DISABLED),
    *("-Dgallium-drivers=", "-Dvulkan-drivers=", "-Dplatforms=", "-Dvideo-codecs=", "-Dopengl=false", "-Dtools=asahi"),
    # Assertions stay: by them it refuses kernels.
    *("-Dbuildtype=plain", "-Doptimization=0", "-Db_ndebug=false", "-Dcpp_rtti=false", "-Dc_args=-w", "-Dcpp_args=-w"),
)

# Ninja's line before each file when it prints into a pipe; and how often it is passed on.
_NINJA = re.compile(r"\[(\d+)/(\d+)\]")
_SAY_SECONDS = 10.0


class BuildError(RuntimeError):
    """The compiler cannot be built here; the message says what is missing or failed."""


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
    """The reason that no machine code can be made here, with the command to run; or an empty string."""
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


def build(force: bool = False, report: Callable[[str], None] = lambda line: None, source: Path | None = None) -> Path:
    """Builds the program into the cache, if it is not there.

    Args:
        force: Build it again if it is there.
        report: Is told of each step.
        source: An archive of Mesa's source. None: it is downloaded.

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
        archive = source or _download(work, report)
        found = _version_of(archive)
        if found not in TRIED:
            report(f"{archive.name} has Mesa {found}; this was tried with {', '.join(TRIED)} only")
        report(f"unpack and patch Mesa {found}")
        folder_of_source = _unpack(archive, found, work)
        report("install " + ", ".join(_PYTHON_TOOLS) + " for the build")
        environment = _python_tools(work)
        report("configure")
        build_folder = work / "build"
        meson = [sys.executable, "-m", "mesonbuild.mesonmain"]
        _call(
            [*meson, "setup", build_folder, folder_of_source, "--native-file", _native_file(work), *_OPTIONS],
            environment,
        )
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
    """Runs a step, in a folder; returns its output, and hands each line to ``each_line`` while it runs.

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
    """Installs missing programs, as root where a known program installs packages; elsewhere names them."""
    if not sys.platform.startswith("linux"):
        raise BuildError(f"asahi_clc is built on Linux only: set {VARIABLE} to one that was built elsewhere")
    missing = [program for program in _PACKAGES["apt-get"] if not shutil.which(program)]
    if not missing:
        return
    installer = next(filter(shutil.which, _PACKAGES), None)
    if installer is None:
        raise BuildError(f"the build needs the programs {' '.join(missing)}: install them")
    names = [_PACKAGES[installer][program] for program in missing]
    if os.geteuid() != 0:
        raise BuildError(f"the build needs {' '.join(names)}: as root, {installer} install {' '.join(names)}")
    report(f"{installer} install {' '.join(names)}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    if installer == "apt-get":
        _call(["apt-get", "update", "-qq"], environment)
        _call(["apt-get", "install", "-qq", "-y", "--no-install-recommends", *names], environment)
    else:
        _call([installer, "install", "--quiet", "--assumeyes", *names], environment)


def _download(work: Path, report: Callable[[str], None]) -> Path:
    """Fetches the source: where apt has a mirror of Debian from there, elsewhere from Mesa's own archive."""
    if mirror := _mirror():
        report(f"download Mesa: source package of Debian {_SUITE}")
        return _download_by_apt(work, mirror)
    report(f"download Mesa: {_URL}")
    return _download_from_mesa(work)


def _mirror() -> str:
    """The mirror of Debian that apt uses here, also where its lists were not fetched yet; empty without one."""
    if not shutil.which("apt-get"):
        return ""
    targets = _call(["apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI)", "Created-By: Packages"])
    return next((line for line in targets.splitlines() if line.rstrip("/").endswith("/debian")), "")


def _download_by_apt(work: Path, mirror: str) -> Path:
    """Fetches the source by apt, which checks signatures, with lists of its own: the machine's stay as they are."""
    sources, lists = work / "sources.list", work / "lists"
    (lists / "partial").mkdir(parents=True)
    sources.write_text(f"deb-src {mirror} {_SUITE} main\n")
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
    return archives[0]


def _download_from_mesa(work: Path) -> Path:
    """Fetches the archive that the patch is written for; its SHA-256 is checked before it is unpacked."""
    archive = work / _ARCHIVE
    try:
        with urllib.request.urlopen(_URL, timeout=_TIMEOUT) as answer, archive.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except OSError as error:
        raise BuildError(f"Mesa's source cannot be downloaded here ({error}): {_FETCH_YOURSELF}") from None
    return archive


def _version_of(archive: Path) -> str:
    """The version of Mesa that an archive has by its name.

    Raises:
        BuildError: The name has none, there is no such file, or it is not the one that the patch is written for.
    """
    name = re.fullmatch(r"mesa[-_](\d[\d.]*\d)(?:\.orig)?\.tar\.\w+", archive.name)
    if name is None or not archive.is_file():
        raise BuildError(f"{archive} is no archive of Mesa's source: expected a file such as mesa-{VERSION}.tar.xz")
    found = name[1]
    if found == VERSION and hashlib.sha256(archive.read_bytes()).hexdigest() != _ARCHIVE_SHA256:
        raise BuildError(f"{archive.name} is not the file that the patch is written for: its SHA-256 differs")
    return found


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
            f"the patch does not fit Mesa {found} ({archive.name}); it was tried with {', '.join(TRIED)}: "
            f"{_FETCH_YOURSELF}\n{error}"
        ) from None
    return folders[0]


def _python_tools(work: Path) -> dict[str, str]:
    """Installs the Python packages that Mesa's build needs; returns an environment with them."""
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
