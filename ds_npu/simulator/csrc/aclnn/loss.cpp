// Losses, cross-entropy of logits in one operator, and their gradients. Reduction: 0 none, 1 mean, 2 sum, as in
// ATen.
#include "aclnn/precision.h"

using namespace sim;

// Calls `gradient` to write the gradient of `self`, computed in float32 for bf16 and fp16.
template <class Gradient>
static void gradient_of(const Tensor& self, const Tensor& out, Gradient&& gradient) {
  write_as(wide_type(self.scalar_type()), out, std::forward<Gradient>(gradient));
}

static void nll_loss(const Tensor& self, const Tensor& target, const Tensor& weight, int64_t reduction, int64_t ignore_index,
                     Tensor& out, Tensor& total_weight) {
  const Tensor wide_self = wide(self), wide_weight = weight.to(wide_self.scalar_type());
  const auto [loss, total] = self.dim() == 4
      ? at::nll_loss2d_forward(wide_self, target.to(at::kLong), wide_weight, reduction, ignore_index)
      : at::nll_loss_forward(wide_self, target.to(at::kLong), wide_weight, reduction, ignore_index);
  out.copy_(loss.reshape(out.sizes()));
  total_weight.copy_(total.reshape(total_weight.sizes()));
}

ACLNN(NLLLoss, indexing(target),
      (const Tensor& self, const Tensor& target, const Tensor& weight, int64_t reduction, int64_t ignore_index, Tensor& out,
       Tensor& total_weight)) {
  nll_loss(self, target, weight, reduction, ignore_index, out, total_weight);
}

ACLNN(NLLLoss2d, indexing(target),
      (const Tensor& self, const Tensor& target, const Tensor& weight, int64_t reduction, int64_t ignore_index, Tensor& out,
       Tensor& total_weight)) {
  nll_loss(self, target, weight, reduction, ignore_index, out, total_weight);
}

ACLNN(NLLLossBackward, streaming(),
      (const Tensor& grad_output, const Tensor& self, const Tensor& target, const Tensor& weight, int64_t reduction,
       int64_t ignore_index, const Tensor& total_weight, Tensor& out)) {
  gradient_of(self, out, [&](Tensor& grad_input) {
    const ScalarType type = grad_input.scalar_type();
    at::nll_loss_backward_out(grad_input, grad_output.to(type), wide(self), target.to(at::kLong), weight.to(type), reduction,
                              ignore_index, total_weight.to(type));
  });
}

ACLNN(NLLLoss2dBackward, streaming(),
      (const Tensor& grad_output, const Tensor& self, const Tensor& target, const Tensor& weight, int64_t reduction,
       int64_t ignore_index, const Tensor& total_weight, Tensor& out)) {
  gradient_of(self, out, [&](Tensor& grad_input) {
    const ScalarType type = grad_input.scalar_type();
    at::nll_loss2d_backward_out(grad_input, grad_output.to(type), wide(self), target.to(at::kLong), weight.to(type), reduction,
                                ignore_index, total_weight.to(type));
  });
}

ACLNN(MseLoss, streaming(), (const Tensor& self, const Tensor& target, int64_t reduction, Tensor& out)) {
  out.copy_(at::mse_loss(wide(self), wide(target), reduction));
}

ACLNN(MseLossBackward, streaming(),
      (const Tensor& grad_output, const Tensor& self, const Tensor& target, int64_t reduction, Tensor& out)) {
  gradient_of(self, out, [&](Tensor& grad_input) {
    at::mse_loss_backward_out(grad_input, wide(grad_output), wide(self), wide(target), reduction);
  });
}

ACLNN(L1Loss, streaming(), (const Tensor& self, const Tensor& target, int64_t reduction, Tensor& out)) {
  out.copy_(at::l1_loss(wide(self), wide(target), reduction));
}

ACLNN(L1LossBackward, streaming(),
      (const Tensor& grad_output, const Tensor& self, const Tensor& target, int64_t reduction, Tensor& out)) {
  const Tensor difference = wide(self) - wide(target);
  const Tensor grad = difference.sign_().mul_(wide(grad_output));
  constexpr int64_t mean = 1;
  out.copy_(reduction == mean ? grad / static_cast<double>(grad.numel()) : grad);
}

