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

#include "device.h"
#include "timeout.h"
#include "work.h"

namespace sim {

class Moment;

class Stream {
 public:
  explicit Stream(Device& device);
  ~Stream();  // after the last task
  Stream(const Stream&) = delete;

  Device& device() { return device_; }
  int id() const { return id_; }

  // Puts `work` at the end of the queue. If it throws, the device has failed: Device::fail.
  // `name` says in that error what was running; it must outlive the task. `detail` is for the trace, `account` says what the
  // task costs and touches.
  void push(const char* name, std::function<void()> work, std::string detail = {}, Account account = {});

  // Throws the device's failure, or ACL_ERROR_RT_STREAM_SYNC_TIMEOUT.
  void synchronize(Timeout timeout = {});
  bool idle();

  // The stream whose thread this is, or nullptr.
  static Stream* of_this_thread();

  // For Chaos: whether the next task waits for nothing; whether one that gave up its turn wants it back.
  bool next_is_ready();
  void set_resuming(bool resuming) { resuming_ = resuming; }

 private:
  friend class Moment;
  struct Task {
    const char* name;
    std::function<void()> work;
    bool always = false;            // also on a failed device: events, so that whoever waits gets to see the failure
    bool marks_end = false;         // has no work of its own: a stream with nothing else before it is idle
    std::string detail{};           // for the trace
    std::function<bool()> ready{};  // for a task that waits: whether it would not
    Account account{};
    std::uint64_t place{};          // as Span's
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

// A point in a stream's queue: reached when everything before it has been done.
class Moment {
 public:
  static std::shared_ptr<Moment> recorded_on(Stream& stream);

  // Whatever `stream` is given from now on comes after `moment`.
  static void wait(const std::shared_ptr<Moment>& moment, Stream& stream);

  bool reached();
  // For the host; throws the device's failure, or ACL_ERROR_RT_STREAM_SYNC_TIMEOUT.
  void synchronize(Timeout timeout = {});
  Clock::time_point time();  // at which it was reached
  Device& device() { return device_; }

 private:
  explicit Moment(Device& device);
  void reach();
  void await();
  void end_host_waits();
  std::string detail() const;

  Device& device_;
  const std::uint64_t number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  int host_waits_ = 0;
  Clock::time_point time_{};
};

// As aclrtEvent: stands for the moment at which it was recorded last, on whichever stream; complete before the first.
class Event {
 public:
  void record(Stream& stream);
  // Null before the first record.
  std::shared_ptr<Moment> last();

 private:
  std::mutex mutex_;
  std::shared_ptr<Moment> last_;
};

// The stream behind a handle; a null handle is the current device's default stream.
Stream& stream_of(void* handle);

}  // namespace sim
