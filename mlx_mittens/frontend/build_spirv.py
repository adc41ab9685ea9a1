"""From a .metal file to SPIR-V, for Mesa's compiler for Apple GPUs."""

from __future__ import annotations

from pathlib import Path

from . import build, cache, compiler, library
from .build_ptx import entry_name
from .errors import CompileError
from .lower import spirv_module
from .lower.bfloat_lowering import UnknownOperation
from .read import sources
from .rewrite.translation import Translation

# Assumed bytes of dynamic threadgroup memory: as much as a threadgroup of an Apple GPU may have.
_MOST_THREADGROUP_BYTES = 32768
_THREADGROUPS = (
    "threadgroups_per_grid",
    "threads_per_grid",
    "grid_size",
)  # attributes that are no registers of an Apple GPU


def _spirv_text(translation: Translation, file: str, name: str) -> str:
    variant, kernel = build.find(file, name, translation)
    pointer = f"decltype(&{variant.expression})"
    buffers = sorted(
        (argument.index, f"::mittens::parameter_t<{position}, {pointer}> p{position}")
        for position, argument in enumerate(kernel.arguments)
        if argument.kind == "buffer" and argument.index is not None
    )
    parameters = [text for _, text in buffers]
    grid = ""
    if any(argument.kind in _THREADGROUPS for argument in kernel.arguments):
        parameters.append("uint width, uint height, uint depth")
        grid = "  const uint3 threadgroups{width, height, depth};\n"
    declaration, limit = build.max_threads(variant, kernel, 0) if kernel.max_threads else ("", "0")
    call = build.call(variant, kernel, "::mittens::address_of(p{position})", "::mittens::dynamic_threadgroup_memory()")
    for attribute in _THREADGROUPS:
        call = call.replace(f"::mittens::attribute::{attribute}()", f"::mittens::attribute::{attribute}(threadgroups)")
    return (
        f"#define MITTENS_THREADGROUP_BYTES {_MOST_THREADGROUP_BYTES}\n"
        f"{build.prelude(translation)}{declaration}"
        f'extern "C" __attribute__((used)) MITTENS_CONSTANT const int mittens_max_threads = {limit};\n'
        f'extern "C" __attribute__((device_kernel)) void mittens_entry({", ".join(parameters)}) {{\n'
        f"{grid}{call}}}\n"
    )


def spirv(file: str, kernel: str, threads: int | None = None, constants: dict[int, object] | None = None) -> Path:
    """The SPIR-V of one variant, for Mesa's compiler for Apple GPUs.

    Args:
        file: One of `files()`, or a registered source.
        kernel: The name of a variant.
        threads: Of a threadgroup. None: as many as the kernel declares at most; where it declares none, so few that
            they bound nothing.
        constants: Values of function constants, by index.

    Returns:
        Path: A file in the cache.

    Raises:
        CompileError: If the kernel does not compile.
        KeyError: If the file has no such kernel.
    """
    found = compiler.find_compiler()
    flags, module_flags = compiler.spirv_flags(), compiler.spirv_module_flags()
    texts = build.constant_texts(constants)
    what = [sources.flatten(file), kernel, str(threads), repr(sorted(texts.items()))]
    name = cache.key(*what, library.key(), found.identity, " ".join([*flags, *module_flags]))

    def make(path: Path) -> None:
        translation = build.translate(file, constants)
        text = _spirv_text(translation, file, kernel)
        done = build.compiled(found, [*flags, f"-I{library.INCLUDE}", "-o", "-"], text, translation)
        if done.returncode:
            raise build.gpu_error(file, kernel, text, done.stderr)
        try:
            module = spirv_module.prepared(done.stdout, threads)
        except UnknownOperation as error:
            raise CompileError(file, kernel, str(error)) from None
        done = found.run([*module_flags, "-o", str(path)], module)
        if done.returncode:
            raise CompileError(file, kernel, build.clean(done.stderr))
        if spirv_module.loses_address_spaces(path.read_bytes()):
            what = "error: a reference to device, constant or threadgroup memory is passed on without its address space"
            raise CompileError(file, kernel, what)

    return cache.cached(f"{entry_name(kernel)[:80]}-{name}.spv", make)
