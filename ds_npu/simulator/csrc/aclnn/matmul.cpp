// Products of matrices and vectors, and the solution of triangular systems.
#include "aclnn/precision.h"

using namespace sim;

static void check(const Tensor& a, const Tensor& b, int8_t cube_math_type) {
  enum { keep_dtype = 0, allow_fp32_down_precision = 1, grouped_accumulation = 4 };
  for (const Tensor& operand : {a, b}) {
    const ScalarType type = operand.scalar_type();
    if (type != at::kFloat && !at::isReducedFloatingType(type))
      throw Failure(ACL_ERROR_INVALID_PARAM, std::string("the cube unit does not multiply ") + at::toString(type));
  }
  // Options that allow less precision or ask for a finer order of sums: full float32 satisfies both.
  const bool known = cube_math_type == keep_dtype || cube_math_type == allow_fp32_down_precision ||
                     cube_math_type == grouped_accumulation;
  if (!known)
    throw Failure(ACL_ERROR_API_NOT_SUPPORT, "cubeMathType " + std::to_string(cube_math_type) + " is not simulated");
}

// out = a @ b for two matrices, or for two batches of matrices of the same length. It is summed in float32, as in the cube
// unit: without avx512_bf16, ATen's own products of bf16 and fp16 on a CPU take up to 40 times as long.
static void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
  write_as(at::kFloat, out, [&](Tensor& target) {
    const Tensor left = a.to(at::kFloat), right = b.to(at::kFloat);
    if (left.dim() == 2) {
      at::mm_out(target, left, right);
    } else {
      at::bmm_out(target, left, right);
    }
  });
}

// The batch dims of `tensor` broadcast to `batch` and folded into one.
static Tensor folded(const Tensor& tensor, IntArrayRef batch) {
  Ints sizes = batch.vec();
  sizes.insert(sizes.end(), tensor.sizes().end() - 2, tensor.sizes().end());
  return tensor.expand(sizes).reshape({c10::multiply_integers(batch), tensor.size(-2), tensor.size(-1)});
}

// torch.matmul: a vector is a row on the left and a column on the right, batch dims broadcast.
static void multiply_any(const Tensor& out, const Tensor& a, const Tensor& b) {
  if (a.dim() == 1) return multiply_any(b.dim() == 1 ? out.unsqueeze(0) : out.unsqueeze(-2), a.unsqueeze(0), b);
  if (b.dim() == 1) return multiply_any(out.unsqueeze(-1), a, b.unsqueeze(1));
  if (a.dim() == 2 && b.dim() == 2) return multiply(out, a, b);
  const Tensor room = out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
  if (b.dim() == 2) {
    const int64_t rows = c10::multiply_integers(a.sizes().slice(0, a.dim() - 1));
    multiply(room.view({rows, out.size(-1)}), a.reshape({rows, a.size(-1)}), b);
  } else {
    const IntArrayRef batch = out.sizes().slice(0, out.dim() - 2);
    multiply(room.view({c10::multiply_integers(batch), out.size(-2), out.size(-1)}), folded(a, batch), folded(b, batch));
  }
  if (!room.is_same(out)) out.copy_(room);
}

// out = beta * self + alpha * product, where `combine(target, self, a, b)` is that for operands in float32.
template <class Combine>
static void add_product(const Tensor& out, const Tensor& self, const Tensor& a, const Tensor& b, Combine&& combine) {
  write_as(at::kFloat, out, [&](Tensor& target) { combine(target, self.to(at::kFloat), a.to(at::kFloat), b.to(at::kFloat)); });
}

static void add_matrix_product(const Tensor& out, const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
                               const Scalar& alpha, int8_t cube_math_type) {
  check(a, b, cube_math_type);
  add_product(out, self, a, b, [&](Tensor& target, const Tensor& term, const Tensor& left, const Tensor& right) {
    at::addmm_out(target, term, left, right, beta, alpha);
  });
}

static void matmul(const Tensor& out, const Tensor& a, const Tensor& b, int8_t cube_math_type) {
  check(a, b, cube_math_type);
  multiply_any(out, a, b);
}

ACLNN(Matmul, product(self, mat2, out), (const Tensor& self, const Tensor& mat2, Tensor& out, int8_t cube_math_type)) {
  matmul(out, self, mat2, cube_math_type);
}

ACLNN(Mm, product(self, mat2, out), (const Tensor& self, const Tensor& mat2, Tensor& out, int8_t cube_math_type)) {
  matmul(out, self, mat2, cube_math_type);
}

ACLNN(BatchMatMul, product(self, mat2, out), (const Tensor& self, const Tensor& mat2, Tensor& out, int8_t cube_math_type)) {
  matmul(out, self, mat2, cube_math_type);
}

