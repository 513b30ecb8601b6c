// RMS norms: each row divided by its root mean square. The trailing dims that gamma has are one row.
#include "aclnn/operator.h"

using namespace sim;

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

ACLNN(RmsNorm, (const Tensor& x, const Tensor& gamma, double epsilon, Tensor& y, Tensor& rstd)) {
  normalize(rows(x, gamma.numel()), gamma, epsilon, y, rstd);
}

ACLNN(GemmaRmsNorm, (const Tensor& x, const Tensor& gamma, double epsilon, Tensor& y, Tensor& rstd)) {
  normalize(rows(x, gamma.numel()), gamma.to(at::kFloat) + 1, epsilon, y, rstd);
}

ACLNN(RmsNormGrad, (const Tensor& dy, const Tensor& x, const Tensor& rstd, const Tensor& gamma, Tensor& dx, Tensor& dgamma)) {
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

ACLNN(AddRmsNorm, (const Tensor& x1, const Tensor& x2, const Tensor& gamma, double epsilon, Tensor& y, Tensor& rstd,
                   Tensor& x)) {
  const Tensor sum = sum_of(x1, x2);
  normalize(rows(sum, gamma.numel()), gamma, epsilon, y, rstd);
  x.copy_(sum);
}

ACLNN(AddRmsNormCast, (const Tensor& x1, const Tensor& x2, const Tensor& gamma, double epsilon, Tensor& y_float, Tensor& y,
                       Tensor& rstd, Tensor& x)) {
  const Tensor sum = sum_of(x1, x2);
  normalize(rows(sum, gamma.numel()), gamma, epsilon, y_float, rstd);
  y.copy_(y_float);
  x.copy_(sum);
}

// x1 becomes y, x2 becomes x1 + x2.
ACLNN(InplaceAddRmsNorm, (Tensor& x1, Tensor& x2, const Tensor& gamma, double epsilon, Tensor& rstd)) {
  const Tensor sum = sum_of(x1, x2);
  normalize(rows(sum, gamma.numel()), gamma, epsilon, x1, rstd);
  x2.copy_(sum);
}
