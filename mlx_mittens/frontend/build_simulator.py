"""From a .metal file to a library for the simulator."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from . import build, cache, compiler, library
from .errors import CompileError
from .lower import vector_lanes, vector_truths
from .read import sources
from .rewrite import named_casts, private_arrays
from .rewrite.translation import Translation

_FMULADD = re.compile(r"^declare [^\n]*@llvm\.fmuladd\.(\w+)\(", re.M)


def _fused(text: str) -> str:
    """LLVM's text with the products fused that may be, also where the processor has no such instruction."""
    for kind in _FMULADD.findall(text):
        if re.search(rf"^declare [^\n]*@llvm\.fma\.{kind}\(", text, re.M):
            text = re.sub(rf"^declare [^\n]*@llvm\.fmuladd\.{kind}\([^\n]*\n", "", text, flags=re.M)
    return text.replace("@llvm.fmuladd.", "@llvm.fma.")


def text_of(translation: Translation, file: str) -> str:
    """The text for clang: the translation, an entry for each variant, and the table of them."""
    parts = [build.prelude(translation)]
    table = []
    for number, variant in enumerate(translation.variants):
        kernel = build.kernel_of(file, variant, translation)
        places = "::mittens::argument(buffers, {index})", "::mittens::argument(threadgroup_buffers, {index})"
        declaration, limit = build.max_threads(variant, kernel, number)
        parts.append(
            f"{declaration}"
            f"static void mittens_entry_{number}(void* const* buffers, void* const* threadgroup_buffers) {{\n"
            f"{build.call(variant, kernel, *places)}}}\n"
        )
        rows = [
            f'{{"{a.name}", {a.index}, {"true" if a.kind == "threadgroup" else "false"}}}'
            for a in kernel.arguments
            if a.index is not None
        ]
        parts.append(f"static const mittens::abi::Argument mittens_arguments_{number}[] = {{{', '.join(rows)}}};\n")
        table.append(
            f'  {{"{variant.name}", mittens_entry_{number}, mittens_arguments_{number}, {len(rows)}, {limit}}},\n'
        )
    parts.append('#include "metal/cpu_library.h"\n')
    parts.append(f"static const mittens::abi::Kernel mittens_kernels[] = {{\n{''.join(table)}}};\n")
    parts.append(f"MITTENS_LIBRARY(mittens_kernels, {len(table)})\n")
    return "".join(parts)


def simulator_library(
    file: str,
    watch: bool = True,
    constants: dict[int, object] | None = None,
    private: bool = False,
    fuse: bool = False,
    flush_subnormals: bool = False,
) -> str:
    """A shared object that holds all variants of a .metal file, for the simulator.

    Args:
        file: One of `files()`, or a registered source.
        watch: Whether the memory watcher is to see its accesses.
        constants: Values of function constants, by index.
        private: Whether it is to see those to arrays of a thread's own too, which then stay in memory, and of vectors
            the components.
        fuse: Whether `a * b + c` within an expression rounds once.
        flush_subnormals: Whether it is to run where subnormal float32 are zero.

    Returns:
        The path of a file in the cache.

    Raises:
        CompileError: If the file does not compile.
    """
    found = compiler.find_compiler()
    flags = [*compiler.cpu_flags(watch), *compiler.arithmetic_flags(fuse, flush_subnormals)]
    texts = build.constant_texts(constants)
    flat = sources.flatten(file)
    what = [flat, repr(sorted(texts.items())), *["private"] * private]
    lowered = private or sources.is_registered(file)
    what += ["lowered"] * lowered
    more = (private_arrays,) if private else ()
    name = cache.key(*what, library.key(), found.identity, " ".join(flags), library.processor())

    def make(path: Path) -> None:
        translation = build.simulated(file, constants, more)
        if not translation.variants:
            raise CompileError(file, None, "error: the file has no kernel")
        compiled = path.with_suffix(".o")
        try:
            includes = [f"-I{library.INCLUDE}", f"-I{library.abi_folder()}"]
            parsed = library.parsed(found, [*flags, *includes])
            if lowered or fuse:
                unoptimized = [*compiler.unoptimized_flags(flags), *includes]

                def compiled_to_text(casts: bool) -> subprocess.CompletedProcess[str]:
                    written = build.simulated(file, constants, (*more, named_casts) if casts else more)
                    return build.compiled(found, unoptimized, text_of(written, file), written, parsed)

                done = build.unoptimized(compiled_to_text)
                text = done.stdout
                if lowered:
                    # A load through a reference must not move before the branch that asks for it.
                    text = re.sub(r" dereferenceable\(\d+\)", "", build.lowered(text))
                if fuse:
                    text = _fused(text)
                lanes = lowered and watch and vector_truths.has_vectors(flat)
                passes = [*flags, *compiler.AS_WRITTEN * private]
                if lanes and not done.returncode:
                    done = found.run(compiler.optimized_flags(passes), text)
                    text = vector_lanes.with_lanes(done.stdout)
                if not done.returncode:
                    done = found.run([*compiler.object_flags(passes, optimized=lanes), "-o", str(compiled)], text)
            else:
                text = text_of(translation, file)
                done = build.compiled(found, [*flags, *includes, "-o", str(compiled)], text, translation, parsed)
            if done.returncode:
                raise CompileError(file, None, build.clean(done.stderr))
            linked = subprocess.run([*found.linker, str(compiled), "-o", str(path)], capture_output=True, text=True)
            if linked.returncode:
                raise RuntimeError(f"linking {file} for the simulator failed:\n{linked.stderr}")
        finally:
            compiled.unlink(missing_ok=True)

    return str(cache.cached(f"{Path(file).stem}-{name}.so", make))
