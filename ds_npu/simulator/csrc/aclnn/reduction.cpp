// Reductions over dims and running ones, sorted order, largest and distinct elements, places among sorted ones.
#include "aclnn/precision.h"
#include "routing.h"

using namespace sim;

// An empty list of dims means all of them.
static at::OptionalIntArrayRef some(const Ints& dims) {
  return dims.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(dims);
}

// ATen sums bf16 and fp16 in float32, except where it divides a single output over threads and rounds their partial sums.
ACLNN(ReduceSum, streaming(), (const Tensor& self, const Ints& dims, bool keepdim, ScalarType type, Tensor& out)) {
  const ScalarType accumulated = self.scalar_type() == type && out.numel() != 1 ? type : wide_type(type);
  write_as(accumulated, out, [&](Tensor& target) { at::sum_out(target, self, some(dims), keepdim, accumulated); });
}

ACLNN(ReduceNansum, streaming(), (const Tensor& self, const Ints& dims, bool keepdim, ScalarType type, Tensor& out)) {
  const ScalarType accumulated = wide_type(type);
  write_as(accumulated, out, [&](Tensor& target) { at::nansum_out(target, self, some(dims), keepdim, accumulated); });
}

ACLNN(Mean, streaming(), (const Tensor& self, const Ints& dims, bool keepdim, ScalarType type, Tensor& out)) {
  const ScalarType accumulated = wide_type(type);
  write_as(accumulated, out, [&](Tensor& target) { at::mean_out(target, self, some(dims), keepdim, accumulated); });
}

ACLNN(Prod, streaming(), (const Tensor& self, ScalarType type, Tensor& out)) { out.copy_(at::prod(self, wide_type(type))); }

ACLNN(ProdDim, streaming(), (const Tensor& self, int64_t dim, bool keepdim, ScalarType type, Tensor& out)) {
  const ScalarType accumulated = wide_type(type);
  write_as(accumulated, out, [&](Tensor& target) { at::prod_out(target, self, dim, keepdim, accumulated); });
}

ACLNN(Trace, streaming(), (const Tensor& self, Tensor& out)) { out.copy_(at::trace(wide(self))); }

ACLNN(Max, streaming(), (const Tensor& self, Tensor& out)) { out.copy_(at::max(self)); }

ACLNN(Min, streaming(), (const Tensor& self, Tensor& out)) { out.copy_(at::min(self)); }

ACLNN(MaxDim, streaming(), (const Tensor& self, int64_t dim, bool keepdim, Tensor& out, Tensor& indices)) {
  at::max_out(out, indices, self, dim, keepdim);
}

ACLNN(MinDim, streaming(), (const Tensor& self, int64_t dim, bool keepdim, Tensor& out, Tensor& indices)) {
  at::min_out(out, indices, self, dim, keepdim);
}

ACLNN(Amax, streaming(),
      (const Tensor& self, const Ints& dims, bool keepdim, Tensor& out)) { at::amax_out(out, self, dims, keepdim); }

ACLNN(Amin, streaming(),
      (const Tensor& self, const Ints& dims, bool keepdim, Tensor& out)) { at::amin_out(out, self, dims, keepdim); }

ACLNN(Aminmax, streaming(), (const Tensor& self, const Ints& dims, bool keepdim, Tensor& smallest, Tensor& largest)) {
  at::amin_out(smallest, self, dims, keepdim);
  at::amax_out(largest, self, dims, keepdim);
}

ACLNN(AminmaxAll, streaming(),
      (const Tensor& self, Tensor& smallest, Tensor& largest)) { at::aminmax_out(smallest, largest, self); }

ACLNN(AminmaxDim, streaming(), (const Tensor& self, int64_t dim, bool keepdim, Tensor& smallest, Tensor& largest)) {
  at::aminmax_out(smallest, largest, self, dim, keepdim);
}

ACLNN(ArgMax, streaming(), (const Tensor& self, int64_t dim, bool keepdim, Tensor& out)) {
  write_as(at::kLong, out, [&](Tensor& target) { at::argmax_out(target, self, dim, keepdim); });
}

ACLNN(ArgMin, streaming(), (const Tensor& self, int64_t dim, bool keepdim, Tensor& out)) {
  write_as(at::kLong, out, [&](Tensor& target) { at::argmin_out(target, self, dim, keepdim); });
}

