// Streams and events. Each stream is a thread that takes tasks off its own queue; what orders two streams is an event
// that one records and the other waits for, and nothing else.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "device.h"
#include "foreign.h"
#include "host.h"
#include "machine.h"
#include "timeout.h"
#include "virtual_time.h"
#include "work.h"

namespace sim {

class Moment;

// What a stream does, one after the other.
struct Task {
  const char* name;  // says in an error what was running; outlives the task
  std::function<void()> work;
  std::string detail{};   // for the trace
  Account account{};      // what it costs and touches
  Dispatch dispatch = Dispatch::kOperator;
  bool computes = false;          // in a dry run its work is done only where it is known: known_bytes.h
  std::function<void()> unknown{};  // is done in place of its work where it is not; may be empty
  bool is_foreign = false;        // ends only when other ranks, or a callback of the host, have done something
  bool always = false;            // runs also on a failed device: events, so that whoever waits gets to see the failure
  bool marks_end = false;         // has no work of its own: a stream with nothing else before it is idle
  std::function<bool()> ready{};  // of a task that waits: whether it would not
  // Set by the stream.
  std::uint64_t place{};    // as Span's
  Nanoseconds launched{};
  Foreign foreign{};  // before it, itself included
  std::string stack{};  // where in Python it was put there, for the search for races
};

class Stream {
 public:
  explicit Stream(Device& device);
  ~Stream();  // after the last task
  Stream(const Stream&) = delete;

  Device& device() { return device_; }
  int id() const { return id_; }

  // Puts a task at the end of the queue, where it waits for room: a stream holds as many tasks as the machine says, and
  // with chaos any number. If its work throws, the device has failed: Device::fail.
  void push(Task task);

  // Throws the device's failure, or ACL_ERROR_RT_STREAM_SYNC_TIMEOUT.
  void synchronize(Timeout timeout = {});
  // Whether the stream has done all, as Moment::query tells it.
  bool query();

  // The stream whose thread this is, or nullptr.
  static Stream* of_this_thread();

  // Virtual time, in the work of a task: when the task begins, and how long it takes at least; it ends after that.
  Nanoseconds begun() const { return begun_; }
  Nanoseconds duration() const { return duration_; }
  void begin_at(Nanoseconds earliest) { begun_ = std::max(begun_, earliest); }
  void take(Nanoseconds least) { duration_ = std::max(duration_, least); }
  Nanoseconds end() const { return begun_ + duration_; }

  // For Chaos: whether the next task waits for nothing; whether one that gave up its turn wants it back.
  bool next_is_ready();
  void set_resuming(bool resuming) { resuming_ = resuming; }

 private:
  friend class Moment;
  void run();
  Nanoseconds await_room(std::unique_lock<std::mutex>& lock);
  void perform(Task& task);

  Device& device_;
  const int id_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Task> queue_;
  Foreign foreign_;  // before whatever is put on the stream next
  bool busy_ = false;
  bool closing_ = false;
  struct Ended {
    Nanoseconds time;
    Foreign foreign;
  };
  std::size_t free_ = machine().stream_tasks;  // places that no task has had yet
  std::deque<Ended> ended_{};                  // the tasks whose places are free again
  std::condition_variable room_;
  std::atomic<bool> resuming_{false};
  // Of the task that runs, or ran last; the stream's thread alone uses them.
  Nanoseconds begun_ = 0, duration_ = 0;
  std::thread worker_;
};

// A point in a stream's queue: reached when everything before it has been done.
class Moment {
 public:
  static std::shared_ptr<Moment> recorded_on(Stream& stream, Dispatch dispatch = Dispatch::kNone);

  // Whatever `stream` is given from now on comes after `moment`.
  static void wait(const std::shared_ptr<Moment>& moment, Stream& stream);

  bool reached();
  // For the host; throws the device's failure, or ACL_ERROR_RT_STREAM_SYNC_TIMEOUT.
  void synchronize(Timeout timeout = {});
  // What a host that asks is told. A thread that keeps the host's time: whether the moment's time has come, for which it
  // waits until that is known; behind tasks of other ranks it is not before the host has waited for those. Asking costs no
  // time, so one that asks in a loop is told when the moment is reached, and has waited. Other threads, and with chaos:
  // whether it has been reached.
  bool query();
  Nanoseconds time();  // at which it was reached
  Device& device() { return device_; }

 private:
  explicit Moment(Stream& stream);
  void reach();
  void await();
  void await_reached();
  void end_host_waits();
  void seen(const char* name, Nanoseconds begun);
  std::string detail() const;

  Device& device_;
  const std::uint64_t number_;
  const Foreign foreign_;  // before it
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  int host_waits_ = 0;
  Nanoseconds time_ = 0;
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

// The host does something itself, such as a copy, which takes what `account` says of it.
void on_host(const char* name, const Account& account);

// The stream behind a handle; a null handle is the current device's default stream.
Stream& stream_of(void* handle);

}  // namespace sim
