// Operators over lists of tensors, as optimizers and gradient scalers use them, and optimizers in one operator.
#include <ATen/ScalarOps.h>

#include "aclnn/operator.h"

using namespace sim;
using at::native::wrapped_scalar_tensor;

// Calls compute(i, the i-th of `out`); `inputs` must be as many.
template <class Compute>
static void each(const Tensors& inputs, const Tensors& out, Compute compute) {
  if (inputs.size() != out.size()) throw Failure(ACL_ERROR_INVALID_PARAM, "lists of different lengths");
  for (size_t i = 0; i < out.size(); ++i) {
    Tensor result = out[i];
    compute(i, result);
  }
}

static void round_off(const Tensor& value, int64_t mode, Tensor& out);

ACLNN(ForeachAbs, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::abs_out(result, x[i]); });
}
ACLNN(ForeachAcos, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::acos_out(result, x[i]); });
}
ACLNN(ForeachAsin, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::asin_out(result, x[i]); });
}
ACLNN(ForeachAtan, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::atan_out(result, x[i]); });
}
ACLNN(ForeachCos, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::cos_out(result, x[i]); });
}
ACLNN(ForeachCosh, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::cosh_out(result, x[i]); });
}
ACLNN(ForeachErf, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::erf_out(result, x[i]); });
}
ACLNN(ForeachErfc, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::erfc_out(result, x[i]); });
}
ACLNN(ForeachExp, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::exp_out(result, x[i]); });
}
ACLNN(ForeachExpm1, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::expm1_out(result, x[i]); });
}
ACLNN(ForeachLog, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::log_out(result, x[i]); });
}
ACLNN(ForeachLog10, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::log10_out(result, x[i]); });
}
ACLNN(ForeachLog1p, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::log1p_out(result, x[i]); });
}
ACLNN(ForeachLog2, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::log2_out(result, x[i]); });
}
ACLNN(ForeachNeg, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::neg_out(result, x[i]); });
}
ACLNN(ForeachReciprocal, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::reciprocal_out(result, x[i]); });
}
ACLNN(ForeachSigmoid, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::sigmoid_out(result, x[i]); });
}
ACLNN(ForeachSign, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::sign_out(result, x[i]); });
}
ACLNN(ForeachSin, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::sin_out(result, x[i]); });
}
ACLNN(ForeachSinh, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::sinh_out(result, x[i]); });
}
ACLNN(ForeachSqrt, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::sqrt_out(result, x[i]); });
}
ACLNN(ForeachTan, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::tan_out(result, x[i]); });
}
ACLNN(ForeachTanh, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::tanh_out(result, x[i]); });
}
ACLNN(ForeachRoundOffNumberV2, streaming(), (const Tensors& x, const Scalar& mode, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { round_off(x[i], mode.toLong(), result); });
}
ACLNN(ForeachCopy, streaming(), (const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { result.copy_(x[i]); });
}
ACLNN(ForeachZeroInplace, streaming(), (Written<Tensors>& x)) {
  for (const Tensor& tensor : x) tensor.zero_();
}
ACLNN(ForeachNorm, streaming(), (const Tensors& x, const Scalar& order, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { result.copy_(at::linalg_vector_norm(x[i], order).view(result.sizes())); });
}

ACLNN(ForeachAddListV2, streaming(), (const Tensors& x, const Tensors& other, const Scalar& alpha, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::add_out(result, x[i], other[i], alpha); });
}
ACLNN(ForeachAddScalarV2, streaming(), (const Tensors& x, const Scalar& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::add_out(result, x[i], wrapped_scalar_tensor(other)); });
}
ACLNN(ForeachAddScalarList, streaming(), (const Tensors& x, const Scalars& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::add_out(result, x[i], wrapped_scalar_tensor(other[i])); });
}
ACLNN(ForeachSubListV2, streaming(), (const Tensors& x, const Tensors& other, const Scalar& alpha, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::sub_out(result, x[i], other[i], alpha); });
}
ACLNN(ForeachSubScalarV2, streaming(), (const Tensors& x, const Scalar& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::sub_out(result, x[i], wrapped_scalar_tensor(other)); });
}
ACLNN(ForeachSubScalarList, streaming(), (const Tensors& x, const Scalars& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::sub_out(result, x[i], wrapped_scalar_tensor(other[i])); });
}
ACLNN(ForeachMulList, streaming(), (const Tensors& x, const Tensors& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::mul_out(result, x[i], other[i]); });
}
ACLNN(ForeachMulScalarV2, streaming(), (const Tensors& x, const Scalar& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::mul_out(result, x[i], wrapped_scalar_tensor(other)); });
}
ACLNN(ForeachMulScalarList, streaming(), (const Tensors& x, const Scalars& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::mul_out(result, x[i], wrapped_scalar_tensor(other[i])); });
}
ACLNN(ForeachDivList, streaming(), (const Tensors& x, const Tensors& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::div_out(result, x[i], other[i]); });
}
ACLNN(ForeachDivScalarV2, streaming(), (const Tensors& x, const Scalar& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::div_out(result, x[i], wrapped_scalar_tensor(other)); });
}
ACLNN(ForeachDivScalarList, streaming(), (const Tensors& x, const Scalars& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::div_out(result, x[i], wrapped_scalar_tensor(other[i])); });
}
ACLNN(ForeachMaximumList, streaming(), (const Tensors& x, const Tensors& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::maximum_out(result, x[i], other[i]); });
}
ACLNN(ForeachMaximumScalarV2, streaming(), (const Tensors& x, const Scalar& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::clamp_min_out(result, x[i], other); });
}
ACLNN(ForeachMaximumScalarList, streaming(), (const Tensors& x, const Scalars& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::clamp_min_out(result, x[i], other[i]); });
}
ACLNN(ForeachMinimumList, streaming(), (const Tensors& x, const Tensors& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::minimum_out(result, x[i], other[i]); });
}
ACLNN(ForeachMinimumScalarV2, streaming(), (const Tensors& x, const Scalar& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::clamp_max_out(result, x[i], other); });
}
ACLNN(ForeachMinimumScalarList, streaming(), (const Tensors& x, const Scalars& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::clamp_max_out(result, x[i], other[i]); });
}
ACLNN(ForeachPowList, streaming(), (const Tensors& x, const Tensors& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::pow_out(result, x[i], other[i]); });
}
ACLNN(ForeachPowScalarV2, streaming(), (const Tensors& x, const Scalar& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::pow_out(result, x[i], other); });
}
ACLNN(ForeachPowScalarList, streaming(), (const Tensors& x, const Scalars& other, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::pow_out(result, x[i], other[i]); });
}
ACLNN(ForeachPowScalarAndTensor, streaming(), (const Scalar& base, const Tensors& x, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::pow_out(result, base, x[i]); });
}

