// What a collective, or messages of two ranks each, cost and touch, and what the trace says of the other ranks.
#pragma once

#include <string>
#include <vector>

#include "hccl/calls.h"
#include "work.h"

namespace sim::hccl {

// Of HCCL's function `name`: it reads the first of two buffers and writes the second; the largest has all bytes.
Account account_of(const char* name, const Communicator& communicator, std::uint64_t sequence,
                   const std::vector<Buffer>& buffers);
Account account_of(const Communicator& communicator, const std::vector<Message>& messages);


// "communicator", "npus" and "rank" of a task; with a sequence also the "call".
std::string told(const Communicator& communicator, std::uint64_t sequence);

}  // namespace sim::hccl
