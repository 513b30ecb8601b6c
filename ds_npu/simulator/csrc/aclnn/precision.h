// The type in which an operator computes: float32 for bf16 and fp16, with one rounding at the end, as on the device.
#pragma once

#include "aclnn/operator.h"

namespace sim {

inline ScalarType wide_type(ScalarType type) { return at::isReducedFloatingType(type) ? at::kFloat : type; }

// The tensor in the type it is computed in; itself if that is its own.
inline Tensor wide(const Tensor& tensor) { return tensor.to(wide_type(tensor.scalar_type())); }
inline OptionalTensor wide(const OptionalTensor& tensor) { return tensor ? OptionalTensor(wide(*tensor)) : tensor; }

// Calls `write` on `out` if it has the type `type`, else on a tensor of that type, which is then copied into `out`.
template <class Write>
void write_as(ScalarType type, const Tensor& out, Write&& write) {
  Tensor target = out.scalar_type() == type ? out : at::empty(out.sizes(), out.options().dtype(type));
  write(target);
  if (!target.is_same(out)) out.copy_(target);
}

// Makes `out` a copy of `self`; they may be one tensor under two names, as in operators whose result is their first argument.
inline void begin_as(const Tensor& out, const Tensor& self) {
  const bool same = out.data_ptr() == self.data_ptr() && out.strides() == self.strides() && out.dtype() == self.dtype();
  if (!same) out.copy_(self);
}

// Applies `change` to `self`, in float32 for bf16 and fp16.
template <class Change>
void change_wide(Tensor& self, Change&& change) {
  Tensor target = wide(self);
  change(target);
  if (!target.is_same(self)) self.copy_(target);
}

}  // namespace sim
