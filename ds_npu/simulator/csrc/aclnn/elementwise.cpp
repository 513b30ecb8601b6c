// Arithmetic, comparisons, and logic on truth values and on bits, element by element.
#include <ATen/ScalarOps.h>

#include <limits>

#include "aclnn/operator.h"

using namespace sim;
using at::native::wrapped_scalar_tensor;

// How aclnnDivMod and its relatives name the roundings of a quotient.
static std::optional<c10::string_view> rounding(int32_t mode);

ACLNN(Add, streaming(), (const Tensor& self, const Tensor& other, const Scalar& alpha, Tensor& out)) {
  at::add_out(out, self, other, alpha);
}
ACLNN(Adds, streaming(), (const Tensor& self, const Scalar& other, const Scalar& alpha, Tensor& out)) {
  at::add_out(out, self, wrapped_scalar_tensor(other), alpha);
}
ACLNN(AddV3, streaming(), (const Scalar& self, const Tensor& other, const Scalar& alpha, Tensor& out)) {
  at::add_out(out, wrapped_scalar_tensor(self), other, alpha);
}
ACLNN(InplaceAdd, streaming(), (Changed<Tensor>& self, const Tensor& other, const Scalar& alpha)) { self.add_(other, alpha); }
ACLNN(InplaceAdds, streaming(), (Changed<Tensor>& self, const Scalar& other, const Scalar& alpha)) { self.add_(other, alpha); }

ACLNN(Sub, streaming(), (const Tensor& self, const Tensor& other, const Scalar& alpha, Tensor& out)) {
  at::sub_out(out, self, other, alpha);
}
ACLNN(Subs, streaming(), (const Tensor& self, const Scalar& other, const Scalar& alpha, Tensor& out)) {
  at::sub_out(out, self, wrapped_scalar_tensor(other), alpha);
}
ACLNN(InplaceSub, streaming(), (Changed<Tensor>& self, const Tensor& other, const Scalar& alpha)) { self.sub_(other, alpha); }
ACLNN(InplaceSubs, streaming(), (Changed<Tensor>& self, const Scalar& other, const Scalar& alpha)) { self.sub_(other, alpha); }
ACLNN(Rsub, streaming(), (const Tensor& self, const Tensor& other, const Scalar& alpha, Tensor& out)) {
  at::sub_out(out, other, self, alpha);
}
ACLNN(Rsubs, streaming(), (const Tensor& self, const Scalar& other, const Scalar& alpha, Tensor& out)) {
  at::sub_out(out, wrapped_scalar_tensor(other), self, alpha);
}

ACLNN(Mul, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::mul_out(out, self, other); }
ACLNN(Muls, streaming(),
      (const Tensor& self, const Scalar& other, Tensor& out)) { at::mul_out(out, self, wrapped_scalar_tensor(other)); }
ACLNN(InplaceMul, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.mul_(other); }
ACLNN(InplaceMuls, streaming(), (Changed<Tensor>& self, const Scalar& other)) { self.mul_(other); }

ACLNN(Div, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::div_out(out, self, other); }
ACLNN(Divs, streaming(),
      (const Tensor& self, const Scalar& other, Tensor& out)) { at::div_out(out, self, wrapped_scalar_tensor(other)); }
ACLNN(InplaceDiv, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.div_(other); }
ACLNN(InplaceDivs, streaming(), (Changed<Tensor>& self, const Scalar& other)) { self.div_(other); }
ACLNN(DivMod, streaming(), (const Tensor& self, const Tensor& other, int32_t mode, Tensor& out)) {
  at::div_out(out, self, other, rounding(mode));
}
ACLNN(DivMods, streaming(), (const Tensor& self, const Scalar& other, int32_t mode, Tensor& out)) {
  at::div_out(out, self, wrapped_scalar_tensor(other), rounding(mode));
}
ACLNN(InplaceDivMod, streaming(),
      (Changed<Tensor>& self, const Tensor& other, int32_t mode)) { self.div_(other, rounding(mode)); }
ACLNN(InplaceDivMods, streaming(),
      (Changed<Tensor>& self, const Scalar& other, int32_t mode)) { self.div_(other, rounding(mode)); }
ACLNN(FloorDivide, streaming(),
      (const Tensor& self, const Tensor& other, Tensor& out)) { at::floor_divide_out(out, self, other); }
ACLNN(FloorDivides, streaming(), (const Tensor& self, const Scalar& other, Tensor& out)) {
  at::floor_divide_out(out, self, wrapped_scalar_tensor(other));
}
ACLNN(InplaceFloorDivide, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.floor_divide_(other); }
ACLNN(InplaceFloorDivides, streaming(), (Changed<Tensor>& self, const Scalar& other)) { self.floor_divide_(other); }

