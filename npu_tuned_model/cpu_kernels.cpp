// Decode for CPUs with AVX512-BF16: its two memory-bound operations, and the whole step made of the two.
// Built on demand by cpu_kernels.py. All tensors are bfloat16 unless said otherwise.

#include "cpu_kernels_argmax.h"
#include "cpu_kernels_attention.h"
#include "cpu_kernels_int8.h"
#include "cpu_kernels_linear.h"
#include "cpu_kernels_prompt.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <functional>
#include <tuple>

namespace {

int64_t in_features(const Tensor& blocks) { return blocks.size(1) * blocks.size(3); }

// rows (tokens, in) times a weight in blocks, plus bias (out,) or an empty tensor -> (tokens, out)
template <class Kind>
Tensor linear_of_few_rows(const Kind& linear, const Tensor& rows, const Tensor& blocks) {
  TORCH_CHECK(rows.dim() == 2 && rows.is_contiguous() && rows.size(1) == in_features(blocks), "rows: (tokens, in)");
  Tensor result = at::empty({rows.size(0), linear.out}, rows.options());
  const auto* from = rows.const_data_ptr<BFloat16>();
  auto* to = result.mutable_data_ptr<BFloat16>();
#pragma omp parallel
  {
    typename Kind::Input input;
    input.set(from, rows.size(0), rows.size(1));
    linear.share(input, to, Worker());
  }
  return result;
}

Tensor few_rows_linear(const Tensor& rows, const Tensor& blocks, const Tensor& bias, int64_t out_features) {
  return linear_of_few_rows(Linear(blocks, Tensor(), bias, out_features), rows, blocks);
}

Tensor few_rows_int8_linear(const Tensor& rows, const Tensor& blocks, const Tensor& scales, const Tensor& bias,
                            int64_t out_features) {
  return linear_of_few_rows(Int8Linear(blocks, scales, bias, out_features), rows, blocks);
}

// An int8 weight in blocks (blocks, in / 4, 64, 4), times its scales (blocks, 64), to bfloat16 (blocks, in / 2, 64, 2).
void expand_int8_blocks(const Tensor& blocks, const Tensor& scales, const Tensor& to) {
  const Int8Linear linear(blocks, scales, Tensor(), blocks.size(0) * kBlock);
  TORCH_CHECK(to.is_contiguous() && to.scalar_type() == at::kBFloat16 && to.numel() == blocks.numel(), "to: not of it");
  auto* expanded = static_cast<uint32_t*>(to.mutable_data_ptr());
#pragma omp parallel
  linear.expand(expanded, Worker());
}

// query (batch, 1, heads, head_dim), key and value (batch, slots, kv_heads, head_dim) with contiguous rows, lengths
// (batch,) int64 -> (batch, 1, heads, head_dim). A row of length 0 gives zeros.
Tensor cache_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& lengths,
                       double scale) {
  check_cache(key, value);
  const Tensor queries = query.contiguous();
  Tensor result = at::empty_like(queries);
  CacheAttention attention(query.size(0), query.size(2), key, scale);
  const auto* from = queries.const_data_ptr<BFloat16>();
  const auto* length = lengths.const_data_ptr<int64_t>();
  auto* to = result.mutable_data_ptr<BFloat16>();
  const int64_t stride = query.size(2) * query.size(3);
#pragma omp parallel
  attention.share(from, stride, key, value, length, to, stride, Worker());
  return result;
}

// query (batch, sequence, heads, head_dim), key and value (batch, sequence, kv_heads, head_dim), head rows contiguous
// -> (batch, sequence, heads, head_dim); row i attends to rows 0..i.
Tensor causal_attention(const Tensor& query, const Tensor& key, const Tensor& value, double scale) {
  PromptAttention attention(query, key, value, scale);
  Tensor result = at::empty(query.sizes(), query.options());
  auto* to = result.mutable_data_ptr<BFloat16>();
  const int64_t all_kv = query.size(0) * attention.kv_heads, all_heads = query.size(0) * attention.heads;
#pragma omp parallel
  {
#pragma omp for
    for (int64_t i = 0; i < all_kv * attention.tiles; i++) attention.pack(i / attention.tiles, i % attention.tiles);
    // the longest rows first, so that no thread is left with one of them at the end
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < all_heads * attention.tiles; i++) {
      const int64_t head = i % all_heads;
      attention.attend(head / attention.heads, head % attention.heads, attention.tiles - 1 - i / all_heads, to);
    }
  }
  return result;
}

