"""Clang's view of a text that is checked: its diagnostics, and the code of every function."""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from .. import build, build_simulator, compiler, library
from ..errors import ERROR, Problem
from ..read.lines import LineMap
from ..rewrite import conversions
from ..rewrite import edited as edits
from ..rewrite.translation import Translation, Variant
from .advice import advised
from .code import calls_by_pointer, casts, recursion, threadgroup_memory, vectors
from .diagnostics import HEAD, conversion, counts, in_metals_words
from .options import Options
from .places import Places

_MANY = 200  # kernels


def _sizes(variant: Variant) -> list[int]:
    """The numbers in a kernel's template arguments."""
    return [int(number) for number in re.findall(r"\b\d+\b", variant.template_args or "")]


# `(thread float*)p` or an alias of such a pointer.
_SPACE_CAST = re.compile(
    r"(?:\(\s*(?:const\s+)?|\b(?:using|typedef)\b[^;{}()]*)\b(?:device|constant|threadgroup|thread)\b[^();]*[*&]"
    r"\s*(?:\)\s*[\w(&]|\w*\s*;)"
)


class Compilation:
    """Clang's view of a translation."""

    def __init__(
        self,
        file: str,
        text: str,
        translation: Translation,
        compiled: str,
        strict: bool,
        options: Options,
        place: Places,
        known: list[Problem],
        eights: bool,
    ):
        self.known = known  # reported already
        self.eights = eights
        self.file, self.translation, self.strict, self.place = file, translation, strict, place
        self.lines = LineMap(text)
        # Without line markers, clang's places are places of the text.
        blank = re.sub(r'^#(?:line)? \d+ "[^\n]*$', lambda m: " " * len(m[0]), translation.text, flags=re.M)
        self.base = compiled.index(translation.text)
        self.end = self.base + len(blank)
        self.compiled = compiled[: self.base] + blank + compiled[self.base + len(translation.text) :]
        self.flags = [*_flags(options), f"-isystem{library.INCLUDE}", f"-isystem{library.abi_folder()}"]
        if _SPACE_CAST.search(text):
            self.flags.append("-femit-all-decls")  # code of functions too that no kernel calls
        self.flags += ["-DMITTENS_DIALECT", f"-DMITTENS_METAL_VERSION={options.version}"]
        every = "-femit-all-decls" in self.flags  # of the library only the part parsed with the text
        self.parsed = "" if every else library.parsed(compiler.find_compiler(), self.flags)

    def problems(self) -> list[Problem]:
        if len(self.translation.variants) < _MANY:
            done, self.edited = self._run(self.compiled, self.flags)
            code, coded = done.stdout, self.translation
        else:
            done, self.edited, code, coded = self._many()
        self.places = edits.Places(self.edited.text)
        problems = [*self._diagnostics(done.stderr)]
        if done.returncode == 0:
            own = str(library.INCLUDE)
            found = (
                *recursion(code, own),
                *casts(code, own),
                *calls_by_pointer(code, own),
            )
            problems += [self._located(problem) for problem in found]
            known = {(problem.file, problem.line) for problem in self.known}
            for problem in map(self._located, vectors(code, own, self.eights)):  # one a line
                if (problem.file, problem.line) not in known:
                    problems.append(problem)
                    known.add((problem.file, problem.line))
            problems += threadgroup_memory(code, coded) if self.strict else []
        elif not any(problem.severity == ERROR for problem in problems):
            problems.append(Problem(self.file, 1, f"clang fails: {done.stderr.strip()[-300:] or 'without a word'}"))
        return problems

    def _many(self) -> tuple[subprocess.CompletedProcess[str], edits.Edited, str, Translation]:
        """Of many kernels the diagnostics, and the code of a few: each function with its least and largest arguments.

        The few also say which conversions the text needs.
        """
        few: dict[object, Variant] = {}
        for variant in sorted(self.translation.variants, key=_sizes):
            kind = variant.function, (variant.template_args or "").split(",")[0]
            few.setdefault((kind, "least"), variant)
            few[kind, "largest"] = variant
        chosen = replace(self.translation, variants=list({v.name: v for v in few.values()}.values()))
        text = build_simulator.text_of(chosen, self.file)
        coded, edited = self._run(
            self.compiled[: self.end] + text[self.base + len(self.translation.text) :], self.flags
        )
        known = edited.followed_by(self.end, self.compiled)
        syntax = [*self.flags, "-fsyntax-only"]
        done = self._all(known, syntax)
        if done.returncode:  # perhaps for a conversion that none of the few needs
            done, known = self._run(known, syntax)
        return done, known, coded.stdout, chosen

    def _all(self, known: edits.Edited, flags: list[str]) -> subprocess.CompletedProcess[str]:
        """Compiles all kernels, on every processor a part of them."""
        run = build.with_library(compiler.find_compiler(), flags, self.parsed)
        variants = self.translation.variants
        count = max(1, min(os.cpu_count() or 1, len(variants) // _MANY))
        texts = [
            build_simulator.text_of(replace(self.translation, variants=variants[k::count]), self.file)
            for k in range(count)
        ]
        compiled = [self.compiled[: self.end] + text[self.base + len(self.translation.text) :] for text in texts]
        with ThreadPoolExecutor(count) as pool:
            done = list(
                pool.map(lambda text: run(known.followed_by(self.end, text).text, conversions.RANGES), compiled)
            )
        return max(done, key=lambda one: one.returncode)

    def _run(self, text: str | edits.Edited, flags: list[str]) -> tuple[subprocess.CompletedProcess[str], edits.Edited]:
        run = build.with_library(compiler.find_compiler(), flags, self.parsed)
        return conversions.compiled(run, text, self.translation.methods, str(library.INCLUDE))

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
            head = HEAD.match(line)
            if not head or head["kind"] not in ("error", "fatal error", "warning"):
                continue
            what = in_metals_words(head["what"].split(" [-W")[0])
            if head["kind"] == "warning":
                if not counts(what):
                    continue
                what = conversion(what) or what
            problem = self._from(head, what)
            if problem is None:  # in our own library: where it was asked for
                for other in lines[i + 1 :]:
                    note = HEAD.match(other)
                    if note and note["kind"] != "note":
                        break
                    if note and (problem := self._from(note, what)):
                        break
            if problem is not None and "'threadgroup_array'" not in what:
                problems.append(problem)
            elif head["kind"] != "warning":
                elsewhere.append(problem or Problem(self.file, 1, advised(what), 1))
        # Errors in calls of kernels, and in our own functions, follow from errors in the kernels.
        return problems or elsewhere

    def _from(self, head: re.Match[str], what: str) -> Problem | None:
        if head["file"] == "<stdin>":
            return self._problem(int(head["line"]), int(head["column"]), advised(what), ERROR)
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
