// Attention of one new token per sequence onto the KV cache, for CPUs with AVX512-BF16: the cache is read once.
#pragma once

#include "cpu_kernels_linear.h"

#include <cmath>
#include <vector>

namespace {

constexpr int64_t kTile = 64;  // KV slots whose scores are held at a time

// Online softmax (arXiv 2205.14135) of one query head over a part of the slots. `sums` keeps, for each 32 features,
// the 16 even ones before the 16 odd ones: the order in which bfloat16 pairs widen.
struct HeadState {
  float* sums;  // (head_dim) weighted values
  float highest = -INFINITY;
  float total = 0.0f;
};

struct KVSlice {
  const BFloat16* keys;
  const BFloat16* values;
  int64_t stride;  // elements from one slot to the next
  int64_t head_dim;
};

// Scores of `slots` (at most kTile) slots; up to the next multiple of 16 they are -infinity.
void score_tile(const BFloat16* query, const KVSlice& kv, int64_t first, int64_t slots, float scale, float* scores) {
  for (int64_t group = 0; group < slots; group += kLanes) {
    __m512 products[kLanes];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; i++) {
      products[i] = _mm512_setzero_ps();
      // behind the last slot the last one again, which the mask below takes out
      const BFloat16* key = kv.keys + (first + std::min(group + i, slots - 1)) * kv.stride;
      for (int64_t d = 0; d < kv.head_dim; d += 2 * kLanes) {
        products[i] = _mm512_dpbf16_ps(products[i], (__m512bh)_mm512_loadu_si512(key + d),
                                       (__m512bh)_mm512_loadu_si512(query + d));
      }
    }
    const int64_t filled = std::min(slots - group, kLanes);
    const __m512 sums = _mm512_mul_ps(sums_of(products), _mm512_set1_ps(scale));
    const auto mask = static_cast<__mmask16>((1u << filled) - 1);
    _mm512_storeu_ps(scores + group, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), mask, sums));
  }
}

// Turns the tile's scores into weights relative to the highest score so far.
void weigh_tile(HeadState& state, int64_t head_dim, int64_t slots, float* scores) {
  __m512 highest = _mm512_set1_ps(state.highest);
  for (int64_t i = 0; i < slots; i += kLanes) highest = _mm512_max_ps(highest, _mm512_loadu_ps(scores + i));
  const float now = _mm512_reduce_max_ps(highest);
  const float shrink = now == state.highest ? 1.0f : std::exp(state.highest - now);
  __m512 total = _mm512_setzero_ps();
  for (int64_t i = 0; i < slots; i += kLanes) {
    const __m512 weights = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(now)));
    _mm512_storeu_ps(scores + i, weights);
    total = _mm512_add_ps(total, weights);
  }
  state.total = state.total * shrink + _mm512_reduce_add_ps(total);
  state.highest = now;
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    _mm512_storeu_ps(state.sums + d, _mm512_mul_ps(_mm512_loadu_ps(state.sums + d), _mm512_set1_ps(shrink)));
  }
}

template <int kHeads>
void add_values(HeadState* states, const float (*weights)[kTile], const KVSlice& kv, int64_t first, int64_t slots) {
  for (int64_t d = 0; d < kv.head_dim; d += 2 * kLanes) {
    __m512 even[kHeads], odd[kHeads];
    for (int h = 0; h < kHeads; h++) {
      even[h] = _mm512_loadu_ps(states[h].sums + d);
      odd[h] = _mm512_loadu_ps(states[h].sums + d + kLanes);
    }
    for (int64_t slot = 0; slot < slots; slot++) {
      const __m512i pairs = _mm512_loadu_si512(kv.values + (first + slot) * kv.stride + d);
      const __m512 low = low_halves(pairs), high = high_halves(pairs);
      for (int h = 0; h < kHeads; h++) {
        const __m512 weight = _mm512_set1_ps(weights[h][slot]);
        even[h] = _mm512_fmadd_ps(weight, low, even[h]);
        odd[h] = _mm512_fmadd_ps(weight, high, odd[h]);
      }
    }
    for (int h = 0; h < kHeads; h++) {
      _mm512_storeu_ps(states[h].sums + d, even[h]);
      _mm512_storeu_ps(states[h].sums + d + kLanes, odd[h]);
    }
  }
}

// Asks memory for slots that are needed soon: a head's rows lie too far apart for the hardware to guess.
void prefetch(const KVSlice& kv, int64_t first, int64_t last) {
  for (int64_t slot = first; slot < last; slot++) {
    for (int64_t d = 0; d < kv.head_dim; d += 2 * kLanes) {
      _mm_prefetch(reinterpret_cast<const char*>(kv.keys + slot * kv.stride + d), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(kv.values + slot * kv.stride + d), _MM_HINT_T0);
    }
  }
}

