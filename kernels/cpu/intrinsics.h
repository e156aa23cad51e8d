// The compiler's names for the instructions of x86 processors; elsewhere there are none.
#pragma once

#if defined(__x86_64__) || defined(__i386__)

// gcc 12 takes the deliberately undefined operands in its own header for mistakes.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif

#endif
