// From scores to probabilities.
#pragma once

#include "attention_partial.h"
#include "attention_plan.h"
#include "element.h"

namespace ts {

// Scales of int8 keys and values, [16] of each page of a segment; nullptr: none.
using PageScales = const float* const*;

// A row of scores, [kSegmentTokens], against the keys of a segment. kScaled: with scales of keys and values.
template <bool kScaled>
struct ScoreRow {
  const float* scores;
  float scale;  // to powers of two, positive
  PageScales key_scales;
  PageScales value_scales;
  Stretch visible;  // tokens of the segment; may be empty

  // Of one page, before they are multiplied by `scale`; the lanes of unseen keys may be anything.
  Lanes unscaled(int page) const {
    const Lanes score = load(scores + page * kPageTokens);
    if constexpr (kScaled) return score * load(key_scales[page]);
    return score;
  }
  // `hidden` in place of what is not seen, whatever it is.
  Lanes masked(int page, Lanes value, Lanes hidden) const {
    value = select_below(visible.end - page * kPageTokens, value, hidden);
    return select_below(visible.begin - page * kPageTokens, hidden, value);
  }

  int first_page() const { return visible.begin / kPageTokens; }
  int end_page() const { return (visible.end + kPageTokens - 1) / kPageTokens; }

  // Calls function(page, mask) for each page with seen keys, in order; mask(value, hidden) is as `masked`,
  // and nothing for pages that are seen whole.
  template <typename Function>
  void for_each_page(Function&& function) const {
    int page = first_page();
    const auto mask = [this, &page](Lanes value, Lanes hidden) { return masked(page, value, hidden); };
    const auto no_mask = [](Lanes value, Lanes) { return value; };
    const int begin_whole = (visible.begin + kPageTokens - 1) / kPageTokens,
              end_whole = visible.end / kPageTokens;
    for (; page < begin_whole && page < end_page(); ++page) function(page, mask);
    for (; page < end_whole; ++page) function(page, no_mask);
    for (; page < end_page(); ++page) function(page, mask);
  }
};

// The highest score in powers of two; kLowest if no key is seen.
template <bool kScaled>
float highest_score(const ScoreRow<kScaled>& row) {
  if (row.visible.begin >= row.visible.end) return kLowest;
  Lanes highest_lanes = broadcast(kLowest);
  row.for_each_page([&](int page, auto mask) {
    highest_lanes = max(highest_lanes, mask(row.unscaled(page), broadcast(kLowest)));
  });
  return highest(highest_lanes) * row.scale;
}

// For x up to about 0, as exact as the type that the result is stored in can use.
inline Lanes probability(Lanes x, const float*) { return exp2(x); }
inline Lanes probability(Lanes x, const bf16*) { return exp2_coarse(x); }

// 2^(score - highest) of each key in `pages`, exactly 0 where it is not seen; times the value's scale in what
// is stored, not in the sum, which is returned. The sum is taken lane by lane in the order of the pages.
template <bool kScaled, typename Value>
float store_probabilities(const ScoreRow<kScaled>& row, Stretch pages, float highest, Value* out) {
  for (int page = pages.begin; page < row.first_page(); ++page)
    store_elements(out + page * kPageTokens, zero());
  const Lanes scale = broadcast(row.scale), offset = broadcast(-highest);
  Lanes sums = zero();
  row.for_each_page([&](int page, auto mask) {
    const Lanes power = mask(probability(fma(row.unscaled(page), scale, offset), out), zero());
    sums = sums + power;
    Lanes weight = power;
    if constexpr (kScaled) weight = mask(power * load(row.value_scales[page]), zero());
    store_elements(out + page * kPageTokens, weight);
  });
  for (int page = row.end_page(); page < pages.end; ++page) store_elements(out + page * kPageTokens, zero());
  return sum(sums);
}

}  // namespace ts
