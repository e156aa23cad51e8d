#include "weight_tile.h"

#include <algorithm>

#include "unpack.h"

namespace ts {

WeightTile::WeightTile(const Segment& segment, int columns, Format form, int capacity,
                       ProductScratch& scratch)
    : segment_(segment), columns_(columns), stride_(panel_bytes(form, columns)) {
  if (segment.format == form) return;
  scratch.weights.reserve(stride_ * size_t(capacity));
  unpacked_ = scratch.weights.bytes();
}

void WeightTile::take(Span panels, int last, int passes) {
  panels_ = panels;
  first_ = unpacked_ ? unpacked_ : segment_.panel(panels.begin, columns_);
  if (unpacked_) return unpack_panels(last);
  const int following = std::min(last - panels.end, this->panels());
  const size_t bytes = size_t(following) * panel_bytes(segment_.format, columns_);
  const size_t steps = size_t(passes) * size_t(columns_ / kColumnMultiple);
  prefetch_ = Prefetch(segment_.panel(panels.end, columns_), bytes, steps);
}

void WeightTile::unpack_panels(int last) {
  for (int panel = panels_.begin; panel < panels_.end; ++panel) {
    const uint8_t* next = panel + 1 < last ? segment_.panel(panel + 1, columns_) : nullptr;
    float* out = reinterpret_cast<float*>(unpacked_ + size_t(panel - panels_.begin) * stride_);
    unpack_panel(segment_.format, segment_.panel(panel, columns_), columns_, out, next);
  }
}

}  // namespace ts
