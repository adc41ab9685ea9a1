// GGUF blocks: their kinds, and the ops that make and unpack them.
#pragma once

#include <string>

#include "cpu/matmul/gguf.h"
#include "mlx/utils.h"
#include "runtime/primitive.h"

namespace mittens {

const char* block_kind_name(cpu::BlockKind kind);

// Throws for a name that stands for no kind.
cpu::BlockKind block_kind(const char* op, const std::string& name);

// Throws unless blocks are bytes, and a row of them a whole number of blocks.
void check_blocks(const char* op, const mx::array& blocks, cpu::BlockKind kind);

// blocks uint8 [.., bytes of a row] -> [.., columns] of dtype.
mx::array block_dequantize(const mx::array& blocks, const std::string& kind, mx::Dtype dtype, mx::StreamOrDevice where);

// w [.., columns] -> uint8 [.., bytes of a row].
mx::array block_quantize(const mx::array& w, const std::string& kind, mx::StreamOrDevice where);

}  // namespace mittens
