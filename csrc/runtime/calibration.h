// Measurements of this machine: for a problem, the plan that won, or mx. Plans and ops ask for it; where no measurement
// answers, the plan tables and the rules for mx decide alone.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "backends/launch.h"
#include "backends/name.h"
#include "mlx/dtype.h"
#include "mlx/stream.h"

namespace mittens {

namespace mx = mlx::core;

// A call as far as its speed depends on it. Two calls of one op, dtype and format are compared by their sizes.
struct Problem {
  const char* op;  // text that stays where it is
  mx::Dtype dtype;
  uint32_t format;  // tells other kernels apart, numbered by the family's plan.h
  std::array<uint32_t, 4> sizes;  // those not used are 1
};

struct Choice {
  bool known = false;  // whether a measurement says the rest
  bool mx = false;  // mx was faster
  Name schedule;  // a row's name in the plan table; empty for the first that fits
  int parallelism = 0;  // log2 of how many times the GPU's cores the plan is to count with
};

// Tells calibration the schedules in the plan table of some ops, for as long as the process lives.
class Schedules {
 public:
  template <typename Row, size_t n>
  Schedules(std::initializer_list<const char*> ops, const Row (&table)[n]) {
    for (const char* op : ops) {
      for (const Row& row : table) {
        add(op, row.name);
      }
    }
  }

 private:
  static void add(const char* op, const char* name);
};

// A number of elements, rows or heads as a size of a problem.
inline uint32_t problem_size(size_t count) {
  return static_cast<uint32_t>(std::min<size_t>(count, std::numeric_limits<uint32_t>::max()));
}

// The choice measured nearest to a problem, within a factor of 2 in each size. Where there is none, the choice of all
// measurements within a factor of 16 in each size, if the problem lies between them and they agree. Plans take its
// schedule and its parallelism.
Choice calibrated(const Problem& problem, mx::Stream stream);

// Whether mx is to compute a problem that a kernel covers as well. By calibration where it knows the problem, else
// where there is a reason for which mx is faster on this GPU. stats() has the reason. Never in strict mode or under a
// strict patch, which ask for the kernel, unless the op is switched off.
// called: the op that statistics and switches name, if the problem is another op's.
bool prefer_mx(const Problem& problem, const char* reason, mx::Stream stream, const char* called = nullptr);

// Keeps a launch while launches are recorded: two plans that come to the same ones are one.
void record_launch(const Launch& launch);

}  // namespace mittens
