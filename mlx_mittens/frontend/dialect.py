"""What a Mac's compiler would refuse although clang, in plain C++, takes it.

Three looks at a file, each of which finds what the others cannot:

- dialect_text, its text after the preprocessor: words that Metal does not have, address spaces left out;
- clang's diagnostics: errors, and whatever is newer than C++14 (`if constexpr` and the like aside);
- dialect_code, clang's intermediate code of every kernel: recursion, threadgroup memory that does not fit.
"""

from __future__ import annotations

import re

from . import build, compiler, sources
from .dialect_code import problems_in
from .dialect_text import Text
from .errors import CompileError, Problem
from .rewrite import RewriteError, rewrite

_DIAGNOSTIC = re.compile(r"^(.+?):(\d+):(?:\d+:)? (?:fatal )?(error|warning): (.*)$", re.M)


def check(file: str) -> list[Problem]:
    """Checks a .metal file, every kernel that it instantiates included.

    Args:
        file: One of `files()`, or a registered source.

    Returns:
        The problems, by file and line; none if a Mac's compiler should take it.
    """
    try:
        flat = sources.flatten(file)
    except CompileError as error:
        return _diagnostics(error.log, file)
    found = compiler.find_compiler()
    done = found.run(compiler.preprocess_flags([build.INCLUDE, *build._mlx_include()]), flat)
    if done.returncode:
        return _diagnostics(done.stderr, file)
    text = done.stdout
    for folder in build._mlx_include():
        text = text.replace(f'"{folder}/', '"')
    problems: list[Problem] = []
    try:
        problems = Text(text).problems()
        translation = rewrite(text, {})
        compiled = build._simulator_text(translation, file)
    except RewriteError as error:
        return sorted({*problems, *_diagnostics(str(error), file)})
    except CompileError as error:
        return sorted({*problems, *_diagnostics(error.log, file)})
    flags = [*_flags(), "-DMITTENS_STRICT_DIALECT", f"-isystem{build.INCLUDE}", f"-isystem{build._abi_folder()}"]
    done = found.run(flags, compiled)
    problems += _diagnostics(done.stderr, file)
    if done.returncode == 0:
        problems += problems_in(done.stdout, translation, str(build.INCLUDE))
    return sorted(set(problems))


def _flags() -> list[str]:
    flags = [flag for flag in compiler._COMMON if flag != "-w"]
    flags += ["-S", "-emit-llvm", "-O0", "-Xclang", "-disable-llvm-passes", "-gline-tables-only", "-o", "-"]
    flags += ["-Wno-everything", "-Wpre-c++17-compat", "-Wpre-c++20-compat", "-Wvla-extension", "-Wvla-cxx-extension"]
    flags += ["-Wc++20-designator", "-Wimplicit-function-declaration", "-ferror-limit=0", "-fno-caret-diagnostics"]
    return [*flags, "-fvisibility=hidden", "-ffp-contract=off"]


# Metal's compiler takes these, C++17 as they are, in C++14.
_TAKEN = ("constexpr if", "with no message", "inline variables")


def _diagnostics(log: str, file: str) -> list[Problem]:
    problems = []
    for name, line, kind, what in _DIAGNOSTIC.findall(build._clean(log)):
        if kind == "warning":
            if "::mittens::" in what or any(taken in what for taken in _TAKEN):
                continue
            what = what.split(" [-W")[0]
        problems.append(Problem(name, int(line), what))
    return problems or ([Problem(file, 1, log.strip())] if "error" in log else [])
