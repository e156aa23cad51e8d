// Tile registers: eight of them, each 16 rows of 64 bytes (AMX).
//
// A product C += A B of tiles takes A as 16 rows of 32 bf16 values, B as [16][16][2] (two neighbouring values
// of the summed index side by side), and C as 16 rows of 16 floats.
#pragma once

#if defined(__AMX_BF16__)

#include <cstddef>
#include <cstdint>

namespace ts {

constexpr int kTileRows = 16;
constexpr size_t kTileRowBytes = 64;

// What the processor is told of the tiles' sizes.
struct alignas(64) TileSizes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The compiler knows nothing of tile registers: all that touch memory say so to it ("memory").
inline void configure_tiles(const TileSizes& sizes) {
  asm volatile("ldtilecfg %0" : : "m"(sizes) : "memory");
}

// All tiles of full size: once at the start of a run, in each thread, before any tile is used.
inline void configure_tiles() { configure_tiles(TileSizes()); }

// At the end of a run: a thread without tiles in use is cheaper to switch.
inline void release_tiles() { asm volatile("tilerelease" : : : "memory"); }

template <int Tile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}

// Rows lie `stride` bytes apart.
template <int Tile>
inline void load_tile(const void* rows, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(Tile) : "memory");
}

// The same for what is read once: the first-level cache need not keep it.
template <int Tile>
inline void load_passing_tile(const void* rows, size_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
inline void store_tile(void* rows, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride), "i"(Tile) : "memory");
}

// C += A B of bf16 values; sums in fp32, products exact, denormal numbers taken for zeros.
template <int C, int A, int B>
inline void multiply_tiles_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// C += A B of int8 values: A 16 rows of 64, B [16][16][4], C 16 rows of 16 int32.
template <int C, int A, int B>
inline void multiply_tiles_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace ts

#endif
