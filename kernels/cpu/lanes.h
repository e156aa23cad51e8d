// Sixteen floats at a time: the one vector type that all kernels are written in.
//
// Each implementation offers the same functions in namespace ts:
//
//   struct Lanes                                      16 floats, by value
//   Lanes zero(), broadcast(float)
//   Lanes load(const float*)                          unaligned; so are all loads and stores
//   void store(float*, Lanes)
//   Lanes load_first(const float*, int count)         lanes 0 to count - 1; the others are 0, and not read
//   void store_first(float*, Lanes, int count)        the others are not written
//   Lanes load_bf16(const bf16*)                      16 values
//   void store_bf16(bf16*, Lanes)                     rounds to nearest, ties to even; denormal numbers may
//                                                     become 0 (by instruction they do)
//   load_first_bf16, store_first_bf16                 likewise
//   void load_bf16_pairs(const bf16*, Lanes& even, Lanes& odd)   32 values, split by their index's parity
//   Lanes load_fp16(const fp16*)                      16 values
//   Lanes load_u8(const uint8_t*), load_i8(const int8_t*)        16 values
//   void store_i8(int8_t*, Lanes)                     16 whole numbers from -128 to 127
//   operator+ - * /, abs
//   fma(a, b, c) = a b + c                            rounded once, but for lanes_scalar.h
//   max(a, b), min(a, b)                              b if one of them is NaN
//   copy_sign(a, sign)                                |a| with the sign of `sign`
//   Lanes round(Lanes)                                to nearest, ties to even
//   Lanes scale_by_power_of_two(Lanes x, Lanes n)     x 2^n for whole n; 0 where that is too small
//   Lanes fraction(Lanes a)                           a - floor(a); 0 of infinities
//   Lanes scale_by_floor(Lanes x, Lanes n)            x 2^floor(n); of NaN anything
//   Lanes select_below(int count, Lanes a, Lanes b)   lane i: a if i < count, else b
//   float sum(Lanes), highest(Lanes)                  in an order that depends on nothing
//   bool any_reaches(Lanes a, float bound)            if a lane is at least `bound`
//   void store_low_half(float*, Lanes), store_low_half_bf16(bf16*, Lanes)       lanes 0 to 7
//   Lanes swap_halves(Lanes)                          lanes 8 to 15, then 0 to 7
//   Lanes low_halves(a, b), high_halves(a, b)         lanes 0 to 7 of both; lanes 8 to 15 of both
//   Lanes reciprocal_coarse(Lanes)                    within 1e-4 (relative)
#pragma once

#include "numbers.h"

#if defined(__AVX512F__)
#include "lanes_avx512.h"
#elif defined(__AVX2__)
#include "lanes_avx2.h"
#else
#include "lanes_scalar.h"
#endif

#include "exponential.h"  // exp2, exp, exp_coarse, tanh: built from the above
