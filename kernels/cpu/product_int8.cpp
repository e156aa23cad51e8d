#include "product_int8.h"

#if defined(__AVX512VNNI__)

#include "intrinsics.h"
#include "kernel_table.h"
#include "quantized_panel.h"

namespace ts {

namespace {

constexpr int kQuads = kColumnMultiple / 4;  // dot products of four columns in a group of 32
constexpr size_t kQuadBytes = 4 * kPanelRows;

// 32 columns of a panel.
template <Format format>
struct Group {
  static constexpr int kScales = int(QuantizedPanel<format>::kParts);
  __m512i quants[kQuads];
  __m512 scales[kScales];
  __m512 minima;

  Group(const QuantizedPanel<format>& panel, size_t block) {
    load_quants(panel.quants(block));
    for (int i = 0; i < kScales; ++i) scales[i] = panel.scales(block, size_t(i));
    if constexpr (has_minima(format)) minima = panel.minima(block);
  }

  void load_quants(const uint8_t* quant) {
    if constexpr (has_minima(format)) {
      const __m512i low = _mm512_set1_epi8(15);
      for (int i = 0; i < kQuads / 2; ++i) {
        const __m512i two = _mm512_load_si512(quant + size_t(i) * kQuadBytes);
        quants[i] = _mm512_and_si512(two, low);
        quants[i + kQuads / 2] = _mm512_and_si512(_mm512_srli_epi16(two, 4), low);
      }
    } else {
      for (int i = 0; i < kQuads; ++i) quants[i] = _mm512_load_si512(quant + size_t(i) * kQuadBytes);
    }
  }

  // total + this group's product with 32 activations.
  __m512 add_to(__m512 total, const int8_t* x, const GroupTerms& terms) const {
    const __m512 x_scale = _mm512_set1_ps(terms.scale);
#pragma GCC unroll 2
    for (int part = 0; part < kScales; ++part) {
      __m512i dot = _mm512_set1_epi32(terms.starts[part]);
#pragma GCC unroll 8
      for (int i = part * kQuads / kScales; i < (part + 1) * kQuads / kScales; ++i) {
        int32_t quad;
        std::memcpy(&quad, x + 4 * i, sizeof quad);
        dot = _mm512_dpbusd_epi32(dot, quants[i], _mm512_set1_epi32(quad));
      }
      total = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot), x_scale), scales[part], total);
    }
    if constexpr (has_minima(format)) total = _mm512_fmadd_ps(minima, _mm512_set1_ps(terms.sum), total);
    return total;
  }
};

// One tile: x [Rows][columns], terms [Rows][groups].
template <Format format, int Rows>
void compute_tile(WeightTile& weights, Span columns, const int8_t* x, const GroupTerms* terms, float* sums) {
  const size_t groups = size_t(weights.columns() / kColumnMultiple);
  const QuantizedPanel<format> panel(weights.panel(0), weights.columns());
  Prefetch prefetch = weights.prefetch();
  __m512 total[Rows];
  for (int row = 0; row < Rows; ++row) {
    total[row] = columns.begin == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + row * kPanelRows);
  }
  for (size_t g = size_t(columns.begin / kColumnMultiple); g < size_t(columns.end / kColumnMultiple); ++g) {
    prefetch.step();
    const Group<format> group(panel, g);
#pragma GCC unroll 12
    for (size_t row = 0; row < Rows; ++row) {
      const size_t at = row * groups + g;
      total[row] = group.add_to(total[row], x + at * kColumnMultiple, terms[at]);
    }
  }
  weights.prefetch() = prefetch;
  for (int row = 0; row < Rows; ++row) _mm512_storeu_ps(sums + row * kPanelRows, total[row]);
}

using Kernel = void (*)(WeightTile&, Span, const int8_t*, const GroupTerms*, float*);

template <Format format>
struct Kernels {
  template <int Rows, int Panels>
  static constexpr Kernel get() {
    return compute_tile<format, Rows>;
  }
};

template <Format format>
Kernel kernel_for(int rows) {
  static constexpr auto kernels = kernel_table<Kernel, Kernels<format>, ProductInt8::kRows, 1>();
  return kernels[rows - 1][0];
}

Kernel kernel_for(Format format, int rows) {
  switch (format) {
    case Format::q8: return kernel_for<Format::q8>(rows);
    case Format::q8_16: return kernel_for<Format::q8_16>(rows);
    case Format::q4: return kernel_for<Format::q4>(rows);
    default: return kernel_for<Format::q4_wide>(rows);
  }
}

int32_t sum_of_16(const int8_t* values) {
  const __m128i ones = _mm_set1_epi8(1);
  const __m128i four = _mm_dpbusd_epi32(_mm_setzero_si128(), ones, _mm_loadu_si128((const __m128i*)values));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

}  // namespace

ProductInt8::ProductInt8(Format format, int columns, const Operand& x, Span rows, ProductScratch& scratch)
    : format_(format), groups_(columns / kColumnMultiple), x_(x), first_row_(rows.begin) {
  scratch.rows.reserve(size_t(rows.end - rows.begin) * size_t(groups_) * sizeof(GroupTerms));
  GroupTerms* terms = scratch.rows.as<GroupTerms>();
  terms_ = terms;
  for (int row = rows.begin; row < rows.end; ++row, terms += groups_) set_terms(row, terms);
}

void ProductInt8::set_terms(int row, GroupTerms* terms) const {
  const GroupScale* scales = x_.scales_row(row);
  const int8_t* x = x_.int8_row(row);
  for (int g = 0; g < groups_; ++g) {
    const int32_t sum = scales[g].sum;
    const int32_t first = format_ == Format::q8_16 ? sum_of_16(x + g * kColumnMultiple) : sum;
    terms[g] = {scales[g].scale, {-128 * first, -128 * (sum - first)}, scales[g].scale * float(sum)};
    if (has_minima(format_)) terms[g].starts[0] = 0;
  }
}

void ProductInt8::compute(WeightTile& weights, Span rows, Span columns, float* sums, Meanwhile&) const {
  const Kernel kernel = kernel_for(format_, rows.end - rows.begin);
  const GroupTerms* terms = terms_ + size_t(rows.begin - first_row_) * size_t(groups_);
  kernel(weights, columns, x_.int8_row(rows.begin), terms, sums);
}

}  // namespace ts

#endif
