// Random numbers and dropout. Each operator gets a seed and an offset, and what it draws is a function of these two
// alone.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include <cmath>

#include "aclnn/operator.h"
#include "aclnn/random.h"

using namespace sim;

static at::Generator generator(uint64_t seed, uint64_t offset);

ACLNN(InplaceUniform, streaming(), (Tensor& self, double from, double to, uint64_t seed, uint64_t offset)) {
  self.uniform_(from, to, generator(seed, offset));
}

ACLNN(InplaceNormal, streaming(), (Tensor& self, float mean, float deviation, int64_t seed, int64_t offset)) {
  self.normal_(mean, deviation, generator(seed, offset));
}
ACLNN(NormalFloatFloat, streaming(), (float mean, float deviation, int64_t seed, int64_t offset, Tensor& out)) {
  out.normal_(mean, deviation, generator(seed, offset));
}
ACLNN(NormalFloatTensor, streaming(), (float mean, const Tensor& deviation, int64_t seed, int64_t offset, Tensor& out)) {
  at::normal_out(out, mean, deviation, generator(seed, offset));
}
ACLNN(NormalTensorFloat, streaming(), (const Tensor& mean, float deviation, int64_t seed, int64_t offset, Tensor& out)) {
  at::normal_out(out, mean, deviation, generator(seed, offset));
}
ACLNN(NormalTensorTensor, streaming(),
      (const Tensor& mean, const Tensor& deviation, int64_t seed, int64_t offset, Tensor& out)) {
  at::normal_out(out, mean, deviation, generator(seed, offset));
}

ACLNN(InplaceRandom, streaming(), (Tensor& self, int64_t from, int64_t to, int64_t seed, int64_t offset)) {
  self.random_(from, to, generator(seed, offset));
}
ACLNN(Randperm, streaming(), (int64_t n, int64_t seed, int64_t offset, Tensor& out)) {
  at::randperm_out(out, n, generator(seed, offset));
}

ACLNN(InplaceBernoulli, streaming(), (Tensor& self, const Scalar& probability, int64_t seed, int64_t offset)) {
  self.bernoulli_(probability.toDouble(), generator(seed, offset));
}
ACLNN(InplaceBernoulliTensor, streaming(), (Tensor& self, const Tensor& probability, int64_t seed, int64_t offset)) {
  self.bernoulli_(probability, generator(seed, offset));
}
ACLNN(Multinomial, streaming(),
      (const Tensor& self, int64_t samples, bool replacement, int64_t seed, int64_t offset, Tensor& out)) {
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

// Dropout with a mask of one bit per element: element i is bit i % 8 of byte i / 8, and 1 keeps it. The size of a
// mask is rounded up to 128 elements.

template <class T>
static void keep(const T* from, const uint8_t* mask, double probability, T* to, int64_t count);

// Bits of elements beyond the shape are drawn too; nothing reads them.
ACLNN(DropoutGenMaskV2, streaming(),
      (const Ints& shape, double probability, int64_t seed, int64_t offset, ScalarType, Tensor& out)) {
  if (out.numel() * 8 < c10::multiply_integers(shape))
    throw Failure(ACL_ERROR_INVALID_PARAM, "the mask has fewer bits than the shape has elements");
  const auto key = mixed(static_cast<uint64_t>(seed), static_cast<uint64_t>(offset));
  const auto dropped = static_cast<uint64_t>(std::ldexp(probability, 32));  // of the 2^32 values of 32 random bits
  auto* bytes = out.data_ptr<uint8_t>();
  for (int64_t i = 0; i < out.numel(); ++i) {
    unsigned byte = 0;
    for (unsigned pair = 0; pair < 4; ++pair) {
      const uint64_t bits = random_bits(key, static_cast<uint64_t>(i) * 4 + pair);
      byte |= static_cast<unsigned>((bits & 0xffffffff) >= dropped) << (2 * pair);
      byte |= static_cast<unsigned>((bits >> 32) >= dropped) << (2 * pair + 1);
    }
    bytes[i] = static_cast<uint8_t>(byte);
  }
}

ACLNN(DropoutDoMask, streaming(), (const Tensor& self, const Tensor& mask, double probability, Tensor& out)) {
  if (mask.numel() * 8 < self.numel())
    throw Failure(ACL_ERROR_INVALID_PARAM, "the mask has fewer bits than the tensor has elements");
  const Tensor from = self.contiguous();
  Tensor to = out.is_contiguous() ? out : at::empty_like(out, at::MemoryFormat::Contiguous);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), "aclnnDropoutDoMask", [&] {
    keep(from.const_data_ptr<scalar_t>(), mask.const_data_ptr<uint8_t>(), probability, to.data_ptr<scalar_t>(), from.numel());
  });
  if (!to.is_same(out)) out.copy_(to);
}

template <class T>
static void keep(const T* from, const uint8_t* mask, double probability, T* to, int64_t count) {
  using Wide = at::opmath_type<T>;
  const auto scale = probability < 1 ? static_cast<Wide>(1 / (1 - probability)) : Wide(0);
  for (int64_t i = 0; i < count; ++i) {
    const bool kept = (mask[i / 8] >> (i % 8)) & 1;
    to[i] = kept && scale != 0 ? static_cast<T>(static_cast<Wide>(from[i]) * scale) : T(0);
  }
}
