// `ds_npu sim --trace FOLDER`: what each stream did and when. Each process writes a file FOLDER/PID.json, a line for each
// task once it is done, in Chrome's trace format; docs/simulator.md says what is in a line.
#pragma once

#include <cstdint>
#include <string>

#include "timeout.h"
#include "work.h"

namespace sim {

bool tracing();

struct Span {
  int device;
  int stream;
  std::uint64_t place;        // among the tasks of this process, in the order in which the host put them on streams
  const char* name;
  const std::string& detail;  // which event, which message
  const Account& account;
  Clock::time_point begun;
  Clock::time_point ended;
};

// Only while `tracing()`. Throws Failure when the file cannot be written.
void trace(const Span& span);

}  // namespace sim
