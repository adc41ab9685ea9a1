"""Advice: what to write instead, appended to clang's errors."""

from __future__ import annotations

import re

# Names that kernels bring from elsewhere, and Metal's for them.
_NAMES = {
    "__syncthreads": "threadgroup_barrier(mem_flags::mem_threadgroup)",
    "__syncwarp": "simdgroup_barrier(mem_flags::mem_threadgroup)",
    "__shfl_sync": "simd_shuffle",
    "__shfl_xor_sync": "simd_shuffle_xor",
    "__shfl_down_sync": "simd_shuffle_down",
    "__shfl_up_sync": "simd_shuffle_up",
    "__ballot_sync": "simd_ballot",
    "__popc": "popcount",
    "__clz": "clz",
    "__ldg": "*pointer",
    "__expf": "fast::exp",
    "__logf": "fast::log",
    "__powf": "fast::pow",
    "__fdividef": "fast::divide",
    "rsqrtf": "rsqrt",
    "atomicAdd": "atomic_fetch_add_explicit(..., memory_order_relaxed)",
    "atomicMax": "atomic_fetch_max_explicit(..., memory_order_relaxed)",
    "atomicMin": "atomic_fetch_min_explicit(..., memory_order_relaxed)",
    "atomicCAS": "atomic_compare_exchange_weak_explicit",
    "atomic_fetch_add": "atomic_fetch_add_explicit(..., memory_order_relaxed)",
    "atomic_add_explicit": "atomic_fetch_add_explicit(..., memory_order_relaxed)",
    "threadIdx": "an argument with [[thread_position_in_threadgroup]]",
    "blockIdx": "an argument with [[threadgroup_position_in_grid]]",
    "blockDim": "an argument with [[threads_per_threadgroup]]",
    "gridDim": "an argument with [[threadgroups_per_grid]]",
    "get_global_id": "an argument with [[thread_position_in_grid]]",
    "get_local_id": "an argument with [[thread_position_in_threadgroup]]",
    "barrier": "threadgroup_barrier(mem_flags::mem_threadgroup)",
    "simd_barrier": "simdgroup_barrier(mem_flags::mem_threadgroup)",
    "__global__": "kernel",
    "__device__": "inline",
    "__shared__": "threadgroup",
    "__half": "half",
    "half_t": "half",
    "float16_t": "half",
    "float32_t": "float",
    "bfloat16_t": "bfloat",
    "bfloat16": "bfloat",
    "nv_bfloat16": "bfloat",
    "__nv_bfloat16": "bfloat",
    "bf16": "bfloat",
    "float64_t": "float",
    "printf": "os_log, of Metal 3.2",
    "erf": "a polynomial of your own: Metal has no erf",
    "lgamma": "a polynomial of your own: Metal has no lgamma",
    "tgamma": "a polynomial of your own: Metal has no tgamma",
    "expm1": "exp(x) - 1",
    "log1p": "log(1 + x)",
    "cbrt": "pow(x, 1.0f / 3)",
    "hypot": "length(float2(x, y))",
    "NULL": "nullptr",
    "int128_t": "long, in two parts",
    "__int128": "long, in two parts",
}
_C_FUNCTION = re.compile(
    r"(a?(?:sin|cos|tan)h?|exp|exp2|exp10|log|log2|log10|pow|sqrt|fabs|floor|ceil|trunc|round|rint|fmax|fmin|fmod|fma|atan2|"
    r"copysign|ldexp|frexp|nextafter|fdim)[fl]$"
)

_UNKNOWN = re.compile(
    r"(?:use of undeclared identifier|unknown type name|no member named|no template named|no type named) '([\w:]+)'"
)
_ADVICE: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"no matching function for call to '(\w+)'"),
     "give its arguments types that the function has, all the same: 1.0f for 1, or a cast"),
    (re.compile(r"call to '\w+' is ambiguous"), "give the arguments one type, by a cast"),
    (re.compile(r"cannot assign to (?:variable|return value|non-static data member).*const|read-only variable"),
     "write to device, threadgroup or thread memory that is not const ('constant' memory always is)"),
    (re.compile(r"default initialization of an object of const type"),
     "a variable in constant memory must be initialized: write = and its value"),
    (re.compile(r"from incompatible type .*vector|cannot initialize .*\(vector of|cannot convert between vector"
                   r"|of different size"),
     "vectors convert explicitly alone: write float4(x), int4(x) or the type that is wanted"),
    (re.compile(r"cannot initialize .*(?:device|threadgroup|constant|thread)|changes address space"
                   r"|discards.*address space"),
     "keep the pointer in the address space of what it points to"),
    (re.compile(r"(?:static|reinterpret)_cast from .*\b(?:device|threadgroup|constant)\b.* is not allowed"),
     "a pointer keeps the address space of what it points to: copy what it points to"),
    (re.compile(r"not (?:a|an integral) constant expression|must be initialized by a constant expression"),
     "write what is known when the kernel is compiled, which arguments, variables and function constants are not"),
    (re.compile(r"cannot initialize object parameter of type|'this' argument to member function"),
     "the member function works on thread memory: write device (or constant, threadgroup) behind its parameters, or "
     "copy the object first"),
    (re.compile(r"parameter may not be qualified with an address space"),
     "a parameter that is no pointer has no address space: write * or &"),
    (re.compile(r"automatic variable qualified with an address space"),
     "a variable in a function is in thread memory: leave the address space out"),
    (re.compile(r"illegal vector component name"), "components are of xyzw or of rgba, not of both"),
    (re.compile(r"variable length array|array (?:bound|size) is not an integral constant|folded to constant array"),
     "write a size that is known when the kernel is compiled: 'constant int N = 4;' or a template argument"),
    (re.compile(r"no viable overloaded '='|no matching constructor for initialization|no viable conversion"),
     "write a conversion between the two types"),
    (re.compile(r"invalid operands to binary expression"), "convert one operand to the type of the other"),
    (re.compile(r"constraints not satisfied for class template 'atomic'"),
     "an atomic is of int, uint, bool, float or ulong, keep the value in the bits of an atomic_uint"),
    (re.compile(r"cannot be narrowed"), "write the conversion, as in uint(x)"),
    (re.compile(r"incompatible operand types"), "convert one of the two to the type of the other"),
    (re.compile(r"excess elements"), "leave the elements out that there are too many of"),
]  # fmt: skip


def metals_name(name: str) -> str | None:
    """Metal's counterpart of a name of CUDA, OpenCL, C or MLX."""
    if name in _NAMES:
        return _NAMES[name]
    if known := _C_FUNCTION.match(name):
        return known[1]
    return None


def advised(message: str) -> str:
    """Clang's message in Metal's words, with the code to write where it is known."""
    if header := re.match(r"'(.+)' file not found", message):
        own = "Metal's own library is <metal_stdlib>, and -I FOLDER says where others are"
        return f"there is no header <{header[1]}>: {own}"
    if unknown := _UNKNOWN.match(message):
        name = unknown[1].split("::")[-1]
        instead = metals_name(name)
        if instead:
            return f"{message.split(';')[0]}: write {instead}"
        return f"{message}: declare it before, in this block or around it" if message.startswith("use of") else message
    if "__bf16" in message and "_Float16" in message and "incompatible" in message:
        return "half and bfloat become one another by a cast alone: write bfloat(...) or half(...) around it"
    for pattern, advice in _ADVICE:
        if pattern.search(message):
            return f"{message}: {advice}"
    return message
