// A linear layer of a few rows (tokens) whose weight is int8 with one scale for each output feature, for CPUs with
// AVX512-VNNI: the weight is read once, in memory order, and never turned into floats.
//
// Each row's inputs become integers of 15 bits, with a power of two for every 128 of them, in two signed bytes each. A
// bfloat16 has 8 bits, so an input of more than a 64th of its group's largest is exact, and the others are off by no
// more than 2^-14 of that. Products are summed in integers, exactly.
#pragma once

#include "cpu_kernels_linear.h"

#include <limits>
#include <vector>

namespace {

constexpr int64_t kQuad = 4;      // inputs that one instruction multiplies and adds in each lane
constexpr int64_t kGroup = 128;   // inputs that share a power of two: their sums fit 32 bits
constexpr int64_t kOffset = 128;  // weights are stored as this much more than they are: the instruction wants them >= 0
constexpr int64_t kTokens = 8;    // rows that share one pass over the weight

// Rows of inputs as integers.
struct Int8Input {
  int64_t tokens = 0, quads = 0, groups = 0;
  std::vector<uint32_t> high, low;  // (tokens, quads): four signed bytes each; an input is 256 high + low
  std::vector<float> units;         // (tokens, groups): what an integer of the group has to be multiplied by
  std::vector<int32_t> offsets;     // (tokens, groups): what kOffset adds to the group's sums

  void set(const BFloat16* rows, int64_t count, int64_t width) {
    tokens = count, quads = width / kQuad, groups = (width + kGroup - 1) / kGroup;
    high.resize(tokens * quads), low.resize(tokens * quads);
    units.resize(tokens * groups), offsets.resize(tokens * groups);
    for (int64_t row = 0; row < tokens; row++) {
      for (int64_t group = 0; group < groups; group++) {
        const int64_t first = group * kGroup;
        convert(rows + row * width + first, std::min(kGroup, width - first), row * groups + group,
                row * quads + first / kQuad);
      }
    }
  }

 private:
  void convert(const BFloat16* values, int64_t count, int64_t group, int64_t quad) {
    const auto mask_at = [&](int64_t i) { return static_cast<__mmask16>((1u << std::min(count - i, kLanes)) - 1); };
    __m512i largest = _mm512_setzero_si512();  // of the bits without the sign: an order of sizes, NaN above infinity
    for (int64_t i = 0; i < count; i += kLanes) {
      const __m512i bits = _mm512_castps_si512(widen(values + i, mask_at(i)));
      largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    const int exponent = (_mm512_reduce_max_epi32(largest) >> 23) - 127;
    const bool finite = exponent < 128;
    // 2^14 times the largest's power of two would let the high byte overflow
    const int shift = 13 - std::clamp(exponent, -100, 127);
    const __m512 factor = _mm512_set1_ps(std::ldexp(1.0f, shift));
    units[group] = finite ? std::ldexp(1.0f, -shift) : std::numeric_limits<float>::quiet_NaN();
    __m512i sum = _mm512_setzero_si512();
    auto* to_high = reinterpret_cast<int8_t*>(&high[quad]);
    auto* to_low = reinterpret_cast<int8_t*>(&low[quad]);
    for (int64_t i = 0; i < count; i += kLanes) {
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(widen(values + i, mask_at(i)), factor));
      // the low byte is signed, so what is above it is rounded to nearest
      const __m512i above = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
      _mm_mask_storeu_epi8(to_high + i, mask_at(i), _mm512_cvtepi32_epi8(above));
      _mm_mask_storeu_epi8(to_low + i, mask_at(i), _mm512_cvtepi32_epi8(whole));
      sum = _mm512_add_epi32(sum, whole);
    }
    offsets[group] = static_cast<int32_t>(kOffset) * _mm512_reduce_add_epi32(sum);
  }
};

struct Int8Linear {
  using Input = Int8Input;

  const uint8_t* weight;  // (blocks, in / 4, 64, 4), plus kOffset; what features that aren't there hold doesn't matter
  const float* scales;    // (blocks, 64)
  const BFloat16* bias;   // (out) or null
  int64_t quads, out;

  Int8Linear(const Tensor& blocks, const Tensor& factors, const Tensor& shift, int64_t out_features)
      : weight(blocks.const_data_ptr<uint8_t>()),
        scales(factors.const_data_ptr<float>()),
        bias(shift.defined() && shift.numel() ? shift.const_data_ptr<BFloat16>() : nullptr),
        quads(blocks.size(1)),
        out(out_features) {
    TORCH_CHECK(blocks.is_contiguous() && blocks.dim() == 4 && blocks.size(0) == block_count(), "blocks: not of it");
    TORCH_CHECK(blocks.size(2) == kBlock && blocks.size(3) == kQuad, "blocks: (blocks, in / 4, 64, 4)");
    TORCH_CHECK(factors.is_contiguous() && factors.numel() == block_count() * kBlock, "scales: one a feature");
    TORCH_CHECK(!bias || shift.numel() == out, "bias: (out,) or empty");
  }

  int64_t block_count() const { return (out + kBlock - 1) / kBlock; }

