// Flash attention, backward, from the statistics and the result of the forward pass.
#include "aclnn/attention.h"

using namespace sim;

namespace sim {

namespace {

// A call whose query and key have their rotary parts joined to them, and room for the gradients of the whole.
struct Joined {
  AttentionCall call;
  Tensor query_gradient, key_gradient;
};

Joined join_rope(const AttentionCall& call, const AttentionGradients& gradients) {
  if (!call.query_rope || !call.key_rope)
    return {.call = call, .query_gradient = gradients.query, .key_gradient = gradients.key};
  const AttentionCall joined = with_rope_joined(call);
  return {.call = joined, .query_gradient = at::empty_like(joined.query), .key_gradient = at::empty_like(joined.key)};
}

void part_rope(const Joined& joined, const AttentionGradients& gradients) {
  if (!joined.call.query_rope || !joined.call.key_rope) return;
  const int64_t size = gradients.query.size(-1), rope = joined.query_gradient.size(-1) - size;
  gradients.query.copy_(joined.query_gradient.narrow(-1, 0, size));
  gradients.query_rope->copy_(joined.query_gradient.narrow(-1, size, rope));
  gradients.key.copy_(joined.key_gradient.narrow(-1, 0, size));
  gradients.key_rope->copy_(joined.key_gradient.narrow(-1, size, rope));
}

Tensor zeros_like_in_float(const std::optional<Tensor>& input) {
  return input ? at::zeros(input->sizes(), at::kFloat) : Tensor();
}

Tensor pse_gradient_of(const Tensor& sum, int64_t index, int64_t head) {
  if (!sum.defined()) return {};
  return sum[sum.size(0) == 1 ? 0 : index][sum.size(1) == 1 ? 0 : head];
}

}  // namespace

void backward_attention(const AttentionCall& given, const AttentionSaved& saved, const AttentionGradients& gradients) {
  Joined joined = join_rope(given, gradients);
  AttentionCall& call = joined.call;
  if (call.drop_mask) call.drop_mask = call.drop_mask->contiguous();
  const int64_t shared_heads = key_heads(call), group = call.heads / std::max<int64_t>(shared_heads, 1);
  if (is_packed(call)) {  // what lies behind the last sequence
    for (const Tensor& result : {joined.query_gradient, joined.key_gradient, gradients.value}) result.zero_();
  }
  const auto sequences = sequences_of(call);
  const auto as_query = [&](const Tensor& tensor) { return split_sequences(tensor, call, call.heads, call.query_ends); };
  const auto as_key = [&](const Tensor& tensor) { return split_sequences(tensor, call, shared_heads, call.key_ends); };
  const Tensors outs = as_query(saved.out.value()), upstream = as_query(saved.out_gradient);
  const Tensors maxima = split_statistics(saved.max.value(), call), sums = split_statistics(saved.sum.value(), call);
  const Tensors query_gradients = as_query(joined.query_gradient);
  const Tensors key_gradients = as_key(joined.key_gradient), value_gradients = as_key(gradients.value);
  const Tensor pse_sum = zeros_like_in_float(call.pse), sink_sum = zeros_like_in_float(call.sink);
  ScoreBuffer scores, products;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const AttentionSequence& sequence = sequences[i];
    for (int64_t shared = 0; shared < shared_heads; ++shared) {
      const Tensor key = sequence.key[shared].to(at::kFloat), value = sequence.value[shared].to(at::kFloat);
      const Tensor key_sum = at::zeros_like(key, at::kFloat, at::MemoryFormat::Contiguous);
      const Tensor value_sum = at::zeros_like(value, at::kFloat, at::MemoryFormat::Contiguous);
      for (int64_t head = shared * group; head < (shared + 1) * group; ++head) {
        const AttentionHead one = head_of(call, sequence, sequence.query[head].to(at::kFloat), key, value, head);
        const AttentionGradient gradient{.query = query_gradients[i][head],
                                         .key = key_sum,
                                         .value = value_sum,
                                         .pse = pse_gradient_of(pse_sum, static_cast<int64_t>(i), head),
                                         .sink = sink_sum.defined() ? sink_sum[head] : Tensor()};
        attend_backward(one, {.out = outs[i][head].to(at::kFloat), .max = maxima[i][head], .sum = sums[i][head]},
                        upstream[i][head].to(at::kFloat), gradient, scores, products);
      }
      key_gradients[i][shared].copy_(key_sum);
      value_gradients[i][shared].copy_(value_sum);
    }
  }
  part_rope(joined, gradients);
  if (call.pse && gradients.pse) gradients.pse->copy_(pse_sum);
  if (call.sink && gradients.sink) gradients.sink->copy_(sink_sum);
}

}  // namespace sim