ACLNN(Mv, product(self, vec, out), (const Tensor& self, const Tensor& vec, Tensor& out, int8_t cube_math_type)) {
  matmul(out, self, vec, cube_math_type);
}

ACLNN(Dot, streaming(), (const Tensor& self, const Tensor& tensor, Tensor& out)) {
  const Tensor a = wide(self), b = wide(tensor);
  write_as(a.scalar_type(), out, [&](Tensor& target) { at::dot_out(target, a, b); });
}

ACLNN(Addmm, product(mat1, mat2, out),
      (const Tensor& self, const Tensor& mat1, const Tensor& mat2, const Scalar& beta, const Scalar& alpha, Tensor& out,
       int8_t cube_math_type)) {
  add_matrix_product(out, self, mat1, mat2, beta, alpha, cube_math_type);
}

ACLNN(InplaceAddmm, product(mat1, mat2, self),
      (Changed<Tensor>& self, const Tensor& mat1, const Tensor& mat2, const Scalar& beta, const Scalar& alpha,
       int8_t cube_math_type)) {
  add_matrix_product(self, self, mat1, mat2, beta, alpha, cube_math_type);
}

ACLNN(Addmv, product(mat, vec, out),
      (const Tensor& self, const Tensor& mat, const Tensor& vec, const Scalar& alpha, const Scalar& beta, Tensor& out,
       int8_t cube_math_type)) {
  check(mat, vec, cube_math_type);
  add_product(out, self, mat, vec, [&](Tensor& target, const Tensor& term, const Tensor& left, const Tensor& right) {
    at::addmv_out(target, term, left, right, beta, alpha);
  });
}

ACLNN(Baddbmm, product(batch1, batch2, out),
      (const Tensor& self, const Tensor& batch1, const Tensor& batch2, const Scalar& beta, const Scalar& alpha, Tensor& out,
       int8_t cube_math_type)) {
  check(batch1, batch2, cube_math_type);
  add_product(out, self, batch1, batch2, [&](Tensor& target, const Tensor& term, const Tensor& a, const Tensor& b) {
    at::baddbmm_out(target, term, a, b, beta, alpha);
  });
}

ACLNN(Addbmm, products(out.size(0), out.size(1), batch1.size(0) * batch1.size(2), batch1.element_size(), 1),
      (const Tensor& self, const Tensor& batch1, const Tensor& batch2, const Scalar& beta, const Scalar& alpha, Tensor& out,
       int8_t cube_math_type)) {
  check(batch1, batch2, cube_math_type);
  add_product(out, self, batch1, batch2, [&](Tensor& target, const Tensor& term, const Tensor& a, const Tensor& b) {
    at::addbmm_out(target, term, a, b, beta, alpha);
  });
}

// out = beta * self + alpha * vec1 (x) vec2
static void add_outer_product(const Tensor& out, const Tensor& self, const Tensor& vec1, const Tensor& vec2,
                              const std::optional<Scalar>& beta, const std::optional<Scalar>& alpha) {
  write_as(wide_type(self.scalar_type()), out, [&](Tensor& target) {
    at::addr_out(target, wide(self), wide(vec1), wide(vec2), beta.value_or(1), alpha.value_or(1));
  });
}

ACLNN(Addr, streaming(),
      (const Tensor& self, const Tensor& vec1, const Tensor& vec2, const std::optional<Scalar>& beta,
       const std::optional<Scalar>& alpha, Tensor& out)) {
  add_outer_product(out, self, vec1, vec2, beta, alpha);
}

ACLNN(InplaceAddr, streaming(),
      (Changed<Tensor>& self, const Tensor& vec1, const Tensor& vec2, const std::optional<Scalar>& beta,
       const std::optional<Scalar>& alpha)) {
  add_outer_product(self, self, vec1, vec2, beta, alpha);
}

// A x = self with A triangular: half the FLOP of a product of A and self, which depend on each other row by row.
ACLNN(TriangularSolve, streaming(),
      (const Tensor& self, const Tensor& A, bool upper, bool transpose, bool unitriangular, Tensor& x, Tensor& m)) {
  const ScalarType type = self.scalar_type();
  if (type != at::kFloat && type != at::kDouble)
    throw Failure(ACL_ERROR_INVALID_PARAM, std::string("no triangular system is solved in ") + at::toString(type));
  const Tensor matrix = transpose ? A.mT() : A;
  x.copy_(at::linalg_solve_triangular(matrix, self, transpose ? !upper : upper, /*left=*/true, unitriangular));
  m.copy_(A);
}
