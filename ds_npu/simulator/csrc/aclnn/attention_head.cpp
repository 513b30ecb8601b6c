// The arithmetic of attention for one head of one sequence, in blocks of rows and in float32.
#include "aclnn/attention.h"

namespace sim {

namespace {

// Rows whose scores are computed at a time: few enough for the cache, and for a causal mask to leave keys out.
int64_t rows_per_block(int64_t keys) {
  constexpr int64_t scores = 1 << 16;
  return std::clamp<int64_t>(scores / std::max<int64_t>(keys, 1), 64, 512);
}

// Rows [begin, end) of a head with the keys [first, past) that any of them sees.
struct Block {
  int64_t begin, end, first, past;
  int64_t rows() const { return end - begin; }
  int64_t keys() const { return std::max<int64_t>(past - first, 0); }
  Tensor rows_of(const Tensor& matrix) const { return matrix.narrow(0, begin, rows()); }
  Tensor keys_of(const Tensor& matrix) const { return matrix.narrow(0, first, keys()); }
  Tensor part_of(const Tensor& scores) const {
    const Tensor selected = scores.narrow(1, first, keys());
    return scores.size(0) == 1 ? selected : rows_of(selected);
  }
};

std::vector<Block> blocks_of(const AttentionHead& head) {
  std::vector<Block> blocks;
  const int64_t step = rows_per_block(head.visible.keys);
  for (int64_t begin = 0; begin < head.rows(); begin += step) {
    const int64_t end = std::min(begin + step, head.rows());
    blocks.push_back(
        {.begin = begin, .end = end, .first = head.visible.begin(begin), .past = head.visible.end(end - 1)});
  }
  return blocks;
}

void hide_outside(const VisibleKeys& visible, const Block& block, const Tensor& scores) {
  float* row = scores.data_ptr<float>();
  for (int64_t i = block.begin; i < block.end; ++i, row += block.keys()) {
    const int64_t begin = std::clamp(visible.begin(i), block.first, block.past) - block.first;
    const int64_t end = std::clamp(visible.end(i), block.first, block.past) - block.first;
    std::fill(row, row + begin, kLowest);
    std::fill(row + std::max(begin, end), row + block.keys(), kLowest);
  }
}

Tensor scores_of(const AttentionHead& head, const Block& block, ScoreBuffer& buffer) {
  Tensor scores = buffer.take(block.rows(), block.keys());
  at::addmm_out(scores, scores, block.rows_of(head.query), block.keys_of(head.key).t(), 0, head.scale);
  if (head.pse.defined()) scores.add_(block.part_of(head.pse), head.pse_before_scale ? head.scale : 1.0);
  if (!head.visible.all(head.rows())) hide_outside(head.visible, block, scores);
  if (head.mask.defined()) scores.masked_fill_(block.part_of(head.mask), kLowest);
  return scores;
}

// [rows, 1], true for the rows of the block that see no key; undefined if there is none.
Tensor empty_rows(const AttentionHead& head, const Block& block, const Tensor& max) {
  const bool windowed = !head.visible.all(head.rows());
  if (!windowed && !head.mask.defined()) return {};
  const Tensor empty = max.eq(kLowest);
  if (!empty.any().item<bool>()) return {};
  // CANN always finds rows outside the window; rows hidden by a mask tensor only on request.
  if (!head.mask.defined()) return empty;
  int64_t hidden = 0;
  for (int64_t i = block.begin; i < block.end; ++i) {
    hidden += head.visible.begin(i) < head.visible.end(i) && empty[i - block.begin].item<bool>();
  }
  if (hidden == 0 || head.hidden_row == HiddenRow::kZero) return empty;
  if (head.hidden_row == HiddenRow::kRefused || windowed) {
    throw Failure(ACL_ERROR_INVALID_PARAM, "atten_mask hides every key of a row: " +
                                               std::string(windowed ? "set inner_precise to 2" : "not allowed in TND"));
  }
  return {};
}

// Multiplies each of the block's scores by 1 / keep_probability if its bit says that it is kept, and else by 0.
void drop(const AttentionHead& head, const Block& block, const Tensor& scores) {
  if (head.keep_bits == nullptr) return;
  const float factors[2] = {0.0f, static_cast<float>(1 / head.keep_probability)};
  float* score = scores.data_ptr<float>();
  for (int64_t i = block.begin; i < block.end; ++i) {
    int64_t bit = head.first_bit + i * head.visible.keys + block.first;
    for (int64_t j = 0; j < block.keys(); ++j, ++bit) *score++ *= factors[(head.keep_bits[bit >> 3] >> (bit & 7)) & 1];
  }
}

// exp(scores), where what would be smaller than a normal number of float32 is 0: hidden scores above all, for which MKL's
// exp takes ten times as long.
Tensor exp_of(const Tensor& scores) {
  constexpr float kSmallest = -87.0f, kItsExp = 1.7e-38f;
  return at::threshold_(scores.clamp_min_(kSmallest).exp_(), kItsExp, 0);
}

void attend_block(const AttentionHead& head, const Block& block, const AttentionResult& result, ScoreBuffer& buffer) {
  const Tensor scores = scores_of(head, block, buffer);
  Tensor max = scores.amax(1, /*keepdim=*/true);
  const Tensor empty = empty_rows(head, block, max);
  if (head.sink) max.clamp_min_(*head.sink);
  exp_of(scores.sub_(max));
  if (empty.defined()) scores.masked_fill_(empty, 0);
  Tensor sum = scores.sum(1, /*keepdim=*/true);
  if (head.sink) sum.add_(max.neg().add_(*head.sink).exp_());
  if (empty.defined() && !head.sink) sum.masked_fill_(empty, kLargest);
  drop(head, block, scores);
  block.rows_of(result.out).copy_(at::mm(scores, block.keys_of(head.value)).div_(sum));
  block.rows_of(result.max).copy_(max);
  block.rows_of(result.sum).copy_(sum);
}

// The statistics as columns [rows, 1]; the reciprocal sum is 0 for rows that had nothing to attend to.
struct Normalizer {
  Tensor max, reciprocal_sum;
};

Normalizer normalizer_of(const Block& block, const AttentionResult& result) {
  const Tensor sum = block.rows_of(result.sum).narrow(1, 0, 1);
  return {.max = block.rows_of(result.max).narrow(1, 0, 1),
          .reciprocal_sum = sum.reciprocal().masked_fill_(sum.eq(kLargest), 0)};
}

void attend_backward_block(const AttentionHead& head, const Block& block, const AttentionResult& result,
                           const Tensor& out_gradient, const AttentionGradient& gradient, ScoreBuffer& scores,
                           ScoreBuffer& products) {
  const Tensor upstream = block.rows_of(out_gradient);
  const auto [max, reciprocal_sum] = normalizer_of(block, result);
  const Tensor weights = exp_of(scores_of(head, block, scores).sub_(max)).mul_(reciprocal_sum);
  Tensor slopes = products.take(block.rows(), block.keys());
  Tensor value_gradient = block.keys_of(gradient.value);
  if (head.keep_bits == nullptr) {
    value_gradient.addmm_(weights.t(), upstream);
  } else {
    slopes.copy_(weights);
    drop(head, block, slopes);
    value_gradient.addmm_(slopes.t(), upstream);
  }
  at::mm_out(slopes, upstream, block.keys_of(head.value).t());
  drop(head, block, slopes);
  const Tensor mean_slope = (block.rows_of(result.out) * upstream).sum(1, /*keepdim=*/true);
  slopes.sub_(mean_slope).mul_(weights);
  block.rows_of(gradient.query).copy_(at::mm(slopes, block.keys_of(head.key)).mul_(head.scale));
  block.keys_of(gradient.key).addmm_(slopes.t(), block.rows_of(head.query), 1, head.scale);
  if (gradient.pse.defined()) {
    const Tensor change = gradient.pse.size(0) == 1 ? slopes.sum(0, /*keepdim=*/true) : slopes;
    block.part_of(gradient.pse).add_(change, head.pse_before_scale ? head.scale : 1.0);
  }
  if (gradient.sink.defined()) {
    const Tensor weight = max.neg().add_(*head.sink).exp_().mul_(reciprocal_sum);
    gradient.sink.sub_(weight.mul_(mean_slope).sum());
  }
}

}  // namespace

Tensor ScoreBuffer::take(int64_t rows, int64_t keys) {
  if (!memory_.defined() || memory_.numel() < rows * keys) memory_ = at::empty({rows * keys}, at::kFloat);
  return memory_.narrow(0, 0, rows * keys).view({rows, keys});
}

void attend(const AttentionHead& head, const AttentionResult& result, ScoreBuffer& scores) {
  for (const Block& block : blocks_of(head)) {
    if (block.keys() > 0) {
      attend_block(head, block, result, scores);
      continue;
    }
    // A sequence without keys has zeros for statistics; a row that the window leaves none, the extremes.
    const float max = head.sink.value_or(head.visible.keys == 0 ? 0 : kLowest);
    const float sum = head.sink ? 1 : head.visible.keys == 0 ? 0 : kLargest;
    block.rows_of(result.out).zero_();
    block.rows_of(result.max).fill_(max);
    block.rows_of(result.sum).fill_(sum);
  }
}

void attend_backward(const AttentionHead& head, const AttentionResult& result, const Tensor& out_gradient,
                     const AttentionGradient& gradient, ScoreBuffer& scores, ScoreBuffer& products) {
  for (const Block& block : blocks_of(head)) {
    if (block.keys() > 0) {
      attend_backward_block(head, block, result, out_gradient, gradient, scores, products);
    } else {
      block.rows_of(gradient.query).zero_();
    }
  }
}

}  // namespace sim