  // Features 64 b .. 64 b + 63 of every row, rows of `to` being `stride` apart.
  template <class To>
  void block(const Int8Input& input, int64_t b, To* to, int64_t stride) const {
    for (int64_t first = 0; first < input.tokens; first += kTokens) {
      const int64_t tokens = std::min(kTokens, input.tokens - first);
      alignas(64) float sums[kTokens][kBlock] = {};
      for (int64_t group = 0; group < input.groups; group++) {
        const uint8_t* from = weight + (b * quads + group * kGroup / kQuad) * kBlock * kQuad;
        // a pair of rows fills the registers; the weights of a group stay in the nearest cache for the next pair
        for (int64_t row = 0; row < tokens; row += 2) {
          if (row + 1 < tokens) {
            add_group<2>(input, first + row, group, from, &sums[row]);
          } else {
            add_group<1>(input, first + row, group, from, &sums[row]);
          }
        }
      }
      for (int64_t row = 0; row < tokens; row++) finish(sums[row], b, to + (first + row) * stride);
    }
  }

  // This worker's features of `to` (tokens, out).
  template <class To>
  void share(const Int8Input& input, To* to, const Worker& worker) const {
    for (int64_t b = worker.first(block_count()); b < worker.last(block_count()); b++) {
      block(input, b, to + b * kBlock, out);
    }
  }

  // This worker's blocks of the weight itself, bfloat16 as oneDNN packs it: (blocks, in / 2, 64, 2).
  void expand(uint32_t* to, const Worker& worker) const {
    for (int64_t b = worker.first(block_count()); b < worker.last(block_count()); b++) {
      for (int64_t quad = b * quads; quad < (b + 1) * quads; quad++) {
        for (int64_t r = 0; r < kRegisters; r++) {
          const __m512i bytes = _mm512_loadu_si512(weight + (quad * kBlock + r * kLanes) * kQuad);
          const __m512 scale = _mm512_loadu_ps(scales + b * kBlock + r * kLanes);
          for (int pair = 0; pair < 2; pair++) {
            const __m512i even = expanded(bytes, 2 * pair, scale), odd = expanded(bytes, 2 * pair + 1, scale);
            const __m512i both = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
            _mm512_storeu_si512(to + (2 * quad + pair) * kBlock + r * kLanes, both);
          }
        }
      }
    }
  }

 private:
  // sums += a group's part of kRows rows times one block of features.
  template <int kRows>
  static void add_group(const Int8Input& input, int64_t row, int64_t group, const uint8_t* weight,
                        float (*sums)[kBlock]) {
    constexpr int64_t kAhead = 32 * kBlock * kQuad;  // how far ahead memory is asked for the weight
    const int64_t first = group * kGroup / kQuad, last = std::min(first + kGroup / kQuad, input.quads);
    __m512i highs[kRows][kRegisters], lows[kRows][kRegisters];
    for (int i = 0; i < kRows; i++) {
      for (int64_t r = 0; r < kRegisters; r++) highs[i][r] = lows[i][r] = _mm512_setzero_si512();
    }
    const uint32_t* high = &input.high[row * input.quads];
    const uint32_t* low = &input.low[row * input.quads];
    for (int64_t quad = first; quad < last; quad++, weight += kBlock * kQuad) {
      __m512i columns[kRegisters];
      for (int64_t r = 0; r < kRegisters; r++) {
        ask_memory_for(weight + r * kLanes * kQuad + kAhead);
        columns[r] = _mm512_loadu_si512(weight + r * kLanes * kQuad);
      }
      for (int i = 0; i < kRows; i++) {
        const __m512i upper = _mm512_set1_epi32(static_cast<int>(high[i * input.quads + quad]));
        const __m512i lower = _mm512_set1_epi32(static_cast<int>(low[i * input.quads + quad]));
        for (int64_t r = 0; r < kRegisters; r++) {
          highs[i][r] = _mm512_dpbusd_epi32(highs[i][r], columns[r], upper);
          lows[i][r] = _mm512_dpbusd_epi32(lows[i][r], columns[r], lower);
        }
      }
    }
    for (int i = 0; i < kRows; i++) {
      const int64_t place = (row + i) * input.groups + group;
      const __m512 unit = _mm512_set1_ps(input.units[place]);
      const __m512i offset = _mm512_set1_epi32(input.offsets[place]);
      for (int64_t r = 0; r < kRegisters; r++) {
        const __m512i shifted = _mm512_add_epi32(_mm512_slli_epi32(highs[i][r], 8), lows[i][r]);
        const __m512 total = _mm512_cvtepi32_ps(_mm512_sub_epi32(shifted, offset));
        float* sum = sums[i] + r * kLanes;
        _mm512_store_ps(sum, _mm512_fmadd_ps(total, unit, _mm512_load_ps(sum)));
      }
    }
  }

  template <class To>
  void finish(const float* sums, int64_t b, To* to) const {
    for (int64_t i = 0; i < kBlock && b * kBlock + i < out; i += kLanes) {
      const auto mask = static_cast<__mmask16>((1u << std::min(out - b * kBlock - i, kLanes)) - 1);
      const __m512 shift = bias ? widen(bias + b * kBlock + i, mask) : _mm512_setzero_ps();
      narrow(to + i, _mm512_fmadd_ps(_mm512_load_ps(sums + i), _mm512_loadu_ps(scales + b * kBlock + i), shift), mask);
    }
  }

  // Byte `place` of each lane as the bits of a bfloat16 weight.
  static __m512i expanded(__m512i bytes, int place, __m512 scale) {
    const __m512i byte = _mm512_and_si512(_mm512_srli_epi32(bytes, 8 * place), _mm512_set1_epi32(0xff));
    const __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(byte, _mm512_set1_epi32(static_cast<int>(kOffset))));
    return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(value, scale)));
  }
};

}  // namespace
