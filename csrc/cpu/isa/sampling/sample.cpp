// The steps of metal/sampling/sample.metal; its mathematics are here operation for operation, so that a key draws the
// same tokens (but for sums that differ in their last bits where there is no fused multiply-add).
#include "cpu/sampling/sample.h"

#include "cpu/isa/row_op.h"
#include "cpu/isa/sampling/log_softmax.h"
#include "cpu/isa/sampling/rounding.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

constexpr uint32_t no_column = 0xffffffff;
constexpr size_t most_blocks = 512;  // of a row, whose maxima bound the thresholds
constexpr float most_gumbel = 16.636f;

// ---- random numbers ----

struct Words {
  UInt x, y;
};

template <int a, int b, int c, int d>
MITTENS_INLINE void rounds(Words& w) {
  w.x += w.y;
  w.y = (w.y << a | w.y >> (32 - a)) ^ w.x;
  w.x += w.y;
  w.y = (w.y << b | w.y >> (32 - b)) ^ w.x;
  w.x += w.y;
  w.y = (w.y << c | w.y >> (32 - c)) ^ w.x;
  w.x += w.y;
  w.y = (w.y << d | w.y >> (32 - d)) ^ w.x;
}

struct Key {
  uint32_t x, y;
};

MITTENS_INLINE Words threefry(Key key, Words w) {
  const uint32_t third = key.x ^ key.y ^ 0x1bd11bda;
  w = {w.x + key.x, w.y + key.y};
  rounds<13, 15, 26, 6>(w);
  w = {w.x + key.y, w.y + (third + 1)};
  rounds<17, 29, 16, 24>(w);
  w = {w.x + third, w.y + (key.x + 2)};
  rounds<13, 15, 26, 6>(w);
  w = {w.x + key.x, w.y + (key.y + 3)};
  rounds<17, 29, 16, 24>(w);
  w = {w.x + key.y, w.y + (third + 4)};
  rounds<13, 15, 26, 6>(w);
  return {w.x + third, w.y + (key.x + 5)};
}

// The 32 bits that mx.random draws for the elements i of an array of `size` elements.
MITTENS_INLINE UInt random_bits(Key key, UInt i, uint32_t size) {
  const uint32_t half_size = size / 2;
  const uint32_t ahead = half_size + size % 2;
  const UInt is_second = (UInt)(i >= ahead);
  const UInt is_middle = size % 2 == 1 ? (UInt)(i == half_size) : UInt{};
  const Words bits = threefry(key, {i - (is_second & ahead), (i + (~is_second & ahead)) & ~is_middle});
  return (is_second & bits.y) | (~is_second & bits.x);
}

MITTENS_INLINE Key second_key(Key key) {
  const UInt first = threefry(key, {UInt{}, UInt{} + 2}).y, second = threefry(key, {UInt{} + 1, UInt{} + 3}).y;
  return {first[0], second[0]};
}

MITTENS_INLINE Float gumbel(UInt bits) {
  // In two exact parts and one rounded sum, as there is no conversion of unsigned numbers everywhere.
  const Float high = __builtin_convertvector((Int)(bits >> 16), Float) * 0x1p16f;
  const Float wide = high + __builtin_convertvector((Int)(bits & 0xffff), Float);
  const Float u = minimum(Float{} + 0x1.fffffep-1f, wide * 0x1p-32f);
  return -log(-log(bits == 0 ? Float{} + 0x1p-33f : u));
}

// ---- exponentials in whole units ----

// Of e^d for d <= 0: multiples of 2^22 units, and the rest.
struct Mass {
  Int high, low;

  MITTENS_INLINE void add(Mass other) {
    high += other.high;
    low += other.low;
  }
};
// Columns whose parts add up in 32 bits: 1 is 2^22, so that a lane takes 511 of them.
constexpr size_t mass_block = 256 * width;

MITTENS_INLINE Mass mass_of(Float difference) {
  const Float d = maximum(difference, Float{} - 40.0f);
  const Float shifted = fma(d, Float{} + 0x1.715476p0f, Float{} + 0x1.8p23f);
  const Float n = shifted - 0x1.8p23f;
  Float r = fma(n, Float{} - 0x1.62e4p-1f, d);
  r = fma(n, Float{} - 0x1.7f7d1cp-20f, r);
  Float p = fma(r, 0x1.6a2434p-10f, 0x1.1239e2p-7f);
  p = fma(p, r, Float{} + 0x1.5558f2p-5f);
  p = fma(p, r, Float{} + 0x1.555492p-3f);
  p = fma(p, r, Float{} + 0x1.fffffcp-2f);
  const Float near = fma(p * r, r, r) + 1.0f;
  const Float e = (Float)((UInt)near + ((UInt)shifted << 23));
  const Float high = e + 0x1.8p1f;
  const Float low = (e - (high - 0x1.8p1f)) + 0x1.8p-21f;
  return {(Int)high - 0x40400000, (Int)low - 0x35400000};
}

