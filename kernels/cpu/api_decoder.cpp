// The decoder's part of the C interface.
#include "api.h"
#include "api_handles.h"
#include "decoder.h"

struct ts_decoder {
  std::unique_ptr<ts::Decoder> decoder;
  int num_layers;
};

namespace {

ts::Step step_of(const ts_step& step) {
  return {step.num_tokens, step.num_sequences, step.token_ids,  step.positions,
          step.starts,     step.block_tables,  step.table_width};
}

}  // namespace

ts_decoder* ts_decoder_new(const ts_decoder_shape* shape, ts_pool* pool, const ts_matrix* embedding,
                           const ts_matrix* head, const float* final_norm, const ts_layer* layers) {
  ts::DecoderParts parts{*shape, &embedding->matrix, &head->matrix, final_norm,
                         std::vector<ts_layer>(layers, layers + shape->num_layers)};
  return new ts_decoder{ts::make_decoder(std::move(parts), pool->threads), shape->num_layers};
}

void ts_decoder_free(ts_decoder* decoder) { delete decoder; }

size_t ts_decoder_block_bytes(const ts_decoder* decoder) { return decoder->decoder->cache_shape().block_bytes(); }

void ts_decoder_set_cache(ts_decoder* decoder, uint8_t* pool) { decoder->decoder->set_cache(pool); }

void ts_decoder_forward(ts_decoder* decoder, const ts_step* step, float* hidden) {
  decoder->decoder->forward(step_of(*step), decoder->num_layers, true, hidden);
}

void ts_decoder_forward_layers(ts_decoder* decoder, const ts_step* step, int32_t num_layers, float* hidden) {
  decoder->decoder->forward(step_of(*step), num_layers, false, hidden);
}

void ts_decoder_logits(ts_decoder* decoder, const float* hidden, const int32_t* rows, int32_t num_rows, float* out,
                       int32_t* highest_ids) {
  decoder->decoder->logits(hidden, rows, num_rows, out, highest_ids);
}

void ts_decoder_times(ts_decoder* decoder, double* seconds) { decoder->decoder->take_times(seconds); }
