// y = x w^T for many rows with AMX, which multiplies tiles of bytes: 16 rows of x by 16 outputs along 64 columns in an
// instruction. Integers, scales and the order of sums are those of IntegerPanels, and so are the results. 16 bits of x
// are an upper byte with a sign and a lower one without. Intrinsics name tiles by number and the compiler keeps none of
// them: nothing between two of them may call a function that has tiles too.
#pragma once

#include "cpu/isa/matmul/integer_forms.h"
#include "cpu/isa/matmul/products.h"

namespace mittens::cpu::MITTENS_ISA {

// A row of x: the bytes of its integers, in the order of the weights' bytes, then the scale and the sum of each group.
// With 16 bits the upper bytes of all columns come before the lower ones.
template <typename Source, typename Form>
struct TileIntegers {
  static constexpr size_t parts = Form::bits / 8, of_group = 2;

  static size_t bytes(size_t columns) {
    return parts * columns;
  }
  static size_t size(const Source& source, size_t columns) {
    return rounded_up(bytes(columns) / 4 + of_group * (columns >> source.groups.group_bits), 16);
  }

  // Whether the row's integers may stand for it.
  template <typename T>
  static bool fill(const Source& source, const T* x, size_t columns, float* y) {
    const int group_bits = source.groups.group_bits;
    return group_bits == 4   ? fill_groups<1>(x, columns, y)
           : group_bits == 5 ? fill_groups<2>(x, columns, y)
           : group_bits == 6 ? fill_groups<4>(x, columns, y)
                             : fill_groups<8>(x, columns, y);
  }

 private:
  // As GroupIntegers::fill, of groups of some vectors.
  template <int vectors, typename T>
  static bool fill_groups(const T* x, size_t columns, float* y) {
    int8_t* to = reinterpret_cast<int8_t*>(y);
    float* end = y + bytes(columns) / 4;
    Float most = {}, sizes = {};
    for (size_t begin = 0; begin < columns; begin += vectors * width, end += of_group) {
      Float values[vectors], largest = {};
      repeat<vectors>([&](auto v) MITTENS_INLINED {
        values[v.value] = load_in_order(x + begin + v.value * width);
        const Float size = maximum(values[v.value], -values[v.value]);
        largest = maximum(size, largest);
        sizes = sizes + size;
      });
      most = maximum(largest, most);
      const float greatest = reduce(largest, [](auto a, auto b) MITTENS_INLINED { return a > b ? a : b; });
      const float inverse = greatest > least_group ? Form::largest / greatest : 0;
      const float scale = greatest * (1 / Form::largest);
      Int sum = {};
      repeat<vectors>([&](auto v) MITTENS_INLINED {
        const Int rounded = integers_of_form<Form>(values[v.value] * inverse);
        sum = sum + rounded;
        int8_t* at = to + begin + v.value * width;
        if constexpr (parts == 2) {
          write_bytes(at, rounded >> 8);
        }
        write_bytes(at + (parts - 1) * columns, rounded);
      });
      end[0] = scale;
      end[1] = total(__builtin_convertvector(sum, Float)) * scale;
    }
    const float largest = reduce(most, [](auto a, auto b) MITTENS_INLINED { return a > b ? a : b; });
    return Form::stands_for({largest, total(sizes), static_cast<float>(columns)});
  }

  static MITTENS_INLINE void write_bytes(int8_t* to, Int integers) {
    SignedBytes bytes = (SignedBytes)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)integers);
    if constexpr (Source::vectors == 8) {
      bytes = __builtin_shufflevector(bytes, bytes, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    }
    write(to, bytes, All());
  }
};

template <typename Source, typename Form>
class IntegerTiles {
 public:
  using X = TileIntegers<Source, Form>;

  IntegerTiles(const Source& source, size_t columns) : source_(source), columns_(columns) {}

  static constexpr size_t most_refused = 16;

