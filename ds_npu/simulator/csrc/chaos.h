// `ds_npu sim --chaos SEED`: an order of a device's tasks that the seed decides, among all that events allow.
//
// The device runs nothing until the host waits for it. Then one stream at a time runs one task. Priorities drawn from the
// seed choose the stream; they are drawn again now and then, so that a stream falls far behind or runs far ahead. A program
// that lacks a wait for an event, or a record_stream, computes a wrong number, and the same one in each run: in one process
// the order is a function of the program and the seed. (A collective waits for other processes; meanwhile other streams run,
// and how far they get depends on time.)
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

  // A stream's thread calls them around each task: wait for the stream's turn, end the turn.
  void begin_turn(Stream& stream);
  void end_turn();

  // The host has put a task on a stream; begins to wait for the device; has finished waiting. None of them takes a lock.
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

// During its lifetime other streams may run while this thread's task waits for another process.
class WithoutTurn {
 public:
  WithoutTurn();
  ~WithoutTurn();
  WithoutTurn(const WithoutTurn&) = delete;

 private:
  Stream* const stream_;
};

}  // namespace sim