ACLNN(ForeachAddcmulScalarV2, streaming(),
      (const Tensors& x, const Tensors& tensor1, const Tensors& tensor2, const Scalar& value, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::addcmul_out(result, x[i], tensor1[i], tensor2[i], value); });
}
// The values lie on the device, in one tensor.
ACLNN(ForeachAddcmulScalarList, streaming(),
      (const Tensors& x, const Tensors& tensor1, const Tensors& tensor2, const Tensor& values, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) {
    at::addcmul_out(result, x[i], tensor1[i], tensor2[i], values[static_cast<int64_t>(i)].item());
  });
}
ACLNN(ForeachAddcdivScalarV2, streaming(),
      (const Tensors& x, const Tensors& tensor1, const Tensors& tensor2, const Scalar& value, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::addcdiv_out(result, x[i], tensor1[i], tensor2[i], value); });
}
// The values lie on the device, in one tensor.
ACLNN(ForeachAddcdivScalarList, streaming(),
      (const Tensors& x, const Tensors& tensor1, const Tensors& tensor2, const Tensor& values, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) {
    at::addcdiv_out(result, x[i], tensor1[i], tensor2[i], values[static_cast<int64_t>(i)].item());
  });
}
ACLNN(ForeachLerpList, streaming(), (const Tensors& x, const Tensors& end, const Tensors& weight, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::lerp_out(result, x[i], end[i], weight[i]); });
}
ACLNN(ForeachLerpScalar, streaming(), (const Tensors& x, const Tensors& end, const Scalar& weight, Written<Tensors>& out)) {
  each(x, out, [&](size_t i, Tensor& result) { at::lerp_out(result, x[i], end[i], weight); });
}

ACLNN(ForeachNonFiniteCheckAndUnscale, streaming(),
      (Changed<Tensors>& gradients, Changed<Tensor>& found_inf, const Tensor& inverse_scale)) {
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale);
}
ACLNN(AmpUpdateScale, streaming(),
      (const Tensor& scale, const Tensor& growth_tracker, const Tensor& found_inf, double growth_factor, double backoff_factor,
       int64_t growth_interval, Tensor& new_scale, Tensor& new_growth_tracker)) {
  new_scale.copy_(scale);
  new_growth_tracker.copy_(growth_tracker);
  at::_amp_update_scale_(new_scale, new_growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval);
}

static void round_off(const Tensor& value, int64_t mode, Tensor& out) {
  switch (mode) {
    case 1: at::round_out(out, value); return;
    case 2: at::floor_out(out, value); return;
    case 3: at::ceil_out(out, value); return;
    case 5: at::trunc_out(out, value); return;
    case 7: at::frac_out(out, value); return;
    default: throw Failure(ACL_ERROR_API_NOT_SUPPORT, "round mode " + std::to_string(mode) + " is not simulated");
  }
}

// Optimizers fused into one operator.

// ATen's fused kernel runs over storage, so it gets contiguous float32: the tensor itself if it is that.
static Tensor flat(const Tensor& tensor) { return tensor.to(at::kFloat).contiguous(); }

static void copy_back(const Tensor& target, const Tensor& value) {
  if (!target.is_same(value)) target.copy_(value);
}

// `step` is how many steps came before this one: torch_npu takes 1 off, and the device's kernel adds it again. CANN's
// documentation calls it t, at least 1, which with torch_npu's subtraction would be one step late.
ACLNN(ApplyAdamWV2, streaming(),
      (Changed<Tensor>& var, Changed<Tensor>& m, Changed<Tensor>& v, Changed<OptionalTensor>& max_v, const Tensor& grad,
       const Tensor& step, float lr, float beta1, float beta2, float weight_decay, float eps, bool amsgrad, bool maximize)) {
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
