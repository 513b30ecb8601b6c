// `ds_npu sim --chaos SEED`: an order of a device's tasks that the seed decides, among all that events allow.
//
// The device is as slow as it may be: it does nothing until the host waits for it. Then one stream at a time does one task;
// which one, the seed's priorities say, drawn anew now and then, so that a stream falls far behind or runs far ahead. A
// program that has forgotten to wait for an event, or to record a stream, gets a wrong number, and the same one each time:
// with one process, the order is a function of the program and the seed. (Collectives wait for other processes; they let the
// other streams go on, and how far depends on time.)
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>

#include "timeout.h"

namespace sim {

class Device;
class Stream;

class Chaos {
 public:
  Chaos(Device& device, std::uint64_t seed);

  // For a stream's thread, around each task: waits for its turn, and gives it back.
  void begin_turn(Stream& stream);
  void end_turn();

  // The host put a task on a stream; begins to wait for the device; has got what it waited for. None of them takes a lock.
  void enqueued();
  void host_waits();
  void host_goes_on();

 private:
  bool device_may_run() const;
  Stream* highest_ready();
  std::uint64_t random();

  Device& device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t state_;
  std::map<int, std::uint64_t> priorities_;  // by the streams' ids
  Stream* chosen_ = nullptr;
  bool turn_taken_ = false;
  std::atomic<int> waiting_hosts_{0};
  std::atomic<Clock::time_point> last_enqueued_{Clock::time_point{}};
};

// While it lives, the stream whose task runs in this thread has no turn: for a task that waits for another process.
class WithoutTurn {
 public:
  WithoutTurn();
  ~WithoutTurn();
  WithoutTurn(const WithoutTurn&) = delete;

 private:
  Stream* const stream_;
};

}  // namespace sim
