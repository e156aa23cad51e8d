// Single operations, for tests. Not part of the engine's interface, and free to change with it.
#pragma once

#include <stdint.h>

#pragma GCC visibility push(default)
extern "C" {

// out = conversion of each of `count` values. bf16 and fp16 values are given by their bits.
void ts_test_floats_to_bf16(const float* values, int32_t count, uint16_t* out);
void ts_test_bf16_to_floats(const uint16_t* values, int32_t count, float* out);
void ts_test_floats_to_fp16(const float* values, int32_t count, uint16_t* out);
void ts_test_fp16_to_floats(const uint16_t* values, int32_t count, float* out);

// The functions of lanes.h that have `count` lanes for an argument, sixteen at a time (a multiple of 16).
void ts_test_load_bf16_pairs(const uint16_t* values, int32_t count, float* even, float* odd);
void ts_test_load_fp16(const uint16_t* values, int32_t count, float* out);
void ts_test_load_u8(const uint8_t* values, int32_t count, float* out);
void ts_test_load_i8(const int8_t* values, int32_t count, float* out);
void ts_test_store_i8(const float* values, int32_t count, int8_t* out);
void ts_test_store_low_half(int32_t element, const float* values, int32_t count, void* out);
void ts_test_scale_by_power_of_two(const float* values, const float* powers, int32_t count, float* out);
void ts_test_select_below(int32_t below, const float* a, const float* b, float* out);  // 16 lanes
float ts_test_sum(const float* values);                                                // of 16 lanes
float ts_test_highest(const float* values);
int32_t ts_test_any_reaches(const float* values, float bound);

enum {
  TS_TEST_EXP, TS_TEST_EXP2, TS_TEST_TANH, TS_TEST_EXP_COARSE, TS_TEST_EXP2_UPTO_0, TS_TEST_RECIPROCAL_COARSE, TS_TEST_ROUND,
  TS_TEST_ABS,
  TS_TEST_SWAP_HALVES, TS_TEST_LOW_HALVES, TS_TEST_HIGH_HALVES,
  TS_TEST_ADD, TS_TEST_SUBTRACT, TS_TEST_MULTIPLY, TS_TEST_DIVIDE, TS_TEST_MAX, TS_TEST_MIN, TS_TEST_COPY_SIGN
};
// out = operation(a, b) of each of `count` values; b is not read by those that take one argument.
void ts_test_each(int32_t operation, const float* a, const float* b, int32_t count, float* out);

// Below, an element is fp32 (0) or bf16 (1).

// out [rows][size] = norm of x [rows][size]; x fp32.
void ts_test_rms_norm(int32_t element, const float* x, const float* weight, float epsilon, int32_t rows,
                      int32_t size, void* out);
// sum [size] += norm of x [size].
void ts_test_add_rms_norm(int32_t element, float* sum, const void* x, const float* weight, float epsilon,
                          int32_t size);
// In place: heads [num_heads][head_dim].
void ts_test_rms_norm_heads(int32_t element, void* heads, int32_t num_heads, int32_t head_dim,
                            const float* weight, float epsilon);
// In place: heads [num_heads][head_dim]; frequencies [head_dim / 2].
void ts_test_rotate_heads(int32_t element, void* heads, int32_t num_heads, int32_t head_dim,
                          const float* frequencies, int32_t position);
// out [panels][8] of gate_up [panels][16]; activation: TS_SILU or TS_GELU_TANH.
void ts_test_gated(int32_t activation, int32_t element, const float* gate_up, int32_t panels, void* out);
// out [16] of two panels.
void ts_test_gated_pair(int32_t activation, int32_t element, const float* gate_up, void* out);
// sum [size] += factor * x [size]; through a row of elements.
void ts_test_add_scaled_row(int32_t element, float* sum, const float* x, float factor, int32_t size);

// Rows x [rows][columns] as the operand of a matrix of one format. Returns the form that this tier's product
// takes: 0 fp32, in f32; 1 bf16, in bf16; 2 int8, in int8, scales and sums. All [rows][padded columns], but
// scales and sums, [rows][padded columns / 32].
int32_t ts_test_operand(int32_t format, const float* x, int32_t rows, int32_t columns, float* f32,
                        uint16_t* bf16, int8_t* int8, float* scales, int32_t* sums);

}  // extern "C"
#pragma GCC visibility pop
