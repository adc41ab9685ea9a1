#include "cpu/attention/ragged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/heap.h"
#include "cpu/parallel.h"

namespace mittens::cpu {

namespace {

size_t size_of(Type type) {
  return type == Type::float32 ? 4 : 2;
}

float value_of(Type type, const void* values, size_t i) {
  if (type == Type::float32) {
    return static_cast<const float*>(values)[i];
  }
  const uint32_t bits = static_cast<const uint16_t*>(values)[i];
  if (type == Type::bfloat16) {
    const uint32_t wide = bits << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) {
    return fraction ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  return sign * (exponent ? std::ldexp(float(1024 + fraction), exponent - 25) : std::ldexp(float(fraction), -24));
}

void move_to(AttentionView& view, size_t bytes, int64_t elements) {
  view.data = static_cast<const char*>(view.data) + elements * static_cast<int64_t>(bytes);
}

// Queries [first, last) of a row of the batch, and its keys [begin, end).
struct Part {
  size_t batch;
  size_t first;
  size_t last;
  int64_t begin;
  int64_t end;
};

AttentionRows rows_from(const AttentionRows& rows, Type type, const Part& part, const BlockTable& table) {
  AttentionRows moved = rows;
  if (table.entries) {
    return moved;  // the part has its own row of the table
  }
  const auto move = [&](AttentionView& view, size_t bytes) {
    move_to(view, bytes, static_cast<int64_t>(part.batch) * view.batch + part.begin * view.row);
  };
  move(moved.rows, rows.bits ? sizeof(uint32_t) : size_of(type));
  if (rows.bits) {
    move(moved.scales, size_of(type));
    move(moved.biases, size_of(type));
  }
  return moved;
}

BlockTable table_of(const Attention& call, size_t batch) {
  BlockTable table = call.table;
  table.entries = table.entries ? table.entries + batch * table.row : nullptr;
  return table;
}

// Whether the pool has the blocks of all keys that the part sees.
bool has_blocks(const Attention& call, const Part& part) {
  const int64_t queries = static_cast<int64_t>(part.last - part.first);
  const int64_t begin = call.window ? std::max<int64_t>(part.end - queries + 1 - call.window, 0) : 0;
  const BlockTable table = table_of(call, part.batch);
  for (int64_t key = begin; key < part.end; key = ((key >> table.shift) + 1) << table.shift) {
    if (!table.has(static_cast<size_t>(key >> table.shift))) {
      return false;
    }
  }
  return true;
}

// The call of a part, whose results go to `y` and `logsumexp`.
Attention call_of(const Attention& call, const Part& part, void* y, float* logsumexp) {
  Attention own = call;
  const size_t bytes = size_of(call.type);
  own.batch = 1;
  own.queries = part.last - part.first;
  own.keys = static_cast<size_t>(part.end - part.begin);
  move_to(own.q, bytes,
          static_cast<int64_t>(part.batch) * call.q.batch + static_cast<int64_t>(part.first) * call.q.row);
  own.k = rows_from(call.k, call.type, part, call.table);
  own.v = rows_from(call.v, call.type, part, call.table);
  own.table = table_of(call, part.batch);
  if (call.mask.kind != MaskKind::none) {
    AttentionView& mask = own.mask.values;
    move_to(mask, call.mask.kind == MaskKind::boolean ? 1 : bytes,
            static_cast<int64_t>(part.batch) * mask.batch + static_cast<int64_t>(part.first) * mask.row +
                part.begin * call.mask.column);
  }
  own.y = y;
  own.logsumexp = logsumexp;
  return own;
}

char* row_of(const Attention& call, size_t batch, size_t head, size_t query) {
  const size_t index = (batch * call.heads + head) * call.queries + query;
  return static_cast<char*>(call.y) + index * call.value_width * size_of(call.type);
}

// Results of rows that no key is added up for: 0, or NaN.
void write_all(const Attention& call, const Part& part, bool is_nan) {
  const size_t bytes = size_of(call.type), count = (part.last - part.first) * call.value_width;
  for (size_t head = 0; head < call.heads; ++head) {
    char* const y = row_of(call, part.batch, head, part.first);
    if (!is_nan) {
      std::memset(y, 0, count * bytes);
    } else if (call.type == Type::float32) {
      std::fill_n(reinterpret_cast<float*>(y), count, std::numeric_limits<float>::quiet_NaN());
    } else {
      std::fill_n(reinterpret_cast<uint16_t*>(y), count, uint16_t(call.type == Type::float16 ? 0x7e00 : 0x7fc0));
    }
    if (call.logsumexp) {
      const float none = call.sinks ? value_of(call.type, call.sinks, head) : -std::numeric_limits<float>::infinity();
      std::fill_n(call.logsumexp + (part.batch * call.heads + head) * call.queries + part.first, part.last - part.first,
                  is_nan ? std::numeric_limits<float>::quiet_NaN() : none);
    }
  }
}

void run(const Attention& call, const Part& part) {
  if (part.begin >= part.end) {
    return write_all(call, part, false);
  }
  const auto attend = attention_here();
  float* const logsumexp = call.logsumexp ? call.logsumexp + part.batch * call.heads * call.queries : nullptr;
  if (part.last - part.first == call.queries) {
    return attend(call_of(call, part, row_of(call, part.batch, 0, 0), logsumexp));
  }
  // The results of some queries lie apart, head by head.
  const size_t queries = part.last - part.first, bytes = queries * call.value_width * size_of(call.type);
  std::vector<char> y(call.heads * bytes);
  std::vector<float> sums(call.logsumexp ? call.heads * queries : 0);
  attend(call_of(call, part, y.data(), call.logsumexp ? sums.data() : nullptr));
  for (size_t head = 0; head < call.heads; ++head) {
    std::memcpy(row_of(call, part.batch, head, part.first), y.data() + head * bytes, bytes);
    if (logsumexp) {
      std::copy_n(sums.data() + head * queries, queries, logsumexp + head * call.queries + part.first);
    }
  }
}

void run_row(const Attention& call, const RaggedKeys& keys, size_t batch) {
  const int64_t count = static_cast<int64_t>(call.keys), queries = static_cast<int64_t>(call.queries);
  const auto is_key = [&](int64_t at) { return at >= 0 && at <= count; };
  const int64_t end = keys.ends ? keys.ends[batch] : count;
  const auto start = [&](size_t query) -> int64_t {
    return !keys.starts ? 0 : keys.has_query_starts ? keys.starts[batch * call.queries + query] : keys.starts[batch];
  };
  for (size_t first = 0, last; first < call.queries; first = last) {
    const int64_t begin = start(first);
    for (last = first + 1; last < call.queries && start(last) == begin;) {
      ++last;
    }
    Part part{batch, first, last, begin, end};
    if (!is_key(begin) || !is_key(end)) {
      write_all(call, part, true);
      continue;
    }
    const auto seen_end = [&](size_t query) {
      return call.causal || call.window ? end - (queries - static_cast<int64_t>(query)) : end;
    };
    part.end = seen_end(last);
    if (!call.table.entries || has_blocks(call, part)) {
      run(call, part);
      continue;
    }
    for (part.first = first; part.first < last; ++part.first) {
      part.last = part.first + 1;
      part.end = seen_end(part.last);
      has_blocks(call, part) ? run(call, part) : write_all(call, part, true);
    }
  }
}

}  // namespace

void ragged_attention(const Attention& call, const RaggedKeys& keys) {
  give_back_after_growth(call.queries, call.keys);
  parallel_for(call.batch, 1, [&](size_t begin, size_t end) {
    for (size_t batch = begin; batch < end; ++batch) {
      run_row(call, keys, batch);
    }
  });
}

}  // namespace mittens::cpu
