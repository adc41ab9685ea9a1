// Parameters of sampling. Compiled by C++ and by Metal.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mittens {

enum {
  kSampleThreads = 512,  // of a threadgroup, at most
  kSamplePartial = 5,    // numbers that a threadgroup leaves of its part of a row
};

// The logarithmic probabilities that are wanted.
enum { kNoLogprobs, kTokenLogprobs, kAllLogprobs };

struct SampleParams {
  uint32_t columns;
  uint32_t size;  // logits of all rows
  uint32_t phase;
  uint32_t splits;           // threadgroups that share a row, 1 unless the row is split
  uint32_t packs_per_split;  // 16-byte packs each of them takes
  uint32_t greedy;
  uint32_t splits_key;  // whether numbers are drawn by the second half of the key's split
  uint32_t logprobs;
  uint32_t top_k;  // 0 keeps all
  uint32_t top_p;  // in units of 2^-32; 0 keeps all
  uint32_t has_min_p;
  float log_min_p;  // rounded to the type of the logits
  float inverse_temperature;
};

// A penalty for tokens that are among the last ones of a row.
struct PenaltyParams {
  uint32_t context;   // how many last tokens count; 0 where there is no penalty
  uint32_t step;      // from a row's number to the next one's: 0 where all rows share it
  uint32_t is_given;  // whether the numbers are in an array
  float value;        // the number where they are not, rounded to the type of the logits
};

// Changes to logits before anything else.
struct AdjustParams {
  uint32_t columns;
  uint32_t phase;
  uint32_t splits;  // threadgroups that share a row
  uint32_t packs_per_split;
  uint32_t tokens;       // of a row
  uint32_t token_step;   // from the tokens of a row to the next one's: 0 where all rows share them
  uint32_t token_words;  // 32-bit words of a token
  uint32_t context;      // the last tokens that any penalty counts
  uint32_t has_mask;
  uint32_t mask_step;  // words from the mask of a row to the next one's
  PenaltyParams repetition;
  PenaltyParams presence;
  PenaltyParams frequency;
};

struct AdjustedSampleParams {
  AdjustParams adjust;
  SampleParams sample;
};

}  // namespace mittens
