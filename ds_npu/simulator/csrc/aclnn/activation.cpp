// Functions of one tensor element by element, activation functions, also gated ones, and their gradients.
#include "aclnn/operator.h"

using namespace sim;

static c10::string_view gelu_formula(int64_t approximate);
// The logistic function of 1.702 x in float32, by which FastGelu is defined.
static Tensor fast_gelu_gate(const Tensor& wide) { return at::sigmoid(wide.mul(1.702)); }

ACLNN(Relu, streaming(), (const Tensor& self, Tensor& out)) { at::clamp_min_out(out, self, 0); }
ACLNN(InplaceRelu, streaming(), (Changed<Tensor>& self)) { self.relu_(); }

// The two without a version compute the formula with tanh whatever torch asked for: they have no argument that says so.
ACLNN(Gelu, streaming(), (const Tensor& self, Tensor& out)) { at::gelu_out(out, self, "tanh"); }
ACLNN(GeluBackward, streaming(),
      (const Tensor& grad, const Tensor& self, Tensor& out)) { at::gelu_backward_out(out, grad, self, "tanh"); }
ACLNN(GeluV2, streaming(),
      (const Tensor& self, int64_t approximate, Tensor& out)) { at::gelu_out(out, self, gelu_formula(approximate)); }
ACLNN(GeluBackwardV2, streaming(), (const Tensor& grad, const Tensor& self, const std::string& approximate, Tensor& out)) {
  at::gelu_backward_out(out, grad, self, approximate);
}

ACLNN(FastGelu, streaming(), (const Tensor& self, Tensor& out)) {
  const Tensor x = self.to(at::kFloat);
  out.copy_(fast_gelu_gate(x).mul_(x));
}
ACLNN(FastGeluBackward, streaming(), (const Tensor& grad, const Tensor& self, Tensor& out)) {
  const Tensor x = self.to(at::kFloat);
  const Tensor gate = fast_gelu_gate(x);
  out.copy_((1 - gate).mul_(x).mul_(1.702).add_(1).mul_(gate).mul_(grad));
}

ACLNN(Silu, streaming(), (const Tensor& self, Tensor& out)) { at::silu_out(out, self); }
ACLNN(SiluBackward, streaming(),
      (const Tensor& grad, const Tensor& self, Tensor& out)) { at::silu_backward_out(out, grad, self); }
ACLNN(Mish, streaming(), (const Tensor& self, Tensor& out)) { at::mish_out(out, self); }
ACLNN(InplaceMish, streaming(), (Changed<Tensor>& self)) { self.copy_(at::mish(self)); }
ACLNN(MishBackward, streaming(),
      (const Tensor& grad, const Tensor& self, Tensor& out)) { out.copy_(at::mish_backward(grad, self)); }
ACLNN(Hardswish, streaming(), (const Tensor& self, Tensor& out)) { at::hardswish_out(out, self); }
ACLNN(InplaceHardswish, streaming(), (Changed<Tensor>& self)) { at::hardswish_out(self, self); }
ACLNN(HardswishBackwardV2, streaming(), (const Tensor& grad, const Tensor& self, Tensor& out)) {
  out.copy_(at::hardswish_backward(grad, self));
}
ACLNN(Hardsigmoid, streaming(), (const Tensor& self, Tensor& out)) { at::hardsigmoid_out(out, self); }
ACLNN(InplaceHardsigmoid, streaming(), (Changed<Tensor>& self)) { at::hardsigmoid_out(self, self); }
ACLNN(HardsigmoidBackward, streaming(), (const Tensor& grad, const Tensor& self, Tensor& out)) {
  at::hardsigmoid_backward_out(out, grad, self);
}

ACLNN(SigmoidBackward, streaming(),
      (const Tensor& grad, const Tensor& output, Tensor& out)) { at::sigmoid_backward_out(out, grad, output); }
ACLNN(TanhBackward, streaming(),
      (const Tensor& grad, const Tensor& output, Tensor& out)) { at::tanh_backward_out(out, grad, output); }

// The buffer passes data from the vendor's forward to its backward; here it is unused and may be empty.
ACLNN(LogSigmoidForward, streaming(),
      (const Tensor& self, Tensor& out, const OptionalTensor&)) { out.copy_(at::log_sigmoid(self)); }
ACLNN(LogSigmoidBackward, streaming(), (const Tensor& grad, const Tensor& self, const OptionalTensor&, Tensor& out)) {
  const Tensor buffer = std::get<1>(at::log_sigmoid_forward(self));
  at::log_sigmoid_backward_out(out, grad, self, buffer);
}

