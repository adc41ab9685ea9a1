#include "cpu/moe/route_top_k.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cpu/isa/row_op.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

// NaN stays NaN, in the vectors and in the sum of their exponentials.
void softmax_in_place(float* values, size_t n) {
  float most = -__builtin_inff();
  for (size_t i = 0; i < n; ++i) {
    most = values[i] > most ? values[i] : most;
  }
  float sum = 0;
  each_vector(n, [&](size_t i, auto part)
                     MITTENS_INLINED { write(values + i, exp(read<Float>(values + i, part) - most), part); });
  for (size_t i = 0; i < n; ++i) {
    sum += values[i];
  }
  for (size_t i = 0; i < n; ++i) {
    values[i] /= sum;
  }
}

// The sum of the two largest keys of a group; NaN if one is.
float sum_of_two(const float* keys, size_t n) {
  float first = -__builtin_inff(), second = first;
  for (size_t i = 0; i < n; ++i) {
    if (keys[i] != keys[i]) {
      return keys[i];
    }
    second = std::max(second, std::min(first, keys[i]));
    first = std::max(first, keys[i]);
  }
  return first + second;
}

void drop_groups(const Route& route, float* keys, size_t experts) {
  const auto groups = static_cast<size_t>(route.groups);
  const size_t size = experts / groups;
  const Scratch memory(2 * groups);
  float* sums = memory.data();
  auto* order = reinterpret_cast<uint32_t*>(sums + groups);
  for (size_t g = 0; g < groups; ++g) {
    sums[g] = sum_of_two(keys + g * size, size);
  }
  std::iota(order, order + groups, 0u);
  std::sort(order, order + groups, [=](uint32_t a, uint32_t b) {
    const bool nan_a = sums[a] != sums[a], nan_b = sums[b] != sums[b];
    if (nan_a != nan_b) {
      return nan_b;
    }
    return sums[a] == sums[b] || nan_a ? a < b : sums[a] < sums[b];
  });
  for (size_t g = 0; g < groups - static_cast<size_t>(route.kept); ++g) {
    std::fill_n(keys + order[g] * size, size, route.dropped);
  }
}

// The k experts that come first by their keys.
void choose(const float* keys, bool descending, uint32_t* order, size_t experts, size_t k) {
  std::iota(order, order + experts, 0u);
  const auto number = [](float key) { return key == key; };
  const auto before = [=](uint32_t a, uint32_t b) {
    if (number(keys[a]) != number(keys[b])) {
      return number(keys[a]) == descending;
    }
    if (keys[a] != keys[b] && number(keys[a])) {
      return keys[a] > keys[b];
    }
    return descending ? a < b : a > b;
  };
  std::partial_sort(order, order + k, order + experts, before);
  if (!descending) {
    std::reverse(order, order + k);
  }
}

template <typename T>
void route_row(const Route& route, const T* logits, const float* bias, uint32_t* indices, T* weights, size_t experts,
               size_t k, float* memory) {
  float* scores = memory;
  float* keys = memory + experts;
  float* chosen = keys + experts;
  auto* order = reinterpret_cast<uint32_t*>(chosen + k);
  each_vector(experts,
              [&](size_t i, auto part) MITTENS_INLINED { write(scores + i, load_in_order(logits + i, part), part); });
  if (route.scores == Scores::softmax) {
    softmax_in_place(scores, experts);
  } else if (route.scores == Scores::sigmoid) {
    each_vector(experts, [&](size_t i, auto part) MITTENS_INLINED {
      const Float x = read<Float>(scores + i, part);
      write(scores + i, 1.0f / (exp(-x) + 1.0f), part);
    });
  }
  for (size_t i = 0; route.scores == Scores::sqrtsoftplus && i < experts; ++i) {
    const float x = scores[i];
    scores[i] = std::sqrt((x < 0 ? 0.0f : x) + std::log1p(std::exp(-std::abs(x))));
  }
  // Rounded to the type, as mx's scores mostly are where experts are chosen by them.
  T* rounded = reinterpret_cast<T*>(order + experts);
  each_vector(experts, [&](size_t i, auto part) MITTENS_INLINED {
    const Float score = read<Float>(scores + i, part);
    store_in_order(rounded + i, score, part);
    write(keys + i, route.precise ? score : load_in_order(rounded + i, part), part);
  });
  for (size_t i = 0; bias && i < experts; ++i) {
    keys[i] += bias[i];
  }
  if (route.kept < route.groups) {
    drop_groups(route, keys, experts);
  }
  choose(keys, route.descending, order, experts, k);
  for (size_t i = 0; i < k; ++i) {
    indices[i] = order[i];
    chosen[i] = scores[order[i]];
  }
  float factor = route.scale;
  if (route.scores == Scores::chosen) {
    softmax_in_place(chosen, k);
  } else if (route.renormalize) {
    float sum = route.eps;
    for (size_t i = 0; i < k; ++i) {
      sum += chosen[i];
    }
    factor /= sum;
  }
  each_vector(k, [&](size_t i, auto part)
                     MITTENS_INLINED { store_in_order(weights + i, read<Float>(chosen + i, part) * factor, part); });
}

}  // namespace

void route_top_k(Type type, const Route& route, const void* logits, const float* bias, uint32_t* indices, void* weights,
                 size_t rows, size_t experts, size_t k) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    parallel_for(rows, ceil_divide(4096, experts), [&](size_t begin, size_t end) {
      const Scratch memory(4 * experts + k);
      for (size_t row = begin; row < end; ++row) {
        route_row(route, (const T*)logits + row * experts, bias, indices + row * k, (T*)weights + row * k, experts, k,
                  memory.data());
      }
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
