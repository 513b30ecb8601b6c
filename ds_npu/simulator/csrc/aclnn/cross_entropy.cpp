// Cross-entropy of logits in one operator, and its gradient. By CANN's page a negative ignore index ignores nothing.
#include "aclnn/precision.h"

using namespace sim;

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

ACLNN(CrossEntropyLoss, (const Tensor& input, const Tensor& target, const OptionalTensor& weight, const std::string& reduction,
                         int64_t ignore_index, double label_smoothing, double z_loss_scale, bool return_z_loss, Tensor& loss,
                         Tensor& log_prob, Tensor& /*z_loss*/, Tensor& /*log_sum_exp*/)) {
  check(reduction, label_smoothing, return_z_loss ? 1 : z_loss_scale);
  const Tensor exact = at::log_softmax(wide(input), 1);
  const auto tokens = tokens_of(exact, target, weight, reduction, ignore_index);
  const Tensor losses = -exact.gather(1, tokens.target) * tokens.factor;
  const Tensor counted = losses.masked_fill(tokens.factor.eq(0), 0).squeeze(1);
  loss.copy_(reduction == "none" ? counted : counted.sum());
  log_prob.copy_(exact);
}

ACLNN(CrossEntropyLossGrad,
      (const Tensor& grad_loss, const Tensor& log_prob, const Tensor& target, const OptionalTensor& weight,
       const OptionalTensor& /*grad_z_loss*/, const OptionalTensor& /*log_sum_exp*/, const std::string& reduction,
       int64_t ignore_index, double label_smoothing, double z_loss_scale, Tensor& out)) {
  check(reduction, label_smoothing, z_loss_scale);
  const Tensor probability = wide(log_prob).exp();
  const auto tokens = tokens_of(probability, target, weight, reduction, ignore_index);
  const Tensor factor = wide(grad_loss).reshape({-1, 1}) * tokens.factor;
  out.copy_((probability * factor).scatter_add_(1, tokens.target, -factor));
}
