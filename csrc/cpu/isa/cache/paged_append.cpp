#include "cpu/cache/paged_append.h"

#include "cpu/isa/cache/quantize_group.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

template <typename U>
U* row_of(const PoolRows& rows, int64_t block, size_t head, size_t within) {
  return static_cast<U*>(rows.data) + block * rows.strides[0] + static_cast<int64_t>(head) * rows.strides[1] +
         static_cast<int64_t>(within) * rows.strides[2];
}

template <typename T>
void put(const PagedAppend& call, const T* from, size_t width, const Pool& pool, int64_t block, size_t head,
         size_t within) {
  if (call.bits == 0) {
    __builtin_memcpy(row_of<T>(pool.rows, block, head, within), from, width * sizeof(T));
    return;
  }
  uint32_t* const words = row_of<uint32_t>(pool.rows, block, head, within);
  T* const scales = row_of<T>(pool.scales, block, head, within);
  T* const biases = row_of<T>(pool.biases, block, head, within);
  for (size_t group = 0; group < width / call.group_size; ++group) {
    quantize_group(from + group * call.group_size, call.group_size, call.bits,
                   words + group * call.group_size * call.bits / 32, scales + group, biases + group);
  }
}

template <typename T>
void append_token(const PagedAppend& call, size_t batch, size_t token) {
  const int64_t at = static_cast<int64_t>(call.positions[batch]) + static_cast<int64_t>(token);
  const size_t entry = static_cast<size_t>(at >> call.block_shift);
  if (at < 0 || entry >= call.table_entries) {
    return;
  }
  const int64_t block = call.table[batch * call.table_row + entry];
  if (block < 0 || static_cast<size_t>(block) >= call.blocks) {
    return;
  }
  const size_t within = static_cast<size_t>(at) & ((size_t(1) << call.block_shift) - 1);
  const auto source = [&](const Heads& heads, size_t head) {
    return static_cast<const T*>(heads.data) + static_cast<int64_t>(batch) * heads.strides[0] +
           static_cast<int64_t>(head) * heads.strides[1] + static_cast<int64_t>(token) * heads.strides[2];
  };
  for (size_t head = 0; head < call.key_heads; ++head) {
    put(call, source(call.new_keys, head), call.width, call.keys, block, head, within);
    put(call, source(call.new_values, head), call.value_width, call.values, block, head, within);
  }
}

}  // namespace

void paged_append(const PagedAppend& call) {
  for (size_t batch = 0; batch < call.batch; ++batch) {
    call.lengths[batch] =
        static_cast<int32_t>(static_cast<uint32_t>(call.positions[batch]) + static_cast<uint32_t>(call.tokens));
  }
  with_type(call.type, [&](auto t) {
    using T = decltype(t);
    const size_t bytes = call.key_heads * (call.width + call.value_width) * sizeof(T) + 1;
    parallel_for(call.batch * call.tokens, serial_bytes / bytes + 1, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        append_token<T>(call, i / call.tokens, i % call.tokens);
      }
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
