// The softmax of scaled scores with a mask, as torch_npu calls it for aten::_masked_softmax.
#include "aclnn/masked_softmax.h"

#include "aclnn/operator.h"

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

using namespace sim;

ACLNN(ScaledMaskedSoftmax, (const Tensor& x, const Tensor& mask, double scale, bool fixed_triangle, Tensor& out)) {
  out.copy_(scaled_masked_softmax(x, mask, scale, fixed_triangle));
}