MITTENS_INLINE int64_t total(Int v) {
  int64_t sum = 0;
  for (size_t i = 0; i < width; ++i) {
    sum += v[i];
  }
  return sum;
}

MITTENS_INLINE uint64_t total(Mass mass) {
  return static_cast<uint64_t>((total(mass.high) << 22) + total(mass.low));
}

// ---- the bits of a logit ----

template <typename T>
constexpr int key_shift = __is_same(T, float)     ? 0
                          : __is_same(T, float16) ? 13
                                                  : 16;

template <typename T>
MITTENS_INLINE uint32_t key_of(float v) {
  uint32_t bits;
  __builtin_memcpy(&bits, &v, sizeof(bits));
  return (bits & 0x80000000 ? ~bits : bits | 0x80000000) >> key_shift<T>;
}

template <typename T>
MITTENS_INLINE float value_of(uint32_t key) {
  const uint32_t ordered = key << key_shift<T>;
  const uint32_t bits = ordered & 0x80000000 ? ordered ^ 0x80000000 : ~ordered & (0xffffffffu << key_shift<T>);
  float v;
  __builtin_memcpy(&v, &bits, sizeof(v));
  return v;
}

// ---- lists of logits ----

// Whole vectors, padded with -inf behind the last logit.
struct List {
  float* values;
  uint32_t* columns;
  size_t count;

  void close() const {
    for (size_t i = count; i < ceil_divide(count, width) * width; ++i) {
      values[i] = -infinity;
      columns[i] = no_column;
    }
  }
};

// How many logits, or how much of the exponentials, are at a value or above, which is not -inf.
uint64_t above(const List& list, float least, float m, bool counts) {
  uint64_t sum = 0;
  for (size_t begin = 0; begin < list.count; begin += mass_block) {
    Mass part{};
    for (size_t i = begin; i < smaller(begin + mass_block, list.count); i += width) {
      const Float v = read<Float>(list.values + i, All());
      const Int here = v >= least;
      const Mass mass = counts ? Mass{Int{}, Int{} + 1} : mass_of(v - m);
      part.add({mass.high & here, mass.low & here});
    }
    sum += total(part);
  }
  return sum;
}

// The largest value at or above which there is as much as is wanted; -inf where all together are less.
template <typename T>
float threshold_of(const List& list, bool counts, uint64_t wanted, float m) {
  float least = infinity;
  for (size_t i = 0; i < list.count; ++i) {
    const float v = list.values[i];
    least = v > -infinity && v < least ? v : least;
  }
  if (least == infinity || above(list, least, m, counts) < wanted) {
    return -infinity;
  }
  uint32_t low = key_of<T>(least), high = key_of<T>(m) + 1;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    (above(list, value_of<T>(middle), m, counts) >= wanted ? low : high) = middle;
  }
  return value_of<T>(low);
}

