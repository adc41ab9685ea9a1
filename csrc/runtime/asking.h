// The plan of a call, without running it: its graph is built, and each of its primitives lists the kernels that it
// would launch. Ops, checks and plans are the same as in a call that runs.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "backends/name.h"
#include "backends/stand_in.h"

namespace mittens {

// The counts that stats() would have.
struct CallPlan {
  struct Run {
    const char* primitive;
    const char* executor;
    Name kernel;
  };
  struct Fallback {
    std::string op;
    std::string reason;
  };
  std::vector<Run> runs;
  std::vector<Fallback> fallbacks;
};

// A primitive that can list its kernels. It reads only shapes and dtypes of inputs and outputs.
class Plannable {
 public:
  virtual void plan(const std::vector<mx::array>& inputs, const std::vector<mx::array>& outputs, CallPlan& plan) = 0;

 protected:
  ~Plannable() = default;
};

// Adds the kernels that the evaluation of arrays would run.
void plan_evaluation(const std::vector<mx::array>& arrays, CallPlan& plan);

// The plan that this thread is asked for: calls that go to mx are noted there, and are no errors in strict mode. Null
// where none is.
CallPlan* asked_plan();

}  // namespace mittens