// sum := sum + hidden (where there is one), normed := RMSNorm(sum) * gamma; rounded where the fused operator rounds.
void add_rms_norm(BFloat16* sum, const BFloat16* hidden, const BFloat16* gamma, float epsilon, int64_t rows,
                  int64_t width, BFloat16* normed) {
  for (int64_t row = 0; row < rows; row++, sum += width, normed += width) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += kLanes) {
      const auto mask = static_cast<__mmask16>((1u << std::min(width - i, kLanes)) - 1);
      __m512 values = widen(sum + i, mask);
      if (hidden) {
        narrow(sum + i, _mm512_add_ps(values, widen(hidden + row * width + i, mask)), mask);
        values = widen(sum + i, mask);
      }
      squares = _mm512_fmadd_ps(values, values, squares);
    }
    const __m512 inverse = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / width + epsilon));
    for (int64_t i = 0; i < width; i += kLanes) {
      const auto mask = static_cast<__mmask16>((1u << std::min(width - i, kLanes)) - 1);
      narrow(normed + i, _mm512_mul_ps(widen(sum + i, mask), inverse), mask);
      narrow(normed + i, _mm512_mul_ps(widen(normed + i, mask), widen(gamma + i, mask)), mask);
    }
  }
}

// Rotary position embedding of one head, half layout, from `head` to `to` (which may be the same).
void rotate(const BFloat16* head, const BFloat16* cos, const BFloat16* sin, int64_t head_dim, BFloat16* to) {
  const int64_t half = head_dim / 2;
  for (int64_t d = 0; d < half; d += kLanes) {
    const __mmask16 all = 0xffff;
    const __m512 first = widen(head + d, all), second = widen(head + half + d, all);
    narrow(to + d, _mm512_fmsub_ps(first, widen(cos + d, all), _mm512_mul_ps(second, widen(sin + d, all))), all);
    narrow(to + half + d, _mm512_fmadd_ps(second, widen(cos + half + d, all),
                                          _mm512_mul_ps(first, widen(sin + half + d, all))), all);
  }
}

// silu(gate) * up for `count` (a multiple of 16) values.
void swiglu(const BFloat16* gate, const BFloat16* up, int64_t count, BFloat16* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const __m512 g = widen(gate + i, 0xffff), one = _mm512_set1_ps(1.0f);
    const __m512 size = _mm512_min_ps(_mm512_abs_ps(g), _mm512_set1_ps(100.0f));
    const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), size));  // e^-|g|: no overflow
    const __mmask16 negative = _mm512_cmp_ps_mask(g, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __m512 sigmoid = _mm512_div_ps(_mm512_mask_mov_ps(one, negative, e), _mm512_add_ps(one, e));
    narrow(to + i, _mm512_mul_ps(_mm512_mul_ps(g, sigmoid), widen(up + i, 0xffff)), 0xffff);
  }
}

template <class Kind>
struct Layer {
  const BFloat16 *input_norm, *post_attention_norm;
  Kind qkv, o, gate_up, down;
  Tensor keys, values;

  // `weights`: input_layernorm, qkv, qkv bias, o_proj, post_attention_layernorm, gate_up_proj, down_proj
  // `scales`: of int8 qkv, o_proj, gate_up_proj, down_proj
  Layer(const Tensor* weights, const Tensor* scales, const Tensor& keys, const Tensor& values, int64_t hidden,
        int64_t heads)
      : input_norm(weights[0].const_data_ptr<BFloat16>()),
        post_attention_norm(weights[4].const_data_ptr<BFloat16>()),
        qkv(weights[1], scales[0], weights[2], (heads + 2 * keys.size(2)) * keys.size(3)),
        o(weights[3], scales[1], Tensor(), hidden),
        gate_up(weights[5], scales[2], Tensor(), 2 * in_features(weights[6])),
        down(weights[6], scales[3], Tensor(), hidden),
        keys(keys),
        values(values) {
    check_cache(keys, values);
    TORCH_CHECK(gate_up.out % (2 * kBlock) == 0, "intermediate size: a multiple of 64");
  }
};
constexpr size_t kLayerWeights = 7, kLayerScales = 4;

