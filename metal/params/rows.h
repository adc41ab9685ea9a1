// What every row kernel is told of its geometry. Compiled by C++ and by Metal.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mittens {

struct RowParams {
  uint32_t rows;
  uint32_t columns;
  uint32_t splits;           // threadgroups that share a row, 1 unless the row is split
  uint32_t packs_per_split;  // 16-byte packs each of them takes
  uint32_t whole;            // every row of every array starts on a 16-byte boundary and fills packs
};

}  // namespace mittens
