#include "weight_tile.h"

#include <algorithm>

#include "unpack.h"
#if defined(__AMX_BF16__)
#include "unpack_bf16_avx512.h"
#endif

namespace ts {

namespace {

#if defined(__AMX_BF16__)
using UnpackBlock = void (*)(const uint8_t*, int, int, bf16*);

UnpackBlock unpack_block_of(Format format) {
  switch (format) {
    case Format::q8: return unpack_block_bf16_avx512<Format::q8>;
    case Format::q8_16: return unpack_block_bf16_avx512<Format::q8_16>;
    case Format::q4: return unpack_block_bf16_avx512<Format::q4>;
    case Format::q4_wide: return unpack_block_bf16_avx512<Format::q4_wide>;
    default: return nullptr;
  }
}
#endif

}  // namespace

WeightTile::WeightTile(const Segment& segment, int columns, Format form, int capacity,
                       ProductScratch& scratch)
    : segment_(segment),
      columns_(columns),
      form_(form),
      stride_(panel_bytes(form, columns)),
      reached_(columns) {
  if (segment.format == form) return;
  scratch.weights.reserve(stride_ * size_t(capacity));
  unpacked_ = scratch.weights.bytes();
#if defined(__AMX_BF16__)
  if (form == Format::bf16) unpack_block_ = unpack_block_of(segment.format);
#endif
}

void WeightTile::take(Span panels, int last, int passes) {
  panels_ = panels;
  first_ = unpacked_ ? unpacked_ : segment_.panel(panels.begin, columns_);
  if (unpacked_ && !unpack_block_) return unpack_panels(last);
  // Unpacking is done in the first pass: its speed is what the next panels must keep up with.
  if (unpack_block_) {
    reached_ = 0;
    passes = 1;
  }
  const int following = std::min(last - panels.end, this->panels());
  const size_t bytes = size_t(following) * panel_bytes(segment_.format, columns_);
  const size_t steps = size_t(passes) * size_t(columns_ / kColumnMultiple);
  prefetch_ = Prefetch(segment_.panel(panels.end, columns_), bytes, steps);
}

void WeightTile::unpack_panels(int last) {
  for (int panel = panels_.begin; panel < panels_.end; ++panel) {
    const uint8_t* next = panel + 1 < last ? segment_.panel(panel + 1, columns_) : nullptr;
    uint8_t* out = unpacked_ + size_t(panel - panels_.begin) * stride_;
    unpack_panel(segment_.format, segment_.panel(panel, columns_), columns_, form_, out, next);
  }
}

void WeightTile::unpack_columns(int end) {
  for (; reached_ < end; reached_ += kColumnMultiple) {
    for (int panel = panels_.begin; panel < panels_.end; ++panel) {
      uint8_t* out = unpacked_ + size_t(panel - panels_.begin) * stride_;
      unpack_block_(segment_.panel(panel, columns_), columns_, reached_ / kColumnMultiple,
                    reinterpret_cast<bf16*>(out) + size_t(reached_) * kPanelRows);
    }
  }
}

}  // namespace ts
