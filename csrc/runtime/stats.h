// Counts of ops by executor and kernel. A count takes a few dozen nanoseconds.
#pragma once

#include <string>

#include "backends/name.h"

namespace mittens::stats {

// A kernel of the primitive ran on an executor; both are text that stays where it is.
void count_run(const char* primitive, const char* executor, Name kernel);

// A call of an op went to mx.
void count_mx(const char* op, const std::string& reason);

}  // namespace mittens::stats
