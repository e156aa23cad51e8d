// One step, as the decoder gets it.
#pragma once

#include <cstdint>

namespace ts {

// T tokens of S sequences, laid end to end.
struct Step {
  int32_t num_tokens;            // T
  int32_t num_sequences;         // S
  const int32_t* token_ids;      // [T]
  const int32_t* positions;      // [T]; consecutive within a sequence
  const int32_t* starts;         // [S + 1]: sequence s has rows [starts[s], starts[s + 1])
  const int32_t* block_tables;   // [groups][S][table_width]: block of position p at p / block_size; -1: none,
                                 // where no query of the step looks
  int32_t table_width;
};

}  // namespace ts
