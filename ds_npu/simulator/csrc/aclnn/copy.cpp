// Copies between tensors of one device: other strides, other types.
#include "aclnn/operator.h"

using namespace sim;

ACLNN(InplaceCopy, (Tensor& self, const Tensor& source)) { self.copy_(source); }
ACLNN(Cast, (const Tensor& self, ScalarType, Tensor& out)) { out.copy_(self); }
