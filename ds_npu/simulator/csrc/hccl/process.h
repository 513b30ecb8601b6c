// Another process on this machine, and whether it has ended.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>

namespace sim::hccl {

// A process is known by its pid and the time it started, so that a reused pid is not taken for it.
struct ProcessId {
  pid_t pid = 0;
  std::uint64_t started = 0;  // clock ticks after boot

  static ProcessId own();
  bool operator==(const ProcessId&) const = default;
  auto operator<=>(const ProcessId&) const = default;
};

// Opens file number `file` of the process anew; throws Failure HCCL_E_REMOTE.
int open_file_of(pid_t pid, int file);

class Process {
 public:
  explicit Process(ProcessId id);
  ~Process();
  Process(const Process&) = delete;

  bool exited() const;  // also while it is a zombie

 private:
  int descriptor_;  // -1: had ended before this was made
};

}  // namespace sim::hccl
