# ruff: noqa: E501  (a line a kernel)
"""Small kernels with the verdict that Apple's compiler gives: of each kind a few, one a construct."""

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"

_IN_PLACE = "kernel void k(device {0}* a [[buffer(0)]], uint i [[thread_position_in_grid]]) {{ {1} }}\n"


def on(type_name, body, before=""):
    """A kernel on an array of a type."""
    return before + _IN_PLACE.format(type_name, body)


PAIR = "struct Pair { float low; float high; };\n"

ACCEPTED = {
    # Conversion functions, specializations, types of the library.
    "conversion to a vector": on("Pair", "Pair p = a[i]; float2 w = p; a[i].x = half(w.x);", "struct Pair { half x, y; operator float2() const { return float2(float(x), float(y)); } };\n"),
    "explicit conversion to a vector": on("half", "Q q; q.v = 2; half4 w = half4(q); a[i] = w.x + static_cast<half4>(q).y + ((half4)q).z;", "struct Q { half v; explicit operator half4() const { return half4(v); } };\n"),
    "conversions of thread memory": on("uint", "Q q{3}; uint2 w = q; a[i] = w.x;", "struct Q { uint v; operator uint2() const thread { return uint2(v, 1); } operator metal::float3() thread { return float3(1); } };\n"),
    "conversions of two memories": on("Q", "uint2 w = a[i]; a[i].v = w.x;", "struct Q { uint v; operator uint2() const device { return uint2(v, 1); } operator uint2() const thread { return uint2(v, 2); } };\n"),
    "conversions in expressions": on("float", "Q q{3}; a[i] = length(float2(q)) + f(q) + (float2(q) + float2(1)).x; bool3 b = q; a[i] += b.x;", "struct Q { float v; operator float2() const { return float2(v, 1); } operator bool3() const; };\ninline Q::operator bool3() const { return bool3(v > 0); }\ninline float f(float2 v) { return v.x; }\n"),
    "functions of objects": on("float", "Q q{3}; a[i] = dot(q, float2(1)) + dot(q, q) + length(q) + clamp(q, float2(0), float2(1)).x + sqrt(q).y + fast::sin(q).x + refract(q, float2(1), 0.5f).x + distance(float2(1), q) + any(q > float2(1));", "struct Q { float v; operator float2() const { return float2(v, 1); } };\n"),
    "functions of objects that are numbers": on("half", "Q q{3}; a[i] = pow(q, 2.0h) + max(q, 1.0h) + fma(q, q, 1.0h) + abs(R{2}) + min(R{2}, 1);", "struct Q { half v; operator half() const { return v; } };\nunion R { int v; operator int() const { return v; } };\n"),
    "functions of packed vectors": on("packed_float3", "float3 n = normalize(a[i]); a[i] = n * dot(a[i], n) + max(a[i], float3(0)) + cross(a[i], n) + abs(a[i]) + length(a[i]) + mix(a[i], n, 0.5f);"),
    "conversion of a template": on("float", "Q<float> q{3}; float4 b = q; a[i] = b.x;", "template <typename T> struct Q { T v; operator vec<T, 4>() const { return vec<T, 4>(v); } operator T() const { return v; } };\n"),
    "what follows a specialization": on("float", "a[i] = f<float>(a[i]) + g(1);", "template <typename T> inline T f(T x) { return x; }\ntemplate <> inline float f<float>(float x) { return 2 * x; }\nusing namespace metal::precise;\nconstant float scale = 2;\ninline float g(float x) { return scale * x; }\n"),
    "what follows a specialization of two arguments": on("float", "a[i] = f<vec<float, 2>, 2>(float2(a[i])).v;", "struct S { float v; };\ntemplate <typename T, int n> S f(T x) { return {0}; }\ntemplate <> S f<vec<float, 2>, 2>(vec<float, 2> x) { return {2 * x.x}; }\ntypedef float F;\nstruct B { F v; };\nenum E { A = 1 };\n"),
    "a declared specialization": on("float", "a[i] = f<float>(a[i]);", "template <typename T> inline T f(T x);\ntemplate <> inline float f<float>(float x);\nusing namespace metal;\ntemplate <> inline float f<float>(float x) { return 2 * x; }\nnamespace n { constant int k = 3; }\n"),
    "matrices of floats and halfs": on("half", "matrix<half, 4, 4> m(1.0h); float2x3 n(1.0f); a[i] = m[0][0] + half(n[1][1]); matrix<float, 2, 2> q(2.0f); a[i] += half(q[0][0]);"),
    "sizes of vectors": on("float", "vec<float, 2> v = vec<float, 2>(1); constexpr int n = 3; vec<half, n> h = vec<half, n>(1.0h); a[i] = v.x + h.x; bool4 b = bool4(true); a[i] += b.x;"),
    "classes in threadgroup memory": on("float", "threadgroup S s[4]; threadgroup packed_float3 p[2]; threadgroup atomic_int c; threadgroup float4 f[2][2]; threadgroup matrix<float, 2, 2> m[1]; threadgroup D d; s[0].a = 1; a[i] = s[0].a;", "struct S { float a; float sum() threadgroup { return a; } }; struct D { float a; D() = default; D(float x) : a(x) {} };\n"),
    "constructors for threadgroup memory": on("float", "threadgroup C s[4]; threadgroup D<float> t[2]; s[0].a = 1; a[i] = s[0].a;", "struct C { float a; C() {} C(float x) : a(x) {} C() threadgroup {} }; template <typename T> class D { T a; public: D() threadgroup {} };\n"),
    "alias of a pointer to thread memory": on("float", "float v = 1; P p = &v; a[i] = *p;", "using P = thread float*;\n"),
    "as many buffers as there are": "kernel void k(" + ", ".join(f"device float* b{n}" for n in range(31)) + ", uint i [[thread_position_in_grid]]) { b0[i] = 1; }\n",
    # Characters, headers, macros.
    "comment in another alphabet": "// α ≤ β, naïve\n" + on("float", "a[i] += 1;"),
    "simd header": "#include <simd/simd.h>\n" + on("float", "simd_float3 v = {1, 2, 3}; a[i] = v.z + simd::float2(a[i]).x;"),
    "pragmas": on("float", "\n#pragma unroll(4)\nfor (int j = 0; j < 4; ++j) a[i] += j;"),
    # Function constants.
    "function constant of an expression": (
        "constant int mode [[function_constant(4 * 2 + 1)]];\nconstant bool chosen = is_function_constant_defined(mode);\n"
        + on("float", "if (chosen && mode == 2) a[i] = 0;")
    ),
    "function constant of a macro": (
        "#define FIRST 7\nconstant uint width [[function_constant(FIRST)]];\n" + on("uint", "a[i] *= width;")
    ),
    "function constant with other words": (
        "static constant constexpr const uint width [[function_constant(0)]];\n" + on("uint", "a[i] *= width;")
    ),
    # Structs between address spaces.
    "struct from device": on("Pair", "Pair p = a[i]; p.low += 1; a[i] = p;", PAIR),
    "struct by const auto": on("Pair", "const auto p = a[i]; a[i].low = p.high;", PAIR),
    "struct in braces": on("Pair", "Pair p{a[i]}; a[i].low = p.high;", PAIR),
    "struct in an array": on("Pair", "Pair p[2] = {a[0], a[1]}; a[i] = p[i & 1];", PAIR),
    "struct from device to device": on("Pair", "a[i] = a[i + 1];", PAIR),
    "struct chosen": on("Pair", "Pair p = i > 3 ? a[i] : Pair{1, 2}; a[i] = p;", PAIR),
    "struct returned": on("Pair", "a[i] = get(a, i);", PAIR + "Pair get(device Pair* p, uint i) { return p[i]; }\n"),
    "struct by value": on("Pair", "a[i].low = sum(a[i]);", PAIR + "float sum(Pair p) { return p.low + p.high; }\n"),
    "struct through a template": on(
        "Pair", "a[i] = swapped(a + i);", PAIR + "template <typename P> auto swapped(P p) { Pair q = *p; return Pair{q.high, q.low}; }\n"
    ),
    "struct within a struct": on(
        "Outer", "Pair p = a[i].inner; a[i].inner = Pair{p.high, p.low};", PAIR + "struct Outer { Pair inner; int n; };\n"
    ),
    "struct from constant": PAIR
    + "kernel void k(device float* a, constant Pair& p, constant Pair* q) { Pair x = p; Pair y = q[1]; a[0] = x.low + y.high; }\n",
    "struct in threadgroup memory": on(
        "Pair",
        "threadgroup Pair all[8]; all[i & 7] = a[i]; threadgroup_barrier(mem_flags::mem_threadgroup); a[i] = all[0];",
        PAIR,
    ),
    "member function of device memory": on(
        "Pair", "a[i].low = a[i].sum();", "struct Pair { float low, high; float sum() const device { return low + high; } };\n"
    ),
    "member function of two memories": on(
        "Pair",
        "Pair p = a[i]; a[i].low = a[i].sum() + p.sum();",
        "struct Pair { float low, high; float sum() const device { return low + high; } "
        "float sum() const thread { return low - high; } };\n",
    ),
    # Vectors and matrices.
    "C cast": on("float4", "half4 h = (half4)a[i]; a[i] = (float4)h;"),
    "cast by name": on("float4", "a[i] = static_cast<float4>(static_cast<int4>(a[i]));"),
    "alias as a constructor": on("float4", "using V = float4; a[i] = V(1, 2, 3, 4) + V(half4(2)) + V(3);"),
    "template argument as a constructor": on(
        "float4",
        "a[i] = wide<float4>(half4(a[i]));",
        "template <typename V, typename U> V wide(U u) { V v = V(u); return V{v}; }\n",
    ),
    "declared with parentheses": on("float4", "float2 u(1, 2); float4 v(u, 3, 4); const half4 w(v); a[i] = v + float4(w);"),
    "declared with braces": on("float4", "float4 v{1, 2, 3, 4}; float4 w = {v.xy, 5, 6}; a[i] = v * w;"),
    "vec of a template": on("float4", "vec<half, 4> h(a[i]); a[i] = vec<float, 4>(h);"),
    "qualified constructor": on("float4", "a[i] = metal::float4(1.0f) + metal::float4(a[i].xyz, 1);"),
    "truths of functions": on("float4", "bool4 b = isnan(a[i]) || isinf(a[i]); if (any(b) && all(isfinite(a[i]) && b)) a[i] = 0;"),
    "operators of structs in other memory": on("Pair", "a[i] = Pair(a[i]) + static_cast<Pair>(a[0]) + a[1];", PAIR + "Pair operator+(Pair x, Pair y) { return Pair{x.low + y.low, x.high + y.high}; }\n"),
    "negative of a matrix": on("float4x4", "a[i] = -a[i];"),
    "array argument with an attribute": "kernel void k(device float* a [[buffer(0)]], constant int strides[3] [[buffer(1)]], uint i [[thread_position_in_grid]]) { a[i] = strides[2]; }\n",
    "likely": on("float", "if (i > 3) [[likely]] { a[i] = 1; }"),
    "truth of vectors": on("float4", "bool4 m = a[i] < 2; a[i] = select(a[i], float4(0), m && !(a[i] == 1)); if (any(m)) a[i] += 1;"),
    "packed vectors": on("packed_float3", "float3 v = a[i]; a[i] = v * 2; a[i].x = a[i][1] + float3(a[i]).z; a[i] = packed_float3(v);"),
    "numbers that widen": on("float4", "a[i] = clamp(a[i], 0.0f, 1.0f) + mix(a[i], a[i] + 1, 0.5f) + max(a[i], 0.0f) + fma(a[i], 2.0f, a[i]) + pow(a[i], 2);"),
    "number against an integer": on("float", "a[i] = pow(a[i], 2) + fmod(a[i], 3) + fmax(a[i], 0);"),
    "half to bfloat": on("bfloat", "half h = half(a[i]); a[i] = bfloat(h); a[i] = (bfloat)h;"),
    "bfloat arithmetic": on("bfloat", "bfloat x = a[i]; a[i] = x * x + bfloat(2.0f); float f = x; if (x < a[i] && f > 0) a[i] = -x; a[i] += x;"),
    "integers become a bfloat": on("bfloat", "bfloat x = 0; x = int(i); x *= i; x += uchar(3); ++x; a[i] = x + i * a[i]; a[i] = x / 3;"),
    "relations of a bfloat": on("bfloat", "bool t = a[i] < 1.0f && a[i] != 2 && !a[i]; if (isnan(a[i]) || t) a[i] = select(a[i], a[0], t);"),
    "numbers that are bfloats": on("bfloat", "constexpr bfloat half_of = 0.5bf; bfloat v[2] = {1.0bf, bfloat(2.0f)}; a[i] = half_of + v[1] + numeric_limits<bfloat>::max();"),
    "a bfloat is no float to templates": on("bfloat", 'static_assert(!is_convertible_v<float, bfloat> && !is_convertible_v<half, bfloat> && is_convertible_v<bfloat, float>, ""); a[i] = 1;'),
    "mathematics of bfloat by overloads": on("bfloat", "a[i] = exp(a[i]) + simd_sum(a[i]);",
        "namespace metal { METAL_FUNC bfloat exp(bfloat x) { return bfloat(__metal_exp(float(x), __METAL_MAYBE_FAST_MATH__)); } "
        "METAL_FUNC bfloat simd_sum(bfloat x) { return bfloat(__metal_simd_sum(float(x))); } }\n"),
    "mathematics of bfloat by MLX's headers": on("bfloat", "a[i] = exp(a[i]) + max(a[i], a[0]) + simd_sum(a[i]) + fast::sin(a[i]);", '#include "mlx/backend/metal/kernels/utils.h"\n'),
    "mathematics of a bfloat as float": on("bfloat", "float f = exp(a[i]) + max(a[i], a[i + 1]); a[i] = bfloat(f); a[i] = bfloat(1);"),
    "matrix of constant memory": "kernel void k(device float3* a, constant float3x3& m, uint i [[thread_position_in_grid]]) { "
    "a[i] = m * a[i] + m[1]; float3x3 t = transpose(m) * 2.0f; a[i] += t[0] * determinant(t); }\n",
    "matrix built": on("float", "float2x2 m(1, 2, 3, 4); half4x4 h(1.0h); float2x3 c = float2x3(float3(1), float3(2)); a[i] = m[1].x + h[0][0] + c[1][2] + (m * float2(1, 2)).y;"),
    "matrix in device memory": on("float4x4", "float4x4 m = a[i]; a[i] = m + m; a[i][2] = float4(1); a[i][0][1] = 3;"),
    # Constants, threadgroup memory.
    "constant as an array's size": "constant int N = 2 * 3;\n" + on("float", "float v[N]; for (int j = 0; j < N; ++j) v[j] = a[j]; a[i] = v[N - 1];"),
    "constant as a case": "constant int ONE = 1;\n" + on("int", "switch (a[i]) { case ONE: a[i] = 2; break; default: a[i] = 3; }"),
    "constant as a template argument": "constant uint N = 3;\ntemplate <uint n> uint times(uint x) { return n * x; }\n" + on("uint", "a[i] = times<N>(i);"),
    "threadgroup array in a block": on("float", "if (i < 64) { threadgroup float s[64]; s[i] = a[i]; a[i] = s[i]; }"),
    "threadgroup array that is aligned": on("float", "threadgroup alignas(16) half s[64]; s[i] = half(a[i]); a[i] = s[i];"),
    "two threadgroup arrays": on("float", "threadgroup float s[8] = {0}, t[4][4]; s[i] = 1; t[i][0] = 2; a[i] = s[i] + t[i][0];"),
    "array argument of constant memory": "kernel void k(device float* a, constant const int strides[3], uint i [[thread_position_in_grid]]) { a[i * strides[2]] = strides[0]; }\n",
    # The library.
    "sincos": on("float4", "float4 c; a[i] = sincos(a[i], c) + c; half h; a[i].x = sincos(half(1), h) + h;"),
    "parts of numbers": on("float", "int e; float m = frexp(a[i], e); float w; a[i] = modf(m, w) + ldexp(w, e) + ilogb(m) + nextafter(m, w);"),
    "fast and precise": on("float", "a[i] = fast::sin(a[i]) + precise::cos(a[i]) + fast::fma(a[i], a[i], 1.0f) + precise::atan2(a[i], 2.0f) + fast::max3(a[i], 1.0f, 2.0f);"),
    "geometry": on("float3", "a[i] = reflect(a[i], normalize(a[i])) + cross(a[i], a[0]) * distance_squared(a[i], a[1]) + refract(a[i], a[0], 0.5f);"),
    "integers": on("uint", "a[i] = mulhi(a[i], 3u) + absdiff(a[i], 2u) + rotate(a[i], 3u) + popcount(a[i]) + clz(a[i]) + addsat(a[i], 1u) + hadd(a[i], 2u) + extract_bits(a[i], 2u, 4u) + mad24(a[i], 2u, 1u) + reverse_bits(a[i]);"),
    "packed numbers": on("uint", "a[i] = pack_float_to_unorm4x8(float4(0.5)) + pack_half_to_snorm2x16(half2(1)); float4 f = unpack_snorm4x8_to_float(a[i]); a[i] += uint(f.x);"),
    "limits": on("float", "a[i] = FLT_MAX + float(HALF_MAX) + M_PI_F + INFINITY + numeric_limits<float>::infinity() + numeric_limits<half>::max() + INT_MAX + MAXFLOAT;"),
    "assertion": on("float", "assert(i < 10); a[i] = 1;"),
    "atomics": "kernel void k(device atomic_int* n, device atomic_float* f, device atomic_bool* b, device atomic_ulong* m, uint i [[thread_position_in_grid]]) { "
    "atomic_fetch_add_explicit(n, 1, memory_order_relaxed); atomic_fetch_sub_explicit(f, 0.5f, memory_order_relaxed); "
    "atomic_fetch_or_explicit(n + 1, 2, memory_order_relaxed); atomic_min_explicit(m, ulong(i), memory_order_relaxed); "
    "atomic_store_explicit(b, true, memory_order_relaxed); int e = 0; "
    "atomic_compare_exchange_weak_explicit(n, &e, 3, memory_order_relaxed, memory_order_relaxed); }\n",
    "simdgroups": on("half2", "a[i] = simd_sum(a[i]) + simd_shuffle_down(a[i], 1) + simd_prefix_inclusive_sum(a[i]) + quad_max(a[i]); uint v = simd_or(i) + simd_and(i); if (simd_any(v > 3)) a[i] = simd_broadcast(a[i], 3);"),
    "simdgroup matrices": on("float", "simdgroup_float8x8 x, y; simdgroup_load(x, a, 8); y = make_filled_simdgroup_matrix<float, 8, 8>(1.0f); simdgroup_multiply_accumulate(x, x, y, x); simdgroup_store(x, a, 8, ulong2(0, 0), false);"),
    "array type": on("float", "array<float, 3> v = {1, 2, 3}; v[1] = a[i]; float sum = 0; for (float x : v) sum += x; a[i] = sum + v.size();"),
    "vec_elements": on("ushort", "a[i] = vec_elements<float3>::value;"),
    # Kernels and templates.
    "instantiated through a typedef": (
        "template <typename T> kernel void f(device T* a, uint i [[thread_position_in_grid]]) { a[i] += T(1); }\n"
        "typedef decltype(f<float>) f_t;\ntemplate [[host_name(\"f_float\")]] kernel f_t f<float>;\n"
        "template [[host_name(\"f_half\")]] kernel decltype(f<half>) f<half>;\n"
    ),
    "specialized": on("float", "a[i] = name<float>();", "template <typename T> T name() { return T(1); }\ntemplate <> float name<float>() { return 2; }\n"),
    "constructor with initializers": on("float", "Range r(2, 3); a[i] = r.size();", "struct Range { int first; int last; Range(int f, int l) : first(f), last(l) {} int size() const { return last - first; } };\n"),
    "traits that are derived where internals are on": on("float", "a[i] = is_wide<float>::value;", "#pragma METAL internals : enable\ntemplate <typename T> struct is_wide : metal::false_type {};\ntemplate <> struct is_wide<float> : metal::true_type {};\n#pragma METAL internals : disable\n"),
    "what looks like a derived class": on("float", "a[i] = Bits{1}.low; struct Bits all[1] = {{2}}; for (struct Bits b : all) { a[i] += b.low; }", "struct Bits { uint low : 3; };\nenum struct Kind : uint { none };\n"),
    "size of a float and a number": on("float", "a[i] = 1;", 'struct Row { float d; char q[256]; };\nstatic_assert(sizeof(Row) == sizeof(float) + 256, "wrong");\n'),
    "sum of what is read": on("float", "device char* p = (device char*)a; *((device float*)(p + 4 * i)) = *((device float*)(p)) + *((device float*)(p + 8));"),
    "struct to a place with a product": on("Pair", "threadgroup Pair s[64]; *((threadgroup Pair*)(s + (i % 4) * 8)) = *((device Pair*)a); a[i] = s[i];", PAIR),
    "matrix of device memory in a C cast": on("half4x4", "float4x4 m = (float4x4)(a[i]); half4x4 h = half4x4(m); a[i] = h;"),
    "default constructor in another memory": on("float", "Numbered<float> w{2u, a[i]}; a[i] = w.val;", "template <typename T> struct Numbered { uint i; T val; constexpr Numbered<T>() threadgroup = default; };\n"),
    "fallthrough": on("int", "switch (a[i]) { case 0: a[i] = 2; [[fallthrough]]; case 2: break; default: return; }"),
    "limits of a type of one's own": on("float", "a[i] = 1;", "namespace metal { template <> struct _numeric_limits_impl<int4> : _fp_numeric_limits_impl_base {}; }\n"),
    "operators in template arguments": on("float", "Ring<1 << 2, biased < 4, 2 * biased> r = {a[i]}; a[i] = held(r) + shown(r);",
        "constant constexpr int biased = 3;\ntemplate <int n, bool small, int twice> struct Ring { float v; };\n"
        "float held(Ring<1 << 2, biased < 4, 2 * biased> r) { return r.v; }\ntemplate <int n, int m = 2> float shown(Ring<n, (n > 3) && (m >= 2), 2 * biased> r) { return r.v; }\n"),
    "array argument of a template's type": on("float", "float v[2]; load(v, a + i); a[i] = v[1];", "template <typename T, int n> void load(T v[n], const device T* p) { for (int j = 0; j < n; ++j) v[j] = p[j]; }\n".replace("load(v", "load(v")).replace("load(v, a", "load<float, 2>(v, a"),
    "positions": "kernel void k(device uint* a, uint3 t [[thread_position_in_grid]], ushort3 l [[thread_position_in_threadgroup]], uint3 n [[threads_per_grid]], ushort s [[simdgroup_index_in_threadgroup]], uint q [[thread_index_in_quadgroup]], uint x [[dispatch_simdgroups_per_threadgroup]], uint3 o [[grid_origin]]) { a[t.x] = l.y + n.z + s + q + x + o.x; }\n",
    "swizzles of truths": on("float4", "bool4 b = a[i] < 2; bool2 c = b.xy; if (c.x && b.w) a[i].x = b.yz.x ? 1 : 2; b.z = true; b.xw = c; a[i].w = b.z;"),
    "kernel in a namespace": "namespace mine { kernel void k(device float* a, uint i [[thread_position_in_grid]]) { a[i] = 1; } }\n",
    "template kernel in namespaces": "namespace outer { namespace inner { template <typename T> [[kernel]] void f(device T* x, uint i [[thread_position_in_grid]]) { x[i] = T(1); } } template [[host_name(\"f_half\")]] [[kernel]] void inner::f<half>(device half*, uint); }\ntemplate [[host_name(\"f_float\")]] [[kernel]] void outer::inner::f<float>(device float*, uint);\n",
    "array arguments of thread memory": on("float", "float v[2] = {1, 2}; a[i] = f(v) + g(v);", "float f(const thread float v[2]) { return v[0]; }\nfloat g(thread const float (&v)[2]) { return v[1]; }\n"),
    "numeric limits of a struct": on("float", "a[i] = numeric_limits<Mine>::lowest().x + Limits<float>::max;", "struct Mine { float x; };\ntemplate <> struct metal::numeric_limits<Mine> { static constexpr Mine lowest() { return Mine{-1}; } };\ntemplate <typename T> struct Limits;\ntemplate <> struct Limits<float> { static constexpr constant float max = 3.0f; };\n"),
    "tables of structs": on("float", "a[i] = table[1].low + sizes[2][1];", PAIR + "constant Pair table[2] = {{1, 2}, {3, 4}};\nconstant constexpr int sizes[3][2] = {{1, 2}, {3, 4}, {5, 6}};\n"),
    "packed vectors of a struct": on("Row", "float3 v = a[i].p; a[i].p = v + 1; a[i].q = packed_short2(short2(v.xy));", "struct Row { packed_float3 p; packed_short2 q; };\n"),
    "numbers packed with a gamma, and in 10, 5 or 6 bits": on("uint", "uint w = pack_float_to_srgb_unorm4x8(float4(0.5)) + pack_half_to_unorm10a2(half4(1)) + pack_float_to_unorm565(float3(1)); float4 f = unpack_unorm4x8_srgb_to_float(w) + unpack_unorm10a2_to_float(w); half3 h = unpack_unorm565_to_half(ushort(w)); a[i] = uint(f.x + h.y);"),
    "helper threads": on("float", "if (!simd_is_helper_thread()) a[i] = 1;"),
    "casts within one memory": on("float", "device char* c = (device char*)a; device void* v = static_cast<device void*>(c); const device float4* f = reinterpret_cast<const device float4*>(v); thread float* t = (thread float*)&i; ulong n = (ulong)a; a[i] = f->x + *t + float(n);"),
    "casts of constant memory": "constant int table[2] = {1, 2};\nkernel void k(device int* a, constant char* c) { a[0] = *(constant int*)(c + 4) + *(constant int*)table; }\n",
    "function constants where no constant is needed": (
        "constant int n [[function_constant(0)]];\nconstant bool known = is_function_constant_defined(n);\nconstant int rounds = known ? 2 * n : 1;\n"
        "constant float4 scale [[function_constant(1)]];\n" + on("float", "for (int j = 0; j < rounds; ++j) if (known) a[i] *= scale.x + n;")
    ),
    "argument that a function constant chooses": "constant bool b [[function_constant(0)]];\nkernel void k(device float* a [[buffer(0)]], device float* c [[buffer(1), function_constant(b)]]) { if (b) a[0] = c[0]; }\n",
    "names that are types of textures elsewhere": on("float", "float mesh = 1, object = 2, tensor = 3; Own::sampler s{4}; if (mesh < 3 && tensor > object) a[i] = s.x;", "struct Own { struct sampler { float x; }; };\n"),
    "noexcept where internals are on": on("float", "a[i] = One().value();", "#pragma METAL internals : enable\nstruct One { float value() const noexcept { return 1; } };\n#pragma METAL internals : disable\n"),
    "atomics of threadgroup memory": on("int", "threadgroup atomic_int n; threadgroup atomic_uint m; atomic_store_explicit(&n, 0, memory_order_relaxed); atomic_fetch_max_explicit(&m, i, memory_order_relaxed); a[i] = atomic_load_explicit(&n, memory_order_relaxed);"),
    "identity matrices": "#include <simd/simd.h>\n" + on("float4", "float3x3 m = matrix_identity_float3x3; a[i] = matrix_identity_float4x4 * a[i] + m[0][0] + determinant(matrix_identity_float2x2) + matrix_identity_half2x2[1].y + matrix_identity_half3x3[0][0] + matrix_identity_half4x4[0][0];"),
    "function as a template argument": on("float", "a[i] = at<twice>(a[i]);", "float twice(float x) { return 2 * x; }\ntemplate <float (*f)(float)> float at(float x) { return f(x); }\n"),
    "recursion for a constant": on("float", "a[i] = *(device float*)((device char*)a + root);", "constexpr int halved(int n) { return n < 5 ? n : halved(n / 2); }\nconstant constexpr int root = halved(32);\n"),
    "pointers to atomics": "kernel void k(device atomic<int>* n, device atomic<float>* f, device atomic<bool>* b, device atomic<ulong>* m, threadgroup atomic<uint>* s [[threadgroup(0)]]) { atomic_fetch_add_explicit(n, 1, memory_order_relaxed); }\n",
    "argument buffer": "struct Args { device float* out [[id(0)]]; uint n [[id(1)]]; };\nkernel void k(constant Args& args [[buffer(0)]], uint i [[thread_position_in_grid]]) { args.out[i] = args.n; }\n",
}  # fmt: skip

