#include "device.h"

#include <algorithm>

#include "acl/acl_base.h"
#include "acl/error_codes/rt_error_codes.h"
#include "chaos.h"
#include "failure.h"
#include "settings.h"
#include "stream.h"

namespace sim {
namespace {

// Never destroyed: streams may still be running when the process leaves main.
std::vector<std::unique_ptr<Device>>& devices() {
  static auto* all = [] {
    auto* made = new std::vector<std::unique_ptr<Device>>;
    const int count = static_cast<int>(settings().devices.size());
    for (int i = 0; i < count; ++i) made->push_back(std::make_unique<Device>(i));
    return made;
  }();
  return *all;
}

thread_local int current = -1;

}  // namespace

Device::Device(int index)
    : index_(index),
      memory_(index),
      chaos_(settings().chaos ? std::make_unique<Chaos>(*this, *settings().chaos) : nullptr) {}

Device::~Device() = default;

Stream& Device::default_stream() {
  {
    const std::scoped_lock lock(mutex_);
    if (default_stream_) return *default_stream_;
  }
  auto made = std::make_unique<Stream>(*this);
  const std::scoped_lock lock(mutex_);
  if (!default_stream_) default_stream_ = std::move(made);
  return *default_stream_;
}

void Device::add(Stream* stream) {
  const std::scoped_lock lock(mutex_);
  streams_.push_back(stream);
}

void Device::remove(Stream* stream) {
  const std::scoped_lock lock(mutex_);
  std::erase(streams_, stream);
}

void Device::each_stream(const std::function<void(Stream&)>& visit) {
  const std::scoped_lock lock(mutex_);
  for (Stream* stream : streams_) visit(*stream);
}

void Device::synchronize(Timeout timeout) {
  std::vector<std::shared_ptr<Moment>> ends;
  each_stream([&](Stream& stream) { ends.push_back(Moment::recorded_on(stream)); });
  for (const auto& end : ends) end->synchronize(timeout);
  throw_if_failed();
}

void Device::fail(int code, std::string message) {
  const std::scoped_lock lock(mutex_);
  if (failed()) return;
  code_ = code;
  message_ = "simulated NPU " + std::to_string(index_) + " stopped in " + std::move(message);
  failed_.store(true, std::memory_order_release);
}

bool Device::in_use() {
  const std::scoped_lock lock(mutex_);
  return !streams_.empty();
}

void Device::throw_if_failed() {
  if (!failed()) return;
  const std::scoped_lock lock(mutex_);
  throw Failure(code_, message_);
}

Device& device(int index) {
  if (index < 0 || index >= static_cast<int>(devices().size()))
    throw Failure(ACL_ERROR_INVALID_DEVICE, "there is no device " + std::to_string(index) + " among the " +
                                                std::to_string(devices().size()) + " simulated NPUs");
  return *devices()[static_cast<std::size_t>(index)];
}

Device& current_device() {
  if (current < 0) throw Failure(ACL_ERROR_RT_CONTEXT_NULL, "aclrtSetDevice has not been called in this thread");
  return device(current);
}

Device& device_or_first() { return device(std::max(current, 0)); }

void set_current_device(int index) {
  device(index);
  current = index;
}

Device* device_of(const void* address) {
  for (const auto& one : devices())
    if (one->memory().contains(address)) return one.get();
  return nullptr;
}

}  // namespace sim
