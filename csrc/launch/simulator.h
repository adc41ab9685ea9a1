// The simulator as this process uses it: one switch, one table of open libraries, a record of what ran.
#pragma once

#include <string>

#include "simulator/simulator.h"

namespace mittens {

simulator::Options simulator_options();

// Runs a dispatch in the library at this path, and notes it under the file that the library was made of.
void simulate(const std::string& file, const std::string& library, const simulator::Dispatch& dispatch,
              const simulator::Options& options);

}  // namespace mittens
