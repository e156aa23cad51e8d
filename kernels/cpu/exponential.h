// Exponentials of sixteen floats. NaN stays NaN: `max` and `min` return the second of their arguments then.
#pragma once

#include "lanes.h"

namespace ts {

// 2^f - 1 = f p(f) for f in [-1/2, 1/2]: Taylor's series at 0, ln(2)^k / k!. The first term left out is below
// 1e-8.
inline Lanes exp2_fraction_minus_one(Lanes f) {
  Lanes p = broadcast(1.525273380e-5f);  // ln(2)^7 / 7!
  p = fma(p, f, broadcast(1.540353039e-4f));
  p = fma(p, f, broadcast(1.333355815e-3f));
  p = fma(p, f, broadcast(9.618129108e-3f));
  p = fma(p, f, broadcast(5.550410866e-2f));
  p = fma(p, f, broadcast(2.402265070e-1f));
  p = fma(p, f, broadcast(6.931471806e-1f));
  return p * f;
}

// 2^x, within 2e-7 of it (relative); 0 below -150, infinite from 128 on.
inline Lanes exp2(Lanes x) {
  x = min(broadcast(160.0f), max(broadcast(-160.0f), x));
  const Lanes whole = round(x);
  return scale_by_power_of_two(broadcast(1.0f) + exp2_fraction_minus_one(x - whole), whole);
}

// What exp and tanh have in common: e^x = 2^whole (1 + fraction_minus_one), for |x| <= 120.
struct SplitExponential {
  Lanes whole, fraction_minus_one;
};

inline SplitExponential split_exponential(Lanes x) {
  const Lanes whole = round(x * broadcast(1.442695041f));  // 1 / ln 2
  // ln 2 in two parts, the first of so few bits that its product with `whole` is exact.
  const Lanes rest = fma(whole, broadcast(-1.42860677e-6f), fma(whole, broadcast(-0.693145752f), x));
  // e^r - 1 = r + r^2 q(r) for |r| <= ln(2) / 2: Taylor's series, 1 / k!.
  Lanes q = broadcast(1.984126984e-4f);  // 1 / 7!
  q = fma(q, rest, broadcast(1.388888889e-3f));
  q = fma(q, rest, broadcast(8.333333333e-3f));
  q = fma(q, rest, broadcast(4.166666667e-2f));
  q = fma(q, rest, broadcast(1.666666667e-1f));
  q = fma(q, rest, broadcast(0.5f));
  return {whole, fma(rest * rest, q, rest)};
}

// e^x, within 2e-7 of it (relative); 0 for very negative x, infinite from 88.73 on.
inline Lanes exp(Lanes x) {
  const SplitExponential split = split_exponential(min(broadcast(120.0f), max(broadcast(-120.0f), x)));
  return scale_by_power_of_two(broadcast(1.0f) + split.fraction_minus_one, split.whole);
}

// 2^x within 1e-4 of it (relative), for x up to 160, at less cost: for results that are then rounded to bf16.
// The polynomial is 2^f's best of its degree for f in [0, 1] (Remez): from the number below x on, so that the
// processor's own rounding serves.
inline Lanes exp2_coarse(Lanes x) {
  const Lanes f = fraction(x);
  Lanes p = fma(f, broadcast(0.0780245227f), broadcast(0.226067155f));
  p = fma(p, f, broadcast(0.695833540f));
  p = fma(p, f, broadcast(0.999925219f));
  return scale_by_floor(p, x);
}

// 2^x within 3e-7 of it (relative), for x up to 0: the same with a polynomial that is within 8e-8.
inline Lanes exp2_upto_0(Lanes x) {
  const Lanes f = fraction(x);
  Lanes p = fma(f, broadcast(1.8775767e-3f), broadcast(8.989340024e-3f));
  p = fma(p, f, broadcast(5.582631812e-2f));
  p = fma(p, f, broadcast(0.240153617f));
  p = fma(p, f, broadcast(0.6931530732f));
  p = fma(p, f, broadcast(0.9999999251f));
  return scale_by_floor(p, x);
}

// e^x, as exact as exp2_coarse.
inline Lanes exp_coarse(Lanes x) {
  return exp2_coarse(min(broadcast(160.0f), x * broadcast(1.442695041f)));
}

// tanh x = (e^2a - 1) / (e^2a + 1) with the sign of x, a = |x|; e^2a - 1 is computed without cancellation,
// so that small x are right too. 1 from 10 on.
inline Lanes tanh(Lanes x) {
  const SplitExponential split = split_exponential(min(broadcast(10.0f), abs(x)) * broadcast(2.0f));
  const Lanes power = scale_by_power_of_two(broadcast(1.0f), split.whole);
  const Lanes minus_one = fma(power, split.fraction_minus_one, power - broadcast(1.0f));
  return copy_sign(minus_one / (minus_one + broadcast(2.0f)), x);
}

}  // namespace ts
