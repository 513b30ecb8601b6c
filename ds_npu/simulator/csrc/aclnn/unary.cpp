// Functions of one tensor, element by element.
#include "aclnn/operator.h"

using namespace sim;

ACLNN(Abs, (const Tensor& self, Tensor& out)) { at::abs_out(out, self); }
ACLNN(Neg, (const Tensor& self, Tensor& out)) { at::neg_out(out, self); }
ACLNN(Round, (const Tensor& self, Tensor& out)) { at::round_out(out, self); }
ACLNN(Sign, (const Tensor& self, Tensor& out)) { at::sign_out(out, self); }
ACLNN(Signbit, (const Tensor& self, Tensor& out)) { at::signbit_out(out, self); }
ACLNN(Trunc, (const Tensor& self, Tensor& out)) { at::trunc_out(out, self); }

ACLNN(Acos, (const Tensor& self, Tensor& out)) { at::acos_out(out, self); }
ACLNN(InplaceAcos, (Tensor& self)) { self.acos_(); }
ACLNN(Acosh, (const Tensor& self, Tensor& out)) { at::acosh_out(out, self); }
ACLNN(InplaceAcosh, (Tensor& self)) { self.acosh_(); }
ACLNN(Asin, (const Tensor& self, Tensor& out)) { at::asin_out(out, self); }
ACLNN(InplaceAsin, (Tensor& self)) { self.asin_(); }
ACLNN(Asinh, (const Tensor& self, Tensor& out)) { at::asinh_out(out, self); }
ACLNN(InplaceAsinh, (Tensor& self)) { self.asinh_(); }
ACLNN(Atan, (const Tensor& self, Tensor& out)) { at::atan_out(out, self); }
ACLNN(InplaceAtan, (Tensor& self)) { self.atan_(); }
ACLNN(Atanh, (const Tensor& self, Tensor& out)) { at::atanh_out(out, self); }
ACLNN(InplaceAtanh, (Tensor& self)) { self.atanh_(); }
ACLNN(Ceil, (const Tensor& self, Tensor& out)) { at::ceil_out(out, self); }
ACLNN(InplaceCeil, (Tensor& self)) { self.ceil_(); }
ACLNN(Cos, (const Tensor& self, Tensor& out)) { at::cos_out(out, self); }
ACLNN(InplaceCos, (Tensor& self)) { self.cos_(); }
ACLNN(Cosh, (const Tensor& self, Tensor& out)) { at::cosh_out(out, self); }
ACLNN(InplaceCosh, (Tensor& self)) { self.cosh_(); }
ACLNN(Erf, (const Tensor& self, Tensor& out)) { at::erf_out(out, self); }
ACLNN(InplaceErf, (Tensor& self)) { self.erf_(); }
ACLNN(Erfc, (const Tensor& self, Tensor& out)) { at::erfc_out(out, self); }
ACLNN(InplaceErfc, (Tensor& self)) { self.erfc_(); }
ACLNN(Erfinv, (const Tensor& self, Tensor& out)) { at::erfinv_out(out, self); }
ACLNN(InplaceErfinv, (Tensor& self)) { self.erfinv_(); }
ACLNN(Exp, (const Tensor& self, Tensor& out)) { at::exp_out(out, self); }
ACLNN(InplaceExp, (Tensor& self)) { self.exp_(); }
ACLNN(Exp2, (const Tensor& self, Tensor& out)) { at::exp2_out(out, self); }
ACLNN(InplaceExp2, (Tensor& self)) { self.exp2_(); }
ACLNN(Expm1, (const Tensor& self, Tensor& out)) { at::expm1_out(out, self); }
ACLNN(InplaceExpm1, (Tensor& self)) { self.expm1_(); }
ACLNN(Floor, (const Tensor& self, Tensor& out)) { at::floor_out(out, self); }
ACLNN(InplaceFloor, (Tensor& self)) { self.floor_(); }
ACLNN(Frac, (const Tensor& self, Tensor& out)) { at::frac_out(out, self); }
ACLNN(InplaceFrac, (Tensor& self)) { self.frac_(); }
ACLNN(Log, (const Tensor& self, Tensor& out)) { at::log_out(out, self); }
ACLNN(InplaceLog, (Tensor& self)) { self.log_(); }
ACLNN(Log10, (const Tensor& self, Tensor& out)) { at::log10_out(out, self); }
ACLNN(InplaceLog10, (Tensor& self)) { self.log10_(); }
ACLNN(Log1p, (const Tensor& self, Tensor& out)) { at::log1p_out(out, self); }
ACLNN(InplaceLog1p, (Tensor& self)) { self.log1p_(); }
ACLNN(Log2, (const Tensor& self, Tensor& out)) { at::log2_out(out, self); }
ACLNN(InplaceLog2, (Tensor& self)) { self.log2_(); }
ACLNN(Reciprocal, (const Tensor& self, Tensor& out)) { at::reciprocal_out(out, self); }
ACLNN(InplaceReciprocal, (Tensor& self)) { self.reciprocal_(); }
ACLNN(Rsqrt, (const Tensor& self, Tensor& out)) { at::rsqrt_out(out, self); }
ACLNN(InplaceRsqrt, (Tensor& self)) { self.rsqrt_(); }
ACLNN(Sigmoid, (const Tensor& self, Tensor& out)) { at::sigmoid_out(out, self); }
ACLNN(InplaceSigmoid, (Tensor& self)) { self.sigmoid_(); }
ACLNN(Sin, (const Tensor& self, Tensor& out)) { at::sin_out(out, self); }
ACLNN(InplaceSin, (Tensor& self)) { self.sin_(); }
ACLNN(Sinh, (const Tensor& self, Tensor& out)) { at::sinh_out(out, self); }
ACLNN(InplaceSinh, (Tensor& self)) { self.sinh_(); }
ACLNN(Sqrt, (const Tensor& self, Tensor& out)) { at::sqrt_out(out, self); }
ACLNN(InplaceSqrt, (Tensor& self)) { self.sqrt_(); }
ACLNN(Tan, (const Tensor& self, Tensor& out)) { at::tan_out(out, self); }
ACLNN(InplaceTan, (Tensor& self)) { self.tan_(); }
ACLNN(Tanh, (const Tensor& self, Tensor& out)) { at::tanh_out(out, self); }
ACLNN(InplaceTanh, (Tensor& self)) { self.tanh_(); }

ACLNN(RoundDecimals, (const Tensor& self, int64_t decimals, Tensor& out)) { at::round_out(out, self, decimals); }
ACLNN(InplaceRoundDecimals, (Tensor& self, int64_t decimals)) { self.round_(decimals); }

ACLNN(NanToNum, (const Tensor& self, float nan, float posinf, float neginf, Tensor& out)) {
  at::nan_to_num_out(out, self, nan, posinf, neginf);
}
ACLNN(InplaceNanToNum, (Tensor& self, float nan, float posinf, float neginf)) { self.nan_to_num_(nan, posinf, neginf); }