ACLNN(FlashAttentionScoreGrad,
      attention(true, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, {}, {}),
      (const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out_gradient, const OptionalTensor& pse,
       const OptionalTensor& drop_mask, const OptionalTensor& padding_mask, const OptionalTensor& mask,
       const OptionalTensor& softmax_max, const OptionalTensor& softmax_sum, const OptionalTensor&, const OptionalTensor& out,
       const OptionalInts& prefix, double scale, double keep, int64_t pre_tokens, int64_t next_tokens, int64_t heads,
       const std::string& layout, int64_t inner_precise, int64_t sparse_mode, Tensor& dq, Tensor& dk, Tensor& dv,
       Written<OptionalTensor>& dpse)) {
  backward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                      .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                      .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                      .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode},
                     {.max = softmax_max, .sum = softmax_sum, .out = out, .out_gradient = out_gradient},
                     {.query = dq, .key = dk, .value = dv, .pse = dpse});
}

ACLNN(FlashAttentionScoreGradV2,
      attention(true, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, {}, {}),
      (const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out_gradient, const OptionalTensor& pse,
       const OptionalTensor& drop_mask, const OptionalTensor& padding_mask, const OptionalTensor& mask,
       const OptionalTensor& softmax_max, const OptionalTensor& softmax_sum, const OptionalTensor&, const OptionalTensor& out,
       const OptionalInts& prefix, const OptionalInts&, const OptionalInts&, double scale, double keep, int64_t pre_tokens,
       int64_t next_tokens, int64_t heads, const std::string& layout, int64_t inner_precise, int64_t sparse_mode,
       int64_t pse_type, Tensor& dq, Tensor& dk, Tensor& dv, Written<OptionalTensor>& dpse)) {
  backward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                      .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                      .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                      .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode, .pse_type = pse_type},
                     {.max = softmax_max, .sum = softmax_sum, .out = out, .out_gradient = out_gradient},
                     {.query = dq, .key = dk, .value = dv, .pse = dpse});
}

ACLNN(FlashAttentionScoreGradV3,
      attention(true, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, {}, {}),
      (const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out_gradient, const OptionalTensor& pse,
       const OptionalTensor& drop_mask, const OptionalTensor& padding_mask, const OptionalTensor& mask,
       const OptionalTensor& softmax_max, const OptionalTensor& softmax_sum, const OptionalTensor&, const OptionalTensor& out,
       const OptionalTensor& sink, const OptionalInts& prefix, const OptionalInts&, const OptionalInts&, double scale,
       double keep, int64_t pre_tokens, int64_t next_tokens, int64_t heads, const std::string& layout, int64_t inner_precise,
       int64_t sparse_mode, int64_t pse_type, Tensor& dq, Tensor& dk, Tensor& dv, Written<OptionalTensor>& dpse,
       Written<OptionalTensor>& dsink)) {
  backward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                      .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                      .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                      .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode, .pse_type = pse_type,
                      .sink = sink},
                     {.max = softmax_max, .sum = softmax_sum, .out = out, .out_gradient = out_gradient},
                     {.query = dq, .key = dk, .value = dv, .pse = dpse, .sink = dsink});
}

ACLNN(FlashAttentionUnpaddingScoreGrad,
      attention(true, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, query_ends,
                 key_ends),
      (const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out_gradient, const OptionalTensor& pse,
       const OptionalTensor& drop_mask, const OptionalTensor& padding_mask, const OptionalTensor& mask,
       const OptionalTensor& softmax_max, const OptionalTensor& softmax_sum, const OptionalTensor&, const OptionalTensor& out,
       const OptionalInts& prefix, const OptionalInts& query_ends, const OptionalInts& key_ends, double scale, double keep,
       int64_t pre_tokens, int64_t next_tokens, int64_t heads, const std::string& layout, int64_t inner_precise,
       int64_t sparse_mode, Tensor& dq, Tensor& dk, Tensor& dv, Written<OptionalTensor>& dpse)) {
  backward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                      .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                      .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                      .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode,
                      .query_ends = query_ends, .key_ends = key_ends},
                     {.max = softmax_max, .sum = softmax_sum, .out = out, .out_gradient = out_gradient},
                     {.query = dq, .key = dk, .value = dv, .pse = dpse});
}

ACLNN(FlashAttentionUnpaddingScoreGradV2,
      attention(true, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, query_ends,
                 key_ends),
      (const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out_gradient, const OptionalTensor& pse,
       const OptionalTensor& drop_mask, const OptionalTensor& padding_mask, const OptionalTensor& mask,
       const OptionalTensor& softmax_max, const OptionalTensor& softmax_sum, const OptionalTensor&, const OptionalTensor& out,
       const OptionalInts& prefix, const OptionalInts& query_ends, const OptionalInts& key_ends, const OptionalInts&,
       const OptionalInts&, double scale, double keep, int64_t pre_tokens, int64_t next_tokens, int64_t heads,
       const std::string& layout, int64_t inner_precise, int64_t sparse_mode, int64_t pse_type, Tensor& dq, Tensor& dk,
       Tensor& dv, Written<OptionalTensor>& dpse))
       {
  backward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                      .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                      .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                      .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode,
                      .query_ends = query_ends, .key_ends = key_ends, .pse_type = pse_type},
                     {.max = softmax_max, .sum = softmax_sum, .out = out, .out_gradient = out_gradient},
                     {.query = dq, .key = dk, .value = dv, .pse = dpse});
}

