// Causal attention of prompts onto themselves, for CPUs with AVX512-BF16: scores and their sums in float32, no more than
// one tile of scores in memory, nothing computed above the diagonal's tile.
#pragma once

#include "cpu_kernels_linear.h"

#include <cmath>
#include <vector>

namespace {

// A (batch, sequence, heads, head_dim) tensor whose head rows are contiguous.
struct Heads {
  const BFloat16* data;
  int64_t batch_stride, token_stride, head_stride;

  explicit Heads(const Tensor& tensor)
      : data(tensor.const_data_ptr<BFloat16>()),
        batch_stride(tensor.stride(0)),
        token_stride(tensor.stride(1)),
        head_stride(tensor.stride(2)) {
    TORCH_CHECK(tensor.dim() == 4 && tensor.stride(3) == 1, "BSND with contiguous head rows");
  }
  const BFloat16* row(int64_t batch, int64_t token, int64_t head) const {
    return data + batch * batch_stride + token * token_stride + head * head_stride;
  }
};

struct PromptAttention {
  Heads query, key, value;
  int64_t length, heads, kv_heads, head_dim, tiles;  // a tile: 64 query rows, or 64 keys
  int64_t value_blocks;                              // blocks of 64 features of the values
  float scale;
  std::vector<uint32_t> keys;    // for each KV head and tile: (head_dim / 2, 64 keys) pairs of features
  std::vector<uint32_t> values;  // for each KV head, tile and block: (32, 64 features) pairs of keys

  PromptAttention(const Tensor& q, const Tensor& k, const Tensor& v, double factor)
      : query(q), key(k), value(v), length(q.size(1)), heads(q.size(2)), kv_heads(k.size(2)), head_dim(q.size(3)),
        tiles((length + kBlock - 1) / kBlock), value_blocks((head_dim + kBlock - 1) / kBlock),
        scale(static_cast<float>(factor)), keys(q.size(0) * kv_heads * tiles * kBlock * head_dim / 2),
        values(q.size(0) * kv_heads * tiles * value_blocks * kBlock * kBlock / 2) {
    TORCH_CHECK(k.sizes() == v.sizes() && k.size(1) == length && heads % kv_heads == 0, "not a prompt onto itself");
    TORCH_CHECK(head_dim % (2 * kLanes) == 0 && head_dim <= kMaxHeadDim, "head_dim: a multiple of 32 up to 256");
  }

  const uint32_t* key_tile(int64_t kv, int64_t tile) const {
    return &keys[(kv * tiles + tile) * kBlock * head_dim / 2];
  }
  const uint32_t* value_tile(int64_t kv, int64_t tile, int64_t block) const {
    return &values[((kv * tiles + tile) * value_blocks + block) * kBlock * kBlock / 2];
  }

  // Lays out one tile of one KV head (batch * kv_heads + head) as add_products reads it; slots that aren't there: zeros.
  void pack(int64_t kv, int64_t tile) {
    const int64_t batch = kv / kv_heads, head = kv % kv_heads, first = tile * kBlock;
    auto* key_to = const_cast<uint32_t*>(key_tile(kv, tile));
    for (int64_t slot = 0; slot < std::min(kBlock, length - first); slot++) {
      const auto* from = reinterpret_cast<const uint32_t*>(key.row(batch, first + slot, head));
      for (int64_t pair = 0; pair < head_dim / 2; pair++) key_to[pair * kBlock + slot] = from[pair];
      const auto* features = reinterpret_cast<const uint16_t*>(value.row(batch, first + slot, head));
      for (int64_t d = 0; d < head_dim; d++) {
        auto* pairs = const_cast<uint32_t*>(value_tile(kv, tile, d / kBlock)) + slot / 2 * kBlock + d % kBlock;
        *pairs |= static_cast<uint32_t>(features[d]) << (slot % 2 * 16);
      }
    }
  }