ACLNN(Any, streaming(), (const Tensor& self, const Ints& dims, bool keepdim, Tensor& out)) {
  at::any_out(out, self, some(dims), keepdim);
}

ACLNN(All, streaming(), (const Tensor& self, const Ints& dims, bool keepdim, Tensor& out)) {
  at::all_out(out, self, some(dims), keepdim);
}

// Matrix norms do not come here: torch's are made of vector norms and singular values.
ACLNN(Norm, streaming(), (const Tensor& self, const Scalar& p, const Ints& dims, bool keepdim, Tensor& out)) {
  const ScalarType accumulated = wide_type(out.scalar_type());
  write_as(accumulated, out,
           [&](Tensor& target) { at::linalg_vector_norm_out(target, self, p, some(dims), keepdim, accumulated); });
}

ACLNN(LinalgVectorNorm, streaming(),
      (const Tensor& self, const Scalar& ord, const Ints& dims, bool keepdim, ScalarType type, Tensor& out)) {
  const ScalarType accumulated = wide_type(type);
  write_as(accumulated, out,
           [&](Tensor& target) { at::linalg_vector_norm_out(target, self, ord, some(dims), keepdim, accumulated); });
}

ACLNN(LogSumExp, streaming(), (const Tensor& self, const Ints& dims, bool keepdim, Tensor& out)) {
  write_as(wide_type(out.scalar_type()), out,
           [&](Tensor& target) { at::logsumexp_out(target, self.to(target.scalar_type()), dims, keepdim); });
}

ACLNN(VarCorrection, streaming(), (const Tensor& self, const Ints& dims, int64_t correction, bool keepdim, Tensor& out)) {
  write_as(self.scalar_type(), out, [&](Tensor& target) { at::var_out(target, self, some(dims), correction, keepdim); });
}

ACLNN(Std, streaming(), (const Tensor& self, const Ints& dims, int64_t correction, bool keepdim, Tensor& out)) {
  write_as(self.scalar_type(), out, [&](Tensor& target) { at::std_out(target, self, some(dims), correction, keepdim); });
}

ACLNN(VarMean, streaming(),
      (const Tensor& self, const Ints& dims, int64_t correction, bool keepdim, Tensor& var, Tensor& mean)) {
  const auto found = at::var_mean(self, some(dims), correction, keepdim);
  var.copy_(std::get<0>(found));
  mean.copy_(std::get<1>(found));
}

ACLNN(StdMeanCorrection, streaming(),
      (const Tensor& self, const Ints& dims, int64_t correction, bool keepdim, Tensor& deviation, Tensor& mean)) {
  const auto found = at::std_mean(self, some(dims), correction, keepdim);
  deviation.copy_(std::get<0>(found));
  mean.copy_(std::get<1>(found));
}

ACLNN(Median, sorting(), (const Tensor& self, Tensor& out)) { out.copy_(at::median(self)); }

ACLNN(MedianDim, sorting(), (const Tensor& self, int64_t dim, bool keepdim, Tensor& values, Tensor& indices)) {
  at::median_out(values, indices, self, dim, keepdim);
}

ACLNN(Cumsum, streaming(), (const Tensor& self, int64_t dim, ScalarType type, Tensor& out)) {
  write_as(type, out, [&](Tensor& target) { at::cumsum_out(target, self, dim, type); });
}

ACLNN(Cumprod, streaming(), (const Tensor& self, const Scalar& dim, ScalarType type, Tensor& out)) {
  write_as(type, out, [&](Tensor& target) { at::cumprod_out(target, self, dim.toLong(), type); });
}

ACLNN(Cummax, streaming(), (const Tensor& self, int64_t dim, Tensor& values, Tensor& indices)) {
  at::cummax_out(values, indices, self, dim);
}

ACLNN(Cummin, streaming(), (const Tensor& self, int64_t dim, Tensor& values, Tensor& indices)) {
  at::cummin_out(values, indices, self, dim);
}

// Sorted order, largest elements, distinct elements, and where values fall between sorted ones.

ACLNN(Sort, sorting(), (const Tensor& self, bool stable, int64_t dim, bool descending, Tensor& values, Tensor& indices)) {
  at::sort_out(values, indices, self, stable, dim, descending);
}