// The column up to which logits of a value are kept, so that they are as many as are wanted.
uint32_t last_equal(const List& list, float value, uint64_t wanted, uint32_t columns) {
  uint32_t low = 0, high = columns - 1;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    uint64_t count = 0;
    for (size_t i = 0; i < list.count; ++i) {
      count += list.values[i] == value && list.columns[i] <= middle;
    }
    if (count >= wanted) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// ---- drawing ----

struct Best {
  float sum = -infinity;
  uint32_t column = no_column;

  void take(Best other) {
    if (other.sum > sum || (other.sum == sum && other.column < column)) {
      *this = other;
    }
  }
};

struct Drawing {
  bool greedy;
  float inverse_temperature;
  Key key;
  uint32_t first;  // the row's place in the array
  uint32_t size;
};

// The best of each lane.
struct Lanes {
  Float sum = Float{} - infinity;
  UInt column = UInt{} + no_column;

  MITTENS_INLINE void take(Float v, UInt at) {
    const Int is_better = (v > sum) | ((v == sum) & (at < column));
    sum = is_better ? v : sum;
    column = is_better ? at : column;
  }
  MITTENS_INLINE Best best() const {
    Best best;
    for (size_t i = 0; i < width; ++i) {
      best.take({sum[i], column[i]});
    }
    return best;
  }
};

MITTENS_INLINE Float drawn(const Drawing& drawing, Float x, UInt column) {
  const Float noise = gumbel(random_bits(drawing.key, column + drawing.first, drawing.size));
  return fma(x, Float{} + drawing.inverse_temperature, noise);
}

MITTENS_INLINE UInt lanes_from(size_t first) {
  UInt lanes;
  for (size_t i = 0; i < width; ++i) {
    lanes[i] = static_cast<uint32_t>(first + i);
  }
  return lanes;
}

// Over columns of a row. Blocks that no noise can lift to the best one so far are left out.
template <typename T>
Best draw_row(const Drawing& drawing, const T* x, size_t begin, size_t end) {
  constexpr size_t block = 16 * width;
  Lanes lanes;
  float bound = -infinity;
  for (size_t i = begin; i < end; i += block) {
    const size_t size = smaller(block, end - i);
    if (!drawing.greedy) {
      Float most = Float{} - infinity;
      each_vector(size, [&](size_t j, auto part) MITTENS_INLINED {
        const Float v = load_in_order(x + i + j, part);
        if constexpr (__is_same(decltype(part), All)) {
          most = maximum(v, most);
        } else {
          most = maximum(lanes_from(0) < static_cast<uint32_t>(part.n) ? v : Float{} - infinity, most);
        }
      });
      const float largest = reduce(most, [](auto a, auto b) MITTENS_INLINED { return a > b ? a : b; });
      if (fma(Float{} + largest, Float{} + drawing.inverse_temperature, Float{} + most_gumbel)[0] < bound) {
        continue;
      }
    }
    each_vector(size, [&](size_t j, auto part) MITTENS_INLINED {
      const UInt column = lanes_from(i + j);
      Float v = load_in_order(x + i + j, part);
      v = v == v ? v : Float{} - infinity;
      if constexpr (!__is_same(decltype(part), All)) {
        v = lanes_from(0) < static_cast<uint32_t>(part.n) ? v : Float{} - infinity;
      }
      lanes.take(drawing.greedy ? v : drawn(drawing, v, column), column);
    });
    bound = reduce(lanes.sum, [](auto a, auto b) MITTENS_INLINED { return a > b ? a : b; });
  }
  return lanes.best();
}

// ---- rows ----

template <typename T>
struct Sampler {
  const T* x;
  size_t columns;
  const SampleOptions& options;

  // The maxima of blocks of a row.
  size_t block_size() const {
    return ceil_divide(ceil_divide(columns, most_blocks), unit) * unit;
  }
  size_t maxima_of(const T* row, float* maxima) const {
    const size_t block = block_size();
    size_t count = 0;
    for (size_t begin = 0; begin < columns; begin += block) {
      Maxima most;
      each_unit(smaller(block, columns - begin), [&](size_t i, auto part, int k) MITTENS_INLINED {
        most.add(k, filled<T>(load(row + begin + i, part), part, -infinity));
      });
      maxima[count++] = most.total();
    }
    return count;
  }

  uint64_t mass_of_row(const T* row, float m) const {
    uint64_t sum = 0;
    for (size_t begin = 0; begin < columns; begin += mass_block) {
      Mass all{};
      each_vector(smaller(mass_block, columns - begin), [&](size_t i, auto part) MITTENS_INLINED {
        Float v = load_in_order(row + begin + i, part);
        if constexpr (!__is_same(decltype(part), All)) {
          v = lanes_from(0) < static_cast<uint32_t>(part.n) ? v : Float{} - infinity;
        }
        all.add(mass_of(v - m));
      });
      sum += total(all);
    }
    return sum;
  }

  // From the maxima of blocks, each a logit; gathers the candidates.
  Best draw_kept(const T* row, const Drawing& drawing, const float* maxima, size_t blocks, float m,
                 uint64_t mass) const {
    const SampleFilters& filters = options.filters;
    const uint64_t part = filters.top_p;
    const uint64_t wanted = (mass >> 32) * part + ((mass & 0xffffffff) * part >> 32);
    float bound = filters.has_min_p ? round_one<T>(m + filters.log_min_p) : -infinity;
    const List of_blocks{const_cast<float*>(maxima), nullptr, blocks};
    if (wanted > 0) {
      const float v = threshold_of<T>(of_blocks, false, wanted, m);
      bound = v > bound ? v : bound;
    }
    if (filters.top_k > 0) {
      const float v = threshold_of<T>(of_blocks, true, filters.top_k, m);
      bound = v > bound ? v : bound;
    }

    const size_t room = padded(columns);
    const Scratch memory(2 * room);
    List list{memory.data(), reinterpret_cast<uint32_t*>(memory.data() + room), 0};
    alignas(64) float values[width];
    for (size_t b = 0; b < blocks; ++b) {
      if (!(maxima[b] >= bound)) {
        continue;
      }
      const size_t begin = b * block_size(), size = smaller(block_size(), columns - begin);
      each_vector(size, [&](size_t i, auto part) MITTENS_INLINED {
        write(values, load_in_order(row + begin + i, part), All());
        for (size_t j = 0; j < smaller(width, size - i); ++j) {
          list.values[list.count] = values[j];
          list.columns[list.count] = static_cast<uint32_t>(begin + i + j);
          list.count += values[j] >= bound && values[j] > -infinity;
        }
      });
    }
    list.close();

    float least = bound, edge = __builtin_nanf("");
    uint32_t last = no_column;
    if (wanted > 0) {
      const float v = threshold_of<T>(list, false, wanted, m);
      least = v > least ? v : least;
    }
    if (filters.top_k > 0) {
      const float v = threshold_of<T>(list, true, filters.top_k, m);
      if (v > -infinity && v >= least) {
        least = v;
        const uint64_t all = above(list, v, m, true);
        if (all > filters.top_k) {
          uint64_t ties = 0;
          for (size_t i = 0; i < list.count; ++i) {
            ties += list.values[i] == v;
          }
          edge = v;
          last = last_equal(list, v, ties - (all - filters.top_k), static_cast<uint32_t>(columns));
        }
      }
    }
    Lanes lanes;
    for (size_t i = 0; i < list.count; i += width) {
      const Float v = read<Float>(list.values + i, All());
      const UInt column = read<UInt>(list.columns + i, All());
      const Int kept = (v >= least) & ~((v == edge) & (column > last));
      lanes.take(kept ? drawn(drawing, v, column) : Float{} - infinity, column);
    }
    return lanes.best();
  }
};

}  // namespace

