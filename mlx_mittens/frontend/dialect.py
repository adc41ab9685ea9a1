"""What a Mac's compiler would refuse although clang, in plain C++, takes it.

Three looks at a file, each of which finds what the others cannot:

- dialect_text, its text after the preprocessor: words that Metal does not have, address spaces left out;
- clang's diagnostics: errors, and what is newer than C++14 (`if constexpr` and other extensions aside);
- dialect_code, clang's intermediate code of every kernel: recursion, threadgroup memory that does not fit.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
from pathlib import Path

from . import build, cache, compiler, sources
from .errors import CompileError, Problem
from .lint_ir import recursion, threadgroup_memory
from .lint_source import Text
from .rewrite import RewriteError, rewrite

_DIAGNOSTIC = re.compile(r"^(.+?):(\d+):(?:\d+:)? (?:fatal )?(error|warning): (.*)$", re.M)


def check(file: str) -> list[Problem]:
    """Checks a .metal file, every kernel that it instantiates included.

    Args:
        file: One of `files()`, or a registered source.

    Returns:
        The problems, by file and line; none if a Mac should take it.
    """
    return _known_problems(file, strict=True)


def refused(file: str) -> list[Problem]:
    """What any Mac's compiler would refuse in a file, for a kernel that is about to run.

    These are the problems of `check` without the doubtful ones, and without those of memory: only a launch knows how
    much it asks for.
    """
    return _known_problems(file, strict=False)


def _known_problems(file: str, strict: bool) -> list[Problem]:
    """The problems of a file, from the cache if this text was checked before."""
    try:
        flat = sources.flatten(file)
    except CompileError as error:
        return _diagnostics(error.log, file)
    what = flat, build._library_key(), _mlx_version(), compiler.find_compiler().identity
    name = cache.key("dialect", file, str(strict), *what)

    def make(path: Path) -> None:
        path.write_text(json.dumps([[p.file, p.line, p.what] for p in _problems(file, flat, strict)]))

    known = cache.cached(f"{Path(file).stem}-{name}.json", make).read_text()
    return [Problem(*problem) for problem in json.loads(known)]


@functools.cache
def _mlx_version() -> str:
    """MLX's, whose headers a text may include."""
    return importlib.metadata.version("mlx")


def _problems(file: str, flat: str, strict: bool) -> list[Problem]:
    found = compiler.find_compiler()
    done = found.run(compiler.preprocess_flags([build.INCLUDE, *build._mlx_include()]), flat)
    if done.returncode:
        return _diagnostics(done.stderr, file)
    text = done.stdout
    for folder in build._mlx_include():
        text = text.replace(f'"{folder}/', '"')
    problems: list[Problem] = []
    try:
        problems = Text(text).problems(strict)
        translation = rewrite(text, {})
        compiled = build._simulator_text(translation, file)
    except RewriteError as error:
        return sorted({*problems, *_diagnostics(str(error), file)})
    except CompileError as error:
        return sorted({*problems, *_diagnostics(error.log, file)})
    flags = [*_flags(), f"-isystem{build.INCLUDE}", f"-isystem{build._abi_folder()}"]
    flags += ["-DMITTENS_STRICT_DIALECT"] if strict else []
    done = found.run(flags, compiled)
    problems += _diagnostics(done.stderr, file)
    if done.returncode == 0:
        problems += recursion(done.stdout, str(build.INCLUDE))
        problems += threadgroup_memory(done.stdout, translation) if strict else []
    return sorted(set(problems))


def _flags() -> list[str]:
    flags = [flag for flag in compiler._COMMON if flag != "-w"]
    flags += ["-S", "-emit-llvm", "-O0", "-Xclang", "-disable-llvm-passes", "-gline-tables-only", "-o", "-"]
    flags += ["-Wno-everything", "-Wpre-c++17-compat", "-Wpre-c++20-compat", "-Wvla-extension", "-Wvla-cxx-extension"]
    flags += ["-Wc++20-designator", "-Wimplicit-function-declaration", "-ferror-limit=0", "-fno-caret-diagnostics"]
    return [*flags, "-fvisibility=hidden", "-ffp-contract=off"]


# Of what is newer than C++14, the little that clang does not take there as an extension.
_NEWER = ("class template argument deduction", "declared with 'auto'", "'consteval'", "'constinit'")


def _diagnostics(log: str, file: str) -> list[Problem]:
    problems = []
    for name, line, kind, what in _DIAGNOSTIC.findall(build._clean(log)):
        if kind == "warning":
            if "::mittens::" in what or ("incompatible with C++" in what and not any(new in what for new in _NEWER)):
                continue
            what = what.split(" [-W")[0]
        problems.append(Problem(name, int(line), what))
    return problems or ([Problem(file, 1, log.strip())] if "error" in log else [])
