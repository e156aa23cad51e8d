// The panels that are multiplied next.
#pragma once

#include "matrix.h"
#include "numbers.h"
#include "prefetch.h"
#include "product_scratch.h"
#include "thread_pool.h"

namespace ts {

// Up to `capacity` neighbouring panels of a segment in the form that a product takes: where they lie, or
// unpacked into a thread's scratch. What comes after them is prefetched meanwhile.
class WeightTile {
 public:
  // form: the segment's own format, f32 or bf16. columns: padded.
  WeightTile(const Segment& segment, int columns, Format form, int capacity, ProductScratch& scratch);

  // Go to `panels`; more are to come up to panel `last`. passes: how often these will be read; each pass
  // calls `prefetch().step()` once per 32 columns.
  void take(Span panels, int last, int passes);

  // Have the columns before `column`. Where a tier can, panels are unpacked no sooner than they are asked
  // for, beside the tile products of the columns before.
  void reach(int column) {
    if (column > reached_) unpack_columns(column);
  }

  int columns() const { return columns_; }
  int panels() const { return panels_.end - panels_.begin; }
  const uint8_t* panel(int index) const { return first_ + size_t(index) * stride_; }
  size_t stride() const { return stride_; }  // bytes from panel to panel
  Prefetch& prefetch() { return prefetch_; }

 private:
  void unpack_panels(int last);
  void unpack_columns(int end);

  // Writes 32 columns of a panel as bf16, [16][16][2]: the given 32 of all its columns.
  using UnpackBlock = void (*)(const uint8_t* panel, int columns, int block, bf16* out);

  const Segment& segment_;
  const int columns_;
  const Format form_;
  const size_t stride_;
  uint8_t* unpacked_ = nullptr;
  UnpackBlock unpack_block_ = nullptr;  // if columns are unpacked when asked for
  int reached_;                         // columns that are there

  Span panels_ = {0, 0};
  const uint8_t* first_ = nullptr;
  Prefetch prefetch_;
};

}  // namespace ts
