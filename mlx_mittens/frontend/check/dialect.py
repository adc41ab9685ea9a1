"""Finds code that a Mac's compiler would refuse although clang, in plain C++, takes it.

Four looks at a file; each finds mistakes that the others cannot:

- words and declarations, its text after the preprocessor: words that Metal does not have, address spaces left out;
- signatures, the arguments of its kernels;
- diagnostics, clang's: errors, features newer than C++14 (but for `if constexpr` and other extensions), floats that
  become bfloat without a cast;
- code, clang's intermediate code of every function: recursion, casts between address spaces, calls by pointers,
  threadgroup memory that does not fit.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import re
from pathlib import Path

from .. import build, build_simulator, cache, compiler, library
from ..errors import ERROR, NOTE, UNCOVERED, CompileError, Problem
from ..read import preprocess, sources
from ..read.lines import LineMap
from ..read.tokens import RewriteError
from ..rewrite import TO_CHECK, rewrite
from ..rewrite.translation import Translation
from .compilation import Compilation
from .declarations import check_declarations
from .diagnostics import own_errors
from .options import DEFAULTS, STANDARDS, Options
from .places import Places
from .signatures import Signatures
from .text import Text
from .words import check_words

__all__ = ["STANDARDS", "Options", "check", "refused"]

_UNCOVERED_HEADER = re.compile(
    r"^[ \t]*#[ \t]*(?:include|import)[ \t]*[<\"](metal_(?:texture|raytracing|mesh|visible_function_table|"
    r"imageblocks|command_buffer)|tensor/[^>\"]*)[>\"]",
    re.M,
)
_TENSOR_GATE = (
    "products of tensors run right on an M5 with macOS 26.2: an M4 compiles those of int8 and answers wrongly, and "
    "some releases of Xcode want 26.2 as the deployment target"
)


def check(file: str, options: Options = DEFAULTS) -> list[Problem]:
    """Checks a .metal file, every kernel that it instantiates included.

    Args:
        file: One of `files()`, or a registered source.
        options: How it is compiled.

    Returns:
        The problems, by file and line; none if it has no mistake that this check knows of.
    """
    return _known_problems(file, options, strict=True)


def refused(file: str) -> list[Problem]:
    """Code that any Mac's compiler would refuse in a file, for a kernel that is about to run.

    These are the errors of `check` without the doubtful ones and without errors of memory: only a launch knows how
    much it asks for.
    """
    return [problem for problem in _known_problems(file, DEFAULTS, strict=False) if problem.severity == ERROR]


def _known_problems(file: str, options: Options, strict: bool) -> list[Problem]:
    """The problems of a file, from the cache if this text was checked before."""
    try:
        flat = sources.flatten(file, options.include)
    except CompileError as error:
        return own_errors(error.log, file)
    what = flat, library.key(), _mlx_version(), compiler.find_compiler().identity
    name = cache.key("dialect", file, str(strict), repr(options), *what)

    def make(path: Path) -> None:
        problems = _problems(file, flat, strict, options)
        path.write_text(json.dumps([[p.file, p.line, p.what, p.column, p.severity] for p in problems]))

    known = cache.cached(f"{Path(file).stem[:80]}-{name}.json", make).read_text()
    return [Problem(*problem) for problem in json.loads(known)]


@functools.cache
def _mlx_version() -> str:
    """MLX's, whose headers a text may include."""
    return importlib.metadata.version("mlx")