ACLNN(RemainderTensorTensor, streaming(),
      (const Tensor& self, const Tensor& other, Tensor& out)) { at::remainder_out(out, self, other); }
ACLNN(RemainderTensorScalar, streaming(), (const Tensor& self, const Scalar& other, Tensor& out)) {
  at::remainder_out(out, self, wrapped_scalar_tensor(other));
}
ACLNN(RemainderScalarTensor, streaming(), (const Scalar& self, const Tensor& other, Tensor& out)) {
  at::remainder_out(out, wrapped_scalar_tensor(self), other);
}
ACLNN(InplaceRemainderTensorTensor, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.remainder_(other); }
ACLNN(InplaceRemainderTensorScalar, streaming(), (Changed<Tensor>& self, const Scalar& other)) { self.remainder_(other); }
ACLNN(FmodTensor, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::fmod_out(out, self, other); }
ACLNN(FmodScalar, streaming(), (const Tensor& self, const Scalar& other, Tensor& out)) {
  at::fmod_out(out, self, wrapped_scalar_tensor(other));
}
ACLNN(InplaceFmodTensor, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.fmod_(other); }
ACLNN(InplaceFmodScalar, streaming(), (Changed<Tensor>& self, const Scalar& other)) { self.fmod_(other); }

ACLNN(PowTensorTensor, streaming(),
      (const Tensor& self, const Tensor& exponent, Tensor& out)) { at::pow_out(out, self, exponent); }
ACLNN(PowTensorScalar, streaming(),
      (const Tensor& self, const Scalar& exponent, Tensor& out)) { at::pow_out(out, self, exponent); }
ACLNN(PowScalarTensor, streaming(),
      (const Scalar& self, const Tensor& exponent, Tensor& out)) { at::pow_out(out, self, exponent); }
ACLNN(InplacePowTensorTensor, streaming(), (Changed<Tensor>& self, const Tensor& exponent)) { self.pow_(exponent); }
ACLNN(InplacePowTensorScalar, streaming(), (Changed<Tensor>& self, const Scalar& exponent)) { self.pow_(exponent); }

ACLNN(Atan2, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::atan2_out(out, self, other); }
ACLNN(InplaceAtan2, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.atan2_(other); }
ACLNN(Polar, streaming(), (const Tensor& abs, const Tensor& angle, Tensor& out)) { at::polar_out(out, abs, angle); }
ACLNN(Complex, streaming(), (const Tensor& real, const Tensor& imag, Tensor& out)) { at::complex_out(out, real, imag); }
ACLNN(LogAddExp, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::logaddexp_out(out, self, other); }
ACLNN(XLogYTensor, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::xlogy_out(out, self, other); }
ACLNN(XLogYScalarSelf, streaming(), (const Scalar& self, const Tensor& other, Tensor& out)) { at::xlogy_out(out, self, other); }
ACLNN(XLogYScalarOther, streaming(),
      (const Tensor& self, const Scalar& other, Tensor& out)) { at::xlogy_out(out, self, other); }
ACLNN(InplaceXLogYScalarOther, streaming(), (Changed<Tensor>& self, const Scalar& other)) { self.xlogy_(other); }

ACLNN(Maximum, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::maximum_out(out, self, other); }
ACLNN(Minimum, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::minimum_out(out, self, other); }
ACLNN(Clamp, streaming(),
      (const Tensor& self, const std::optional<Scalar>& min, const std::optional<Scalar>& max, Tensor& out)) {
  at::clamp_out(out, self, min, max);
}
ACLNN(ClampMin, streaming(), (const Tensor& self, const Scalar& min, Tensor& out)) { at::clamp_min_out(out, self, min); }
ACLNN(ClampMax, streaming(), (const Tensor& self, const Scalar& max, Tensor& out)) { at::clamp_max_out(out, self, max); }
ACLNN(InplaceClampMax, streaming(), (Changed<Tensor>& self, const Scalar& max)) { self.clamp_max_(max); }
ACLNN(ClampTensor, streaming(), (const Tensor& self, const OptionalTensor& min, const OptionalTensor& max, Tensor& out)) {
  at::clamp_out(out, self, min, max);
}
ACLNN(ClampMinTensor, streaming(), (const Tensor& self, const Tensor& min, Tensor& out)) { at::clamp_min_out(out, self, min); }
ACLNN(ClampMaxTensor, streaming(), (const Tensor& self, const Tensor& max, Tensor& out)) { at::clamp_max_out(out, self, max); }
ACLNN(InplaceClampMinTensor, streaming(), (Changed<Tensor>& self, const Tensor& min)) { self.clamp_min_(min); }
ACLNN(InplaceClampMaxTensor, streaming(), (Changed<Tensor>& self, const Tensor& max)) { self.clamp_max_(max); }

