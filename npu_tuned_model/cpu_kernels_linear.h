// A linear layer of a few rows (tokens), for CPUs with AVX512-BF16: the weight is read once, in memory order.
#pragma once

#include "cpu_kernels_vectors.h"

#include <omp.h>

#include <algorithm>

namespace {

constexpr int64_t kBlock = 64;  // output features that oneDNN keeps side by side
constexpr int64_t kRegisters = kBlock / kLanes;  // vector registers for one row of a block

// sums += kRows rows times one block of 64 columns. The rows are `stride` pairs apart; `weight` holds, for each pair of
// input features, the 64 columns' pairs.
template <int kRows>
void add_products(const uint32_t* rows, int64_t stride, int64_t pairs, const uint32_t* weight,
                  __m512 (&sums)[kRows][kRegisters]) {
  constexpr int64_t kAhead = 32 * kBlock;  // how far ahead of the multiplication memory is asked for the weight
  for (int64_t pair = 0; pair < pairs; pair++) {
    __m512bh columns[kRegisters];
    for (int64_t r = 0; r < kRegisters; r++) {
      const uint32_t* from = weight + pair * kBlock + r * kLanes;
      ask_memory_for(from + kAhead);
      columns[r] = (__m512bh)_mm512_loadu_si512(from);
    }
    for (int row = 0; row < kRows; row++) {
      const __m512bh input = (__m512bh)_mm512_set1_epi32(static_cast<int>(rows[row * stride + pair]));
      for (int64_t r = 0; r < kRegisters; r++) sums[row][r] = _mm512_dpbf16_ps(sums[row][r], columns[r], input);
    }
  }
}

// One block of 64 output features for kRows rows, as bfloat16 or as floats of that precision.
template <int kRows, class To>
void linear_block(const uint32_t* rows, int64_t pairs, const uint32_t* weight, const BFloat16* bias, To* to,
                  int64_t to_stride, int64_t features) {
  __m512 sums[kRows][kRegisters];
  for (auto& row : sums) std::fill(row, row + kRegisters, _mm512_setzero_ps());
  add_products<kRows>(rows, pairs, pairs, weight, sums);
  for (int64_t r = 0; r < kRegisters && r * kLanes < features; r++) {
    const auto mask = static_cast<__mmask16>((1u << std::min<int64_t>(features - r * kLanes, kLanes)) - 1);
    const __m512 shift = bias ? widen(bias + r * kLanes, mask) : _mm512_setzero_ps();
    for (int row = 0; row < kRows; row++) {
      narrow(to + row * to_stride + r * kLanes, _mm512_add_ps(sums[row][r], shift), mask);
    }
  }
}

// A thread's place among those that share the work of a parallel region, and its part of `count` pieces.
struct Worker {
  int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
  int64_t first(int64_t count) const { return count * thread / threads; }
  int64_t last(int64_t count) const { return count * (thread + 1) / threads; }
};

// Rows of inputs as they are. Every kind of linear layer says by its Input what it wants the rows turned into.
struct PlainInput {
  const BFloat16* rows = nullptr;
  int64_t tokens = 0;

  void set(const BFloat16* from, int64_t count, int64_t) { rows = from, tokens = count; }
};

struct Linear {
  using Input = PlainInput;

  const uint32_t* weight;  // (blocks, in / 2, 64, 2): as oneDNN packs it, features that aren't there are zeros
  const BFloat16* bias;    // (out) or null
  int64_t in_pairs, out;

  // A bfloat16 weight has no scales.
  Linear(const Tensor& blocks, const Tensor&, const Tensor& shift, int64_t out_features)
      : weight(static_cast<const uint32_t*>(blocks.const_data_ptr())),
        bias(shift.defined() && shift.numel() ? shift.const_data_ptr<BFloat16>() : nullptr),
        in_pairs(blocks.size(1)),
        out(out_features) {
    TORCH_CHECK(blocks.is_contiguous() && blocks.dim() == 4 && blocks.size(0) == block_count(), "blocks: not of it");
    TORCH_CHECK(!bias || shift.numel() == out, "bias: (out,) or empty");
  }

