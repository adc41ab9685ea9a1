"""From the text of a .metal file to the text behind its directives and macros."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from .. import compiler
from . import sources
from .lines import LineMap

TENSORS = 400  # the version of the language that has tensors, 4.0

_HEADER = r"(metal_(?:cooperative_)?tensor|MetalPerformancePrimitives/[^>\"\n]*)"
_TENSOR_HEADER = re.compile(rf'^[ \t]*#[ \t]*(?:include|import)[ \t]*[<"]{_HEADER}[>"]', re.M)
_ENTERED = re.compile(rf'^# 1 "(?:[^"\n]*/)?{_HEADER}" 1', re.M)

# A pragma of a loop, as a directive or as an operator: its macros are expanded where clang compiles it, not before.
_LOOP = re.compile(
    r"^[ \t]*#[ \t]*pragma[ \t]+((?:unroll|clang[ \t]+loop)\b(?:\\\r?\n|[^\n])*)$"
    r'|_Pragma[ \t]*\([ \t]*"((?:unroll|clang[ \t]+loop)\b[^"\\\n]*)"[ \t]*\)',
    re.M,
)
_LOOP_WORD = re.compile(
    r"clang|loop|(?:unroll|vectorize|interleave|distribute|pipeline)\w*|full|enable|disable|assume_safety"
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_MARKED = re.compile(r"[ \t]*mittens_loop_begin (.*?) mittens_loop_end[ \t]*")


def has_tensor_header(flat: str) -> bool:
    """Whether a text includes Metal 4's tensors, where a condition may leave the line out."""
    return _TENSOR_HEADER.search(sources.without_comments(flat)) is not None


def entered_tensor_header(text: str) -> tuple[str, str, int] | None:
    """The first header of tensors that a preprocessed text has included: its name, and the file and line that did."""
    entered = _ENTERED.search(text)
    return entered and (entered[1], *LineMap(text).at(entered.start()))


def preprocessed(
    found: compiler.Compiler, flat: str, include: list[Path], version: int, defines: list[str]
) -> subprocess.CompletedProcess[str]:
    """Calls clang's preprocessor; `stdout` has the text.

    Args:
        found: The compiler.
        flat: A text whose own includes are in it.
        include: Folders of headers.
        version: The language's, 310 for 3.1.
        defines: Options that define macros.
    """
    flags = [*compiler.preprocess_flags(include, version), *defines]
    flags += ["-D__HAVE_TENSOR__", "-D__HAVE_INT4B_FORMAT_TYPE__"] if version >= TENSORS else []
    marked = _LOOP.sub(_with_marks, flat)
    done = found.run(flags, marked)
    if marked != flat and not done.returncode:
        done.stdout = _with_pragmas(done.stdout)
    return done


def preprocessed_with_tensors(
    found: compiler.Compiler, flat: str, include: list[Path], version: int, defines: list[str]
) -> subprocess.CompletedProcess[str]:
    """Calls the preprocessor for Metal 4 if the text then includes tensors, else for a version."""
    if version < TENSORS and has_tensor_header(flat):
        done = preprocessed(found, flat, include, TENSORS, defines)
        if not done.returncode and entered_tensor_header(done.stdout):
            return done
        earlier = preprocessed(found, flat, include, version, defines)
        return done if earlier.returncode else earlier
    return preprocessed(found, flat, include, version, defines)


def _with_marks(loop: re.Match[str]) -> str:
    """The words of a pragma between marks, so that macros among them are expanded; as it is if it has no other name."""
    words = loop[1] if loop[1] is not None else loop[2]
    if all(_LOOP_WORD.fullmatch(name) for name in _NAME.findall(words)):
        return loop[0]
    return f"mittens_loop_begin {words.rstrip()} mittens_loop_end"


def _with_pragmas(text: str) -> str:
    """A pragma on a line of its own for each pair of marks, and the number of the line that goes on behind it."""
    lines = LineMap(text)

    def pragma(marked: re.Match[str]) -> str:
        file, line = lines.at(marked.start())
        return f'\n#pragma {marked[1]}\n# {line} "{file}"\n'

    return _MARKED.sub(pragma, text)
