// The softmax of scaled scores with a mask. (torch_npu takes it for aten::_masked_softmax; its npu_scaled_masked_softmax and
// the gradient of that are aclop operators on this device.)
#include "aclnn/operator.h"

using namespace sim;

ACLNN(ScaledMaskedSoftmax, (const Tensor& x, const Tensor& mask, double scale, bool fixed_triangle, Tensor& out)) {
  constexpr float masked = -10000.0f;  // what CANN writes in the place of a masked score
  if (fixed_triangle) throw Failure(ACL_ERROR_API_NOT_SUPPORT, "a mask made inside (fixed_triu_mask)");
  out.copy_(at::softmax((x.to(at::kFloat) * scale).masked_fill_(mask, masked), -1));
}