// This worker's heads of query, key and value, from normed hidden states to `qkv` (rows, heads + 2 kv_heads, head_dim):
// queries rotated, keys (rotated) and values in the cache. Each worker has whole heads, so that it can rotate what it
// has computed itself.
template <class Kind>
void project_and_rotate(const Layer<Kind>& layer, const typename Kind::Input& normed, int64_t heads,
                        const int64_t* positions, const Tensor& cos, const Tensor& sin, BFloat16* qkv,
                        const Worker& worker) {
  const Tensor &keys = layer.keys, &values = layer.values;
  const int64_t kv_heads = keys.size(2), head_dim = keys.size(3), all_heads = heads + 2 * kv_heads;
  const int64_t together = head_dim % kBlock ? 2 : 1;  // heads that are whole blocks of features
  const int64_t parts = (all_heads + together - 1) / together;
  const int64_t first = worker.first(parts) * together, last = std::min(worker.last(parts) * together, all_heads);
  for (int64_t b = first * head_dim / kBlock; b * kBlock < last * head_dim; b++) {
    layer.qkv.block(normed, b, qkv + b * kBlock, layer.qkv.out);
  }
  for (int64_t row = 0; row < normed.tokens; row++) {
    const auto* cosines = cos.const_data_ptr<BFloat16>() + positions[row] * head_dim;
    const auto* sines = sin.const_data_ptr<BFloat16>() + positions[row] * head_dim;
    const int64_t slot = row * keys.stride(0) + positions[row] * keys.stride(1);
    for (int64_t head = first; head < last; head++) {
      BFloat16* from = qkv + (row * all_heads + head) * head_dim;
      if (head < heads) {
        rotate(from, cosines, sines, head_dim, from);
      } else if (head < heads + kv_heads) {
        rotate(from, cosines, sines, head_dim,
               keys.mutable_data_ptr<BFloat16>() + slot + (head - heads) * head_dim);
      } else {
        std::copy_n(from, head_dim,
                    values.mutable_data_ptr<BFloat16>() + slot + (head - heads - kv_heads) * head_dim);
      }
    }
  }
}

// silu(gate) * up of this worker's features, from normed hidden states to `to` (rows, intermediate). All gates first,
// then all ups: going back and forth between the two would interrupt the stream from memory at every block.
template <class Kind>
void gate_up_swiglu(const Kind& gate_up, const typename Kind::Input& normed, BFloat16* to, const Worker& worker) {
  const int64_t inner = gate_up.out / 2, blocks = inner / kBlock;
  std::vector<BFloat16> up(normed.tokens * kBlock);
  for (int64_t b = worker.first(blocks); b < worker.last(blocks); b++) {
    gate_up.block(normed, b, to + b * kBlock, inner);
  }
  for (int64_t b = worker.first(blocks); b < worker.last(blocks); b++) {
    gate_up.block(normed, blocks + b, up.data(), kBlock);
    for (int64_t row = 0; row < normed.tokens; row++) {
      BFloat16* gate = to + row * inner + b * kBlock;
      swiglu(gate, &up[row * kBlock], kBlock, gate);
    }
  }
}

// From normed hidden states (rows, hidden) to this worker's blocks of the scores (rows, vocabulary).
using OutputLayer = std::function<void(const BFloat16*, float*, const Worker&)>;

template <class Kind>
OutputLayer output_layer(const Kind& linear, int64_t rows, int64_t hidden) {
  return [=](const BFloat16* from, float* to, const Worker& worker) {
    typename Kind::Input input;
    input.set(from, rows, hidden);
    linear.share(input, to, worker);
  };
}

struct Network {
  at::TensorList weights, scales, keys, values;
  const Tensor &cos, &sin, &norm;
  int64_t heads;
  float epsilon;
};

