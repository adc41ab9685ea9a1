"""Finding clang and calling it."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from . import cache

OLDEST_CLANG = 19

_COMMON = ["-x", "c++", "-std=c++20", "-nostdinc", "-ffreestanding", "-fno-exceptions", "-fno-rtti", "-w"]
_PREPROCESS = ["-E", "-undef", "-D__METAL__", "-D__METAL_MACOS__", "-D__HAVE_BFLOAT__"]
_CPU = [
    *("-c", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-omit-frame-pointer"),
    # Half and bfloat round after every operation, as they do on a GPU.
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    # An operation between threads stays in one place, so that all of them come by there.
    *("-Xclang", "-fconvergent-functions"),
    *("-mllvm", "-tail-dup-placement=false", "-mllvm", "-disable-tail-duplicate", "-mllvm", "-enable-tail-merge=false"),
    # Keeps each access as the kernel wrote it, with its line, and keeps loops without end.
    *("-fno-vectorize", "-fno-slp-vectorize", "-fno-finite-loops", "-gline-tables-only", "-gdwarf-4"),
    *("-fno-optimize-sibling-calls", "-mllvm", "-disable-vector-combine"),
    # Blocks stay in the order of the source, by which lanes that parted meet again, seldom run blocks too.
    *("-mllvm", "-disable-block-placement"),
    # Loops of few, known rounds are unrolled, as Metal's compiler does: the profile merges accesses of one basic block.
    *("-funroll-loops", "-mllvm", "-unroll-runtime=false", "-mllvm", "-unroll-allow-partial=false"),
    *("-mllvm", "-unroll-allow-peeling=false"),
]
_STEPS = ["-fsanitize-coverage=bb,no-prune,trace-pc-guard"]
_WATCHED = [
    *("-fsanitize-coverage=bb,no-prune,trace-pc-guard,trace-loads,trace-stores", "-DMITTENS_WATCHED"),
    # Arrays of a thread's own are no buffers: an index beyond one is seen by its size.
    *("-fsanitize=array-bounds", "-fsanitize-minimal-runtime", "-fstrict-flex-arrays=3"),
]
# Apple's linker refuses a library without libSystem.
_OF_MAC = ["-undefined", "dynamic_lookup", "-lSystem"]
_LINK = ["-shared", "-nostdlib", *(_OF_MAC if sys.platform == "darwin" else [])]
_PTX = [
    *("-S", "-O3", "-target", "nvptx64-nvidia-cuda", "-ffp-contract=fast", "-fno-math-errno"),
    # Metal's compiler leaves no calls in a kernel; a call would put its arguments into local memory.
    *("-mllvm", "-inline-threshold=1000000"),
]
# In two steps, between which LLVM's text is edited.
_SPIRV_TARGET = ["-target", "spirv64", "-fno-vectorize", "-fno-slp-vectorize"]
_SPIRV = [
    *("-S", "-emit-llvm", "-O2", "-Xclang", "-disable-llvm-passes", "-ffp-contract=fast", "-fno-math-errno"),
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    "-fno-discard-value-names",  # Mesa asks parameters for their names
]
_SPIRV_MODULE = [
    *("-x", "ir", "-c", "-O2", "-w", "-mllvm", "-inline-threshold=1000000", "-mllvm", "-unroll-runtime=false"),
    "-fno-discard-value-names",
]


@dataclass(frozen=True)
class Compiler:
    """A clang, and the linker that goes with it."""

    clang: tuple[str, ...]
    linker: tuple[str, ...]
    identity: str  # changes with the version; part of every cache key

    def run(self, arguments: list[str], text: str) -> subprocess.CompletedProcess[str]:
        """Calls clang with a text on its standard input."""
        return subprocess.run([*self.clang, *arguments, "-"], input=text, capture_output=True, text=True)


def preprocess_flags(include: list[Path], version: int = 310) -> list[str]:
    """For a text of a version of Metal's language, 310 for 3.1."""
    return [*_COMMON, *_PREPROCESS, f"-D__METAL_VERSION__={version}", *(f"-I{path}" for path in include)]


def cpu_flags(watch: bool) -> list[str]:
    # Code runs on this machine alone, so it may use all its instructions.
    tune = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    return [*_COMMON, *_CPU, tune, *(_WATCHED if watch else _STEPS)]


def arithmetic_flags(fuse: bool, flush_subnormals: bool) -> list[str]:
    """Of a library whose `a * b + c` within an expression rounds once, or whose subnormal float32 are zero."""
    flush = ["-Xclang", "-fdenormal-fp-math-f32=preserve-sign,preserve-sign"]
    return [*["-ffp-contract=on"] * fuse, *flush * flush_subnormals]


def header_flags(flags: list[str]) -> list[str]:
    """The options for compiling a text, but to a precompiled header that others include."""
    end = len(flags) - 1 - flags[::-1].index("-o") if "-o" in flags else len(flags)
    kept = [flag for flag in [*flags[:end], *flags[end + 2 :]] if flag not in ("-c", "-S", "-emit-llvm")]
    return ["c++-header" if flag == "c++" else flag for flag in kept]