def _problems(file: str, flat: str, strict: bool, options: Options) -> list[Problem]:
    place = Places(file, flat)
    notes = [*_other_characters(flat, place)] if strict else []
    found = compiler.find_compiler()
    folders = [library.INCLUDE, *library.mlx_include(), *map(Path, options.include)]
    # For a launch MLX chooses the newest version.
    run = preprocess.preprocessed if strict else preprocess.preprocessed_with_tensors
    done = run(found, flat, folders, options.version, [f"-D{definition}" for definition in options.define])
    if done.returncode:
        for missing in _UNCOVERED_HEADER.finditer(sources.without_comments(flat)):
            if f"'{missing[1]}' file not found" in done.stderr:
                line = LineMap(flat).at(missing.start())
                return [Problem(*line, f"<{missing[1]}> is not covered by this check", 1, UNCOVERED)]
        return _sorted([*notes, *own_errors(build.clean(done.stderr), file)])
    tensors = preprocess.entered_tensor_header(done.stdout)
    if tensors and strict:
        header, where, number = tensors
        if options.version < preprocess.TENSORS:
            what = f"<{header}> is of Metal 4: compile by -std=metal4.0 (--std metal4.0 here)"
            return [Problem(where, number, what, 1)]
        notes.append(Problem(where, number, _TENSOR_GATE, 1, NOTE))
    text = done.stdout
    for folder in library.mlx_include():
        text = text.replace(f'"{folder}/', '"')
    problems = notes
    try:
        newer, metal4 = options.version >= 320, bool(tensors) or options.version >= STANDARDS["metal4.0"]
        words = Text(text, lambdas=newer, fences=newer, eights=metal4)
        found_in_text = [place.refined(problem) for problem in problems_in_text(words, strict)]
        uncovered = [problem for problem in found_in_text if problem.severity == UNCOVERED]
        if uncovered:
            return _sorted([*notes, *uncovered])
        problems = [*notes, *found_in_text]
        translation = rewrite(text, TO_CHECK)
        compiled = build_simulator.text_of(translation, file)
    except RewriteError as error:
        return _sorted([*problems, *own_errors(str(error), file)])
    except CompileError as error:
        return _sorted([*problems, *own_errors(error.log, file)])
    problems += [place.refined(problem) for problem in _named_twice(translation)]
    problems += Compilation(file, text, translation, compiled, strict, options, place, problems, metal4).problems()
    problems = [_of_its_kind(problem) for problem in problems]
    if strict and not translation.variants and not problems:
        problems.append(Problem(file, 1, _no_kernel(translation), 1))
    return _sorted(problems)


def problems_in_text(text: Text, strict: bool) -> list[Problem]:
    """The problems of a text by itself; doubtful ones only if asked for."""
    check_declarations(text)
    check_words(text)
    for finding in Signatures(text).findings():
        text.report(finding.token, finding.what, severity="error" if finding.covered else UNCOVERED)
    return [*text.found, *(text.doubtful if strict else [])]


def _no_kernel(translation: Translation) -> str:
    if translation.kernels:
        named = min(translation.kernels)
        return f"no kernel is instantiated, so that nothing is compiled: instantiate {named!r}, with a host_name"
    return "there is no kernel in the file: write one, or check a file that includes this one"


def _named_twice(translation: Translation) -> list[Problem]:
    """Kernels under a name that another has."""
    problems: list[Problem] = []
    seen: set[str] = set()
    for variant in translation.variants:
        if variant.name in seen:
            problems.append(Problem(*variant.site, f"two kernels have the name {variant.name!r}: choose another"))
        seen.add(variant.name)
    return problems


def _of_its_kind(problem: Problem) -> Problem:
    """A problem, or what the library says that it does not cover."""
    is_uncovered = "not covered: " in problem.what
    return dataclasses.replace(problem, severity=UNCOVERED) if is_uncovered else problem


def _sorted(problems: list[Problem]) -> list[Problem]:
    return sorted(set(problems), key=lambda p: (p.file, p.line, p.column, p.what))


def _other_characters(flat: str, place: Places) -> list[Problem]:
    """Characters that are not ASCII, outside of comments."""
    if flat.isascii():
        return []
    lines = LineMap(flat)
    notes = []
    for other in re.finditer(r"[^\x00-\x7f]+", sources.without_comments(flat)):
        what = f"{other[0]!r} is not ASCII: it may stand in a comment only where MLX compiles the text"
        notes.append(Problem(*lines.at(other.start()), what, lines.column(other.start()), NOTE))
    return notes
