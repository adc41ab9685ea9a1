"""From a .metal file to its variants, to a library for the simulator, to PTX, and to SPIR-V."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import (
    cache,
    compiler,
    conversions,
    integer_lowering,
    ptx_module,
    sources,
    spirv_module,
    vector_lanes,
    vector_truths,
)
from .bfloat_lowering import UnknownOperation
from .errors import CompileError
from .mma_lowering import joined_products
from .rewrite import Argument, Kernel, RewriteError, Translation, Variant, rewrite

_FOLDER = Path(__file__).resolve().parent
INCLUDE = _FOLDER / "include"


def _abi_folder() -> Path:
    """Where simulator/abi.h is: installed beside our headers, in a source tree beside the simulator."""
    for folder in (INCLUDE, _FOLDER.parent.parent / "csrc", sources.metal_folder().parent / "csrc"):
        if (folder / "simulator" / "abi.h").is_file():
            return folder
    raise FileNotFoundError("mlx_mittens finds no simulator/abi.h: reinstall the package")


def _installed() -> Path:
    """The folder with the build's products. In an editable install it differs from the source folder."""
    package = __package__.rpartition(".")[0]
    spec = importlib.util.find_spec(f"{package}._build") if package else None
    return Path(spec.origin).parent if spec and spec.origin else _FOLDER.parent


@functools.cache
def _library_key() -> str:
    """A digest of our whole standard library and this package: part of the key of compiled kernels."""
    abi = _abi_folder() / "simulator" / "abi.h"  # in a source tree it is elsewhere than in an installed package
    own = {path for path in [*INCLUDE.rglob("*"), *_FOLDER.glob("*.py")] if path.is_file()} - {abi}
    return cache.key(*(path.read_text() for path in [*sorted(own), abi]))


@functools.cache
def _mlx_include() -> list[Path]:
    """The folder of MLX's own headers, where the wheel that is installed has it."""
    spec = importlib.util.find_spec("mlx")
    folders = [Path(place) / "include" for place in (spec.submodule_search_locations if spec else None) or ()]
    return [folder for folder in folders if (folder / "mlx").is_dir()]


def _clean(log: str) -> str:
    """The compiler's log in Metal's words, with paths as they stand in an #include, and without our own machinery."""
    lines = [line for line in log.splitlines() if not line.startswith("In file included from")]
    text = "\n".join(lines)
    for folder in [INCLUDE, *_mlx_include()]:
        text = text.replace(f"{folder}/", "")
    text = re.sub(r"(?m)^(.*?:\d+:\d+:)(?:\{[\d:-]+\})+:", r"\1", text)  # the ranges that conversions asks for
    for space, number in (("device", 1), ("threadgroup", 3), ("constant", 0), ("constant", 4)):
        text = text.replace(f"__attribute__((address_space({number})))", space)
    return re.sub(r"([\w:]+) __attribute__\(\(ext_vector_type\((\d)\)\)\)", r"vec<\1, \2>", text)


Constants = dict[int, str]


def _constant_texts(constants: dict[int, object] | None) -> Constants:
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
    private: bool = False,
    rounds: bool = False,
    casts: bool = False,
) -> Translation:
    found = compiler.find_compiler()
    flags = [*compiler.preprocess_flags([INCLUDE, *_mlx_include()]), *["-DMITTENS_NVIDIA"] * nvidia]
    done = found.run(flags, flat)
    if done.returncode:
        raise CompileError(file, None, _clean(done.stderr))
    text = done.stdout
    for folder in _mlx_include():
        text = text.replace(f'"{folder}/', '"')
    try:
        return rewrite(text, dict(constants), private=private, rounds=rounds, casts=casts)
    except RewriteError as error:
        raise CompileError(file, None, str(error)) from None


def translate(
    file: str,
    constants: dict[int, object] | None = None,
    nvidia: bool = False,
    private: bool = False,
    rounds: bool = False,
    casts: bool = False,
) -> Translation:
    """A .metal file as clang is to compile it, for NVIDIA's GPUs or for the simulator, and the kernels in it."""
    texts = tuple(sorted(_constant_texts(constants).items()))
    return _translate(file, sources.flatten(file), texts, nvidia, private, rounds, casts)


def _simulated(
    file: str, constants: dict[int, object] | None = None, private: bool = False, casts: bool = False
) -> Translation:
    """A file as it is compiled for the simulator; the lanes of our own kernels do not part."""
    return translate(file, constants, private=private, rounds=sources.is_registered(file), casts=casts)


