// Mixture of experts: which experts a token goes to, and the operators of inference that carry tokens there and back.
#include "aclnn/operator.h"
#include "routing.h"

using namespace sim;

// The k largest of each row, largest first; of equal ones the first. Or k that are drawn.
static std::tuple<Tensor, Tensor> largest(const Tensor& scores, int64_t k) {
  if (const auto drawn = drawn_choices(scores, k, -1)) return {scores.gather(-1, *drawn), *drawn};
  const auto [values, indices] = at::sort(scores, true, -1, true);
  return {values.narrow(-1, 0, k), indices.narrow(-1, 0, k)};
}

// The experts of a finished row are set to the number of experts, which no expert has.
static void write_experts(const Tensor& out, Tensor experts, const OptionalTensor& finished, int64_t number) {
  if (finished) experts = experts.masked_fill(finished->unsqueeze(-1), number);
  out.copy_(experts);
}

ACLNN(MoeGatingTopKSoftmax, sorting(),
      (const Tensor& x, const OptionalTensor& finished, int64_t k, Tensor& y, Chosen& experts, Tensor& rows)) {
  const auto [values, indices] = largest(at::softmax(x, -1, at::kFloat), k);
  y.copy_(values);
  write_experts(experts, indices, finished, x.size(-1));
  const int64_t tokens = rows.numel() / std::max<int64_t>(k, 1);
  rows.copy_(at::arange(rows.numel(), at::kInt).view({k, tokens}).t().reshape(rows.sizes()));
}

ACLNN(MoeGatingTopKSoftmaxV2, sorting(),
      (const Tensor& x, const OptionalTensor& finished, int64_t k, int64_t renorm, bool give_softmax, Tensor& y,
       Chosen& experts, Written<OptionalTensor>& softmax)) {
  if (renorm != 0 && renorm != 1) throw Failure(ACL_ERROR_INVALID_PARAM, "renorm is 0 or 1");
  const Tensor scores = renorm == 0 ? at::softmax(x, -1, at::kFloat) : x.to(at::kFloat);
  const auto [values, indices] = largest(scores, k);
  y.copy_(renorm == 0 ? values : at::softmax(values, -1));
  write_experts(experts, indices, finished, x.size(-1));
  if (give_softmax && softmax) softmax->copy_(scores);
}

ACLNN(MoeInitRouting, streaming(),
      (const Tensor& x, const Tensor& row_indices, const Tensor& experts, int64_t, Tensor& expanded_x, Tensor& expanded_rows,
       Tensor& expanded_experts)) {
  const auto [sorted, order] = at::sort(experts.reshape({experts.numel()}), true, 0, false);
  const Tensor rows = row_indices.reshape({row_indices.numel()}).index_select(0, order).to(at::kLong);
  expanded_experts.copy_(sorted);
  expanded_rows.index_copy_(0, rows, at::arange(rows.numel(), expanded_rows.options()));
  at::index_select_out(expanded_x, x, 0, rows.narrow(0, 0, expanded_x.size(0)).remainder(x.size(0)));
}

// Counts for the experts of the active range: running sums (0), one each (1), or pairs of expert and count (2), which are
// only of experts that have rows, and a zero pair ends them.
static void write_expert_counts(const Tensor& out, const Tensor& counts, int64_t first, int64_t type) {
  if (type == 0) {
    out.copy_(counts.cumsum(0));
  } else if (type == 1) {
    out.copy_(counts);
  } else if (type == 2) {
    const Tensor used = counts.nonzero().squeeze(1);
    out.zero_();
    out.narrow(0, 0, used.numel()).copy_(at::stack({used + first, counts.index_select(0, used)}, 1));
  } else {
    throw Failure(ACL_ERROR_API_NOT_SUPPORT, "expertTokensNumType " + std::to_string(type) + " is not simulated");
  }
}

// Without quantisation, and without dropping. Rows of experts outside the active range come last and are not copied.
ACLNN(MoeInitRoutingV3, streaming(),
      (const Tensor& x, const Tensor& experts, const OptionalTensor& scale, const OptionalTensor& offset, int64_t active,
       int64_t, int64_t, int64_t drop_pad_mode, int64_t count_type, bool give_counts, int64_t quant_mode,
       const OptionalInts& range, int64_t index_type, Tensor& expanded_x, Tensor& expanded_rows, Tensor& counts_out,
       Written<OptionalTensor>& expanded_scale)) {
  if (quant_mode != -1) throw Failure(ACL_ERROR_API_NOT_SUPPORT, "quantMode " + std::to_string(quant_mode));
  if (drop_pad_mode != 0) throw Failure(ACL_ERROR_API_NOT_SUPPORT, "dropPadMode " + std::to_string(drop_pad_mode));
  if (offset) throw Failure(ACL_ERROR_API_NOT_SUPPORT, "offset without quantisation");
  if (!range || range->size() != 2) throw Failure(ACL_ERROR_INVALID_PARAM, "activeExpertRange has two numbers");
  const int64_t first = range->at(0), number = range->at(1) - first, choices = experts.size(1);
  const Tensor expert = experts.reshape({experts.numel()}).to(at::kLong).sub(first);
  const Tensor sorting = expert.masked_fill(expert.lt(0) | expert.ge(number), number);
  const Tensor order = std::get<1>(at::sort(sorting, true, 0, false));
  const Tensor counts = at::bincount(sorting, {}, number + 1).narrow(0, 0, number);
  const int64_t inside = counts.sum().item<int64_t>();
  const int64_t copied = std::min({inside, active > 0 ? active : inside, expanded_x.size(0)});
  const Tensor token = order.narrow(0, 0, copied).floor_divide(choices);
  expanded_x.narrow(0, 0, copied).copy_(x.index_select(0, token));
  if (scale && expanded_scale) expanded_scale->narrow(0, 0, copied).copy_(scale->index_select(0, token));
  if (index_type == 1) {
    expanded_rows.copy_(order);
  } else {
    expanded_rows.fill_(-1);
    expanded_rows.index_copy_(0, order.narrow(0, 0, inside), at::arange(inside, expanded_rows.options()));
  }
  if (give_counts) write_expert_counts(counts_out, counts, first, count_type);
}

