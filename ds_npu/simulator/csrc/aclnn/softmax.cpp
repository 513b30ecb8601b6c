// Softmax, its logarithm, and their gradients.
#include "aclnn/precision.h"

using namespace sim;

// ATen's bf16 and fp16 softmax rounds once only over the last dim, its logarithm nowhere; their gradients do.
ACLNN(Softmax, (const Tensor& self, int64_t dim, Tensor& out)) {
  const bool last = dim == -1 || dim == self.dim() - 1;
  const ScalarType type = out.scalar_type();
  write_as(last ? type : wide_type(type), out, [&](Tensor& target) {
    at::_softmax_out(target, self.to(target.scalar_type()), dim, /*half_to_float=*/false);
  });
}

ACLNN(LogSoftmax, (const Tensor& self, int64_t dim, Tensor& out)) {
  write_as(wide_type(out.scalar_type()), out, [&](Tensor& target) {
    at::_log_softmax_out(target, self.to(target.scalar_type()), dim, /*half_to_float=*/false);
  });
}

ACLNN(SoftmaxBackward, (const Tensor& grad_output, const Tensor& output, int64_t dim, Tensor& out)) {
  write_as(output.scalar_type(), out, [&](Tensor& target) {
    at::_softmax_backward_data_out(target, grad_output.to(output.scalar_type()), output, dim, output.scalar_type());
  });
}

ACLNN(LogSoftmaxBackward, (const Tensor& grad_output, const Tensor& output, int64_t dim, Tensor& out)) {
  write_as(output.scalar_type(), out, [&](Tensor& target) {
    at::_log_softmax_backward_data_out(target, grad_output.to(output.scalar_type()), output, dim, output.scalar_type());
  });
}
