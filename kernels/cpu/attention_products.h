// The two products of attention, queries times keys and probabilities times values, from vector registers.
#pragma once

#include "attention_ahead.h"
#include "intrinsics.h"
#include "lanes.h"

namespace ts {

// The sizes of both products. Queries: [rows][padded_dim], probabilities: [rows][kSegmentTokens]; of a
// segment, pages [pages.begin, pages.end) are multiplied.
struct ProductSizes {
  int rows;  // at most kRowTile
  int padded_dim;
  Stretch pages;
};

// What is summed at once: one number of each.
struct FloatSteps {
  using Value = float;
  using Factor = Lanes;
  static constexpr int kValues = 1;

  static Lanes load_sixteen(const float* values) { return load(values); }
  static Lanes repeat(const float* value) { return broadcast(*value); }
  static Lanes multiply_add(Lanes a, Lanes b, Lanes sums) { return fma(a, b, sums); }
};

#if defined(__AVX512BF16__)
// Two neighbouring numbers of each; denormal numbers are taken for zeros.
struct Bf16Steps {
  using Value = bf16;
  using Factor = __m512i;
  static constexpr int kValues = 2;

  static __m512i load_sixteen(const bf16* values) { return _mm512_loadu_si512(values); }
  static __m512i repeat(const bf16* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof both);
    return _mm512_set1_epi32(both);
  }
  static Lanes multiply_add(__m512i a, __m512i b, Lanes sums) {
    return {_mm512_dpbf16_ps(sums.values, (__m512bh)a, (__m512bh)b)};
  }
};
#endif

#if defined(__AVX512F__)
constexpr int kRegisterRows = 6, kRegisterColumns = 4;
#else
constexpr int kRegisterRows = 2, kRegisterColumns = 2;
#endif

template <typename Steps>
class LaneProducts {
 public:
  using Value = typename Steps::Value;

  // To be called before products of tiles of up to `rows` rows, and behind the last.
  static void begin(int /*rows*/) {}
  static void end() {}

  // Both products as what is done in steps, which tile registers can do beside something else: here one step.
  class Scores {
   public:
    Scores() = default;
    Scores(const ProductSizes& sizes, const Value* queries, const Value* const* keys, float* out)
        : sizes_(sizes), queries_(queries), keys_(keys), out_(out) {}
    int steps() const { return sizes_.pages.begin < sizes_.pages.end; }
    void step(Ahead& ahead) { scores(sizes_, queries_, keys_, out_, ahead); }

   private:
    ProductSizes sizes_{};
    const Value* queries_ = nullptr;
    const Value* const* keys_ = nullptr;
    float* out_ = nullptr;
  };
  class Weighed {
   public:
    Weighed() = default;
    Weighed(const ProductSizes& sizes, const Value* probabilities, const Value* const* values, float* out)
        : sizes_(sizes), probabilities_(probabilities), values_(values), out_(out) {}
    int steps() const { return sizes_.pages.begin < sizes_.pages.end; }
    void step(Ahead& ahead) { weigh(sizes_, probabilities_, values_, out_, ahead); }

   private:
    ProductSizes sizes_{};
    const Value* probabilities_ = nullptr;
    const Value* const* values_ = nullptr;
    float* out_ = nullptr;
  };

 private:
  // out: [rows][kSegmentTokens]; keys: pages of a segment.
  static void scores(const ProductSizes& sizes, const Value* queries, const Value* const* keys, float* out,
                     Ahead& ahead) {
    for (int page = sizes.pages.begin; page < sizes.pages.end; page += kRegisterColumns) {
      for_row_groups(sizes.rows, [&](auto rows, int row) {
        Sums<rows> sums;
        const Value* columns[kRegisterColumns];
        for (int c = 0; c < kRegisterColumns; ++c) columns[c] = keys[column(page, c, sizes.pages.end)];
        sums.add(queries + size_t(row) * sizes.padded_dim, sizes.padded_dim, columns, kPageTokens,
                 sizes.padded_dim, ahead, row == 0);
        for (int c = 0; c < kRegisterColumns; ++c) {
          sums.put(c, out + size_t(row) * kSegmentTokens + column(page, c, sizes.pages.end) * kPageTokens,
                   kSegmentTokens);
        }
      });
    }
  }

  // out: [rows][padded_dim]; values: pages of a segment.
  static void weigh(const ProductSizes& sizes, const Value* probabilities, const Value* const* values,
                    float* out, Ahead& ahead) {
    const int width = sizes.padded_dim / 16;
    for (int first = 0; first < width; first += kRegisterColumns) {
      for_row_groups(sizes.rows, [&](auto rows, int row) {
        Sums<rows> sums;
        for (int page = sizes.pages.begin; page < sizes.pages.end; ++page) {
          const Value* columns[kRegisterColumns];
          for (int c = 0; c < kRegisterColumns; ++c) {
            columns[c] = values[page] + column(first, c, width) * 16 * Steps::kValues;
          }
          sums.add(probabilities + size_t(row) * kSegmentTokens + page * kPageTokens, kSegmentTokens, columns,
                   sizes.padded_dim, kPageTokens, ahead, row == 0);
        }
        for (int c = 0; c < kRegisterColumns; ++c) {
          sums.put(c, out + size_t(row) * sizes.padded_dim + column(first, c, width) * 16, sizes.padded_dim);
        }
      });
    }
  }

  // Columns behind the last are the last once more: computed twice, and stored twice.
  static int column(int first, int c, int end) { return first + c < end ? first + c : end - 1; }

  // [Rows][kRegisterColumns][16] sums in registers.
  template <int Rows>
  struct Sums {
    Lanes lanes[Rows][kRegisterColumns];

    Sums() {
      for (int r = 0; r < Rows; ++r) {
        for (int c = 0; c < kRegisterColumns; ++c) lanes[r][c] = zero();
      }
    }

    // Adds the products of `count` numbers of each row of `a` with those of each column: [count / kValues]
    // groups of `stride` x kValues, of which the first sixteen are the column's.
    void add(const Value* a, size_t a_stride, const Value* const* columns, int stride, int count,
             Ahead& ahead, bool first_rows) {
      for (int i = 0; i < count; i += Steps::kValues) {
        typename Steps::Factor b[kRegisterColumns];
        for (int c = 0; c < kRegisterColumns; ++c)
          b[c] = Steps::load_sixteen(columns[c] + size_t(i) * stride);
        for (int r = 0; r < Rows; ++r) {
          const typename Steps::Factor factor = Steps::repeat(a + r * a_stride + i);
          for (int c = 0; c < kRegisterColumns; ++c) {
            lanes[r][c] = Steps::multiply_add(factor, b[c], lanes[r][c]);
          }
        }
        if (first_rows) ahead.lines(kRegisterColumns);
      }
    }

    void put(int c, float* out, size_t stride) const {
      for (int r = 0; r < Rows; ++r) store(out + r * stride, lanes[r][c]);
    }
  };

  template <typename Function>
  static void for_row_groups(int rows, Function&& function) {
    int row = 0;
    for (; row + kRegisterRows <= rows; row += kRegisterRows) {
      function(std::integral_constant<int, kRegisterRows>(), row);
    }
    last_rows<kRegisterRows - 1>(rows - row, row, function);
  }
  template <int Rows, typename Function>
  static void last_rows(int rows, int row, Function&& function) {
    if constexpr (Rows > 0) {
      if (rows == Rows) return function(std::integral_constant<int, Rows>(), row);
      last_rows<Rows - 1>(rows, row, function);
    }
  }
};

}  // namespace ts
