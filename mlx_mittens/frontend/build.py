"""From a .metal file to its translation and its variants; steps that the builds for all targets share."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable

from . import compiler, library
from .errors import CompileError
from .lower import integer_lowering, vector_truths
from .read import preprocess, sources
from .read.tokens import RewriteError
from .rewrite import Pass, Passes, conversions, count_rounds, rewrite, to_run
from .rewrite.translation import Argument, Kernel, Translation, Variant


def clean(log: str) -> str:
    """The compiler's log in Metal's words, with paths as they stand in an #include, and without our own machinery."""
    lines = [line for line in log.splitlines() if not line.startswith("In file included from")]
    text = "\n".join(lines)
    for folder in [library.INCLUDE, *library.mlx_include()]:
        text = text.replace(f"{folder}/", "")
    text = re.sub(r"(?m)^(.*?:\d+:\d+:)(?:\{[\d:-]+\})+:", r"\1", text)  # the ranges that conversions asks for
    for space, number in (("device", 1), ("threadgroup", 3), ("constant", 0), ("constant", 4)):
        text = text.replace(f"__attribute__((address_space({number})))", space)
    return re.sub(r"([\w:]+) __attribute__\(\(ext_vector_type\((\d)\)\)\)", r"vec<\1, \2>", text)


Constants = dict[int, str]


def constant_texts(constants: dict[int, object] | None) -> Constants:
    texts = {}
    for index, value in (constants or {}).items():
        texts[int(index)] = str(value).lower() if isinstance(value, bool) else str(value)
    return texts


@functools.lru_cache(maxsize=256)
def _translate(
    file: str,
    flat: str,
    constants: tuple[tuple[int, str], ...],
    nvidia: bool,
    passes: Passes,
    tensors: bool,
) -> Translation:
    found = compiler.find_compiler()
    folders, defines = [library.INCLUDE, *library.mlx_include()], ["-DMITTENS_NVIDIA"] * nvidia
    run = preprocess.preprocessed_with_tensors if tensors else preprocess.preprocessed
    done = run(found, flat, folders, 310, defines)
    if done.returncode:
        raise CompileError(file, None, clean(done.stderr))
    text = done.stdout
    for folder in library.mlx_include():
        text = text.replace(f'"{folder}/', '"')
    try:
        return rewrite(text, passes, dict(constants))
    except RewriteError as error:
        raise CompileError(file, None, str(error)) from None


def translate(
    file: str,
    constants: dict[int, object] | None = None,
    nvidia: bool = False,
    more: tuple[Pass, ...] = (),
    tensors: bool = False,
) -> Translation:
    """Translates a .metal file for clang, for NVIDIA's GPUs or for the simulator, with more passes than always run.

    With `tensors` a text that includes tensors is of Metal 4, as no compiler for GPUs here takes it.
    """
    texts = tuple(sorted(constant_texts(constants).items()))
    return _translate(file, sources.flatten(file), texts, nvidia, to_run(*more), tensors)


def simulated(file: str, constants: dict[int, object] | None = None, more: tuple[Pass, ...] = ()) -> Translation:
    """Translates a file for the simulator, which counts rounds; the lanes of our own kernels do not part."""
    passes = (*more, count_rounds) if sources.is_registered(file) else more
    return translate(file, constants, more=passes, tensors=True)


def variants(file: str) -> list[Variant]:
    """Every kernel that a host can ask the file for."""
    return simulated(file).variants


def kernel_of(file: str, variant: Variant, translation: Translation) -> Kernel:
    if variant.function not in translation.kernels:
        raise CompileError(file, variant.name, f"error: it instantiates {variant.function}, which is not a kernel")
    return translation.kernels[variant.function]


def find(file: str, kernel: str, translation: Translation) -> tuple[Variant, Kernel]:
    for variant in translation.variants:
        if variant.name == kernel:
            return variant, kernel_of(file, variant, translation)
    raise KeyError(f"{file} has no kernel {kernel!r}; it has {', '.join(v.name for v in translation.variants)}")