ACLNN(Softplus, streaming(), (const Tensor& self, const Scalar& beta, const Scalar& threshold, Tensor& out)) {
  at::softplus_out(out, self, beta, threshold);
}
ACLNN(SoftplusBackward, streaming(),
      (const Tensor& grad, const Tensor& self, const Scalar& beta, const Scalar& threshold, Tensor& out)) {
  at::softplus_backward_out(out, grad, self, beta, threshold);
}

ACLNN(LeakyRelu, streaming(), (const Tensor& self, const Scalar& slope, Tensor& out)) { at::leaky_relu_out(out, self, slope); }
ACLNN(InplaceLeakyRelu, streaming(), (Changed<Tensor>& self, const Scalar& slope)) { at::leaky_relu_out(self, self, slope); }
ACLNN(LeakyReluBackward, streaming(),
      (const Tensor& grad, const Tensor& self, const Scalar& slope, bool is_result, Tensor& out)) {
  at::leaky_relu_backward_out(out, grad, self, slope, is_result);
}

ACLNN(Elu, streaming(),
      (const Tensor& self, const Scalar& alpha, const Scalar& scale, const Scalar& input_scale, Tensor& out)) {
  at::elu_out(out, self, alpha, scale, input_scale);
}
ACLNN(InplaceElu, streaming(), (Changed<Tensor>& self, const Scalar& alpha, const Scalar& scale, const Scalar& input_scale)) {
  at::elu_out(self, self, alpha, scale, input_scale);
}
ACLNN(EluBackward, streaming(),
      (const Tensor& grad, const Scalar& alpha, const Scalar& scale, const Scalar& input_scale, bool is_result,
       const Tensor& self_or_result, Tensor& out)) {
  at::elu_backward_out(out, grad, alpha, scale, input_scale, is_result, self_or_result);
}

ACLNN(Hardtanh, streaming(), (const Tensor& self, const Scalar& min, const Scalar& max, Tensor& out)) {
  at::hardtanh_out(out, self, min, max);
}
ACLNN(InplaceHardtanh, streaming(),
      (Changed<Tensor>& self, const Scalar& min, const Scalar& max)) { at::hardtanh_out(self, self, min, max); }
ACLNN(HardtanhBackward, streaming(),
      (const Tensor& grad, const Tensor& self, const Scalar& min, const Scalar& max, Tensor& out)) {
  at::hardtanh_backward_out(out, grad, self, min, max);
}

ACLNN(Threshold, streaming(), (const Tensor& self, const Scalar& threshold, const Scalar& value, Tensor& out)) {
  at::threshold_out(out, self, threshold, value);
}
ACLNN(InplaceThreshold, streaming(), (Changed<Tensor>& self, const Scalar& threshold, const Scalar& value)) {
  at::threshold_out(self, self, threshold, value);
}
ACLNN(ThresholdBackward, streaming(), (const Tensor& grad, const Tensor& self, const Scalar& threshold, Tensor& out)) {
  at::threshold_backward_out(out, grad, self, threshold);
}

ACLNN(Glu, streaming(), (const Tensor& self, int64_t dim, Tensor& out)) { at::glu_out(out, self, dim); }
ACLNN(GluBackward, streaming(), (const Tensor& grad, const Tensor& self, int64_t dim, Tensor& out)) {
  at::glu_backward_out(out, grad, self, dim);
}

static c10::string_view gelu_formula(int64_t approximate) {
  switch (approximate) {
    case 0: return "none";
    case 1: return "tanh";
    default: throw Failure(ACL_ERROR_API_NOT_SUPPORT, "no formula has the number " + std::to_string(approximate));
  }
}

// Gated activations: one half of a dim, activated, times the other half.

struct Halves {
  Tensor left, right;
};

static Halves halves(const Tensor& tensor, int64_t dim) {
  const int64_t half = tensor.size(dim) / 2;
  return {tensor.narrow(dim, 0, half), tensor.narrow(dim, half, half)};
}

static Halves wide_halves(const Tensor& tensor, int64_t dim) { return halves(tensor.to(at::kFloat), dim); }

ACLNN(SwiGlu, streaming(), (const Tensor& x, int64_t dim, Tensor& out)) {
  const Halves half = wide_halves(x, dim);
  if (out.scalar_type() == at::kFloat) {
    at::silu_out(out, half.left);
    out.mul_(half.right);
  } else {
    out.copy_(at::silu(half.left).mul_(half.right));
  }
}

