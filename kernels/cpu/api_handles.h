// What the C interface's handles are.
#pragma once

#include "api.h"
#include "matrix.h"
#include "thread_pool.h"

struct ts_pool {
  ts::ThreadPool threads;
};

struct ts_matrix {
  ts::Matrix matrix;
  int columns;  // not padded
};
