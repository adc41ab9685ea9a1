// Which lane of a simdgroup holds which elements of an 8x8 matrix: Apple's layout, two neighbours of a row a lane.
#pragma once

namespace mittens {

MITTENS_INLINE constexpr unsigned row_of(unsigned lane) {
  return (lane / 4 & 4) + lane / 2 % 4;
}
MITTENS_INLINE constexpr unsigned column_of(unsigned lane) {
  return (lane / 4 & 2) * 2 + lane % 2 * 2;
}
MITTENS_INLINE constexpr unsigned lane_of(unsigned row, unsigned column) {
  return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column & 2) >> 1;
}

}  // namespace mittens
