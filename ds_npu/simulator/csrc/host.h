// The simulated host: when, in virtual time, its threads put tasks on streams.
//
// One clock a process. Its threads take turns (the main thread waits for autograd's), so each call that puts a task on a
// stream advances the one clock by what the profile says of its kind. With torch_npu's queue (TASK_QUEUE_ENABLE=1) another
// thread launches the tasks: each when it is dispatched, the one before it is launched and its stream has room; a dispatch
// waits where the queue has no room. A wait sets the clock to the time of what is waited for. Nothing here depends on how
// fast this machine is.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>

#include "virtual_time.h"

namespace sim {

// What a call that puts a task on a stream costs the host by: an operator called from Python, one of torch_npu's fused
// operators, an operator called by autograd's thread, a collective or message, the record or wait of an event; nothing.
enum class Dispatch { kOperator, kFused, kAutograd, kCollective, kEvent, kNone };

const char* name_of(Dispatch kind);

class Host {
 public:
  // Dispatches a task and launches it, not before `room`; returns the earliest time at which its stream can begin it.
  Nanoseconds launch(Dispatch kind, Nanoseconds room);
  // Nothing of the host goes on before `time`.
  void wait(Nanoseconds time);
  // The host does something else for so long.
  void spend(Nanoseconds time);
  Nanoseconds now();
  // How many tasks have been dispatched.
  std::uint64_t dispatched();

 private:
  std::mutex mutex_;
  Nanoseconds now_ = 0;
  Nanoseconds launched_ = 0;  // by the queue's thread
  std::uint64_t dispatched_ = 0;
  std::deque<Nanoseconds> queued_{};  // when the tasks were launched that were dispatched last, as many as the queue holds
};

Host& host();

// How this thread dispatches an operator that it prepares.
Dispatch dispatch_of(bool fused);
bool is_fused(const char* name);

// Whether this thread launches what others have dispatched: torch_npu's queue of tasks.
bool launches_for_others();

// Whether the host's clock is that of this thread: the main thread, one of autograd, or one that has prepared operators.
// Others (a watchdog) see what has really happened.
bool keeps_host_time();

}  // namespace sim
