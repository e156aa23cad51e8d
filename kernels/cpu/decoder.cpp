#include "decoder.h"

#include "decoder_program.h"

namespace ts {

std::unique_ptr<Decoder> make_decoder(DecoderParts parts, ThreadPool& pool) {
  if (parts.shape.element == 0) return std::make_unique<DecoderProgram<float>>(std::move(parts), pool);
  return std::make_unique<DecoderProgram<bf16>>(std::move(parts), pool);
}

}  // namespace ts
