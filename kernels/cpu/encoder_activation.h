// Activations of an encoder's MLP, within rounding of fp32.
#pragma once

#include "activation.h"

namespace ts {

// Within 4e-7 of it: a quotient of polynomials in x^2, times x (Eigen's coefficients). 1 from 4 on.
inline Lanes erf(Lanes x) {
  x = min(broadcast(4.0f), max(broadcast(-4.0f), x));
  const Lanes square = x * x;
  Lanes above = broadcast(-2.72614225801306e-10f);
  above = fma(above, square, broadcast(2.77068142495902e-08f));
  above = fma(above, square, broadcast(-2.10102402082508e-06f));
  above = fma(above, square, broadcast(-5.69250639462346e-05f));
  above = fma(above, square, broadcast(-7.34990630326855e-04f));
  above = fma(above, square, broadcast(-2.95459980854025e-03f));
  above = fma(above, square, broadcast(-1.60960333262415e-02f));
  Lanes below = broadcast(-1.45660718464996e-05f);
  below = fma(below, square, broadcast(-2.13374055278905e-04f));
  below = fma(below, square, broadcast(-1.68282697438203e-03f));
  below = fma(below, square, broadcast(-7.37332916720468e-03f));
  below = fma(below, square, broadcast(-1.42647390514189e-02f));
  return x * above / below;
}

// x / 2 (1 + erf(x / sqrt(2)))
inline Lanes gelu(Lanes x) {
  const Lanes half = x * broadcast(0.5f);
  return fma(half, erf(x * broadcast(0.7071067812f)), half);
}

inline Lanes gelu_tanh(Lanes x) { return activate<Activation::gelu_tanh, float>(x); }

// NaN stays NaN.
inline Lanes relu(Lanes x) { return max(zero(), x); }

}  // namespace ts
