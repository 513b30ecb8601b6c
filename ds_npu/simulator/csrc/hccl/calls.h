// From a function of HCCL to the task on the stream.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "acl/acl.h"
#include "hccl/communicator.h"
#include "hccl/messages.h"

namespace sim::hccl {

struct Buffer {
  const void* address;
  std::uint64_t bytes;
};

// Checks the buffers and puts `collective` on the stream as the communicator's next call.
using Collective = std::function<void(Communicator&, std::uint64_t sequence)>;
void enqueue(const char* name, const std::shared_ptr<Communicator>& communicator, aclrtStream stream,
             const std::vector<Buffer>& buffers, Collective collective);

// Checks the messages, numbers them and puts them on the stream together; within a group, at its end.
void enqueue(const char* name, const std::shared_ptr<Communicator>& communicator, aclrtStream stream,
             std::vector<Message> messages);

void begin_group();
void end_group();

}  // namespace sim::hccl
