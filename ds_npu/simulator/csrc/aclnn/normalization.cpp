// Layer, group, batch and RMS norms, also joined with what comes before or after them, and their gradients.
#include "aclnn/operator.h"
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

ACLNN(LayerNorm, streaming(),
      (const Tensor& input, const Ints& shape, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
       Tensor& out, Written<OptionalTensor>& mean, Written<OptionalTensor>& rstd)) {
  layer_norm(input, shape, weight, bias, eps, out, mean, rstd);
}

ACLNN(LayerNormBackward, streaming(),
      (const Tensor& grad_out, const Tensor& input, const Ints& shape, const Tensor& mean, const Tensor& rstd,
       const OptionalTensor& weight, const OptionalTensor& bias, const Bools& output_mask, Written<OptionalTensor>& grad_input,
       Written<OptionalTensor>& grad_weight, Written<OptionalTensor>& grad_bias)) {
  // ATen rounds parts of these sums to bf16 and fp16, whatever the type of the parameters.
  const auto [of_input, of_weight, of_bias] = at::native_layer_norm_backward(
      wide(grad_out), wide(input), shape, mean, rstd, wide(weight), wide(bias), mask_of(output_mask));
  give(grad_input, of_input);
  give(grad_weight, of_weight);
  give(grad_bias, of_bias);
}

ACLNN(GroupNorm, streaming(),
      (const Tensor& self, const OptionalTensor& gamma, const OptionalTensor& beta, int64_t N, int64_t C, int64_t HxW,
       int64_t group, double eps, Tensor& out, Tensor& mean, Tensor& rstd)) {
  const auto [result, average, inverse] =
      at::native_group_norm(wide(self).contiguous(), wide(gamma), wide(beta), N, C, HxW, group, eps);
  out.copy_(result);
  give(mean, average);
  give(rstd, inverse);
}

ACLNN(GroupNormBackward, streaming(),
      (const Tensor& grad_out, const Tensor& input, const Tensor& mean, const Tensor& rstd, const OptionalTensor& gamma,
       int64_t N, int64_t C, int64_t HxW, int64_t group, const Bools& output_mask, Written<OptionalTensor>& grad_input,
       Written<OptionalTensor>& grad_gamma, Written<OptionalTensor>& grad_beta)) {
  const auto [of_input, of_gamma, of_beta] =
      at::native_group_norm_backward(wide(grad_out).contiguous(), wide(input).contiguous(), wide(mean), wide(rstd),
                                     wide(gamma), N, C, HxW, group, mask_of(output_mask));
  give(grad_input, of_input);
  give(grad_gamma, of_gamma);
  give(grad_beta, of_beta);
}