void sample(Type type, const void* x, const uint32_t* key, uint32_t* tokens, float* logprobs, void* all, size_t rows,
            size_t columns, const SampleOptions& options) {
  Key drawn_by{0, 0};
  if (!options.greedy) {
    drawn_by = options.splits_key ? second_key({key[0], key[1]}) : Key{key[0], key[1]};
  }
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const Sampler<T> sampler{(const T*)x, columns, options};
    const bool filters = options.filters.any();
    constexpr size_t piece = 8 * column_block;  // of a row, for one thread at a time
    const size_t pieces = filters || rows >= threads() ? 1 : ceil_divide(columns, piece);
    const auto drawing_of = [&](size_t row) {
      return Drawing{options.greedy, options.inverse_temperature, drawn_by, static_cast<uint32_t>(row * columns),
                     static_cast<uint32_t>(rows * columns)};
    };
    const auto finish = [&](size_t row, Best best, float m, uint64_t mass) {
      const T* values = sampler.x + row * columns;
      tokens[row] = best.column == no_column ? 0 : best.column;
      if (logprobs) {
        const float logit = widen_one<T>(values, tokens[row]);
        const float sum = static_cast<float>(static_cast<double>(mass) * 0x1p-44);
        logprobs[row] = mass == 0 ? __builtin_nanf("") : ((logit == logit ? logit : -infinity) - m) - log(sum);
      }
    };
    const bool needs_maxima = filters || logprobs;
    const Scratch memory(pieces > 1 ? 2 * rows * pieces : 0);
    Best* bests = reinterpret_cast<Best*>(memory.data());
    if (pieces > 1) {
      parallel_for(rows * pieces, 1, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
          const size_t row = i / pieces, from = i % pieces * piece;
          bests[i] = draw_row(drawing_of(row), sampler.x + row * columns, from, smaller(from + piece, columns));
        }
      });
    }
    const size_t grain = rows * columns * sizeof(T) <= serial_bytes / 4 ? rows : 1;
    parallel_for(rows, grain, [&](size_t begin, size_t end) {
      for (size_t row = begin; row < end; ++row) {
        const T* values = sampler.x + row * columns;
        alignas(64) float maxima[most_blocks + unit];
        float m = -infinity;
        uint64_t mass = 0;
        size_t blocks = 0;
        if (needs_maxima) {
          blocks = sampler.maxima_of(values, maxima);
          for (size_t i = 0; i < blocks; ++i) {
            m = maxima[i] > m ? maxima[i] : m;
          }
          for (size_t i = blocks; i < blocks + width; ++i) {
            maxima[i] = -infinity;
          }
          if (options.filters.top_p > 0 || logprobs) {
            mass = m > -infinity ? sampler.mass_of_row(values, m) : 0;
          }
        }
        Best best;
        if (pieces > 1) {
          for (size_t i = 0; i < pieces; ++i) {
            best.take(bests[row * pieces + i]);
          }
        } else if (filters && m > -infinity && m < infinity) {
          best = sampler.draw_kept(values, drawing_of(row), maxima, blocks, m, mass);
        } else {
          best = draw_row(drawing_of(row), values, 0, columns);
        }
        finish(row, best, m, mass);
      }
    });
    if (all) {
      const LogSoftmax<T> op{sampler.x, (T*)all, columns};
      Rows(op, rows, columns).run();
    }
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
