// Parameters of the mixtures of experts. Compiled by C++ and by Metal.
#pragma once

#include "params/matmul.h"

namespace mittens {

// The pairs of a launch, one for each place of the grid's third dimension.
struct PairParams {
  uint32_t matrices;  // that there are
  uint32_t inputs;    // that there are
  uint32_t pairs_per_input;
  uint32_t has_inputs;  // whether pairs name theirs
};

enum { kMostSummed = 16 };  // pairs of a sum, each with a simdgroup of the threadgroup

// Weights of a sum: none, in float32, or of the type of x.
enum { kNoWeights, kWideWeights, kWeightsOfX };

struct GatherQmmParams {
  QuantizedParams weights;  // matrices: pairs; rows: of an input; has_bias: of each output of each matrix
  PairParams pairs;
  uint32_t pairs_per_sum;  // as many simdgroups share outputs where there are weights, else 1
  uint32_t weights_of_sum;
  float limit;  // of the gated product, from here on; infinity: none
  float offset;
};

// Threads of moe/apple/expert_tiles.metal, each with an expert; one has the pairs that are out of range.
enum { kTiledExperts = 1024 };

struct ExpertTilesParams {
  PairParams pairs;
  uint32_t rows;       // of all pairs
  uint32_t pair_rows;  // of each
  uint32_t tile_rows;
  uint32_t tiles;  // that there is room for
};

struct RowSumsParams {
  uint32_t chosen;   // rows of a sum
  uint32_t outputs;  // of a row
  uint32_t packs;    // whether rows are whole packs
  uint32_t weights_of_sum;
};

enum { kGatherOutputs = 4 };  // of a simdgroup

struct GatherMmParams {
  PairParams pairs;
  int64_t matrix_stride;  // elements from matrix to matrix
  uint32_t row_stride;    // from output to output
  uint32_t rows;          // of an input
  uint32_t columns;
  uint32_t outputs;
  uint32_t packs;  // whether rows are whole packs, each on a boundary of 16 bytes
};

enum { kMostExperts = 512, kMostChosen = 32, kMostGroups = 32 };  // of a router

enum { kScoresSoftmax, kScoresSigmoid, kScoresChosen, kScoresSqrtSoftplus };

// Addend of mlx-lm's routers to the sum of renormalized weights.
constexpr float least_sum() {
  return 1e-20f;
}

struct RouteParams {
  uint32_t experts;
  uint32_t k;
  uint32_t scores;
  uint32_t renormalize;
  uint32_t descending;
  uint32_t has_bias;
  float scale;
  // From here on Apple kernels read them, NVIDIA's do not.
  uint32_t precise;  // whether keys are of scores in float32
  float eps;         // that is added to the sum of renormalized weights
  uint32_t groups;   // of experts
  uint32_t kept;     // groups whose experts keep their keys
  float dropped;     // the key of the others
};

struct MixtureParams {
  GatherQmmParams experts;  // pairs_per_sum: places of a token, the shared expert's last
  RouteParams route;
};

}  // namespace mittens