// All query heads of one KV head over slots first..last-1, from scratch.
void attend_part(const BFloat16* queries, int64_t heads, const KVSlice& kv, int64_t first, int64_t last, float scale,
                 HeadState* states) {
  for (int64_t head = 0; head < heads; head++) {
    std::fill_n(states[head].sums, kv.head_dim, 0.0f);
    states[head].highest = -INFINITY;
    states[head].total = 0.0f;
  }
  alignas(64) float scores[kMaxRows][kTile];
  for (; first < last; first += kTile) {
    const int64_t slots = std::min(kTile, last - first);
    prefetch(kv, first + slots, std::min(first + slots + kTile, last));
    in_row_groups(heads, [&](auto size, int64_t head) {
      for (int h = 0; h < size; h++) {
        score_tile(queries + (head + h) * kv.head_dim, kv, first, slots, scale, scores[h]);
        weigh_tile(states[head + h], kv.head_dim, slots, scores[h]);
      }
      add_values<decltype(size)::value>(states + head, scores, kv, first, slots);
    });
  }
}

// Joins the parts of one query head and writes it, features back in their order.
void join_parts(const HeadState* states, int64_t parts, int64_t part_stride, int64_t head_dim, BFloat16* to) {
  float highest = -INFINITY, total = 0.0f;
  for (int64_t p = 0; p < parts; p++) highest = std::max(highest, states[p * part_stride].highest);
  float joined[kMaxHeadDim] = {};
  for (int64_t p = 0; p < parts; p++) {
    const HeadState& state = states[p * part_stride];
    if (state.total == 0.0f) continue;
    const float share = std::exp(state.highest - highest);
    total += share * state.total;
    for (int64_t d = 0; d < head_dim; d++) joined[d] += share * state.sums[d];
  }
  const float factor = total > 0.0f ? 1.0f / total : 0.0f;
  for (int64_t d = 0; d < head_dim; d += 2 * kLanes) {
    for (int64_t i = 0; i < kLanes; i++) {
      to[d + 2 * i] = BFloat16(joined[d + i] * factor);
      to[d + 2 * i + 1] = BFloat16(joined[d + kLanes + i] * factor);
    }
  }
}

// Attention of one token per sequence, shared by the workers of a parallel region.
struct CacheAttention {
  int64_t batch, heads, kv_heads, head_dim, group, parts;
  float scale;
  std::vector<float> sums;
  std::vector<HeadState> states;

  CacheAttention(int64_t batch, int64_t heads, const Tensor& key, double scale)
      : batch(batch), heads(heads), kv_heads(key.size(2)), head_dim(key.size(3)), group(heads / kv_heads),
        // with fewer KV heads than threads, the threads share the slots of a head
        parts(std::max<int64_t>(1, omp_get_max_threads() / (batch * kv_heads))),
        scale(static_cast<float>(scale)), sums(parts * batch * heads * head_dim), states(parts * batch * heads) {
    TORCH_CHECK(head_dim % (2 * kLanes) == 0 && head_dim <= kMaxHeadDim, "head_dim: a multiple of 32 up to 256");
    TORCH_CHECK(heads % kv_heads == 0, "heads: a multiple of kv_heads");
    for (size_t i = 0; i < states.size(); i++) states[i].sums = sums.data() + i * head_dim;
  }

  // queries and `to`: rows of heads * head_dim, `query_stride` and `to_stride` apart; key and value
  // (batch, slots, kv_heads, head_dim) with contiguous rows; slots filled in each row. Ends with all workers done.
  void share(const BFloat16* queries, int64_t query_stride, const Tensor& key, const Tensor& value,
             const int64_t* lengths, BFloat16* to, int64_t to_stride, const Worker& worker) {
    const int64_t pairs = batch * kv_heads, all_heads = batch * heads;
    for (int64_t task = worker.first(pairs * parts); task < worker.last(pairs * parts); task++) {
      const int64_t part = task % parts, row = task / parts / kv_heads, kv_head = task / parts % kv_heads;
      const int64_t offset = row * key.stride(0) + kv_head * head_dim, slots = std::min(lengths[row], key.size(1));
      const KVSlice kv{key.const_data_ptr<BFloat16>() + offset, value.const_data_ptr<BFloat16>() + offset,
                       key.stride(1), head_dim};
      attend_part(queries + row * query_stride + kv_head * group * head_dim, group, kv, slots * part / parts,
                  slots * (part + 1) / parts, scale, &states[part * all_heads + row * heads + kv_head * group]);
    }
#pragma omp barrier
    for (int64_t head = worker.first(all_heads); head < worker.last(all_heads); head++) {
      join_parts(&states[head], parts, all_heads, head_dim, to + head / heads * to_stride + head % heads * head_dim);
    }
#pragma omp barrier
  }
};

void check_cache(const Tensor& key, const Tensor& value) {
  TORCH_CHECK(key.strides() == value.strides() && key.sizes() == value.sizes(), "key and value: of one layout");
  TORCH_CHECK(key.dim() == 4 && key.stride(3) == 1 && key.stride(2) == key.size(3), "cache: contiguous BSND rows");
}

}  // namespace