ACLNN(Addcmul, streaming(),
      (const Tensor& self, const Tensor& tensor1, const Tensor& tensor2, const Scalar& value, Tensor& out)) {
  at::addcmul_out(out, self, tensor1, tensor2, value);
}
ACLNN(InplaceAddcmul, streaming(), (Changed<Tensor>& self, const Tensor& tensor1, const Tensor& tensor2, const Scalar& value)) {
  self.addcmul_(tensor1, tensor2, value);
}
ACLNN(Addcdiv, streaming(),
      (const Tensor& self, const Tensor& tensor1, const Tensor& tensor2, const Scalar& value, Tensor& out)) {
  at::addcdiv_out(out, self, tensor1, tensor2, value);
}
ACLNN(InplaceAddcdiv, streaming(), (Changed<Tensor>& self, const Tensor& tensor1, const Tensor& tensor2, const Scalar& value)) {
  self.addcdiv_(tensor1, tensor2, value);
}
ACLNN(Lerp, streaming(), (const Tensor& self, const Tensor& end, const Tensor& weight, Tensor& out)) {
  at::lerp_out(out, self, end, weight);
}
ACLNN(Lerps, streaming(), (const Tensor& self, const Tensor& end, const Scalar& weight, Tensor& out)) {
  at::lerp_out(out, self, end, weight);
}
ACLNN(InplaceLerp, streaming(), (Changed<Tensor>& self, const Tensor& end, const Tensor& weight)) { self.lerp_(end, weight); }
ACLNN(InplaceLerps, streaming(), (Changed<Tensor>& self, const Tensor& end, const Scalar& weight)) { self.lerp_(end, weight); }

ACLNN(SWhere, streaming(), (const Tensor& condition, const Tensor& self, const Tensor& other, Tensor& out)) {
  at::where_out(out, condition, self, other);
}
// A fill value comes as a tensor of one element of any rank; ATen wants rank 0.
ACLNN(InplaceMaskedFillTensor, streaming(), (Changed<Tensor>& self, const Tensor& mask, const Tensor& value)) {
  self.masked_fill_(mask, value.reshape({}));
}
ACLNN(InplaceMaskedFillScalar, streaming(),
      (Changed<Tensor>& self, const Tensor& mask, const Scalar& value)) { self.masked_fill_(mask, value); }

static std::optional<c10::string_view> rounding(int32_t mode) {
  switch (mode) {
    case 0: return {};
    case 1: return "trunc";
    case 2: return "floor";
    default: throw Failure(ACL_ERROR_API_NOT_SUPPORT, "there is no rounding mode " + std::to_string(mode));
  }
}

// Comparisons, and logic on truth values and on bits, element by element.

ACLNN(EqTensor, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::eq_out(out, self, other); }
ACLNN(EqScalar, streaming(), (const Tensor& self, const Scalar& other, Tensor& out)) { at::eq_out(out, self, other); }
ACLNN(InplaceEqTensor, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.eq_(other); }
ACLNN(InplaceEqScalar, streaming(), (Changed<Tensor>& self, const Scalar& other)) { self.eq_(other); }
ACLNN(NeTensor, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::ne_out(out, self, other); }
ACLNN(NeScalar, streaming(), (const Tensor& self, const Scalar& other, Tensor& out)) { at::ne_out(out, self, other); }
ACLNN(InplaceNeTensor, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.ne_(other); }
ACLNN(InplaceNeScalar, streaming(), (Changed<Tensor>& self, const Scalar& other)) { self.ne_(other); }
ACLNN(LtTensor, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::lt_out(out, self, other); }
ACLNN(LtScalar, streaming(), (const Tensor& self, const Scalar& other, Tensor& out)) { at::lt_out(out, self, other); }
ACLNN(InplaceLtTensor, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.lt_(other); }
ACLNN(InplaceLtScalar, streaming(), (Changed<Tensor>& self, const Scalar& other)) { self.lt_(other); }
ACLNN(LeTensor, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::le_out(out, self, other); }
ACLNN(LeScalar, streaming(), (const Tensor& self, const Scalar& other, Tensor& out)) { at::le_out(out, self, other); }
ACLNN(InplaceLeTensor, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.le_(other); }
ACLNN(InplaceLeScalar, streaming(), (Changed<Tensor>& self, const Scalar& other)) { self.le_(other); }
ACLNN(GtTensor, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::gt_out(out, self, other); }
ACLNN(GtScalar, streaming(), (const Tensor& self, const Scalar& other, Tensor& out)) { at::gt_out(out, self, other); }
ACLNN(InplaceGtTensor, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.gt_(other); }
ACLNN(InplaceGtScalar, streaming(), (Changed<Tensor>& self, const Scalar& other)) { self.gt_(other); }
ACLNN(GeTensor, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::ge_out(out, self, other); }
ACLNN(GeScalar, streaming(), (const Tensor& self, const Scalar& other, Tensor& out)) { at::ge_out(out, self, other); }
ACLNN(InplaceGeTensor, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.ge_(other); }
ACLNN(InplaceGeScalar, streaming(), (Changed<Tensor>& self, const Scalar& other)) { self.ge_(other); }

