// Flash attention, forward: the versions of the operator and what they have in common.
#include "aclnn/attention.h"

using namespace sim;

namespace sim {

AttentionCall with_rope_joined(AttentionCall call) {
  if (!call.query_rope || !call.key_rope) return call;
  call.query = at::cat({call.query, *call.query_rope}, -1);
  call.key = at::cat({call.key, *call.key_rope}, -1);
  return call;
}

AttentionHead head_of(const AttentionCall& call, const AttentionSequence& sequence, const Tensor& query, const Tensor& key,
                      const Tensor& value, int64_t head) {
  const auto of_head = [&](const Tensor& all) { return all.defined() ? all[all.size(0) == 1 ? 0 : head] : Tensor(); };
  AttentionHead result{.query = query,
                       .key = key,
                       .value = value,
                       .pse = of_head(sequence.pse),
                       .mask = of_head(sequence.mask),
                       .visible = sequence.visible,
                       .hidden_row = sequence.hidden_row,
                       .scale = call.scale,
                       .pse_before_scale = call.pse_type == 1};
  if (call.sink) result.sink = (*call.sink)[head].item<float>();
  if (call.keep_probability < 1) {
    result.keep_bits = call.drop_mask->const_data_ptr<uint8_t>();
    result.first_bit = sequence.first_bit + head * sequence.query.size(1) * sequence.key.size(1);
    result.keep_probability = call.keep_probability;
  }
  return result;
}

void forward_attention(const AttentionCall& given, Tensor& softmax_max, Tensor& softmax_sum, Tensor& out) {
  AttentionCall call = with_rope_joined(given);
  if (call.drop_mask) call.drop_mask = call.drop_mask->contiguous();
  const auto sequences = sequences_of(call);
  const Tensors outs = split_sequences(out, call, call.heads, call.query_ends);
  const Tensors maxima = split_statistics(softmax_max, call), sums = split_statistics(softmax_sum, call);
  const int64_t group = call.heads / std::max<int64_t>(key_heads(call), 1);
  ScoreBuffer scores;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const AttentionSequence& sequence = sequences[i];
    if (sequence.query.size(1) == 0) continue;
    for (int64_t shared = 0; shared < key_heads(call); ++shared) {
      const Tensor key = sequence.key[shared].to(at::kFloat), value = sequence.value[shared].to(at::kFloat);
      for (int64_t head = shared * group; head < (shared + 1) * group; ++head) {
        const Tensor query = sequence.query[head].to(at::kFloat);
        attend(head_of(call, sequence, query, key, value, head),
               {.out = outs[i][head], .max = maxima[i][head], .sum = sums[i][head]}, scores);
      }
    }
  }
}

}  // namespace sim

ACLNN(FlashAttentionScore,
      attention(false, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, {}, {}),
      (const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse, const OptionalTensor& drop_mask,
       const OptionalTensor& padding_mask, const OptionalTensor& mask, const OptionalInts& prefix, double scale, double keep,
       int64_t pre_tokens, int64_t next_tokens, int64_t heads, const std::string& layout, int64_t inner_precise,
       int64_t sparse_mode, Tensor& softmax_max, Tensor& softmax_sum, const OptionalTensor&, Tensor& out)) {
  forward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                     .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                     .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                     .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode},
                    softmax_max, softmax_sum, out);
}

// q_start and kv_start, from here on, matter only to the kinds of pse that are made inside, which are not simulated.
ACLNN(FlashAttentionScoreV2,
      attention(false, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, {}, {}),
      (const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse, const OptionalTensor& drop_mask,
       const OptionalTensor& padding_mask, const OptionalTensor& mask, const OptionalInts& prefix, const OptionalInts&,
       const OptionalInts&, double scale, double keep, int64_t pre_tokens, int64_t next_tokens, int64_t heads,
       const std::string& layout, int64_t inner_precise, int64_t sparse_mode, int64_t pse_type, Tensor& softmax_max,
       Tensor& softmax_sum, const OptionalTensor&, Tensor& out)) {
  forward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                     .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                     .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                     .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode, .pse_type = pse_type},
                    softmax_max, softmax_sum, out);
}

ACLNN(FlashAttentionScoreV3,
      attention(false, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, {}, {}),
      (const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse, const OptionalTensor& drop_mask,
       const OptionalTensor& padding_mask, const OptionalTensor& mask, const OptionalTensor& sink, const OptionalInts& prefix,
       const OptionalInts&, const OptionalInts&, double scale, double keep, int64_t pre_tokens, int64_t next_tokens,
       int64_t heads, const std::string& layout, int64_t inner_precise, int64_t sparse_mode, int64_t pse_type,
       Tensor& softmax_max, Tensor& softmax_sum, const OptionalTensor&, Tensor& out)) {
  forward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                     .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                     .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                     .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode, .pse_type = pse_type,
                     .sink = sink},
                    softmax_max, softmax_sum, out);
}