// The rows of the embedding table that belong to the tokens.
std::vector<BFloat16> look_up(const Tensor& tokens, const Tensor& table) {
  const auto* token = tokens.const_data_ptr<int64_t>();
  const int64_t hidden = table.size(1);
  std::vector<BFloat16> embedded(tokens.numel() * hidden);
  for (int64_t row = 0; row < tokens.numel(); row++) {
    TORCH_CHECK_INDEX(token[row] >= 0 && token[row] < table.size(0), "token ", token[row], " is not in the vocabulary");
    std::copy_n(table.const_data_ptr<BFloat16>() + token[row] * hidden, hidden, &embedded[row * hidden]);
  }
  return embedded;
}

// As decode_step, with linear layers of one kind.
template <class Kind>
std::tuple<Tensor, Tensor> decode(const Tensor& tokens, const Tensor& table, at::IntArrayRef positions,
                                  const Network& network, const OutputLayer& output, int64_t vocabulary) {
  const int64_t rows = tokens.numel(), hidden = table.size(1), heads = network.heads;
  const at::TensorList keys = network.keys;
  const std::vector<Tensor> no_scales(kLayerScales);
  std::vector<Layer<Kind>> layers;
  for (size_t i = 0; i < keys.size(); i++) {
    const Tensor* scales = network.scales.empty() ? no_scales.data() : &network.scales[i * kLayerScales];
    layers.emplace_back(&network.weights[i * kLayerWeights], scales, keys[i], network.values[i], hidden, heads);
  }
  std::vector<int64_t> lengths = positions.vec();
  for (auto& length : lengths) {
    TORCH_CHECK(length >= 0 && length < keys[0].size(1) && length < network.cos.size(0), "position ", length,
                " is outside");
    length++;
  }
  const int64_t head_dim = keys[0].size(3);
  CacheAttention attention(rows, heads, keys[0], 1.0 / std::sqrt(static_cast<double>(head_dim)));
  const int64_t inner = layers[0].gate_up.out / 2;
  std::vector<BFloat16> qkv(rows * layers[0].qkv.out), context(rows * heads * head_dim), merged(rows * hidden);
  std::vector<BFloat16> activated(rows * inner);
  Tensor logits = at::empty({rows, vocabulary}, table.options().dtype(at::kFloat));
  LargestOfRows largest(rows);
  const std::vector<BFloat16> embedded = look_up(tokens, table);
  const auto* final_norm = network.norm.const_data_ptr<BFloat16>();
  auto* to = logits.mutable_data_ptr<float>();
#pragma omp parallel
  {
    const Worker worker;
    // every worker adds, norms and prepares the inputs for itself: cheaper than handing the result around
    std::vector<BFloat16> sum(embedded), normed(rows * hidden);
    typename Kind::Input input;
    const auto add_and_norm = [&](const BFloat16* more, const BFloat16* gamma) {
      add_rms_norm(sum.data(), more, gamma, network.epsilon, rows, hidden, normed.data());
    };
    const BFloat16* more = nullptr;
    for (const Layer<Kind>& layer : layers) {
      add_and_norm(more, layer.input_norm);
      more = merged.data();
      input.set(normed.data(), rows, hidden);
      project_and_rotate(layer, input, heads, positions.data(), network.cos, network.sin, qkv.data(), worker);
#pragma omp barrier
      attention.share(qkv.data(), layer.qkv.out, layer.keys, layer.values, lengths.data(), context.data(),
                      heads * head_dim, worker);
      input.set(context.data(), rows, heads * head_dim);
      layer.o.share(input, merged.data(), worker);
#pragma omp barrier
      add_and_norm(more, layer.post_attention_norm);
      input.set(normed.data(), rows, hidden);
      gate_up_swiglu(layer.gate_up, input, activated.data(), worker);
#pragma omp barrier
      input.set(activated.data(), rows, inner);
      layer.down.share(input, merged.data(), worker);
#pragma omp barrier
    }
    add_and_norm(more, final_norm);
    output(normed.data(), to, worker);
    const int64_t blocks = (vocabulary + kBlock - 1) / kBlock;
    largest.look(to, vocabulary, worker.first(blocks) * kBlock, std::min(worker.last(blocks) * kBlock, vocabulary),
                 worker);
  }
  Tensor most_likely = at::empty({rows}, tokens.options());
  for (int64_t row = 0; row < rows; row++) most_likely.mutable_data_ptr<int64_t>()[row] = largest.of_row(row);
  return {logits, most_likely};
}