def signature(file: str, kernel: str) -> list[Argument]:
    """The parameters of a kernel, in order."""
    return find(file, kernel, simulated(file))[1].arguments


def call(variant: Variant, kernel: Kernel, place: str, threadgroup_place: str) -> str:
    """The call of a kernel's function; the places say how buffer {index} and threadgroup memory {index} are reached."""
    arguments = [f"&{variant.expression}"]
    for position, argument in enumerate(kernel.arguments):
        if argument.kind == "buffer":
            arguments.append(place.format(position=position, index=argument.index))
        elif argument.kind == "threadgroup":
            arguments.append(threadgroup_place.format(index=argument.index))
        else:
            arguments.append(f"::mittens::Position{{::mittens::attribute::{argument.kind}()}}")
    file, line = variant.site
    return f'#line {line} "{file}"\n  ::mittens::invoke({", ".join(arguments)});\n'


def max_threads(variant: Variant, kernel: Kernel, number: int) -> tuple[str, str]:
    """A declaration, and an expression for the most threads of a threadgroup, which may depend on the template."""
    if kernel.max_threads is None:
        return "", "1024"
    if kernel.template is None:
        return "", f"({kernel.max_threads})"
    name = f"mittens_limit_{number}"
    declaration = f"template <{kernel.template}> struct {name} {{ enum {{ threads = {kernel.max_threads} }}; }};\n"
    return declaration, f"unsigned({name}<{variant.template_args}>::threads)"


def prelude(translation: Translation) -> str:
    """The library and the text; none of its functions is seen from elsewhere, so that unused ones go."""
    return (
        '#include "metal/stdlib.h"\n'
        "#pragma clang attribute push(__attribute__((internal_linkage)), apply_to = function)\n"
        f"{translation.text}\n#pragma clang attribute pop\n"
    )


def with_library(
    found: compiler.Compiler, flags: list[str], parsed: str
) -> Callable[[str, list[str]], subprocess.CompletedProcess[str]]:
    """Calls clang with a text and more flags, and with a parsed library where there is one."""

    def run(text: str, more: list[str]) -> subprocess.CompletedProcess[str]:
        done = found.run([*flags, *["-include-pch", parsed] * bool(parsed), *more], text)
        if done.returncode and parsed and parsed in done.stderr:  # a header or the file itself has changed since
            done = found.run([*flags, *more], text)
        return done

    return run


def compiled(
    found: compiler.Compiler, flags: list[str], text: str, translation: Translation, parsed: str = ""
) -> subprocess.CompletedProcess[str]:
    """Calls clang, with Metal's conversions written out where it has none, and perhaps with a parsed library."""
    run = with_library(found, flags, parsed)
    return conversions.compiled(run, text, translation.methods, str(library.INCLUDE))[0]


def unoptimized(
    compiled: Callable[[bool], subprocess.CompletedProcess[str]],
) -> subprocess.CompletedProcess[str]:
    """LLVM's text before any pass, from a function that compiles with or without all casts written out.

    They are where a cast of a vector takes its bits, and left as they are if that does not compile.
    """
    done = compiled(False)
    if done.returncode or not vector_truths.has_casts(done.stdout):
        return done
    written = compiled(True)
    return done if written.returncode else written


def lowered(text: str) -> str:
    """LLVM's text before any optimization, with Metal's semantics where C++ differs.

    Our own kernels do without: nothing in them depends on it, and their machine code is recorded.
    """
    return integer_lowering.lowered(vector_truths.with_truths(text))


_TENSORS = re.compile(r"\b(?:tensor_ops|tensor_inline|cooperative_tensor)\b")


def gpu_error(file: str, kernel: str | None, text: str, log: str) -> CompileError:
    """Why a text is not compiled for a GPU; the library has tensors for the simulator alone."""
    if _TENSORS.search(text):
        log = (
            "error: it multiplies tensors of Metal 4, which run on an M5 and in the simulator: no compiler here makes "
            "machine code of them"
        )
    return CompileError(file, kernel, clean(log))
