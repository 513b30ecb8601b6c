// One call of a collective as a rank publishes it to the others, who compare it with their own.
#pragma once

#include <cstdint>
#include <string>

#include "hccl/hccl_types.h"
#include "virtual_time.h"

namespace sim::hccl {

enum class Operation : std::uint32_t {
  all_reduce,
  all_gather,
  all_gather_v,
  reduce_scatter,
  reduce_scatter_v,
  broadcast,
  reduce,
  scatter,
  all_to_all,
  all_to_all_v,
  all_to_all_vc,
  barrier,
};

constexpr std::uint64_t kNowhere = ~std::uint64_t{0};  // the offset of an empty buffer

// A field that an operation does not have keeps its default, so that two calls agree when all fields but the buffers and the
// times do.
struct Call {
  Operation operation = Operation::barrier;
  HcclDataType type = HCCL_DATA_TYPE_RESERVED;
  HcclReduceOp reduction = HCCL_REDUCE_RESERVED;
  std::uint32_t root = ~0u;
  std::uint64_t count = 0;  // elements; of an operation with counts for each peer: 0
  std::uint64_t send = kNowhere;     // offset in the rank's device memory, bytes
  std::uint64_t receive = kNowhere;
  // Virtual time, in which ranks differ: when this rank is ready, and how long it takes.
  Nanoseconds ready = 0, duration = 0;
  bool known = true;  // what it sends, in a dry run
};

bool agree(const Call& one, const Call& other);

// As "all_reduce(sum, 1024 x fp32)".
std::string describe(const Call& call);

std::string name_of(HcclDataType type);

// Throws Failure HCCL_E_NOT_SUPPORT.
std::uint64_t bytes_of(HcclDataType type);

}  // namespace sim::hccl
