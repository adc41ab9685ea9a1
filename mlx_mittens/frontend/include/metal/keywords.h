// Metal's own words, and its vector constructors as macros that leave the bare type name alone. Last of all: nothing of
// the library itself is written with them.
#pragma once

#define device MITTENS_DEVICE
#define threadgroup MITTENS_THREADGROUP
// It is const in Metal. Where code is made it is not, since clang gives functions of `constant T*` and of
// `thread const T*` the same symbol; the rewriter adds the const that is needed.
#ifdef MITTENS_DIALECT
#define constant MITTENS_CONSTANT const
#else
#define constant MITTENS_CONSTANT
#endif
#define thread
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST MITTENS_CONSTANT constexpr

#define bool2(...) ::mittens::construct<bool2>(__VA_ARGS__)
#define bool3(...) ::mittens::construct<bool3>(__VA_ARGS__)
#define bool4(...) ::mittens::construct<bool4>(__VA_ARGS__)
#define char2(...) ::mittens::construct<char2>(__VA_ARGS__)
#define char3(...) ::mittens::construct<char3>(__VA_ARGS__)
#define char4(...) ::mittens::construct<char4>(__VA_ARGS__)
#define uchar2(...) ::mittens::construct<uchar2>(__VA_ARGS__)
#define uchar3(...) ::mittens::construct<uchar3>(__VA_ARGS__)
#define uchar4(...) ::mittens::construct<uchar4>(__VA_ARGS__)
#define short2(...) ::mittens::construct<short2>(__VA_ARGS__)
#define short3(...) ::mittens::construct<short3>(__VA_ARGS__)
#define short4(...) ::mittens::construct<short4>(__VA_ARGS__)
#define ushort2(...) ::mittens::construct<ushort2>(__VA_ARGS__)
#define ushort3(...) ::mittens::construct<ushort3>(__VA_ARGS__)
#define ushort4(...) ::mittens::construct<ushort4>(__VA_ARGS__)
#define int2(...) ::mittens::construct<int2>(__VA_ARGS__)
#define int3(...) ::mittens::construct<int3>(__VA_ARGS__)
#define int4(...) ::mittens::construct<int4>(__VA_ARGS__)
#define uint2(...) ::mittens::construct<uint2>(__VA_ARGS__)
#define uint3(...) ::mittens::construct<uint3>(__VA_ARGS__)
#define uint4(...) ::mittens::construct<uint4>(__VA_ARGS__)
#define long2(...) ::mittens::construct<long2>(__VA_ARGS__)
#define long3(...) ::mittens::construct<long3>(__VA_ARGS__)
#define long4(...) ::mittens::construct<long4>(__VA_ARGS__)
#define ulong2(...) ::mittens::construct<ulong2>(__VA_ARGS__)
#define ulong3(...) ::mittens::construct<ulong3>(__VA_ARGS__)
#define ulong4(...) ::mittens::construct<ulong4>(__VA_ARGS__)
#define half2(...) ::mittens::construct<half2>(__VA_ARGS__)
#define half3(...) ::mittens::construct<half3>(__VA_ARGS__)
#define half4(...) ::mittens::construct<half4>(__VA_ARGS__)
#define bfloat2(...) ::mittens::construct<bfloat2>(__VA_ARGS__)
#define bfloat3(...) ::mittens::construct<bfloat3>(__VA_ARGS__)
#define bfloat4(...) ::mittens::construct<bfloat4>(__VA_ARGS__)
#define float2(...) ::mittens::construct<float2>(__VA_ARGS__)
#define float3(...) ::mittens::construct<float3>(__VA_ARGS__)
#define float4(...) ::mittens::construct<float4>(__VA_ARGS__)

#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.434294481903251827651f
#define M_LN2_F 0.693147180559945309417f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.785398163397448309616f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_PI_F 0.636619772367581343076f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f
#define M_E_H half(M_E_F)
#define M_PI_H half(M_PI_F)
#define M_LOG2E_H half(M_LOG2E_F)
#define M_LN2_H half(M_LN2_F)
#define M_SQRT2_H half(M_SQRT2_F)
#ifdef MITTENS_DIALECT
// Constants that no bfloat holds, so that clang warns where one becomes a bfloat.
#define INFINITY __FLT_MAX__
#define NAN __FLT_MAX__
#define HUGE_VALF __FLT_MAX__
#else
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#endif
#define MAXFLOAT __FLT_MAX__
#define MAXHALF half(65504.0f)
#define HUGE_VALH half(__builtin_inff())
#define HALF_DIG 3
#define HALF_MANT_DIG 11
#define FLT_MANT_DIG __FLT_MANT_DIG__
#define FLT_MAX_EXP __FLT_MAX_EXP__
#define FLT_MIN_EXP __FLT_MIN_EXP__
#define FLT_RADIX 2
#define BFLT_MAX bfloat(0x1.fep127f)
#define BFLT_MIN bfloat(0x1p-126f)
#define BFLT_EPSILON bfloat(0x1p-7f)
#define FP_ILOGB0 (-2147483647 - 1)
#define FP_ILOGBNAN (-2147483647 - 1)
#define M_PI_2_H half(M_PI_2_F)
#define M_PI_4_H half(M_PI_4_F)
#define M_1_PI_H half(M_1_PI_F)
#define M_2_PI_H half(M_2_PI_F)
#define M_LN10_H half(M_LN10_F)
#define M_LOG10E_H half(M_LOG10E_F)
#define M_SQRT1_2_H half(M_SQRT1_2_F)
#define M_2_SQRTPI_H half(M_2_SQRTPI_F)
#define assert(condition) ((void)(condition))
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define FLT_DIG __FLT_DIG__
#define HALF_MAX half(65504.0f)
#define HALF_MIN half(6.103515625e-05f)
#define HALF_EPSILON half(0.0009765625f)
#define CHAR_BIT 8
#define CHAR_MAX 127
#define CHAR_MIN (-128)
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-9223372036854775807l - 1)
#define ULONG_MAX 18446744073709551615ul
