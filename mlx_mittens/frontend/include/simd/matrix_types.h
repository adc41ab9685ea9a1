#include <simd/simd.h>
