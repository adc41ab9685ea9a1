// The Metal standard library, as the front end compiles kernels with it: included before the rewritten text.
#pragma once

#include "metal/types.h"
#include "metal/traits.h"
#ifdef __SPIRV__
#include "metal/spirv.h"
#elif defined(__NVPTX__)
#include "metal/nvptx.h"
#else
#include "metal/cpu.h"
#endif
#include "metal/math.h"
#include "metal/integer.h"
#include "metal/pack.h"
#include "metal/matrix.h"
#include "metal/simdgroup.h"
#include "metal/simdgroup_matrix.h"
#if !defined(__SPIRV__) && !defined(__NVPTX__)
#include "metal/tensor.h"
#include "metal/cooperative_tensor.h"
#include "metal/tensor_ops.h"
#include "metal/tensor_reductions.h"
#endif
#include "metal/atomic.h"
#include "metal/logging.h"
#include "metal/entry.h"
#include "metal/conversions.h"
#include "metal/keywords.h"
#include "metal/compiler_names.h"