ACLNN(SmoothL1Loss, streaming(), (const Tensor& self, const Tensor& target, int64_t reduction, float beta, Tensor& out)) {
  out.copy_(at::smooth_l1_loss(wide(self), wide(target), reduction, beta));
}

ACLNN(SmoothL1LossBackward, streaming(),
      (const Tensor& grad_output, const Tensor& self, const Tensor& target, int64_t reduction, float beta, Tensor& out)) {
  gradient_of(self, out, [&](Tensor& grad_input) {
    at::smooth_l1_loss_backward_out(grad_input, wide(grad_output), wide(self), wide(target), reduction, beta);
  });
}

ACLNN(BinaryCrossEntropy, streaming(),
      (const Tensor& self, const Tensor& target, const OptionalTensor& weight, int64_t reduction, Tensor& out)) {
  out.copy_(at::binary_cross_entropy(wide(self), wide(target), wide(weight), reduction));
}

ACLNN(BinaryCrossEntropyBackward, streaming(),
      (const Tensor& grad_output, const Tensor& self, const Tensor& target, const OptionalTensor& weight, int64_t reduction,
       Tensor& out)) {
  gradient_of(self, out, [&](Tensor& grad_input) {
    at::binary_cross_entropy_backward_out(grad_input, wide(grad_output), wide(self), wide(target), wide(weight), reduction);
  });
}

ACLNN(BinaryCrossEntropyWithLogits, streaming(),
      (const Tensor& self, const Tensor& target, const OptionalTensor& weight, const OptionalTensor& pos_weight,
       int64_t reduction, Tensor& out)) {
  out.copy_(at::binary_cross_entropy_with_logits(wide(self), wide(target), wide(weight), wide(pos_weight), reduction));
}

ACLNN(BinaryCrossEntropyWithLogitsBackward, streaming(),
      (const Tensor& grad_output, const Tensor& self, const Tensor& target, const OptionalTensor& weight,
       const OptionalTensor& pos_weight, int64_t reduction, Tensor& out)) {
  const Tensor probability = wide(self).sigmoid(), truth = wide(target);
  Tensor grad = pos_weight ? ((wide(*pos_weight) * truth + 1 - truth) * probability - wide(*pos_weight) * truth)
                           : probability - truth;
  if (weight) grad = grad * wide(*weight);
  grad = grad * wide(grad_output);
  constexpr int64_t mean = 1;
  out.copy_(reduction == mean ? grad / static_cast<double>(grad.numel()) : grad);
}

ACLNN(KlDiv, streaming(), (const Tensor& self, const Tensor& target, int64_t reduction, bool log_target, Tensor& out)) {
  out.copy_(at::kl_div(wide(self), wide(target), reduction, log_target));
}

ACLNN(KlDivBackward, streaming(),
      (const Tensor& grad_output, const Tensor& self, const Tensor& target, int64_t reduction, bool log_target, Tensor& out)) {
  const Tensor probability = log_target ? wide(target).exp() : wide(target).clamp_min(0);
  const Tensor grad = -probability * wide(grad_output);
  constexpr int64_t mean = 1;
  out.copy_(reduction == mean ? grad / static_cast<double>(self.numel()) : grad);
}

// Cross-entropy of logits in one operator, and its gradient. By CANN's page a negative ignore index ignores nothing.

