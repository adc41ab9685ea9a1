"""Finds code that a Mac's compiler would refuse although clang, in plain C++, takes it.

Four looks at a file; each finds mistakes that the others cannot:

- lint_source, its text after the preprocessor: words that Metal does not have, address spaces left out;
- lint_kernels, the arguments of its kernels;
- clang's diagnostics: errors, what is newer than C++14 (`if constexpr` and other extensions aside), and floats that
  become bfloat without a cast;
- lint_ir, clang's intermediate code of every function: recursion, casts between address spaces, calls by pointers,
  threadgroup memory that does not fit.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from . import build, cache, compiler, conversions, sources
from .advice import advised
from .errors import ERROR, NOTE, UNCOVERED, CompileError, Problem
from .lint_ir import calls_by_pointer, casts, recursion, threadgroup_memory, vectors
from .lint_source import Text
from .rewrite import LineMap, RewriteError, Translation, Variant, rewrite

STANDARDS = {"metal3.1": 310, "metal3.2": 320, "metal4.0": 400}


@dataclass(frozen=True)
class Options:
    """How a file is compiled: folders of headers, macros as NAME or NAME=VALUE, and the version of the language."""

    include: tuple[str, ...] = ()
    define: tuple[str, ...] = ()
    standard: str = "metal3.1"

    @property
    def version(self) -> int:
        return STANDARDS[self.standard]


_UNCOVERED_HEADER = re.compile(
    r"^[ \t]*#[ \t]*(?:include|import)[ \t]*[<\"](metal_(?:texture|raytracing|mesh|visible_function_table|"
    r"imageblocks|command_buffer)|tensor/[^>\"]*)[>\"]",
    re.M,
)
_TENSOR_HEADER = re.compile(
    r"^[ \t]*#[ \t]*(?:include|import)[ \t]*[<\"]"
    r"(metal_(?:cooperative_)?tensor|MetalPerformancePrimitives/[^>\"]*)[>\"]",
    re.M,
)
_TENSOR_GATE = (
    "products of tensors run right on an M5 with macOS 26.2: an M4 compiles those of int8 and answers wrongly, and "
    "some releases of Xcode want 26.2 as the deployment target"
)


def check(file: str, options: Options = Options()) -> list[Problem]:
    """Checks a .metal file, every kernel that it instantiates included.

    Args:
        file: One of `files()`, or a registered source.
        options: How it is compiled.

    Returns:
        The problems, by file and line; none if it has no mistake that this check knows of.
    """
    return _known_problems(file, options, strict=True)


def refused(file: str) -> list[Problem]:
    """What any Mac's compiler would refuse in a file, for a kernel that is about to run.

    These are the errors of `check` without the doubtful ones, and without those of memory: only a launch knows how
    much it asks for.
    """
    return [problem for problem in _known_problems(file, Options(), strict=False) if problem.severity == ERROR]


def _known_problems(file: str, options: Options, strict: bool) -> list[Problem]:
    """The problems of a file, from the cache if this text was checked before."""
    try:
        flat = sources.flatten(file, options.include)
    except CompileError as error:
        return _own_errors(error.log, file)
    what = flat, build._library_key(), _mlx_version(), compiler.find_compiler().identity
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
    place = _Places(file, flat, options)
    notes = [*_other_characters(flat, place)] if strict else []
    if (header := _UNCOVERED_HEADER.search(sources.without_comments(flat))) is not None:
        line = LineMap(flat).at(header.start())
        return [Problem(*line, f"<{header[1]}> is not covered by this check", 1, UNCOVERED)]
    if (header := _TENSOR_HEADER.search(sources.without_comments(flat))) is not None:
        line = LineMap(flat).at(header.start())
        if strict and options.version < STANDARDS["metal4.0"]:  # for a launch MLX chooses the newest
            return [Problem(*line, f"<{header[1]}> is of Metal 4: compile by -std=metal4.0 (--std metal4.0 here)", 1)]
        notes += [Problem(*line, _TENSOR_GATE, 1, NOTE)] if strict else []
    found = compiler.find_compiler()
    folders = [build.INCLUDE, *build._mlx_include(), *map(Path, options.include)]
    defines = [f"-D{definition}" for definition in options.define]
    done = found.run([*compiler.preprocess_flags(folders, options.version), *defines], flat)
    if done.returncode:
        return _sorted([*notes, *_own_errors(build._clean(done.stderr), file)])
    text = done.stdout
    for folder in build._mlx_include():
        text = text.replace(f'"{folder}/', '"')
    problems = notes
    try:
        newer, metal4 = options.version >= 320, header is not None or options.version >= STANDARDS["metal4.0"]
        words = Text(text, lambdas=newer, fences=newer, eights=metal4)
        found_in_text = [place.refined(problem) for problem in words.problems(strict)]
        uncovered = [problem for problem in found_in_text if problem.severity == UNCOVERED]
        if uncovered:
            return _sorted([*notes, *uncovered])
        problems = [*notes, *found_in_text]
        translation = rewrite(text, {}, dialect=True)
        compiled = build._simulator_text(translation, file)
    except RewriteError as error:
        return _sorted([*problems, *_own_errors(str(error), file)])
    except CompileError as error:
        return _sorted([*problems, *_own_errors(error.log, file)])
    problems += [place.refined(problem) for problem in _named_twice(translation)]
    problems += _Compilation(file, text, translation, compiled, strict, options, place, problems, words).problems()
    if strict and not translation.variants and not problems:
        problems.append(Problem(file, 1, _no_kernel(translation), 1))
    return _sorted(problems)


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


def _sorted(problems: list[Problem]) -> list[Problem]:
    return sorted(set(problems), key=lambda p: (p.file, p.line, p.column, p.what))


_MANY = 200  # kernels


def _sizes(variant: Variant) -> list[int]:
    """The numbers in a kernel's template arguments."""
    return [int(number) for number in re.findall(r"\b\d+\b", variant.template_args or "")]


