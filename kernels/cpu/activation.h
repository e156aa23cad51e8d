// The MLP's gated activation: activation(gate) * up.
//
// Results that become bf16 are computed by coarser functions (1e-4 against bf16's 4e-3): beside the tile
// products the exact ones would take a third of the time.
#pragma once

#include <type_traits>

#include "element.h"

namespace ts {

enum class Activation { silu, gelu_tanh };

// What each activation is x / (1 + e^exponent) with. silu: x / (1 + e^-x).
//
// gelu: x / 2 (1 + tanh y), y = sqrt(2 / pi) (x + 0.044715 x^3); and 1 + tanh y = 2 / (1 + e^-2y).
template <Activation activation>
Lanes exponent(Lanes x) {
  if (activation == Activation::silu) return zero() - x;
  return x * fma(x * x, broadcast(-0.0713548163f), broadcast(-1.5957691216f));
}

// For results of type Element.
template <Activation activation, typename Element>
Lanes activate(Lanes x) {
  const Lanes power = exponent<activation>(x);
  if constexpr (std::is_same_v<Element, bf16>) {
    return x * reciprocal_coarse(broadcast(1.0f) + exp_coarse(power));
  }
  return x / (broadcast(1.0f) + exp(power));
}

inline void store_low_half_elements(float* out, Lanes a) { store_low_half(out, a); }
inline void store_low_half_elements(bf16* out, Lanes a) { store_low_half_bf16(out, a); }

// gate_up: a panel of the matrix whose gate and up rows interleave by eights: 8 gates, then the 8 ups that
// belong to them. Writes 8 outputs.
template <Activation activation, typename Element>
void store_gated(Element* out, Lanes gate_up) {
  store_low_half_elements(out, activate<activation, Element>(gate_up) * swap_halves(gate_up));
}

// Two neighbouring panels: 16 outputs, at little more than the cost of 8, and the same.
template <Activation activation, typename Element>
void store_gated(Element* out, Lanes first, Lanes second) {
  const Lanes gates = low_halves(first, second), ups = high_halves(first, second);
  store_elements(out, activate<activation, Element>(gates) * ups);
}

}  // namespace ts
