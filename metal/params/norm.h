// Parameters of the norms and of softmax. Compiled by C++ and by Metal.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mittens {

// Packs that a thread takes at once of a row which a threadgroup loops over. More keep more loads in flight; on Apple
// GPUs two threadgroups fit a core with one, where their registers leave room for one with two.
constexpr int looped_packs(bool is_nvidia) {
  return is_nvidia ? 4 : 1;
}

// The geometry of every row kernel.
struct RowParams {
  uint32_t rows;
  uint32_t columns;
  uint32_t splits;           // threadgroups that share a row, 1 unless the row is split
  uint32_t packs_per_split;  // 16-byte packs each of them takes
  uint32_t whole;            // every row of every array starts on a 16-byte boundary and fills packs
};

// Of an op along rows (metal/mittens/row_op.h). A phase counts elements between the last 16-byte boundary and the start
// of an array.
struct RowOpParams {
  RowParams row;
  uint32_t row_phases[4];     // of inputs [rows, columns]
  uint32_t weight_phases[2];  // of inputs [columns]
  uint32_t has_weights[2];
  float weight_offsets[2];  // added to the weights
  uint32_t y_phases[2];     // of results [rows, columns]
  float eps;
};

// Rows [outer, middle, inner, columns], by strides in elements; columns have stride 1.
struct HeadRows {
  int64_t strides[3];
  uint32_t middle;
  uint32_t inner;
  uint32_t rows;  // outer * middle * inner
  uint32_t phase;
};

struct QkNormParams {
  RowParams row;  // of an array of one row
  HeadRows queries;
  HeadRows keys;
  uint32_t query_weight_phase;
  uint32_t key_weight_phase;
  uint32_t query_output_phase;
  uint32_t key_output_phase;
  uint32_t has_query_weight;
  uint32_t has_key_weight;
  float eps;
  float weight_offset;  // added to the weights
};

struct SoftcapParams {
  uint64_t size;
  uint32_t x_phase;
  uint32_t y_phase;
  float cap;
};

struct SoftcapVjpParams {
  uint64_t size;
  uint32_t x_phase;
  uint32_t dy_phase;
  uint32_t dx_phase;
  float cap;
};

// A kernel's share of the gradients of rms_norm and layer_norm.
struct NormVjpParams {
  RowOpParams arrays;  // x, dy, and dsum at 3; weight; dx
  uint32_t blocks;     // threadgroups along the rows: block b takes rows b, b + blocks, ...
  uint32_t has_dsum;
  uint32_t partial_sums;  // of the parameters' gradients, written to partials: 0, 1 (weight) or 2 (and bias)
};

struct ColumnSumParams {
  uint32_t blocks;
  uint32_t columns;
  uint32_t first;  // 0 where dweight is wanted, 1 where only dbias is
};

}  // namespace mittens