# Memory is read where the kernel reads it: LLVM else hoists the loads of a loop's later rounds in front of it.
AS_WRITTEN = ["-mllvm", "-disable-licm-promotion"]
_NO_PASSES = ["-Xclang", "-disable-llvm-passes"]
_LANGUAGE = ("-c", "-x", "c++", "-std=c++20", "-nostdinc")  # flags of C++ input, not of LLVM's text


def unoptimized_flags(cpu: list[str]) -> list[str]:
    """The options for the CPU, but to LLVM's text before any pass."""
    return [*(flag for flag in cpu if flag != "-c"), "-S", "-emit-llvm", *_NO_PASSES, "-o", "-"]


def optimized_flags(cpu: list[str]) -> list[str]:
    """From LLVM's text to the same after all passes."""
    return ["-x", "ir", *(flag for flag in cpu if flag not in _LANGUAGE), "-S", "-emit-llvm", "-o", "-"]


def object_flags(cpu: list[str], optimized: bool) -> list[str]:
    """From LLVM's text, whose passes may all have run, to machine code."""
    kept = [flag for flag in cpu if flag not in _LANGUAGE]
    if optimized:
        kept = [*(flag for flag in kept if not flag.startswith("-fsanitize")), *_NO_PASSES]
    return ["-x", "ir", "-c", *kept]


def lowered_ptx_flags(ptx: list[str]) -> tuple[list[str], list[str]]:
    """The options for PTX in two steps: to LLVM's text before any pass, and from there to PTX."""
    kept = [flag for flag in ptx if flag not in _LANGUAGE]
    return [*ptx, "-emit-llvm", *_NO_PASSES, "-o", "-"], ["-x", "ir", *kept, "-o", "-"]


def ptx_flags(arch: str, text: str) -> list[str]:
    """For a text, which may ask for options of LLVM's own in lines that begin with ``// nvptx: ``."""
    asked = [flag for option in re.findall(r"^// nvptx: (\S+)$", text, re.M) for flag in ("-mllvm", option)]
    return [*_COMMON, *_PTX, *asked, f"-march={arch}"]


def spirv_flags() -> list[str]:
    """From C++ to LLVM's text."""
    return [*_COMMON, *_SPIRV, *_SPIRV_TARGET]


def spirv_module_flags() -> list[str]:
    """From LLVM's text to SPIR-V."""
    return [*_SPIRV_MODULE, *_SPIRV_TARGET]


def _version(command: tuple[str, ...]) -> tuple[int, str] | None:
    try:
        text = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"(?:Apple )?clang version (\d+)[^\n]*", text)
    return (int(found[1]), found[0]) if found else None


def _known_version(zig: Path) -> tuple[int, str] | None:
    """The version of the clang in a zig, asked once: it takes longer than all else that a known kernel needs.

    One that does not answer, as where a time limit ends it, is asked again the next time.
    """

    def ask(path: Path) -> None:
        version = _version((str(zig), "clang"))
        if version is None:
            raise ChildProcessError(f"{zig} does not say its version")
        path.write_text(json.dumps(version))

    stamp = zig.stat()
    name = cache.key(str(zig), str(stamp.st_mtime_ns), str(stamp.st_size))
    try:
        number, text = json.loads(cache.cached(f"zig-{name}.json", ask).read_text())
    except ChildProcessError:
        return None
    return number, text


def _ziglang() -> Path | None:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    program = Path(spec.origin).parent / ("zig.exe" if sys.platform == "win32" else "zig")
    return program if program.is_file() else None


@functools.cache
def _find() -> Compiler | str:
    chosen = os.environ.get("MLX_MITTENS_CLANG")
    of_apple = None  # which compiles for no other machine: it serves where there is no other
    for program in [chosen] if chosen else [shutil.which("clang++")]:
        if not program:
            continue
        version = _version((program,))
        if version and (version[0] >= OLDEST_CLANG or chosen):
            found = Compiler((program,), (program, *_LINK), version[1])
            if chosen or not version[1].startswith("Apple"):
                return found
            of_apple = found
        if chosen:
            return f"MLX_MITTENS_CLANG is {chosen!r}, which is not a clang++ that runs"
    zig = _ziglang()
    if zig is not None:
        version = _known_version(zig)
        if version:
            linker = (str(zig), "ld.lld", "-shared")
            if sys.platform == "darwin":
                linker = (str(zig), "cc", *_LINK)
            return Compiler((str(zig), "clang"), linker, version[1])
    return of_apple or f"no clang++ of version {OLDEST_CLANG} or later: pip install ziglang, or set MLX_MITTENS_CLANG"


def find_compiler() -> Compiler:
    """The clang to use: $MLX_MITTENS_CLANG, else clang++ if it is recent enough, else the one in the ziglang package.

    Raises:
        RuntimeError: If there is none, with what to install.
    """
    found = _find()
    if isinstance(found, str):
        raise RuntimeError(f"mlx_mittens cannot compile kernels here: {found}")
    return found


def compiler_problem() -> str:
    """The reason that kernels cannot be compiled here, or an empty string."""
    found = _find()
    return found if isinstance(found, str) else ""
