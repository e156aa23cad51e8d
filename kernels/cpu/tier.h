// What this build's processors multiply by.
#pragma once

#include "format.h"

namespace ts {

// The form of the activations that a product takes.
enum class OperandKind { f32, bf16, int8, split };

constexpr OperandKind operand_kind(Format format) {
  if (format == Format::f32) return OperandKind::f32;
#if defined(__AMX_BF16__)
  if (format == Format::split) return OperandKind::split;
#endif
#if defined(__AVX512VNNI__)
  if (is_quantized(format)) return OperandKind::int8;
#endif
#if defined(__AVX512BF16__)
  if (format == Format::bf16) return OperandKind::bf16;
#endif
  return OperandKind::f32;  // all weights are unpacked to fp32, panel by panel
}

}  // namespace ts