# The line of the mistake, a part of the message, and the text without its two first lines.
REFUSED = {
    # Types of the library, buffers, aliases, threadgroup memory.
    "matrix of integers": (3, "a matrix is of float or half", on("int", "matrix<int, 2, 2> m; a[i] = 0;")),
    "matrix of truths": (3, "a matrix is of float or half", on("int", "matrix<bool, 2, 2> m; a[i] = 0;")),
    "matrix of a template's integers": (3, "a matrix is of float or half", "template <typename T> void f() { matrix<T, 3, 3> m; }\n" + on("int", "f<uint>(); a[i] = 0;")),
    "vector of five": (3, "a vector has 2 to 4 components, not 5", on("float", "vec<float, 5> v; a[i] = v[0];")),
    "vector of one": (3, "a vector has 2 to 4 components, not 1", on("float", "vec<float, 1> v; a[i] = v[0];")),
    "vector of a template's size": (3, "a vector has 2 to 4 components, not 5", "template <int n> float f() { vec<float, n> v = 1; return v[0]; }\n" + on("float", "a[i] = f<5>();")),
    "vector of a named size": (4, "a vector has 2 to 4 components, not 8", "constant constexpr int n = 8;\n" + on("float", "vec<half, n> v; a[i] = v[0];")),
    "buffers without indices": (3, "has 32 buffer arguments", "kernel void k(" + ", ".join(f"device float* b{n}" for n in range(32)) + ", uint i [[thread_position_in_grid]]) { b0[i] = 1; }\n"),
    "buffers with and without indices": (3, "has 32 buffer arguments", "kernel void k(device float* q [[buffer(3)]], " + ", ".join(f"constant float& b{n}" for n in range(31)) + ", uint i [[thread_position_in_grid]]) { q[i] = b1; }\n"),
    "a product of integers": (3, "no matching function for call to 'dot'", on("int2", "a[i].x = dot(a[i], a[i]);")),
    "function of an object that is two numbers": (4, "no matching function for call to 'sqrt'", on("float", "Q q{3}; a[i] = sqrt(q);", "struct Q { float v; operator float() const { return v; } operator half() const { return v; } };\n")),
    "local pointer of an alias": (4, "'p' names no address space", "using P = float*;\n" + on("float", "float v = 1; P p = &v; a[i] = *p;")),
    "local reference of an alias": (4, "'r' names no address space", "using R = const float&;\n" + on("float", "float v = 1; R r = v; a[i] = r;")),
    "local pointer of a local alias": (3, "'p' names no address space", on("float", "typedef const float* P; float v = 1; P p = &v; a[i] = *p;")),
    "local pointer of an alias's alias": (4, "'q' names no address space", "using P = float*; using Q = P;\n" + on("float", "float v = 1; const Q q(&v); a[i] = *q;")),
    "class with a constructor in threadgroup memory": (4, "a class with a constructor is in threadgroup memory", "struct C { float a; C() : a(1) {} };\n" + on("float", "threadgroup C s[4]; a[i] = s[0].a;")),
    "class with values in threadgroup memory": (4, "a class with a constructor is in threadgroup memory", "struct C { float a = 1; };\n" + on("float", "threadgroup C s; a[i] = s.a;")),
    "member with a constructor in threadgroup memory": (5, "a class with a constructor is in threadgroup memory", "struct C { float a; C(float x) : a(x) {} };\nstruct D { C c; };\n" + on("float", "threadgroup D s[2][2]; a[i] = s[0][0].c.a;")),
    # Address spaces.
    "pointer argument": (3, "names no address space", "void f(uint* p) { *p = 1; }\n" + on("uint", "uint x; f(&x); a[i] = x;")),
    "pointer argument of an alias": (4, "names no address space", "typedef uint word;\nvoid f(word* p) { *p = 1; }\n" + on("uint", "a[i] = 1;")),
    "cast to an alias's pointer": (4, "names no address space", "using word = uint;\n" + on("uint", "uint2 x = 1; a[i] = *(word*)&x;")),
    "array argument": (3, "names no address space", "float f(const float v[2]) { return v[0]; }\n" + on("float", "float v[2] = {1, 2}; a[i] = f(v);")),
    "device by value": (3, "no pointer", "kernel void k(device float y [[buffer(0)]]) { y = 1; }\n"),
    "number in a buffer": (3, "no pointer", "kernel void k(float y [[buffer(0)]], device float* a) { a[0] = y; }\n"),
    "device as threadgroup": (3, "address space", on("float", "threadgroup float* p = a; p[0] = 1;")),
    "member function of thread memory": (4, "works on thread memory|address space", "struct P { float x; float twice() const { return 2 * x; } };\n" + on("P", "a[i].x = a[i].twice();")),
    "C cast to another memory": (3, "pointer to device memory is cast to threadgroup", on("float", "threadgroup float* s = (threadgroup float*)a; s[0] = 1;")),
    "C cast of a reference": (3, "pointer to device memory is cast to threadgroup", on("float", "threadgroup float& s = (threadgroup float&)a[i]; s = 1;")),
    "cast to thread memory": (3, "pointer to device memory is cast to thread", on("float", "thread float* s = (thread float*)a; s[0] = 1;")),
    "cast of thread memory": (3, "pointer to thread memory is cast to device", on("float", "float x = 1; *(device float*)&x = 2; a[i] = x;")),
    "cast to constant memory": (3, "pointer to device memory is cast to constant", on("float", "constant float* s = (constant float*)a; a[0] = s[1];")),
    "cast of constant memory": (4, "pointer to constant memory is cast to device", "constant float table[2] = {1, 2};\n" + on("float", "device float* s = (device float*)table; a[0] = s[1];")),
    "cast of a threadgroup array": (3, "pointer to threadgroup memory is cast to device", on("float", "threadgroup float s[4]; s[0] = 1; *(device float*)s = a[0];")),
    "functional cast to another memory": (4, "pointer to device memory is cast to threadgroup", "using Shared = threadgroup float*;\n" + on("float", "auto s = Shared(a); s[0] = 1;")),
    "cast to another memory in a function without calls": (3, "pointer to device memory is cast to thread", "float f(device float* p) { return *(thread float*)p; }\n" + on("float", "a[i] = 1;")),
    "cast by an alias in a function without calls": (4, "pointer to device memory is cast to thread", "using Own = thread float*;\ninline float f(device float* p) { return *Own(p); }\n" + on("float", "a[i] = 1;")),
    "cast to another memory in a member without calls": (3, "pointer to device memory is cast to threadgroup", "struct A { float f(device float* p) { return *(threadgroup float*)(p + 1); } };\n" + on("float", "a[i] = 1;")),
    "function pointer": (4, "called by a pointer", "float twice(float x) { return 2 * x; }\n" + on("float", "float (*f)(float) = twice; a[i] = f(a[i]);")),
    "function pointer by auto": (4, "called by a pointer", "float4 twice(float4 x) { return 2 * x; }\n" + on("float4", "auto f = &twice; a[i] = (*f)(a[i]);")),
    "function pointer as an argument": (4, "called by a pointer", PAIR + "float at(float (*f)(Pair), Pair x) { return f(x); } float low(Pair p) { return p.low; }\n" + on("Pair", "a[i].low = at(low, Pair{1, 2});")),
    "function pointer that returns a struct": (4, "called by a pointer", PAIR + on("Pair", "Pair (*f)(Pair) = turned; a[i] = f(Pair{1, 2});", "Pair turned(Pair p) { return Pair{p.high, p.low}; } ")),
    "table of functions": (5, "called by a pointer", "float twice(float x) { return 2 * x; } float half_of(float x) { return x / 2; }\ntypedef float (*F)(float); constant F table[2] = {twice, half_of};\n" + on("float", "a[i] = table[i & 1](a[i]);")),
    "static cast to another memory": (3, "copy what it points to", on("float", "auto s = static_cast<threadgroup float*>(a); s[0] = 1;")),
    "reinterpret cast to another memory": (3, "copy what it points to", on("float", "auto s = reinterpret_cast<threadgroup int*>(a); s[0] = 1;")),
    "cast of a template to another memory": (3, "pointer to device memory is cast to threadgroup", "template <typename To, typename From> To to(From x) { return (To)x; }\n" + on("float", "to<threadgroup float*>(a)[0] = 1;")),
    "variable outside of functions": (3, "has to be 'constant'", "const float scale = 2;\n" + on("float", "a[i] *= scale;")),
    "constant without a value": (3, "must be initialized", "constant int n;\n" + on("int", "a[i] = n;")),
    "write to constant": (3, "'constant' memory", "kernel void k(constant float* a, uint i [[thread_position_in_grid]]) { a[i] = 1; }\n"),
    "write to a constant struct": (4, "'constant' memory", PAIR + "kernel void k(constant Pair& p) { p.low = 1; }\n"),
    # Types.
    "double": (3, "no double", on("float", "double d = a[i]; a[i] = d;")),
    "long double": (3, "no long double: write 2.0f", on("float", "a[i] = 2.0L;")),
    "long double with an exponent": (3, "no long double: write 1e3f", on("float", "a[i] = 1e3l;")),
    "long long": (3, "no long long", on("float", "long long n = 1; a[i] = n;")),
    "bfloat from float": (3, "becomes a bfloat", on("bfloat", "float f = 1; a[i] = f;")),
    "bfloat from a literal": (3, "becomes a bfloat", on("bfloat", "bfloat b = 0.5f; a[i] = b;")),
    "bfloat by a sum with float": (3, "becomes a bfloat", on("bfloat", "a[i] = a[i] * 2.0f;")),
    "bfloat returned": (3, "becomes a bfloat", "bfloat f(float x) { return x; }\n" + on("bfloat", "a[i] = f(1);")),
    "bfloat as an argument": (4, "becomes a bfloat", "bfloat f(bfloat x) { return x; }\n" + on("bfloat", "a[i] = f(1.5f);")),
    "bfloat from infinity": (3, "becomes a bfloat", on("bfloat", "a[i] = i ? a[i] : -INFINITY;")),
    "bfloat from mathematics": (3, "becomes a bfloat", on("bfloat", "a[i] = exp(a[i]);")),
    "bfloat from an exact number": (3, "becomes a bfloat", on("bfloat", "bfloat b = 1.0f; a[i] = b;")),
    "bfloat from an exact variable": (3, "becomes a bfloat", on("bfloat", "const float one = 1; a[i] = one;")),
    "bfloat from a cast integer": (3, "becomes a bfloat", on("bfloat", "a[i] = float(2);")),
    "bfloat from a limit": (3, "becomes a bfloat", on("bfloat", "a[i] = -numeric_limits<float>::infinity();")),
    "bfloat in a struct": (4, "becomes a bfloat", "struct One { bfloat x; };\n" + on("One", "One o{0.5f}; a[i].x = o.x;")),
    "bfloat of a template": (3, "becomes a bfloat", "template <typename T> T zero() { return 0.0f; }\n" + on("bfloat", "a[i] = zero<bfloat>();")),
    "bfloat from a power of two": (3, "becomes a bfloat", on("bfloat", "a[i] = ldexp(a[i], 2);")),
    "bfloat and half": (3, "no type in common", on("bfloat", "a[i] = a[i] < half(2) ? a[i] : a[0];")),
    "bfloat from half": (3, "by a cast alone", on("bfloat", "half h = 1; a[i] = h;")),
    "mathematics of bfloat that MLX's headers lack": (
        4, "becomes a bfloat", '#include "mlx/backend/metal/kernels/utils.h"\n' + on("bfloat", "a[i] = clamp(a[i], a[0], a[1]);")
    ),
    "vectors of bfloat in mathematics": (3, "no matching function for call to 'dot'", on("bfloat", "bfloat2 v = bfloat2(a[i]); a[i] = dot(v, v);")),
    "bfloat to half": (3, "half", on("bfloat", "half h = a[i]; a[i] = bfloat(h);")),
    "MLX's name of bfloat": (3, "write bfloat", on("bfloat16_t", "a[i] = a[i];")),
    "operands of two vector types": (3, "convert explicitly", on("float4", "int4 n = 1; a[i] = a[i] * n;")),
    "auto argument": (3, "is auto: write a template", "float f(auto x) { return x; }\n" + on("float", "a[i] = f(1.0f);")),
    "vectors of two types": (3, "convert explicitly", on("float4", "int4 n = a[i]; a[i] = float4(n);")),
    "vectors of two sizes": (3, "vector|convert", on("float4", "float2 v = a[i]; a[i].xy = v;")),
    "components of two sets": (3, "xyzw", on("float4", "a[i] = a[i].xyrg;")),
    "strings": (3, "no strings", on("float", 'constant char* s = "x"; a[i] = s[0];')),
    # Functions for types that they do not have.
    "clamp of float and int": (3, "no matching function for call to 'clamp'", on("float", "a[i] = clamp(a[i], 0, 1);")),
    "max of float and int": (3, "no matching function for call to 'max'", on("float", "a[i] = max(a[i], 0);")),
    "exp of int": (3, "no matching function for call to 'exp'", on("int", "a[i] = exp(a[i]);")),
    "shuffle of bool": (3, "take no bool", on("float", "a[i] = simd_shuffle_xor(a[i] > 0, 1);")),
    "sum of bfloat": (3, "take no bfloat", on("bfloat", "float f = simd_sum(a[i]); a[i] = bfloat(f);")),
    "shuffle of long": (3, "64 bits", on("long", "a[i] = simd_broadcast(a[i], 0);")),
    "and of floats": (3, "takes integers", on("float", "a[i] = simd_xor(a[i]);")),
    "shuffle of a struct": (4, "numbers and vectors", PAIR + on("float", "Pair p{1, 2}; a[i] = simd_shuffle(p, 0).low;")),
    "atomic of half": (3, "an atomic is of", "kernel void k(device atomic<half>* a) { atomic_store_explicit(a, half(1), memory_order_relaxed); }\n"),
    "pointer to an atomic of half": (3, "an atomic is of", "kernel void k(device atomic<half>* a, device int* b) { b[0] = 1; }\n"),
    "pointer to an atomic of an alias": (4, "an atomic is of", "using Wide = long;\nint f(threadgroup metal::atomic<Wide>* a) { return 1; }\n" + on("int", "a[i] = 1;")),
    "sum of atomic ulong": (3, "atomic_max_explicit", "kernel void k(device atomic_ulong* a) { atomic_fetch_add_explicit(a, 1ul, memory_order_relaxed); }\n"),
    "order of an atomic store": (3, "atomic operations are relaxed", "kernel void k(device atomic_uint* a) { atomic_store_explicit(a, 1u, memory_order_seq_cst); }\n"),
    "order of an atomic sum": (3, "write memory_order_relaxed", "kernel void k(device atomic_uint* a) { atomic_fetch_add_explicit(a, 1u, metal::memory_order_seq_cst); }\n"),
    "fence before Metal 3.2": (3, "check --std metal3.2", on("float", "a[i] = 1; atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst);")),
    "sum of atomic bool": (3, "atomic sums are of", "kernel void k(device atomic_bool* a) { atomic_fetch_add_explicit(a, true, memory_order_relaxed); }\n"),
    "function constant as an array's size": (4, "known when the kernel is compiled", "constant int n [[function_constant(0)]];\n" + on("float", "float v[n]; v[0] = a[i]; a[i] = v[0];")),
    "function constant as a threadgroup array's size": (4, "known when the kernel is compiled", "constant int n [[function_constant(0)]];\n" + on("float", "threadgroup float v[2 * n]; v[0] = a[i]; a[i] = v[0];")),
    "function constant behind an array's size": (5, "known when the kernel is compiled", "constant int n [[function_constant(0)]];\nconstant int m = n * 2;\n" + on("float", "float v[m]; v[0] = a[i]; a[i] = v[0];")),
    "function constant as a template argument": (5, "no matching function for call to 'f'", "constant int n [[function_constant(0)]];\ntemplate <int m> int f() { return m; }\n" + on("float", "a[i] = f<n>();")),
    "function constant as a case": (4, "function constants are not", "constant uint n [[function_constant(0)]];\n" + on("float", "switch (i) { case n: a[i] = 1; }")),
    "function constant in if constexpr": (4, "function constants are not", "constant bool n [[function_constant(0)]];\n" + on("float", "if constexpr (n) a[i] = 1;")),
    "function constant of a struct": (4, "one for each number", PAIR + "constant Pair p [[function_constant(0)]];\n" + on("float", "a[i] = 1;")),
    "atomic float in threadgroup memory": (3, "of device memory alone", on("float", "threadgroup atomic_float s; atomic_fetch_add_explicit(&s, 1.0f, memory_order_relaxed); a[i] = 1;")),
    "atomic float of a threadgroup argument": (3, "of device memory alone", "kernel void k(threadgroup atomic<float>* s [[threadgroup(0)]]) { atomic_store_explicit(s, 1.0f, memory_order_relaxed); }\n"),
    "atomic ulong in threadgroup memory": (3, "of device memory alone", on("float", "threadgroup atomic_ulong s; atomic_max_explicit(&s, 1ul, memory_order_relaxed); a[i] = 1;")),
    "maximum of atomic float": (3, "atomic_compare_exchange", "kernel void k(device atomic_float* a) { atomic_fetch_max_explicit(a, 1.0f, memory_order_relaxed); }\n"),
    "name of CUDA": (3, "write threadgroup_barrier", on("float", "__syncthreads(); a[i] = 1;")),
    "function of C": (3, "write exp", on("float", "a[i] = expf(a[i]);")),
    "header of C++": (3, "no header <cmath>", "#include <cmath>\n" + on("float", "a[i] = 1;")),
    "name out of scope": (3, "undeclared", on("float", "{ float x = 1; } a[i] = x;")),
    # Arguments of kernels.
    "buffer index of 31": (3, "0 to 30", "kernel void k(device float* a [[buffer(31)]]) { a[0] = 1; }\n"),
    "one buffer index twice": (3, "as 'a' has", "kernel void k(device float* a [[buffer(1)]], constant float& b [[buffer(1)]]) { a[0] = b; }\n"),
    "one threadgroup index twice": (3, "as 's' has", "kernel void k(threadgroup float* s [[threadgroup(0)]], threadgroup float* t [[threadgroup(0)]], device float* a) { s[0] = 1; t[0] = 2; a[0] = s[0]; }\n"),
    "threadgroup argument without an index": (3, "no index", "kernel void k(threadgroup float* s, device float* a) { s[0] = 1; a[0] = s[0]; }\n"),
    "threadgroup memory in a buffer": (3, "that is of device or constant memory", "kernel void k(threadgroup float* s [[buffer(0)]]) { s[0] = 1; }\n"),
    "argument of thread memory": (3, "thread memory", "kernel void k(thread float* s [[buffer(0)]]) { s[0] = 1; }\n"),
    "signed position": (3, "is 'int'", "kernel void k(device float* a, int i [[thread_position_in_grid]]) { a[i] = 1; }\n"),
    "position of four": (3, "is 'uint4'", "kernel void k(device float* a, uint4 i [[thread_position_in_grid]]) { a[i.x] = 1; }\n"),
    "index of two": (3, "is 'uint2'", "kernel void k(device float* a, uint2 i [[thread_index_in_simdgroup]]) { a[i.x] = 1; }\n"),
    "positions of two widths": (3, "equally many", "kernel void k(device float* a, uint i [[thread_position_in_grid]], uint3 n [[threads_per_grid]]) { a[i] = n.x; }\n"),
    "argument without an attribute": (3, "no attribute", "kernel void k(device float* a, uint i) { a[i] = 1; }\n"),
    # Words and classes.
    "vertex as a name": (3, "is a word of Metal's", on("float", "float vertex = 1; a[i] = vertex;")),
    "register": (3, "no register", on("float", "register float x = 1; a[i] = x;")),
    "noexcept": (3, "no noexcept: leave the word out", "void set(device float* a) noexcept { a[0] = 1; }\n" + on("float", "set(a);")),
    "noexcept of a member": (3, "no noexcept: leave the word out", "struct One { float value() const noexcept(true) { return 1; } };\n" + on("float", "a[i] = One().value();")),
    "operator noexcept": (3, "noexcept", on("float", "a[i] = noexcept(a[i]);")),
    "virtual": (3, "no virtual", "struct A { virtual float f() { return 1; } };\n" + on("float", "a[i] = 1;")),
    "derived class": (4, "no derived classes", PAIR + "struct Triple : public Pair { float mid; };\n" + on("float", "a[i] = 1;")),
    "matrix scaled by an integer": (3, "deleted operator", on("float4x4", "a[i] = a[i] * 2;")),
    "vector of a part of another type": (3, "parts of its own type", on("float4", "int3 v = int3(1); a[i] = float4(v, 1.0f);")),
    "float that braces narrow": (3, "narrowed", on("int", "float f = a[i]; int x{f}; a[i] = x;")),
    "kernel in a namespace without a name": (3, "without a name", "namespace { kernel void k(device float* a) { a[0] = 1; } }\n"),
    "pointer to a pointer": (3, "pointer to a pointer", "kernel void k(device float* device* a [[buffer(0)]]) { a[0][0] = 1; }\n"),
    "one name of two kernels": (5, "two kernels have the name 'x'", "template <typename T> kernel void f(device T* a) { a[0] = 1; }\ntemplate [[host_name(\"x\")]] kernel void f<float>(device float*);\ntemplate [[host_name(\"x\")]] kernel void f<half>(device half*);\n"),
    "class derived from a template": (4, "make 'Base' a member", "template <typename T> struct Base { T v; };\nstruct X : Base<float> {};\n" + on("float", "a[i] = 1;")),
    "class derived from a specialization": (4, "make 'Base' a member", "template <typename T, int n> struct Base; template <typename T> struct Base<T, 2> { T v; };\nclass X final : public Base<float, 1 << 1> {};\n" + on("float", "a[i] = 1;")),
    "template derived from a template": (4, "make 'Base' a member", "template <int n> struct Base { enum { value = n }; };\ntemplate <int biased> struct X : Base<2 * biased> {};\n" + on("float", "a[i] = 1;")),
    "specialization that is derived": (4, "make 'true_type' a member", "template <typename T> struct is_wide { enum { value = 0 }; };\ntemplate <> struct is_wide<float> : metal::true_type {};\n" + on("float", "a[i] = 1;")),
    "kernel that is called": (4, "is called", on("float", "a[i] = 1;") + "kernel void j(device float* a, uint i [[thread_position_in_grid]]) { k(a, i); }\n"),
    "kernel that is a member": (3, "is a member function", "struct S { kernel void k(device float* a) { a[0] = 1; } };\n"),
    "recursion": (3, "calls itself", "int f(int n) { return n < 2 ? 1 : n * f(n - 1); }\n" + on("int", "a[i] = f(3);")),
    "lambda": (3, "lambda", on("float", "auto f = [](float x) { return x; }; a[i] = f(1);")),
    "too much threadgroup memory": (3, "it compiles, but no GPU launches more than 32768", on("float", "threadgroup float s[9000]; s[i] = 1; a[i] = s[i];")),
}  # fmt: skip

