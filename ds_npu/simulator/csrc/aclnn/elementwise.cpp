// Arithmetic, comparisons, and logic on truth values and on bits, element by element.
#include <ATen/ScalarOps.h>

#include <limits>

#include "aclnn/operator.h"

using namespace sim;
using at::native::wrapped_scalar_tensor;

// How aclnnDivMod and its relatives name the roundings of a quotient.
static std::optional<c10::string_view> rounding(int32_t mode);

ACLNN(Add, (const Tensor& self, const Tensor& other, const Scalar& alpha, Tensor& out)) {
  at::add_out(out, self, other, alpha);
}
ACLNN(Adds, (const Tensor& self, const Scalar& other, const Scalar& alpha, Tensor& out)) {
  at::add_out(out, self, wrapped_scalar_tensor(other), alpha);
}
ACLNN(AddV3, (const Scalar& self, const Tensor& other, const Scalar& alpha, Tensor& out)) {
  at::add_out(out, wrapped_scalar_tensor(self), other, alpha);
}
ACLNN(InplaceAdd, (Tensor& self, const Tensor& other, const Scalar& alpha)) { self.add_(other, alpha); }
ACLNN(InplaceAdds, (Tensor& self, const Scalar& other, const Scalar& alpha)) { self.add_(other, alpha); }

ACLNN(Sub, (const Tensor& self, const Tensor& other, const Scalar& alpha, Tensor& out)) {
  at::sub_out(out, self, other, alpha);
}
ACLNN(Subs, (const Tensor& self, const Scalar& other, const Scalar& alpha, Tensor& out)) {
  at::sub_out(out, self, wrapped_scalar_tensor(other), alpha);
}
ACLNN(InplaceSub, (Tensor& self, const Tensor& other, const Scalar& alpha)) { self.sub_(other, alpha); }
ACLNN(InplaceSubs, (Tensor& self, const Scalar& other, const Scalar& alpha)) { self.sub_(other, alpha); }
ACLNN(Rsub, (const Tensor& self, const Tensor& other, const Scalar& alpha, Tensor& out)) {
  at::sub_out(out, other, self, alpha);
}
ACLNN(Rsubs, (const Tensor& self, const Scalar& other, const Scalar& alpha, Tensor& out)) {
  at::sub_out(out, wrapped_scalar_tensor(other), self, alpha);
}

ACLNN(Mul, (const Tensor& self, const Tensor& other, Tensor& out)) { at::mul_out(out, self, other); }
ACLNN(Muls, (const Tensor& self, const Scalar& other, Tensor& out)) { at::mul_out(out, self, wrapped_scalar_tensor(other)); }
ACLNN(InplaceMul, (Tensor& self, const Tensor& other)) { self.mul_(other); }
ACLNN(InplaceMuls, (Tensor& self, const Scalar& other)) { self.mul_(other); }

ACLNN(Div, (const Tensor& self, const Tensor& other, Tensor& out)) { at::div_out(out, self, other); }
ACLNN(Divs, (const Tensor& self, const Scalar& other, Tensor& out)) { at::div_out(out, self, wrapped_scalar_tensor(other)); }
ACLNN(InplaceDiv, (Tensor& self, const Tensor& other)) { self.div_(other); }
ACLNN(InplaceDivs, (Tensor& self, const Scalar& other)) { self.div_(other); }
ACLNN(DivMod, (const Tensor& self, const Tensor& other, int32_t mode, Tensor& out)) {
  at::div_out(out, self, other, rounding(mode));
}
ACLNN(DivMods, (const Tensor& self, const Scalar& other, int32_t mode, Tensor& out)) {
  at::div_out(out, self, wrapped_scalar_tensor(other), rounding(mode));
}
ACLNN(InplaceDivMod, (Tensor& self, const Tensor& other, int32_t mode)) { self.div_(other, rounding(mode)); }
ACLNN(InplaceDivMods, (Tensor& self, const Scalar& other, int32_t mode)) { self.div_(other, rounding(mode)); }
ACLNN(FloorDivide, (const Tensor& self, const Tensor& other, Tensor& out)) { at::floor_divide_out(out, self, other); }
ACLNN(FloorDivides, (const Tensor& self, const Scalar& other, Tensor& out)) {
  at::floor_divide_out(out, self, wrapped_scalar_tensor(other));
}
ACLNN(InplaceFloorDivide, (Tensor& self, const Tensor& other)) { self.floor_divide_(other); }
ACLNN(InplaceFloorDivides, (Tensor& self, const Scalar& other)) { self.floor_divide_(other); }

