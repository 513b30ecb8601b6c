// Creation of tensors: constants, sequences, triangles.
#include "aclnn/operator.h"

using namespace sim;

ACLNN(InplaceZero, (Tensor& self)) { self.zero_(); }
ACLNN(InplaceOne, (Tensor& self)) { self.fill_(1); }
ACLNN(InplaceFillScalar, (Tensor& self, const Scalar& value)) { self.fill_(value); }
ACLNN(InplaceFillTensor, (Tensor& self, const Tensor& value)) { self.fill_(value.reshape({})); }
ACLNN(InplaceFillDiagonal, (Tensor& self, const Scalar& value, bool wrap)) { self.fill_diagonal_(value, wrap); }

ACLNN(Arange, (const Scalar& start, const Scalar& end, const Scalar& step, Tensor& out)) {
  at::arange_out(out, start, end, step);
}
ACLNN(Range, (const Scalar& start, const Scalar& end, const Scalar& step, Tensor& out)) {
  at::range_out(out, start, end, step);
}
ACLNN(Linspace, (const Scalar& start, const Scalar& end, int64_t steps, Tensor& out)) {
  at::linspace_out(out, start, end, steps);
}
ACLNN(LogSpace, (const Scalar& start, const Scalar& end, int64_t steps, double base, Tensor& out)) {
  at::logspace_out(out, start, end, steps, base);
}
ACLNN(Eye, (int64_t rows, int64_t columns, Tensor& out)) { at::eye_out(out, rows, columns); }

ACLNN(Tril, (const Tensor& self, int64_t diagonal, Tensor& out)) { at::tril_out(out, self, diagonal); }
ACLNN(Triu, (const Tensor& self, int64_t diagonal, Tensor& out)) { at::triu_out(out, self, diagonal); }
ACLNN(InplaceTril, (Tensor& self, int64_t diagonal)) { self.tril_(diagonal); }
ACLNN(InplaceTriu, (Tensor& self, int64_t diagonal)) { self.triu_(diagonal); }
