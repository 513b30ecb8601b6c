// Another rank of a communicator: its process, and its device memory in this process's addresses.
#pragma once

#include <cstdint>
#include <memory>

#include "hccl/process.h"
#include "hccl/segment.h"

namespace sim::hccl {

class Peer {
 public:
  // The rank has registered itself in `slot`.
  explicit Peer(const Slot& slot);

  bool exited() const { return process_ && process_->exited(); }
  const ProcessId& id() const { return id_; }
  char* at(std::uint64_t offset) const { return base_ + offset; }

 private:
  const ProcessId id_;
  std::shared_ptr<Process> process_;  // none for this one
  std::shared_ptr<Mapping> memory_;   // none for a device of this process
  char* base_;
};

}  // namespace sim::hccl