  int64_t block_count() const { return (out + kBlock - 1) / kBlock; }

  // Features 64 b .. 64 b + 63 of every row, rows of `to` being `stride` apart.
  template <class To>
  void block(const PlainInput& input, int64_t b, To* to, int64_t stride) const {
    const auto* inputs = reinterpret_cast<const uint32_t*>(input.rows);
    in_row_groups(input.tokens, [&](auto size, int64_t row) {
      linear_block<decltype(size)::value>(inputs + row * in_pairs, in_pairs, weight + b * in_pairs * kBlock,
                                          bias ? bias + b * kBlock : nullptr, to + row * stride, stride,
                                          out - b * kBlock);
    });
  }

  // This worker's features of `to` (tokens, out).
  template <class To>
  void share(const PlainInput& input, To* to, const Worker& worker) const {
    for (int64_t b = worker.first(block_count()); b < worker.last(block_count()); b++) {
      block(input, b, to + b * kBlock, out);
    }
  }
};

// The same for a weight as it is, (out, in): an output layer that shares the embedding's.
struct PlainLinear {
  using Input = PlainInput;

  const BFloat16* weight;
  int64_t in, out;

  explicit PlainLinear(const Tensor& plain)
      : weight(plain.const_data_ptr<BFloat16>()), in(plain.size(1)), out(plain.size(0)) {
    TORCH_CHECK(plain.is_contiguous() && plain.dim() == 2 && in % (2 * kLanes) == 0, "weight: (out, a multiple of 32)");
  }

  static constexpr int64_t features_at_once(int rows) { return rows == 1 ? 16 : rows == 2 ? 8 : 4; }

  // kRows rows, and as many output features as fill 16 registers with products.
  template <int kRows, class To>
  void features(const BFloat16* rows, int64_t first, To* to) const {
    constexpr int64_t kFeatures = features_at_once(kRows);
    __m512 products[kLanes];
    std::fill(products, products + kLanes, _mm512_setzero_ps());
    for (int64_t i = 0; i < in; i += 2 * kLanes) {
      __m512bh inputs[kRows];
      for (int row = 0; row < kRows; row++) inputs[row] = (__m512bh)_mm512_loadu_si512(rows + row * in + i);
#pragma GCC unroll 16
      for (int64_t f = 0; f < kFeatures; f++) {
        const BFloat16* from = weight + std::min(first + f, out - 1) * in + i;
        ask_memory_for(from + kFeatures * in);
        const __m512bh column = (__m512bh)_mm512_loadu_si512(from);
        for (int row = 0; row < kRows; row++) {
          products[f * kRows + row] = _mm512_dpbf16_ps(products[f * kRows + row], column, inputs[row]);
        }
      }
    }
    alignas(64) float sums[kLanes];
    _mm512_store_ps(sums, sums_of(products));
    for (int64_t f = 0; f < kFeatures && first + f < out; f++) {
      for (int row = 0; row < kRows; row++) to[row * out + first + f] = To(BFloat16(sums[f * kRows + row]));
    }
  }

  int64_t block_count() const { return (out + kBlock - 1) / kBlock; }

  template <class To>
  void share(const PlainInput& input, To* to, const Worker& worker) const {
    const int64_t last = std::min(worker.last(block_count()) * kBlock, out);
    for (int64_t first = worker.first(block_count()) * kBlock; first < last; first += kLanes) {
      in_row_groups(input.tokens, [&](auto size, int64_t row) {
        constexpr int kRows = decltype(size)::value;
        for (int64_t f = first; f < std::min(first + kLanes, last); f += features_at_once(kRows)) {
          features<kRows>(input.rows + row * in, f, to + row * out);
        }
      });
    }
  }
};

}  // namespace
