// What a collective, or messages of two ranks each, cost and touch.
#pragma once

#include <vector>

#include "hccl/calls.h"
#include "work.h"

namespace sim::hccl {

// Of HCCL's function `name`: it reads the first of two buffers and writes the second; the largest has all bytes.
Account account_of(const char* name, const Communicator& communicator, const std::vector<Buffer>& buffers);
Account account_of(const Communicator& communicator, const std::vector<Message>& messages);

}  // namespace sim::hccl
