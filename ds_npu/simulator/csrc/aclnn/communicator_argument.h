// What operators need that are fused with a collective: their communicator, and memory for what travels.
#pragma once

#include "aclnn/operator.h"
#include "hccl/account.h"
#include "hccl/collectives.h"

namespace sim {

// The communicator of that name and the operator's place among its calls, which it takes when it is launched.
struct CommunicatorArgument {
  std::shared_ptr<hccl::Communicator> communicator;
  std::uint64_t sequence = 0;
  void meet() const { hccl::barrier(*communicator, sequence); }
  std::string launched() {
    sequence = communicator->reserve();
    return hccl::told(*communicator, sequence);
  }
};

template <>
struct Argument<const CommunicatorArgument&> {
  using C = const char*;
  using Kept = CommunicatorArgument;
  static Kept keep(C name) {
    if (name == nullptr) missing_argument("the communicator's name");
    return {hccl::communicator_named(name)};
  }
};

[[noreturn]] inline void not_supported(const std::string& what) { throw Failure(ACL_ERROR_API_NOT_SUPPORT, what); }

inline HcclDataType hccl_type(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf ? HCCL_DATA_TYPE_FP16 : HCCL_DATA_TYPE_BFP16;
}

inline void check_halves(const Tensor& x1, const Tensor& x2) {
  if ((x1.scalar_type() != at::kHalf && x1.scalar_type() != at::kBFloat16) || x2.scalar_type() != x1.scalar_type())
    not_supported(std::string("CANN multiplies two fp16 or two bf16 matrices here, not ") + c10::toString(x1.scalar_type()) +
                  " and " + c10::toString(x2.scalar_type()));
}

// Device memory for the duration of an operator. It belongs to the communicator's buffers, so it is not counted again.
class Scratch {
 public:
  Scratch(const CommunicatorArgument& group, const Tensor& like, IntArrayRef sizes)
      : memory_(group.communicator->device().memory()),
        address_(memory_.reserve(static_cast<std::size_t>(c10::multiply_integers(sizes)) * like.element_size())),
        tensor_(at::from_blob(address_, sizes, at::TensorOptions(like.scalar_type()))) {}
  ~Scratch() { memory_.unreserve(address_); }
  Scratch(const Scratch&) = delete;
  Tensor& tensor() { return tensor_; }

 private:
  Memory& memory_;
  void* address_;
  Tensor tensor_;
};

}  // namespace sim
