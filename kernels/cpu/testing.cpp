#include "testing.h"

#include <algorithm>
#include <vector>

#include "activation.h"
#include "lanes.h"
#include "norm.h"
#include "operand.h"
#include "rotary.h"

using namespace ts;

namespace {

// Calls function(values) with null pointers of the element's type, for that type.
template <typename Function>
void with_element(int32_t element, Function&& function) {
  element == 0 ? function(static_cast<float*>(nullptr)) : function(static_cast<bf16*>(nullptr));
}

const bf16* as_bf16(const uint16_t* bits) { return reinterpret_cast<const bf16*>(bits); }
const fp16* as_fp16(const uint16_t* bits) { return reinterpret_cast<const fp16*>(bits); }

// out = function(index) of each sixteen values.
template <typename Function>
void by_sixteens(int32_t count, float* out, Function&& function) {
  for (int i = 0; i < count; i += 16) store(out + i, function(i));
}

Lanes apply(int32_t operation, Lanes a, Lanes b) {
  switch (operation) {
    case TS_TEST_EXP: return exp(a);
    case TS_TEST_EXP2: return exp2(a);
    case TS_TEST_TANH: return tanh(a);
    case TS_TEST_ROUND: return round(a);
    case TS_TEST_ABS: return abs(a);
    case TS_TEST_EXP_COARSE: return exp_coarse(a);
    case TS_TEST_EXP2_UPTO_0: return exp2_upto_0(a);
    case TS_TEST_RECIPROCAL_COARSE: return reciprocal_coarse(a);
    case TS_TEST_SWAP_HALVES: return swap_halves(a);
    case TS_TEST_LOW_HALVES: return low_halves(a, b);
    case TS_TEST_HIGH_HALVES: return high_halves(a, b);
    case TS_TEST_ADD: return a + b;
    case TS_TEST_SUBTRACT: return a - b;
    case TS_TEST_MULTIPLY: return a * b;
    case TS_TEST_DIVIDE: return a / b;
    case TS_TEST_MAX: return max(a, b);
    case TS_TEST_MIN: return min(a, b);
    case TS_TEST_COPY_SIGN: return copy_sign(a, b);
  }
  return zero();
}

}  // namespace

void ts_test_floats_to_bf16(const float* values, int32_t count, uint16_t* out) {
  convert_row(values, count, reinterpret_cast<bf16*>(out));
}

void ts_test_bf16_to_floats(const uint16_t* values, int32_t count, float* out) {
  convert_row(as_bf16(values), count, out);
}

void ts_test_floats_to_fp16(const float* values, int32_t count, uint16_t* out) {
  for (int i = 0; i < count; ++i) out[i] = to_fp16(values[i]).bits;
}

void ts_test_fp16_to_floats(const uint16_t* values, int32_t count, float* out) {
  for (int i = 0; i < count; ++i) out[i] = to_float(as_fp16(values)[i]);
}

void ts_test_load_bf16_pairs(const uint16_t* values, int32_t count, float* even, float* odd) {
  for (int i = 0; i < count; i += 16) {
    Lanes a, b;
    load_bf16_pairs(as_bf16(values) + 2 * i, a, b);
    store(even + i, a);
    store(odd + i, b);
  }
}

void ts_test_load_fp16(const uint16_t* values, int32_t count, float* out) {
  by_sixteens(count, out, [&](int i) { return load_fp16(as_fp16(values) + i); });
}

void ts_test_load_u8(const uint8_t* values, int32_t count, float* out) {
  by_sixteens(count, out, [&](int i) { return load_u8(values + i); });
}

void ts_test_load_i8(const int8_t* values, int32_t count, float* out) {
  by_sixteens(count, out, [&](int i) { return load_i8(values + i); });
}

void ts_test_store_i8(const float* values, int32_t count, int8_t* out) {
  for (int i = 0; i < count; i += 16) store_i8(out + i, load(values + i));
}

void ts_test_store_low_half(int32_t element, const float* values, int32_t count, void* out) {
  for (int i = 0; i < count; i += 16) {
    if (element == 0) store_low_half(static_cast<float*>(out) + i / 2, load(values + i));
    if (element == 1) store_low_half_bf16(static_cast<bf16*>(out) + i / 2, load(values + i));
  }
}

void ts_test_scale_by_power_of_two(const float* values, const float* powers, int32_t count, float* out) {
  by_sixteens(count, out, [&](int i) { return scale_by_power_of_two(load(values + i), load(powers + i)); });
}

void ts_test_select_below(int32_t below, const float* a, const float* b, float* out) {
  store(out, select_below(below, load(a), load(b)));
}

float ts_test_sum(const float* values) { return sum(load(values)); }

