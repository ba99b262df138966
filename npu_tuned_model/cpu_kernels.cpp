// The two memory-bound operations of decode for CPUs with AVX512-BF16: a linear layer of a few rows, and attention of
// one token per sequence onto the KV cache. Both read their big operand exactly once, in the order it lies in memory.
// Built on demand by cpu_kernels.py; shapes and dtypes are checked there and by the TORCH_CHECKs below.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace {

using at::BFloat16;
using at::Tensor;

constexpr int64_t kLanes = 16;                   // floats in a vector register
constexpr int64_t kBlock = 64;                   // output features that oneDNN keeps side by side
constexpr int64_t kRegisters = kBlock / kLanes;  // vector registers for one row of a block
constexpr int64_t kTile = 128;                   // KV slots whose scores are held at a time
constexpr int64_t kMaxRows = 4;                  // rows (or query heads) that fit the registers together

__m512 low_halves(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
__m512 high_halves(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

__m512 widen(const BFloat16* values, __mmask16 mask) {
  return low_halves(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, values)));
}

void narrow(BFloat16* to, __m512 values, __mmask16 mask) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

// Calls work(integral_constant<1..kMaxRows>, first row) until `rows` rows are done.
template <typename Work>
void in_row_groups(int64_t rows, const Work& work) {
  int64_t row = 0;
  for (; rows - row >= 4; row += 4) work(std::integral_constant<int, 4>{}, row);
  if (rows - row == 3) work(std::integral_constant<int, 3>{}, row);
  if (rows - row == 2) work(std::integral_constant<int, 2>{}, row);
  if (rows - row == 1) work(std::integral_constant<int, 1>{}, row);
}

// ---- linear -------------------------------------------------------------------------------------------------------

// One block of 64 output features for kRows rows. `weight` holds, for each pair of input features, the 64 pairs.
template <int kRows>
void linear_block(const uint32_t* rows, int64_t pairs, const uint32_t* weight, const BFloat16* bias, BFloat16* to,
                  int64_t to_stride, int64_t features) {
  constexpr int64_t kAhead = 8 * kBlock;  // how far ahead of the multiplication memory is asked for the weight
  __m512 sums[kRows][kRegisters];
  for (auto& row : sums) std::fill(row, row + kRegisters, _mm512_setzero_ps());
  for (int64_t pair = 0; pair < pairs; pair++) {
    __m512bh columns[kRegisters];
    for (int64_t r = 0; r < kRegisters; r++) {
      const uint32_t* from = weight + pair * kBlock + r * kLanes;
      _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_T0);
      columns[r] = (__m512bh)_mm512_loadu_si512(from);
    }
    for (int row = 0; row < kRows; row++) {
      const __m512bh input = (__m512bh)_mm512_set1_epi32(static_cast<int>(rows[row * pairs + pair]));
      for (int64_t r = 0; r < kRegisters; r++) sums[row][r] = _mm512_dpbf16_ps(sums[row][r], columns[r], input);
    }
  }
  for (int64_t r = 0; r < kRegisters && r * kLanes < features; r++) {
    const auto mask = static_cast<__mmask16>((1u << std::min<int64_t>(features - r * kLanes, kLanes)) - 1);
    const __m512 shift = bias ? widen(bias + r * kLanes, mask) : _mm512_setzero_ps();
    for (int row = 0; row < kRows; row++) {
      narrow(to + row * to_stride + r * kLanes, _mm512_add_ps(sums[row][r], shift), mask);
    }
  }
}

// rows (tokens, in), blocks: the weight (out, in) as oneDNN packs it, bias (out,) or empty -> (tokens, out); bfloat16.
Tensor few_rows_linear(const Tensor& rows, const Tensor& blocks, const Tensor& bias, int64_t out_features) {
  TORCH_CHECK(rows.dim() == 2 && rows.is_contiguous() && rows.scalar_type() == at::kBFloat16, "rows: (tokens, in)");
  const int64_t tokens = rows.size(0), pairs = rows.size(1) / 2, count = (out_features + kBlock - 1) / kBlock;
  TORCH_CHECK(blocks.is_contiguous() && blocks.numel() == count * pairs * 2 * kBlock, "blocks: not of this layer");
  TORCH_CHECK(bias.numel() == 0 || bias.numel() == out_features, "bias: (out,) or empty");
  Tensor result = at::empty({tokens, out_features}, rows.options());
  const auto* input = static_cast<const uint32_t*>(rows.const_data_ptr());
  const auto* weight = static_cast<const uint32_t*>(blocks.const_data_ptr());
  const auto* shift = bias.numel() ? bias.const_data_ptr<BFloat16>() : nullptr;
  auto* to = result.mutable_data_ptr<BFloat16>();
#pragma omp parallel
  {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t b = count * thread / threads; b < count * (thread + 1) / threads; b++) {
      in_row_groups(tokens, [&](auto size, int64_t row) {
        linear_block<decltype(size)::value>(input + row * pairs, pairs, weight + b * pairs * kBlock,
                                            shift ? shift + b * kBlock : nullptr,
                                            to + row * out_features + b * kBlock, out_features,
                                            out_features - b * kBlock);
      });
    }
  }
  return result;
}