namespace {

// Columns with a row for each token: its target (0 where that is ignored), and what its loss is multiplied by.
struct Tokens {
  Tensor target, factor;
};

Tokens tokens_of(const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const std::string& reduction,
                 int64_t ignore_index) {
  const Tensor ignored = ignore_index >= 0 ? target.eq(ignore_index) : at::zeros_like(target, at::kBool);
  const Tensor column = target.to(at::kLong).masked_fill(ignored, 0);
  Tensor factor = weight ? wide(*weight).index_select(0, column) : at::ones(target.sizes(), logits.options());
  factor = factor.masked_fill(ignored, 0);
  if (reduction == "mean") factor = factor / factor.sum();
  return {column.unsqueeze(1), factor.unsqueeze(1)};
}

void check(const std::string& reduction, double label_smoothing, double z_loss_scale) {
  if (reduction != "none" && reduction != "mean" && reduction != "sum")
    throw Failure(ACL_ERROR_INVALID_PARAM, "the reduction is \"" + reduction + "\"; it can be none, mean or sum");
  if (label_smoothing != 0 || z_loss_scale != 0)
    throw Failure(ACL_ERROR_INVALID_PARAM, "label smoothing and the z loss are not simulated");
}

}  // namespace

ACLNN(CrossEntropyLoss, streaming(),
      (const Tensor& input, const Tensor& target, const OptionalTensor& weight, const std::string& reduction,
       int64_t ignore_index, double label_smoothing, double z_loss_scale, bool return_z_loss, Tensor& loss, Tensor& log_prob,
       Tensor& /*z_loss*/, Tensor& /*log_sum_exp*/)) {
  check(reduction, label_smoothing, return_z_loss ? 1 : z_loss_scale);
  const Tensor exact = at::log_softmax(wide(input), 1);
  const auto tokens = tokens_of(exact, target, weight, reduction, ignore_index);
  const Tensor losses = -exact.gather(1, tokens.target) * tokens.factor;
  const Tensor counted = losses.masked_fill(tokens.factor.eq(0), 0).squeeze(1);
  loss.copy_(reduction == "none" ? counted : counted.sum());
  log_prob.copy_(exact);
}

ACLNN(CrossEntropyLossGrad, streaming(),
      (const Tensor& grad_loss, const Tensor& log_prob, const Tensor& target, const OptionalTensor& weight,
       const OptionalTensor& /*grad_z_loss*/, const OptionalTensor& /*log_sum_exp*/, const std::string& reduction,
       int64_t ignore_index, double label_smoothing, double z_loss_scale, Tensor& out)) {
  check(reduction, label_smoothing, z_loss_scale);
  const Tensor probability = wide(log_prob).exp();
  const auto tokens = tokens_of(probability, target, weight, reduction, ignore_index);
  const Tensor factor = wide(grad_loss).reshape({-1, 1}) * tokens.factor;
  out.copy_((probability * factor).scatter_add_(1, tokens.target, -factor));
}

// Connectionist temporal classification. The last dim of log_alpha is padded: it has room for two places of each label of the
// longest target and one more, and CANN rounds that up.
ACLNN(CtcLoss, streaming(),
      (const Tensor& log_probs, const Tensor& targets, const Ints& input_lengths, const Ints& target_lengths, int64_t blank,
       bool zero_infinity, Tensor& neg_log_likelihood, Tensor& log_alpha)) {
  const auto [loss, alpha] =
      at::_ctc_loss(wide(log_probs), targets, input_lengths, target_lengths, blank, zero_infinity);
  neg_log_likelihood.copy_(loss);
  log_alpha.fill_(-std::numeric_limits<double>::infinity());
  log_alpha.narrow(2, 0, alpha.size(2)).copy_(alpha);
}

ACLNN(CtcLossBackward, streaming(),
      (const Tensor& grad_out, const Tensor& log_probs, const Tensor& targets, const Ints& input_lengths,
       const Ints& target_lengths, const Tensor& neg_log_likelihood, const Tensor& log_alpha, int64_t blank,
       bool zero_infinity, Tensor& grad)) {
  const int64_t longest = target_lengths.empty() ? 0 : *std::max_element(target_lengths.begin(), target_lengths.end());
  const Tensor alpha = wide(log_alpha).narrow(2, 0, 2 * longest + 1).contiguous();
  grad.copy_(at::_ctc_loss_backward(wide(grad_out), wide(log_probs), targets, input_lengths, target_lengths,
                                    wide(neg_log_likelihood), alpha, blank, zero_infinity));
}
