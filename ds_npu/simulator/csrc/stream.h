// Streams and events. Each stream is a thread that takes tasks off its own queue; what orders two streams is an event
// that one records and the other waits for, and nothing else.
#pragma once

#include <condition_variable>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "chaos.h"
#include "device.h"
#include "timeout.h"

namespace sim {

class Event;

class Stream {
 public:
  explicit Stream(Device& device);
  ~Stream();  // after the last task
  Stream(const Stream&) = delete;

  Device& device() { return device_; }
  int id() const { return id_; }

  // Puts `work` at the end of the queue. If it throws, the device has failed: Device::fail.
  // `name` says in that error what was running; it must outlive the task.
  void push(const char* name, std::function<void()> work);

  // Throws the device's failure, or ACL_ERROR_RT_STREAM_SYNC_TIMEOUT.
  void synchronize(Timeout timeout = {});
  bool idle();

  // From the host's point of view, for chaos: how many tasks have been done.
  std::uint64_t done() const { return done_.load(std::memory_order_relaxed); }

 private:
  friend class Event;
  struct Task {
    const char* name;
    std::function<void()> work;
    bool always;  // also on a failed device: events, so that whoever waits gets to see the failure
  };
  void enqueue(Task task);
  void run();
  void perform(Task& task);

  Device& device_;
  const int id_;
  Chaos chaos_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Task> queue_;
  bool busy_ = false;
  bool closing_ = false;
  std::atomic<std::uint64_t> done_{0};
  std::thread worker_;
};

// As aclrtEvent: what was recorded last is what is waited for; an event never recorded is complete.
class Event {
 public:
  static void record(const std::shared_ptr<Event>& event, Stream& stream);
  static void wait(const std::shared_ptr<Event>& event, Stream& stream);
  bool complete();
  void synchronize(Timeout timeout = {});
  void throw_if_failed();     // if the device that was to reach it has
  Clock::time_point time();  // of the last record that is complete

 private:
  void await(std::uint64_t ticket, Timeout timeout);

  std::mutex mutex_;
  std::condition_variable reached_;
  std::uint64_t recorded_ = 0;
  std::uint64_t completed_ = 0;
  Clock::time_point time_{};
  Device* device_ = nullptr;
};

// The stream behind a handle; a null handle is the current device's default stream.
Stream& stream_of(void* handle);

}  // namespace sim