ACLNN(SwiGluGrad, streaming(), (const Tensor& dy, const Tensor& x, int64_t dim, Tensor& dx)) {
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

ACLNN(GeGluV3, streaming(),
      (const Tensor& x, int64_t dim, int64_t approximate, bool activate_left, Tensor& out, Tensor& gelu)) {
  Halves half = wide_halves(x, dim);
  if (!activate_left) std::swap(half.left, half.right);
  Tensor activated = at::gelu(half.left, approximation(approximate));
  gelu.copy_(activated);
  out.copy_(activated.mul_(half.right));
}

ACLNN(GeGluV3Backward, streaming(),
      (const Tensor& dy, const Tensor& x, const Tensor& gelu, int64_t dim, int64_t approximate, bool activate_left, Tensor& dx))
       {
  Halves half = wide_halves(x, dim), result = halves(dx, dim);
  if (!activate_left) {
    std::swap(half.left, half.right);
    std::swap(result.left, result.right);
  }
  const Tensor grad = dy.to(at::kFloat);
  result.left.copy_(at::gelu_backward(grad * half.right, half.left, approximation(approximate)));
  result.right.copy_(grad * gelu);
}

ACLNN(GeluMul, streaming(), (const Tensor& x, const std::string& approximate, Tensor& out)) {
  const Halves half = wide_halves(x, -1);
  out.copy_(at::gelu(half.left, approximate.empty() ? "none" : approximate).mul_(half.right));
}

// Functions of one tensor, element by element.

ACLNN(Abs, streaming(), (const Tensor& self, Tensor& out)) { at::abs_out(out, self); }
ACLNN(Neg, streaming(), (const Tensor& self, Tensor& out)) { at::neg_out(out, self); }
ACLNN(Round, streaming(), (const Tensor& self, Tensor& out)) { at::round_out(out, self); }
ACLNN(Sign, streaming(), (const Tensor& self, Tensor& out)) { at::sign_out(out, self); }
ACLNN(Signbit, streaming(), (const Tensor& self, Tensor& out)) { at::signbit_out(out, self); }
ACLNN(Trunc, streaming(), (const Tensor& self, Tensor& out)) { at::trunc_out(out, self); }

ACLNN(Acos, streaming(), (const Tensor& self, Tensor& out)) { at::acos_out(out, self); }
ACLNN(InplaceAcos, streaming(), (Changed<Tensor>& self)) { self.acos_(); }
ACLNN(Acosh, streaming(), (const Tensor& self, Tensor& out)) { at::acosh_out(out, self); }
ACLNN(InplaceAcosh, streaming(), (Changed<Tensor>& self)) { self.acosh_(); }
ACLNN(Asin, streaming(), (const Tensor& self, Tensor& out)) { at::asin_out(out, self); }
ACLNN(InplaceAsin, streaming(), (Changed<Tensor>& self)) { self.asin_(); }
ACLNN(Asinh, streaming(), (const Tensor& self, Tensor& out)) { at::asinh_out(out, self); }
ACLNN(InplaceAsinh, streaming(), (Changed<Tensor>& self)) { self.asinh_(); }
ACLNN(Atan, streaming(), (const Tensor& self, Tensor& out)) { at::atan_out(out, self); }
ACLNN(InplaceAtan, streaming(), (Changed<Tensor>& self)) { self.atan_(); }
ACLNN(Atanh, streaming(), (const Tensor& self, Tensor& out)) { at::atanh_out(out, self); }
ACLNN(InplaceAtanh, streaming(), (Changed<Tensor>& self)) { self.atanh_(); }
ACLNN(Ceil, streaming(), (const Tensor& self, Tensor& out)) { at::ceil_out(out, self); }
ACLNN(InplaceCeil, streaming(), (Changed<Tensor>& self)) { self.ceil_(); }
ACLNN(Cos, streaming(), (const Tensor& self, Tensor& out)) { at::cos_out(out, self); }
ACLNN(InplaceCos, streaming(), (Changed<Tensor>& self)) { self.cos_(); }
ACLNN(Cosh, streaming(), (const Tensor& self, Tensor& out)) { at::cosh_out(out, self); }
ACLNN(InplaceCosh, streaming(), (Changed<Tensor>& self)) { self.cosh_(); }
ACLNN(Erf, streaming(), (const Tensor& self, Tensor& out)) { at::erf_out(out, self); }
ACLNN(InplaceErf, streaming(), (Changed<Tensor>& self)) { self.erf_(); }
ACLNN(Erfc, streaming(), (const Tensor& self, Tensor& out)) { at::erfc_out(out, self); }
ACLNN(InplaceErfc, streaming(), (Changed<Tensor>& self)) { self.erfc_(); }
ACLNN(Erfinv, streaming(), (const Tensor& self, Tensor& out)) { at::erfinv_out(out, self); }
ACLNN(InplaceErfinv, streaming(), (Changed<Tensor>& self)) { self.erfinv_(); }
ACLNN(Exp, streaming(), (const Tensor& self, Tensor& out)) { at::exp_out(out, self); }
ACLNN(InplaceExp, streaming(), (Changed<Tensor>& self)) { self.exp_(); }
ACLNN(Exp2, streaming(), (const Tensor& self, Tensor& out)) { at::exp2_out(out, self); }
ACLNN(InplaceExp2, streaming(), (Changed<Tensor>& self)) { self.exp2_(); }
ACLNN(Expm1, streaming(), (const Tensor& self, Tensor& out)) { at::expm1_out(out, self); }
ACLNN(InplaceExpm1, streaming(), (Changed<Tensor>& self)) { self.expm1_(); }
ACLNN(Floor, streaming(), (const Tensor& self, Tensor& out)) { at::floor_out(out, self); }
ACLNN(InplaceFloor, streaming(), (Changed<Tensor>& self)) { self.floor_(); }
ACLNN(Frac, streaming(), (const Tensor& self, Tensor& out)) { at::frac_out(out, self); }
ACLNN(InplaceFrac, streaming(), (Changed<Tensor>& self)) { self.frac_(); }
ACLNN(Log, streaming(), (const Tensor& self, Tensor& out)) { at::log_out(out, self); }
ACLNN(InplaceLog, streaming(), (Changed<Tensor>& self)) { self.log_(); }
ACLNN(Log10, streaming(), (const Tensor& self, Tensor& out)) { at::log10_out(out, self); }
ACLNN(InplaceLog10, streaming(), (Changed<Tensor>& self)) { self.log10_(); }
ACLNN(Log1p, streaming(), (const Tensor& self, Tensor& out)) { at::log1p_out(out, self); }
ACLNN(InplaceLog1p, streaming(), (Changed<Tensor>& self)) { self.log1p_(); }
ACLNN(Log2, streaming(), (const Tensor& self, Tensor& out)) { at::log2_out(out, self); }
ACLNN(InplaceLog2, streaming(), (Changed<Tensor>& self)) { self.log2_(); }
ACLNN(Reciprocal, streaming(), (const Tensor& self, Tensor& out)) { at::reciprocal_out(out, self); }
ACLNN(InplaceReciprocal, streaming(), (Changed<Tensor>& self)) { self.reciprocal_(); }
ACLNN(Rsqrt, streaming(), (const Tensor& self, Tensor& out)) { at::rsqrt_out(out, self); }
ACLNN(InplaceRsqrt, streaming(), (Changed<Tensor>& self)) { self.rsqrt_(); }
ACLNN(Sigmoid, streaming(), (const Tensor& self, Tensor& out)) { at::sigmoid_out(out, self); }
ACLNN(InplaceSigmoid, streaming(), (Changed<Tensor>& self)) { self.sigmoid_(); }
ACLNN(Sin, streaming(), (const Tensor& self, Tensor& out)) { at::sin_out(out, self); }
ACLNN(InplaceSin, streaming(), (Changed<Tensor>& self)) { self.sin_(); }
ACLNN(Sinh, streaming(), (const Tensor& self, Tensor& out)) { at::sinh_out(out, self); }
ACLNN(InplaceSinh, streaming(), (Changed<Tensor>& self)) { self.sinh_(); }
ACLNN(Sqrt, streaming(), (const Tensor& self, Tensor& out)) { at::sqrt_out(out, self); }
ACLNN(InplaceSqrt, streaming(), (Changed<Tensor>& self)) { self.sqrt_(); }
ACLNN(Tan, streaming(), (const Tensor& self, Tensor& out)) { at::tan_out(out, self); }
ACLNN(InplaceTan, streaming(), (Changed<Tensor>& self)) { self.tan_(); }
ACLNN(Tanh, streaming(), (const Tensor& self, Tensor& out)) { at::tanh_out(out, self); }
ACLNN(InplaceTanh, streaming(), (Changed<Tensor>& self)) { self.tanh_(); }

ACLNN(RoundDecimals, streaming(), (const Tensor& self, int64_t decimals, Tensor& out)) { at::round_out(out, self, decimals); }
ACLNN(InplaceRoundDecimals, streaming(), (Changed<Tensor>& self, int64_t decimals)) { self.round_(decimals); }

ACLNN(NanToNum, streaming(), (const Tensor& self, float nan, float posinf, float neginf, Tensor& out)) {
  at::nan_to_num_out(out, self, nan, posinf, neginf);
}
ACLNN(InplaceNanToNum, streaming(),
      (Changed<Tensor>& self, float nan, float posinf, float neginf)) { self.nan_to_num_(nan, posinf, neginf); }