  // 64 query rows of one head; `to` (batch, sequence, heads, head_dim) contiguous.
  void attend(int64_t batch, int64_t head, int64_t tile, BFloat16* to) const {
    const int64_t first = tile * kBlock, rows = std::min(kBlock, length - first);
    const int64_t kv = batch * kv_heads + head / (heads / kv_heads);
    alignas(64) float scores[kBlock][kBlock];
    alignas(64) BFloat16 weights[kBlock][kBlock];
    alignas(64) float sums[kBlock][kMaxHeadDim];
    float highest[kBlock], total[kBlock], shrink[kBlock];
    std::fill_n(highest, kBlock, -INFINITY);
    std::fill_n(total, kBlock, 0.0f);
    std::fill_n(&sums[0][0], kBlock * kMaxHeadDim, 0.0f);
    for (int64_t keys_tile = 0; keys_tile <= tile; keys_tile++) {
      in_row_groups(rows, [&](auto size, int64_t row) { score<decltype(size)::value>(batch, head, first + row, key_tile(kv, keys_tile), scores[row]); });
      for (int64_t row = 0; row < rows; row++) {
        weigh(scores[row], keys_tile == tile ? row + 1 : kBlock, highest[row], total[row], shrink[row], weights[row]);
      }
      for (int64_t block = 0; block < value_blocks; block++) {
        in_row_groups(rows, [&](auto size, int64_t row) {
          add<decltype(size)::value>(weights[row], shrink + row, value_tile(kv, keys_tile, block), &sums[row][block * kBlock]);
        });
      }
    }
    for (int64_t row = 0; row < rows; row++) {
      const __m512 factor = _mm512_set1_ps(1.0f / total[row]);
      BFloat16* result = to + ((batch * length + first + row) * heads + head) * head_dim;
      for (int64_t d = 0; d < head_dim; d += kLanes) {
        narrow(result + d, _mm512_mul_ps(_mm512_load_ps(&sums[row][d]), factor), 0xffff);
      }
    }
  }

  // Scaled scores of kRows rows against a tile of keys.
  template <int kRows>
  void score(int64_t batch, int64_t head, int64_t token, const uint32_t* tile, float* scores) const {
    __m512 sums[kRows][kRegisters];
    for (auto& row : sums) std::fill(row, row + kRegisters, _mm512_setzero_ps());
    const auto* rows = reinterpret_cast<const uint32_t*>(query.row(batch, token, head));
    add_products<kRows>(rows, query.token_stride / 2, head_dim / 2, tile, sums);
    for (int row = 0; row < kRows; row++) {
      for (int64_t r = 0; r < kRegisters; r++) {
        _mm512_store_ps(scores + row * kBlock + r * kLanes, _mm512_mul_ps(sums[row][r], _mm512_set1_ps(scale)));
      }
    }
  }

  // Online softmax (arXiv 2205.14135) of one row: the first `visible` scores become weights relative to the highest so
  // far, and `shrink` what earlier sums have to be multiplied by.
  static void weigh(const float* scores, int64_t visible, float& highest, float& total, float& shrink,
                    BFloat16* weights) {
    __m512 values[kRegisters], top = _mm512_set1_ps(highest);
    for (int64_t r = 0; r < kRegisters; r++) {
      const int64_t seen = std::clamp<int64_t>(visible - r * kLanes, 0, kLanes);
      values[r] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), static_cast<__mmask16>((1u << seen) - 1),
                                     _mm512_load_ps(scores + r * kLanes));
      top = _mm512_max_ps(top, values[r]);
    }
    const float now = _mm512_reduce_max_ps(top);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t r = 0; r < kRegisters; r++) {
      const __m512 weight = exponential(_mm512_sub_ps(values[r], _mm512_set1_ps(now)));
      narrow(weights + r * kLanes, weight, 0xffff);
      sum = _mm512_add_ps(sum, weight);
    }
    shrink = now == highest ? 1.0f : std::exp(highest - now);
    total = total * shrink + _mm512_reduce_add_ps(sum);
    highest = now;
  }

  // sums := sums * shrink + weights times a tile's values, for kRows rows and 64 features.
  template <int kRows>
  static void add(const BFloat16* weights, const float* shrink, const uint32_t* tile, float* sums) {
    __m512 registers[kRows][kRegisters];
    for (int row = 0; row < kRows; row++) {
      for (int64_t r = 0; r < kRegisters; r++) {
        registers[row][r] =
            _mm512_mul_ps(_mm512_load_ps(sums + row * kMaxHeadDim + r * kLanes), _mm512_set1_ps(shrink[row]));
      }
    }
    add_products<kRows>(reinterpret_cast<const uint32_t*>(weights), kBlock / 2, kBlock / 2, tile, registers);
    for (int row = 0; row < kRows; row++) {
      for (int64_t r = 0; r < kRegisters; r++) {
        _mm512_store_ps(sums + row * kMaxHeadDim + r * kLanes, registers[row][r]);
      }
    }
  }
};

}  // namespace
