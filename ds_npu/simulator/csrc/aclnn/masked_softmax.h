// The masked softmax, for the operators of both interfaces.
#pragma once

#include <ATen/ATen.h>

namespace sim {

// The mask of scores like `like`: `mask`, or everything above the diagonal.
at::Tensor hidden(const at::Tensor& mask, const at::Tensor& like, bool triangle);

// In float32: softmax over the last dim of scale * x, with -10000 in the place of a hidden score, as CANN has it.
at::Tensor scaled_masked_softmax(const at::Tensor& x, const at::Tensor& mask, double scale, bool triangle);

}  // namespace sim
