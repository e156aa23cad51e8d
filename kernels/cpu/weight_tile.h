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
  // form: the segment's own format, or f32. columns: padded.
  WeightTile(const Segment& segment, int columns, Format form, int capacity, ProductScratch& scratch);

  // Go to `panels`; more are to come up to panel `last`. passes: how often these will be read; each pass
  // calls `prefetch().step()` once per 32 columns.
  void take(Span panels, int last, int passes);

  int columns() const { return columns_; }
  int panels() const { return panels_.end - panels_.begin; }
  const uint8_t* panel(int index) const { return first_ + size_t(index) * stride_; }
  size_t stride() const { return stride_; }  // bytes from panel to panel
  Prefetch& prefetch() { return prefetch_; }

 private:
  void unpack_panels(int last);

  const Segment& segment_;
  const int columns_;
  const size_t stride_;
  uint8_t* unpacked_ = nullptr;

  Span panels_ = {0, 0};
  const uint8_t* first_ = nullptr;
  Prefetch prefetch_;
};

}  // namespace ts
