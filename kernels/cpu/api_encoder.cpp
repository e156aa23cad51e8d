// The encoder's part of the C interface.
#include <algorithm>

#include "api.h"
#include "api_handles.h"
#include "encoder.h"

struct ts_encoder {
  ts::Encoder encoder;
};

ts_encoder* ts_encoder_new(const ts_encoder_shape* shape, ts_pool* pool, const ts_encoder_layer* layers,
                           const float* final_norm, const float* final_norm_bias) {
  ts::EncoderParts parts{*shape, std::vector<ts_encoder_layer>(layers, layers + shape->num_layers), final_norm,
                         final_norm_bias};
  return new ts_encoder{ts::Encoder(std::move(parts), pool->threads)};
}

void ts_encoder_free(ts_encoder* encoder) { delete encoder; }

void ts_encoder_forward(ts_encoder* encoder, const int32_t* starts, int32_t num_texts, float* hidden) {
  encoder->encoder.forward(starts, num_texts, hidden);
}

void ts_encoder_times(ts_encoder* encoder, double* seconds) { encoder->encoder.take_times(seconds); }

void ts_embed(ts_pool* pool, const ts_embedding* embeddings, int32_t num_embeddings, int32_t size, const float* norm,
              const float* norm_bias, float norm_eps, int32_t num_rows, float* out) {
  const int members = pool->threads.size();
  pool->threads.run([&](int member) {
    const ts::Span own = ts::share(num_rows, member, members);
    for (int row = own.begin; row < own.end; ++row) {
      float* sum = out + size_t(row) * size;
      std::copy_n(embeddings[0].table + size_t(embeddings[0].ids[row]) * size, size, sum);
      for (int i = 1; i < num_embeddings; ++i)
        ts::add_row(sum, embeddings[i].table + size_t(embeddings[i].ids[row]) * size, size);
      if (norm != nullptr) ts::layer_norm_in_place(sum, {norm, norm_bias, norm_eps}, size);
    }
  });
}
