#include "testing_matrix.h"

#include <algorithm>

#include "api_handles.h"
#include "unpack.h"

namespace {

// Calls visit(segment, its panel, the next one or null) for each panel.
template <typename Visit>
void each_panel(const ts::Matrix& matrix, Visit&& visit) {
  for (const ts::Segment& segment : matrix.segments) {
    const int last = segment.first_panel + segment.panels - 1;
    for (int panel = segment.first_panel; panel <= last; ++panel) {
      const uint8_t* next = panel < last ? segment.panel(panel + 1, matrix.columns) : nullptr;
      visit(segment, segment.panel(panel, matrix.columns), next);
    }
  }
}

}  // namespace

void ts_test_unpack(const ts_matrix* matrix, float* out) {
  const int columns = matrix->matrix.columns;
  each_panel(matrix->matrix, [&](const ts::Segment& segment, const uint8_t* panel, const uint8_t* next) {
    ts::unpack_panel(segment.format, panel, columns, out, next);
    out += size_t(columns) * ts::kPanelRows;
  });
}

void ts_test_panels(const ts_matrix* matrix, uint8_t* out) {
  each_panel(matrix->matrix, [&](const ts::Segment& segment, const uint8_t* panel, const uint8_t*) {
    out = std::copy_n(panel, ts::panel_bytes(segment.format, matrix->matrix.columns), out);
  });
}