float ts_test_highest(const float* values) { return highest(load(values)); }

int32_t ts_test_any_reaches(const float* values, float bound) { return any_reaches(load(values), bound); }

void ts_test_each(int32_t operation, const float* a, const float* b, int32_t count, float* out) {
  for (int i = 0; i < count; i += 16) {
    const int left = count - i;
    const Lanes second = b == nullptr ? zero() : load_elements(b + i, left);
    store_elements(out + i, apply(operation, load_elements(a + i, left), second), left);
  }
}

void ts_test_rms_norm(int32_t element, const float* x, const float* weight, float epsilon, int32_t rows,
                      int32_t size, void* out) {
  with_element(element, [&](auto* type) {
    auto* rows_out = static_cast<decltype(type)>(out);
    for (int row = 0; row < rows; ++row) {
      rms_norm(x + row * size, weight, epsilon, size, rows_out + row * size);
    }
  });
}

void ts_test_add_rms_norm(int32_t element, float* sum, const void* x, const float* weight, float epsilon,
                          int32_t size) {
  if (element == 0) add_rms_norm(sum, static_cast<const float*>(x), weight, epsilon, size);
  if (element == 1) add_rms_norm(sum, static_cast<const bf16*>(x), weight, epsilon, size);
}

void ts_test_rms_norm_heads(int32_t element, void* heads, int32_t num_heads, int32_t head_dim,
                            const float* weight, float epsilon) {
  with_element(element, [&](auto* type) {
    rms_norm_heads(static_cast<decltype(type)>(heads), num_heads, head_dim, weight, epsilon);
  });
}

void ts_test_rotate_heads(int32_t element, void* heads, int32_t num_heads, int32_t head_dim,
                          const float* frequencies, int32_t position) {
  RotaryTables tables;
  const int index = tables.add(frequencies, head_dim / 2);
  tables.cover(position);
  with_element(element, [&](auto* type) {
    rotate_heads(static_cast<decltype(type)>(heads), num_heads, head_dim, tables[index].cosines(position),
                 tables[index].sines(position));
  });
}

void ts_test_gated(int32_t activation, int32_t element, const float* gate_up, int32_t panels, void* out) {
  with_element(element, [&](auto* type) {
    auto* outputs = static_cast<decltype(type)>(out);
    for (int i = 0; i < panels; ++i) {
      const Lanes lanes = load(gate_up + 16 * i);
      activation == 0 ? store_gated<Activation::silu>(outputs + 8 * i, lanes)
                      : store_gated<Activation::gelu_tanh>(outputs + 8 * i, lanes);
    }
  });
}

void ts_test_gated_pair(int32_t activation, int32_t element, const float* gate_up, void* out) {
  const Lanes first = load(gate_up), second = load(gate_up + 16);
  with_element(element, [&](auto* type) {
    auto* outputs = static_cast<decltype(type)>(out);
    activation == 0 ? store_gated<Activation::silu>(outputs, first, second)
                    : store_gated<Activation::gelu_tanh>(outputs, first, second);
  });
}

void ts_test_add_scaled_row(int32_t element, float* sum, const float* x, float factor, int32_t size) {
  with_element(element, [&](auto* type) {
    std::vector<std::remove_pointer_t<decltype(type)>> scaled(size);
    scale_row(x, factor, size, scaled.data());
    add_row(sum, scaled.data(), size);
  });
}

int32_t ts_test_operand(int32_t format, const float* x, int32_t rows, int32_t columns, float* f32,
                        uint16_t* bf16, int8_t* int8, float* scales, int32_t* sums) {
  Matrix matrix{};
  matrix.columns = padded_columns(columns);
  matrix.segments.push_back(Segment{static_cast<Format>(format), 0, 0, Memory()});
  Operand operand;
  operand.reserve(matrix, rows);
  const OperandKind kind = operand_kind(static_cast<Format>(format));
  const int groups = matrix.columns / kColumnMultiple;
  for (int row = 0; row < rows; ++row) {
    operand.set_row(row, x + row * columns, columns);
    const size_t start = size_t(row) * matrix.columns;
    if (kind == OperandKind::f32) std::copy_n(operand.f32_row(row), matrix.columns, f32 + start);
    if (kind == OperandKind::bf16) std::memcpy(bf16 + start, operand.bf16_row(row), matrix.columns * 2);
    if (kind != OperandKind::int8) continue;
    std::copy_n(operand.int8_row(row), matrix.columns, int8 + start);
    for (int i = 0; i < groups; ++i) {
      scales[row * groups + i] = operand.scales_row(row)[i].scale;
      sums[row * groups + i] = operand.scales_row(row)[i].sum;
    }
  }
  return static_cast<int32_t>(kind);
}
