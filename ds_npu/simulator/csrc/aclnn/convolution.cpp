// Convolutions over one, two or three dims, also grouped, depthwise and transposed, and their gradients.
#include "aclnn/precision.h"

using namespace sim;

// Counts the products of one pass: each group multiplies rows [positions of the smaller map] by its kernel.
static Work convolved(const Tensor& input, const Tensor& weight, const Tensor& output, bool transposed, int64_t groups,
                      int64_t passes) {
  const Tensor& positions = transposed ? input : output;
  const int64_t rows = positions.numel() / std::max<int64_t>(positions.size(1), 1);
  const int64_t kernel = c10::multiply_integers(weight.sizes().slice(2));
  const int64_t leading = weight.size(0) / groups, trailing = weight.size(1) * kernel;
  const auto itemsize = static_cast<int64_t>(input.element_size());
  return transposed ? products(rows, trailing, leading, itemsize, groups * passes)
                    : products(rows, leading, trailing, itemsize, groups * passes);
}

static void check(const Tensor& input, const Tensor& weight, int8_t cube_math_type) {
  enum { keep_dtype = 0, allow_fp32_down_precision = 1, use_hf32 = 3 };
  for (const Tensor& operand : {input, weight}) {
    const ScalarType type = operand.scalar_type();
    if (type != at::kFloat && !at::isReducedFloatingType(type))
      throw Failure(ACL_ERROR_INVALID_PARAM, std::string("the cube unit does not convolve ") + at::toString(type));
  }
  // torch_npu allows HF32 (11 bits of mantissa) for float32 unless torch.npu.conv.allow_hf32 is False. This computes in full
  // float32.
  const bool known = cube_math_type == keep_dtype || cube_math_type == allow_fp32_down_precision ||
                     cube_math_type == use_hf32;
  if (!known)
    throw Failure(ACL_ERROR_API_NOT_SUPPORT, "cubeMathType " + std::to_string(cube_math_type) + " is not simulated");
}

ACLNN(Convolution, convolved(input, weight, output, transposed, groups, 1),
      (const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const Ints& stride, const Ints& padding,
       const Ints& dilation, bool transposed, const Ints& output_padding, int64_t groups, Tensor& output,
       int8_t cube_math_type)) {
  check(input, weight, cube_math_type);
  output.copy_(at::convolution(wide(input), wide(weight), wide(bias), stride, padding, dilation, transposed, output_padding,
                               groups));
}

static int64_t passes_of(const Bools& mask) { return int64_t{mask.at(0)} + int64_t{mask.at(1)}; }

// The gradients that the mask leaves out are not written.
ACLNN(ConvolutionBackward, convolved(input, weight, grad_output, transposed, groups, passes_of(output_mask)),
      (const Tensor& grad_output, const Tensor& input, const Tensor& weight, const OptionalInts& bias_sizes,
       const Ints& stride, const Ints& padding, const Ints& dilation, bool transposed, const Ints& output_padding,
       int32_t groups, const Bools& output_mask, int8_t cube_math_type, Written<OptionalTensor>& grad_input,
       Written<OptionalTensor>& grad_weight, Written<OptionalTensor>& grad_bias)) {
  check(input, weight, cube_math_type);
  const std::array<bool, 3> mask = {output_mask.at(0), output_mask.at(1), output_mask.at(2)};
  const at::OptionalIntArrayRef sizes = bias_sizes ? at::OptionalIntArrayRef(*bias_sizes) : std::nullopt;
  const auto [of_input, of_weight, of_bias] =
      at::convolution_backward(wide(grad_output), wide(input), wide(weight), sizes, stride, padding, dilation, transposed,
                               output_padding, groups, mask);
  if (mask[0] && grad_input) grad_input->copy_(of_input);
  if (mask[1] && grad_weight) grad_weight->copy_(of_weight);
  if (mask[2] && grad_bias) grad_bias->copy_(of_bias);
}
