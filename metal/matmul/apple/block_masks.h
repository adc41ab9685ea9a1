// Masks of blocks of x, of w and of y in products. Operands are masked by bools, or by numbers of their own type that
// the blocks are multiplied with. A block of y that is masked out is zeros, and where an operand is masked out it is
// not read.
#pragma once

#include "mittens/tile.h"
#include "params/matmul.h"

namespace mittens {

// The mask of an operand for some block of rows of x, or of outputs. scaled: of numbers.
template <typename T, bool scaled>
struct BlockMask {
  const device uchar* bytes;
  uint first;
  uint stride;  // elements between blocks of columns of x

  static BlockMask of(const device uchar* mask, constant BlockMaskParams& params, uint matrix, uint block) {
    return {mask, matrix * params.matrix_stride + block * params.across_stride, params.columns_stride};
  }

  // The factor of a block of columns.
  float at(uint block) const {
    const uint index = first + block * stride;
    if constexpr (scaled) {
      return float(((const device T*)bytes)[index]);
    } else {
      return bytes[index];
    }
  }
};

// The factor of a block of y.
template <typename T>
struct MaskOfResult {
  const device uchar* bytes;
  uint index;
  bool is_bool;

  static MaskOfResult of(
      const device uchar* mask, constant BlockMaskedParams& params, uint matrix, uint row_block, uint output_block) {
    const uint index = matrix * params.of_y.matrix_stride + row_block * params.of_y.across_stride +
                       output_block * params.of_y.columns_stride;
    return {mask, index, params.has_bools_of_y != 0};
  }

  float value() const {
    return is_bool ? float(bytes[index]) : float(((const device T*)bytes)[index]);
  }
};

// The columns of x for one block of y, as tiles ask for them (matmul/apple/qmm_tiles.h).
template <typename T, bool scaled>
struct MaskedColumns {
  static constant constexpr bool are_scaled = scaled || is_same_v<T, float>;
  uint end;
  BlockMask<T, scaled> of_x;
  BlockMask<T, scaled> of_w;
  MaskOfResult<T> of_y;
  uint shift;

  static MaskedColumns of(
      const device uchar* mask_of_x, const device uchar* mask_of_w, const device uchar* mask_of_y, uint matrix,
      uint row, uint output, constant BlockMaskedParams& params) {
    const uint shift = params.block_shift;
    MaskedColumns result;
    result.shift = shift;
    result.of_x = BlockMask<T, scaled>::of(mask_of_x, params.of_x, matrix, row >> shift);
    result.of_w = BlockMask<T, scaled>::of(mask_of_w, params.of_w, matrix, output >> shift);
    result.of_y = MaskOfResult<T>::of(mask_of_y, params, matrix, row >> shift, output >> shift);
    result.end = result.of_y.value() != 0.0f ? params.columns : 0;
    return result;
  }

  static uint begin() {
    return 0;
  }
  static bool are_parts() {
    return false;
  }

  // Whether the block that a column lies in is multiplied.
  bool has(uint column) const {
    return of_x.at(column >> shift) != 0.0f && of_w.at(column >> shift) != 0.0f;
  }

  uint next(uint column) const {
    while (column < end) {
      const uint block = column >> shift;
      const bool is_inside = column != block << shift;  // of a block that was found to be multiplied
      if (is_inside || has(column)) {
        break;
      }
      column = (block + 1) << shift;
    }
    return column;
  }

  float scale(uint column) const {
    return of_x.at(column >> shift) * of_w.at(column >> shift);
  }

  template <int R, int C>
  void finish(thread Tile<float, R, C>& sums) const {
    multiply(sums, of_y.value());
  }
};

// The first row of a threadgroup of tiles, and elements to it.
struct MaskedPlace {
  uint matrix;
  uint first_row;
  size_t of_x;
  size_t of_w;
  size_t of_y;

  static MaskedPlace of(uint3 group, uint rows, constant BlockMaskedParams& params) {
    MaskedPlace result;
    result.matrix = group.z % params.matrices;
    result.first_row = (group.z / params.matrices * kTileBand + group.x) * rows;
    const size_t before = size_t(result.matrix) * params.rows + result.first_row;
    result.of_x = (params.has_one_x ? result.first_row : before) * params.columns;
    result.of_w = params.has_one_w ? 0 : size_t(result.matrix) * params.matrix_elements;
    result.of_y = before * params.outputs;
    return result;
  }
};

}  // namespace mittens
