// This process's communicators, by handle and by name.
#include <algorithm>
#include <list>
#include <mutex>

#include "failure.h"
#include "hccl/communicator.h"

namespace sim::hccl {
namespace {

std::mutex mutex;

// The newest first. Never destroyed: torch destroys communicators while the process ends.
std::list<std::shared_ptr<Communicator>>& all() {
  static auto* communicators = new std::list<std::shared_ptr<Communicator>>;
  return *communicators;
}

auto find(HcclComm handle) {
  const auto found = std::ranges::find_if(all(), [&](const auto& one) { return one.get() == handle; });
  if (found == all().end()) throw Failure(HCCL_E_PARA, "this is not a communicator, or one that has been destroyed");
  return found;
}

}  // namespace

HcclComm handle_of(std::shared_ptr<Communicator> communicator) {
  const std::scoped_lock lock(mutex);
  all().push_front(std::move(communicator));
  return all().front().get();
}

std::shared_ptr<Communicator> communicator_of(HcclComm handle) {
  const std::scoped_lock lock(mutex);
  return *find(handle);
}

std::vector<std::shared_ptr<Communicator>> communicators() {
  const std::scoped_lock lock(mutex);
  return {all().begin(), all().end()};
}

void forget(HcclComm handle) {
  std::shared_ptr<Communicator> last;  // ends outside the lock
  const std::scoped_lock lock(mutex);
  const auto found = find(handle);
  last = *found;
  all().erase(found);
  last->close();
}

std::shared_ptr<Communicator> communicator_named(const std::string& name) {
  const Device& device = current_device();
  const std::scoped_lock lock(mutex);
  for (const auto& one : all())
    if (one->name() == name && &one->device() == &device) return one;
  throw Failure(HCCL_E_NOT_FOUND, "NPU " + std::to_string(device.index()) + " has no communicator named " + name);
}

}  // namespace sim::hccl
