// Counts of what ran where: a few dozen nanoseconds for each kernel that runs.
#pragma once

#include <string>

#include "backends/name.h"

namespace mittens::stats {

// A kernel of the primitive ran on an executor; both are text that stays where it is.
void count_run(const char* primitive, const char* executor, Name kernel);

// A call of an op went to mx.
void count_mx(const char* op, const std::string& reason);

}  // namespace mittens::stats
