// Merges attention over one set of keys with attention over another into attention over both.
#include "aclnn/operator.h"

using namespace sim;

namespace {

// TND with statistics that lie, document by document, by head: pieces [length, heads, 8] of each.
Tensors by_document(const Tensor& statistics, const Tensor& ends) {
  Tensors pieces;
  const Tensor list = ends.contiguous();
  const auto* end = list.const_data_ptr<int64_t>();
  int64_t begin = 0;
  for (int64_t i = 0; i < list.numel(); begin = end[i++]) {
    const Tensor piece = statistics.narrow(0, begin, end[i] - begin);
    pieces.push_back(piece.view({piece.size(1), piece.size(0), piece.size(2)}).transpose(0, 1));
  }
  return pieces;
}

// How the statistics become factors for tensors [rows, heads or batch, .., size]: in SBH they are [batch, heads, rows, 8].
Tensor rows_first(const Tensor& statistics, const std::string& layout, const std::string& softmax_layout,
                  const OptionalTensor& ends) {
  const Tensor column = statistics.narrow(-1, 0, 1);
  if (layout == "SBH") return column.permute({2, 0, 1, 3});
  if (layout != "TND") throw Failure(ACL_ERROR_API_NOT_SUPPORT, "layout " + layout);
  if (softmax_layout == "TND") return column;
  return at::cat(by_document(statistics, ends.value()), 0).narrow(-1, 0, 1);
}

}  // namespace

ACLNN(RingAttentionUpdateV2, streaming(),
      (const Tensor& previous, const Tensor& previous_max, const Tensor& previous_sum, const Tensor& current,
       const Tensor& current_max, const Tensor& current_sum, const OptionalTensor& ends, const std::string& layout,
       const std::string& softmax_layout, Tensor& out, Tensor& out_max, Tensor& out_sum)) {
  const Tensor max = at::maximum(previous_max, current_max);
  const Tensor previous_part = (previous_max - max).exp_().mul_(previous_sum);
  const Tensor current_part = (current_max - max).exp_().mul_(current_sum);
  const Tensor sum = previous_part + current_part;
  const auto factor = [&](const Tensor& part) { return rows_first(part / sum, layout, softmax_layout, ends); };
  const auto by_head = [&](const Tensor& x) {
    return layout == "SBH" ? x.unflatten(-1, {previous_max.size(1), -1}) : x;
  };
  const Tensor merged = (by_head(previous) * factor(previous_part))
                            .addcmul_(by_head(current).to(at::kFloat), factor(current_part));
  by_head(out).copy_(merged);
  out_max.copy_(max);
  out_sum.copy_(sum);
}