def variants(file: str) -> list[Variant]:
    """Every kernel that a host can ask the file for."""
    return _simulated(file).variants


def _kernel_of(file: str, variant: Variant, translation: Translation) -> Kernel:
    if variant.function not in translation.kernels:
        raise CompileError(file, variant.name, f"error: it instantiates {variant.function}, which is not a kernel")
    return translation.kernels[variant.function]


def _find(file: str, kernel: str, translation: Translation) -> tuple[Variant, Kernel]:
    for variant in translation.variants:
        if variant.name == kernel:
            return variant, _kernel_of(file, variant, translation)
    raise KeyError(f"{file} has no kernel {kernel!r}; it has {', '.join(v.name for v in translation.variants)}")


def signature(file: str, kernel: str) -> list[Argument]:
    """The parameters of a kernel, in order."""
    return _find(file, kernel, _simulated(file))[1].arguments


def _call(variant: Variant, kernel: Kernel, place: str, threadgroup_place: str) -> str:
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


def _max_threads(variant: Variant, kernel: Kernel, number: int) -> tuple[str, str]:
    """A declaration, and an expression for the most threads of a threadgroup, which may depend on the template."""
    if kernel.max_threads is None:
        return "", "1024"
    if kernel.template is None:
        return "", f"({kernel.max_threads})"
    name = f"mittens_limit_{number}"
    declaration = f"template <{kernel.template}> struct {name} {{ enum {{ threads = {kernel.max_threads} }}; }};\n"
    return declaration, f"unsigned({name}<{variant.template_args}>::threads)"


def _prelude(translation: Translation) -> str:
    """The library and the text; none of its functions is seen from elsewhere, so that unused ones go."""
    return (
        '#include "metal/stdlib.h"\n'
        "#pragma clang attribute push(__attribute__((internal_linkage)), apply_to = function)\n"
        f"{translation.text}\n#pragma clang attribute pop\n"
    )


def _parsed_library(found: compiler.Compiler, flags: list[str]) -> str:
    """The file in which clang keeps our standard library as these flags have it, which takes longer to parse than most
    kernels to compile; empty if it makes none."""
    headers = [*(path for path in INCLUDE.rglob("*") if path.is_file()), _abi_folder() / "simulator" / "abi.h"]
    stamps = sorted(
        f"{path} {path.stat().st_mtime_ns} {path.stat().st_size}" for path in headers
    )  # clang compares them
    name = cache.key(_library_key(), *stamps, found.identity, " ".join(flags), _processor())

    def make(path: Path) -> None:
        done = found.run([*compiler.header_flags(flags), "-o", str(path)], '#include "metal/stdlib.h"\n')
        if done.returncode:
            raise ChildProcessError(done.stderr)

    try:
        return str(cache.cached(f"stdlib-{name}.pch", make))
    except ChildProcessError:
        return ""


def _with_library(
    found: compiler.Compiler, flags: list[str], library: str
) -> Callable[[str, list[str]], subprocess.CompletedProcess[str]]:
    """Calls clang with a text and more flags, and with a parsed library where there is one."""

    def run(text: str, more: list[str]) -> subprocess.CompletedProcess[str]:
        done = found.run([*flags, *["-include-pch", library] * bool(library), *more], text)
        if done.returncode and library and library in done.stderr:  # a header or the file itself has changed since
            done = found.run([*flags, *more], text)
        return done

    return run


def _compiled(
    found: compiler.Compiler, flags: list[str], text: str, translation: Translation, library: str = ""
) -> subprocess.CompletedProcess[str]:
    """Calls clang, with Metal's conversions written out where it has none, and perhaps with a parsed library."""
    run = _with_library(found, flags, library)
    return conversions.compiled(run, text, translation.methods, str(INCLUDE))[0]


