// The C interface. No function throws or checks: see README.md. Objects are freed by their `_free`; none of them is
// to be used by two threads at a time.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)  // all else of the library is hidden

// Counts up with every change of what follows.
#define TS_API_VERSION 3

typedef struct ts_pool ts_pool;
typedef struct ts_matrix ts_matrix;
typedef struct ts_decoder ts_decoder;
typedef struct ts_encoder ts_encoder;

int32_t ts_api_version(void);
// 0 if the processor and the system let this build run (amx: asks Linux for the tiles); else it must not be used.
int32_t ts_start(void);

// threads: at least 1, the caller's included. NULL if the system refuses that many.
ts_pool* ts_pool_new(int32_t threads);
void ts_pool_free(ts_pool*);

// Formats and sources: format.h, matrix.h. columns: not padded.
ts_matrix* ts_matrix_new(int32_t columns);
void ts_matrix_add_segment(ts_matrix*, int32_t format, int32_t rows);
// Rows [0, num_rows) of a source, contiguous, into the last segment; row r goes to
// r / run * stride + offset + r % run of the segment.
void ts_matrix_fill(ts_matrix*, ts_pool*, int32_t source, const void* rows, int32_t num_rows, int32_t run,
                    int32_t stride, int32_t offset);
// [rows] floats, placed likewise.
void ts_matrix_fill_bias(ts_matrix*, const float* values, int32_t num_rows, int32_t run, int32_t stride,
                         int32_t offset);
size_t ts_matrix_bytes(const ts_matrix*);
// One row as floats: [columns].
void ts_matrix_unpack_row(const ts_matrix*, int32_t row, float* out);
// out [num_rows][matrix rows] = x [num_rows][columns] W^T + b, all fp32: for tests and measurements.
void ts_matrix_multiply(const ts_matrix*, ts_pool*, const float* x, int32_t num_rows, float* out);
void ts_matrix_free(ts_matrix*);

// Dequantize `count` values of GGUF blocks (source q8_0 ...) to fp32.
void ts_dequantize(int32_t source, const void* blocks, size_t count, float* out);

enum { TS_SILU = 0, TS_GELU_TANH = 1, TS_GELU = 2, TS_RELU = 3 };  // a decoder has the first two

typedef struct {
  int32_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, num_layers, vocab_size;
  int32_t activation;     // TS_SILU or TS_GELU_TANH
  int32_t element;        // of activations between products: 0 fp32, 1 bf16
  int32_t kv_format;      // 0 fp32, 1 bf16, 2 int8
  int32_t block_size;     // a multiple of 16
  int32_t num_groups;     // block tables
  int32_t group_places;   // layers of a group
  float rms_norm_eps;
  float attention_scale;
  float embedding_scale;
  float logit_softcap;    // 0: none
} ts_decoder_shape;

// Matrices and vectors are the caller's, and outlive the decoder. Norm weights: fp32, offset added.
typedef struct {
  const ts_matrix *qkv, *output, *gate_up, *down;  // gate_up: gate and up rows interleaved by eights
  const float *attention_norm, *mlp_norm;          // [hidden_size]
  const float *attention_output_norm, *mlp_output_norm;  // NULL: none
  const float *query_norm, *key_norm;                    // [head_dim]; NULL: none
  const float* rotary_frequencies;                       // [head_dim / 2], radians per token
  int32_t window;                                        // 0: none
  int32_t group, place;                                  // in the cache
} ts_layer;

typedef struct {
  int32_t num_tokens, num_sequences;
  const int32_t *token_ids, *positions, *starts, *block_tables;  // step.h
  int32_t table_width;
} ts_step;

ts_decoder* ts_decoder_new(const ts_decoder_shape*, ts_pool*, const ts_matrix* embedding, const ts_matrix* head,
                           const float* final_norm, const ts_layer* layers);
void ts_decoder_free(ts_decoder*);
size_t ts_decoder_block_bytes(const ts_decoder*);
// pool: [num_blocks][block_bytes], zeroed, aligned to 64; the caller's.
void ts_decoder_set_cache(ts_decoder*, uint8_t* pool);
// hidden: [T][hidden_size] fp32, after the last norm.
void ts_decoder_forward(ts_decoder*, const ts_step*, float* hidden);
// Like it, for layers [0, num_layers) only, without the last norm: for tests.
void ts_decoder_forward_layers(ts_decoder*, const ts_step*, int32_t num_layers, float* hidden);
// Logits of num_rows rows of `hidden` [.][hidden_size] named by `rows`. out: [num_rows][vocab_size] fp32, or NULL;
// highest_ids: [num_rows], of the largest logit (the lowest id of equals; -1 if a logit is not finite), or NULL.
void ts_decoder_logits(ts_decoder*, const float* hidden, const int32_t* rows, int32_t num_rows, float* out,
                       int32_t* highest_ids);

// Seconds spent since the last call, per kind of phase, in the caller's thread: TS_NUM_TIMES doubles.
enum { TS_TIME_NORM, TS_TIME_QKV, TS_TIME_ATTENTION, TS_TIME_OUTPUT, TS_TIME_GATE_UP, TS_TIME_DOWN, TS_TIME_HEAD,
       TS_NUM_TIMES };
void ts_decoder_times(ts_decoder*, double* seconds);

typedef struct {
  int32_t hidden_size, intermediate_size, num_heads, num_layers;
  int32_t activation;  // TS_GELU_TANH, TS_GELU or TS_RELU
  int32_t pre_norm;    // norms: 0 behind each sum, 1 before each product
  float norm_eps;
} ts_encoder_shape;

// Matrices and vectors are the caller's, and outlive the encoder. Formats: f32, bf16 or split, of all matrices alike.
typedef struct {
  const ts_matrix *qkv, *output, *up, *down;  // qkv: rows of all query heads, then key heads, then value heads
  const float *attention_norm, *attention_norm_bias, *mlp_norm, *mlp_norm_bias;  // [hidden_size]
} ts_encoder_layer;

// num_layers: at least 1. final_norm: NULL if there is none.
ts_encoder* ts_encoder_new(const ts_encoder_shape*, ts_pool*, const ts_encoder_layer* layers, const float* final_norm,
                           const float* final_norm_bias);
void ts_encoder_free(ts_encoder*);
// hidden: [T][hidden_size] fp32, embeddings of texts laid end to end; in place. starts: [num_texts + 1], each text's
// first row, and T.
void ts_encoder_forward(ts_encoder*, const int32_t* starts, int32_t num_texts, float* hidden);
// As ts_decoder_times.
void ts_encoder_times(ts_encoder*, double* seconds);

// Rows of a table, one for each token.
typedef struct {
  const float* table;  // [.][size]
  const int32_t* ids;  // [num_rows]
} ts_embedding;

// out: [num_rows][size], the sum of the embeddings, then its LayerNorm if `norm` is not NULL.
void ts_embed(ts_pool*, const ts_embedding*, int32_t num_embeddings, int32_t size, const float* norm,
              const float* norm_bias, float norm_eps, int32_t num_rows, float* out);

// Bytes per second that the pool's threads read together from `size` bytes: the best of several times.
double ts_read_bandwidth(ts_pool*, size_t size);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
