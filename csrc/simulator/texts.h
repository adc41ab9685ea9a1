// Words that messages of the simulator share.
#pragma once

#include <cstddef>
#include <string>

#include "simulator/abi.h"

namespace mittens::simulator {

inline std::string plural(size_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

inline std::string text_of(const abi::Site& site) {
  return std::string(site.file) + ":" + std::to_string(site.line);
}

inline std::string text_of(const unsigned (&position)[3]) {
  return "(" + std::to_string(position[0]) + ", " + std::to_string(position[1]) + ", " + std::to_string(position[2]) +
         ")";
}

}  // namespace mittens::simulator
