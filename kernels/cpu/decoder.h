// The decoder program: what a step does, phase by phase, in all threads together.
#pragma once

#include <memory>
#include <vector>

#include "api.h"
#include "attention.h"
#include "kv_cache.h"
#include "matrix.h"
#include "step.h"
#include "thread_pool.h"

namespace ts {

// A model of any of our architectures: what differs between them is in the shape and the layers.
//
// Does not own what it refers to: the pool, the matrices, the vectors and the cache outlive it.
class Decoder {
 public:
  virtual ~Decoder() = default;

  virtual KvShape cache_shape() const = 0;
  virtual void set_cache(uint8_t* pool) = 0;

  // hidden: [T][hidden_size], what comes out of the first `num_layers` layers; after the last norm, too, if those
  // are all and `final_norm`.
  virtual void forward(const Step& step, int num_layers, bool final_norm, float* hidden) = 0;

  // See ts_decoder_logits.
  virtual void logits(const float* hidden, const int32_t* rows, int num_rows, float* out,
                      int32_t* highest_ids) = 0;

  // Seconds by phase (TS_TIME_...) since the last call, of the caller's thread.
  virtual void take_times(double* seconds) = 0;
};

struct DecoderParts {
  ts_decoder_shape shape;
  const Matrix* embedding;
  const Matrix* head;
  const float* final_norm;
  std::vector<ts_layer> layers;
};

std::unique_ptr<Decoder> make_decoder(DecoderParts parts, ThreadPool& pool);

}  // namespace ts
