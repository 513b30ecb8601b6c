// Comparisons, and logic on truth values and on bits, element by element.
#include <ATen/ScalarOps.h>

#include <limits>

#include "aclnn/operator.h"

using namespace sim;
using at::native::wrapped_scalar_tensor;

ACLNN(EqTensor, (const Tensor& self, const Tensor& other, Tensor& out)) { at::eq_out(out, self, other); }
ACLNN(EqScalar, (const Tensor& self, const Scalar& other, Tensor& out)) { at::eq_out(out, self, other); }
ACLNN(InplaceEqTensor, (Tensor& self, const Tensor& other)) { self.eq_(other); }
ACLNN(InplaceEqScalar, (Tensor& self, const Scalar& other)) { self.eq_(other); }
ACLNN(NeTensor, (const Tensor& self, const Tensor& other, Tensor& out)) { at::ne_out(out, self, other); }
ACLNN(NeScalar, (const Tensor& self, const Scalar& other, Tensor& out)) { at::ne_out(out, self, other); }
ACLNN(InplaceNeTensor, (Tensor& self, const Tensor& other)) { self.ne_(other); }
ACLNN(InplaceNeScalar, (Tensor& self, const Scalar& other)) { self.ne_(other); }
ACLNN(LtTensor, (const Tensor& self, const Tensor& other, Tensor& out)) { at::lt_out(out, self, other); }
ACLNN(LtScalar, (const Tensor& self, const Scalar& other, Tensor& out)) { at::lt_out(out, self, other); }
ACLNN(InplaceLtTensor, (Tensor& self, const Tensor& other)) { self.lt_(other); }
ACLNN(InplaceLtScalar, (Tensor& self, const Scalar& other)) { self.lt_(other); }
ACLNN(LeTensor, (const Tensor& self, const Tensor& other, Tensor& out)) { at::le_out(out, self, other); }
ACLNN(LeScalar, (const Tensor& self, const Scalar& other, Tensor& out)) { at::le_out(out, self, other); }
ACLNN(InplaceLeTensor, (Tensor& self, const Tensor& other)) { self.le_(other); }
ACLNN(InplaceLeScalar, (Tensor& self, const Scalar& other)) { self.le_(other); }
ACLNN(GtTensor, (const Tensor& self, const Tensor& other, Tensor& out)) { at::gt_out(out, self, other); }
ACLNN(GtScalar, (const Tensor& self, const Scalar& other, Tensor& out)) { at::gt_out(out, self, other); }
ACLNN(InplaceGtTensor, (Tensor& self, const Tensor& other)) { self.gt_(other); }
ACLNN(InplaceGtScalar, (Tensor& self, const Scalar& other)) { self.gt_(other); }
ACLNN(GeTensor, (const Tensor& self, const Tensor& other, Tensor& out)) { at::ge_out(out, self, other); }
ACLNN(GeScalar, (const Tensor& self, const Scalar& other, Tensor& out)) { at::ge_out(out, self, other); }
ACLNN(InplaceGeTensor, (Tensor& self, const Tensor& other)) { self.ge_(other); }
ACLNN(InplaceGeScalar, (Tensor& self, const Scalar& other)) { self.ge_(other); }

ACLNN(LogicalAnd, (const Tensor& self, const Tensor& other, Tensor& out)) { at::logical_and_out(out, self, other); }
ACLNN(LogicalOr, (const Tensor& self, const Tensor& other, Tensor& out)) { at::logical_or_out(out, self, other); }
ACLNN(LogicalXor, (const Tensor& self, const Tensor& other, Tensor& out)) { at::logical_xor_out(out, self, other); }
ACLNN(InplaceLogicalAnd, (Tensor& self, const Tensor& other)) { self.logical_and_(other); }
ACLNN(InplaceLogicalOr, (Tensor& self, const Tensor& other)) { self.logical_or_(other); }
ACLNN(LogicalNot, (const Tensor& self, Tensor& out)) { at::logical_not_out(out, self); }
ACLNN(InplaceLogicalNot, (Tensor& self)) { self.logical_not_(); }

ACLNN(BitwiseAndTensor, (const Tensor& self, const Tensor& other, Tensor& out)) {
  at::bitwise_and_out(out, self, other);
}
ACLNN(BitwiseAndScalar, (const Tensor& self, const Scalar& other, Tensor& out)) {
  at::bitwise_and_out(out, self, wrapped_scalar_tensor(other));
}
ACLNN(InplaceBitwiseAndTensor, (Tensor& self, const Tensor& other)) { self.bitwise_and_(other); }
ACLNN(InplaceBitwiseAndScalar, (Tensor& self, const Scalar& other)) { self.bitwise_and_(other); }
ACLNN(BitwiseOrTensor, (const Tensor& self, const Tensor& other, Tensor& out)) {
  at::bitwise_or_out(out, self, other);
}
ACLNN(BitwiseOrScalar, (const Tensor& self, const Scalar& other, Tensor& out)) {
  at::bitwise_or_out(out, self, wrapped_scalar_tensor(other));
}
ACLNN(BitwiseXorTensor, (const Tensor& self, const Tensor& other, Tensor& out)) {
  at::bitwise_xor_out(out, self, other);
}
ACLNN(BitwiseXorScalar, (const Tensor& self, const Scalar& other, Tensor& out)) {
  at::bitwise_xor_out(out, self, wrapped_scalar_tensor(other));
}
ACLNN(InplaceBitwiseXorTensor, (Tensor& self, const Tensor& other)) { self.bitwise_xor_(other); }
ACLNN(InplaceBitwiseXorScalar, (Tensor& self, const Scalar& other)) { self.bitwise_xor_(other); }
ACLNN(BitwiseNot, (const Tensor& self, Tensor& out)) { at::bitwise_not_out(out, self); }
ACLNN(LeftShift, (const Tensor& self, const Tensor& bits, Tensor& out)) { at::bitwise_left_shift_out(out, self, bits); }
ACLNN(LeftShifts, (const Tensor& self, const Scalar& bits, Tensor& out)) {
  at::bitwise_left_shift_out(out, self, wrapped_scalar_tensor(bits));
}
ACLNN(RightShift, (const Tensor& self, const Tensor& bits, Tensor& out)) { at::bitwise_right_shift_out(out, self, bits); }

// |x| < inf is false for NaN too.
ACLNN(IsFinite, (const Tensor& self, Tensor& out)) {
  if (self.is_floating_point()) {
    at::lt_out(out, self.abs(), std::numeric_limits<double>::infinity());
  } else {
    out.fill_(true);
  }
}
ACLNN(IsPosInf, (const Tensor& self, Tensor& out)) { at::isposinf_out(out, self); }
ACLNN(IsNegInf, (const Tensor& self, Tensor& out)) { at::isneginf_out(out, self); }
ACLNN(IsClose, (const Tensor& self, const Tensor& other, double rtol, double atol, bool equal_nan, Tensor& out)) {
  out.copy_(at::isclose(self, other, rtol, atol, equal_nan));
}
ACLNN(Equal, (const Tensor& self, const Tensor& other, Tensor& out)) { out.fill_(at::equal(self, other)); }