ACLNN(RemainderTensorTensor, (const Tensor& self, const Tensor& other, Tensor& out)) { at::remainder_out(out, self, other); }
ACLNN(RemainderTensorScalar, (const Tensor& self, const Scalar& other, Tensor& out)) {
  at::remainder_out(out, self, wrapped_scalar_tensor(other));
}
ACLNN(RemainderScalarTensor, (const Scalar& self, const Tensor& other, Tensor& out)) {
  at::remainder_out(out, wrapped_scalar_tensor(self), other);
}
ACLNN(InplaceRemainderTensorTensor, (Tensor& self, const Tensor& other)) { self.remainder_(other); }
ACLNN(InplaceRemainderTensorScalar, (Tensor& self, const Scalar& other)) { self.remainder_(other); }
ACLNN(FmodTensor, (const Tensor& self, const Tensor& other, Tensor& out)) { at::fmod_out(out, self, other); }
ACLNN(FmodScalar, (const Tensor& self, const Scalar& other, Tensor& out)) {
  at::fmod_out(out, self, wrapped_scalar_tensor(other));
}
ACLNN(InplaceFmodTensor, (Tensor& self, const Tensor& other)) { self.fmod_(other); }
ACLNN(InplaceFmodScalar, (Tensor& self, const Scalar& other)) { self.fmod_(other); }

ACLNN(PowTensorTensor, (const Tensor& self, const Tensor& exponent, Tensor& out)) { at::pow_out(out, self, exponent); }
ACLNN(PowTensorScalar, (const Tensor& self, const Scalar& exponent, Tensor& out)) { at::pow_out(out, self, exponent); }
ACLNN(PowScalarTensor, (const Scalar& self, const Tensor& exponent, Tensor& out)) { at::pow_out(out, self, exponent); }
ACLNN(InplacePowTensorTensor, (Tensor& self, const Tensor& exponent)) { self.pow_(exponent); }
ACLNN(InplacePowTensorScalar, (Tensor& self, const Scalar& exponent)) { self.pow_(exponent); }

ACLNN(Atan2, (const Tensor& self, const Tensor& other, Tensor& out)) { at::atan2_out(out, self, other); }
ACLNN(InplaceAtan2, (Tensor& self, const Tensor& other)) { self.atan2_(other); }
ACLNN(Polar, (const Tensor& abs, const Tensor& angle, Tensor& out)) { at::polar_out(out, abs, angle); }
ACLNN(Complex, (const Tensor& real, const Tensor& imag, Tensor& out)) { at::complex_out(out, real, imag); }
ACLNN(LogAddExp, (const Tensor& self, const Tensor& other, Tensor& out)) { at::logaddexp_out(out, self, other); }
ACLNN(XLogYTensor, (const Tensor& self, const Tensor& other, Tensor& out)) { at::xlogy_out(out, self, other); }
ACLNN(XLogYScalarSelf, (const Scalar& self, const Tensor& other, Tensor& out)) { at::xlogy_out(out, self, other); }
ACLNN(XLogYScalarOther, (const Tensor& self, const Scalar& other, Tensor& out)) { at::xlogy_out(out, self, other); }
ACLNN(InplaceXLogYScalarOther, (Tensor& self, const Scalar& other)) { self.xlogy_(other); }

