// Creation of tensors, copies between them, and their concatenation, splitting, repetition, reordering and padding.
#include "aclnn/operator.h"
#include "aclnn/precision.h"

using namespace sim;

ACLNN(InplaceZero, streaming(), (Tensor& self)) { self.zero_(); }
ACLNN(InplaceOne, streaming(), (Tensor& self)) { self.fill_(1); }
ACLNN(InplaceFillScalar, streaming(), (Tensor& self, const Scalar& value)) { self.fill_(value); }
ACLNN(InplaceFillTensor, streaming(), (Tensor& self, const Tensor& value)) { self.fill_(value.reshape({})); }
ACLNN(InplaceFillDiagonal, streaming(),
      (Changed<Tensor>& self, const Scalar& value, bool wrap)) { self.fill_diagonal_(value, wrap); }

ACLNN(Arange, streaming(), (const Scalar& start, const Scalar& end, const Scalar& step, Tensor& out)) {
  at::arange_out(out, start, end, step);
}
ACLNN(Range, streaming(), (const Scalar& start, const Scalar& end, const Scalar& step, Tensor& out)) {
  at::range_out(out, start, end, step);
}
ACLNN(Linspace, streaming(), (const Scalar& start, const Scalar& end, int64_t steps, Tensor& out)) {
  at::linspace_out(out, start, end, steps);
}
ACLNN(LogSpace, streaming(), (const Scalar& start, const Scalar& end, int64_t steps, double base, Tensor& out)) {
  at::logspace_out(out, start, end, steps, base);
}
ACLNN(Eye, streaming(), (int64_t rows, int64_t columns, Tensor& out)) { at::eye_out(out, rows, columns); }

ACLNN(Tril, streaming(), (const Tensor& self, int64_t diagonal, Tensor& out)) { at::tril_out(out, self, diagonal); }
ACLNN(Triu, streaming(), (const Tensor& self, int64_t diagonal, Tensor& out)) { at::triu_out(out, self, diagonal); }
ACLNN(InplaceTril, streaming(), (Changed<Tensor>& self, int64_t diagonal)) { self.tril_(diagonal); }
ACLNN(InplaceTriu, streaming(), (Changed<Tensor>& self, int64_t diagonal)) { self.triu_(diagonal); }

// Copies between tensors of one device: other strides, other types.

ACLNN(InplaceCopy, streaming(), (Tensor& self, const Tensor& source)) { self.copy_(source); }
ACLNN(Cast, streaming(), (const Tensor& self, ScalarType, Tensor& out)) { out.copy_(self); }

// Concatenation, splitting, repetition, reordering and padding of tensors.

ACLNN(Cat, streaming(), (const Tensors& tensors, int64_t dim, Tensor& out)) { at::cat_out(out, tensors, dim); }

ACLNN(Stack, streaming(), (const Tensors& tensors, int64_t dim, Tensor& out)) { at::stack_out(out, tensors, dim); }

ACLNN(SplitWithSize, streaming(), (const Tensor& self, const Ints& sizes, int64_t dim, Written<Tensors>& out)) {
  const Tensors pieces = self.split_with_sizes(sizes, dim);
  for (size_t i = 0; i < out.size(); ++i) out[i].copy_(pieces.at(i));
}

ACLNN(ChunkCat, streaming(), (const Tensors& tensors, int64_t dim, int64_t chunks, Tensor& out)) {
  out.copy_(at::_chunk_cat(tensors, dim, chunks));
}

// Each dim of the result, split into (repetition, element), is the argument broadcast over the repetitions.
ACLNN(Repeat, streaming(), (const Tensor& self, const Ints& repeats, Tensor& out)) {
  if (out.numel() == 0) return;
  Ints split, elements;
  const size_t leading = repeats.size() - static_cast<size_t>(self.dim());
  for (size_t i = 0; i < repeats.size(); ++i) {
    const int64_t size = i < leading ? 1 : self.size(static_cast<int64_t>(i - leading));
    split.insert(split.end(), {repeats[i], size});
    elements.insert(elements.end(), {1, size});
  }
  out.view(split).copy_(self.reshape(elements));
}

static void repeat_each(Tensor& out, const Tensor& self, const Tensor& repeats, std::optional<int64_t> dim) {
  const Tensor source = dim ? self : self.reshape(-1);
  const int64_t along = dim.value_or(0);
  if (source.dim() == 0) return void(out.copy_(source.expand(out.sizes())));
  const Tensor counts = repeats.numel() == 1 ? repeats.reshape(1).expand(source.size(along)) : repeats;
  at::index_select_out(out, source, along, at::repeat_interleave(counts.contiguous()));
}

static Tensor count(int64_t repeats) { return at::full({1}, repeats, at::kLong); }

ACLNN(RepeatInterleave, streaming(), (const Tensor& self, const Tensor& repeats, int64_t, Tensor& out)) {
  repeat_each(out, self, repeats, {});
}

ACLNN(RepeatInterleaveWithDim, streaming(), (const Tensor& self, const Tensor& repeats, int64_t dim, int64_t, Tensor& out)) {
  repeat_each(out, self, repeats, dim);
}

ACLNN(RepeatInterleaveInt, streaming(), (const Tensor& self, int64_t repeats, int64_t, Tensor& out)) {
  repeat_each(out, self, count(repeats), {});
}

ACLNN(RepeatInterleaveIntWithDim, streaming(), (const Tensor& self, int64_t repeats, int64_t dim, int64_t, Tensor& out)) {
  repeat_each(out, self, count(repeats), dim);
}

ACLNN(RepeatInterleaveTensor, streaming(),
      (const Tensor& repeats, int64_t, Tensor& out)) { out.copy_(at::repeat_interleave(repeats)); }

ACLNN(Flip, streaming(), (const Tensor& self, const Ints& dims, Tensor& out)) { out.copy_(at::flip(self, dims)); }

ACLNN(Roll, streaming(), (const Tensor& self, const Ints& shifts, const Ints& dims, Tensor& out)) {
  out.copy_(at::roll(self, shifts, dims));
}

ACLNN(ConstantPadNd, streaming(), (const Tensor& self, const Ints& pad, const Scalar& value, Tensor& out)) {
  out.copy_(at::constant_pad_nd(self, pad, value));
}

ACLNN(UnfoldGrad, streaming(), (const Tensor& grad, const Ints& sizes, int64_t dim, int64_t size, int64_t step, Tensor& out)) {
  out.copy_(at::unfold_backward(wide(grad), sizes, dim, size, step));
}

ACLNN(Im2col, streaming(),
      (const Tensor& self, const Ints& kernel, const Ints& dilation, const Ints& padding, const Ints& stride, Tensor& out)) {
  out.copy_(at::im2col(self, kernel, dilation, padding, stride));
}
