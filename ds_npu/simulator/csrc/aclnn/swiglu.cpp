// Gated activations: one half of a dim, activated, times the other half.
#include "aclnn/operator.h"

using namespace sim;

struct Halves {
  Tensor left, right;
};

static Halves halves(const Tensor& tensor, int64_t dim) {
  const int64_t half = tensor.size(dim) / 2;
  return {tensor.narrow(dim, 0, half), tensor.narrow(dim, half, half)};
}

static Halves wide_halves(const Tensor& tensor, int64_t dim) { return halves(tensor.to(at::kFloat), dim); }

ACLNN(SwiGlu, (const Tensor& x, int64_t dim, Tensor& out)) {
  const Halves half = wide_halves(x, dim);
  if (out.scalar_type() == at::kFloat) {
    at::silu_out(out, half.left);
    out.mul_(half.right);
  } else {
    out.copy_(at::silu(half.left).mul_(half.right));
  }
}

ACLNN(SwiGluGrad, (const Tensor& dy, const Tensor& x, int64_t dim, Tensor& dx)) {
  const Halves half = wide_halves(x, dim);
  const Tensor grad = dy.to(at::kFloat);
  Halves result = halves(dx, dim);
  result.left.copy_(at::silu_backward(grad * half.right, half.left));
  result.right.copy_(at::silu(half.left).mul_(grad));
}

static const char* approximation(int64_t approximate) {
  if (approximate != 0 && approximate != 1)
    throw Failure(ACL_ERROR_INVALID_PARAM, "approximate is 0 (none) or 1 (tanh), not " + std::to_string(approximate));
  return approximate == 1 ? "tanh" : "none";
}

ACLNN(GeGluV3, (const Tensor& x, int64_t dim, int64_t approximate, bool activate_left, Tensor& out, Tensor& gelu)) {
  Halves half = wide_halves(x, dim);
  if (!activate_left) std::swap(half.left, half.right);
  Tensor activated = at::gelu(half.left, approximation(approximate));
  gelu.copy_(activated);
  out.copy_(activated.mul_(half.right));
}

ACLNN(GeGluV3Backward, (const Tensor& dy, const Tensor& x, const Tensor& gelu, int64_t dim, int64_t approximate,
                        bool activate_left, Tensor& dx)) {
  Halves half = wide_halves(x, dim), result = halves(dx, dim);
  if (!activate_left) {
    std::swap(half.left, half.right);
    std::swap(result.left, result.right);
  }
  const Tensor grad = dy.to(at::kFloat);
  result.left.copy_(at::gelu_backward(grad * half.right, half.left, approximation(approximate)));
  result.right.copy_(grad * gelu);
}

ACLNN(GeluMul, (const Tensor& x, const std::string& approximate, Tensor& out)) {
  const Halves half = wide_halves(x, -1);
  out.copy_(at::gelu(half.left, approximate.empty() ? "none" : approximate).mul_(half.right));
}
