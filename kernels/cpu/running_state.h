// What is set in a thread while it computes.
#pragma once

#if defined(__SSE__)
#include <immintrin.h>
#endif

#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

namespace ts {

// From construction to destruction: numbers too small for a normal float count as zero, as they always do in tile
// products, so that all tiers agree and none is slow with them; and the tiles are ready. The thread is then as it
// was: the caller's floats are its own affair, and a thread that sleeps with live tiles makes each switch of
// threads dearer.
class RunningState {
 public:
  RunningState() {
#if defined(__SSE__)
    constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
    _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero);
#endif
#if defined(__AMX_BF16__)
    configure_tiles();
#endif
  }
  ~RunningState() {
#if defined(__AMX_BF16__)
    release_tiles();
#endif
#if defined(__SSE__)
    _mm_setcsr(saved_);
#endif
  }
  RunningState(const RunningState&) = delete;
  RunningState& operator=(const RunningState&) = delete;

 private:
#if defined(__SSE__)
  const unsigned saved_ = _mm_getcsr();
#endif
};

}  // namespace ts