# `(thread float*)p` or an alias of such a pointer.
_SPACE_CAST = re.compile(
    r"(?:\(\s*(?:const\s+)?|\b(?:using|typedef)\b[^;{}()]*)\b(?:device|constant|threadgroup|thread)\b[^();]*[*&]"
    r"\s*(?:\)\s*[\w(&]|\w*\s*;)"
)


class _Compilation:
    """Clang's view of a translation."""

    def __init__(
        self,
        file: str,
        text: str,
        translation: Translation,
        compiled: str,
        strict: bool,
        options: Options,
        place: _Places,
        known: list[Problem],
        words: Text,
    ):
        self.known = known  # reported already
        self.eights = words.eights
        self.file, self.translation, self.strict, self.place = file, translation, strict, place
        self.lines = LineMap(text)
        # Without line markers, clang's places are those of the text.
        blank = re.sub(r'^#(?:line)? \d+ "[^\n]*$', lambda m: " " * len(m[0]), translation.text, flags=re.M)
        self.base = compiled.index(translation.text)
        self.end = self.base + len(blank)
        self.compiled = compiled[: self.base] + blank + compiled[self.base + len(translation.text) :]
        self.flags = [*_flags(options), f"-isystem{build.INCLUDE}", f"-isystem{build._abi_folder()}"]
        if _SPACE_CAST.search(text):
            self.flags.append("-femit-all-decls")  # code of functions too that no kernel calls
        self.flags += ["-DMITTENS_DIALECT", f"-DMITTENS_METAL_VERSION={options.version}"]
        every = "-femit-all-decls" in self.flags  # of the library only the part parsed with the text
        self.library = "" if every else build._parsed_library(compiler.find_compiler(), self.flags)

    def problems(self) -> list[Problem]:
        if len(self.translation.variants) < _MANY:
            done, self.edited = self._run(self.compiled, self.flags)
            code, coded = done.stdout, self.translation
        else:
            done, self.edited, code, coded = self._many()
        self.places = conversions.Places(self.edited.text)
        problems = [*self._diagnostics(done.stderr)]
        if done.returncode == 0:
            library = str(build.INCLUDE)
            found = (
                *recursion(code, library),
                *casts(code, library),
                *calls_by_pointer(code, library),
            )
            problems += [self._located(problem) for problem in found]
            known = {(problem.file, problem.line) for problem in self.known}
            for problem in map(self._located, vectors(code, library, self.eights)):  # one a line
                if (problem.file, problem.line) not in known:
                    problems.append(problem)
                    known.add((problem.file, problem.line))
            problems += threadgroup_memory(code, coded) if self.strict else []
        elif not any(problem.severity == ERROR for problem in problems):
            problems.append(Problem(self.file, 1, f"clang fails: {done.stderr.strip()[-300:] or 'without a word'}"))
        return problems

    def _many(self) -> tuple[subprocess.CompletedProcess[str], conversions.Edited, str, Translation]:
        """Of many kernels the diagnostics, and the code of a few: each function with its least and largest arguments.

        The few also say which conversions the text needs.
        """
        few: dict[object, Variant] = {}
        for variant in sorted(self.translation.variants, key=_sizes):
            kind = variant.function, (variant.template_args or "").split(",")[0]
            few.setdefault((kind, "least"), variant)
            few[kind, "largest"] = variant
        chosen = replace(self.translation, variants=list({v.name: v for v in few.values()}.values()))
        text = build._simulator_text(chosen, self.file)
        coded, edited = self._run(
            self.compiled[: self.end] + text[self.base + len(self.translation.text) :], self.flags
        )
        known = edited.followed_by(self.end, self.compiled)
        syntax = [*self.flags, "-fsyntax-only"]
        done = self._all(known, syntax)
        if done.returncode:  # perhaps for a conversion that none of the few needs
            done, known = self._run(known, syntax)
        return done, known, coded.stdout, chosen

    def _all(self, known: conversions.Edited, flags: list[str]) -> subprocess.CompletedProcess[str]:
        """Compiles all kernels, on every processor a part of them."""
        run = build._with_library(compiler.find_compiler(), flags, self.library)
        variants = self.translation.variants
        count = max(1, min(os.cpu_count() or 1, len(variants) // _MANY))
        texts = [
            build._simulator_text(replace(self.translation, variants=variants[k::count]), self.file)
            for k in range(count)
        ]
        compiled = [self.compiled[: self.end] + text[self.base + len(self.translation.text) :] for text in texts]
        with ThreadPoolExecutor(count) as pool:
            done = list(
                pool.map(lambda text: run(known.followed_by(self.end, text).text, conversions.RANGES), compiled)
            )
        return max(done, key=lambda one: one.returncode)

    def _run(
        self, text: str | conversions.Edited, flags: list[str]
    ) -> tuple[subprocess.CompletedProcess[str], conversions.Edited]:
        run = build._with_library(compiler.find_compiler(), flags, self.library)
        return conversions.compiled(run, text, self.translation.methods, str(build.INCLUDE))

    def _located(self, problem: Problem) -> Problem:
        if problem.file not in ("<stdin>", "-", ""):
            return problem
        return self._problem(problem.line, problem.column or 1, problem.what, problem.severity) or problem

    def _problem(self, line: int, column: int, what: str, severity: str) -> Problem | None:
        offset = self.edited.original(self.places.offset(line, column))
        if not self.base <= offset < self.end:
            return None
        offset = min(self.translation.original(offset - self.base), len(self.lines._text) - 1)
        file, at = self.lines.at(offset)
        word = re.match(r"\w*", self.lines._text[offset:])[0]  # type: ignore[index]
        return self.place.refined(Problem(file, at, what, self.lines.column(offset), severity), word)

    def _diagnostics(self, log: str) -> list[Problem]:
        problems: list[Problem] = []
        elsewhere: list[Problem] = []
        lines = log.splitlines()
        for i, line in enumerate(lines):
            head = _HEAD.match(line)
            if not head or head["kind"] not in ("error", "fatal error", "warning"):
                continue
            what = _in_metals_words(head["what"].split(" [-W")[0])
            if head["kind"] == "warning":
                if not _counts(what):
                    continue
                what = _conversion(what) or what
            problem = self._from(head, what)
            if problem is None:  # in our own library: where it was asked for
                for other in lines[i + 1 :]:
                    note = _HEAD.match(other)
                    if note and note["kind"] != "note":
                        break
                    if note and (problem := self._from(note, what)):
                        break
            if problem is not None and "'threadgroup_array'" not in what:
                problems.append(problem)
            elif head["kind"] != "warning":
                elsewhere.append(problem or Problem(self.file, 1, advised(what), 1))
        # What is said of the calls of kernels, and of our own functions, follows from what is wrong with them.
        return problems or elsewhere

    def _from(self, head: re.Match[str], what: str) -> Problem | None:
        if head["file"] == "<stdin>":
            return self._problem(int(head["line"]), int(head["column"]), advised(what), ERROR)
        return None


_HEAD = re.compile(
    r"^(?P<file>.+?):(?P<line>\d+):(?P<column>\d+):(?:\{[\d:{}-]+\}:)? "
    r"(?P<kind>fatal error|error|warning|note): (?P<what>.*)$"
)


def _in_metals_words(what: str) -> str:
    for space, number in (("device", 1), ("threadgroup", 3), ("constant", 0), ("constant", 4)):
        what = what.replace(f"__attribute__((address_space({number})))", space)
    return re.sub(r"([\w:]+) __attribute__\(\(ext_vector_type\((\d)\)\)\)", r"vec<\1, \2>", what)


def _counts(warning: str) -> bool:
    """Whether what clang only warns of is a mistake in Metal."""
    if "::mittens::" in warning:
        return False
    if "cannot be narrowed" in warning:
        return _NARROWED.match(warning) is not None
    if warning.startswith("implicit conversion"):
        return _conversion(warning) is not None
    return "incompatible with C++" not in warning or any(new in warning for new in _NEWER)


_NARROWED = re.compile(r"(?:type|.*from type) '(?:float|half)'.* cannot be narrowed to '[^']*(?:char|short|int|long)'")
_FLOATS = re.compile(
    r"implicit conversion .*floating-point precision: (?P<source>'[^']*'.*?) to (?P<target>'[^']*'.*)$"
)


def _conversion(warning: str) -> str | None:
    """What Metal refuses of clang's implicit conversions between floating-point types; integers become a bfloat."""
    if not (types := _FLOATS.match(warning)):
        return None
    source, target = (re.search(r"__bf16|bfloat", types[name]) is not None for name in ("source", "target"))
    if target and not source:
        return "a float becomes a bfloat without a cast: write bfloat(...) around it"
    if source and re.search(r"_Float16|half", types["target"]):
        return "a bfloat and a half have no type in common: write float(...) around one of them"
    return None


def _flags(options: Options) -> list[str]:
    flags = [flag for flag in compiler._COMMON if flag != "-w"]
    flags += ["-S", "-emit-llvm", "-O0", "-Xclang", "-disable-llvm-passes", "-gline-tables-only", "-o", "-"]
    flags += [
        "-Wno-everything",
        "-flax-vector-conversions=none",
        "-Wvla-extension",
        "-Wvla-cxx-extension",
        "-Wimplicit-float-conversion",
        "-Wdouble-promotion",
        "-Wc++11-narrowing",
        "-Wno-error=c++11-narrowing",
    ]
    flags += ["-Wc++20-designator", "-Wimplicit-function-declaration", "-ferror-limit=0", "-fno-caret-diagnostics"]
    if options.version < 400:
        flags += ["-Wpre-c++17-compat"]
    flags += ["-Wpre-c++20-compat"]
    return [*flags, "-fvisibility=hidden", "-ffp-contract=off"]


# The few features newer than C++14 that clang does not take there as an extension.
_NEWER = ("class template argument deduction", "declared with 'auto'", "'consteval'", "'constinit'")

_OWN = re.compile(r"^(.+?):(\d+):(?:(\d+):)? (?:fatal )?(?:error): (.*)$", re.M)


def _own_errors(log: str, file: str) -> list[Problem]:
    """Mistakes that the front end itself and the preprocessor report."""
    problems = [
        Problem(name, int(line), advised(what), int(column or 1)) for name, line, column, what in _OWN.findall(log)
    ]
    return problems or [Problem(file, 1, log.strip(), 1)]


def _other_characters(flat: str, place: _Places) -> list[Problem]:
    """Characters that are not ASCII, outside of comments."""
    if flat.isascii():
        return []
    lines = LineMap(flat)
    notes = []
    for other in re.finditer(r"[^\x00-\x7f]+", sources.without_comments(flat)):
        what = f"{other[0]!r} is not ASCII: it may stand in a comment only where MLX compiles the text"
        notes.append(Problem(*lines.at(other.start()), what, lines.column(other.start()), NOTE))
    return notes


class _Places:
    """Columns of a file's own text, which the preprocessor may have moved."""

    def __init__(self, file: str, flat: str, options: Options):
        self.lines: dict[tuple[str, int], str] = {}
        name, number = file, 1
        for line in flat.split("\n"):
            marker = re.match(r'#line (\d+) "([^"\n]*)"$', line)
            if marker:
                name, number = marker[2], int(marker[1])
            else:
                self.lines[name, number] = line
                number += 1

    def refined(self, problem: Problem, word: str = "") -> Problem:
        """The problem with the column at which the word stands in the user's line."""
        line = self.lines.get((problem.file, problem.line))
        if line is None:
            return problem
        column = min(max(problem.column, 1), len(line) + 1)
        if not word:
            named = re.search(r"'(\w+)'", problem.what)
            word = named[1] if named and not line.startswith(named[1], column - 1) else ""
        if word and not line.startswith(word, column - 1):
            places = [m.start() + 1 for m in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", line)]
            column = min(places, key=lambda at: abs(at - column)) if places else column
        return Problem(problem.file, problem.line, problem.what, column, problem.severity)
