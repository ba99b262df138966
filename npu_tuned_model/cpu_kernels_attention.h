// Attention of one new token per sequence onto the KV cache, for CPUs with AVX512-BF16: the cache is read once.
#pragma once

#include "cpu_kernels_linear.h"

#include <cmath>
#include <vector>

namespace {

constexpr int64_t kTile = 64;  // KV slots whose scores are held at a time
constexpr int64_t kHeadsAtOnce = 8;  // query heads whose sums fit the registers together
constexpr int64_t kLine = 2 * kLanes;  // bfloat16 in a line of the CPU's caches

// The cache of one sequence, or of one KV head in it.
struct KVSlice {
  const BFloat16* keys;
  const BFloat16* values;
  int64_t stride;  // elements from one slot to the next
  int64_t head_dim;

  KVSlice at_head(int64_t kv_head) const {
    return {keys + kv_head * head_dim, values + kv_head * head_dim, stride, head_dim};
  }
  KVSlice from_slot(int64_t slot) const { return {keys + slot * stride, values + slot * stride, stride, head_dim}; }
};

// Online softmax (arXiv 2205.14135) of a sequence's query heads over a part of its slots. `sums` keeps, for each 32
// features, the 16 even ones before the 16 odd ones: the order in which bfloat16 pairs widen.
struct HeadStates {
  float* sums;     // (heads, head_dim) weighted values
  float* highest;  // (heads) highest score
  float* total;    // (heads) sum of the weights

  HeadStates from(int64_t head, int64_t head_dim) const {
    return {sums + head * head_dim, highest + head, total + head};
  }
};

// The queries of up to 16 heads as (head_dim / 2, 16 heads) pairs of features; heads that aren't there are zeros.
void pack_queries(const BFloat16* queries, int64_t heads, int64_t head_dim, uint32_t* to) {
  const auto* from = reinterpret_cast<const uint32_t*>(queries);
  for (int64_t pair = 0; pair < head_dim / 2; pair++) {
    for (int64_t head = 0; head < kLanes; head++) {
      to[pair * kLanes + head] = head < heads ? from[head * head_dim / 2 + pair] : 0;
    }
  }
}

// Scores of the first `slots` (at most kTile) slots, one vector of 16 heads for each: every pair of a key's features
// meets the same pair of all heads, so nothing has to be added across a vector. Asks memory for the keys of `next`, a
// line for each pair of features: asked for all at once they would keep the CPU waiting.
void score_tile(const uint32_t* queries, const KVSlice& kv, int64_t slots, float scale, const KVSlice& next,
                float (*scores)[kLanes]) {
  constexpr int64_t kSlots = 16;
  for (int64_t group = 0; group < slots; group += kSlots) {
    const uint32_t* keys[kSlots];
    __m512 sums[kSlots];
    for (int64_t i = 0; i < kSlots; i++) {
      // behind the last slot the last one again, whose scores nobody reads
      keys[i] = reinterpret_cast<const uint32_t*>(kv.keys + std::min(group + i, slots - 1) * kv.stride);
      sums[i] = _mm512_setzero_ps();
    }
    for (int64_t pair = 0; pair < kv.head_dim / 2; pair++) {
      ask_memory_for(next.keys + (group + pair % kSlots) * next.stride + pair / kSlots * kLine);
      const __m512bh query = (__m512bh)_mm512_loadu_si512(queries + pair * kLanes);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kSlots; i++) {
        sums[i] = _mm512_dpbf16_ps(sums[i], query, (__m512bh)_mm512_set1_epi32(static_cast<int>(keys[i][pair])));
      }
    }
    for (int64_t i = 0; i < kSlots; i++) {
      _mm512_storeu_ps(scores[group + i], _mm512_mul_ps(sums[i], _mm512_set1_ps(scale)));
    }
  }
}

// Turns the tile's scores of up to 16 heads into weights relative to each head's highest score so far.
void weigh_tile(const HeadStates& states, int64_t heads, int64_t head_dim, int64_t slots, float (*scores)[kLanes]) {
  const auto mask = static_cast<__mmask16>((1u << heads) - 1);
  const __m512 before = _mm512_maskz_loadu_ps(mask, states.highest);
  __m512 highest = before;
  for (int64_t i = 0; i < slots; i++) highest = _mm512_max_ps(highest, _mm512_loadu_ps(scores[i]));
  const __m512 shrink = exponential(_mm512_sub_ps(before, highest));
  __m512 total = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, states.total), shrink);
  for (int64_t i = 0; i < slots; i++) {
    const __m512 weights = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores[i]), highest));
    _mm512_storeu_ps(scores[i], weights);
    total = _mm512_add_ps(total, weights);
  }
  _mm512_mask_storeu_ps(states.highest, mask, highest);
  _mm512_mask_storeu_ps(states.total, mask, total);
  alignas(64) float factors[kLanes];
  _mm512_store_ps(factors, shrink);
  for (int64_t head = 0; head < heads; head++) {
    float* sums = states.sums + head * head_dim;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      _mm512_storeu_ps(sums + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), _mm512_set1_ps(factors[head])));
    }
  }
}

