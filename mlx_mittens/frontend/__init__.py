"""The Metal front end off a Mac: .metal text through clang, to the simulator on the CPU, to PTX for NVIDIA GPUs, and to
SPIR-V for Mesa's compiler for Apple GPUs."""

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
