#include "hccl/peer.h"

#include <unistd.h>

#include <map>
#include <mutex>
#include <utility>

#include "device.h"

namespace sim::hccl {
namespace {

// The whole range of a device is mapped, 16 times its capacity: once, however many communicators have the same peers.
std::shared_ptr<Mapping> memory_of(const Slot& slot) {
  static std::mutex mutex;
  static auto* known = new std::map<std::pair<ProcessId, int>, std::weak_ptr<Mapping>>;
  const std::scoped_lock lock(mutex);
  auto& kept = (*known)[{slot.process, slot.device}];
  if (auto mapping = kept.lock()) return mapping;
  const int file = open_file_of(slot.process.pid, slot.memory_file);
  std::shared_ptr<Mapping> mapping;
  try {
    mapping = std::make_shared<Mapping>(file, slot.memory_span);
  } catch (...) {
    close(file);
    throw;
  }
  close(file);
  kept = mapping;
  return mapping;
}

}  // namespace

Peer::Peer(const Slot& slot) : id_(slot.process) {
  if (id_ == ProcessId::own()) {
    base_ = device(slot.device).memory().base();
    return;
  }
  process_ = std::make_shared<Process>(id_);
  memory_ = memory_of(slot);
  base_ = memory_->base();
}

}  // namespace sim::hccl