  static size_t memory(const Source& source, size_t) {
    return panel_integers * (chunk / 4 + 2 * most_groups) + width * source.memory(chunk);
  }

  static size_t block(size_t, size_t count, size_t outputs) {
    return outputs_of_task(panel_integers, lanes, count, outputs);
  }

  // As IntegerPanels::products.
  void products(const float* x, size_t rows, size_t n, size_t size, float* sums, size_t stride, float* memory) const {
    const size_t x_stride = X::size(source_, columns_), group = size_t{1} << source_.groups.group_bits;
    float* scales = memory + panel_integers * chunk / 4;
    float* offsets = scales + panel_integers * most_groups;
    float* of_rows = offsets + panel_integers * most_groups;
    Tiles tiles(smaller(group, tile_columns));
    for (size_t begin = 0; begin < columns_; begin += chunk) {
      const size_t columns = smaller(chunk, columns_ - begin), groups = columns >> source_.groups.group_bits;
      for (size_t i = 0; i < size; i += lanes) {
        for (size_t j = 0; j < lanes; j += width) {
          unpack(n + smaller(i + j, size - 1), smaller(width, size - smaller(i + j, size - 1)), begin, columns,
                 memory + i * columns / 4 + j, scales + i * groups + j, offsets + i * groups + j, of_rows);
        }
      }
      // GCC's intrinsics do not say which memory they load: weights must be written before.
      __atomic_signal_fence(__ATOMIC_SEQ_CST);
      each_part(rows, tile_height, [&](size_t row, size_t count) {
        tiles.set_rows(count);
        const float* from = x + row * x_stride;
        const int8_t* bytes = reinterpret_cast<const int8_t*>(from) + begin;
        const float* of_groups = from + X::bytes(columns_) / 4 + X::of_group * (begin >> source_.groups.group_bits);
        for (size_t i = 0; i < size; i += lanes) {
          strip(bytes, of_groups, x_stride, reinterpret_cast<const int8_t*>(memory + i * columns / 4),
                scales + i * groups, offsets + i * groups, groups, count, sums + row * stride + i, stride, begin != 0);
        }
      });
    }
  }

 private:
  static constexpr size_t lanes = 2 * width;  // outputs of two tiles
  static constexpr size_t chunk = 1024;  // columns along which a panel goes
  static constexpr size_t most_groups = chunk / 16;
  static constexpr size_t tile_height = 16, tile_columns = 64;
  static constexpr size_t vectors = lanes / width, of_tiles = X::parts * vectors * tile_height * width;

  // The shapes of this thread's tiles. The destructor releases the tiles, since a thread that has some takes longer to
  // switch away from.
  class Tiles {
   public:
    explicit Tiles(size_t columns) {
      config_.palette = 1;
      for (int i = 0; i < 8; ++i) {
        config_.row_bytes[i] = 64;
      }
      config_.row_bytes[0] = config_.row_bytes[1] = columns;
      config_.rows[2] = config_.rows[3] = columns / 4;
    }
    ~Tiles() {
      _tile_release();
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    void set_rows(size_t rows) {
      if (config_.rows[0] == rows) {
        return;
      }
      config_.rows[0] = config_.rows[1] = rows;
      for (int i = 4; i < 8; ++i) {
        config_.rows[i] = rows;
      }
      // GCC's intrinsic says that it reads eight bytes.
      __asm__ volatile("" ::"r"(&config_) : "memory");
      _tile_loadconfig(&config_);
    }

   private:
    struct alignas(64) Config {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    };
    Config config_ = {};
  };

