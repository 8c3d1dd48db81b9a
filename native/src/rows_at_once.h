// Segments whose units are a few rows each, where each row is little work.
#pragma once

#include <algorithm>
#include <cstdint>

namespace evensong {

constexpr std::int64_t kRowsAtOnce = 8;

inline std::int64_t row_units(std::int64_t rows) { return (rows + kRowsAtOnce - 1) / kRowsAtOnce; }

// Calls `body(row)` for the rows of a unit.
template <typename Body>
void for_rows(std::int64_t unit, std::int64_t rows, Body body) {
  for (std::int64_t row = unit * kRowsAtOnce; row < std::min(rows, (unit + 1) * kRowsAtOnce); ++row) body(row);
}

}  // namespace evensong
