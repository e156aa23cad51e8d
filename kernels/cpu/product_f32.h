// Products in fp32, on every tier: of fp32 weights, and of all weights where the tier has nothing better for
// them (they are unpacked to fp32 first).
#pragma once

#include "operand.h"
#include "outputs.h"
#include "tile_sizes.h"
#include "weight_tile.h"

namespace ts {

class ProductF32 {
 public:
  // As many sums as the registers hold beside kPanels weights and an activation, all of 16 floats.
#if defined(__AVX512F__)
  static constexpr int kRows = 8, kPanels = 3;  // 32 registers of 16 floats
#elif defined(__AVX2__)
  static constexpr int kRows = 6, kPanels = 1;  // 16 registers of 8 floats
#else
  static constexpr int kRows = 2, kPanels = 1;  // 16 registers of 4 floats
#endif

  explicit ProductF32(const Operand& x) : x_(x) {}

  static constexpr int kColumns = 1024;

  static Format form(Format) { return Format::f32; }
  static int tile_rows(int rows) { return equal_part(rows, kRows); }
  void compute(WeightTile& weights, Span rows, Span columns, float* sums, Meanwhile&) const;

 private:
  const Operand& x_;
};

}  // namespace ts
