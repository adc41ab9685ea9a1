"""Kernels of a .metallib as Apple's compiler left them, beside our front end's output for the same source."""

from __future__ import annotations

import itertools
import re
import struct
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding as llvm

from mlx_mittens import frontend
from mlx_mittens.frontend import build, build_simulator, compiler, library

# Functions of Metal's library: first the ones whose fast and precise forms differ, then the ones that round.
_FORMS = ("exp", "exp2", "log", "log2", "sin", "cos", "tanh", "sqrt", "rsqrt", "divide", "pow")
_ROUNDING = ("rint", "round", "floor", "ceil", "trunc", "fma")
_NAMES = "|".join(sorted((*_FORMS, *_ROUNDING), key=len, reverse=True))
_FLAG = r"(?:fast|nnan|ninf|nsz|arcp|contract|afn|reassoc)"

_serial = itertools.count()


@dataclass(frozen=True)
class Meaning:
    """The meaning of a kernel's code where Metal's text leaves it in doubt.

    Attributes:
        functions: Of the library, such as ``exp`` or ``fast_exp``.
        fuses: Whether a product and a sum of one expression may be rounded once.
        divides: Whether there is a division, and no product with a reciprocal in its place.
        flags: Of LLVM's fast mathematics, on any operation.
    """

    functions: frozenset[str]
    fuses: bool
    divides: bool
    flags: frozenset[str]


def download(folder: Path, release: str) -> Path:
    """MLX's Metal library for macOS 14, of a release."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    platform = ["--platform=macosx_14_0_arm64", "--dest", str(folder), f"mlx-metal=={release}"]
    subprocess.run([*command, *platform], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("mlx/lib/mlx.metallib", folder))


def functions(file: Path) -> dict[str, bytes]:
    """LLVM's bitcode of each function of a .metallib, by its name."""
    data = file.read_bytes()
    if data[:4] != b"MTLB":
        raise ValueError(f"{file} is no Metal library")
    listed, code = struct.unpack_from("<Q", data, 24)[0], struct.unpack_from("<Q", data, 72)[0]
    found = {}
    (count,) = struct.unpack_from("<I", data, listed)
    entry = listed + 4
    for _ in range(count):
        (size,) = struct.unpack_from("<I", data, entry)
        tags, at = {}, entry + 4
        while data[at : at + 4] != b"ENDT":
            (length,) = struct.unpack_from("<H", data, at + 4)
            tags[data[at : at + 4]] = data[at + 6 : at + 6 + length]
            at += 6 + length
        begin = code + struct.unpack("<3Q", tags[b"OFFT"])[2]
        (length,) = struct.unpack("<Q", tags[b"MDSZ"])
        found[tags[b"NAME"].rstrip(b"\0").decode()] = data[begin : begin + length]
        entry += size
    return found


def text_of(bitcode: bytes) -> str:
    """LLVM's text of a function's bitcode."""
    return str(llvm.parse_bitcode(bitcode))


def options(text: str) -> set[str]:
    """The options that a function was compiled with."""
    return set(re.findall(r'!"air\.compile\.(\w+)"', text))


def meaning(text: str) -> Meaning:
    """Of Apple's text."""
    called = re.findall(rf"@air\.((?:fast_)?(?:{_NAMES}))\.(?:v\d)?f(?:16|32)\(", text)
    return _meaning(text, called)


def ours(header: str, instantiation: str) -> Meaning:
    """The meaning of our front end's code for a kernel of MLX's, fused as MLX has it compiled."""
    name = f"air{next(_serial)}.metal"
    lines = [f'#include "mlx/backend/metal/kernels/{one}"' for one in ("utils.h", *header.split())]
    frontend.register_source(name, "\n".join([*lines, f'instantiate_kernel("test", {instantiation})']) + "\n")
    found = compiler.find_compiler()
    flags = [*compiler.cpu_flags(False), *compiler.arithmetic_flags(True, True)]
    includes = [f"-I{library.INCLUDE}", f"-I{library.abi_folder()}"]
    unoptimized = [*compiler.unoptimized_flags(flags), *includes]
    parsed = library.parsed(found, [*flags, *includes])
    translation = build.simulated(name)
    done = build.compiled(found, unoptimized, build_simulator.text_of(translation, name), translation, parsed)
    assert not done.returncode, done.stderr
    text = _reached(done.stdout)
    called = re.findall(rf"@_ZN7mittens4math\d+(?:exact_|(fast_))?({_NAMES})E", text)
    called += re.findall(rf"@_ZN5metal\d+()({_NAMES})I", text)
    # The library's own functions divide as they like.
    bodies = re.findall(r"^define .*?^}", text, re.M | re.S)
    own = [body for body in bodies if not re.search(r"^define [^@]*@\"?_ZN?K?(?:5metal|7mittens)", body)]
    return _meaning("\n".join(own), [form + one for form, one in called])


def _reached(text: str) -> str:
    """The functions of LLVM's text that an entry of ours reaches by calls."""
    bodies = {}
    for body in re.findall(r"^define .*?^}", text, re.M | re.S):
        named = re.search(r'@("[^"]+"|[\w.$]+)\(', body)
        bodies[named[1]] = body
    left = [name for name in bodies if "mittens_entry_" in name]
    seen = set(left)
    while left:
        for name in re.findall(r'@("[^"]+"|[\w.$]+)', bodies[left.pop()]):
            if name in bodies and name not in seen:
                seen.add(name)
                left.append(name)
    return "\n".join(bodies[name] for name in sorted(seen))


def _meaning(text: str, called: list[str]) -> Meaning:
    flags = re.findall(rf" (?:fadd|fsub|fmul|fdiv|fcmp|call) ((?:{_FLAG} )+)", text)
    return Meaning(
        frozenset(called),
        "@llvm.fmuladd." in text,
        bool(re.search(r"= fdiv [^\n,]*, %", text)),  # a constant divisor may become a factor
        frozenset(flag for each in flags for flag in each.split()),
    )