// How many rows belong to each expert and those before it.
ACLNN(MoeComputeExpertTokens, streaming(), (const Tensor& sorted_experts, int64_t, Tensor& out)) {
  out.copy_(at::searchsorted(sorted_experts.contiguous(), at::arange(out.numel(), sorted_experts.options()), true, true));
}

// Rows stand choice by choice: row k * tokens + i is choice k of token i; -1 in drop/pad mode is a row that was dropped.
static void finalize(const Tensor& expanded_x, const Tensor& expanded_rows, const OptionalTensor& x1, const OptionalTensor& x2,
                     const OptionalTensor& bias, const OptionalTensor& scales, const OptionalTensor& experts, int64_t mode,
                     const Tensor& out) {
  if (mode != 0) throw Failure(ACL_ERROR_API_NOT_SUPPORT, "dropPadMode " + std::to_string(mode) + " is not simulated");
  const int64_t tokens = out.size(0), hidden = out.size(1);
  const int64_t choices = tokens == 0 ? 1 : expanded_rows.numel() / tokens;
  Tensor rows = expanded_x.reshape({-1, hidden}).index_select(0, expanded_rows).to(at::kFloat).view({choices, tokens, hidden});
  if (bias) {
    if (!experts) throw Failure(ACL_ERROR_INVALID_PARAM, "bias needs expertIdx");
    const Tensor expert = experts->t().reshape({choices * tokens});
    rows = rows + bias->to(at::kFloat).index_select(0, expert).view({choices, tokens, hidden});
  }
  if (scales) rows = rows * scales->to(at::kFloat).t().unsqueeze(2);
  Tensor sum = rows.sum(0);
  for (const OptionalTensor& skip : {x1, x2})
    if (skip) sum.add_(*skip);
  out.copy_(sum);
}

ACLNN(MoeFinalizeRoutingV2, streaming(),
      (const Tensor& expanded_x, const Tensor& expanded_rows, const OptionalTensor& x1, const OptionalTensor& x2,
       const OptionalTensor& bias, const OptionalTensor& scales, const OptionalTensor& experts, int64_t mode, Tensor& out)) {
  finalize(expanded_x, expanded_rows, x1, x2, bias, scales, experts, mode, out);
}

// CANN does not document V4: its arguments are those of op-plugin's call, which passes null for what V2 lacks.
ACLNN(MoeFinalizeRoutingV4, streaming(),
      (const Tensor& expanded_x, const Tensor& expanded_rows, const OptionalTensor& x1, const OptionalTensor& x2,
       const OptionalTensor& bias, const OptionalTensor& scales, const OptionalTensor& experts, const OptionalTensor& a,
       const OptionalTensor& b, const OptionalTensor& c, const OptionalTensor& d, int64_t mode, const OptionalInts& e,
       const OptionalInts& f, const OptionalInts& g, int64_t, Tensor& out)) {
  if (a || b || c || d || e || f || g)
    throw Failure(ACL_ERROR_API_NOT_SUPPORT, "the tensors and lists that V4 adds to V2 are not simulated");
  finalize(expanded_x, expanded_rows, x1, x2, bias, scales, experts, mode, out);
}

// Tokens in the order (rank, expert) brought into the order (expert, rank).
ACLNN(MoeReRouting, streaming(),
      (const Tensor& tokens, const Tensor& counts, const OptionalTensor& scales, int64_t count_type, int64_t index_type,
       Tensor& permuted, Written<OptionalTensor>& permuted_scales, Tensor& indices, Tensor& expert_counts)) {
  if (count_type != 1) throw Failure(ACL_ERROR_API_NOT_SUPPORT, "expertTokenNumType " + std::to_string(count_type));
  if (index_type != 0) throw Failure(ACL_ERROR_API_NOT_SUPPORT, "idxType " + std::to_string(index_type));
  const Tensor expert = at::arange(counts.size(1), at::kLong).expand(counts.sizes()).reshape({counts.numel()});
  const Tensor expert_of_row = at::repeat_interleave(expert, counts.to(at::kLong).reshape({counts.numel()}), 0);
  const Tensor order = std::get<1>(at::sort(expert_of_row, true, 0, false));
  at::index_select_out(permuted, tokens, 0, order);
  if (scales && permuted_scales) permuted_scales->copy_(scales->index_select(0, order));
  indices.copy_(order);
  expert_counts.copy_(counts.sum(0));
}
