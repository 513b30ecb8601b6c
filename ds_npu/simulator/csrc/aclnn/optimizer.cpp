// Optimizers fused into one operator.
#include "aclnn/operator.h"

using namespace sim;

// ATen's fused kernel runs over storage, so it gets contiguous float32: the tensor itself if it is that.
static Tensor flat(const Tensor& tensor) { return tensor.to(at::kFloat).contiguous(); }

static void copy_back(const Tensor& target, const Tensor& value) {
  if (!target.is_same(value)) target.copy_(value);
}

// `step` is how many steps came before this one: torch_npu takes 1 off, and the device's kernel adds it again. CANN's
// documentation calls it t, at least 1, which with torch_npu's subtraction would be one step late.
ACLNN(ApplyAdamWV2, (Tensor& var, Tensor& m, Tensor& v, const OptionalTensor& max_v, const Tensor& grad, const Tensor& step,
                     float lr, float beta1, float beta2, float weight_decay, float eps, bool amsgrad, bool maximize)) {
  if (amsgrad && !max_v) throw Failure(ACL_ERROR_INVALID_PARAM, "amsgrad needs maxGradNormOptionalRef");
  const Tensor weights = flat(var), first = flat(m), second = flat(v), largest = amsgrad ? flat(*max_v) : Tensor();
  const Tensor now = step.to(at::kFloat).add(1).reshape({});
  at::_fused_adamw_({weights}, {flat(grad)}, {first}, {second}, amsgrad ? Tensors{largest} : Tensors{}, {now}, lr, beta1,
                    beta2, weight_decay, eps, amsgrad, maximize);
  copy_back(var, weights);
  copy_back(m, first);
  copy_back(v, second);
  if (amsgrad) copy_back(*max_v, largest);
}
