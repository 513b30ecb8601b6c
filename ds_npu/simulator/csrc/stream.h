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
#include <vector>

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

  // The stream whose thread this is, or nullptr.
  static Stream* of_this_thread();

  // For Chaos: whether the next task waits for nothing; whether one that gave up its turn wants it back.
  bool next_is_ready();
  void set_resuming(bool resuming) { resuming_ = resuming; }

 private:
  friend class Event;
  struct Task {
    const char* name;
    std::function<void()> work;
    bool always;                   // also on a failed device: events, so that whoever waits gets to see the failure
    std::function<bool()> ready{};  // for a task that waits: whether it would not
  };
  void enqueue(Task task);
  void run();
  void perform(Task& task);

  Device& device_;
  const int id_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Task> queue_;
  bool busy_ = false;
  bool closing_ = false;
  std::atomic<bool> resuming_{false};
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
  void await(std::uint64_t ticket);
  void reach(std::uint64_t ticket);
  bool reached(std::uint64_t ticket);
  void end_host_waits(std::uint64_t up_to);

  std::mutex mutex_;
  std::condition_variable reached_;
  std::uint64_t recorded_ = 0;
  std::uint64_t completed_ = 0;
  Clock::time_point time_{};
  Device* device_ = nullptr;
  std::vector<std::uint64_t> host_waits_;  // tickets that host threads wait for
};

// The stream behind a handle; a null handle is the current device's default stream.
Stream& stream_of(void* handle);

}  // namespace sim
