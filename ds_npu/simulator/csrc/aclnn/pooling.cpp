// The largest and the mean of windows over the last two dims, and their gradients.
#include "aclnn/precision.h"

using namespace sim;

// CANN's mask says which element of each window is the largest, in a layout of its own. The gradient here looks for that
// element again, so the mask is zero.
ACLNN(MaxPool2dWithMask, streaming(),
      (const Tensor& self, const Ints& kernel, const Ints& stride, const Ints& padding, const Ints& dilation, bool ceil_mode,
       Tensor& out, Tensor& mask)) {
  out.copy_(std::get<0>(at::max_pool2d_with_indices(self, kernel, stride, padding, dilation, ceil_mode)));
  mask.zero_();
}

ACLNN(MaxPool2dWithMaskBackward, streaming(),
      (const Tensor& grad_output, const Tensor& self, const Tensor& mask, const Ints& kernel, const Ints& stride,
       const Ints& padding, const Ints& dilation, bool ceil_mode, Tensor& grad_input)) {
  const Tensor value = wide(self);
  const Tensor largest = std::get<1>(at::max_pool2d_with_indices(value, kernel, stride, padding, dilation, ceil_mode));
  grad_input.copy_(at::max_pool2d_with_indices_backward(wide(grad_output), value, kernel, stride, padding, dilation, ceil_mode,
                                                        largest));
}

ACLNN(AvgPool2d, streaming(),
      (const Tensor& self, const Ints& kernel, const Ints& stride, const Ints& padding, bool ceil_mode,
       bool count_include_pad, int64_t divisor_override, int8_t cube_math_type, Tensor& out)) {
  const auto divisor = divisor_override == 0 ? std::nullopt : std::optional<int64_t>(divisor_override);
  out.copy_(at::avg_pool2d(wide(self), kernel, stride, padding, ceil_mode, count_include_pad, divisor));
}

ACLNN(AvgPool2dBackward, streaming(),
      (const Tensor& grad_output, const Tensor& self, const Ints& kernel, const Ints& stride, const Ints& padding,
       bool ceil_mode, bool count_include_pad, int64_t divisor_override, int8_t cube_math_type, Tensor& grad_input)) {
  const auto divisor = divisor_override == 0 ? std::nullopt : std::optional<int64_t>(divisor_override);
  grad_input.copy_(at::avg_pool2d_backward(wide(grad_output), wide(self), kernel, stride, padding, ceil_mode,
                                           count_include_pad, divisor));
}

ACLNN(AdaptiveAvgPool2d, streaming(), (const Tensor& self, const Ints& output_size, Tensor& out)) {
  out.copy_(at::_adaptive_avg_pool2d(wide(self), output_size));
}

ACLNN(AdaptiveAvgPool2dBackward, streaming(), (const Tensor& grad_output, const Tensor& self, Tensor& out)) {
  out.copy_(at::_adaptive_avg_pool2d_backward(wide(grad_output), wide(self)));
}