UNCOVERED = {
    "argument of a tensor": "kernel void k(tensor<device half, dextents<int, 2>> t, device float* a) { a[0] = 1; }\n",
    "texture": "kernel void k(texture2d<float> t [[texture(0)]], device float* a) { a[0] = 1; }\n",
    "vertex function": "vertex float4 v(uint i [[vertex_id]], constant float4* p) { return p[i]; }\n",
    "vertex function by an attribute": "[[vertex]] float4 v(uint i [[vertex_id]]) { return float4(i); }\n",
    "mesh function": "[[mesh]] void m(uint i [[thread_position_in_grid]]) {}\n",
    "object function": "[[object, max_total_threads_per_threadgroup(32)]] void o(uint i [[thread_position_in_grid]]) {}\n",
    "sampler outside of functions": "constexpr sampler s(coord::normalized, filter::linear);\n"
    + on("float", "a[i] = 1;"),
    "sampler in constant memory": "constant sampler s(filter::linear);\n" + on("float", "a[i] = 1;"),
    "sampler in a function": on("float", "constexpr sampler s(filter::linear); a[i] = 1;"),
    "texture in a struct": "struct Images { array<texture2d<float>, 4> all; };\n" + on("float", "a[i] = 1;"),
    "table of functions": "kernel void k(visible_function_table<float(float)> t [[buffer(1)]], device float* a [[buffer(0)]]) { a[0] = t[0](1); }\n",
    "alias of a table of functions": "using Table = intersection_function_table<>;\nkernel void k(Table t [[buffer(1)]], device float* a [[buffer(0)]]) { a[0] = 1; }\n",
    "ray tracing": "using namespace metal::raytracing;\n" + on("float", "a[i] = 1;"),
    "fragment function": "fragment float4 f() { return float4(1); }\n",
}
