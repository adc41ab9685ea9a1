// Attention's arguments as the native code takes them.
#include <bit>

#include "ops/attention/attention.h"
#include "runtime/cpu_types.h"

namespace mittens {

namespace {

cpu::AttentionView native_view(const mx::array& array) {
  return {data_of(array), array.strides(0), array.strides(1), array.strides(2)};
}

cpu::AttentionRows native_rows(const Arrays& inputs, size_t first, const AttentionOptions& options) {
  if (!options.bits) {
    return {native_view(inputs[first]), {}, {}, 0, 0};
  }
  return {native_view(inputs[first]), native_view(inputs[first + 1]), native_view(inputs[first + 2]), options.bits,
          options.group_size};
}

}  // namespace

cpu::Attention native_attention(const Arrays& inputs, const AttentionOptions& options) {
  const size_t first_value = options.bits ? 4 : 2;
  const mx::array& q = inputs[0];
  const mx::Shape keys = unpacked(inputs[1], options.bits);
  size_t next = options.bits ? 7 : 3;
  cpu::Attention call{};
  call.type = native_type(q.dtype());
  call.batch = q.shape(0);
  call.heads = q.shape(1);
  call.key_heads = keys[1];
  call.queries = q.shape(2);
  call.keys = keys[2];
  call.width = q.shape(3);
  call.value_width = unpacked(inputs[first_value], options.bits)[3];
  call.q = native_view(q);
  call.k = native_rows(inputs, 1, options);
  call.v = native_rows(inputs, first_value, options);
  if (options.has_mask) {
    const mx::array& mask = inputs[next++];
    call.mask = {mask.dtype() == mx::bool_ ? cpu::MaskKind::boolean : cpu::MaskKind::additive, native_view(mask),
                 mask.strides(3)};
  }
  call.sinks = options.has_sinks ? data_of(inputs[next]) : nullptr;
  if (options.is_paged) {
    const mx::array& table = inputs.back();
    call.keys *= table.shape(1);
    call.table = {table.data<int32_t>(), static_cast<size_t>(table.shape(1)), static_cast<size_t>(table.strides(0)),
                  static_cast<size_t>(inputs[1].shape(0)),
                  static_cast<unsigned>(std::countr_zero(static_cast<uint32_t>(keys[2])))};
  }
  call.scale = options.scale;
  call.causal = options.causal;
  call.window = options.window;
  call.exact = options.exact;
  return call;
}

cpu::RaggedKeys native_keys(const Arrays& inputs, const AttentionOptions& options) {
  cpu::RaggedKeys keys{};
  if (options.is_paged) {
    keys.ends = inputs.end()[-2].data<int32_t>();
    return keys;
  }
  if (options.has_starts) {
    const mx::array& starts = inputs[inputs.size() - 1 - options.has_ends];
    keys.starts = starts.data<int32_t>();
    keys.has_query_starts = starts.ndim() == 2;
  }
  keys.ends = options.has_ends ? inputs.back().data<int32_t>() : nullptr;
  return keys;
}

}  // namespace mittens