  // The weights of 16 outputs less their middle, [word][output], and [group][output] of their scales and offsets.
  void unpack(size_t n, size_t size, size_t begin, size_t columns, float* words, float* scales, float* offsets,
              float* memory) const {
    const size_t groups = columns >> source_.groups.group_bits, of_row = source_.memory(chunk);
    typename Source::Row from[width];
    for (size_t j = 0; j < width; ++j) {
      from[j] = source_.row(n + smaller(j, size - 1), begin, columns, memory + j * of_row);
    }
    each_turned(
        groups, [&](size_t j, size_t g, auto) MITTENS_INLINED { return read<UInt>(from[j].scales + g, All()); },
        [&](size_t g, UInt of_group) MITTENS_INLINED { write(scales + g * lanes, of_group, All()); });
    each_turned(
        groups, [&](size_t j, size_t g, auto) MITTENS_INLINED { return read<UInt>(from[j].offsets + g, All()); },
        [&](size_t g, UInt of_group) MITTENS_INLINED { write(offsets + g * lanes, of_group, All()); });
    each_turned(
        columns / Source::vectors,
        [&](size_t j, size_t w, auto part) MITTENS_INLINED { return read<UInt>(from[j].words + w, part); },
        [&](size_t w, UInt packed) MITTENS_INLINED {
          constexpr int of_word = Source::vectors / 4;
          repeat<of_word>([&](auto k) MITTENS_INLINED {
            typedef uint8_t AllBytes __attribute__((vector_size(sizeof(UInt))));
            const UInt weights = Source::template integers<k.value, 4>(packed);
            write(words + (w * of_word + k.value) * lanes, (AllBytes)weights - static_cast<uint8_t>(Source::middle),
                  All());
          });
        });
  }

  // Calls use(i, words), words the words i < count of 16 rows; get(row, i, part) returns those from i on of a row.
  template <typename Get, typename Use>
  static MITTENS_INLINE void each_turned(size_t count, const Get& get, const Use& use) {
    each_vector(count, [&](size_t begin, auto part) MITTENS_INLINED {
      UInt rows[width];
      repeat<width>([&](auto j) MITTENS_INLINED { rows[j.value] = get(j.value, begin, part); });
      turn(rows);
      if constexpr (__is_same(decltype(part), All)) {
        repeat<width>([&](auto i) MITTENS_INLINED { use(begin + i.value, rows[i.value]); });
      } else {
        for (size_t i = 0; i < part.n; ++i) {
          use(begin + i, rows[i]);
        }
      }
    });
  }