def _unoptimized(
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


def _lowered(text: str) -> str:
    """LLVM's text before any optimization, in which what C++ has otherwise is as Metal has it.

    Our own kernels do without: nothing in them depends on it, and their machine code is recorded.
    """
    return integer_lowering.lowered(vector_truths.with_truths(text))


_FMULADD = re.compile(r"^declare [^\n]*@llvm\.fmuladd\.(\w+)\(", re.M)


def _fused(text: str) -> str:
    """LLVM's text with the products fused that may be, also where the processor has no such instruction."""
    for kind in _FMULADD.findall(text):
        if re.search(rf"^declare [^\n]*@llvm\.fma\.{kind}\(", text, re.M):
            text = re.sub(rf"^declare [^\n]*@llvm\.fmuladd\.{kind}\([^\n]*\n", "", text, flags=re.M)
    return text.replace("@llvm.fmuladd.", "@llvm.fma.")


def _simulator_text(translation: Translation, file: str) -> str:
    """The translation, an entry for each variant, and the table of them."""
    parts = [_prelude(translation)]
    table = []
    for number, variant in enumerate(translation.variants):
        kernel = _kernel_of(file, variant, translation)
        places = "::mittens::argument(buffers, {index})", "::mittens::argument(threadgroup_buffers, {index})"
        declaration, limit = _max_threads(variant, kernel, number)
        parts.append(
            f"{declaration}"
            f"static void mittens_entry_{number}(void* const* buffers, void* const* threadgroup_buffers) {{\n"
            f"{_call(variant, kernel, *places)}}}\n"
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
    texts = _constant_texts(constants)
    flat = sources.flatten(file)
    what = [flat, repr(sorted(texts.items())), *["private"] * private]
    lowered = private or sources.is_registered(file)
    what += ["lowered"] * lowered
    name = cache.key(*what, _library_key(), found.identity, " ".join(flags), _processor())

    def make(path: Path) -> None:
        translation = _simulated(file, constants, private)
        if not translation.variants:
            raise CompileError(file, None, "error: the file has no kernel")
        compiled = path.with_suffix(".o")
        try:
            includes = [f"-I{INCLUDE}", f"-I{_abi_folder()}"]
            library = _parsed_library(found, [*flags, *includes])
            if lowered or fuse:
                unoptimized = [*compiler.unoptimized_flags(flags), *includes]

                def compiled_to_text(casts: bool) -> subprocess.CompletedProcess[str]:
                    written = _simulated(file, constants, private, casts)
                    return _compiled(found, unoptimized, _simulator_text(written, file), written, library)

                done = _unoptimized(compiled_to_text)
                text = done.stdout
                if lowered:
                    # A load through a reference must not move before the branch that asks for it.
                    text = re.sub(r" dereferenceable\(\d+\)", "", _lowered(text))
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
                text = _simulator_text(translation, file)
                done = _compiled(found, [*flags, *includes, "-o", str(compiled)], text, translation, library)
            if done.returncode:
                raise CompileError(file, None, _clean(done.stderr))
            linked = subprocess.run([*found.linker, str(compiled), "-o", str(path)], capture_output=True, text=True)
            if linked.returncode:
                raise RuntimeError(f"linking {file} for the simulator failed:\n{linked.stderr}")
        finally:
            compiled.unlink(missing_ok=True)

    return str(cache.cached(f"{Path(file).stem}-{name}.so", make))


def entry_name(kernel: str) -> str:
    """The name of a kernel's entry in its PTX."""
    return re.sub(r"\W", "_", kernel)


def _ptx_text(translation: Translation, file: str, names: Sequence[str], bytes_sizes: dict[int, int]) -> str:
    matrices = "#define MITTENS_MATRIX_LANES\n" if "simdgroup_multiply" in translation.text else ""
    parts = [matrices, _prelude(translation)]
    for number, name in enumerate(names):
        variant, kernel = _find(file, name, translation)
        pointer = f"decltype(&{variant.expression})"
        parameters = []
        for position, argument in enumerate(kernel.arguments):
            if argument.kind == "buffer" and argument.index is not None:
                size = bytes_sizes.get(argument.index)
                type_text = f"::mittens::Bytes<{size}>" if size else f"::mittens::parameter_t<{position}, {pointer}>"
                parameters.append((argument.index, f"{type_text} p{position}"))
        declared = ", ".join(text for _, text in sorted(parameters))
        declaration, limit = _max_threads(variant, kernel, number)
        call = _call(variant, kernel, "::mittens::address_of(p{position})", "::mittens::dynamic_threadgroup_memory()")
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
    what = [flat, *names, repr(sorted(sizes.items())), repr(sorted(_constant_texts(constants).items()))]
    what += ["lowered"] * lowered
    name = cache.key(*what, _library_key(), found.identity, " ".join(flags))

    def make(path: Path) -> None:
        def compiled(flags: list[str], casts: bool = False) -> subprocess.CompletedProcess[str]:
            translation = translate(file, constants, nvidia=True, casts=casts)
            text = _ptx_text(translation, file, names, sizes)
            return _compiled(found, [*flags, f"-I{INCLUDE}"], text, translation)

        if lowered:
            unoptimized, optimized = compiler.lowered_ptx_flags(flags)
            done = _unoptimized(functools.partial(compiled, unoptimized))
            if not done.returncode:
                done = found.run(optimized, _lowered(done.stdout))
        else:
            done = compiled([*flags, "-o", "-"])
        if done.returncode:
            raise CompileError(file, names[0] if len(names) == 1 else None, _clean(done.stderr))
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
    prebuilt = _installed() / "ptx" / arch / f"{entry_name(kernel)}.ptx"
    if not bytes_sizes and not constants and prebuilt.is_file():
        text = prebuilt.read_text()
        if text.startswith(f"// {prebuilt_key(sources.flatten(file))}\n"):
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


# What dynamic threadgroup memory is taken to be: as much as a threadgroup of an Apple GPU may have.
_MOST_THREADGROUP_BYTES = 32768
_THREADGROUPS = (
    "threadgroups_per_grid",
    "threads_per_grid",
    "grid_size",
)  # attributes that are no registers of an Apple GPU


def _spirv_text(translation: Translation, file: str, name: str) -> str:
    variant, kernel = _find(file, name, translation)
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
    declaration, limit = _max_threads(variant, kernel, 0) if kernel.max_threads else ("", "0")
    call = _call(variant, kernel, "::mittens::address_of(p{position})", "::mittens::dynamic_threadgroup_memory()")
    for attribute in _THREADGROUPS:
        call = call.replace(f"::mittens::attribute::{attribute}()", f"::mittens::attribute::{attribute}(threadgroups)")
    return (
        f"#define MITTENS_THREADGROUP_BYTES {_MOST_THREADGROUP_BYTES}\n"
        f"{_prelude(translation)}{declaration}"
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
    texts = _constant_texts(constants)
    what = [sources.flatten(file), kernel, str(threads), repr(sorted(texts.items()))]
    name = cache.key(*what, _library_key(), found.identity, " ".join([*flags, *module_flags]))

    def make(path: Path) -> None:
        translation = translate(file, constants)
        text = _spirv_text(translation, file, kernel)
        done = _compiled(found, [*flags, f"-I{INCLUDE}", "-o", "-"], text, translation)
        if done.returncode:
            raise CompileError(file, kernel, _clean(done.stderr))
        try:
            module = spirv_module.prepared(done.stdout, threads)
        except UnknownOperation as error:
            raise CompileError(file, kernel, str(error)) from None
        done = found.run([*module_flags, "-o", str(path)], module)
        if done.returncode:
            raise CompileError(file, kernel, _clean(done.stderr))
        if spirv_module.loses_address_spaces(path.read_bytes()):
            what = "error: a reference to device, constant or threadgroup memory is passed on without its address space"
            raise CompileError(file, kernel, what)

    return cache.cached(f"{entry_name(kernel)[:80]}-{name}.spv", make)


def has_prebuilt_ptx() -> bool:
    """Whether the package was built with the PTX of its kernels, so that an NVIDIA GPU needs no compiler here."""
    return any((_installed() / "ptx").glob("*/*.ptx"))


def prebuilt_key(flat: str) -> str:
    """The mark by which a prebuilt PTX file names its source text, so that an edited kernel does not run old PTX."""
    return cache.key(flat, _library_key())


@functools.cache
def _processor() -> str:
    """The features of this machine's processor: libraries are compiled for it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        import platform

        return platform.platform()
    return "".join(sorted({line for line in text.splitlines() if line.startswith(("flags", "Features", "model name"))}))


def metallib(file: str = "") -> str:
    """The path of the Metal library that was built ahead of time; empty if there is none, or an outdated one.

    Args:
        file: The .metal file whose kernels are wanted. Registered sources are in no library.
    """
    if sources.is_registered(file):
        return ""
    folder, now = _installed() / "metal", sources.metal_folder()
    path = folder / "mlx_mittens.metallib"
    current = path.is_file() and (folder == now or _texts(folder) == _texts(now))
    return str(path) if current else ""


def _texts(folder: Path) -> dict[Path, bytes]:
    """Kernels and headers of a folder."""
    paths = [path for kind in ("*.metal", "*.h") for path in folder.rglob(kind)]
    return {path.relative_to(folder): path.read_bytes() for path in paths}