// ---- decode attention ---------------------------------------------------------------------------------------------

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
  for (int64_t left = kLanes / 2; left > 0; left /= 2) {
    for (int64_t i = 0; i < left; i++) {
      const __m512 a = vectors[2 * i], b = vectors[2 * i + 1];
      vectors[i] = _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
    }
  }
  return vectors[0];
}

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
    for (int64_t i = 0; i < kLanes; i++) {
      products[i] = _mm512_setzero_ps();
      if (group + i >= slots) continue;
      const BFloat16* key = kv.keys + (first + group + i) * kv.stride;
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

// All query heads of one KV head over slots first..last-1.
void attend_part(const BFloat16* queries, int64_t heads, const KVSlice& kv, int64_t first, int64_t last, float scale,
                 HeadState* states) {
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
void join_parts(const std::vector<HeadState>& states, int64_t index, int64_t parts, int64_t part_stride,
                int64_t head_dim, BFloat16* to) {
  float highest = -INFINITY, total = 0.0f;
  for (int64_t p = 0; p < parts; p++) highest = std::max(highest, states[index + p * part_stride].highest);
  std::vector<float> joined(head_dim, 0.0f);
  for (int64_t p = 0; p < parts; p++) {
    const HeadState& state = states[index + p * part_stride];
    if (state.total == 0.0f) continue;
    const float share = std::exp(state.highest - highest);
    total += share * state.total;
    for (int64_t d = 0; d < head_dim; d++) joined[d] += share * state.sums[d];
  }
  const float factor = total > 0.0f ? 1.0f / total : 0.0f;
  for (int64_t d = 0; d < head_dim; d++) {
    const int64_t in_group = d % (2 * kLanes), from = d - in_group + in_group / 2 + (d % 2) * kLanes;
    to[d] = BFloat16(joined[from] * factor);
  }
}

// query (batch, 1, heads, head_dim), key and value (batch, slots, kv_heads, head_dim) with contiguous rows, lengths
// (batch,) int64 -> (batch, 1, heads, head_dim); bfloat16. A row of length 0 gives zeros.
Tensor cache_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& lengths,
                       double scale) {
  const int64_t batch = query.size(0), heads = query.size(2), head_dim = query.size(3), kv_heads = key.size(2);
  TORCH_CHECK(head_dim % (2 * kLanes) == 0 && heads % kv_heads == 0, "head_dim: a multiple of 32");
  TORCH_CHECK(key.strides() == value.strides() && key.stride(3) == 1 && key.stride(2) == head_dim, "cache: BSND rows");
  const Tensor queries = query.contiguous();
  Tensor result = at::empty_like(queries);
  const auto* length = lengths.const_data_ptr<int64_t>();
  const int64_t group = heads / kv_heads, pairs = batch * kv_heads;
  // with fewer KV heads than threads, the threads share the slots of a head
  const int64_t parts = std::max<int64_t>(1, omp_get_max_threads() / pairs), all_heads = batch * heads;
  std::vector<float> sums(parts * all_heads * head_dim, 0.0f);
  std::vector<HeadState> states(parts * all_heads);
  for (size_t i = 0; i < states.size(); i++) states[i].sums = sums.data() + i * head_dim;
#pragma omp parallel
  {
#pragma omp for
    for (int64_t task = 0; task < pairs * parts; task++) {
      const int64_t part = task / pairs, row = task % pairs / kv_heads, kv_head = task % kv_heads;
      const int64_t first_head = row * heads + kv_head * group;
      const int64_t offset = row * key.stride(0) + kv_head * head_dim, slots = std::min(length[row], key.size(1));
      const KVSlice kv{key.const_data_ptr<BFloat16>() + offset, value.const_data_ptr<BFloat16>() + offset,
                       key.stride(1), head_dim};
      attend_part(queries.const_data_ptr<BFloat16>() + first_head * head_dim, group, kv, slots * part / parts,
                  slots * (part + 1) / parts, static_cast<float>(scale), &states[part * all_heads + first_head]);
    }
#pragma omp for
    for (int64_t head = 0; head < all_heads; head++) {
      join_parts(states, head, parts, all_heads, head_dim, result.mutable_data_ptr<BFloat16>() + head * head_dim);
    }
  }
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(npu_tuned_model, library) {
  library.def("few_rows_linear(Tensor rows, Tensor blocks, Tensor bias, int out_features) -> Tensor");
  library.def("cache_attention(Tensor query, Tensor key, Tensor value, Tensor lengths, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(npu_tuned_model, CPU, library) {
  library.impl("few_rows_linear", &few_rows_linear);
  library.impl("cache_attention", &cache_attention);
}
