// Messages from one rank to one other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hccl/communicator.h"

namespace sim::hccl {

struct Message {
  bool sends;
  std::uint32_t peer;
  std::uint64_t number = 0;  // among those from this rank to the peer, or from the peer to it: Communicator::reserve_send
  void* buffer;
  std::uint64_t count;
  HcclDataType type;
};

// As "send number 3 to rank 1, 1024 x bf16".
std::string describe(const Message& message);

// Sends and receives all of them in any order; returns when every receiver has its message.
void transfer(Communicator& communicator, std::vector<Message> messages);

}  // namespace sim::hccl