// One new token per row through all layers, as modeling_qwen2.py's decode computes it.
//   tokens: int64, one a row; table (vocabulary, hidden), their embeddings
//   positions: for each row, the slot and rotary position of the new token
//   weights: kLayerWeights for each layer (see Layer), matrices in blocks
//   scales: kLayerScales for each layer when the matrices are int8, else none
//   keys, values: for each layer (rows, slots, kv_heads, head_dim); the new token's are written
//   cos, sin (positions, ..., head_dim); norm (hidden)
//   head: the output layer's weight: plain bfloat16, or in blocks of bfloat16 or int8; head_scales of the latter
// -> float32 logits (rows, vocabulary), values rounded to bfloat16 as the layer's own result is, and the most likely
//    token of each row (rows,) int64, the first one of several
std::tuple<Tensor, Tensor> decode_step(const Tensor& tokens, const Tensor& table, at::IntArrayRef positions,
                                       at::TensorList weights, at::TensorList scales, at::TensorList keys,
                                       at::TensorList values, const Tensor& cos, const Tensor& sin, const Tensor& norm,
                                       const Tensor& head, const Tensor& head_scales, int64_t vocabulary,
                                       int64_t heads, double epsilon) {
  TORCH_CHECK(weights.size() == kLayerWeights * keys.size() && keys.size() == values.size(), "weights: 7 a layer");
  TORCH_CHECK(scales.empty() || scales.size() == kLayerScales * keys.size(), "scales: 4 a layer, or none");
  TORCH_CHECK(table.is_contiguous() && table.scalar_type() == at::kBFloat16, "table: contiguous bfloat16");
  const int64_t rows = tokens.numel(), hidden = table.size(1);
  TORCH_CHECK(tokens.is_contiguous() && static_cast<int64_t>(positions.size()) == rows, "tokens: one a position");
  OutputLayer output;
  if (head.dim() == 2) {
    output = output_layer(PlainLinear(head), rows, hidden);
  } else if (head.scalar_type() == at::kByte) {
    output = output_layer(Int8Linear(head, head_scales, Tensor(), vocabulary), rows, hidden);
  } else {
    output = output_layer(Linear(head, Tensor(), Tensor(), vocabulary), rows, hidden);
  }
  const Network network{weights, scales, keys, values, cos, sin, norm, heads, static_cast<float>(epsilon)};
  return scales.empty() ? decode<Linear>(tokens, table, positions, network, output, vocabulary)
                        : decode<Int8Linear>(tokens, table, positions, network, output, vocabulary);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(npu_tuned_model, library) {
  library.def("few_rows_linear(Tensor rows, Tensor blocks, Tensor bias, int out_features) -> Tensor");
  library.def(
      "few_rows_int8_linear(Tensor rows, Tensor blocks, Tensor scales, Tensor bias, int out_features) -> Tensor");
  library.def("expand_int8_blocks(Tensor blocks, Tensor scales, Tensor(a!) to) -> ()");
  library.def("cache_attention(Tensor query, Tensor key, Tensor value, Tensor lengths, float scale) -> Tensor");
  library.def("causal_attention(Tensor query, Tensor key, Tensor value, float scale) -> Tensor");
  library.def(
      "decode_step(Tensor tokens, Tensor table, int[] positions, Tensor[] weights, Tensor[] scales, "
      "Tensor(a!)[] keys, Tensor(b!)[] values, Tensor cos, Tensor sin, Tensor norm, Tensor head, Tensor head_scales, "
      "int vocabulary, int heads, float epsilon) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(npu_tuned_model, CPU, library) {
  library.impl("few_rows_linear", &few_rows_linear);
  library.impl("few_rows_int8_linear", &few_rows_int8_linear);
  library.impl("expand_int8_blocks", &expand_int8_blocks);
  library.impl("cache_attention", &cache_attention);
  library.impl("causal_attention", &causal_attention);
  library.impl("decode_step", &decode_step);
}
