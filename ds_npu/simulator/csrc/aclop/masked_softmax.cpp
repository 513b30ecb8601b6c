// The softmax of scaled scores with a mask, and its gradient, as torch_npu.npu_scaled_masked_softmax calls them.
#include "aclop/operator.h"

#include "aclnn/masked_softmax.h"

// Inputs: scores [.., S, T] and a mask that broadcasts to them, true where a score is hidden.
GRAPH_OPERATOR(ScaledMaskedSoftmax) {
  const bool triangle = call.attributes.at("fixed_triu_mask").toBool();
  call.outputs[0].copy_(
      sim::scaled_masked_softmax(call.inputs[0], call.inputs[1], call.attributes.at("scale").toDouble(), triangle));
}

// Inputs: the gradient of the result, the result, the mask. A hidden score has no gradient.
GRAPH_OPERATOR(ScaledMaskedSoftmaxGrad) {
  const at::Tensor grad = call.inputs[0].to(at::kFloat), y = call.inputs[1].to(at::kFloat);
  const at::Tensor mask = sim::hidden(call.inputs[2], y, call.attributes.at("fixed_triu_mask").toBool());
  const at::Tensor scores = y * (grad - (grad * y).sum(-1, true));
  call.outputs[0].copy_((scores * call.attributes.at("scale").toDouble()).masked_fill_(mask, 0));
}