// sums (kHeads, head_dim) += weights of kHeads heads times the values of the first `slots` slots. Asks memory for the
// values of `next`.
template <int kHeads>
void add_values(float* sums, const float (*weights)[kLanes], int64_t lane, const KVSlice& kv, int64_t slots,
                const KVSlice& next) {
  for (int64_t d = 0; d < kv.head_dim; d += kLine) {
    __m512 even[kHeads], odd[kHeads];
    for (int h = 0; h < kHeads; h++) {
      even[h] = _mm512_loadu_ps(sums + h * kv.head_dim + d);
      odd[h] = _mm512_loadu_ps(sums + h * kv.head_dim + d + kLanes);
    }
    for (int64_t slot = 0; slot < slots; slot++) {
      ask_memory_for(next.values + slot * next.stride + d);
      const __m512i pairs = _mm512_loadu_si512(kv.values + slot * kv.stride + d);
      const __m512 low = low_halves(pairs), high = high_halves(pairs);
      for (int h = 0; h < kHeads; h++) {
        const __m512 weight = _mm512_set1_ps(weights[slot][lane + h]);
        even[h] = _mm512_fmadd_ps(weight, low, even[h]);
        odd[h] = _mm512_fmadd_ps(weight, high, odd[h]);
      }
    }
    for (int h = 0; h < kHeads; h++) {
      _mm512_storeu_ps(sums + h * kv.head_dim + d, even[h]);
      _mm512_storeu_ps(sums + h * kv.head_dim + d + kLanes, odd[h]);
    }
  }
}

template <int kHeads = kHeadsAtOnce>
void add_values(int64_t heads, float* sums, const float (*weights)[kLanes], int64_t lane, const KVSlice& kv,
                int64_t slots, const KVSlice& next) {
  if (heads == kHeads) return add_values<kHeads>(sums, weights, lane, kv, slots, next);
  if constexpr (kHeads > 1) add_values<kHeads - 1>(heads, sums, weights, lane, kv, slots, next);
}

// Joins the parts of one query head, `stride` heads apart, and writes it, features back in their order.
void join_parts(const HeadStates& states, int64_t parts, int64_t stride, int64_t head_dim, BFloat16* to) {
  float highest = -INFINITY, total = 0.0f;
  for (int64_t p = 0; p < parts; p++) highest = std::max(highest, states.highest[p * stride]);
  float joined[kMaxHeadDim] = {};
  for (int64_t p = 0; p < parts; p++) {
    if (states.total[p * stride] == 0.0f) continue;
    const float share = std::exp(states.highest[p * stride] - highest);
    total += share * states.total[p * stride];
    for (int64_t d = 0; d < head_dim; d++) joined[d] += share * states.sums[p * stride * head_dim + d];
  }
  const float factor = total > 0.0f ? 1.0f / total : 0.0f;
  for (int64_t d = 0; d < head_dim; d += kLine) {
    for (int64_t i = 0; i < kLanes; i++) {
      to[d + 2 * i] = BFloat16(joined[d + i] * factor);
      to[d + 2 * i + 1] = BFloat16(joined[d + kLanes + i] * factor);
    }
  }
}

// Attention of one token per sequence, shared by the workers of a parallel region: each takes its part of every
// sequence's slots, whatever the batch is.
struct CacheAttention {
  int64_t batch, heads, kv_heads, head_dim, group;
  int64_t packs;  // vectors of up to 16 query heads for each KV head
  float scale;
  std::vector<float> sums, highest, total;  // of HeadStates, for each worker and sequence
  std::vector<uint32_t> queries;  // (workers, kv_heads, packs, head_dim / 2, 16)

  CacheAttention(int64_t batch, int64_t heads, const Tensor& key, double scale)
      : batch(batch), heads(heads), kv_heads(key.size(2)), head_dim(key.size(3)), group(heads / kv_heads),
        packs((group + kLanes - 1) / kLanes), scale(static_cast<float>(scale)) {
    TORCH_CHECK(head_dim % (2 * kLanes) == 0 && head_dim <= kMaxHeadDim, "head_dim: a multiple of 32 up to 256");
    TORCH_CHECK(heads % kv_heads == 0, "heads: a multiple of kv_heads");
    const int64_t workers = omp_get_max_threads();
    sums.resize(workers * batch * heads * head_dim);
    highest.resize(workers * batch * heads);
    total.resize(workers * batch * heads);
    queries.resize(workers * kv_heads * packs * head_dim / 2 * kLanes);
  }