ACLNN(FlashAttentionVarLenScore,
      attention(false, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, query_ends,
                 key_ends),
      (const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse, const OptionalTensor& drop_mask,
       const OptionalTensor& padding_mask, const OptionalTensor& mask, const OptionalInts& prefix,
       const OptionalInts& query_ends, const OptionalInts& key_ends, double scale, double keep, int64_t pre_tokens,
       int64_t next_tokens, int64_t heads, const std::string& layout, int64_t inner_precise, int64_t sparse_mode,
       Tensor& softmax_max, Tensor& softmax_sum, const OptionalTensor&, Tensor& out)) {
  forward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                     .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                     .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                     .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode,
                     .query_ends = query_ends, .key_ends = key_ends},
                    softmax_max, softmax_sum, out);
}

ACLNN(FlashAttentionVarLenScoreV2,
      attention(false, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, query_ends,
                 key_ends),
      (const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse, const OptionalTensor& drop_mask,
       const OptionalTensor& padding_mask, const OptionalTensor& mask, const OptionalInts& prefix,
       const OptionalInts& query_ends, const OptionalInts& key_ends, const OptionalInts&, const OptionalInts&, double scale,
       double keep, int64_t pre_tokens, int64_t next_tokens, int64_t heads, const std::string& layout, int64_t inner_precise,
       int64_t sparse_mode, int64_t pse_type, Tensor& softmax_max, Tensor& softmax_sum, const OptionalTensor&, Tensor& out)) {
  forward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                     .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                     .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                     .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode,
                     .query_ends = query_ends, .key_ends = key_ends, .pse_type = pse_type},
                    softmax_max, softmax_sum, out);
}

ACLNN(FlashAttentionVarLenScoreV3,
      attention(false, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, query_ends,
                 key_ends, query_rope),
      (const Tensor& query, const OptionalTensor& query_rope, const Tensor& key, const OptionalTensor& key_rope,
       const Tensor& value, const OptionalTensor& pse, const OptionalTensor& drop_mask, const OptionalTensor& padding_mask,
       const OptionalTensor& mask, const OptionalInts& prefix, const OptionalInts& query_ends, const OptionalInts& key_ends,
       const OptionalInts&, const OptionalInts&, double scale, double keep, int64_t pre_tokens, int64_t next_tokens,
       int64_t heads, const std::string& layout, int64_t inner_precise, int64_t sparse_mode, int64_t pse_type,
       Tensor& softmax_max, Tensor& softmax_sum, const OptionalTensor&, Tensor& out)) {
  forward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                     .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                     .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                     .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode,
                     .query_ends = query_ends, .key_ends = key_ends, .pse_type = pse_type, .query_rope = query_rope,
                     .key_rope = key_rope},
                    softmax_max, softmax_sum, out);
}

ACLNN(FlashAttentionVarLenScoreV4,
      attention(false, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, query_ends,
                 key_ends),
      (const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse, const OptionalTensor& drop_mask,
       const OptionalTensor& padding_mask, const OptionalTensor& mask, const OptionalInts& prefix,
       const OptionalInts& query_ends, const OptionalInts& key_ends, double scale, double keep, int64_t pre_tokens,
       int64_t next_tokens, int64_t heads, const std::string& layout, int64_t inner_precise, int64_t sparse_mode,
       const std::string& softmax_layout, Tensor& softmax_max, Tensor& softmax_sum, const OptionalTensor&, Tensor& out)) {
  forward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                     .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                     .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                     .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode,
                     .query_ends = query_ends, .key_ends = key_ends, .softmax_layout = softmax_layout},
                    softmax_max, softmax_sum, out);
}

ACLNN(FlashAttentionVarLenScoreV5,
      attention(false, query, key, value, mask, prefix, pre_tokens, next_tokens, heads, layout, sparse_mode, query_ends,
                 key_ends, query_rope),
      (const Tensor& query, const OptionalTensor& query_rope, const Tensor& key, const OptionalTensor& key_rope,
       const Tensor& value, const OptionalTensor& pse, const OptionalTensor& drop_mask, const OptionalTensor& padding_mask,
       const OptionalTensor& mask, const OptionalTensor& sink, const OptionalInts& prefix, const OptionalInts& query_ends,
       const OptionalInts& key_ends, const OptionalInts&, const OptionalInts&, double scale, double keep, int64_t pre_tokens,
       int64_t next_tokens, int64_t heads, const std::string& layout, int64_t inner_precise, int64_t sparse_mode,
       int64_t pse_type, const std::string& softmax_layout, Tensor& softmax_max, Tensor& softmax_sum, const OptionalTensor&,
       Tensor& out)) {
  forward_attention({.query = query, .key = key, .value = value, .pse = pse, .drop_mask = drop_mask,
                     .padding_mask = padding_mask, .mask = mask, .prefix = prefix, .scale = scale,
                     .keep_probability = keep, .pre_tokens = pre_tokens, .next_tokens = next_tokens, .heads = heads,
                     .layout = layout, .inner_precise = inner_precise, .sparse_mode = sparse_mode,
                     .query_ends = query_ends, .key_ends = key_ends, .pse_type = pse_type,
                     .softmax_layout = softmax_layout, .sink = sink, .query_rope = query_rope, .key_rope = key_rope},
                    softmax_max, softmax_sum, out);
}
