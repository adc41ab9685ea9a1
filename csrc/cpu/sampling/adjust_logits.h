// Penalties and a mask of logits on the CPU; metal/sampling/adjust.h has the steps.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

struct LogitPenalty {
  size_t context;  // how many last tokens count; 0 where there is no penalty
  size_t step;  // from a row's number to the next one's: 0 where all rows share it
  const float* numbers;  // null where all rows have the value
  float value;
};

struct Adjustment {
  const uint32_t* tokens;
  size_t count;  // of a row
  size_t words;  // of a token
  size_t token_step;  // from the tokens of a row to the next one's: 0 where all rows share them
  const uint32_t* mask;  // null where there is none
  size_t mask_step;  // words from the mask of a row to the next one's
  LogitPenalty repetition, presence, frequency;
};

// x [rows, columns] -> y [rows, columns]. counts [rows, columns] is memory to count tokens in.
void adjust_logits(Type type, const void* x, void* y, uint32_t* counts, size_t rows, size_t columns,
                   const Adjustment& adjustment);

}  // namespace mittens::cpu
