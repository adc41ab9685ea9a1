"""From the text of a .metal file to the text behind its directives and macros."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from .. import compiler
from . import sources

TENSORS = 400  # the version of the language that has tensors, 4.0

_TENSOR_HEADER = re.compile(
    r"^[ \t]*#[ \t]*(?:include|import)[ \t]*[<\"]"
    r"(metal_(?:cooperative_)?tensor|MetalPerformancePrimitives/[^>\"]*)[>\"]",
    re.M,
)
_LOOP = re.compile(r"^([ \t]*#[ \t]*pragma[ \t]+(?:unroll|clang[ \t]+loop)\b)(.*)$", re.M)
_LOOP_WORD = re.compile(r"(?:unroll|vectorize|interleave|distribute|pipeline)\w*|full|enable|disable|assume_safety")
_NAME = re.compile(r"[A-Za-z_]\w*")


def tensor_header(flat: str) -> re.Match[str] | None:
    """The first include of Metal 4's tensors; a condition may leave it out."""
    return _TENSOR_HEADER.search(sources.without_comments(flat))


def has_tensors(text: str) -> bool:
    """Whether a preprocessed text has included a header of tensors."""
    return (
        re.search(r'^# 1 "[^"\n]*/(?:metal_(?:cooperative_)?tensor|MetalPerformancePrimitives/[^"\n]*)"', text, re.M)
        is not None
    )


def preprocessed(
    found: compiler.Compiler, flat: str, include: list[Path], version: int, defines: list[str]
) -> subprocess.CompletedProcess[str]:
    """Calls clang's preprocessor; `stdout` has the text.

    Args:
        found: The compiler.
        flat: A text whose own includes are in it.
        include: Folders of headers.
        version: Of the language, 310 for 3.1.
        defines: Options that define macros.
    """
    flags = [*compiler.preprocess_flags(include, version), *defines]
    flags += ["-D__HAVE_TENSOR__", "-D__HAVE_INT4B_FORMAT_TYPE__"] if version >= TENSORS else []
    done = found.run(flags, flat)
    return done if done.returncode else _with_loops(found, flags, flat, done)


def _with_loops(
    found: compiler.Compiler, flags: list[str], flat: str, done: subprocess.CompletedProcess[str]
) -> subprocess.CompletedProcess[str]:
    """Expands the macros in pragmas of loops: clang does it where it compiles, and its preprocessor leaves them."""
    named = [
        loop for loop in _LOOP.finditer(done.stdout) if any(not _LOOP_WORD.fullmatch(n) for n in _NAME.findall(loop[2]))
    ]
    if not named:
        return done
    macros = found.run([*flags, "-dM"], flat).stdout
    lines = "\n".join(f"mittens_loop_{i} {loop[2]}" for i, loop in enumerate(named))
    expanded = found.run([*flags, "-P"], f"{macros}{lines}\n").stdout
    of_loop = dict(re.findall(r"^mittens_loop_(\d+)(.*)$", expanded, re.M))
    at, parts = 0, []
    for i, loop in enumerate(named):
        parts += [done.stdout[at : loop.start()], loop[1], of_loop.get(str(i), loop[2])]
        at = loop.end()
    done.stdout = "".join([*parts, done.stdout[at:]])
    return done
