// Arithmetic element by element.
#include "aclnn/operator.h"

using namespace sim;

ACLNN(Add, (const Tensor& self, const Tensor& other, const Scalar& alpha, Tensor& out)) { at::add_out(out, self, other, alpha); }

ACLNN(Adds, (const Tensor& self, const Scalar& other, const Scalar& alpha, Tensor& out)) {
  out.copy_(at::add(self, other, alpha));
}

ACLNN(InplaceAdd, (Tensor& self, const Tensor& other, const Scalar& alpha)) { self.add_(other, alpha); }
