// Softmax, its logarithm and their gradients, and the softmax of scaled scores with a mask.
#include "aclnn/masked_softmax.h"
#include "aclnn/operator.h"
#include "aclnn/precision.h"

using namespace sim;

// ATen's bf16 and fp16 softmax rounds once only over the last dim, its logarithm nowhere; their gradients do.
ACLNN(Softmax, streaming(), (const Tensor& self, int64_t dim, Tensor& out)) {
  const bool last = dim == -1 || dim == self.dim() - 1;
  const ScalarType type = out.scalar_type();
  write_as(last ? type : wide_type(type), out, [&](Tensor& target) {
    at::_softmax_out(target, self.to(target.scalar_type()), dim, /*half_to_float=*/false);
  });
}

ACLNN(LogSoftmax, streaming(), (const Tensor& self, int64_t dim, Tensor& out)) {
  write_as(wide_type(out.scalar_type()), out, [&](Tensor& target) {
    at::_log_softmax_out(target, self.to(target.scalar_type()), dim, /*half_to_float=*/false);
  });
}

ACLNN(SoftmaxBackward, streaming(), (const Tensor& grad_output, const Tensor& output, int64_t dim, Tensor& out)) {
  write_as(output.scalar_type(), out, [&](Tensor& target) {
    at::_softmax_backward_data_out(target, grad_output.to(output.scalar_type()), output, dim, output.scalar_type());
  });
}

ACLNN(LogSoftmaxBackward, streaming(), (const Tensor& grad_output, const Tensor& output, int64_t dim, Tensor& out)) {
  write_as(output.scalar_type(), out, [&](Tensor& target) {
    at::_log_softmax_backward_data_out(target, grad_output.to(output.scalar_type()), output, dim, output.scalar_type());
  });
}

// The softmax of scaled scores with a mask, as torch_npu calls it for aten::_masked_softmax.

namespace sim {

Tensor hidden(const Tensor& mask, const Tensor& like, bool triangle) {
  if (!triangle) return mask.to(at::kBool);
  return at::ones({like.size(-2), like.size(-1)}, like.options().dtype(at::kBool)).triu(1);
}

Tensor scaled_masked_softmax(const Tensor& x, const Tensor& mask, double scale, bool triangle) {
  constexpr float masked = -10000.0f;
  return at::softmax((x.to(at::kFloat) * scale).masked_fill_(hidden(mask, x, triangle), masked), -1);
}

}  // namespace sim

ACLNN(ScaledMaskedSoftmax, streaming(), (const Tensor& x, const Tensor& mask, double scale, bool fixed_triangle, Tensor& out)) {
  out.copy_(scaled_masked_softmax(x, mask, scale, fixed_triangle));
}
