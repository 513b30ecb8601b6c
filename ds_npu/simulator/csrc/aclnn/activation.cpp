// Activation functions and their gradients. Logistic and hyperbolic functions without a gradient are in unary.cpp.
#include "aclnn/operator.h"

using namespace sim;

static c10::string_view gelu_formula(int64_t approximate);
// The logistic function of 1.702 x in float32, by which FastGelu is defined.
static Tensor fast_gelu_gate(const Tensor& wide) { return at::sigmoid(wide.mul(1.702)); }

ACLNN(Relu, (const Tensor& self, Tensor& out)) { at::clamp_min_out(out, self, 0); }
ACLNN(InplaceRelu, (Tensor& self)) { self.relu_(); }

// The two without a version compute the formula with tanh whatever torch asked for: they have no argument that says so.
ACLNN(Gelu, (const Tensor& self, Tensor& out)) { at::gelu_out(out, self, "tanh"); }
ACLNN(GeluBackward, (const Tensor& grad, const Tensor& self, Tensor& out)) { at::gelu_backward_out(out, grad, self, "tanh"); }
ACLNN(GeluV2, (const Tensor& self, int64_t approximate, Tensor& out)) { at::gelu_out(out, self, gelu_formula(approximate)); }
ACLNN(GeluBackwardV2, (const Tensor& grad, const Tensor& self, const std::string& approximate, Tensor& out)) {
  at::gelu_backward_out(out, grad, self, approximate);
}

ACLNN(FastGelu, (const Tensor& self, Tensor& out)) {
  const Tensor x = self.to(at::kFloat);
  out.copy_(fast_gelu_gate(x).mul_(x));
}
ACLNN(FastGeluBackward, (const Tensor& grad, const Tensor& self, Tensor& out)) {
  const Tensor x = self.to(at::kFloat);
  const Tensor gate = fast_gelu_gate(x);
  out.copy_((1 - gate).mul_(x).mul_(1.702).add_(1).mul_(gate).mul_(grad));
}

ACLNN(Silu, (const Tensor& self, Tensor& out)) { at::silu_out(out, self); }
ACLNN(SiluBackward, (const Tensor& grad, const Tensor& self, Tensor& out)) { at::silu_backward_out(out, grad, self); }
ACLNN(Mish, (const Tensor& self, Tensor& out)) { at::mish_out(out, self); }
ACLNN(InplaceMish, (Tensor& self)) { self.copy_(at::mish(self)); }
ACLNN(MishBackward, (const Tensor& grad, const Tensor& self, Tensor& out)) { out.copy_(at::mish_backward(grad, self)); }
ACLNN(Hardswish, (const Tensor& self, Tensor& out)) { at::hardswish_out(out, self); }
ACLNN(InplaceHardswish, (Tensor& self)) { at::hardswish_out(self, self); }
ACLNN(HardswishBackwardV2, (const Tensor& grad, const Tensor& self, Tensor& out)) {
  out.copy_(at::hardswish_backward(grad, self));
}
ACLNN(Hardsigmoid, (const Tensor& self, Tensor& out)) { at::hardsigmoid_out(out, self); }
ACLNN(InplaceHardsigmoid, (Tensor& self)) { at::hardsigmoid_out(self, self); }
ACLNN(HardsigmoidBackward, (const Tensor& grad, const Tensor& self, Tensor& out)) {
  at::hardsigmoid_backward_out(out, grad, self);
}

ACLNN(SigmoidBackward, (const Tensor& grad, const Tensor& output, Tensor& out)) { at::sigmoid_backward_out(out, grad, output); }
ACLNN(TanhBackward, (const Tensor& grad, const Tensor& output, Tensor& out)) { at::tanh_backward_out(out, grad, output); }

// The buffer passes data from the vendor's forward to its backward; here it is unused and may be empty.
ACLNN(LogSigmoidForward, (const Tensor& self, Tensor& out, const OptionalTensor&)) { out.copy_(at::log_sigmoid(self)); }
ACLNN(LogSigmoidBackward, (const Tensor& grad, const Tensor& self, const OptionalTensor&, Tensor& out)) {
  const Tensor buffer = std::get<1>(at::log_sigmoid_forward(self));
  at::log_sigmoid_backward_out(out, grad, self, buffer);
}

ACLNN(Softplus, (const Tensor& self, const Scalar& beta, const Scalar& threshold, Tensor& out)) {
  at::softplus_out(out, self, beta, threshold);
}
ACLNN(SoftplusBackward, (const Tensor& grad, const Tensor& self, const Scalar& beta, const Scalar& threshold, Tensor& out)) {
  at::softplus_backward_out(out, grad, self, beta, threshold);
}

ACLNN(LeakyRelu, (const Tensor& self, const Scalar& slope, Tensor& out)) { at::leaky_relu_out(out, self, slope); }
ACLNN(InplaceLeakyRelu, (Tensor& self, const Scalar& slope)) { at::leaky_relu_out(self, self, slope); }
ACLNN(LeakyReluBackward, (const Tensor& grad, const Tensor& self, const Scalar& slope, bool is_result, Tensor& out)) {
  at::leaky_relu_backward_out(out, grad, self, slope, is_result);
}

ACLNN(Elu, (const Tensor& self, const Scalar& alpha, const Scalar& scale, const Scalar& input_scale, Tensor& out)) {
  at::elu_out(out, self, alpha, scale, input_scale);
}
ACLNN(InplaceElu, (Tensor& self, const Scalar& alpha, const Scalar& scale, const Scalar& input_scale)) {
  at::elu_out(self, self, alpha, scale, input_scale);
}
ACLNN(EluBackward, (const Tensor& grad, const Scalar& alpha, const Scalar& scale, const Scalar& input_scale, bool is_result,
                    const Tensor& self_or_result, Tensor& out)) {
  at::elu_backward_out(out, grad, alpha, scale, input_scale, is_result, self_or_result);
}

ACLNN(Hardtanh, (const Tensor& self, const Scalar& min, const Scalar& max, Tensor& out)) {
  at::hardtanh_out(out, self, min, max);
}
ACLNN(InplaceHardtanh, (Tensor& self, const Scalar& min, const Scalar& max)) { at::hardtanh_out(self, self, min, max); }
ACLNN(HardtanhBackward, (const Tensor& grad, const Tensor& self, const Scalar& min, const Scalar& max, Tensor& out)) {
  at::hardtanh_backward_out(out, grad, self, min, max);
}

ACLNN(Threshold, (const Tensor& self, const Scalar& threshold, const Scalar& value, Tensor& out)) {
  at::threshold_out(out, self, threshold, value);
}
ACLNN(InplaceThreshold, (Tensor& self, const Scalar& threshold, const Scalar& value)) {
  at::threshold_out(self, self, threshold, value);
}
ACLNN(ThresholdBackward, (const Tensor& grad, const Tensor& self, const Scalar& threshold, Tensor& out)) {
  at::threshold_backward_out(out, grad, self, threshold);
}

ACLNN(Glu, (const Tensor& self, int64_t dim, Tensor& out)) { at::glu_out(out, self, dim); }
ACLNN(GluBackward, (const Tensor& grad, const Tensor& self, int64_t dim, Tensor& out)) {
  at::glu_backward_out(out, grad, self, dim);
}

static c10::string_view gelu_formula(int64_t approximate) {
  switch (approximate) {
    case 0: return "none";
    case 1: return "tanh";
    default: throw Failure(ACL_ERROR_API_NOT_SUPPORT, "no formula has the number " + std::to_string(approximate));
  }
}
