// Sorted order, largest elements, distinct elements, and where values fall between sorted ones.
#include "aclnn/precision.h"

using namespace sim;

ACLNN(Sort, (const Tensor& self, bool stable, int64_t dim, bool descending, Tensor& values, Tensor& indices)) {
  at::sort_out(values, indices, self, stable, dim, descending);
}

ACLNN(Topk, (const Tensor& self, int64_t k, int64_t dim, bool largest, bool sorted, Tensor& values, Tensor& indices)) {
  at::topk_out(values, indices, self, k, dim, largest, sorted);
}

// The policy is the order of equal elements, of which any is right.
ACLNN(TopkV2, (const Tensor& self, int64_t k, int64_t dim, bool largest, bool sorted, int64_t, Tensor& values,
               Tensor& indices)) {
  at::topk_out(values, indices, self, k, dim, largest, sorted);
}

ACLNN(Kthvalue, (const Tensor& self, int64_t k, int64_t dim, bool keepdim, Tensor& values, Tensor& indices)) {
  at::kthvalue_out(values, indices, self, k, dim, keepdim);
}

// An output that the caller did not ask for has no elements.
static void give(DynamicTensor& out, const Tensor& value) {
  if (out.room.numel() != 0) out.assign(value);
}

ACLNN(Unique, (const Tensor& self, bool sorted, bool return_inverse, DynamicTensor& values, DynamicTensor& inverse)) {
  const auto [distinct, places] = at::_unique(self, sorted, return_inverse);
  values.assign(distinct);
  give(inverse, places);
}

ACLNN(Unique2, (const Tensor& self, bool sorted, bool, bool return_counts, DynamicTensor& values, DynamicTensor& inverse,
                DynamicTensor& counts)) {
  const bool with_inverse = inverse.room.numel() != 0;
  const auto [distinct, places, times] = at::_unique2(self, sorted, with_inverse, return_counts);
  values.assign(distinct);
  if (with_inverse) inverse.assign(places);
  give(counts, times);
}

ACLNN(UniqueConsecutive, (const Tensor& self, bool return_inverse, bool return_counts, int64_t dim, DynamicTensor& values,
                          DynamicTensor& inverse, DynamicTensor& counts)) {
  constexpr int64_t flattened = 1000;
  const auto along = dim == flattened ? std::optional<int64_t>() : std::optional<int64_t>(dim);
  const auto [distinct, places, times] = at::unique_consecutive(self, return_inverse, return_counts, along);
  values.assign(distinct);
  if (return_inverse) give(inverse, places);
  if (return_counts) give(counts, times);
}

ACLNN(UniqueDim, (const Tensor& self, bool sorted, bool, int64_t dim, DynamicTensor& values, DynamicTensor& inverse,
                  DynamicTensor& counts)) {
  const auto [distinct, places, times] = at::unique_dim(self, dim, sorted, true, true);
  values.assign(distinct);
  give(inverse, places);
  give(counts, times);
}

ACLNN(Bincount, (const Tensor& self, const OptionalTensor& weights, int64_t minlength, Tensor& out)) {
  out.copy_(at::bincount(self, weights, minlength));
}

ACLNN(Histc, (const Tensor& self, int64_t bins, const Scalar& min, const Scalar& max, Tensor& out)) {
  const bool floating = at::isFloatingType(self.scalar_type());
  out.copy_(at::histc(floating ? wide(self) : self.to(at::kDouble), bins, min, max));
}

ACLNN(SearchSorted, (const Tensor& sorted_sequence, const Tensor& self, bool out_int32, bool right,
                     const OptionalTensor& sorter, Tensor& out)) {
  at::searchsorted_out(out, sorted_sequence, self, out_int32, right, {}, sorter);
}

ACLNN(SearchSorteds, (const Tensor& sorted_sequence, const Scalar& self, bool out_int32, bool right,
                      const OptionalTensor& sorter, Tensor& out)) {
  out.copy_(at::searchsorted(sorted_sequence, self, out_int32, right, {}, sorter));
}