ACLNN(Maximum, (const Tensor& self, const Tensor& other, Tensor& out)) { at::maximum_out(out, self, other); }
ACLNN(Minimum, (const Tensor& self, const Tensor& other, Tensor& out)) { at::minimum_out(out, self, other); }
ACLNN(Clamp, (const Tensor& self, const std::optional<Scalar>& min, const std::optional<Scalar>& max, Tensor& out)) {
  at::clamp_out(out, self, min, max);
}
ACLNN(ClampMin, (const Tensor& self, const Scalar& min, Tensor& out)) { at::clamp_min_out(out, self, min); }
ACLNN(ClampMax, (const Tensor& self, const Scalar& max, Tensor& out)) { at::clamp_max_out(out, self, max); }
ACLNN(InplaceClampMax, (Tensor& self, const Scalar& max)) { self.clamp_max_(max); }
ACLNN(ClampTensor, (const Tensor& self, const OptionalTensor& min, const OptionalTensor& max, Tensor& out)) {
  at::clamp_out(out, self, min, max);
}
ACLNN(ClampMinTensor, (const Tensor& self, const Tensor& min, Tensor& out)) { at::clamp_min_out(out, self, min); }
ACLNN(ClampMaxTensor, (const Tensor& self, const Tensor& max, Tensor& out)) { at::clamp_max_out(out, self, max); }
ACLNN(InplaceClampMinTensor, (Tensor& self, const Tensor& min)) { self.clamp_min_(min); }
ACLNN(InplaceClampMaxTensor, (Tensor& self, const Tensor& max)) { self.clamp_max_(max); }

ACLNN(Addcmul, (const Tensor& self, const Tensor& tensor1, const Tensor& tensor2, const Scalar& value, Tensor& out)) {
  at::addcmul_out(out, self, tensor1, tensor2, value);
}
ACLNN(InplaceAddcmul, (Tensor& self, const Tensor& tensor1, const Tensor& tensor2, const Scalar& value)) {
  self.addcmul_(tensor1, tensor2, value);
}
ACLNN(Addcdiv, (const Tensor& self, const Tensor& tensor1, const Tensor& tensor2, const Scalar& value, Tensor& out)) {
  at::addcdiv_out(out, self, tensor1, tensor2, value);
}
ACLNN(InplaceAddcdiv, (Tensor& self, const Tensor& tensor1, const Tensor& tensor2, const Scalar& value)) {
  self.addcdiv_(tensor1, tensor2, value);
}
ACLNN(Lerp, (const Tensor& self, const Tensor& end, const Tensor& weight, Tensor& out)) {
  at::lerp_out(out, self, end, weight);
}
ACLNN(Lerps, (const Tensor& self, const Tensor& end, const Scalar& weight, Tensor& out)) {
  at::lerp_out(out, self, end, weight);
}
ACLNN(InplaceLerp, (Tensor& self, const Tensor& end, const Tensor& weight)) { self.lerp_(end, weight); }
ACLNN(InplaceLerps, (Tensor& self, const Tensor& end, const Scalar& weight)) { self.lerp_(end, weight); }

ACLNN(SWhere, (const Tensor& condition, const Tensor& self, const Tensor& other, Tensor& out)) {
  at::where_out(out, condition, self, other);
}
// A fill value comes as a tensor of one element of any rank; ATen wants rank 0.
ACLNN(InplaceMaskedFillTensor, (Tensor& self, const Tensor& mask, const Tensor& value)) {
  self.masked_fill_(mask, value.reshape({}));
}
ACLNN(InplaceMaskedFillScalar, (Tensor& self, const Tensor& mask, const Scalar& value)) { self.masked_fill_(mask, value); }

static std::optional<c10::string_view> rounding(int32_t mode) {
  switch (mode) {
    case 0: return {};
    case 1: return "trunc";
    case 2: return "floor";
    default: throw Failure(ACL_ERROR_API_NOT_SUPPORT, "there is no rounding mode " + std::to_string(mode));
  }
}

// Comparisons, and logic on truth values and on bits, element by element.

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
