// Random numbers. Each operator gets a seed and an offset, and what it draws is a function of these two alone.
#include <ATen/CPUGeneratorImpl.h>

#include "aclnn/operator.h"
#include "aclnn/random.h"

using namespace sim;

static at::Generator generator(uint64_t seed, uint64_t offset);

ACLNN(InplaceUniform, (Tensor& self, double from, double to, uint64_t seed, uint64_t offset)) {
  self.uniform_(from, to, generator(seed, offset));
}

ACLNN(InplaceNormal, (Tensor& self, float mean, float deviation, int64_t seed, int64_t offset)) {
  self.normal_(mean, deviation, generator(seed, offset));
}
ACLNN(NormalFloatFloat, (float mean, float deviation, int64_t seed, int64_t offset, Tensor& out)) {
  out.normal_(mean, deviation, generator(seed, offset));
}
ACLNN(NormalFloatTensor, (float mean, const Tensor& deviation, int64_t seed, int64_t offset, Tensor& out)) {
  at::normal_out(out, mean, deviation, generator(seed, offset));
}
ACLNN(NormalTensorFloat, (const Tensor& mean, float deviation, int64_t seed, int64_t offset, Tensor& out)) {
  at::normal_out(out, mean, deviation, generator(seed, offset));
}
ACLNN(NormalTensorTensor, (const Tensor& mean, const Tensor& deviation, int64_t seed, int64_t offset, Tensor& out)) {
  at::normal_out(out, mean, deviation, generator(seed, offset));
}

ACLNN(InplaceRandom, (Tensor& self, int64_t from, int64_t to, int64_t seed, int64_t offset)) {
  self.random_(from, to, generator(seed, offset));
}
ACLNN(Randperm, (int64_t n, int64_t seed, int64_t offset, Tensor& out)) {
  at::randperm_out(out, n, generator(seed, offset));
}

ACLNN(InplaceBernoulli, (Tensor& self, const Scalar& probability, int64_t seed, int64_t offset)) {
  self.bernoulli_(probability.toDouble(), generator(seed, offset));
}
ACLNN(InplaceBernoulliTensor, (Tensor& self, const Tensor& probability, int64_t seed, int64_t offset)) {
  self.bernoulli_(probability, generator(seed, offset));
}
ACLNN(Multinomial, (const Tensor& self, int64_t samples, bool replacement, int64_t seed, int64_t offset, Tensor& out)) {
  at::multinomial_out(out, self, samples, replacement, generator(seed, offset));
}

// ATen's generator takes the low 32 bits of its seed. 2^32 offsets of one seed give different seeds, since the
// offset goes through a permutation.
static at::Generator generator(uint64_t seed, uint64_t offset) {
  auto bits = static_cast<uint32_t>(mixed(seed, offset >> 32)) + static_cast<uint32_t>(offset);
  bits = (bits ^ (bits >> 16)) * 0x85ebca6bU;
  bits = (bits ^ (bits >> 13)) * 0xc2b2ae35U;
  return at::detail::createCPUGenerator(bits ^ (bits >> 16));
}
