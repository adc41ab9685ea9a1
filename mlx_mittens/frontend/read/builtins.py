"""The functions and types that Metal 3.1 has, by the chapters of the Metal Shading Language Specification."""

from __future__ import annotations

import re

# Functions that a kernel may call without declaring them: those our kernels, MLX's and users' commonly need.
_FUNCTIONS = frozenset(
    """
    abs absdiff addsat clamp clz ctz extract_bits hadd insert_bits mad24 madhi madsat max max3 median3 min min3 mul24
    mulhi popcount reverse_bits rhadd rotate subsat

    acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh cospi divide exp exp10 exp2 fabs fdim floor fma fmax
    fmax3 fmedian3 fmin fmin3 fmod fract frexp ilogb ldexp log log10 log2 modf nextafter pow powr rint round rsqrt sin
    sincos sinh sinpi sqrt tan tanh tanpi trunc

    mix saturate sign smoothstep step

    all any isfinite isinf isnan isnormal isordered isunordered select signbit

    cross distance distance_squared dot faceforward length length_squared normalize reflect refract
    determinant transpose

    as_type

    threadgroup_barrier simdgroup_barrier

    simd_active_threads_mask simd_all simd_and simd_any simd_ballot simd_broadcast simd_broadcast_first simd_is_first
    simd_is_helper_thread simd_max simd_min simd_or simd_prefix_exclusive_product simd_prefix_exclusive_sum
    simd_prefix_inclusive_product simd_prefix_inclusive_sum simd_product simd_shuffle simd_shuffle_and_fill_down
    simd_shuffle_and_fill_up simd_shuffle_down simd_shuffle_rotate_down simd_shuffle_rotate_up simd_shuffle_up
    simd_shuffle_xor simd_sum simd_xor

    quad_active_threads_mask quad_all quad_and quad_any quad_ballot quad_broadcast quad_broadcast_first quad_is_first
    quad_max quad_min quad_or quad_prefix_exclusive_product quad_prefix_exclusive_sum quad_prefix_inclusive_product
    quad_prefix_inclusive_sum quad_product quad_shuffle quad_shuffle_and_fill_down quad_shuffle_and_fill_up
    quad_shuffle_down quad_shuffle_rotate_down quad_shuffle_rotate_up quad_shuffle_up quad_shuffle_xor quad_sum quad_xor

    make_filled_simdgroup_matrix simdgroup_load simdgroup_multiply simdgroup_multiply_accumulate simdgroup_store

    atomic_compare_exchange_weak_explicit atomic_exchange_explicit atomic_fetch_add_explicit atomic_fetch_and_explicit
    atomic_fetch_max_explicit atomic_fetch_min_explicit atomic_fetch_or_explicit atomic_fetch_sub_explicit
    atomic_fetch_xor_explicit atomic_load_explicit atomic_store_explicit atomic_thread_fence

    pack_float_to_snorm4x8 pack_float_to_unorm4x8 pack_float_to_snorm2x16 pack_float_to_unorm2x16
    pack_half_to_snorm4x8 pack_half_to_unorm4x8 pack_half_to_snorm2x16 pack_half_to_unorm2x16
    pack_float_to_srgb_unorm4x8 pack_float_to_unorm10a2 pack_float_to_unorm565
    pack_half_to_srgb_unorm4x8 pack_half_to_unorm10a2 pack_half_to_unorm565
    unpack_snorm4x8_to_float unpack_unorm4x8_to_float unpack_snorm2x16_to_float unpack_unorm2x16_to_float
    unpack_snorm4x8_to_half unpack_unorm4x8_to_half unpack_snorm2x16_to_half unpack_unorm2x16_to_half
    unpack_unorm4x8_srgb_to_float unpack_unorm10a2_to_float unpack_unorm565_to_float
    unpack_unorm4x8_srgb_to_half unpack_unorm10a2_to_half unpack_unorm565_to_half

    infinity quiet_NaN signaling_NaN epsilon lowest denorm_min round_error

    assert atomic_max_explicit atomic_min_explicit vec_elements

    make_uniform is_function_constant_defined is_same is_same_v is_integral is_floating_point begin end size
    """.split()
)

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


def is_builtin(name: str) -> bool:
    """Whether Metal's standard library has a function of this name."""
    return name in _FUNCTIONS


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