ACLNN(LogicalAnd, streaming(),
      (const Tensor& self, const Tensor& other, Tensor& out)) { at::logical_and_out(out, self, other); }
ACLNN(LogicalOr, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { at::logical_or_out(out, self, other); }
ACLNN(LogicalXor, streaming(),
      (const Tensor& self, const Tensor& other, Tensor& out)) { at::logical_xor_out(out, self, other); }
ACLNN(InplaceLogicalAnd, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.logical_and_(other); }
ACLNN(InplaceLogicalOr, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.logical_or_(other); }
ACLNN(LogicalNot, streaming(), (const Tensor& self, Tensor& out)) { at::logical_not_out(out, self); }
ACLNN(InplaceLogicalNot, streaming(), (Changed<Tensor>& self)) { self.logical_not_(); }

ACLNN(BitwiseAndTensor, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) {
  at::bitwise_and_out(out, self, other);
}
ACLNN(BitwiseAndScalar, streaming(), (const Tensor& self, const Scalar& other, Tensor& out)) {
  at::bitwise_and_out(out, self, wrapped_scalar_tensor(other));
}
ACLNN(InplaceBitwiseAndTensor, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.bitwise_and_(other); }
ACLNN(InplaceBitwiseAndScalar, streaming(), (Changed<Tensor>& self, const Scalar& other)) { self.bitwise_and_(other); }
ACLNN(BitwiseOrTensor, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) {
  at::bitwise_or_out(out, self, other);
}
ACLNN(BitwiseOrScalar, streaming(), (const Tensor& self, const Scalar& other, Tensor& out)) {
  at::bitwise_or_out(out, self, wrapped_scalar_tensor(other));
}
ACLNN(BitwiseXorTensor, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) {
  at::bitwise_xor_out(out, self, other);
}
ACLNN(BitwiseXorScalar, streaming(), (const Tensor& self, const Scalar& other, Tensor& out)) {
  at::bitwise_xor_out(out, self, wrapped_scalar_tensor(other));
}
ACLNN(InplaceBitwiseXorTensor, streaming(), (Changed<Tensor>& self, const Tensor& other)) { self.bitwise_xor_(other); }
ACLNN(InplaceBitwiseXorScalar, streaming(), (Changed<Tensor>& self, const Scalar& other)) { self.bitwise_xor_(other); }
ACLNN(BitwiseNot, streaming(), (const Tensor& self, Tensor& out)) { at::bitwise_not_out(out, self); }
ACLNN(LeftShift, streaming(),
      (const Tensor& self, const Tensor& bits, Tensor& out)) { at::bitwise_left_shift_out(out, self, bits); }
ACLNN(LeftShifts, streaming(), (const Tensor& self, const Scalar& bits, Tensor& out)) {
  at::bitwise_left_shift_out(out, self, wrapped_scalar_tensor(bits));
}
ACLNN(RightShift, streaming(),
      (const Tensor& self, const Tensor& bits, Tensor& out)) { at::bitwise_right_shift_out(out, self, bits); }

// |x| < inf is false for NaN too.
ACLNN(IsFinite, streaming(), (const Tensor& self, Tensor& out)) {
  if (self.is_floating_point()) {
    at::lt_out(out, self.abs(), std::numeric_limits<double>::infinity());
  } else {
    out.fill_(true);
  }
}
ACLNN(IsPosInf, streaming(), (const Tensor& self, Tensor& out)) { at::isposinf_out(out, self); }
ACLNN(IsNegInf, streaming(), (const Tensor& self, Tensor& out)) { at::isneginf_out(out, self); }
ACLNN(IsClose, streaming(), (const Tensor& self, const Tensor& other, double rtol, double atol, bool equal_nan, Tensor& out)) {
  out.copy_(at::isclose(self, other, rtol, atol, equal_nan));
}
ACLNN(Equal, streaming(), (const Tensor& self, const Tensor& other, Tensor& out)) { out.fill_(at::equal(self, other)); }