static void topk(const Tensor& self, int64_t k, int64_t dim, bool largest, bool sorted, Tensor& values, Tensor& indices) {
  const auto drawn = drawn_choices(self, k, dim);
  if (!drawn) {
    at::topk_out(values, indices, self, k, dim, largest, sorted);
    return;
  }
  indices.copy_(*drawn);
  values.copy_(self.gather(dim, *drawn));
}

ACLNN(Topk, sorting(),
      (const Tensor& self, int64_t k, int64_t dim, bool largest, bool sorted, Tensor& values, Chosen& indices)) {
  topk(self, k, dim, largest, sorted, values, indices);
}

// The policy is the order of equal elements, of which any is right.
ACLNN(TopkV2, sorting(),
      (const Tensor& self, int64_t k, int64_t dim, bool largest, bool sorted, int64_t, Tensor& values, Chosen& indices)) {
  topk(self, k, dim, largest, sorted, values, indices);
}

ACLNN(Kthvalue, sorting(), (const Tensor& self, int64_t k, int64_t dim, bool keepdim, Tensor& values, Tensor& indices)) {
  at::kthvalue_out(values, indices, self, k, dim, keepdim);
}

// An output that the caller did not ask for has no elements.
static void give(DynamicTensor& out, const Tensor& value) {
  if (out.room.numel() != 0) out.assign(value);
}

ACLNN(Unique, sorting(),
      (const Tensor& self, bool sorted, bool return_inverse, DynamicTensor& values, DynamicTensor& inverse)) {
  const auto [distinct, places] = at::_unique(self, sorted, return_inverse);
  values.assign(distinct);
  give(inverse, places);
}

ACLNN(Unique2, sorting(),
      (const Tensor& self, bool sorted, bool, bool return_counts, DynamicTensor& values, DynamicTensor& inverse,
       DynamicTensor& counts)) {
  const bool with_inverse = inverse.room.numel() != 0;
  const auto [distinct, places, times] = at::_unique2(self, sorted, with_inverse, return_counts);
  values.assign(distinct);
  if (with_inverse) inverse.assign(places);
  give(counts, times);
}

ACLNN(UniqueConsecutive, sorting(),
      (const Tensor& self, bool return_inverse, bool return_counts, int64_t dim, DynamicTensor& values, DynamicTensor& inverse,
       DynamicTensor& counts)) {
  constexpr int64_t flattened = 1000;
  const auto along = dim == flattened ? std::optional<int64_t>() : std::optional<int64_t>(dim);
  const auto [distinct, places, times] = at::unique_consecutive(self, return_inverse, return_counts, along);
  values.assign(distinct);
  if (return_inverse) give(inverse, places);
  if (return_counts) give(counts, times);
}

ACLNN(UniqueDim, sorting(),
      (const Tensor& self, bool sorted, bool, int64_t dim, DynamicTensor& values, DynamicTensor& inverse,
       DynamicTensor& counts)) {
  const auto [distinct, places, times] = at::unique_dim(self, dim, sorted, true, true);
  values.assign(distinct);
  give(inverse, places);
  give(counts, times);
}

ACLNN(Bincount, streaming(), (const Tensor& self, const OptionalTensor& weights, int64_t minlength, Tensor& out)) {
  out.copy_(at::bincount(self, weights, minlength));
}

ACLNN(Histc, streaming(), (const Tensor& self, int64_t bins, const Scalar& min, const Scalar& max, Tensor& out)) {
  const bool floating = at::isFloatingType(self.scalar_type());
  out.copy_(at::histc(floating ? wide(self) : self.to(at::kDouble), bins, min, max));
}

ACLNN(SearchSorted, streaming(),
      (const Tensor& sorted_sequence, const Tensor& self, bool out_int32, bool right, const OptionalTensor& sorter,
       Tensor& out)) {
  at::searchsorted_out(out, sorted_sequence, self, out_int32, right, {}, sorter);
}

ACLNN(SearchSorteds, streaming(),
      (const Tensor& sorted_sequence, const Scalar& self, bool out_int32, bool right, const OptionalTensor& sorter,
       Tensor& out)) {
  out.copy_(at::searchsorted(sorted_sequence, self, out_int32, right, {}, sorter));
}
