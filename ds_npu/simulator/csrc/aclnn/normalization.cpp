// Layer, group and batch norm, and their gradients. (RMS norm is not here.)
#include "aclnn/precision.h"

using namespace sim;

static void give(const OptionalTensor& out, const Tensor& value) {
  if (out && value.defined()) out->copy_(value.reshape(out->sizes()));
}

static std::array<bool, 3> mask_of(const Bools& mask) { return {mask.at(0), mask.at(1), mask.at(2)}; }

// ATen has float32 statistics for bf16 and fp16 input if the affine parameters are float32.
static void layer_norm(const Tensor& input, const Ints& shape, const OptionalTensor& weight, const OptionalTensor& bias,
                       double eps, Tensor& out, const OptionalTensor& mean, const OptionalTensor& rstd) {
  OptionalTensor scale = wide(weight);
  if (!scale && at::isReducedFloatingType(input.scalar_type())) scale = at::ones(shape, at::kFloat);
  const auto [result, average, inverse] = at::native_layer_norm(input, shape, scale, wide(bias), eps);
  out.copy_(result);
  give(mean, average);
  give(rstd, inverse);
}

ACLNN(LayerNorm, (const Tensor& input, const Ints& shape, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                  Tensor& out, const OptionalTensor& mean, const OptionalTensor& rstd)) {
  layer_norm(input, shape, weight, bias, eps, out, mean, rstd);
}

ACLNN(LayerNormBackward,
      (const Tensor& grad_out, const Tensor& input, const Ints& shape, const Tensor& mean, const Tensor& rstd,
       const OptionalTensor& weight, const OptionalTensor& bias, const Bools& output_mask, const OptionalTensor& grad_input,
       const OptionalTensor& grad_weight, const OptionalTensor& grad_bias)) {
  // ATen rounds parts of these sums to bf16 and fp16, whatever the type of the parameters.
  const auto [of_input, of_weight, of_bias] = at::native_layer_norm_backward(
      wide(grad_out), wide(input), shape, mean, rstd, wide(weight), wide(bias), mask_of(output_mask));
  give(grad_input, of_input);
  give(grad_weight, of_weight);
  give(grad_bias, of_bias);
}

ACLNN(GroupNorm, (const Tensor& self, const OptionalTensor& gamma, const OptionalTensor& beta, int64_t N, int64_t C,
                  int64_t HxW, int64_t group, double eps, Tensor& out, Tensor& mean, Tensor& rstd)) {
  const auto [result, average, inverse] =
      at::native_group_norm(wide(self).contiguous(), wide(gamma), wide(beta), N, C, HxW, group, eps);
  out.copy_(result);
  give(mean, average);
  give(rstd, inverse);
}

ACLNN(GroupNormBackward,
      (const Tensor& grad_out, const Tensor& input, const Tensor& mean, const Tensor& rstd, const OptionalTensor& gamma,
       int64_t N, int64_t C, int64_t HxW, int64_t group, const Bools& output_mask, const OptionalTensor& grad_input,
       const OptionalTensor& grad_gamma, const OptionalTensor& grad_beta)) {
  const auto [of_input, of_gamma, of_beta] =
      at::native_group_norm_backward(wide(grad_out).contiguous(), wide(input).contiguous(), wide(mean), wide(rstd),
                                     wide(gamma), N, C, HxW, group, mask_of(output_mask));
  give(grad_input, of_input);
  give(grad_gamma, of_gamma);
  give(grad_beta, of_beta);
}

// The running statistics are changed in place if `training`; without it nothing is saved for the gradient.
ACLNN(BatchNorm, (const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                  const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training, double momentum,
                  double eps, Tensor& out, Tensor& save_mean, Tensor& save_invstd)) {
  const OptionalTensor mean = wide(running_mean), var = wide(running_var);
  const auto [result, average, inverse] =
      at::native_batch_norm(wide(input), wide(weight), wide(bias), mean, var, training, momentum, eps);
  out.copy_(result);
  if (!training) return;
  give(save_mean, average);
  give(save_invstd, inverse);
  for (const auto& [kept, changed] : {std::pair(running_mean, mean), std::pair(running_var, var)})
    if (kept && !kept->is_same(*changed)) kept->copy_(*changed);
}

ACLNN(BatchNormBackward,
      (const Tensor& grad_out, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& running_mean,
       const OptionalTensor& running_var, const OptionalTensor& save_mean, const OptionalTensor& save_invstd, bool training,
       double eps, const Bools& output_mask, const OptionalTensor& grad_input, const OptionalTensor& grad_weight,
       const OptionalTensor& grad_bias)) {
  const auto [of_input, of_weight, of_bias] = at::native_batch_norm_backward(
      wide(grad_out), wide(input), wide(weight), wide(running_mean), wide(running_var), wide(save_mean),
      wide(save_invstd), training, eps, mask_of(output_mask));
  give(grad_input, of_input);
  give(grad_weight, of_weight);
  give(grad_bias, of_bias);
}
