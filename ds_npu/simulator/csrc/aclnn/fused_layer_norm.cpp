// Layer norms and group norms joined with what comes before or after them, in float32 and with ATen's own norms.
#include "aclnn/operator.h"

using namespace sim;

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

ACLNN(AddLayerNorm, (const Tensor& x1, const Tensor& x2, const Tensor& gamma, const Tensor& beta, const OptionalTensor& bias,
                     double epsilon, bool give_sum, Tensor& y, Tensor& mean, Tensor& rstd, Tensor& sum)) {
  Tensor x = at::add(x1.to(at::kFloat), x2);
  if (bias) x = x + *bias;
  normalize(x, gamma, beta, epsilon, y, mean, rstd);
  if (give_sum) sum.copy_(x);
}

ACLNN(AddLayerNormGrad, (const Tensor& dy, const Tensor& x1, const Tensor& x2, const Tensor& rstd, const Tensor& mean,
                         const Tensor& gamma, const OptionalTensor& dsum, Tensor& dx, Tensor& dgamma, Tensor& dbeta)) {
  Tensor grad = normalize_backward(dy, at::add(x1.to(at::kFloat), x2), gamma, mean, rstd, dgamma, dbeta);
  dx.copy_(dsum ? grad.add_(*dsum) : grad);
}

ACLNN(DeepNorm, (const Tensor& x, const Tensor& gx, const Tensor& beta, const Tensor& gamma, double alpha, double epsilon,
                 Tensor& mean, Tensor& rstd, Tensor& y)) {
  normalize(at::add(gx.to(at::kFloat), x, alpha), gamma, beta, epsilon, y, mean, rstd);
}

ACLNN(DeepNormGrad, (const Tensor& dy, const Tensor& x, const Tensor& gx, const Tensor& gamma, const Tensor& mean,
                     const Tensor& rstd, double alpha, Tensor& dx, Tensor& dgx, Tensor& dbeta, Tensor& dgamma)) {
  Tensor grad = normalize_backward(dy, at::add(gx.to(at::kFloat), x, alpha), gamma, mean, rstd, dgamma, dbeta);
  dgx.copy_(grad);
  dx.copy_(grad.mul_(alpha));
}

ACLNN(GroupNormSilu, (const Tensor& x, const OptionalTensor& gamma, const OptionalTensor& beta, int64_t groups, double epsilon,
                      Tensor& out, Tensor& mean, Tensor& rstd)) {
  auto wide = [](const OptionalTensor& tensor) { return tensor ? tensor->to(at::kFloat) : Tensor(); };
  const int64_t batch = x.size(0), channels = x.size(1), positions = x[0][0].numel();
  auto [normal, average, scale] = at::native_group_norm(x.to(at::kFloat).contiguous(), wide(gamma), wide(beta), batch,
                                                        channels, positions, groups, epsilon);
  out.copy_(at::silu_(normal));
  mean.copy_(average.view(mean.sizes()));
  rstd.copy_(scale.view(rstd.sizes()));
}
