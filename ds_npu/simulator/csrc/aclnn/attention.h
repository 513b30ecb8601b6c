// Attention as CANN's flash attention defines it, in three parts: what the operators are given (AttentionCall), that as
// independent sequences whose tensors are views of the given ones (attention_sequences.cpp), and the arithmetic of one
// head of one sequence, in blocks of rows (attention_head.cpp).
#pragma once

#include <algorithm>
#include <limits>

#include "aclnn/operator.h"

namespace sim {

// The statistics that CANN writes for a row that sees no key.
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kLargest = std::numeric_limits<float>::max();

// The arguments common to all versions of the operator; older versions keep the defaults of the last ones.
struct AttentionCall {
  Tensor query, key, value;
  OptionalTensor pse, drop_mask, padding_mask, mask;
  OptionalInts prefix;
  double scale, keep_probability;
  int64_t pre_tokens, next_tokens, heads;
  std::string layout;
  int64_t inner_precise, sparse_mode;
  OptionalInts query_ends{}, key_ends{};  // TND: where each sequence ends, counted from the beginning of the tensor
  int64_t pse_type = 1;
  std::string softmax_layout{};
  OptionalTensor sink{}, query_rope{}, key_rope{};
};

// Row i sees the keys from i + lower to i + upper, and the first `prefix` keys.
struct VisibleKeys {
  int64_t keys;
  int64_t lower, upper, prefix = 0;
  int64_t begin(int64_t row) const { return std::clamp<int64_t>(row + lower, 0, keys); }
  int64_t end(int64_t row) const { return std::clamp<int64_t>(std::max(row + upper + 1, prefix), 0, keys); }
  bool all(int64_t rows) const { return begin(rows - 1) == 0 && end(0) == keys; }
};

// The result of a row all of whose keys the mask tensor hides. CANN writes zeros if it checks for such rows (inner_precise 2)
// and equal weights if it does not, and does not allow such rows in TND.
enum class HiddenRow { kZero, kEqualWeights, kRefused };

// One head of one sequence: matrices in float32 of [rows, size].
struct AttentionHead {
  Tensor query, key, value;
  Tensor pse, mask;  // [rows or 1, keys], undefined where there is none; true in `mask` hides
  VisibleKeys visible;
  HiddenRow hidden_row;
  double scale;
  bool pse_before_scale;
  std::optional<float> sink{};
  const uint8_t* keep_bits = nullptr;  // one for each score, of which this head's begin at first_bit
  int64_t first_bit = 0;
  double keep_probability = 1;

  int64_t rows() const { return query.size(0); }
};

// The results of the forward pass, views [rows, size] and [rows, 8].
struct AttentionResult {
  Tensor out, max, sum;
};

// Gradients: float32 sums that the heads sharing a key add to, and the query's, which is written.
struct AttentionGradient {
  Tensor query, key, value;
  Tensor pse;   // undefined, or float32 of the shape of the head's pse
  Tensor sink;  // undefined, or a float32 scalar
};

// Memory for the scores of a block of rows, used again by every block and head of a call.
class ScoreBuffer {
 public:
  Tensor take(int64_t rows, int64_t keys);

 private:
  Tensor memory_;
};

void attend(const AttentionHead& head, const AttentionResult& result, ScoreBuffer& scores);
void attend_backward(const AttentionHead& head, const AttentionResult& result, const Tensor& out_gradient,
                     const AttentionGradient& gradient, ScoreBuffer& scores, ScoreBuffer& products);

// One sequence (of a batch, or a document of TND); tensors are [heads, rows, size].
struct AttentionSequence {
  Tensor query, key, value;
  Tensor pse{}, mask{};  // [heads or 1, rows or 1, keys] or undefined
  VisibleKeys visible;
  HiddenRow hidden_row;
  int64_t first_bit;  // of its first head in the dropout mask
};

// The sequences of a call. Throws for what CANN or this simulation does not allow.
std::vector<AttentionSequence> sequences_of(const AttentionCall& call);

// A tensor laid out as the query (or, with another number of heads, as the key), as views [heads, rows, size], one for each
// sequence.
Tensors split_sequences(const Tensor& tensor, const AttentionCall& call, int64_t heads, const OptionalInts& ends);
// Likewise softmax_max and softmax_sum.
Tensors split_statistics(const Tensor& statistics, const AttentionCall& call);

// The rotary part of query and key, where there is one, as further dims of each.
AttentionCall with_rope_joined(AttentionCall call);

int64_t key_heads(const AttentionCall& call);
// The cost of a call, forward or backward; `query_rope` is as wide as the key's. A call that is not allowed costs nothing: it
// ends when it runs.
Work attention(bool backward, const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
               const OptionalInts& prefix, int64_t pre_tokens, int64_t next_tokens, int64_t heads, const std::string& layout,
               int64_t sparse_mode, const OptionalInts& query_ends, const OptionalInts& key_ends,
               const OptionalTensor& query_rope = {});
bool is_packed(const AttentionCall& call);

// Head `head` of a sequence in float32, with what the call says of all heads.
AttentionHead head_of(const AttentionCall& call, const AttentionSequence& sequence, const Tensor& query, const Tensor& key,
                      const Tensor& value, int64_t head);

void forward_attention(const AttentionCall& call, Tensor& softmax_max, Tensor& softmax_sum, Tensor& out);

struct AttentionSaved {
  OptionalTensor max, sum, out;
  const Tensor& out_gradient;
};
struct AttentionGradients {
  Tensor query, key, value;
  OptionalTensor pse{}, sink{}, query_rope{}, key_rope{};
};
void backward_attention(const AttentionCall& call, const AttentionSaved& saved, const AttentionGradients& gradients);

}  // namespace sim
