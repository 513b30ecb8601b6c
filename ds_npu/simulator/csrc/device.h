// One simulated NPU as this process sees it: its memory, its streams, and the first error that stopped it.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memory.h"
#include "timeout.h"

namespace sim {

class Chaos;
class Stream;

class Device {
 public:
  explicit Device(int index);
  ~Device();

  int index() const { return index_; }
  Memory& memory() { return memory_; }
  Chaos* chaos() { return chaos_.get(); }  // nullptr: streams run without an imposed order

  // Waits until all streams are empty; throws the device's failure.
  void synchronize(Timeout timeout = {});

  Stream& default_stream();
  void add(Stream* stream);
  void remove(Stream* stream);
  void each_stream(const std::function<void(Stream&)>& visit);

  // After the first failed task nothing more is computed on the device, and every wait for it throws this failure.
  void fail(int code, std::string message);
  bool in_use();  // has streams
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void throw_if_failed();

 private:
  const int index_;
  Memory memory_;
  const std::unique_ptr<Chaos> chaos_;
  std::mutex mutex_;
  std::vector<Stream*> streams_;
  std::unique_ptr<Stream> default_stream_;
  std::atomic<bool> failed_{false};
  int code_ = 0;
  std::string message_;
};

// The device of aclrtSetDevice in this thread; throws before the first call, and on an index that does not exist.
Device& current_device();
Device& device_or_first();  // the same, or device 0
Device& device(int index);
void set_current_device(int index);

// The device whose memory holds `address`, or nullptr: then it is host memory.
Device* device_of(const void* address);

// Of each device, by its SoC.
int64_t vector_cores();

}  // namespace sim
