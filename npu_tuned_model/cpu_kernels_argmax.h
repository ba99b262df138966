// Which value of a row is the largest, found by several workers, each in its part of the row.
#pragma once

#include "cpu_kernels_linear.h"

#include <cmath>
#include <limits>
#include <vector>

namespace {

// The first of the largest of `count` values; NaN counts as larger than any number, as torch's argmax has it.
int64_t first_largest(const float* values, int64_t count) {
  const auto mask_at = [&](int64_t i) { return static_cast<__mmask16>((1u << std::min(count - i, kLanes)) - 1); };
  const __m512 lowest = _mm512_set1_ps(-INFINITY);
  __m512 highest = lowest;
  __mmask16 nans = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const __m512 some = _mm512_mask_loadu_ps(lowest, mask_at(i), values + i);
    nans |= _mm512_cmp_ps_mask(some, some, _CMP_UNORD_Q);
    highest = _mm512_max_ps(some, highest);
  }
  const __m512 sought = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
  for (int64_t i = 0; i < count; i += kLanes) {
    const __m512 some = _mm512_maskz_loadu_ps(mask_at(i), values + i);
    const __mmask16 found = nans ? _mm512_mask_cmp_ps_mask(mask_at(i), some, some, _CMP_UNORD_Q)
                                 : _mm512_mask_cmp_ps_mask(mask_at(i), some, sought, _CMP_EQ_OQ);
    if (found) return i + __builtin_ctz(found);
  }
  return 0;
}

struct LargestOfRows {
  int64_t rows;
  std::vector<int64_t> places;  // (workers, rows); -1 for none
  std::vector<float> values;    // (workers, rows)

  explicit LargestOfRows(int64_t rows)
      : rows(rows), places(omp_get_max_threads() * rows, -1), values(omp_get_max_threads() * rows) {}

  // `from` (rows, width): looks at places first..last-1 of every row.
  void look(const float* from, int64_t width, int64_t first, int64_t last, const Worker& worker) {
    for (int64_t row = 0; row < rows && first < last; row++) {
      const int64_t place = first + first_largest(from + row * width + first, last - first);
      places[worker.thread * rows + row] = place;
      values[worker.thread * rows + row] = from[row * width + place];
    }
  }

  // After all workers have looked, each at what lies behind the part of the worker before it.
  int64_t of_row(int64_t row) const {
    size_t best = row;
    for (size_t i = row; i < places.size(); i += rows) {
      const bool larger = std::isnan(values[i]) ? !std::isnan(values[best]) : values[i] > values[best];
      if (places[i] >= 0 && (places[best] < 0 || larger)) best = i;
    }
    return places[best];
  }
};

}  // namespace