// The running statistics are changed in place if `training`; without it nothing is saved for the gradient.
ACLNN(BatchNorm, streaming(),
      (const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, Changed<OptionalTensor>& running_mean,
       Changed<OptionalTensor>& running_var, bool training, double momentum, double eps, Tensor& out, Tensor& save_mean,
       Tensor& save_invstd)) {
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

ACLNN(BatchNormBackward, streaming(),
      (const Tensor& grad_out, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& running_mean,
       const OptionalTensor& running_var, const OptionalTensor& save_mean, const OptionalTensor& save_invstd, bool training,
       double eps, const Bools& output_mask, Written<OptionalTensor>& grad_input, Written<OptionalTensor>& grad_weight,
       Written<OptionalTensor>& grad_bias)) {
  const auto [of_input, of_weight, of_bias] = at::native_batch_norm_backward(
      wide(grad_out), wide(input), wide(weight), wide(running_mean), wide(running_var), wide(save_mean),
      wide(save_invstd), training, eps, mask_of(output_mask));
  give(grad_input, of_input);
  give(grad_weight, of_weight);
  give(grad_bias, of_bias);
}

// RMS norms: each row divided by its root mean square. The trailing dims that gamma has are one row.

// `tensor` as a matrix with `length` columns, in float32.
static Tensor rows(const Tensor& tensor, int64_t length) {
  return tensor.to(at::kFloat).reshape({length == 0 ? 0 : tensor.numel() / length, length});
}

// 1 / sqrt(mean(x^2) + epsilon) of each row, as a column.
static Tensor inverse_root_mean_square(const Tensor& x, double epsilon) {
  return at::linalg_vector_norm(x, 2, {1}, true).square_().div_(x.size(1)).add_(epsilon).rsqrt_();
}

// y = x / rms(x) * gamma. For bf16 and fp16 x a device rounds x / rms(x) before the product; CANN's formula does not.
static void normalize(const Tensor& x, const Tensor& gamma, double epsilon, const Tensor& y, const Tensor& rstd) {
  const Tensor scale = inverse_root_mean_square(x, epsilon);
  const bool in_place = y.scalar_type() == at::kFloat && y.is_contiguous();
  Tensor target = in_place ? y.view(x.sizes()) : at::empty_like(x);
  at::mul_out(target, x, scale);
  target.mul_(gamma.to(at::kFloat).reshape({x.size(1)}));
  if (!in_place) y.copy_(target.view(y.sizes()));
  rstd.copy_(scale.view(rstd.sizes()));
}

ACLNN(RmsNorm, streaming(), (const Tensor& x, const Tensor& gamma, double epsilon, Tensor& y, Tensor& rstd)) {
  normalize(rows(x, gamma.numel()), gamma, epsilon, y, rstd);
}

ACLNN(GemmaRmsNorm, streaming(), (const Tensor& x, const Tensor& gamma, double epsilon, Tensor& y, Tensor& rstd)) {
  normalize(rows(x, gamma.numel()), gamma.to(at::kFloat) + 1, epsilon, y, rstd);
}

ACLNN(RmsNormGrad, streaming(),
      (const Tensor& dy, const Tensor& x, const Tensor& rstd, const Tensor& gamma, Tensor& dx, Tensor& dgamma)) {
  const int64_t length = gamma.numel();
  const Tensor grad = rows(dy, length), weight = gamma.to(at::kFloat).reshape({length});
  const Tensor scale = rstd.reshape({grad.size(0), 1});
  const Tensor normal = rows(x, length) * scale;
  const Tensor product = grad * normal;
  dgamma.copy_(product.sum(0).view(dgamma.sizes()));
  const Tensor mean = at::mv(product, weight).div_(length).unsqueeze(1);
  dx.copy_((grad * weight).addcmul_(normal, mean, -1).mul_(scale).view(dx.sizes()));
}

// x1 + x2 in float32, which is normalised; the output x is its rounded value.
static Tensor sum_of(const Tensor& x1, const Tensor& x2) { return at::add(x1.to(at::kFloat), x2); }

ACLNN(AddRmsNorm, streaming(),
      (const Tensor& x1, const Tensor& x2, const Tensor& gamma, double epsilon, Tensor& y, Tensor& rstd, Tensor& x)) {
  const Tensor sum = sum_of(x1, x2);
  normalize(rows(sum, gamma.numel()), gamma, epsilon, y, rstd);
  x.copy_(sum);
}

ACLNN(AddRmsNormCast, streaming(),
      (const Tensor& x1, const Tensor& x2, const Tensor& gamma, double epsilon, Tensor& y_float, Tensor& y, Tensor& rstd,
       Tensor& x)) {
  const Tensor sum = sum_of(x1, x2);
  normalize(rows(sum, gamma.numel()), gamma, epsilon, y_float, rstd);
  y.copy_(y_float);
  x.copy_(sum);
}

// x1 becomes y, x2 becomes x1 + x2.
ACLNN(InplaceAddRmsNorm, streaming(),
      (Changed<Tensor>& x1, Changed<Tensor>& x2, const Tensor& gamma, double epsilon, Tensor& rstd)) {
  const Tensor sum = sum_of(x1, x2);
  normalize(rows(sum, gamma.numel()), gamma, epsilon, x1, rstd);
  x2.copy_(sum);
}

// Layer norms and group norms joined with what comes before or after them, in float32 and with ATen's own norms.

static void normalize(const Tensor& x, const Tensor& gamma, const Tensor& beta, double epsilon, const Tensor& y,
                      const Tensor& mean, const Tensor& rstd) {
  const auto [normal, average, scale] =
      at::native_layer_norm(x, gamma.sizes(), gamma.to(at::kFloat), beta.to(at::kFloat), epsilon);
  y.copy_(normal);
  mean.copy_(average.view(mean.sizes()));
  rstd.copy_(scale.view(rstd.sizes()));
}

// The gradient of x in float32; those of gamma and beta are written.
static Tensor normalize_backward(const Tensor& dy, const Tensor& x, const Tensor& gamma, const Tensor& mean, const Tensor& rstd,
                                 const Tensor& dgamma, const Tensor& dbeta) {
  // ATen wants the statistics as it gives them: one 1 for each normalised dim.
  Ints sizes = x.sizes().vec();
  std::fill(sizes.end() - gamma.dim(), sizes.end(), 1);
  const Tensor weight = gamma.to(at::kFloat);
  const auto [dx, dweight, dbias] = at::native_layer_norm_backward(
      dy.to(at::kFloat).contiguous(), x.contiguous(), gamma.sizes(), mean.reshape(sizes), rstd.reshape(sizes), weight,
      at::zeros_like(weight), {true, true, true});
  dgamma.copy_(dweight);
  dbeta.copy_(dbias);
  return dx;
}

ACLNN(AddLayerNorm, streaming(),
      (const Tensor& x1, const Tensor& x2, const Tensor& gamma, const Tensor& beta, const OptionalTensor& bias, double epsilon,
       bool give_sum, Tensor& y, Tensor& mean, Tensor& rstd, Tensor& sum)) {
  Tensor x = at::add(x1.to(at::kFloat), x2);
  if (bias) x = x + *bias;
  normalize(x, gamma, beta, epsilon, y, mean, rstd);
  if (give_sum) sum.copy_(x);
}

ACLNN(AddLayerNormGrad, streaming(),
      (const Tensor& dy, const Tensor& x1, const Tensor& x2, const Tensor& rstd, const Tensor& mean, const Tensor& gamma,
       const OptionalTensor& dsum, Tensor& dx, Tensor& dgamma, Tensor& dbeta)) {
  Tensor grad = normalize_backward(dy, at::add(x1.to(at::kFloat), x2), gamma, mean, rstd, dgamma, dbeta);
  dx.copy_(dsum ? grad.add_(*dsum) : grad);
}

ACLNN(DeepNorm, streaming(),
      (const Tensor& x, const Tensor& gx, const Tensor& beta, const Tensor& gamma, double alpha, double epsilon, Tensor& mean,
       Tensor& rstd, Tensor& y)) {
  normalize(at::add(gx.to(at::kFloat), x, alpha), gamma, beta, epsilon, y, mean, rstd);
}

ACLNN(DeepNormGrad, streaming(),
      (const Tensor& dy, const Tensor& x, const Tensor& gx, const Tensor& gamma, const Tensor& mean, const Tensor& rstd,
       double alpha, Tensor& dx, Tensor& dgx, Tensor& dbeta, Tensor& dgamma)) {
  Tensor grad = normalize_backward(dy, at::add(gx.to(at::kFloat), x, alpha), gamma, mean, rstd, dgamma, dbeta);
  dgx.copy_(grad);
  dx.copy_(grad.mul_(alpha));
}

ACLNN(GroupNormSilu, streaming(),
      (const Tensor& x, const OptionalTensor& gamma, const OptionalTensor& beta, int64_t groups, double epsilon, Tensor& out,
       Tensor& mean, Tensor& rstd)) {
  auto wide = [](const OptionalTensor& tensor) { return tensor ? tensor->to(at::kFloat) : Tensor(); };
  const int64_t batch = x.size(0), channels = x.size(1), positions = x[0][0].numel();
  auto [normal, average, scale] = at::native_group_norm(x.to(at::kFloat).contiguous(), wide(gamma), wide(beta), batch,
                                                        channels, positions, groups, epsilon);
  out.copy_(at::silu_(normal));
  mean.copy_(average.view(mean.sizes()));
  rstd.copy_(scale.view(rstd.sizes()));
}
