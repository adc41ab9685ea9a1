// Shared by the plan tables of the families: rows with a name, from which the first that fits is taken.
#pragma once

#include <cstddef>
#include <stdexcept>

#include "backends/name.h"
#include "runtime/gpu.h"

namespace mittens {

enum class Where { apple, nvidia, anywhere };

inline bool is_here(Where where, const Gpu& gpu) {
  return where == Where::anywhere || (where == Where::nvidia) == (gpu.vendor == Gpu::Vendor::nvidia);
}

// The row that is asked for by name, if it can run; else, and with an empty name, the first that can run and pays.
template <typename Row, size_t n, typename CanRun, typename Pays>
const Row& choose_row(const Row (&table)[n], const Name& asked_for, CanRun can_run, Pays pays) {
  for (const Row& row : table) {
    if (asked_for.text() == row.name && can_run(row)) {
      return row;
    }
  }
  for (const Row& row : table) {
    if (can_run(row) && pays(row)) {
      return row;
    }
  }
  throw std::logic_error("[mlx_mittens] a plan table does not end with a row that fits all");
}

}  // namespace mittens
