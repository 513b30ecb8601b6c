// Rotary position embedding: pairs of dims turned by an angle given as its cosine and sine.
#include "aclnn/operator.h"

using namespace sim;

namespace {

enum RotaryMode : int64_t { kHalf, kInterleave, kQuarter, kInterleaveHalf };

// The two members of every pair of dims, as views.
struct Pairs {
  Tensor first, second;
};

Pairs halves(const Tensor& x) {
  const int64_t half = x.size(-1) / 2;
  return {x.narrow(-1, 0, half), x.narrow(-1, half, half)};
}

Pairs neighbours(const Tensor& x) {
  const Tensor pairs = x.unflatten(-1, {-1, 2});
  return {pairs.select(-1, 0), pairs.select(-1, 1)};
}

// Of the input; in the result of kInterleaveHalf the members of a pair are half the dims apart.
Pairs pairs_in(const Tensor& x, int64_t mode) {
  switch (mode) {
    case kHalf: return halves(x);
    case kQuarter: return halves(x.unflatten(-1, {2, -1}));
    case kInterleave:
    case kInterleaveHalf: return neighbours(x);
  }
  throw Failure(ACL_ERROR_INVALID_PARAM, "rotary mode " + std::to_string(mode));
}
Pairs pairs_out(const Tensor& x, int64_t mode) { return pairs_in(x, mode == kInterleaveHalf ? kHalf : mode); }

Tensor widened(const Tensor& x) { return x.to(at::kFloat); }
// Memory for a result in float32: the result itself where it can be.
Tensor room_for(const Tensor& out) { return out.scalar_type() == at::kFloat ? out : at::empty(out.sizes(), at::kFloat); }
void settle(const Tensor& room, const Tensor& out) {
  if (!room.is_same(out)) out.copy_(room);
}

void rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t mode, const Tensor& out) {
  const Tensor room = room_for(out);
  const auto from = pairs_in(widened(x), mode);
  const auto cosine = pairs_out(widened(cos), mode), sine = pairs_out(widened(sin), mode);
  auto to = pairs_out(room, mode);
  at::mul_out(to.first, from.first, cosine.first).addcmul_(from.second, sine.first, -1);
  at::mul_out(to.second, from.second, cosine.second).addcmul_(from.first, sine.second);
  settle(room, out);
}

void rotate_inplace(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t mode) {
  const Tensor result = at::empty_like(x);
  rotate(x, cos, sin, mode, result);
  x.copy_(result);
}

void apply_rotary(Tensor& query, Tensor& key, const Tensor& cos, const Tensor& sin, int64_t layout, int64_t mode) {
  if (layout < 1 || layout > 4) throw Failure(ACL_ERROR_INVALID_PARAM, "layout " + std::to_string(layout));
  if (cos.size(-1) != query.size(-1)) throw Failure(ACL_ERROR_API_NOT_SUPPORT, "cos with fewer dims than the query");
  rotate_inplace(query, cos, sin, mode);
  rotate_inplace(key, cos, sin, mode);
}

int64_t mode_named(const std::string& name) {
  if (name == "half") return kHalf;
  if (name == "interleave") return kInterleave;
  if (name == "quarter") return kQuarter;
  throw Failure(ACL_ERROR_INVALID_PARAM, "rotary mode " + name);
}

// The gradients of cos and sin, summed over the dims in which they were broadcast.
void angle_gradients(const Tensor& dy, const Tensor& x, int64_t mode, const Tensor& dcos, const Tensor& dsin) {
  const auto slope = pairs_out(dy, mode), from = pairs_in(x, mode);
  const Tensor cosine = at::empty_like(dy), sine = at::empty_like(dy);
  auto cosines = pairs_out(cosine, mode), sines = pairs_out(sine, mode);
  at::mul_out(cosines.first, slope.first, from.first);
  at::mul_out(cosines.second, slope.second, from.second);
  at::mul_out(sines.first, slope.first, from.second).neg_();
  at::mul_out(sines.second, slope.second, from.first);
  dcos.copy_(cosine.sum_to_size(dcos.sizes()));
  dsin.copy_(sine.sum_to_size(dsin.sizes()));
}

}  // namespace

ACLNN(RotaryPositionEmbedding, streaming(),
      (const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t mode, Tensor& out)) {
  rotate(x, cos, sin, mode, out);
}

// With `rotation`, a matrix takes the place of the mode.
ACLNN(RotaryPositionEmbeddingV2, streaming(),
      (const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t mode, const OptionalTensor& rotation, Tensor& out)) {
  if (!rotation) return rotate(x, cos, sin, mode, out);
  const Tensor wide = widened(x);
  out.copy_((wide * cos).addcmul_(at::matmul(wide, widened(*rotation)), widened(sin)));
}

ACLNN(RotaryPositionEmbeddingGrad, streaming(),
      (const Tensor& dy, const Tensor& cos, const Tensor& sin, const OptionalTensor& x, int64_t mode, Tensor& dx,
       Written<OptionalTensor>& dcos, Written<OptionalTensor>& dsin)) {
  const Tensor room = room_for(dx), wide = widened(dy);
  const auto slope = pairs_out(wide, mode);
  const auto cosine = pairs_out(widened(cos), mode), sine = pairs_out(widened(sin), mode);
  auto to = pairs_in(room, mode);
  at::mul_out(to.first, slope.first, cosine.first).addcmul_(slope.second, sine.second);
  at::mul_out(to.second, slope.second, cosine.second).addcmul_(slope.first, sine.first, -1);
  settle(room, dx);
  if (x && dcos && dsin) angle_gradients(wide, widened(*x), mode, *dcos, *dsin);
}

ACLNN(ApplyRotaryPosEmb, streaming(),
      (Changed<Tensor>& query, Changed<Tensor>& key, const Tensor& cos, const Tensor& sin, int64_t layout)) {
  apply_rotary(query, key, cos, sin, layout, kHalf);
}

ACLNN(ApplyRotaryPosEmbV2, streaming(),
      (Changed<Tensor>& query, Changed<Tensor>& key, const Tensor& cos, const Tensor& sin, int64_t layout,
       const std::string& mode)) {
  apply_rotary(query, key, cos, sin, layout, mode_named(mode));
}

ACLNN(InterleaveRope, streaming(), (const Tensor& x, const Tensor& cos, const Tensor& sin, Tensor& out)) {
  rotate(x, cos, sin, kInterleaveHalf, out);
}
