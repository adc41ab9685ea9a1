"""The attributes and types that Metal 3.1 has, by the chapters of the Metal Shading Language Specification."""

from __future__ import annotations

import re

_ATTRIBUTES = frozenset(
    """
    kernel host_name max_total_threads_per_threadgroup buffer threadgroup texture sampler function_constant unroll
    dispatch_quadgroups_per_threadgroup dispatch_simdgroups_per_threadgroup dispatch_threads_per_threadgroup grid_origin
    grid_size quadgroup_index_in_threadgroup quadgroups_per_threadgroup simdgroup_index_in_threadgroup
    simdgroups_per_threadgroup stage_in_grid_origin stage_in_grid_size thread_execution_width thread_index_in_quadgroup
    thread_index_in_simdgroup thread_index_in_threadgroup thread_position_in_grid thread_position_in_threadgroup
    threadgroup_position_in_grid threadgroups_per_grid threads_per_grid threads_per_simdgroup threads_per_threadgroup
    always_inline noinline maybe_unused visible stitchable user id raster_order_group clang gnu loop no_unroll
    fallthrough nodiscard deprecated likely unlikely
    """.split()
)

# Attributes by which a kernel learns its thread's place, with the most components of each.
SCALAR_POSITIONS = frozenset(
    """
    dispatch_quadgroups_per_threadgroup dispatch_simdgroups_per_threadgroup quadgroup_index_in_threadgroup
    quadgroups_per_threadgroup simdgroup_index_in_threadgroup simdgroups_per_threadgroup thread_execution_width
    thread_index_in_quadgroup thread_index_in_simdgroup thread_index_in_threadgroup threads_per_simdgroup
    """.split()
)
GRID_POSITIONS = frozenset(
    """
    dispatch_threads_per_threadgroup grid_origin grid_size stage_in_grid_origin stage_in_grid_size
    thread_position_in_grid thread_position_in_threadgroup threadgroup_position_in_grid threadgroups_per_grid
    threads_per_grid threads_per_threadgroup
    """.split()
)
POSITIONS = SCALAR_POSITIONS | GRID_POSITIONS

_TYPE = re.compile(
    r"(packed_)?(bool|char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float)[234]?$"
    r"|(half|float)[234]x[234]$|u?int(8|16|32|64)_t$|(size|ptrdiff|intptr|uintptr|float16|bfloat16|complex64)_t$"
    r"|(vec|array|matrix|uniform|atomic|simdgroup_matrix|simdgroup_(half|float|bfloat)8x8|simd_vote|quad_vote)$"
    r"|(array_ref|matrix|atomic_flag|vector_\w+|simd_\w+[234])$|atomic_(bool|int|uint|float|ulong)$|(signed|unsigned)$|mem_flags$|numeric_limits$|(enable_if|conditional)(_t)?$"
)


def is_attribute(name: str) -> bool:
    """Whether Metal has an attribute of this name for kernels, their parameters, functions or statements."""
    return name in _ATTRIBUTES


def is_type(name: str) -> bool:
    """Whether this is a type of Metal's language or standard library."""
    return _TYPE.match(name) is not None


# Functions of clang's own and of Apple's that MLX's kernels call.
ALLOWED_INTERNALS = frozenset(
    """
    __builtin_ctz __builtin_clz __builtin_popcount __builtin_bit_cast __builtin_unreachable __builtin_expect
    __builtin_assume
    """.split()
)
