"""From a .metal file to PTX."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import build, cache, compiler, library
from .lower import ptx_module
from .lower.mma_lowering import joined_products
from .read import sources
from .rewrite import named_casts
from .rewrite.translation import Translation


def entry_name(kernel: str) -> str:
    """The name of a kernel's entry in its PTX."""
    return re.sub(r"\W", "_", kernel)


def _ptx_text(translation: Translation, file: str, names: Sequence[str], bytes_sizes: dict[int, int]) -> str:
    matrices = "#define MITTENS_MATRIX_LANES\n" if "simdgroup_multiply" in translation.text else ""
    parts = [matrices, build.prelude(translation)]
    for number, name in enumerate(names):
        variant, kernel = build.find(file, name, translation)
        pointer = f"decltype(&{variant.expression})"
        parameters = []
        for position, argument in enumerate(kernel.arguments):
            if argument.kind == "buffer" and argument.index is not None:
                size = bytes_sizes.get(argument.index)
                type_text = f"::mittens::Bytes<{size}>" if size else f"::mittens::parameter_t<{position}, {pointer}>"
                parameters.append((argument.index, f"{type_text} p{position}"))
        declared = ", ".join(text for _, text in sorted(parameters))
        declaration, limit = build.max_threads(variant, kernel, number)
        call = build.call(
            variant, kernel, "::mittens::address_of(p{position})", "::mittens::dynamic_threadgroup_memory()"
        )
        head = f'extern "C" __attribute__((nvptx_kernel)) void mittens_entry_{number}({declared})'
        parts.append(
            f"{declaration}"
            f'extern "C" __attribute__((used)) int mittens_max_threads_{entry_name(name)} = {limit};\n'
            f'{head} __asm__("{entry_name(name)}");\n{head} {{\n{call}}}\n'
        )
    return "".join(parts)


def _ptx(
    file: str, names: Sequence[str], bytes_sizes: dict[int, int] | None, arch: str, constants: dict[int, object] | None
) -> dict[str, str]:
    """The PTX of some variants of a file, from one call of clang, by the names of their entries."""
    found = compiler.find_compiler()
    flat, sizes = sources.flatten(file), bytes_sizes or {}
    flags = compiler.ptx_flags(arch, flat)
    lowered = sources.is_registered(file)
    what = [flat, *names, repr(sorted(sizes.items())), repr(sorted(build.constant_texts(constants).items()))]
    what += ["lowered"] * lowered
    name = cache.key(*what, library.key(), found.identity, " ".join(flags))

    def make(path: Path) -> None:
        text = ""

        def compiled(flags: list[str], casts: bool = False) -> subprocess.CompletedProcess[str]:
            nonlocal text
            translation = build.translate(file, constants, nvidia=True, more=(named_casts,) if casts else ())
            text = _ptx_text(translation, file, names, sizes)
            return build.compiled(found, [*flags, f"-I{library.INCLUDE}"], text, translation)

        if lowered:
            unoptimized, optimized = compiler.lowered_ptx_flags(flags)
            done = build.unoptimized(functools.partial(compiled, unoptimized))
            if not done.returncode:
                done = found.run(optimized, build.lowered(done.stdout))
        else:
            done = compiled([*flags, "-o", "-"])
        if done.returncode:
            raise build.gpu_error(file, names[0] if len(names) == 1 else None, text, done.stderr)
        path.write_text(done.stdout)

    text = cache.cached(f"{entry_name(names[0])[:80]}-{name}.ptx", make).read_text()
    return {entry: joined_products(text) for entry, text in ptx_module.entries(text).items()}


def ptx(
    file: str,
    kernel: str,
    bytes_sizes: dict[int, int] | None = None,
    arch: str = "sm_80",
    constants: dict[int, object] | None = None,
) -> str:
    """The PTX of one variant, with one entry, `entry_name(kernel)`.

    Its parameters are the kernel's buffers in the order of their indices: a 64-bit address for a pointer, the value
    itself for a reference.

    Args:
        file: One of `files()`, or a registered source.
        kernel: The name of a variant.
        bytes_sizes: Buffers whose contents are handed over in place of their address, and how many bytes they are.
        arch: The oldest GPU that it is to run on.
        constants: Values of function constants, by index.

    Raises:
        CompileError: If the kernel does not compile.
        KeyError: If the file has no such kernel.
    """
    prebuilt = library.installed() / "ptx" / arch / f"{entry_name(kernel)}.ptx"
    if not bytes_sizes and not constants and prebuilt.is_file():
        text = prebuilt.read_text()
        if text.startswith(f"// {library.prebuilt_key(sources.flatten(file))}\n"):
            return text
    return _ptx(file, [kernel], bytes_sizes, arch, constants)[entry_name(kernel)]


# Variants that are compiled by one call of clang, which parses the library and the file once for all of them.
_VARIANTS_PER_CALL = 12


def all_ptx(kernels: Iterable[tuple[str, str]], arch: str = "sm_80") -> dict[tuple[str, str], str]:
    """The PTX of many variants, in a third of the time that `ptx` takes for each.

    It computes the same. Instructions may stand in another order, which may take a register more or less.

    Args:
        kernels: Files and names of variants.
        arch: The oldest GPU that they are to run on.

    Raises:
        CompileError: If a kernel does not compile.
        KeyError: If a file has no such kernel.
    """
    names: dict[str, list[str]] = {}
    for file, name in kernels:
        names.setdefault(file, []).append(name)
    parts = [
        (file, some[i : i + _VARIANTS_PER_CALL])
        for file, some in names.items()
        for i in range(0, len(some), _VARIANTS_PER_CALL)
    ]

    def texts_of(part: tuple[str, list[str]]) -> dict[tuple[str, str], str]:
        file, some = part
        texts = _ptx(file, some, None, arch, None)
        return {(file, name): texts[entry_name(name)] for name in some}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {kernel: text for texts in pool.map(texts_of, parts) for kernel, text in texts.items()}


def has_prebuilt_ptx() -> bool:
    """Whether the package was built with the PTX of its kernels, so that an NVIDIA GPU needs no compiler here."""
    return any((library.installed() / "ptx").glob("*/*.ptx"))
