// Vector helpers of the decode kernels: bfloat16 in and out of float registers, e^x, sums.
#pragma once

#include <ATen/core/Tensor.h>

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

namespace {

using at::BFloat16;
using at::Tensor;

constexpr int64_t kLanes = 16;  // floats in a vector register
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxRows = 4;  // rows that fit the registers together

__m512 low_halves(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
__m512 high_halves(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

__m512 widen(const BFloat16* values, __mmask16 mask) {
  return low_halves(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, values)));
}

// Values rounded to bfloat16, as such or as floats.
void narrow(BFloat16* to, __m512 values, __mmask16 mask) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(values));
}
void narrow(float* to, __m512 values, __mmask16 mask) {
  _mm512_mask_storeu_ps(to, mask, low_halves(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values))));
}

void ask_memory_for(const void* line) { _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T0); }

// Calls work(integral_constant<1..kMaxRows>, first row) until `rows` rows are done.
template <typename Work>
void in_row_groups(int64_t rows, const Work& work) {
  int64_t row = 0;
  for (; rows - row >= 4; row += 4) work(std::integral_constant<int, 4>{}, row);
  if (rows - row == 3) work(std::integral_constant<int, 3>{}, row);
  if (rows - row == 2) work(std::integral_constant<int, 2>{}, row);
  if (rows - row == 1) work(std::integral_constant<int, 1>{}, row);
}

// e^x to float accuracy for x <= 0 (2^n times a polynomial on [-ln2/2, ln2/2]); 0 for -infinity.
__m512 exponential(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 720);
  for (float coefficient : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(coefficient));
  }
  const __mmask16 finite = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-104.0f), _CMP_GE_OQ);
  return _mm512_maskz_scalef_ps(finite, p, n);
}

// The sum over each of 16 vectors, as one vector: adding even to odd lanes halves the number of vectors four times.
__m512 sums_of(__m512 (&vectors)[kLanes]) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
#pragma GCC unroll 4
  for (int64_t left = kLanes / 2; left > 0; left /= 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < left; i++) {
      const __m512 a = vectors[2 * i], b = vectors[2 * i + 1];
      vectors[i] = _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
    }
  }
  return vectors[0];
}

}  // namespace
