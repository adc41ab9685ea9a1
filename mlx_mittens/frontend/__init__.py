"""The Metal front end off a Mac: .metal text through clang, to the simulator on the CPU, to PTX for NVIDIA GPUs, and to
SPIR-V for Mesa's compiler for Apple GPUs."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .build import (
        all_ptx,
        entry_name,
        has_prebuilt_ptx,
        metallib,
        ptx,
        signature,
        simulator_library,
        spirv,
        translate,
        variants,
    )
    from .compiler import compiler_problem
    from .errors import CompileError
    from .instantiations import metal_kernels, metal_text
    from .rewrite import Argument, Variant
    from .sources import files, flatten, is_for_apple, name_of_text, register_source, source
else:
    # A process that compiles nothing, such as one that computes on a CPU, imports none of these.
    _MODULES = ("build", "compiler", "errors", "instantiations", "rewrite", "sources")

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
