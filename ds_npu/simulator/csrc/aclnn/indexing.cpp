// Elements chosen by index or by mask: read, written, added to.
#include "aclnn/precision.h"

using namespace sim;

static Tensor as_index(const Tensor& index) { return index.to(at::kLong); }

ACLNN(IndexSelect, indexing(out), (const Tensor& self, int64_t dim, const Tensor& index, Tensor& out)) {
  at::index_select_out(out, self, dim, index);
}

ACLNN(Gather, indexing(out), (const Tensor& self, int64_t dim, const Tensor& index, Tensor& out)) {
  at::gather_out(out, self, dim, as_index(index));
}

ACLNN(Take, indexing(out), (const Tensor& self, const Tensor& index, Tensor& out)) { at::take_out(out, self, as_index(index)); }

ACLNN(Embedding, indexing(out), (const Tensor& weight, const Tensor& indices, Tensor& out)) {
  if (out.is_contiguous()) {
    Tensor rows = out.view({indices.numel(), weight.size(-1)});
    at::index_select_out(rows, weight, 0, indices.reshape(-1));
  } else {
    out.copy_(at::embedding(weight, indices));
  }
}

// A negative padding index, which arrives as an unsigned number, means that there is none.
ACLNN(EmbeddingDenseBackward, streaming(),
      (const Tensor& grad, const Tensor& indices, uint64_t num_weights, uint64_t padding_idx, bool scale_grad_by_freq,
       Tensor& out)) {
  const Tensor rows = wide(grad).contiguous();
  out.copy_(at::embedding_dense_backward(rows, indices, static_cast<int64_t>(num_weights), static_cast<int64_t>(padding_idx),
                                         scale_grad_by_freq));
}

ACLNN(EmbeddingRenorm, indexing(indices.unsqueeze(-1).expand({-1, self.size(-1)})),
      (Changed<Tensor>& self, const Tensor& indices, double max_norm, double norm_type)) {
  at::embedding_renorm_(self, as_index(indices).contiguous(), max_norm, norm_type);
}

// An index outside of the classes gives a row without a one.
ACLNN(OneHot, streaming(),
      (const Tensor& self, int32_t classes, const Tensor& on, const Tensor& off, int64_t axis, Tensor& out)) {
  const int64_t last = self.dim();
  const Tensor chosen = self.unsqueeze(-1) == at::arange(classes, self.options());
  out.copy_(at::where(chosen, on, off).movedim(-1, axis < 0 ? last : axis));
}

// --- scatter ---

enum class Reduce : int64_t { none, add, multiply, maximum, minimum, mean };

static std::string_view name_of(Reduce reduce) {
  switch (reduce) {
    case Reduce::add: return "sum";
    case Reduce::multiply: return "prod";
    case Reduce::maximum: return "amax";
    case Reduce::minimum: return "amin";
    case Reduce::mean: return "mean";
    case Reduce::none: break;
  }
  const auto number = std::to_string(static_cast<int64_t>(reduce));
  throw Failure(ACL_ERROR_API_NOT_SUPPORT, "a scatter with reduce " + number + " is not simulated");
}

static void scatter_reduced(Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, Reduce reduce, bool include) {
  change_wide(self, [&](Tensor& target) {
    target.scatter_reduce_(dim, as_index(index), source.to(target.scalar_type()), name_of(reduce), include);
  });
}

static void scatter(Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, int64_t reduce) {
  if (Reduce(reduce) == Reduce::none) {
    self.scatter_(dim, as_index(index), source.to(self.scalar_type()));
  } else {
    scatter_reduced(self, dim, index, source, Reduce(reduce), true);
  }
}

static void scatter(Tensor& self, int64_t dim, const Tensor& index, const Scalar& value, int64_t reduce) {
  if (Reduce(reduce) == Reduce::none) {
    self.scatter_(dim, as_index(index), value);
  } else {
    scatter_reduced(self, dim, index, at::full({1}, value, self.options()).expand(index.sizes()), Reduce(reduce), true);
  }
}

ACLNN(Scatter, streaming(),
      (const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, int64_t reduce, Tensor& out)) {
  begin_as(out, self);
  scatter(out, dim, index, source, reduce);
}

ACLNN(ScatterValue, streaming(),
      (const Tensor& self, int64_t dim, const Tensor& index, const Scalar& value, int64_t reduce, Tensor& out)) {
  begin_as(out, self);
  scatter(out, dim, index, value, reduce);
}

ACLNN(InplaceScatter, indexing(source),
      (Changed<Tensor>& self, int64_t dim, const Tensor& index, const Tensor& source, int64_t reduce)) {
  scatter(self, dim, index, source, reduce);
}