  // Vector i becomes the words i of all 16.
  static MITTENS_INLINE void turn(UInt (&v)[width]) {
    auto even_lanes = [](UInt x, UInt y) MITTENS_INLINED {
      return __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    };
    auto odd_lanes = [](UInt x, UInt y) MITTENS_INLINED {
      return __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    };
    UInt quads[4][4];  // of four rows the words c, c + 4, c + 8, c + 12, a lane of 16 bytes for each
    repeat<4>([&](auto q) MITTENS_INLINED {
      const UInt* r = v + 4 * q.value;
      const UInt a = __builtin_shufflevector(r[0], r[1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
      const UInt b = __builtin_shufflevector(r[2], r[3], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
      const UInt c = __builtin_shufflevector(r[0], r[1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
      const UInt d = __builtin_shufflevector(r[2], r[3], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
      UInt(&to)[4] = quads[q.value];
      to[0] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      to[1] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
      to[2] = __builtin_shufflevector(c, d, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      to[3] = __builtin_shufflevector(c, d, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    });
    repeat<4>([&](auto c) MITTENS_INLINED {
      constexpr int i = c.value;
      const UInt low_even = even_lanes(quads[0][i], quads[1][i]), high_even = even_lanes(quads[2][i], quads[3][i]);
      const UInt low_odd = odd_lanes(quads[0][i], quads[1][i]), high_odd = odd_lanes(quads[2][i], quads[3][i]);
      v[i] = even_lanes(low_even, high_even);
      v[4 + i] = even_lanes(low_odd, high_odd);
      v[8 + i] = odd_lanes(low_even, high_even);
      v[12 + i] = odd_lanes(low_odd, high_odd);
    });
  }

  // Some rows of x by the outputs of two tiles, added to the sums or written to them. The tiles of a group are
  // multiplied while the sums of the group before are scaled.
  void strip(const int8_t* x, const float* of_groups, size_t x_stride, const int8_t* words, const float* scales,
             const float* offsets, size_t groups, size_t rows, float* sums, size_t stride, bool add) const {
    // One buffer: of two a page apart, loads of one would wait for stores to the other at the same offset.
    alignas(64) int32_t products[of_tiles];
    const size_t group = size_t{1} << source_.groups.group_bits;
    multiply_group(x, x_stride, words, group);
    store_tiles(products);
    for (size_t g = 0; g < groups; ++g) {
      const bool more = g + 1 < groups;
      if (more) {
        multiply_group(x + (g + 1) * group, x_stride, words + (g + 1) * group * lanes, group);
      }
      scale_group(products, of_groups + g * X::of_group, x_stride, scales + g * lanes, offsets + g * lanes, rows, sums,
                  stride, add || g != 0);
      if (more) {
        store_tiles(products);
      }
    }
  }

  // Tiles 0 and 1 have parts of x, 2 and 3 weights, and 4 to 7 sums.
  void multiply_group(const int8_t* x, size_t x_stride, const int8_t* words, size_t group) const {
    constexpr size_t row = lanes * 4, step = tile_columns * lanes;
    const size_t x_row = x_stride * sizeof(float);
    _tile_zero(4);
    _tile_zero(5);
    if constexpr (X::parts == 2) {
      _tile_zero(6);
      _tile_zero(7);
    }
    const int8_t* end = words + group * lanes;
    do {
      _tile_loadd(2, words, row);
      _tile_loadd(0, x, x_row);
      _tile_dpbssd(4, 0, 2);
      _tile_loadd(3, words + row / 2, row);
      _tile_dpbssd(5, 0, 3);
      if constexpr (X::parts == 2) {
        _tile_loadd(1, x + columns_, x_row);
        _tile_dpbusd(6, 1, 2);
        _tile_dpbusd(7, 1, 3);
      }
      words += step;
      x += tile_columns;
    } while (words < end);
  }

  static MITTENS_INLINE void store_tiles(int32_t* products) {
    constexpr size_t size = tile_height * width;
    _tile_stored(4, products, 4 * width);
    _tile_stored(5, products + size, 4 * width);
    if constexpr (X::parts == 2) {
      _tile_stored(6, products + 2 * size, 4 * width);
      _tile_stored(7, products + 3 * size, 4 * width);
    }
  }

  static MITTENS_INLINE void scale_group(const int32_t* products, const float* of_group, size_t x_stride,
                                         const float* scales, const float* offsets, size_t rows, float* sums,
                                         size_t stride, bool add) {
    Float scale[vectors], offset[vectors];
    repeat<vectors>([&](auto v) MITTENS_INLINED {
      scale[v.value] = read<Float>(scales + v.value * width, All());
      offset[v.value] = read<Float>(offsets + v.value * width, All());
    });
    for (size_t m = 0; m < rows; ++m) {
      const Float scale_of_x = (Float)_mm512_set1_ps(of_group[m * x_stride]);
      const Float sum_of_x = (Float)_mm512_set1_ps(of_group[m * x_stride + 1]);
      repeat<vectors>([&](auto v) MITTENS_INLINED {
        constexpr size_t size = tile_height * width;
        const int32_t* at = products + v.value * size + m * width;
        Int product = read<Int>(at, All());
        if constexpr (X::parts == 2) {
          product = (product << 8) + read<Int>(at + vectors * size, All());
        }
        float* to = sums + m * stride + v.value * width;
        Float sum = add ? read<Float>(to, All()) : Float{};
        sum = fma(__builtin_convertvector(product, Float) * scale[v.value], scale_of_x, sum);
        write(to, fma(offset[v.value], sum_of_x, sum), All());
      });
    }
  }

  const Source& source_;
  size_t columns_;
};

}  // namespace mittens::cpu::MITTENS_ISA