ACLNN(FlashAttentionUnpaddingScoreGradV3,
      attention(true, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, query_ends,
                 key_ends, query_rope),
      (const Tensor& query, const OptionalTensor& query_rope, const Tensor& key, const OptionalTensor& key_rope,
       const Tensor& value, const Tensor& out_gradient, const OptionalTensor& pse, const OptionalTensor& drop_mask,
       const OptionalTensor& padding_mask, const OptionalTensor& mask, const OptionalTensor& softmax_max,
       const OptionalTensor& softmax_sum, const OptionalTensor&, const OptionalTensor& out, const OptionalInts& prefix,
       const OptionalInts& query_ends, const OptionalInts& key_ends, const OptionalInts&, const OptionalInts&, double scale,
       double keep, int64_t pre_tokens, int64_t next_tokens, int64_t heads, const std::string& layout, int64_t inner_precise,
       int64_t sparse_mode, int64_t pse_type, Tensor& dq, Written<OptionalTensor>& dq_rope, Tensor& dk,
       Written<OptionalTensor>& dk_rope, Tensor& dv, Written<OptionalTensor>& dpse)) {
  backward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                      .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                      .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                      .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode,
                      .query_ends = query_ends, .key_ends = key_ends, .pse_type = pse_type, .query_rope = query_rope,
                      .key_rope = key_rope},
                     {.max = softmax_max, .sum = softmax_sum, .out = out, .out_gradient = out_gradient},
                     {.query = dq, .key = dk, .value = dv, .pse = dpse, .query_rope = dq_rope, .key_rope = dk_rope});
}

ACLNN(FlashAttentionUnpaddingScoreGradV4,
      attention(true, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, query_ends,
                 key_ends),
      (const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out_gradient, const OptionalTensor& pse,
       const OptionalTensor& drop_mask, const OptionalTensor& padding_mask, const OptionalTensor& mask,
       const OptionalTensor& softmax_max, const OptionalTensor& softmax_sum, const OptionalTensor&, const OptionalTensor& out,
       const OptionalInts& prefix, const OptionalInts& query_ends, const OptionalInts& key_ends, double scale, double keep,
       int64_t pre_tokens, int64_t next_tokens, int64_t heads, const std::string& layout, int64_t inner_precise,
       int64_t sparse_mode, Tensor& dq, Tensor& dk, Tensor& dv, Written<OptionalTensor>& dpse,
       const std::string& softmax_layout)) {
  backward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                      .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                      .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                      .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode,
                      .query_ends = query_ends, .key_ends = key_ends, .softmax_layout = softmax_layout},
                     {.max = softmax_max, .sum = softmax_sum, .out = out, .out_gradient = out_gradient},
                     {.query = dq, .key = dk, .value = dv, .pse = dpse});
}

ACLNN(FlashAttentionUnpaddingScoreGradV5,
      attention(true, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, query_ends,
                 key_ends, query_rope),
      (const Tensor& query, const OptionalTensor& query_rope, const Tensor& key, const OptionalTensor& key_rope,
       const Tensor& value, const Tensor& out_gradient, const OptionalTensor& pse, const OptionalTensor& drop_mask,
       const OptionalTensor& padding_mask, const OptionalTensor& mask, const OptionalTensor& softmax_max,
       const OptionalTensor& softmax_sum, const OptionalTensor&, const OptionalTensor& out, const OptionalTensor& sink,
       const OptionalInts& prefix, const OptionalInts& query_ends, const OptionalInts& key_ends, const OptionalInts&,
       const OptionalInts&, double scale, double keep, int64_t pre_tokens, int64_t next_tokens, int64_t heads,
       const std::string& layout, int64_t inner_precise, int64_t sparse_mode, int64_t pse_type,
       const std::string& softmax_layout, Tensor& dq, Written<OptionalTensor>& dq_rope, Tensor& dk,
       Written<OptionalTensor>& dk_rope, Tensor& dv, Written<OptionalTensor>& dpse, Written<OptionalTensor>& dsink)) {
  backward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                      .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                      .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                      .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode,
                      .query_ends = query_ends, .key_ends = key_ends, .pse_type = pse_type,
                      .softmax_layout = softmax_layout, .sink = sink, .query_rope = query_rope, .key_rope = key_rope},
                     {.max = softmax_max, .sum = softmax_sum, .out = out, .out_gradient = out_gradient},
                     {.query = dq, .key = dk, .value = dv, .pse = dpse, .sink = dsink, .query_rope = dq_rope,
                      .key_rope = dk_rope});
}
