"""The Metal front end off a Mac: .metal text through clang, to the simulator on the CPU, to PTX for NVIDIA GPUs, and to
SPIR-V for Mesa's compiler for Apple GPUs."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .build import signature, translate, variants
    from .build_ptx import all_ptx, entry_name, has_prebuilt_ptx, ptx
    from .build_simulator import simulator_library
    from .build_spirv import spirv
    from .compiler import compiler_problem
    from .errors import CompileError
    from .library import metallib
    from .read.instantiations import metal_kernels, metal_text
    from .read.sources import files, flatten, is_for_apple, is_for_matrix_units, name_of_text, register_source, source
    from .rewrite.translation import Argument, Variant
else:
    # A process that compiles nothing, such as one that computes on a CPU, imports none of these.
    _MODULES = (
        "errors",
        "read.sources",
        "read.instantiations",
        "compiler",
        "library",
        "rewrite.translation",
        "build",
        "build_simulator",
        "build_ptx",
        "build_spirv",
    )

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for module in (_import_module(f"{__name__}.{module}") for module in _MODULES):
            defined = {name: getattr(module, name, None) for name in __all__}
            globals().update(
                {n: one for n, one in defined.items() if getattr(one, "__module__", "") == module.__name__}
            )
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "Argument",
    "CompileError",
    "Variant",
    "all_ptx",
    "compiler_problem",
    "entry_name",
    "files",
    "flatten",
    "has_prebuilt_ptx",
    "is_for_apple",
    "is_for_matrix_units",
    "metal_kernels",
    "metal_text",
    "metallib",
    "name_of_text",
    "ptx",
    "register_source",
    "signature",
    "simulator_library",
    "source",
    "spirv",
    "translate",
    "variants",
]