ACLNN(InplaceScatterValue, indexing(index),
      (Changed<Tensor>& self, int64_t dim, const Tensor& index, const Scalar& value, int64_t reduce)) {
  scatter(self, dim, index, value, reduce);
}

ACLNN(ScatterAdd, streaming(), (const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, Tensor& out)) {
  begin_as(out, self);
  change_wide(out, [&](Tensor& target) { target.scatter_add_(dim, as_index(index), source.to(target.scalar_type())); });
}

ACLNN(ScatterReduce, streaming(),
      (const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, int64_t reduce, bool include_self,
       Tensor& out)) {
  begin_as(out, self);
  scatter_reduced(out, dim, index, source, Reduce(reduce), include_self);
}

ACLNN(InplaceScatterReduce, indexing(source),
      (Changed<Tensor>& self, int64_t dim, const Tensor& index, const Tensor& source, int64_t reduce, bool include_self)) {
  scatter_reduced(self, dim, index, source, Reduce(reduce), include_self);
}

// --- index: one index tensor per dim; one of no elements stands for a whole dim ---

static c10::List<std::optional<Tensor>> per_dim(const Tensors& indices) {
  c10::List<std::optional<Tensor>> result;
  for (const Tensor& index : indices) {
    const bool whole = !index.defined() || index.numel() == 0;
    result.push_back(whole ? std::optional<Tensor>() : std::optional<Tensor>(index));
  }
  return result;
}

// Whether all indices are missing or empty: then nothing is selected, although one empty index stands for a whole dim.
static bool none(const Tensors& indices) {
  return std::ranges::all_of(indices, [](const Tensor& index) { return !index.defined() || index.numel() == 0; });
}

ACLNN(Index, indexing(out), (const Tensor& self, const Tensors& indices, Tensor& out)) {
  if (out.numel() == 0) return;
  at::index_out(out, self, per_dim(indices));
}

ACLNN(IndexPutImpl, indexing(values),
      (Changed<Tensor>& self, const Tensors& indices, const Tensor& values, bool accumulate, bool unsafe)) {
  if (none(indices) || values.numel() == 0) return;
  if (accumulate) {
    change_wide(self, [&](Tensor& target) {
      at::_index_put_impl_(target, per_dim(indices), values.to(target.scalar_type()), accumulate, unsafe);
    });
  } else {
    at::_index_put_impl_(self, per_dim(indices), values.to(self.scalar_type()), accumulate, unsafe);
  }
}

ACLNN(IndexAdd, streaming(),
      (const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, const Scalar& alpha, Tensor& out)) {
  begin_as(out, self);
  change_wide(out, [&](Tensor& target) { target.index_add_(dim, index, source.to(target.scalar_type()), alpha); });
}

ACLNN(IndexCopy, streaming(), (const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, Tensor& out)) {
  begin_as(out, self);
  out.index_copy_(dim, as_index(index), source);
}

ACLNN(InplaceIndexCopy, indexing(source), (Changed<Tensor>& self, int64_t dim, const Tensor& index, const Tensor& source)) {
  self.index_copy_(dim, as_index(index), source);
}

ACLNN(IndexFill, streaming(), (const Tensor& self, int64_t dim, const Tensor& index, const Scalar& value, Tensor& out)) {
  begin_as(out, self);
  out.index_fill_(dim, as_index(index), value);
}

ACLNN(InplaceIndexFill, streaming(), (Changed<Tensor>& self, int64_t dim, const Tensor& index, const Scalar& value)) {
  self.index_fill_(dim, as_index(index), value);
}

ACLNN(InplacePut, indexing(source), (Changed<Tensor>& self, const Tensor& index, const Tensor& source, bool accumulate)) {
  change_wide(self, [&](Tensor& target) { target.put_(as_index(index), source.to(target.scalar_type()), accumulate); });
}

// --- masks ---

ACLNN(MaskedSelect, streaming(), (const Tensor& self, const Tensor& mask, DynamicTensor& out)) {
  out.assign(at::masked_select(self, mask.to(at::kBool)));
}

ACLNN(InplaceMaskedScatter, streaming(), (Changed<Tensor>& self, const Tensor& mask, const Tensor& source)) {
  self.masked_scatter_(mask.to(at::kBool), source);
}

ACLNN(Nonzero, streaming(), (const Tensor& self, DynamicTensor& out)) { out.assign(at::nonzero(self)); }

// One row for each dim.
ACLNN(NonzeroV2, streaming(), (const Tensor& self, DynamicTensor& out)) { out.assign(at::nonzero(self).t()); }
