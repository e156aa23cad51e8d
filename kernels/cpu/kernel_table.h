// Functions compiled for every number of rows and panels of a tile.
#pragma once

#include <array>
#include <utility>

namespace ts {

template <typename Kernel, typename Kernels, int Rows, int... Panel>
constexpr std::array<Kernel, sizeof...(Panel)> kernel_row(std::integer_sequence<int, Panel...>) {
  return {Kernels::template get<Rows, Panel + 1>()...};
}

template <typename Kernel, typename Kernels, int Panels, int... Row>
constexpr auto kernel_rows(std::integer_sequence<int, Row...>) {
  using Numbers = std::make_integer_sequence<int, Panels>;
  return std::array<std::array<Kernel, Panels>, sizeof...(Row)>{
      kernel_row<Kernel, Kernels, Row + 1>(Numbers())...};
}

// [rows - 1][panels - 1]: Kernels::get<rows, panels>().
template <typename Kernel, typename Kernels, int Rows, int Panels>
constexpr auto kernel_table() {
  return kernel_rows<Kernel, Kernels, Panels>(std::make_integer_sequence<int, Rows>());
}

}  // namespace ts
