// Softmax, its logarithm, and their gradients.
#include "aclnn/precision.h"

using namespace sim;

// ATen computes both in float32 for bf16 and fp16, if argument and result have one type.
ACLNN(Softmax, (const Tensor& self, int64_t dim, Tensor& out)) {
  at::_softmax_out(out, self.to(out.scalar_type()), dim, /*half_to_float=*/false);
}

ACLNN(LogSoftmax, (const Tensor& self, int64_t dim, Tensor& out)) {
  at::_log_softmax_out(out, self.to(out.scalar_type()), dim, /*half_to_float=*/false);
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
