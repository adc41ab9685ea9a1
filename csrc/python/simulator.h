// Shared by the simulator's bindings.
#pragma once

#include <nanobind/nanobind.h>

#include "simulator/simulator.h"

namespace mittens::simulator {

// The counts by name, for Python.
nanobind::dict dict_of(const Counts& counts);

// The counts of a profiled launch by line of the source: (file, line, operation, memory, executions, operations).
nanobind::list lines_of(const Counts& counts);

}  // namespace mittens::simulator