  HeadStates states(int64_t worker, int64_t row) {
    return HeadStates{sums.data(), highest.data(), total.data()}.from((worker * batch + row) * heads, head_dim);
  }

  // All heads of one sequence over the first `slots` slots of `kv`, from scratch. Tile by tile, each with all of its KV
  // heads, so that the cache is read in the order in which it lies in memory. `next`: what will be read after it.
  // `packed`: this worker's part of `queries`.
  void attend(const BFloat16* query, const KVSlice& kv, int64_t slots, const KVSlice& next, const HeadStates& row,
              uint32_t* packed) const {
    std::fill_n(row.sums, heads * head_dim, 0.0f);
    std::fill_n(row.highest, heads, -INFINITY);
    std::fill_n(row.total, heads, 0.0f);
    const int64_t pack_size = head_dim / 2 * kLanes;
    for_each_pack([&](int64_t, int64_t number, int64_t head, int64_t count) {
      pack_queries(query + head * head_dim, count, head_dim, packed + number * pack_size);
    });
    alignas(64) float scores[kTile][kLanes];
    for (int64_t first = 0; first < slots; first += kTile) {
      const KVSlice tile = kv.from_slot(first), next_tile = first + kTile < slots ? kv.from_slot(first + kTile) : next;
      const int64_t size = std::min(kTile, slots - first);
      for_each_pack([&](int64_t kv_head, int64_t number, int64_t head, int64_t count) {
        const KVSlice now = tile.at_head(kv_head), later = next_tile.at_head(kv_head);
        const HeadStates states = row.from(head, head_dim);
        score_tile(packed + number * pack_size, now, size, scale, later, scores);
        weigh_tile(states, count, head_dim, size, scores);
        for (int64_t lane = 0; lane < count; lane += kHeadsAtOnce) {
          add_values(std::min(kHeadsAtOnce, count - lane), states.sums + lane * head_dim, scores, lane, now, size,
                     later);
        }
      });
    }
  }

  // Calls work(kv_head, number of the pack, its first query head, how many).
  template <typename Work>
  void for_each_pack(const Work& work) const {
    for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
      for (int64_t pack = 0; pack < packs; pack++) {
        work(kv_head, kv_head * packs + pack, kv_head * group + pack * kLanes,
             std::min(kLanes, group - pack * kLanes));
      }
    }
  }

  // queries and `to`: rows of heads * head_dim, `query_stride` and `to_stride` apart; key and value
  // (batch, slots, kv_heads, head_dim) with contiguous rows; slots filled in each row. Ends with all workers done.
  void share(const BFloat16* query, int64_t query_stride, const Tensor& key, const Tensor& value,
             const int64_t* lengths, BFloat16* to, int64_t to_stride, const Worker& worker) {
    const auto slots = [&](int64_t row) { return std::min(lengths[row], key.size(1)); };
    const auto part = [&](int64_t row) {
      const int64_t offset = row * key.stride(0);
      const KVSlice all{key.const_data_ptr<BFloat16>() + offset, value.const_data_ptr<BFloat16>() + offset,
                        key.stride(1), head_dim};
      return all.from_slot(worker.first(slots(row)));
    };
    for (int64_t row = 0; row < batch; row++) {
      attend(query + row * query_stride, part(row), worker.last(slots(row)) - worker.first(slots(row)),
             part(std::min(row + 1, batch - 1)), states(worker.thread, row),
             &queries[worker.thread * kv_heads * packs * head_dim / 2 * kLanes]);
    }
#pragma omp barrier
    const int64_t all_heads = batch * heads;
    for (int64_t head = worker.first(all_heads); head < worker.last(all_heads); head++) {
      join_parts(states(0, 0).from(head, head_dim), worker.threads, all_heads, head_dim,
                 to + head / heads * to_stride + head % heads * head_dim);
    }
#pragma omp barrier
  }
};

void check_cache(const Tensor& key, const Tensor& value) {
  TORCH_CHECK(key.strides() == value.strides() && key.sizes() == value.sizes(), "key and value: of one layout");
  TORCH_CHECK(key.dim() == 4 && key.stride(3) == 1 && key.stride(2) == key.size(3), "cache: contiguous BSND rows");
}

}  // namespace
